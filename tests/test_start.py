# SPDX-License-Identifier: Apache-2.0
"""Reading, compiling and importing go on at the same time, and change no bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import tiny

from firstlight import Pipeline
from firstlight.compile import Compiler
from firstlight.errors import CheckpointError, ConfigError
from firstlight.start import Layout
from firstlight.timeline import Timeline, by_name, limit
from firstlight.weights.loading import Loading

PROMPT = "a fox"


def interval(timeline: Timeline, prefix: str) -> tuple[float, float]:
    spans = [s for s in timeline.spans if s.name.startswith(prefix)]
    return min(s.begin for s in spans), max(s.end or s.begin for s in spans)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_model(
        tmp_path_factory.mktemp("model") / "m", model_index={"default_size": 16}
    )


def test_programs_compile_while_slow_weights_are_read(folder: Path, monkeypatch) -> None:
    """The storage delivers the rest only when all is compiled: who compiled after reading would
    wait for ever, and who is ready is ready with the last byte."""
    compiled, preadv, make, left = threading.Event(), os.preadv, Compiler._make, [4]

    def slow(handle: int, buffers, offset: int) -> int:
        compiled.wait(120)
        return preadv(handle, buffers, offset)

    def count(self: Compiler, program):
        made = make(self, program)
        left[0] -= 1
        if left[0] == 0:
            compiled.set()
        return made

    monkeypatch.setattr(os, "preadv", slow)
    monkeypatch.setattr(Compiler, "_make", count)
    layout = Layout(sizes=[(64, 64)], executable_cache=False)
    pipe = Pipeline.from_loading(Loading(folder), layout)
    assert compiled.is_set()
    reading, compiling = interval(pipe.timeline, "read "), interval(pipe.timeline, "compile ")
    assert reading[0] < compiling[0] < compiling[1] < reading[1]
    seconds = by_name(pipe.timeline.critical_path())
    assert not [name for name in seconds if name.startswith("compile ")]
    assert limit(pipe.timeline.critical_path()).startswith("read ")


def test_weights_are_read_while_programs_compile(folder: Path) -> None:
    pipe = Pipeline.from_pretrained(folder, sizes=[(64, 64)], executable_cache=False)
    reading, compiling = interval(pipe.timeline, "read "), interval(pipe.timeline, "compile ")
    assert reading[1] < compiling[1]
    seconds = by_name(pipe.timeline.critical_path())
    assert max(seconds, key=lambda name: seconds[name]).startswith("compile ")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_no_way_of_loading_changes_a_bit(folder: Path, dtype: str, monkeypatch) -> None:
    pictures = set()

    def draw(pipe: Pipeline) -> None:
        made = pipe(PROMPT, seed=1, height=64, width=64, num_inference_steps=2)
        pictures.add(made.images[0].tobytes())

    draw(Pipeline.from_pretrained(folder, dtype=dtype, sizes=[]))
    for threads in (1, 3, 16):
        loading = Loading(folder, dtype=dtype, read_threads=threads, staging_bytes=1 << 20)
        while not loading.begun():  # all of it is read before anybody asks
            time.sleep(0.01)
        draw(Pipeline.from_loading(loading, Layout(sizes=[])))
    assert len(pictures) == 1


@pytest.mark.parametrize("settings", [{"mesh": "data=99"}, {"images_per_device": 0}])
def test_a_refused_layout_stops_the_reading(folder: Path, settings: dict) -> None:
    loading = Loading(folder)
    with pytest.raises(ConfigError):
        Pipeline.from_loading(loading, Layout(**settings))
    assert loading.take_reading() is None
    while not loading.begun():
        time.sleep(0.01)
    handles = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
               if os.path.exists(f"/proc/self/fd/{n}")]  # fmt: skip
    assert not [name for name in handles if name.startswith(str(folder))]


def test_errors_of_the_background_come_to_who_waits(tmp_path: Path) -> None:
    loading = Loading(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="absent"):
        loading.folder()
    with pytest.raises(CheckpointError, match="absent"):
        Pipeline.from_loading(loading, Layout())


def test_reading_begins_before_jax_is_imported(tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "firstlight", "generate", "a fox", "--steps", "1", "--json",
        "--quiet", "--output", str(tmp_path / "fox.png"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    timings = json.loads(done.stdout)["timings"]
    spans = {span["name"]: span for span in timings["spans"]}
    imports = spans["imports"]
    assert spans["resolve"]["begin"] < imports["begin"] + imports["seconds"]
    assert spans["read text_encoder"]["begin"] < spans["devices"]["begin"]
    assert sum(s for _, s in timings["critical_path"]) == pytest.approx(timings["total"])
    assert timings["policy"] == "all" and "parameters need" in timings["memory"]
