# SPDX-License-Identifier: Apache-2.0
"""Small models to damage, and the watch over reading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged, and not to be changed."""
    return tiny.write_model(tmp_path_factory.mktemp("weights") / "model")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", shards=3)


@pytest.fixture
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are read by positional reads and by nothing else."""

    def refuse(*_: object) -> int:
        raise AssertionError("weights were read")

    monkeypatch.setattr(os, "preadv", refuse)
