# SPDX-License-Identifier: Apache-2.0
"""Where the time of a start went, in one line, as a table, or as JSON."""

from __future__ import annotations

from typing import Any

from firstlight.timeline import UNEXPLAINED, Segment, Span, Timeline, by_name, limit, summed


def account(timeline: Timeline, end: float) -> dict[str, Any]:
    """Everything about the time from the start of the process to `end`, JSON-able.

    `critical_path` is a list of (name, seconds) in order and adds up to `total`.
    """
    path = timeline.critical_path(end=end)
    spans = sorted(timeline.spans, key=lambda span: span.begin)
    raw = timeline.notes.get("raw_read_bytes_per_second")
    return {
        "total": end,
        "limited_by": limit([Segment(_kind(s.name), s.seconds) for s in path]),
        "unexplained": by_name(path).get(UNEXPLAINED, 0.0),
        "critical_path": [[segment.name, segment.seconds] for segment in path],
        "spans": [_span(span, raw) for span in spans if span.end is not None],
        **timeline.notes,
    }


def one_line(facts: dict[str, Any]) -> str:
    """The budget in a line: what took longest first."""
    seconds = summed((_kind(name), value) for name, value in facts["critical_path"])
    ranked = sorted(seconds.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {value:.2f}" for name, value in ranked if value >= 0.005)
    return (
        f"total {facts['total']:.2f} s since the process started, limited by "
        f"{facts['limited_by']} ({parts})"
    )


def table(facts: dict[str, Any]) -> list[str]:
    """The critical path, then all that went on beside it."""
    lines = ["critical path:"]
    seconds = summed(facts["critical_path"])
    lines += [f"  {value:8.3f} s  {name}" for name, value in seconds.items() if value >= 0.0005]
    lines += [f"  {facts['total']:8.3f} s  total", "all lanes (from, to, lane, what):"]
    for span in facts["spans"]:
        is_wait = span["awaits"] is not None  # what was waited for is told above
        if not is_wait and (span["seconds"] >= 0.0005 or span["facts"]):
            told = ", ".join(_fact(name, value) for name, value in span["facts"].items())
            lines.append(
                f"  {span['begin']:8.3f} {span['begin'] + span['seconds']:8.3f}  "
                f"{span['lane']:<10}  {span['name']}{f' ({told})' if told else ''}"
            )
    if "memory" in facts:
        lines.append(f"memory: {facts['memory']}; text encoder: {_POLICIES[facts['policy']]}")
    return lines


_POLICIES = {
    "all": "stays",
    "offload": "freed after encoding",
    "swap": "never there together with the other components",
}


def _span(span: Span, raw: float | None) -> dict[str, Any]:
    seconds = (span.end or span.begin) - span.begin
    facts = dict(span.facts)
    if facts.get("bytes") and seconds > 0:
        facts["bytes_per_second"] = facts["bytes"] / seconds
        if raw:
            facts["share_of_raw_read"] = facts["bytes_per_second"] / raw
    return {
        "lane": span.lane,
        "name": span.name,
        "begin": span.begin,
        "seconds": seconds,
        "awaits": span.awaits,
        "facts": facts,
    }


def _kind(name: str) -> str:
    """Programs and components are told apart in the table only."""
    for kind in ("trace and lower", "compile", "load", "read"):
        if name.startswith(f"{kind} "):
            return "load programs" if kind == "load" else kind
    return name


def _fact(name: str, value: Any) -> str:
    if name == "bytes":
        return f"{value / 1e6:.1f} MB"
    if name == "bytes_per_second":
        return f"{value / 1e9:.2f} GB/s"
    if name == "share_of_raw_read":
        return f"{value:.0%} of a raw read"
    if name == "hit":
        return "hit" if value else "miss"
    return f"{name}: {'; '.join(value) if isinstance(value, list) else value}"
