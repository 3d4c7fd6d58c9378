# SPDX-License-Identifier: Apache-2.0
"""Whole starts in processes of their own, first and second, beside what nobody can avoid."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from firstlight.errors import FirstlightError
from firstlight.timeline import summed
from firstlight.weights import storage
from firstlight.weights.folder import open_model
from firstlight.weights.hub import resolve
from firstlight.weights.loading import needed

PROMPT = "a red apple on a blue background"
FLOOR = "import jax; jax.devices()"
FIRST, SECOND = "first start", "second start"


@dataclass(frozen=True, kw_only=True)
class ColdRun:
    """What is measured. `flags` are passed on to `firstlight generate`."""

    model: str
    dtype: str
    runs: int
    evict: bool
    flags: tuple[str, ...] = ()


@dataclass
class Measured:
    """Figures of each run, in order."""

    floor: list[float] = field(default_factory=list)
    raw_bytes: int = 0
    raw_seconds: list[float] = field(default_factory=list)
    starts: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {FIRST: [], SECOND: []})
    evicted: bool = False


def measure(run: ColdRun, note: Callable[[str], None]) -> Measured:
    """Run floor, raw read, first and second start in turn, `run.runs` times.

    Raises FirstlightError, with what it printed, if a start fails.
    """
    found = resolve(run.model)
    folder = open_model(found.path, dtype=run.dtype, name=found.name)
    plan = needed(folder)
    made = Measured()
    with tempfile.TemporaryDirectory() as place:
        for number in range(run.runs):
            note(f"round {number + 1} of {run.runs}")
            cache = Path(place, f"executables-{number}")
            made.floor.append(_seconds([sys.executable, "-c", FLOOR]))
            for kind in (FIRST, SECOND):
                if run.evict:
                    made.evicted = storage.evict(plan.stamps)
                made.starts[kind].append(_start(run, cache, Path(place)))
            if run.evict:
                storage.evict(plan.stamps)
            made.raw_bytes, seconds = storage.raw_read(plan)
            made.raw_seconds.append(seconds)
            shutil.rmtree(cache, ignore_errors=True)
    if not run.evict:
        storage.remember(found.path, made.raw_bytes / min(made.raw_seconds))
    return made


def _seconds(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun


def _start(run: ColdRun, cache: Path, place: Path) -> dict[str, Any]:
    """One `firstlight generate` from its process's start to its end; its own account of it."""
    command = [
        sys.executable, "-m", "firstlight", "generate", PROMPT, "--model", run.model,
        "--dtype", run.dtype, "--seed", "1", "--json", "--quiet", "--overwrite",
        "--output", str(place / "picture.png"), "--executable-cache", str(cache), *run.flags,
    ]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTLIGHT_")}
    begun = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate()
    seconds = time.perf_counter() - begun
    if process.returncode:
        raise FirstlightError(f"a start failed: {err.strip() or process.returncode}")
    document = json.loads(out)
    return {"seconds": seconds, "repeat": document["repeat"], **document["timings"]}


def summary(made: Measured) -> dict[str, Any]:
    """Medians and ratios, JSON-able."""
    floor = statistics.median(made.floor)
    raw = statistics.median(made.raw_seconds)
    facts: dict[str, Any] = {
        "floor_seconds": floor,
        "raw_read": {
            "bytes": made.raw_bytes,
            "seconds": raw,
            "bytes_per_second": made.raw_bytes / raw,
        },
        "evicted": made.evicted,
    }
    for kind, starts in made.starts.items():
        seconds = [start["seconds"] for start in starts]
        middle = sorted(starts, key=lambda start: start["seconds"])[len(starts) // 2]
        facts[kind] = {
            "seconds": statistics.median(seconds),
            "all_seconds": seconds,
            "to_floor": statistics.median(seconds) / floor,
            "read_seconds": _read_seconds(middle),
            "compiled": sum(s["name"].startswith("compile ") for s in middle["spans"]),
            "unexplained": middle["unexplained"] / middle["total"],
            "limited_by": middle["limited_by"],
            "critical_path": middle["critical_path"],
        }
    return facts


def _read_seconds(start: dict[str, Any]) -> float:
    """From the first read's begin to the last one's end."""
    reads = [span for span in start["spans"] if span["lane"] == "read"]
    return max(s["begin"] + s["seconds"] for s in reads) - min(s["begin"] for s in reads)


def lines(facts: dict[str, Any]) -> list[str]:
    """The summary as a table."""
    raw = facts["raw_read"]
    made = [
        f"floor ({FLOOR}): {facts['floor_seconds']:.2f} s",
        f"raw sequential read{' (evicted before)' if facts['evicted'] else ''}: "
        f"{raw['bytes'] / 1e9:.2f} GB in {raw['seconds']:.2f} s, "
        f"{raw['bytes_per_second'] / 1e9:.2f} GB/s",
    ]
    for kind in (FIRST, SECOND):
        start = facts[kind]
        made += [
            f"{kind}: {start['seconds']:.2f} s, {start['to_floor']:.2f} x the floor; compiled "
            f"{start['compiled']} programs; read in {start['read_seconds']:.2f} s, "
            f"{start['read_seconds'] / raw['seconds']:.2f} x the raw read; limited by "
            f"{start['limited_by']}; unexplained {start['unexplained']:.1%}",
        ]
        path = summed(start["critical_path"])
        made += [f"  {seconds:8.3f} s  {name}" for name, seconds in path.items() if seconds > 5e-4]
    return made
