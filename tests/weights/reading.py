# SPDX-License-Identifier: Apache-2.0
"""Reading plans whole, and comparing what came of it."""

from __future__ import annotations

from typing import Any

import numpy as np

from firstlight.weights import load
from firstlight.weights.folder import ModelFolder
from firstlight.weights.plan import Plan


def read(plan: Plan, **options: Any) -> dict[str, np.ndarray]:
    return dict(load.read(plan, **options))


def all_of(model: ModelFolder, **options: Any) -> dict[str, np.ndarray]:
    return {
        f"{component}.{path}": array
        for component, plan in model.plans.items()
        for path, array in read(plan, **options).items()
    }


def assert_same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for path, value in a.items():
        assert value.dtype == b[path].dtype and value.shape == b[path].shape
        assert value.tobytes() == b[path].tobytes(), path
