# SPDX-License-Identifier: Apache-2.0
"""Reading a component's `config.json` strictly: faults name file, key, found and allowed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firstlight.errors import CheckpointError

_MISSING: Any = object()


class Fields:
    """A JSON object being read. Faults collect in `problems`; `done()` raises them together."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self.problems: list[str] = []

    def fault(self, key: str, found: object, allowed: str) -> None:
        given = "is missing" if found is _MISSING else f"is {found!r}"
        self.problems.append(f"{self.where}: {key} {given}; {allowed}")

    def integer(self, key: str, default: Any = _MISSING, *, minimum: int = 1) -> int:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.fault(key, value, f"an integer of at least {minimum} is needed")
            return minimum
        return value

    def number(self, key: str, default: Any = _MISSING) -> float:
        value = self.data.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            self.fault(key, value, "a positive number is needed")
            return 1.0
        return float(value)

    def flag(self, key: str, default: Any = _MISSING) -> bool:
        value = self.data.get(key, default)
        if not isinstance(value, bool):
            self.fault(key, value, "true or false is needed")
            return False
        return value

    def integers(self, key: str, default: Any = _MISSING, *, minimum: int = 1) -> tuple[int, ...]:
        value = self.data.get(key, default)
        good = isinstance(value, (list, tuple)) and len(value) > 0
        if not good or any(
            isinstance(v, bool) or not isinstance(v, int) or v < minimum for v in value
        ):
            self.fault(key, value, f"a list of integers of at least {minimum} is needed")
            return (minimum,)
        return tuple(value)

    def only(self, key: str, allowed: Any, default: Any = _MISSING) -> None:
        """A setting with one supported value; any other is refused, not ignored."""
        value = self.data.get(key, default)
        value = tuple(value) if isinstance(value, list) else value
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            self.fault(key, value, f"only {allowed!r} is supported")

    def check(self, good: bool, message: str) -> None:
        if not good:
            self.problems.append(f"{self.where}: {message}")

    def done(self) -> None:
        if self.problems:
            raise CheckpointError(
                f"{self.where} describes no supported model", tuple(self.problems)
            )
