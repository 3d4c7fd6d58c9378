# SPDX-License-Identifier: Apache-2.0
"""What is told on stderr: progress, warnings, errors. A bar on a terminal, else plain lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

from firstlight.config import ReportConfig
from firstlight.errors import FirstlightWarning
from firstlight.progress import Stage

_BYTES = ("download", "load")
_UNITS = {"compile": "programs", "encode": "prompts", "denoise": "steps"}
# A log shows that a long stage is alive, without a line for every advance. Chunks of files advance
# hundreds of times a second, so they get no line each even where every step does.
_SECONDS_BETWEEN_LINES = 5.0


def one_line(text: str) -> str:
    """Fold all white space, line breaks included, into single spaces."""
    return " ".join(text.split())


def tell(kind: str, text: str) -> None:
    """Print one line of the form `firstlight: error: ...` on stderr."""
    print(f"firstlight: {kind}: {one_line(text)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def show_warnings(*, quiet: bool) -> Iterator[None]:
    """Print every `FirstlightWarning` as one line instead of Python's two; none if `quiet`."""

    def show(message: Any, category: type, *rest: Any, **named: Any) -> None:
        if issubclass(category, FirstlightWarning):
            tell("warning", str(message))
        else:
            usual(message, category, *rest, **named)

    with warnings.catch_warnings():
        usual = warnings.showwarning
        warnings.showwarning = show
        if quiet:
            warnings.simplefilter("ignore")
        else:
            warnings.simplefilter("always", FirstlightWarning)
        yield


def describe(stage: Stage, done: int, total: int, seconds: float) -> str:
    """Put one advance into words: `load 21.0 of 42.1 MB, 350.2 MB/s`."""
    if stage in _BYTES:
        unit, name = (1e9, "GB") if total >= 1e9 else (1e6, "MB")
        rate = f", {done / seconds / 1e6:.0f} MB/s" if seconds > 1e-3 else ""
        return f"{stage} {done / unit:.1f} of {total / unit:.1f} {name}{rate}"
    return f"{stage} {done} of {total} {_UNITS.get(stage, 'pictures')}"


class Display:
    """A context manager around the work. This one tells nothing; see the classes below."""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def advance(self, stage: Stage, done: int, total: int) -> None:
        """Show where a stage stands: a `Progress`, called from any thread."""

    def note(self, text: str) -> None:
        """Show one line."""


def make_display(report: ReportConfig) -> Display:
    """Choose how progress is shown, from what was asked and from where stderr goes."""
    if report.quiet:
        return Display()
    if sys.stderr is not None and sys.stderr.isatty():
        return Bars()
    return Lines(every=report.verbose)


class Lines(Display):
    """One line for a finished stage, more where it is long; every advance if `every`."""

    def __init__(self, *, every: bool = False) -> None:
        self._every = every
        self._lock = threading.Lock()
        self._begun: dict[Stage, float] = {}
        self._told: dict[Stage, float] = {}

    def advance(self, stage: Stage, done: int, total: int) -> None:
        """Print a line if this advance is worth one."""
        now = time.perf_counter()
        with self._lock:
            running = stage in self._begun
            begun = self._begun.setdefault(stage, now)
            told = self._told.setdefault(stage, now)
            finished = done >= total
            if finished:
                del self._begun[stage], self._told[stage]
            # A stage without work (nothing to compile) is not worth a line.
            worth = finished and (running or total > 0)
            every = self._every and stage not in _BYTES
            if not (worth or every or now - told >= _SECONDS_BETWEEN_LINES):
                return
            if not finished:
                self._told[stage] = now
            took = f" in {now - begun:.2f} s" if finished and running else ""
            self.note(describe(stage, done, total, now - begun) + took)

    def note(self, text: str) -> None:
        """Print one line."""
        print(text, file=sys.stderr, flush=True)


class Bars(Display):
    """Bars drawn by rich. It is imported at the first advance, while weights are being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Any = None
        self._tasks: dict[Stage, Any] = {}
        self._begun: dict[Stage, float] = {}

    def __exit__(self, *failure: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def advance(self, stage: Stage, done: int, total: int) -> None:
        """Move the bar of this stage; a finished stage that begins again gets a new bar."""
        now = time.perf_counter()
        with self._lock:
            begun = self._begun.setdefault(stage, now)
            text = describe(stage, done, total, now - begun)
            if stage not in self._tasks:
                self._tasks[stage] = self._bars().add_task(text, total=max(total, 1))
            self._bars().update(
                self._tasks[stage], description=text, total=max(total, 1), completed=done
            )
            if done >= total:
                self._bars().update(self._tasks.pop(stage), completed=max(total, 1))
                del self._begun[stage]

    def note(self, text: str) -> None:
        """Print one line above the bars."""
        with self._lock:
            self._bars().console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _bars(self) -> Any:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            self._progress = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=Console(stderr=True),
            )
            self._progress.start()
        return self._progress
