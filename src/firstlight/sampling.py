# SPDX-License-Identifier: Apache-2.0
"""Latent geometry, position ids, noise schedule and the Euler step: pure functions.

Host functions (ids, tables, schedules) return NumPy arrays; the others run inside programs.
B batch, C latent channels, m pixel multiple, N = rows x columns image tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int, UInt32

from firstlight.errors import RequestError
from firstlight.models.layers import BY_BATCH
from firstlight.models.specs.autoencoder import LatentStats
from firstlight.models.specs.scheduler import SchedulerConfig
from firstlight.models.specs.transformer import TransformerConfig


def text_ids(length: int) -> np.ndarray:
    """(length, 4) position ids (time, row, column, token) of text: only the last one counts up."""
    ids = np.zeros((length, 4), np.int32)
    ids[:, 3] = np.arange(length)
    return ids


def image_ids(rows: int, columns: int, time: int = 0) -> np.ndarray:
    """(rows x columns, 4) position ids of a grid of image tokens, row by row.

    `time` is 0 for the generated picture; see `reference_ids` for others.
    """
    ids = np.zeros((rows, columns, 4), np.int32)
    ids[..., 0] = time
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    return ids.reshape(rows * columns, 4)


def reference_ids(number: int, rows: int, columns: int) -> np.ndarray:
    """Position ids of reference `number` (from 0): its own grid, at time 10, 20, ..."""
    return image_ids(rows, columns, 10 * (number + 1))


def rope_table(cfg: TransformerConfig, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, each (L, head width / 2) float32, of the rotations at (L, 4) position ids.

    Each id axis owns `axes_dims_rope[a]` head dimensions, rotated by id * theta^(-2i/size);
    computed in float64, as the reference does.
    """
    angles = []
    for axis, size in enumerate(cfg.axes_dims_rope):
        frequencies = cfg.rope_theta ** -(np.arange(0, size, 2, dtype=np.float64) / size)
        angles.append(ids[:, axis, None].astype(np.float64) * frequencies)
    joined = np.concatenate(angles, axis=-1)
    return np.cos(joined).astype(np.float32), np.sin(joined).astype(np.float32)


def mu(tokens: int, num_inference_steps: int) -> float:
    """The shift of the schedule for `tokens` generated tokens (references do not count).

    The reference's empirical fit, with its jump between 4300 and 4301 tokens.
    """
    m200 = 0.00016927 * tokens + 0.45666666
    if tokens > 4300:
        return m200
    m10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (m200 - m10) / 190.0
    return slope * num_inference_steps + m200 - 200.0 * slope


TIME_SHIFTS = ("reference", "constant")

CONSTANT_MU = 2.02
"""The shift that other programs use for every size: near the reference's at one megapixel and 50
steps, and without its jump."""


def sigmas(
    cfg: SchedulerConfig,
    num_inference_steps: int,
    tokens: int,
    custom: Sequence[float] | None = None,
    time_shift: str = "reference",
) -> np.ndarray:
    """Noise levels of the steps, float32, ending in an appended 0.

    `custom` replaces the even spacing from 1 to 1/steps; it is shifted too. `time_shift` is one of
    `TIME_SHIFTS`: "constant" shifts pictures of all sizes alike. Reference:
    diffusers FlowMatchEulerDiscreteScheduler.set_timesteps.

    Raises RequestError where the schedule stretches to a terminal level and has one step only:
    that step is at level 1 and cannot be stretched (the reference divides by zero).
    """
    steps = num_inference_steps
    spaced = np.linspace(1.0, 1.0 / steps, steps) if custom is None else np.asarray(custom)
    levels = spaced.astype(np.float32)
    if not cfg.use_dynamic_shifting:
        shift = np.float32(cfg.shift)
        levels = shift * levels / (1 + (shift - 1) * levels)
    else:
        shift = mu(tokens, steps) if time_shift == "reference" else CONSTANT_MU
        factor = np.float32(math.exp(shift) if cfg.time_shift_type == "exponential" else shift)
        levels = factor / (factor + (1 / levels - 1))
    if cfg.shift_terminal is not None:
        rest = 1 - levels
        if rest[-1] == 0:
            raise RequestError(
                f"num_inference_steps is {steps}; this model's schedule (shift_terminal "
                f"{cfg.shift_terminal}) needs a last step below noise level 1: at least 2"
            )
        levels = 1 - rest * np.float32((1 - cfg.shift_terminal) / rest[-1])
    return np.append(levels, np.float32(0)).astype(np.float32)


def noise(seeds_B: UInt32[Array, " B"], channels: int, rows: int, columns: int) -> Array:
    """Starting latents (B, 4C, rows, columns) float32: each row depends on its own seed only."""

    def one(seed: Array) -> Array:
        return jax.random.normal(jax.random.key(seed), (channels, rows, columns), jnp.float32)

    return jax.vmap(one)(seeds_B)


def pack(x: Float[Array, "B C h w"]) -> Float[Array, "B N C"]:
    """Channel-first grids to token rows, row by row."""
    B, C, h, w = x.shape
    return x.transpose(0, 2, 3, 1).reshape(B, h * w, C, out_sharding=BY_BATCH)


def rows_of(x: Float[Array, "B h w C"]) -> Float[Array, "B N C"]:
    """Channel-last grids to token rows."""
    return x.reshape(x.shape[0], -1, x.shape[3], out_sharding=BY_BATCH)


def unpack(x: Float[Array, "B N C"], rows: int, columns: int) -> Float[Array, "B h w C"]:
    """Token rows to channel-last grids."""
    return x.reshape(x.shape[0], rows, columns, x.shape[2], out_sharding=BY_BATCH)


def patchify(x: Float[Array, "B Y X C"]) -> Float[Array, "B h w D"]:
    """Each 2 x 2 patch becomes one cell of 4C channels, ordered (channel, row, column)."""
    B, Y, X, C = x.shape
    x = x.reshape(B, Y // 2, 2, X // 2, 2, C, out_sharding=BY_BATCH)
    x = x.transpose(0, 1, 3, 5, 2, 4)
    return x.reshape(B, Y // 2, X // 2, 4 * C, out_sharding=BY_BATCH)


def unpatchify(x: Float[Array, "B h w D"]) -> Float[Array, "B Y X C"]:
    """Inverse of `patchify`."""
    B, h, w, D = x.shape
    x = x.reshape(B, h, w, D // 4, 2, 2, out_sharding=BY_BATCH)
    x = x.transpose(0, 1, 4, 2, 5, 3)
    return x.reshape(B, 2 * h, 2 * w, D // 4, out_sharding=BY_BATCH)


def normalise(x: Float[Array, "B h w D"], stats: LatentStats[Array], eps: float) -> Array:
    """Patchified latents from the autoencoder's scale to the transformer's."""
    return (x - stats.mean) / jnp.sqrt(stats.var + eps)


def denormalise(x: Float[Array, "B h w D"], stats: LatentStats[Array], eps: float) -> Array:
    """Patchified latents from the transformer's scale to the autoencoder's."""
    return x * jnp.sqrt(stats.var + eps) + stats.mean


def euler_step(x: Array, velocity: Array, sigma: Array, sigma_next: Array) -> Array:
    """x + (sigma_next - sigma) v, in float32 in both modes (the reference rounds to bfloat16)."""
    return x + (sigma_next - sigma) * velocity


def scale_noise(sample: Array, noise: Array, sigma: Array) -> Array:
    """A clean sample under noise of level sigma. Reference: the scheduler's scale_noise."""
    return sigma * noise + (1 - sigma) * sample


def to_unit(image: Array) -> Array:
    """Decoded values around [-1, 1] to [0, 1], clipped."""
    return jnp.clip(image * 0.5 + 0.5, 0.0, 1.0)


def to_uint8(image: Array) -> Int[Array, "..."]:
    """Values in [0, 1] to bytes, halves to even, as the reference does."""
    return jnp.round(image * 255.0).astype(jnp.uint8)


def check_size(height: int, width: int, multiple: int, max_tokens: int) -> None:
    """Raise RequestError unless both sides are allowed; the message names the nearest that are."""
    smallest = 4 * multiple
    for name, value in (("height", height), ("width", width)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise RequestError(f"{name} is {value!r}; a whole number of pixels is needed")
        if value < smallest:
            raise RequestError(f"{name} is {value}; the smallest side is {smallest} pixels")
        if value % multiple:
            below = max(value // multiple * multiple, smallest)
            raise RequestError(
                f"{name} is {value}; sides are multiples of {multiple} pixels: "
                f"the nearest are {below} and {below + multiple}"
            )
    tokens = (height // multiple) * (width // multiple)
    if tokens > max_tokens:
        side = math.isqrt(max_tokens) * multiple
        raise RequestError(
            f"{width}x{height} is {tokens} tokens; at most {max_tokens} are allowed "
            f"(for instance {side}x{side})"
        )
