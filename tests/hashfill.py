# SPDX-License-Identifier: Apache-2.0
"""Weights and inputs from an integer hash: the same numbers anywhere, with NumPy alone.

The golden vectors of tests/golden were computed by diffusers and transformers from these.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

U32 = np.uint32


def hashed(count: int, k: int) -> np.ndarray:
    """H(0..count-1, k): float64 values in [-0.5, 0.5), exactly representable in it."""
    with np.errstate(over="ignore"):
        u = np.arange(count, dtype=U32) * U32(2654435761) + U32((k + 1) * 40503 % 2**32)
        u ^= u >> U32(16)
        u *= U32(2246822519)
        u ^= u >> U32(13)
        u *= U32(3266489917)
        u ^= u >> U32(16)
    return u.astype(np.float64) / 2**32 - 0.5


def tensor(tag: int, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 input X(tag, shape): values in [-2, 2), in C order."""
    return (4 * hashed(math.prod(shape), 1000 + tag)).reshape(shape).astype(np.float32)


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """float32 weights of one model: each tensor's hash index is its place in the sorted names.

    Norm weights and batch-norm variances, which must not cancel what they scale, are 1 + H/2.
    """
    filled = {}
    for k, name in enumerate(sorted(shapes)):
        values = hashed(math.prod(shapes[name]), k).reshape(shapes[name])
        one_dimensional = len(shapes[name]) == 1 and name.endswith("weight")
        if one_dimensional or name == "bn.running_var":
            values = 1 + 0.5 * values
        filled[name] = values.astype(np.float32)
    return filled


def save(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write float32 tensors in the safetensors format."""
    header: dict[str, object] = {}
    end = 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            file.write(array.tobytes())
