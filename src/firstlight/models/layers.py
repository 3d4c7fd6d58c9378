# SPDX-License-Identifier: Apache-2.0
"""The small pieces that the networks share, and their numerics.

In bfloat16 mode every contraction accumulates in float32; norms, RoPE, softmax, gates and
activation functions are computed in float32 and rounded once. In float32 mode every contraction
has the highest precision (by default TPUs would use bfloat16 passes and recent GPUs TF32).
Shape letters are those of docs/design.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from firstlight.models.params import DATA
from firstlight.models.specs.autoencoder import Conv, GroupNorm

BY_BATCH = P(DATA)
"""Activations whose batch is split over the data axis and nothing else is."""


@dataclass(frozen=True)
class Kernels:
    """How contractions are written down for the platform that is traced for; the products and
    sums are the same, to the bit for `flatten`, on any setting (docs/decisions/006).

    `widen`: bfloat16 operands are handed over as float32, for a CPU without bfloat16 units.
    `flatten`: weights are seen as matrices, for XLA's CPU backend, which would transpose any
    other weight at every step. Needs weights that are not split over devices.
    """

    widen: bool = False
    flatten: bool = False


_PLAIN = Kernels()
_kernels: ContextVar[Kernels] = ContextVar("kernels", default=_PLAIN)


@contextmanager
def tracing_for(kernels: Kernels) -> Iterator[None]:
    """Write contractions down in this way while tracing."""
    token = _kernels.set(kernels)
    try:
        yield
    finally:
        _kernels.reset(token)


def widens() -> bool:
    return _kernels.get().widen


def precision(dtype: jnp.dtype) -> lax.Precision | None:
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def contract(subscripts: str, x: Array, w: Array, *, out_sharding: P | None = None) -> Array:
    """`einsum` of activations and weights of one dtype, accumulated and returned in float32.

    `out_sharding` must be stated where an axis split over devices is summed over.
    """
    if widens():
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    flat = _flattened(subscripts, x, w) if _kernels.get().flatten else None
    return flat if flat is not None else _einsum(subscripts, x, w, out_sharding)


def _einsum(subscripts: str, x: Array, w: Array, out_sharding: P | None) -> Array:
    return jnp.einsum(
        subscripts,
        x,
        w,
        precision=precision(x.dtype),
        preferred_element_type=jnp.float32,
        out_sharding=out_sharding,
    )


def _flattened(subscripts: str, x: Array, w: Array) -> Array | None:
    """The contraction with `w` as an (out, in) matrix; None where it is one, or cannot be."""
    operands, out = subscripts.split("->")
    x_axes, w_axes = operands.split(",")
    summed = "".join(axis for axis in x_axes if axis in w_axes)
    rows, columns = x_axes.removesuffix(summed), w_axes.removesuffix(summed)
    if len(w_axes) == 2 or out != rows + columns or rows + summed != x_axes:
        return None
    split = {**_split(w_axes, w), **_split(x_axes, x)}
    sizes = {**dict(zip(w_axes, w.shape, strict=True)), **dict(zip(x_axes, x.shape, strict=True))}
    depth = math.prod(x.shape[len(rows) :])
    w = w.reshape(-1, depth, out_sharding=P())
    x = x.reshape(*x.shape[: len(rows)], depth, out_sharding=P(*(split[a] for a in rows), None))
    y = _einsum(f"{rows}x,yx->{rows}y", x, w, None)
    return y.reshape([sizes[a] for a in out], out_sharding=P(*(split[a] for a in out)))


def _split(axes: str, x: Array) -> dict[str, Any]:
    """Mesh axis that each axis of `x` is split over."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return dict(zip(axes, spec + (None,) * (len(axes) - len(spec)), strict=True))


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """Root-mean-square norm over the last axis, in float32 throughout; float32 result."""
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * lax.rsqrt(mean_square + eps) * scale.astype(jnp.float32)


def layer_norm(x: Array, eps: float) -> Array:
    """Layer norm over the last axis without learned parameters; float32 result."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)


def swiglu(gate_up: Array, dtype: jnp.dtype) -> Array:
    """silu(gate) * up of (..., 2, F) with gate before up; computed in float32."""
    gate, up = (gate_up[..., part, :].astype(jnp.float32) for part in range(2))
    return (jax.nn.silu(gate) * up).astype(dtype)


def group_norm(x_BYXC: Array, norm: GroupNorm[Array], groups: int) -> Array:
    """Group norm over rows, columns and the channels of a group (eps 1e-6); float32 result."""
    B, Y, X, C = x_BYXC.shape
    x = x_BYXC.astype(jnp.float32)
    x = x.reshape(B, Y, X, groups, C // groups, out_sharding=BY_BATCH)
    centred = x - jnp.mean(x, axis=(1, 2, 4), keepdims=True)
    var = jnp.mean(jnp.square(centred), axis=(1, 2, 4), keepdims=True)
    x = centred * lax.rsqrt(var + 1e-6)
    x = x.reshape(B, Y, X, C, out_sharding=BY_BATCH)
    return x * norm.scale.astype(jnp.float32) + norm.bias.astype(jnp.float32)


def conv(
    x_BYXC: Array, weights: Conv[Array], *, stride: int = 1, padding: tuple[int, int] = (1, 1)
) -> Array:
    """2-D convolution with (out, in, rows, columns) kernels; `padding` is (before, after) on both
    axes. float32 result, bias included."""
    out = lax.conv_general_dilated(
        x_BYXC,
        weights.kernel,
        window_strides=(stride, stride),
        padding=(padding, padding),
        dimension_numbers=("NHWC", "OIHW", "NHWC"),
        precision=precision(x_BYXC.dtype),
        preferred_element_type=jnp.float32,
    )
    return out + weights.bias.astype(jnp.float32)


def upsample(x_BYXC: Array) -> Array:
    """Nearest-neighbour 2x: broadcast and reshape, which compiles to a copy (a resize does not)."""
    B, Y, X, C = x_BYXC.shape
    x = jnp.broadcast_to(x_BYXC[:, :, None, :, None, :], (B, Y, 2, X, 2, C))
    return x.reshape(B, 2 * Y, 2 * X, C, out_sharding=BY_BATCH)
