# SPDX-License-Identifier: Apache-2.0
"""Weights arrive bit for bit, each byte is read once, and nothing else is."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.models.params import named_leaves
from firstlight.sharding import make_mesh, param_shardings
from firstlight.weights import reader
from firstlight.weights.folder import ModelFolder, open_model
from firstlight.weights.load import ALIGNMENT, Plan, aligned_empty
from firstlight.weights.place import place

BFLOAT16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("weights") / "model")


@dataclasses.dataclass
class Reads:
    """Every byte range that was read, by file name."""

    ranges: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)

    @property
    def total(self) -> int:
        return sum(count for _, _, count in self.ranges)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    made, lock, preadv = Reads(), threading.Lock(), os.preadv

    def spy(handle: int, buffers, offset: int) -> int:
        count = preadv(handle, buffers, offset)
        name = os.readlink(f"/proc/self/fd/{handle}")
        with lock:
            made.ranges.append((Path(name).parent.name, offset, count))
        return count

    monkeypatch.setattr(os, "preadv", spy)
    return made


def read(plan: Plan, **options: int) -> dict[str, np.ndarray]:
    return dict(plan.read(**options))


def all_of(model: ModelFolder, **options: int) -> dict[str, np.ndarray]:
    return {
        f"{component}.{path}": array
        for component, plan in model.plans.items()
        for path, array in read(plan, **options).items()
    }


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert value.dtype == b[path].dtype and value.shape == b[path].shape
        assert value.tobytes() == b[path].tobytes(), path


def test_each_parameter_is_the_tensor_it_should_be(folder: Path) -> None:
    """Against the file, spelled out by hand for every kind of rule."""
    model = open_model(folder, dtype="float32")
    files = {
        name: load_file(folder / name / f"{stem}.safetensors") for name, stem in tiny.STEMS.items()
    }
    tf, te, vae = files["transformer"], files["text_encoder"], files["vae"]
    found = all_of(model)
    expected = {
        "transformer.mod_img": tf["double_stream_modulation_img.linear.weight"].reshape(6, 32, 32),
        "transformer.double.txt.qkv": np.stack(
            [
                np.stack([tf[f"transformer_blocks.{n}.attn.add_{x}_proj.weight"] for x in "qkv"])
                for n in range(2)
            ]
        ).reshape(2, 3, 2, 16, 32),
        "transformer.double.img.out": np.stack(
            [tf[f"transformer_blocks.{n}.attn.to_out.0.weight"] for n in range(2)]
        ).reshape(2, 32, 2, 16),
        "text_encoder.layers.kv": np.stack(
            [
                np.stack([te[f"model.layers.{n}.self_attn.{x}_proj.weight"] for x in "kv"])
                for n in range(2)
            ]
        ).reshape(2, 2, 1, 8, 16),
        "text_encoder.layers.down": np.stack(
            [te[f"model.layers.{n}.mlp.down_proj.weight"] for n in range(2)]
        ),
        "vae.decoder.mid.attention.qkv_bias": np.stack(
            [vae[f"decoder.mid_block.attentions.0.to_{x}.bias"] for x in "qkv"]
        ),
        "vae.encoder.levels.0.resample.kernel": vae[
            "encoder.down_blocks.0.downsamplers.0.conv.weight"
        ],
        "vae.stats.var": vae["bn.running_var"],
    }
    for n in range(3):
        block = f"single_transformer_blocks.{n}.attn"
        fused, out = tf[f"{block}.to_qkv_mlp_proj.weight"], tf[f"{block}.to_out.weight"]
        for path, value in {
            "qkv": fused[:96].reshape(3, 2, 16, 32),
            "gate_up": fused[96:].reshape(2, 64, 32),
            "out_attention": out[:, :32].reshape(32, 2, 16),
            "out_mlp": out[:, 32:],
        }.items():
            np.testing.assert_array_equal(found[f"transformer.single.{path}"][n], value)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize("chunk_bytes", [7, 1000, 1 << 24])
def test_threads_and_chunks_change_no_bit(folder: Path, threads: int, chunk_bytes: int) -> None:
    model = open_model(folder, dtype="bfloat16")
    found = all_of(model, threads=threads, chunk_bytes=chunk_bytes)
    assert_same_bits(found, all_of(model, threads=4))


def test_shards_change_no_bit(folder: Path, tmp_path: Path) -> None:
    sharded = tiny.write_model(tmp_path / "sharded", shards=3)
    for dtype in ("bfloat16", "float32"):
        assert_same_bits(
            all_of(open_model(sharded, dtype=dtype)), all_of(open_model(folder, dtype=dtype))
        )


class TestDtypes:
    HALFWAY = np.asarray([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF], np.uint32)

    @pytest.mark.parametrize("stored", [np.float32, np.float16])
    def test_bfloat16_is_the_rounded_file(self, tmp_path: Path, stored: type) -> None:
        """Direct loading equals casting the whole file, ties to even included."""
        folder = tiny.write_model(tmp_path / "m", dtype=stored)
        path = folder / "transformer/diffusion_pytorch_model.safetensors"
        values = load_file(path)
        values["proj_out.weight"].reshape(-1)[:4] = self.HALFWAY.view(np.float32)
        save_file(values, path)
        direct = read(open_model(folder, dtype="bfloat16").plans["transformer"])
        full = read(open_model(folder, dtype="float32").plans["transformer"])
        for name, value in full.items():
            assert direct[name].tobytes() == value.astype(BFLOAT16).tobytes(), name
        if stored is np.float32:
            bits = direct["out"].reshape(-1)[:4].view(np.uint16)
            assert [hex(b) for b in bits] == ["0x3f80", "0x3f82", "0x3f81", "0x3f80"]

    def test_bfloat16_file_to_float32_is_exact(self, tmp_path: Path) -> None:
        folder = tiny.write_model(tmp_path / "m", dtype=BFLOAT16)
        wide = all_of(open_model(folder, dtype="float32"))
        narrow = all_of(open_model(folder, dtype="bfloat16"))
        for name, value in wide.items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(value, narrow[name].astype(np.float32), err_msg=name)

    def test_statistics_stay_float32(self, folder: Path) -> None:
        found = all_of(open_model(folder, dtype="bfloat16"))
        kinds = {path: value.dtype for path, value in found.items()}
        assert kinds["vae.stats.mean"] == kinds["vae.stats.var"] == np.float32
        del kinds["vae.stats.mean"], kinds["vae.stats.var"]
        assert set(kinds.values()) == {np.dtype(BFLOAT16)}


class TestBytes:
    @pytest.mark.parametrize("chunk_bytes", [64, 1 << 24])
    def test_each_needed_byte_is_read_once(self, folder, reads: Reads, chunk_bytes: int) -> None:
        model = open_model(folder, dtype="bfloat16")
        told: list[int] = []
        for plan in model.plans.values():
            list(plan.read(chunk_bytes=chunk_bytes, on_bytes=told.append))
        needed = sum(plan.nbytes for plan in model.plans.values())
        assert reads.total == sum(told) == needed
        ranges = sorted(reads.ranges)
        for (file, start, count), (other, following, _) in pairwise(ranges):
            assert file != other or start + count <= following

    def test_only_what_the_taps_need_is_touched(self, folder: Path, reads: Reads) -> None:
        """Layers 2 and 3, the final norm and the language head of a 4-layer encoder, taps 1, 2."""
        model = open_model(folder, dtype="float32")
        read(model.plans["text_encoder"])
        _, tensors = reader.read_header(folder / "text_encoder/model.safetensors")
        touched = {
            t.name
            for t in tensors
            for _, start, count in reads.ranges
            if start < t.offset + t.nbytes and t.offset < start + count
        }
        layers = {name for name in touched if name.startswith("model.layers.")}
        assert {name.split(".")[2] for name in layers} == {"0", "1"}
        assert touched - layers == {"model.embed_tokens.weight"}

    def test_final_norm_is_read_where_it_is_tapped(self, tmp_path: Path) -> None:
        folder = tiny.write_model(tmp_path / "m", model_index={"text_encoder_out_layers": [4, 0]})
        found = read(open_model(folder, dtype="float32").plans["text_encoder"])
        values = load_file(folder / "text_encoder/model.safetensors")
        np.testing.assert_array_equal(found["final_norm"], values["model.norm.weight"])
        assert found["layers.q"].shape[0] == 4

    def test_decoder_alone(self, folder: Path, reads: Reads) -> None:
        plan = open_model(folder, dtype="float32").plans["vae"].only("decoder", "stats")
        found = read(plan)
        assert all(path.startswith(("decoder.", "stats.")) for path in found)
        encoder = sum(
            t.nbytes
            for t in reader.read_header(folder / "vae/diffusion_pytorch_model.safetensors")[1]
            if t.name.startswith(("encoder.", "quant_conv."))
        )
        whole = open_model(folder, dtype="float32").plans["vae"].nbytes
        assert encoder > 0 and reads.total == plan.nbytes == whole - encoder


class TestPlacing:
    @pytest.mark.parametrize("size", [1, 63, 1000])
    def test_buffers_are_aligned(self, size: int) -> None:
        for _ in range(20):
            assert aligned_empty(size, np.dtype(np.float32)).ctypes.data % ALIGNMENT == 0

    def test_on_a_cpu_the_buffer_is_the_array(self, folder, monkeypatch) -> None:
        plan = open_model(folder, dtype="bfloat16").plans["transformer"]
        specs = open_model(folder, dtype="bfloat16").specs["transformer"]
        buffers: dict[str, int] = {}

        def remember(self: Plan, **options: object) -> Iterator[tuple[str, np.ndarray]]:
            for path, buffer in original(self, **options):
                buffers[path] = buffer.ctypes.data
                yield path, buffer

        original = Plan.read
        monkeypatch.setattr(Plan, "read", remember)
        tree = place(plan, param_shardings(specs, make_mesh()))
        arrays = dict(named_leaves(tree))
        assert arrays.keys() == buffers.keys()
        for path, array in arrays.items():
            assert array.unsafe_buffer_pointer() == buffers[path], path

    def test_values_and_shardings(self, folder: Path) -> None:
        model = open_model(folder, dtype="float32")
        for component, plan in model.plans.items():
            shardings = param_shardings(model.specs[component], make_mesh())
            tree = place(plan, shardings)
            wanted, where = read(plan), dict(named_leaves(shardings))
            for path, array in named_leaves(tree):
                np.testing.assert_array_equal(np.asarray(array), wanted[path])
                assert array.sharding == where[path]
            assert isinstance(jax.tree.leaves(tree)[0], jax.Array)


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
        buffers = plan.read(threads=1)
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
        unfinished = plan.read()
        next(unfinished)
        unfinished.close()
        assert len(os.listdir("/proc/self/fd")) == before
