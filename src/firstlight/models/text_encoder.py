# SPDX-License-Identifier: Apache-2.0
"""Qwen3 as a text encoder: the hidden states after chosen layers.

B batch, T text tokens, D width, H query heads, G key/value heads, K head width, F MLP width,
J = taps x D, S stacked parts. Reference: transformers Qwen3Model.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Float, Int

from firstlight.models.attention import attention
from firstlight.models.layers import BY_BATCH, contract, rms_norm, swiglu
from firstlight.models.params import DATA, register_pytrees
from firstlight.models.specs.text_encoder import EncoderLayers, TextEncoder, TextEncoderConfig, spec

register_pytrees()


def encode(
    params: TextEncoder[Array],
    cfg: TextEncoderConfig,
    ids_BT: Int[Array, "B T"],
    mask_BT: Int[Array, "B T"],
) -> Float[Array, "B T J"]:
    """Concatenate the tapped hidden states along the features, in the parameters' dtype.

    `mask_BT` is 1 on tokens and 0 on the pads after them. A query sees the tokens up to its own
    position and never a pad; pad positions yield states too, which the transformer uses.
    """
    T = ids_BT.shape[1]
    h = params.embed.at[ids_BT].get(out_sharding=P(DATA, None, None))
    causal = jnp.arange(T)[:, None] >= jnp.arange(T)[None, :]
    mask_BTT = causal[None] & (mask_BT[:, None, :] == 1)
    rope = _rope(cfg, T)

    def layer(h: Array, weights: EncoderLayers[Array]):
        h = _layer(weights, cfg, h, mask_BTT, rope)
        return h, h

    # One scan for all layers, keeping every state and picking the taps afterwards: a single
    # compiled body for any taps in any order, for some tens of megabytes of states.
    _, states = lax.scan(layer, h, params.layers)
    taps = [h if tap == 0 else states[tap - 1] for tap in cfg.out_layers]
    if params.final_norm is not None:
        normed = rms_norm(states[-1], params.final_norm, cfg.rms_norm_eps).astype(h.dtype)
        taps = [
            normed if tap == cfg.num_hidden_layers else state
            for tap, state in zip(cfg.out_layers, taps, strict=True)
        ]
    return jnp.concatenate(taps, axis=-1)


def _layer(
    w: EncoderLayers[Array],
    cfg: TextEncoderConfig,
    h: Array,
    mask_BTT: Array,
    rope: tuple[Array, Array],
) -> Array:
    dtype, eps = h.dtype, cfg.rms_norm_eps
    y = rms_norm(h, w.input_norm, eps).astype(dtype)
    q = contract("BTD,HKD->BTHK", y, w.q).astype(dtype)
    kv = contract("BTD,SGKD->BTSGK", y, w.kv).astype(dtype)
    k, v = kv[:, :, 0], kv[:, :, 1]
    q = _rotate(rms_norm(q, w.q_norm, eps), rope, dtype)
    k = _rotate(rms_norm(k, w.k_norm, eps), rope, dtype)
    o = attention(q, k, v, mask_BLS=mask_BTT)
    out = contract("BTHK,DHK->BTD", o, w.out, out_sharding=BY_BATCH)
    h = (h.astype(jnp.float32) + out).astype(dtype)
    y = rms_norm(h, w.post_norm, eps).astype(dtype)
    hidden = contract("BTD,SFD->BTSF", y, w.gate_up).astype(dtype)
    out = contract("BTF,DF->BTD", swiglu(hidden, dtype), w.down, out_sharding=BY_BATCH)
    return (h.astype(jnp.float32) + out).astype(dtype)


def _rope(cfg: TextEncoderConfig, length: int) -> tuple[Array, Array]:
    half = cfg.head_dim // 2
    exponents = jnp.arange(half, dtype=jnp.float32) * 2 / cfg.head_dim
    frequencies = 1.0 / (cfg.rope_theta**exponents)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x_BTHK: Array, rope: tuple[Array, Array], dtype: jnp.dtype) -> Array:
    """Qwen's RoPE pairs dimension i with i + K/2 (FLUX.2's pairs neighbours)."""
    cos, sin = (table[:, None, :] for table in rope)
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(dtype)


__all__ = ["TextEncoder", "TextEncoderConfig", "encode", "spec"]
