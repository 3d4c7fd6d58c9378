# SPDX-License-Identifier: Apache-2.0
"""Finished buffers become arrays on devices, on a CPU without a copy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from reading import read

from firstlight.models.params import named_leaves
from firstlight.sharding import make_mesh, param_shardings
from firstlight.weights.folder import open_model
from firstlight.weights.load import ALIGNMENT, Plan, aligned_empty
from firstlight.weights.place import place


class TestPlacing:
    @pytest.mark.parametrize("size", [1, 63, 1000])
    def test_buffers_are_aligned(self, size: int) -> None:
        for _ in range(20):
            assert aligned_empty(size, np.dtype(np.float32)).ctypes.data % ALIGNMENT == 0

    def test_on_a_cpu_the_buffer_is_the_array(self, folder, monkeypatch) -> None:
        plan = open_model(folder, dtype="bfloat16").plans["transformer"]
        specs = open_model(folder, dtype="bfloat16").specs["transformer"]
        buffers: dict[str, int] = {}

        def remember(self: Plan, **options: object) -> Iterator[tuple[str, np.ndarray]]:
            for path, buffer in original(self, **options):
                buffers[path] = buffer.ctypes.data
                yield path, buffer

        original = Plan.read
        monkeypatch.setattr(Plan, "read", remember)
        tree = place(plan, param_shardings(specs, make_mesh()))
        arrays = dict(named_leaves(tree))
        assert arrays.keys() == buffers.keys()
        for path, array in arrays.items():
            assert array.unsafe_buffer_pointer() == buffers[path], path

    def test_values_and_shardings(self, folder: Path) -> None:
        model = open_model(folder, dtype="float32")
        for component, plan in model.plans.items():
            shardings = param_shardings(model.specs[component], make_mesh())
            tree = place(plan, shardings)
            wanted, where = read(plan), dict(named_leaves(shardings))
            for path, array in named_leaves(tree):
                np.testing.assert_array_equal(np.asarray(array), wanted[path])
                assert array.sharding == where[path]
            assert isinstance(jax.tree.leaves(tree)[0], jax.Array)
