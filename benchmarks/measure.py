# SPDX-License-Identifier: Apache-2.0
"""Running commands as whole processes, alternately, and comparing them."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from dataclasses import dataclass, field


@dataclass
class Series:
    name: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def row(self, base: Series | None = None) -> str:
        low, high = min(self.seconds), max(self.seconds)
        text = f"{self.name:32} {self.median:8.2f} s  ({low:.2f}-{high:.2f}, n={len(self.seconds)})"
        text += f"  peak {max(self.peak_bytes) / 2**20:7.0f} MiB"
        return text if base is None else f"{text}  ratio {self.median / base.median:.3f}"


def run(series: Series, command: list[str], env: dict[str, str] | None = None) -> str:
    """Run `command` to its end, add its wall time and peak memory to `series`; its stdout.

    Raises subprocess.CalledProcessError, with what it printed, if it fails.
    """
    start = time.perf_counter()
    process = subprocess.Popen(
        command, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    series.seconds.append(time.perf_counter() - start)
    series.peak_bytes.append(usage.ru_maxrss * 1024)
    code = os.waitstatus_to_exitcode(status)
    process.returncode = code
    if code:
        raise subprocess.CalledProcessError(code, command, output)
    return output


def peak_memory() -> int:
    """Bytes: the most this process has had resident."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_memory() -> int:
    """Bytes: what this process has resident now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
