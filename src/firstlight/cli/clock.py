# SPDX-License-Identifier: Apache-2.0
"""Seconds since the operating system started this process, and the budget of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IMPORTED = time.perf_counter()


def process_seconds() -> float:
    """Return seconds since this process was started (resolution 10 ms).

    Where the system does not tell (not Linux), since this module was imported, which leaves out
    the start of the interpreter.
    """
    try:
        # The second field, the command's name, may contain spaces and parentheses.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])
        started = ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED


class Budget:
    """Where the time of a run went, from the start of the process on; its parts add up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"start": process_seconds()}
        self._zero = time.perf_counter() - self.seconds["start"]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the body; a part entered again adds up."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def close(self) -> dict[str, float]:
        """Return all parts, what none of them covered as `other`, and their sum as `total`."""
        total = time.perf_counter() - self._zero
        other = total - sum(self.seconds.values())
        return {**self.seconds, "other": max(other, 0.0), "total": total}
