# SPDX-License-Identifier: Apache-2.0
"""Weight files and indexes that are damaged, missing or at odds with each other."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from damage import QKV, TEXT, TRANSFORMER, VAE, change, problems, rewrite_header
from safetensors.numpy import load_file, save_file

from firstlight.weights.folder import open_model

pytestmark = pytest.mark.usefixtures("no_weight_is_read")


class TestFiles:
    def test_truncated(self, model: Path) -> None:
        path = model / TRANSFORMER
        size = path.stat().st_size
        os.truncate(path, size - 5)
        (problem,) = problems(model)
        assert f"{TRANSFORMER} is cut off: {size - 5} bytes; {size} are expected" in problem

    def test_padded(self, model: Path) -> None:
        path = model / VAE
        size = path.stat().st_size
        os.truncate(path, size + 3)
        (problem,) = problems(model)
        assert f"{VAE} is longer than its header says: {size + 3} bytes; {size} are" in problem

    @pytest.mark.parametrize("content", [b"", b"\x01\x02\x03"])
    def test_too_short(self, model: Path, content: bytes) -> None:
        (model / TEXT).write_bytes(content)
        (problem,) = problems(model)
        assert f"{TEXT} has {len(content)} bytes; a safetensors file has at least 8" in problem

    def test_header_longer_than_the_file(self, model: Path) -> None:
        path = model / TEXT
        path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])
        (problem,) = problems(model)
        assert f"{TEXT}: the header says it is {1 << 40} bytes long" in problem

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b"\xff\xfe", "the header is no JSON"),
            (b"{", "the header is no JSON"),
            (b"[]", "the header is no JSON object"),
            (b"[" * 200_000, "the header is no JSON"),
        ],
    )
    def test_header_is_no_json(self, model: Path, header: bytes, message: str) -> None:
        rewrite_header(model / TEXT, lambda _: header)
        (problem,) = problems(model)
        assert problem.startswith(f"{TEXT}: {message}")

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            {"dtype": "F32", "shape": [1]},
            {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1], "data_offsets": [0]},
            {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
            {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": {}, "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1], "data_offsets": 4},
            {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        ],
    )
    def test_malformed_entry(self, model: Path, entry: object) -> None:
        rewrite_header(model / TEXT, lambda header: header.update({"model.norm.weight": entry}))
        (problem,) = problems(model)
        assert problem.startswith(f"{TEXT}: model.norm.weight ")

    def test_every_malformed_entry_is_told(self, model: Path) -> None:
        names = ["model.norm.weight", "model.embed_tokens.weight"]
        rewrite_header(model / TEXT, lambda header: header.update(dict.fromkeys(names, 3)))
        assert sorted(problems(model)) == sorted(
            f"{TEXT}: {name} has a malformed header entry 3" for name in names
        )

    def test_gap_between_tensors(self, model: Path) -> None:
        path, last = model / TEXT, "model.norm.weight"
        values = load_file(path)
        rest = {name: value for name, value in values.items() if name != last}
        save_file(rest, path)
        end = sum(value.nbytes for value in rest.values())
        entry = {"dtype": "F32", "shape": [16], "data_offsets": [end + 4, end + 68]}
        rewrite_header(path, lambda header: header.update({last: entry}))
        path.write_bytes(path.read_bytes() + bytes(68))
        (problem,) = problems(model)
        assert problem.startswith(f"{TEXT}: {last} begins at byte ")
        assert "is expected (tensors overlap or leave a gap)" in problem

    def test_a_damaged_file_hides_no_other_fault(self, model: Path) -> None:
        """The header of a file that is cut off can still be compared with the architecture."""
        change(model, VAE, lambda v: v.update({"decoder.extra.weight": np.zeros((2, 3), "f4")}))
        os.truncate(model / VAE, (model / VAE).stat().st_size - 1)
        cut, unknown = problems(model)
        assert "is cut off" in cut and "decoder.extra.weight" in unknown

    def test_overlapping_tensors(self, model: Path) -> None:
        def overlap(header: dict) -> None:
            first, second = "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"
            header[second]["data_offsets"] = [
                header[first]["data_offsets"][0],
                header[first]["data_offsets"][0] + 64,
            ]

        rewrite_header(model / TEXT, overlap)
        (problem,) = problems(model)
        assert problem.startswith(TEXT) and "overlap or leave a gap" in problem

    def test_folder_without_weights(self, model: Path) -> None:
        (model / VAE).unlink()
        (problem,) = problems(model)
        assert problem == f"{VAE} is missing, and so is {Path(VAE).name}.index.json"

    def test_weights_of_another_name(self, model: Path) -> None:
        (model / VAE).rename(model / "vae" / "flux2-vae.safetensors")
        (problem,) = problems(model)
        assert problem.endswith("index.json; flux2-vae.safetensors has another name")

    @pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.ckpt", "x.pt"])
    def test_pickled_weights_are_refused(self, model: Path, name: str) -> None:
        (model / VAE).rename(model / "vae" / name)
        (problem,) = problems(model)
        assert f"({name}: pickled weights are code and are refused)" in problem


class TestShards:
    INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
    SHARD = "diffusion_pytorch_model-00002-of-00003.safetensors"

    def edit_map(self, folder: Path, edit: Callable[[dict], object]) -> None:
        path = folder / self.INDEX
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_good(self, sharded: Path) -> None:
        open_model(sharded, dtype="bfloat16")

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "transformer" / self.SHARD).unlink()
        assert problems(sharded) == (
            f"transformer/{self.SHARD} is missing; {Path(self.INDEX).name} names it",
        )

    def test_index_names_absent_files(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({QKV: "absent.safetensors"}))
        found = problems(sharded)
        assert f"transformer/absent.safetensors is missing; {Path(self.INDEX).name}" in found[0]

    def test_tensor_is_not_in_its_shard(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({"ghost.weight": self.SHARD}))
        assert problems(sharded) == (
            f"transformer/{self.SHARD}: ghost.weight is not in it; {Path(self.INDEX).name} says so",
        )

    def test_tensor_is_not_in_the_index(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.pop(QKV))
        (problem,) = problems(sharded)
        assert problem.endswith(f"{QKV} is not listed in {Path(self.INDEX).name}")

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}'])
    def test_unreadable_index(self, sharded: Path, content: str) -> None:
        (sharded / self.INDEX).write_text(content)
        (problem,) = problems(sharded)
        assert problem.startswith(self.INDEX)

    def test_index_cannot_point_out_of_the_folder(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({QKV: "../vae/x.safetensors"}))
        (problem,) = problems(sharded)
        assert "a file name in the same folder is needed" in problem

    def test_a_missing_shard_hides_no_other_fault(self, sharded: Path) -> None:
        """What the other shards hold is compared all the same; what is lost is told once."""
        first, third = (self.SHARD.replace("00002-", f"0000{n}-") for n in (1, 3))
        (sharded / "transformer" / self.SHARD).unlink()
        file = f"transformer/{third}"
        name = sorted(load_file(sharded / file))[0]
        change(sharded, file, lambda v: v.update({name: np.zeros((1, 1, 1), "f4")}))
        os.truncate(sharded / "vae" / third, 4)
        change(sharded, f"text_encoder/{first.replace('diffusion_pytorch_', '')}", dict.clear)
        found = problems(sharded)
        assert f"transformer/{self.SHARD} is missing; {Path(self.INDEX).name} names it" in found
        assert sum(file in p and "has shape [1, 1, 1]" in p for p in found) == 1
        assert sum(p.startswith(f"vae/{third} has 4 bytes") for p in found) == 1
        others = [p for p in found if not p.startswith("text_encoder/")]
        assert len(others) == 3
        assert all("is not in it; model.safetensors.index.json" in p for p in found[: -len(others)])

    def test_tensor_is_in_two_shards(self, sharded: Path) -> None:
        first = self.SHARD.replace("00002-", "00001-")
        name = next(iter(load_file(sharded / "transformer" / first)))
        change(sharded, f"transformer/{self.SHARD}", lambda v: v.update({name: np.zeros(3, "f4")}))
        assert problems(sharded) == (f"transformer/{self.SHARD}: {name} is in {first} too",)

    def test_both_a_single_file_and_an_index(self, sharded: Path) -> None:
        tiny.write_tensors(
            sharded / "transformer", "diffusion_pytorch_model", {"x": np.zeros(1, "f4")}
        )
        assert problems(sharded) == (
            f"{TRANSFORMER} and {Path(self.INDEX).name} are both there; remove one",
        )

    def test_damaged_shard_is_told_once(self, sharded: Path) -> None:
        path = sharded / "transformer" / self.SHARD
        os.truncate(path, path.stat().st_size - 1)
        (problem,) = problems(sharded)
        assert problem.startswith(f"transformer/{self.SHARD} is cut off")
