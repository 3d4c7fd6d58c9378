# SPDX-License-Identifier: Apache-2.0
"""Collects the comparisons only where the reference is installed; reports the worst difference."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

NEEDED = ("torch", "diffusers", "transformers", "skimage")
MISSING = [name for name in NEEDED if find_spec(name) is None]

# test_installed.py stays, and says once why the others were left out.
collect_ignore_glob = ["test_[!i]*.py"] if MISSING else []

LIMIT = 2e-4
"""Largest relative difference in float32."""

_differences: list[tuple[float, str]] = []


class Agreement:
    """Compares tensors and remembers how far apart they were."""

    def __init__(self, test: str) -> None:
        self.test = test

    def __call__(
        self, name: str, ours: np.ndarray, theirs: np.ndarray, limit: float = LIMIT
    ) -> None:
        """Assert that max |ours - theirs| / max |theirs| is at most `limit`, over one tensor."""
        assert ours.shape == theirs.shape, name
        assert ours.dtype == theirs.dtype == np.float32, name
        assert np.isfinite(theirs).all(), name
        difference = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
        _differences.append((difference, f"{name} of {self.test}"))
        assert difference <= limit, f"{name}: relative difference {difference:.2e}"


@pytest.fixture
def missing() -> list[str]:
    return MISSING


@pytest.fixture
def agree(request: pytest.FixtureRequest) -> Agreement:
    return Agreement(request.node.name)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _differences:
        difference, where = max(_differences)
        terminalreporter.write_line(
            f"parity: {len(_differences)} tensors compared, worst relative difference "
            f"{difference:.1e} (limit {LIMIT:.0e}), {where}"
        )
