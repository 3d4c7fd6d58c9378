# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of the real sizes, and the measuring of whole starts."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import tiny
from reading import all_of, assert_same_bits

from firstlight.bench import make
from firstlight.bench.cold import FIRST, SECOND, ColdRun, lines, measure, summary
from firstlight.bench.make import make_checkpoint, tensor_shapes
from firstlight.bench.real_sizes import REAL_SIZES
from firstlight.errors import ConfigError
from firstlight.weights import storage
from firstlight.weights.folder import open_model


def small() -> dict:
    configs = copy.deepcopy(tiny.CONFIGS)
    configs["text_encoder"]["tie_word_embeddings"] = False
    return configs


@pytest.mark.parametrize(
    ("size", "transformer", "text_encoder"),
    [("4b", (3_875_544_576, 169), 4_022_468_096), ("9b", (9_078_581_248, 233), 8_190_735_360)],
)
def test_the_real_sizes_have_the_published_numbers(size, transformer, text_encoder) -> None:
    shapes = tensor_shapes(REAL_SIZES[size])
    counts = {k: sum(math.prod(s) for s in tensors.values()) for k, tensors in shapes.items()}
    assert (counts["transformer"], len(shapes["transformer"])) == transformer
    assert counts["text_encoder"] == text_encoder
    assert counts["vae"] == 84_046_372 - 1


def test_a_checkpoint_loads_and_is_the_same_each_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(make, "SHARD_BYTES", dict.fromkeys(make.SHARD_BYTES, 20_000))
    told: list[tuple[int, int]] = []
    nbytes = make_checkpoint(
        tmp_path / "a", "", configs=small(), on_bytes=lambda *told_: told.append(told_)
    )
    make_checkpoint(tmp_path / "b", "", configs=small())
    make_checkpoint(tmp_path / "c", "", configs=small(), seed=1)
    models = [open_model(tmp_path / name, dtype="bfloat16") for name in "abc"]
    a, b, c = (all_of(model) for model in models)
    assert_same_bits(a, b)
    assert any(a[path].tobytes() != c[path].tobytes() for path in a)
    values = a["transformer.single.qkv"].astype(np.float32)
    assert (np.abs(values) >= 1 / 64).all() and (np.abs(values) < 1 / 32).all()
    assert (a["text_encoder.layers.q_norm"] == 1).all()
    assert told[-1] == (nbytes, nbytes)
    assert len(list((tmp_path / "a" / "transformer").glob("*.safetensors"))) > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_folders_that_are_not_empty_and_unknown_sizes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="one that is empty or not there"):
        make_checkpoint(tmp_path / "full", "", configs=small())
    with pytest.raises(ConfigError, match="size is '5b'; 4b or 9b"):
        make_checkpoint(tmp_path / "new", "5b")
    with pytest.raises(ConfigError, match="there is no folder"):
        make_checkpoint(tmp_path / "absent" / "new", "", configs=small())
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_a_full_disk_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(make.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(ConfigError, match=r"16\.0 GB are needed, 0\.0 GB are free"):
        make_checkpoint(tmp_path / "new", "4b")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fail(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make, "_values", fail)
    with pytest.raises(OSError, match="No space"):
        make_checkpoint(tmp_path / "new", "", configs=small())
    assert list(tmp_path.iterdir()) == []


def test_a_raw_read_reads_what_a_start_reads(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m", shards=2)
    for plan in open_model(folder, dtype="float32").plans.values():
        nbytes, seconds = storage.raw_read(plan)
        assert nbytes == plan.nbytes and seconds > 0
        assert storage.evict(plan.stamps)


def test_the_measured_speed_is_remembered(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert storage.recall(tmp_path) is None
    storage.remember(tmp_path, 2e9)
    assert storage.recall(tmp_path) == 2e9
    (tmp_path / "firstlight" / "storage.json").write_text("[]")
    assert storage.recall(tmp_path) is None


def test_whole_starts_are_measured(monkeypatch, tmp_path: Path) -> None:
    """On the packaged model: the second start compiles nothing, and both explain themselves."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    notes: list[str] = []
    run = ColdRun(model="demo", dtype="bfloat16", runs=1, evict=False, flags=("--steps=1",))
    facts = json.loads(json.dumps(summary(measure(run, notes.append))))
    assert notes == ["round 1 of 1"]
    assert facts[FIRST]["compiled"] == 4 and facts[SECOND]["compiled"] == 0
    for kind in (FIRST, SECOND):
        path = facts[kind]["critical_path"]
        assert facts[kind]["seconds"] >= sum(seconds for _, seconds in path) > 0
    assert any("raw sequential read" in line for line in lines(facts))
    from firstlight.weights.hub import DEMO_FOLDER

    assert storage.recall(DEMO_FOLDER) == pytest.approx(facts["raw_read"]["bytes_per_second"])
