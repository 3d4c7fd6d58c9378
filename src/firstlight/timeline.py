# SPDX-License-Identifier: Apache-2.0
"""What happened when since the process started, in lanes that overlap, and what limited it.

A lane is a thread, or a pool of threads that does one thing. A span is a piece of work on a lane;
a wait is a span in which a lane stands still until another span ends. From these two the critical
path follows: the main lane, with every wait replaced by the work that was waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAIN = "main"
UNEXPLAINED = "unexplained"
START = "process start"

_IMPORTED = time.perf_counter()


def process_seconds() -> float:
    """Return seconds since this process was started (resolution 10 ms).

    Where the system does not tell (not Linux), since this module was imported, which leaves out
    the start of the interpreter.
    """
    try:
        with open("/proc/self/stat", encoding="utf-8") as file:
            # The second field, the command's name, may contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED


@dataclass
class Span:
    """Work named `name` on `lane` from `begin` to `end` (seconds since the process started).

    `awaits` is the name of the span that a wait stood still for. `facts` are JSON-able: bytes
    read, hit or miss.
    """

    lane: str
    name: str
    begin: float
    end: float | None = None
    awaits: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """A part of the critical path."""

    name: str
    seconds: float


class Timeline:
    """Collects spans from any thread. `clock` counts seconds from the start of the process."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.notes: dict[str, Any] = {}
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> Timeline:
        """Of this process, with the operating system's word on when it began."""
        zero = time.perf_counter() - process_seconds()
        made = cls(lambda: time.perf_counter() - zero)
        made.add(Span(MAIN, START, 0.0, made.clock()))
        return made

    @classmethod
    def from_now(cls) -> Timeline:
        """Of a piece of a process's life, from now on."""
        made = cls(time.perf_counter)
        made.restart()
        return made

    def restart(self) -> None:
        """Forget everything and begin at zero again. No span may be open."""
        zero = time.perf_counter()
        self.clock = lambda: time.perf_counter() - zero
        with self._lock:
            self._spans.clear()

    def note(self, name: str, fact: Any) -> None:
        """Keep a JSON-able fact that belongs to no span."""
        self.notes[name] = fact

    def add(self, span: Span) -> None:
        """Add a span whose times are known."""
        with self._lock:
            self._spans.append(span)

    @contextmanager
    def span(
        self, name: str, *, lane: str = MAIN, awaits: str | None = None, **facts: Any
    ) -> Iterator[dict[str, Any]]:
        """Time the body; it may add facts to the mapping it is given. Spans may be nested."""
        span = Span(lane, name, self.clock(), awaits=awaits, facts=facts)
        self.add(span)
        try:
            yield span.facts
        finally:
            span.end = self.clock()

    def wait(self, name: str, *, lane: str = MAIN) -> Any:
        """Time a body that stands still until the span `name` ends on another lane."""
        return self.span(f"wait for {name}", lane=lane, awaits=name)

    @property
    def spans(self) -> list[Span]:
        """All spans so far; those still running end now."""
        now = self.clock()
        with self._lock:
            return [
                Span(s.lane, s.name, s.begin, now if s.end is None else s.end, s.awaits, s.facts)
                for s in self._spans
            ]

    def critical_path(self, begin: float = 0.0, end: float | None = None) -> list[Segment]:
        """What the time from `begin` to `end` (default: now) went to, in order.

        The seconds add up to all of it; what no span covers is called `UNEXPLAINED`.
        """
        end = self.clock() if end is None else end
        near = [s for s in self.spans if _end(s) >= begin and s.begin <= end]
        return _joined(_path(near, MAIN, begin, end, ()))


def by_name(path: list[Segment]) -> dict[str, float]:
    """Seconds of each name on a path, in the order of first appearance."""
    return summed((segment.name, segment.seconds) for segment in path)


def summed(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each name, in the order of first appearance."""
    seconds: dict[str, float] = {}
    for name, value in pairs:
        seconds[name] = seconds.get(name, 0.0) + value
    return seconds


def limit(path: list[Segment]) -> str:
    """The name that most of the path's seconds went to."""
    seconds = by_name(path)
    return max(seconds, key=lambda name: seconds[name], default=UNEXPLAINED)


def _path(
    spans: list[Span], lane: str, begin: float, end: float, within: tuple[str, ...]
) -> Iterator[Segment]:
    """Segments that cover `begin` to `end`, seen from `lane`."""
    here = [s for s in spans if s.lane == lane and s.begin < end and _end(s) > begin]
    edges = {begin, end, *(s.begin for s in here), *(_end(s) for s in here)}
    cuts = sorted(edge for edge in edges if begin <= edge <= end)
    for first, last in pairwise(cuts):
        covering = [s for s in here if s.begin <= first and _end(s) >= last]
        # Of nested spans the innermost counts.
        span = max(covering, key=lambda s: (s.begin, -_end(s)), default=None)
        if span is None:
            yield Segment(UNEXPLAINED, last - first)
        elif span.awaits is None:
            yield Segment(span.name, last - first)
        else:
            yield from _awaited(spans, span, first, last, within)


def _awaited(
    spans: list[Span], wait: Span, begin: float, end: float, within: tuple[str, ...]
) -> Iterator[Segment]:
    """What went on, during a wait, where the awaited span was made or was about to be."""
    name = str(wait.awaits)
    found = [s for s in spans if s.name == name and s.begin <= _end(wait) and s.lane != wait.lane]
    if not found or name in within:
        yield Segment(f"wait for {name}", end - begin)
        return
    last = max(found, key=_end)
    stop = max(begin, min(_end(last), end))
    yield from _path(spans, last.lane, begin, stop, (*within, name))
    # From the end of the work to the moment the waiting thread went on.
    yield Segment(UNEXPLAINED, end - stop)


def _end(span: Span) -> float:
    assert span.end is not None  # `spans` closes what still runs
    return span.end


def _joined(path: Iterator[Segment]) -> list[Segment]:
    """Neighbours of one name become one; empty ones vanish."""
    made: list[Segment] = []
    for segment in path:
        if segment.seconds <= 0:
            continue
        if made and made[-1].name == segment.name:
            segment = Segment(segment.name, made.pop().seconds + segment.seconds)
        made.append(segment)
    return made
