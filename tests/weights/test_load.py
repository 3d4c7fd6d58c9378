# SPDX-License-Identifier: Apache-2.0
"""Weights arrive bit for bit, each byte is read once, and nothing else is."""

from __future__ import annotations

import dataclasses
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tiny
from reading import all_of, assert_same_bits, read
from safetensors.numpy import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.timeline import Timeline
from firstlight.weights import load, reader
from firstlight.weights.folder import open_model
from firstlight.weights.load import Reading
from firstlight.weights.plan import merged

BFLOAT16 = ml_dtypes.bfloat16


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
            list(load.read(plan, chunk_bytes=chunk_bytes, on_bytes=told.append))
        needed = sum(plan.nbytes for plan in model.plans.values())
        assert reads.total == sum(told) == needed
        ranges = sorted(reads.ranges)
        for (file, start, count), (other, following, _) in pairwise(ranges):
            assert file != other or start + count <= following

    def test_only_what_the_taps_need_is_touched(self, folder: Path, reads: Reads) -> None:
        """Layers 2 and 3, the final norm and the language head of a 4-layer encoder, taps 1, 2."""
        model = open_model(folder, dtype="float32")
        read(model.plans["text_encoder"])
        tensors = reader.read_header(folder / "text_encoder/model.safetensors").tensors
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
            for t in reader.read_header(folder / "vae/diffusion_pytorch_model.safetensors").tensors
            if t.name.startswith(("encoder.", "quant_conv."))
        )
        whole = open_model(folder, dtype="float32").plans["vae"].nbytes
        assert encoder > 0 and reads.total == plan.nbytes == whole - encoder

    def test_rows_whose_columns_part_are_read_whole(self, folder: Path, reads: Reads) -> None:
        """Attention and MLP columns of one matrix: one read of it, not one for each row."""
        model = open_model(folder, dtype="float32")
        read(model.plans["transformer"])
        header = reader.read_header(folder / "transformer/diffusion_pytorch_model.safetensors")
        (tensor,) = [
            t for t in header.tensors if t.name == "single_transformer_blocks.1.attn.to_out.weight"
        ]
        assert ("transformer", tensor.offset, tensor.nbytes) in reads.ranges

    def test_part_of_the_tree_that_is_not_there(self, folder: Path) -> None:
        with pytest.raises(ValueError, match="no parameters are called decodr"):
            open_model(folder, dtype="float32").plans["vae"].only("decodr", "stats")


class TestAhead:
    """How much is read before it is asked for."""

    @pytest.mark.parametrize("budget", [1, 20_000, 60_000])
    def test_no_more_than_the_budget_is_held(self, folder: Path, budget: int) -> None:
        """Whoever gives every part back gets all of them, the values right, within the budget."""
        plan = open_model(folder, dtype="float32").plans["transformer"]
        wanted = read(plan)
        reading = Reading(plan, budget=budget)
        largest = max(spec.nbytes // spec.shape[0] for spec in plan.specs.values())
        seen: dict[str, list[np.ndarray]] = {}
        while (part := reading.take()) is not None:
            seen.setdefault(part.path, []).append(reading.array(part).copy())
            reading.give_back(part)
        found = {path: np.concatenate(parts) for path, parts in seen.items()}
        assert_same_bits(found, wanted)
        # Two parameters share the rows of one matrix: both must be held, however small the budget.
        assert reading.most_held <= max(budget, 2 * largest)
        assert budget > 1 or any(len(parts) > 1 for parts in seen.values())

    def test_reading_waits_for_room(self, folder: Path, reads: Reads) -> None:
        plan = open_model(folder, dtype="float32").plans["transformer"]
        reading = Reading(plan, budget=30_000)
        taken = []
        while not reading.waits():
            part = reading.take()
            assert part is not None
            taken.append(part)
        stopped = reads.total
        assert stopped <= 30_000 + plan.nbytes // 10 and stopped < plan.nbytes
        for part in taken:
            reading.give_back(part)
        assert not reading.waits()
        reading.close()

    def test_a_lifted_budget_reads_everything(self, folder: Path, reads: Reads) -> None:
        plan = open_model(folder, dtype="float32").plans["transformer"]
        reading = Reading(plan, budget=1)
        reading.lift_budget()
        while reading.take() is not None:
            pass
        assert reads.total == plan.nbytes

    def test_every_component_has_its_span(self, folder: Path) -> None:
        model = open_model(folder, dtype="float32")
        plan = merged(model.plans)
        timeline = Timeline.from_now()
        read(plan, timeline=timeline)
        spans = {span.name: span for span in timeline.spans}
        assert set(spans) == {f"read {name}" for name in model.plans}
        for name, part in model.plans.items():
            assert spans[f"read {name}"].facts["bytes"] == part.nbytes

    def test_who_stops_early_stops_the_reading(self, folder: Path, reads: Reads) -> None:
        plan = open_model(folder, dtype="float32").plans["transformer"]
        buffers = load.read(plan, threads=1, chunk_bytes=64)
        next(buffers)
        buffers.close()
        assert 0 < reads.total < plan.nbytes

    def test_a_plan_with_problems_is_not_read(self, folder: Path, reads: Reads) -> None:
        plan = open_model(folder, dtype="float32").plans["vae"]
        with pytest.raises(CheckpointError, match="x is missing"):
            read(dataclasses.replace(plan, problems=["x is missing"]))
        assert reads.ranges == []

    def test_counter_adds_up_over_threads(self) -> None:
        told: list[int] = []
        counter = load.Counter(told.append)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(counter.add, range(1000)))
        assert told == sorted(told) and told[-1] == counter.total == 499_500
