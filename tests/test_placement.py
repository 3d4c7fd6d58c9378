# SPDX-License-Identifier: Apache-2.0
"""Buffers become arrays: on a CPU without a copy, elsewhere part by part in little host memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from reading import assert_same_bits, read

from firstlight import placement
from firstlight.compile import Compiler
from firstlight.errors import CheckpointError
from firstlight.executable_cache import ExecutableCache
from firstlight.models.params import named_leaves
from firstlight.placement import place, put_copy
from firstlight.sharding import make_mesh, param_shardings
from firstlight.timeline import Timeline, by_name
from firstlight.weights.buffers import ALIGNMENT, MAPPED_BYTES, Buffer
from firstlight.weights.folder import open_model
from firstlight.weights.load import Reading

MESH = make_mesh()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("model") / "m")


class TestBuffers:
    @pytest.mark.parametrize("size", [1, 63, 1000, MAPPED_BYTES])
    def test_are_aligned(self, size: int) -> None:
        for _ in range(20):
            assert Buffer(size, np.dtype(np.float32)).array.ctypes.data % ALIGNMENT == 0

    def test_memory_that_is_given_back_is_gone_from_the_process(self) -> None:
        def resident() -> int:
            fields = Path("/proc/self/statm").read_text().split()
            return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

        size = 64 << 20
        buffer = Buffer(size, np.dtype(np.uint8))
        before = resident()
        buffer.array[:] = 1
        assert resident() - before > size * 3 // 4
        buffer.give_back(0, size // 2)
        assert resident() - before < size * 3 // 4
        assert not buffer.array[: size // 2].any() and buffer.array[size // 2 :].all()
        buffer.give_back(size // 2, size)
        assert resident() - before < size // 4


def test_on_a_cpu_the_buffer_is_the_array(folder: Path, monkeypatch) -> None:
    model = open_model(folder, dtype="bfloat16")
    buffers: dict[str, int] = {}
    whole = Reading.whole

    def remember(self: Reading, path: str) -> np.ndarray:
        buffer = whole(self, path)
        buffers[path] = buffer.ctypes.data
        return buffer

    monkeypatch.setattr(Reading, "whole", remember)
    shardings = param_shardings(model.specs["transformer"], MESH)
    reading = Reading(model.plans["transformer"])
    arrays = dict(
        named_leaves(place(reading, shardings, Compiler(MESH, None), Timeline.from_now()))
    )
    assert arrays.keys() == buffers.keys()
    for path, array in arrays.items():
        assert array.unsafe_buffer_pointer() == buffers[path], path


@pytest.mark.parametrize("put", [None, put_copy], ids=["aliased", "staged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("component", ["text_encoder", "transformer", "vae"])
def test_values_and_shardings(folder: Path, put: object, dtype: str, component: str) -> None:
    model = open_model(folder, dtype=dtype)
    plan, specs = model.plans[component], model.specs[component]
    shardings = param_shardings(specs, MESH)
    reading = Reading(plan, budget=16_000)
    tree = place(reading, shardings, Compiler(MESH, None), Timeline.from_now(), put=put)
    where = dict(named_leaves(shardings))
    arrays = dict(named_leaves(tree))
    assert_same_bits({path: np.asarray(array) for path, array in arrays.items()}, read(plan))
    assert all(array.sharding == where[path] for path, array in arrays.items())


class SlowDevices:
    """Transfers that take their time, and a count of the bytes that are on their way."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = self.most = self.transfers = 0
        self._lock = threading.Lock()

    def put(self, array: np.ndarray, sharding: object) -> jax.Array:
        made = put_copy(array, sharding)
        with self._lock:
            self.transfers += 1
            self.now += array.nbytes
            self.most = max(self.most, self.now)
        return _Arriving(made, self, array.nbytes, time.monotonic() + self.seconds)


class _Arriving:
    def __init__(self, array, devices, nbytes: int, when: float) -> None:
        self.array, self._devices, self._nbytes, self._when = array, devices, nbytes, when

    def is_ready(self) -> bool:
        return time.monotonic() >= self._when

    def block_until_ready(self) -> None:
        time.sleep(max(0.0, self._when - time.monotonic()))
        with self._devices._lock:
            self._devices.now -= self._nbytes


@pytest.mark.parametrize("budget", [40_000, 100_000])
def test_slow_transfers_hold_no_more_than_the_budget(
    folder: Path, monkeypatch, budget: int
) -> None:
    """The reader is far ahead of the devices, and still no more lies in the host's memory."""
    model = open_model(folder, dtype="float32")
    plan = model.plans["transformer"]
    devices = SlowDevices(0.002)
    write = placement._Staged._write
    monkeypatch.setattr(
        placement._Staged, "_write", lambda self, part, rows: write(self, part, rows.array)
    )
    reading = Reading(plan, budget=budget)
    shardings = param_shardings(model.specs["transformer"], MESH)
    compiler = Compiler(MESH, None)
    tree = place(reading, shardings, compiler, Timeline.from_now(), put=devices.put)
    arrays = {
        path: np.asarray(leaf.array if isinstance(leaf, _Arriving) else leaf)
        for path, leaf in named_leaves(tree)
    }
    assert_same_bits(arrays, read(plan))
    assert devices.now == 0 and devices.transfers > len(plan.specs)
    assert devices.most <= reading.most_held <= budget < plan.nbytes


def test_programs_that_write_parts_are_kept(folder: Path, tmp_path: Path) -> None:
    """The second start compiles none of them."""
    model = open_model(folder, dtype="float32")
    compiled = []
    for _ in range(2):
        compiler = Compiler(MESH, ExecutableCache.open(tmp_path / "kept"))
        shardings = param_shardings(model.specs["transformer"], MESH)
        reading = Reading(model.plans["transformer"], budget=16_000)
        tree = place(reading, shardings, compiler, Timeline.from_now(), put=put_copy)
        compiler.flush()
        compiled.append((compiler.compiled, compiler.loaded))
        values = {path: np.asarray(array) for path, array in named_leaves(tree)}
        assert_same_bits(values, read(model.plans["transformer"]))
    (made, none), (zero, loaded) = compiled
    assert made == loaded > 0 and none == zero == 0


def slow_reads(monkeypatch, seconds: float) -> None:
    preadv = os.preadv

    def slow(handle: int, buffers, offset: int) -> int:
        time.sleep(seconds)
        return preadv(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)


def test_waiting_for_slow_reads_is_on_the_critical_path(folder: Path, monkeypatch) -> None:
    model = open_model(folder, dtype="float32")
    plan = model.plans["text_encoder"]
    slow_reads(monkeypatch, 0.01)
    timeline = Timeline.from_now()
    from firstlight.weights.plan import merged

    reading = Reading(merged({"text_encoder": plan}), threads=1, timeline=timeline)
    shardings = {"text_encoder": param_shardings(model.specs["text_encoder"], MESH)}
    place(reading, shardings, Compiler(MESH, None), timeline)
    seconds = by_name(timeline.critical_path())
    assert max(seconds, key=lambda name: seconds[name]) == "read text_encoder"
    assert seconds["read text_encoder"] >= 0.01 * len(plan.pieces) * 0.9


def test_a_failure_stops_the_reading(folder: Path, tmp_path: Path, monkeypatch) -> None:
    """No thread goes on, and no file stays open."""
    copy = tiny.write_model(tmp_path / "m")
    model = open_model(copy, dtype="float32")
    before = len(os.listdir("/proc/self/fd"))
    reading = Reading(model.plans["transformer"], budget=1)
    path = copy / "transformer" / "diffusion_pytorch_model.safetensors"
    os.truncate(path, 20_000)
    shardings = param_shardings(model.specs["transformer"], MESH)
    with pytest.raises(CheckpointError, match="was changed while it was being loaded"):
        place(reading, shardings, Compiler(MESH, None), Timeline.from_now())
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [t for t in threading.enumerate() if t.name.startswith("firstlight-read")]
