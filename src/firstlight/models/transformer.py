# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 transformer: one velocity prediction.

B batch, N image tokens (generated, then references), T text tokens, L = T + N joint tokens,
D width, H heads, K head width, M = K / 2 rotation pairs, F MLP width, C token channels,
J text state width, S stacked parts. Reference: diffusers Flux2Transformer2DModel.
"""

from __future__ import annotations

import math
from typing import Generic

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from firstlight.models.attention import attention
from firstlight.models.layers import BY_BATCH, contract, layer_norm, rms_norm, swiglu
from firstlight.models.params import Leaf, params, register_pytrees
from firstlight.models.specs.transformer import (
    DoubleBlocks,
    SingleBlocks,
    Stream,
    Transformer,
    TransformerConfig,
    spec,
)


@params
class KeysValues(Generic[Leaf]):
    """Keys (normalised and rotated) and values of some tokens, (B, R, H, K) in each block."""

    k: Leaf
    v: Leaf


@params
class ReferenceCache(Generic[Leaf]):
    """Of every double and every single block, stacked as their parameters are."""

    double: KeysValues[Leaf]
    single: KeysValues[Leaf]


register_pytrees()

Seen = KeysValues[Array] | None
Rope = tuple[Float[Array, "L M"], Float[Array, "L M"]]


def denoise(
    params: Transformer[Array],
    cfg: TransformerConfig,
    x_BNC: Float[Array, "B N C"],
    text_BTJ: Float[Array, "B T J"],
    timestep_B: Float[Array, " B"],
    rope: Rope,
    cache: ReferenceCache[Array] | None = None,
) -> Float[Array, "B N C"]:
    """Predict the velocity of each image token, in float32.

    `timestep_B` is in [0, 1] (0 is a clean image). `rope` holds cos and sin of every joint token,
    text first (`sampling.rope_table`). Text tokens are all attended to, pads included, as the
    reference does. `cache` (`extract`) has the keys and values of references, which every token
    then sees as well.
    """
    dtype, T = params.img_in.dtype, text_BTJ.shape[1]
    rope = _widened(rope)
    temb = _activated(params, cfg, timestep_B)
    mod_img, mod_single = _modulation(temb, params.mod_img), _modulation(temb, params.mod_single)
    mod_txt = _modulation(temb, params.mod_txt)

    x = contract("BNC,DC->BND", x_BNC.astype(dtype), params.img_in).astype(dtype)
    c = contract("BTJ,DJ->BTD", text_BTJ.astype(dtype), params.txt_in).astype(dtype)

    def double(carry: tuple[Array, Array], scanned: tuple[DoubleBlocks[Array], Seen]):
        return _double_block(scanned[0], cfg, carry, (mod_img, mod_txt), rope, scanned[1]), None

    def single(h: Array, scanned: tuple[SingleBlocks[Array], Seen]):
        return _single_block(scanned[0], cfg, h, mod_single, rope, (T, scanned[1])), None

    seen = (None, None) if cache is None else (cache.double, cache.single)
    (x, c), _ = lax.scan(double, (x, c), (params.double, seen[0]))
    h, _ = lax.scan(single, jnp.concatenate([c, x], axis=1), (params.single, seen[1]))

    scale, shift = _modulation(temb, params.mod_out)
    h = (layer_norm(h[:, T:], cfg.eps) * (1 + scale) + shift).astype(dtype)
    return contract("BND,CD->BNC", h, params.out)


def extract(
    params: Transformer[Array], cfg: TransformerConfig, x_BNC: Float[Array, "B N C"], rope: Rope
) -> ReferenceCache[Array]:
    """Keys and values of reference tokens in every block, for models trained to reuse them.

    References see references only, at timestep 0: they depend on nothing else, neither on the text
    nor on a step. `rope` is of the references' tokens. Reference: diffusers' Flux2KleinKVPipeline.
    """
    dtype = params.img_in.dtype
    rope = _widened(rope)
    zero_B = jnp.zeros_like(x_BNC[:, 0, 0], dtype=jnp.float32)
    temb = _activated(params, cfg, zero_B)
    mod_img, mod_single = _modulation(temb, params.mod_img), _modulation(temb, params.mod_single)
    x = contract("BNC,DC->BND", x_BNC.astype(dtype), params.img_in).astype(dtype)

    def double(x: Array, block: DoubleBlocks[Array]):
        q, k, v = _qkv(block.img, cfg, _modulate(x, cfg, mod_img[0], mod_img[1]))
        k = _rotate(k, rope, dtype)
        o = attention(_rotate(q, rope, dtype), k, v)
        return _stream_out(block.img, cfg, x, o, mod_img), KeysValues(k=k, v=v)

    def single(x: Array, block: SingleBlocks[Array]):
        y = _modulate(x, cfg, mod_single[0], mod_single[1])
        q, k, v = _qkv(block, cfg, y)
        k = _rotate(k, rope, dtype)
        o = attention(_rotate(q, rope, dtype), k, v)
        return _single_out(block, x, y, o, mod_single[2]), KeysValues(k=k, v=v)

    x, doubles = lax.scan(double, x, params.double)
    _, singles = lax.scan(single, x, params.single)
    return ReferenceCache(double=doubles, single=singles)


def _widened(rope: Rope) -> Rope:
    """Each rotation is shared by two neighbouring head dimensions."""
    cos, sin = (jnp.repeat(table, 2, axis=-1) for table in rope)
    return cos, sin


def _activated(params: Transformer[Array], cfg: TransformerConfig, timestep_B: Array) -> Array:
    return jax.nn.silu(_time_embedding(params, cfg, timestep_B)).astype(params.img_in.dtype)


def _modulation(temb: Array, weights: Array) -> Array:
    """(parts, B, 1, D) float32: shifts, scales and gates, the same for every token."""
    return contract("BE,SDE->SBD", temb, weights)[:, :, None]


def _with_seen(new: Array, seen: Array | None, T: int) -> Array:
    """Keys or values of all tokens, those of cached references between text and picture."""
    if seen is None:
        return new
    return jnp.concatenate([new[:, :T], seen, new[:, T:]], axis=1)


def _time_embedding(params: Transformer[Array], cfg: TransformerConfig, timestep_B: Array) -> Array:
    half = cfg.timestep_guidance_channels // 2
    frequencies = jnp.exp(-math.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / half)
    angles = 1000.0 * timestep_B[:, None] * frequencies
    waves = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
    dtype = params.time_in.dtype
    hidden = jax.nn.silu(contract("BE,DE->BD", waves.astype(dtype), params.time_in))
    return contract("BE,DE->BD", hidden.astype(dtype), params.time_out)


def _double_block(
    block: DoubleBlocks[Array],
    cfg: TransformerConfig,
    carry: tuple[Array, Array],
    modulation: tuple[Array, Array],
    rope: Rope,
    seen: Seen,
) -> tuple[Array, Array]:
    """Joint attention over text and image, each with its own weights, then one MLP each."""
    x, c = carry
    mod_img, mod_txt = modulation
    T = c.shape[1]
    q_img, k_img, v_img = _qkv(block.img, cfg, _modulate(x, cfg, mod_img[0], mod_img[1]))
    q_txt, k_txt, v_txt = _qkv(block.txt, cfg, _modulate(c, cfg, mod_txt[0], mod_txt[1]))
    q = _rotate(jnp.concatenate([q_txt, q_img], axis=1), rope, x.dtype)
    k = _rotate(jnp.concatenate([k_txt, k_img], axis=1), rope, x.dtype)
    v = jnp.concatenate([v_txt, v_img], axis=1)
    if seen is not None:
        k, v = _with_seen(k, seen.k, T), _with_seen(v, seen.v, T)
    o = attention(q, k, v)
    x = _stream_out(block.img, cfg, x, o[:, T:], mod_img)
    c = _stream_out(block.txt, cfg, c, o[:, :T], mod_txt)
    return x, c


def _stream_out(stream: Stream[Array], cfg: TransformerConfig, x: Array, o: Array, mod: Array):
    out = contract("BLHK,DHK->BLD", o, stream.out, out_sharding=BY_BATCH)
    x = _residual(x, mod[2], out)
    y = _modulate(x, cfg, mod[3], mod[4])
    hidden = contract("BLD,SFD->BLSF", y, stream.gate_up).astype(x.dtype)
    out = contract("BLF,DF->BLD", swiglu(hidden, x.dtype), stream.down, out_sharding=BY_BATCH)
    return _residual(x, mod[5], out)


def _single_block(
    block: SingleBlocks[Array],
    cfg: TransformerConfig,
    h: Array,
    mod: Array,
    rope: Rope,
    cached: tuple[int, Seen],
) -> Array:
    """Attention and MLP side by side, from one normalised input into one residual.

    `cached` is the number of text tokens, and what is seen between them and the picture's.
    """
    shift, scale, gate = mod
    y = _modulate(h, cfg, shift, scale)
    q, k, v = _qkv(block, cfg, y)
    k = _rotate(k, rope, h.dtype)
    T, seen = cached
    if seen is not None:
        k, v = _with_seen(k, seen.k, T), _with_seen(v, seen.v, T)
    o = attention(_rotate(q, rope, h.dtype), k, v)
    return _single_out(block, h, y, o, gate)


def _single_out(block: SingleBlocks[Array], h: Array, y: Array, o: Array, gate: Array) -> Array:
    hidden = contract("BLD,SFD->BLSF", y, block.gate_up).astype(h.dtype)
    out = contract("BLHK,DHK->BLD", o, block.out_attention, out_sharding=BY_BATCH)
    out += contract("BLF,DF->BLD", swiglu(hidden, h.dtype), block.out_mlp, out_sharding=BY_BATCH)
    return _residual(h, gate, out)


def _qkv(block: Stream[Array] | SingleBlocks[Array], cfg: TransformerConfig, y: Array):
    """Query and key normalised per head in float32 (rounded after the rotation), value rounded."""
    qkv = contract("BLD,SHKD->BLSHK", y, block.qkv).astype(y.dtype)
    q, k, v = (qkv[:, :, part] for part in range(3))
    return rms_norm(q, block.q_norm, cfg.eps), rms_norm(k, block.k_norm, cfg.eps), v


def _modulate(x: Array, cfg: TransformerConfig, shift: Array, scale: Array) -> Array:
    return (layer_norm(x, cfg.eps) * (1 + scale) + shift).astype(x.dtype)


def _residual(x: Array, gate: Array, update: Array) -> Array:
    return (x.astype(jnp.float32) + gate * update).astype(x.dtype)


def _rotate(x_BLHK: Array, rope: Rope, dtype: jnp.dtype) -> Array:
    """Rotate each pair of neighbouring dimensions: (u, v) -> (u cos - v sin, v cos + u sin)."""
    cos, sin = (table[:, None, :] for table in rope)
    even = jnp.arange(x_BLHK.shape[-1]) % 2 == 0
    # A roll and a select: a (..., K/2, 2) view has a minor axis of 2, which wastes vector lanes.
    partner = jnp.where(even, -jnp.roll(x_BLHK, -1, axis=-1), jnp.roll(x_BLHK, 1, axis=-1))
    return (x_BLHK * cos + partner * sin).astype(dtype)


__all__ = [
    "KeysValues",
    "ReferenceCache",
    "Transformer",
    "TransformerConfig",
    "denoise",
    "extract",
    "spec",
]
