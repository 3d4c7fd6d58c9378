# SPDX-License-Identifier: Apache-2.0
"""Softmax attention: one entry, dispatched on the platform the program is compiled for."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from firstlight.models.layers import contract, widens
from firstlight.models.params import DATA, MODEL

CPU_SCORES = 1 << 21
"""Scores held at a time on a CPU (per head): what stays near the caches, found by measurement."""

ACCELERATOR_SCORES = 1 << 26
"""Scores held at a time on an accelerator (all heads): 256 MiB in float32."""


def attention(
    q_BLHK: Array,
    k_BSGK: Array,
    v_BSGK: Array,
    *,
    mask_BLS: Array | None = None,
    heads_axis: str | None = MODEL,
) -> Array:
    """Scaled dot-product attention with float32 softmax; (B, L, H, K) in the dtype of `q_BLHK`.

    Each of the G key/value heads serves H / G consecutive query heads. `mask_BLS` is True where a
    query may see a key; every query must see at least one. The whole score matrix is never held.
    `heads_axis` names the mesh axis that the heads are split over.
    """
    heads = P(DATA, None, heads_axis, None)
    operands = (q_BLHK, k_BSGK, v_BSGK)
    specs = (heads, heads, heads)
    if mask_BLS is not None:
        operands, specs = (*operands, mask_BLS), (*specs, P(DATA, None, None))
    # Heads and batch rows are independent: each device computes its own, with no communication.
    local = jax.shard_map(_local_attention, in_specs=specs, out_specs=heads)
    return local(*operands)


def _local_attention(q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
    operands = (q, k, v) if mask is None else (q, k, v, mask)
    return lax.platform_dependent(*operands, cpu=mapped_attention, default=batched_attention)


def mapped_attention(q_BLHK: Array, k_BSGK: Array, v_BSGK: Array, mask: Array | None = None):
    """One head and one run of queries at a time: plain matrix products, which XLA's CPU backend
    computes several times faster than batched ones."""
    dtype = q_BLHK.dtype
    if widens():  # once, not for every head's slice
        q_BLHK, k_BSGK, v_BSGK = (x.astype(jnp.float32) for x in (q_BLHK, k_BSGK, v_BSGK))
    B, L, H, K = q_BLHK.shape
    _, S, G, _ = k_BSGK.shape
    rows = _rows(L, S, CPU_SCORES)
    q = _split_rows(q_BLHK, rows).reshape(B, -1, rows, G, H // G, K)
    q = q.transpose(0, 3, 4, 1, 2, 5)  # B, G, H/G, runs, rows, K
    k, v = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    masks = None if mask is None else _split_rows(mask, rows)

    def one_head(index: Array) -> Array:
        b, g = index // G, index % G

        def one_run(queries: tuple[Array, Array]) -> Array:
            run, q_rows = queries
            visible = None if masks is None else masks[b, run]
            return _softmax_attention(q_rows, k[b, g], v[b, g], visible)

        runs = jnp.tile(jnp.arange(q.shape[3]), H // G)
        return lax.map(one_run, (runs, q[b, g].reshape(-1, rows, K)))

    out = lax.map(one_head, jnp.arange(B * G))
    out = out.reshape(B, H, -1, K)[:, :, :L]
    return out.transpose(0, 2, 1, 3).astype(dtype)


def batched_attention(q_BLHK: Array, k_BSGK: Array, v_BSGK: Array, mask: Array | None = None):
    """All heads at once, a run of queries at a time."""
    B, L, H, K = q_BLHK.shape
    _, S, G, _ = k_BSGK.shape
    rows = _rows(L, S * B * H, ACCELERATOR_SCORES)
    q = _split_rows(q_BLHK, rows).reshape(B, -1, rows, G, H // G, K)
    q = q.transpose(1, 0, 3, 4, 2, 5)  # runs, B, G, H/G, rows, K
    k, v = k_BSGK.transpose(0, 2, 1, 3), v_BSGK.transpose(0, 2, 1, 3)
    attend = jax.vmap(
        jax.vmap(jax.vmap(_softmax_attention, (0, None, None, None)), (0, 0, 0, None))
    )
    if mask is None:
        masks = jnp.ones((q.shape[0], B, 1, 1), bool)
    else:
        masks = _split_rows(mask, rows).swapaxes(0, 1)
    out = lax.map(lambda run: attend(run[0], k, v, run[1]), (q, masks))
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, H, K)
    return out[:, :L]


def _softmax_attention(q_LK: Array, k_SK: Array, v_SK: Array, mask_LS: Array | None) -> Array:
    scores = contract("LK,SK->LS", q_LK, k_SK) * (q_LK.shape[-1] ** -0.5)
    if mask_LS is not None:
        scores = jnp.where(mask_LS, scores, jnp.finfo(jnp.float32).min)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    # Dividing the (L, K) result is cheaper than dividing the (L, S) weights.
    return (contract("LS,SK->LK", weights.astype(v_SK.dtype), v_SK) / total).astype(q_LK.dtype)


def _rows(length: int, row_cost: int, budget: int) -> int:
    """Queries per run: an even split of `length` whose scores stay within `budget`."""
    runs = max(1, math.ceil(length * row_cost / budget))
    return math.ceil(length / runs)


def _split_rows(x: Array, rows: int) -> Array:
    """(B, L, ...) -> (B, runs, rows, ...), zero-padded at the end."""
    B, L = x.shape[:2]
    runs = math.ceil(L / rows)
    padding = [(0, 0), (0, runs * rows - L)] + [(0, 0)] * (x.ndim - 2)
    return jnp.pad(x, padding).reshape(B, runs, rows, *x.shape[2:])
