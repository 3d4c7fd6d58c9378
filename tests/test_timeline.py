# SPDX-License-Identifier: Apache-2.0
"""The critical path adds up, whatever overlaps."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest

from firstlight.timeline import (
    MAIN,
    UNEXPLAINED,
    Span,
    Timeline,
    by_name,
    limit,
    process_seconds,
)


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def timeline(*spans: Span) -> Timeline:
    made = Timeline(FakeClock())
    for span in spans:
        made.add(span)
    made.clock.now = max(span.end or 0.0 for span in spans)
    return made


def path(made: Timeline, **limits: float) -> list[tuple[str, float]]:
    segments = made.critical_path(**limits)
    return [(segment.name, pytest.approx(segment.seconds)) for segment in segments]


def test_spans_in_a_row_and_what_no_span_covers() -> None:
    made = timeline(Span(MAIN, "a", 0, 1), Span(MAIN, "b", 1.5, 4))
    assert path(made) == [("a", 1), (UNEXPLAINED, 0.5), ("b", 2.5)]


def test_a_wait_is_what_was_waited_for() -> None:
    made = timeline(
        Span(MAIN, "imports", 0, 2),
        Span("read", "read weights", 1, 5),
        Span(MAIN, "wait", 2, 5.25, awaits="read weights"),
        Span(MAIN, "run", 5.25, 6),
    )
    assert path(made) == [
        ("imports", 2), ("read weights", 3), (UNEXPLAINED, 0.25), ("run", 0.75),
    ]  # fmt: skip
    assert limit(made.critical_path()) == "read weights"


def test_work_that_was_queued_behind_other_work() -> None:
    """While main waits for the second program, its thread is still at the first."""
    made = timeline(
        Span(MAIN, "submit", 0, 1),
        Span("compile_0", "compile a", 1, 4),
        Span("compile_0", "compile b", 4, 6),
        Span("compile_0", "b ready", 6, 6),
        Span(MAIN, "wait", 1, 6, awaits="b ready"),
    )
    assert path(made) == [("submit", 1), ("compile a", 3), ("compile b", 2)]


def test_a_wait_whose_work_waits_itself() -> None:
    made = timeline(
        Span("read", "read x", 0, 3),
        Span("place", "wait for read", 1, 3, awaits="read x"),
        Span("place", "place x", 3, 4),
        Span(MAIN, "wait", 1, 4, awaits="place x"),
        Span(MAIN, "start", 0, 1),
    )
    assert path(made) == [("start", 1), ("read x", 2), ("place x", 1)]


def test_waits_in_a_circle_come_to_an_end() -> None:
    made = timeline(
        Span("a", "x", 0, 2, awaits="y"),
        Span("b", "y", 0, 2, awaits="x"),
        Span(MAIN, "wait", 0, 2, awaits="x"),
    )
    assert sum(segment.seconds for segment in made.critical_path()) == pytest.approx(2)


def test_of_nested_spans_the_inner_one_counts() -> None:
    made = timeline(
        Span(MAIN, "first image", 0, 10),
        Span("compile_0", "compile", 2, 6),
        Span(MAIN, "wait", 2, 6, awaits="compile"),
    )
    assert path(made) == [("first image", 2), ("compile", 4), ("first image", 4)]


def test_nothing_is_known_of_what_is_awaited() -> None:
    made = timeline(Span(MAIN, "wait", 0, 2, awaits="ghost"))
    assert path(made) == [("wait for ghost", 2)]


def test_part_of_the_time() -> None:
    made = timeline(Span(MAIN, "a", 0, 4), Span(MAIN, "b", 4, 8))
    assert path(made, begin=3, end=6) == [("a", 1), ("b", 2)]


def test_any_lanes_add_up() -> None:
    """Random spans and waits on five lanes: the path is as long as the clock says."""
    for seed in range(200):
        rng = random.Random(seed)
        spans = []
        for number in range(30):
            begin = rng.uniform(0, 10)
            awaits = rng.choice([None, None, f"s{rng.randrange(30)}"])
            lane = rng.choice([MAIN, "a", "b", "c", "d"])
            spans.append(Span(lane, f"s{number}", begin, begin + rng.uniform(0, 4), awaits))
        made = timeline(*spans)
        found = made.critical_path()
        assert sum(s.seconds for s in found) == pytest.approx(made.clock())
        assert all(s.seconds > 0 for s in found)
        assert sum(by_name(found).values()) == pytest.approx(made.clock())


def test_spans_are_timed_with_the_clock() -> None:
    made = Timeline(FakeClock())
    with made.span("work", bytes=3) as facts:
        made.clock.now = 2.0
        facts["more"] = True
    with pytest.raises(KeyError), made.wait("other"):
        made.clock.now = 3.0
        raise KeyError
    work, wait = made.spans
    assert (work.begin, work.end, work.facts) == (0.0, 2.0, {"bytes": 3, "more": True})
    assert (wait.begin, wait.end, wait.awaits) == (2.0, 3.0, "other")


def test_the_age_of_this_process_is_that_of_the_operating_system() -> None:
    code = "from firstlight.timeline import process_seconds as p; print(p())"
    begun = time.perf_counter()
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert 0 <= float(printed) <= time.perf_counter() - begun + 0.02
    assert process_seconds() > float(printed)
