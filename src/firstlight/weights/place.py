# SPDX-License-Identifier: Apache-2.0
"""Finished buffers onto devices, while further ones are being read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from firstlight.models.params import map_leaves, named_leaves, register_pytrees
from firstlight.weights.load import THREADS, Counter, Plan

__all__ = ["Counter", "place"]

register_pytrees()


def place(
    plan: Plan,
    shardings: Any,
    *,
    threads: int = THREADS,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> Any:
    """Read `plan` and return the tree of `shardings` with an array in each place.

    Each buffer goes to its devices as soon as it is complete (asynchronously on accelerators; on
    a CPU the aligned buffer itself becomes the array). Raises CheckpointError.
    """
    where = dict(named_leaves(shardings))
    arrays = {
        path: jax.device_put(buffer, where[path])
        for path, buffer in plan.read(threads=threads, on_bytes=on_bytes)
    }
    return map_leaves(lambda path, _: arrays[path], shardings)
