# SPDX-License-Identifier: Apache-2.0
"""Files that change between their check and the last read, or come in small portions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny
from reading import all_of, assert_same_bits, read

from firstlight.errors import CheckpointError
from firstlight.weights import load
from firstlight.weights.folder import open_model
from firstlight.weights.plan import Plan


class TestChangedFiles:
    PATH = "transformer/diffusion_pytorch_model.safetensors"

    def opened(self, tmp_path: Path) -> tuple[Path, Plan]:
        folder = tiny.write_model(tmp_path / "m")
        plan = open_model(folder, dtype="bfloat16").plans["transformer"]
        return folder / self.PATH, plan

    @pytest.mark.parametrize("how", ["replaced", "truncated", "rewritten", "removed"])
    def test_between_header_and_read(self, tmp_path: Path, how: str) -> None:
        path, plan = self.opened(tmp_path)
        content = path.read_bytes()
        if how == "replaced":
            (tmp_path / "new").write_bytes(content)
            os.replace(tmp_path / "new", path)
        elif how == "truncated":
            os.truncate(path, len(content) // 2)
        elif how == "rewritten":
            path.write_bytes(content)
            os.utime(path, ns=(1, 1))
        else:
            path.unlink()
        with pytest.raises(CheckpointError, match=self.PATH):
            read(plan)

    def test_truncated_while_reading(self, tmp_path: Path, monkeypatch) -> None:
        """The last read meets the end of the file."""
        path, plan = self.opened(tmp_path)
        preadv = os.preadv

        def cut(handle: int, buffers, offset: int) -> int:
            os.truncate(path, 20_000)
            return preadv(handle, buffers, offset)

        monkeypatch.setattr(os, "preadv", cut)
        with pytest.raises(CheckpointError, match="was changed while it was being loaded"):
            read(plan, threads=1)

    def test_replaced_while_reading(self, tmp_path: Path) -> None:
        path, plan = self.opened(tmp_path)
        buffers = load.read(plan, threads=1)
        next(buffers)
        (tmp_path / "new").write_bytes(path.read_bytes())
        os.replace(tmp_path / "new", path)
        with pytest.raises(CheckpointError, match="was changed while it was being loaded"):
            list(buffers)

    def test_short_reads_are_continued(self, folder: Path, monkeypatch) -> None:
        preadv = os.preadv
        model = open_model(folder, dtype="float32")
        whole = all_of(model)

        def short(handle: int, buffers, offset: int) -> int:
            return preadv(handle, [buffers[0][:33]], offset)

        monkeypatch.setattr(os, "preadv", short)
        assert_same_bits(all_of(model), whole)

    def test_no_handle_stays_open(self, folder: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        all_of(open_model(folder, dtype="float32"))
        plan = open_model(folder, dtype="float32").plans["vae"]
        unfinished = load.read(plan)
        next(unfinished)
        unfinished.close()
        assert len(os.listdir("/proc/self/fd")) == before
