# SPDX-License-Identifier: Apache-2.0
"""The official fp8 and nvfp4 files: which tensors are quantised, and their values.

Decided tensor by tensor from dtypes and scales, never from names of files or layers. Sources: the
files' own `_quantization_metadata`, and notes of SGLang and vLLM-omni on the nvfp4 layout.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from firstlight.weights.component import Component
from firstlight.weights.reader import Scaling, Source, Tensor

FP8 = "F8_E4M3"
NVFP4 = "NVFP4"
"""Not a dtype of the format: two values in a byte of a U8 tensor."""

BLOCK = 16
"""Columns that share a scale in nvfp4."""

_SCALES = ("weight_scale", "scale_weight")
_ACTIVATIONS = ("input_scale", "scale_input", "comfy_quant")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def find_quantised(component: Component) -> None:
    """Give quantised tensors their scales, and their real shapes; what only belongs to them
    (scales, and settings of activations, which stay as they are) is no tensor of its own any more.
    """
    for name, tensor in list(component.tensors.items()):
        stem = name.removesuffix(".weight")
        if stem == name or tensor.dtype not in (FP8, "U8"):
            continue
        scale = next(filter(None, (component.tensors.get(f"{stem}.{s}") for s in _SCALES)), None)
        made = None
        if tensor.dtype == FP8 and scale is not None:
            made = _fp8(tensor, scale)
        elif tensor.dtype == "U8":
            made = _nvfp4(tensor, scale, component.tensors.get(f"{stem}.weight_scale_2"))
        if made is None:
            component.problems.append(
                f"{tensor.where} {tensor.dtype} {list(tensor.shape)} is quantised, but its scales "
                "are missing or of a kind that is not known"
            )
            made = replace(tensor, dtype="BF16")  # said once is enough
        component.tensors[name] = made
        for ending in (*_SCALES, *_ACTIVATIONS, "weight_scale_2"):
            component.tensors.pop(f"{stem}.{ending}", None)


def bytes_by_dtype(component: Component) -> dict[str, int]:
    """Stored bytes of each dtype."""
    found: dict[str, int] = {}
    for tensor in component.tensors.values():
        found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
    return found


def _fp8(tensor: Tensor, scale: Tensor) -> Tensor | None:
    if scale.dtype != "F32" or scale.shape not in ((), (1,)):
        return None
    return replace(tensor, scaling=Scaling(scale))


def _nvfp4(tensor: Tensor, blocks: Tensor | None, scale: Tensor | None) -> Tensor | None:
    if blocks is None or scale is None or len(tensor.shape) != 2:
        return None
    rows, columns = tensor.shape[0], 2 * tensor.shape[1]
    fits = blocks.dtype == FP8 and blocks.shape == (rows, columns // BLOCK)
    whole = rows % 128 == 0 and columns % (4 * BLOCK) == 0
    if not (fits and whole and scale.dtype == "F32" and scale.shape in ((), (1,))):
        return None
    return replace(tensor, dtype=NVFP4, shape=(rows, columns), scaling=Scaling(scale, blocks))


class Dequantiser:
    """Makes float32 values of quantised rows. Scales are read once and kept while reading."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._scales: dict[tuple[str, str], tuple[np.float32, np.ndarray | None]] = {}

    def values(self, tensor: Tensor, raw: np.ndarray, first: int) -> np.ndarray:
        """`raw` are the bytes of rows from `first` on, (rows, bytes); (rows, columns) float32."""
        import ml_dtypes

        scale, blocks = self._scaling(tensor)
        if blocks is None:
            return raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        # The high half of a byte is the even column.
        halves = np.stack([raw >> 4, raw & 15], axis=-1).reshape(len(raw), -1)
        values = np.where(halves & 8, -_E2M1[halves & 7], _E2M1[halves & 7])
        per_block = blocks[first : first + len(raw)] * scale
        return (values.reshape(len(raw), -1, BLOCK) * per_block[:, :, None]).reshape(len(raw), -1)

    def _scaling(self, tensor: Tensor) -> tuple[np.float32, np.ndarray | None]:
        key = (str(tensor.file), tensor.name)
        if key not in self._scales:
            assert tensor.scaling is not None
            scale = self._read(tensor.scaling.scale).view(np.float32)[0]
            blocks = tensor.scaling.blocks
            linear = None if blocks is None else unswizzled(self._read(blocks), blocks.shape)
            self._scales[key] = scale, linear
        return self._scales[key]

    def _read(self, tensor: Tensor) -> np.ndarray:
        raw = np.empty(tensor.nbytes, np.uint8)
        self._source.read_into(tensor.file, tensor.offset, raw)
        return raw


def unswizzled(raw: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Block scales, float32 (rows, columns), from tiles of 128 x 4: row 128 m + 32 r4 + r and
    column 4 k + c lie at [m, k, r, r4, c]."""
    import ml_dtypes

    rows, columns = shape
    tiles = raw.view(ml_dtypes.float8_e4m3fn).reshape(rows // 128, columns // 4, 32, 4, 4)
    return tiles.transpose(0, 3, 2, 1, 4).reshape(rows, columns).astype(np.float32)
