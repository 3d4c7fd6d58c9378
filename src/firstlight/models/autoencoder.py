# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 autoencoder: pictures to latents and back.

B batch, Y rows, X columns, C channels; latents are unnormalised and unpatchified here.
Reference: diffusers AutoencoderKLFlux2.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from firstlight.models.attention import attention
from firstlight.models.layers import BY_BATCH, contract, conv, group_norm, upsample
from firstlight.models.params import register_pytrees
from firstlight.models.specs.autoencoder import (
    Autoencoder,
    AutoencoderConfig,
    Conv,
    Decoder,
    Encoder,
    GroupNorm,
    MidAttention,
    MidBlock,
    ResBlock,
    spec,
)

register_pytrees()


def encode(
    params: Encoder[Array], cfg: AutoencoderConfig, image_BYXC: Float[Array, "B Y X 3"]
) -> Float[Array, "B y x C"]:
    """Mean latents of pictures with values in [-1, 1], in float32; sides shrink by the factor."""
    groups, dtype = cfg.norm_num_groups, params.conv_in.kernel.dtype
    h = conv(image_BYXC.astype(dtype), params.conv_in).astype(dtype)
    for level in params.levels:
        for block in level.blocks:
            h = _res_block(h, block, groups)
        if level.resample is not None:
            # Padded on the right and at the bottom only, as in the reference.
            h = conv(h, level.resample, stride=2, padding=(0, 1)).astype(dtype)
    h = _mid_block(h, params.mid, groups)
    moments = conv(_activate(h, params.norm_out, groups), params.conv_out)
    if params.quant is not None:
        moments = _pointwise(moments.astype(dtype), params.quant)
    return moments[..., : cfg.latent_channels]


def decode(
    params: Decoder[Array], cfg: AutoencoderConfig, latents_BYXC: Float[Array, "B y x C"]
) -> Float[Array, "B Y X 3"]:
    """Pictures with values around [-1, 1] (not clipped), in float32; sides grow by the factor."""
    groups, dtype = cfg.norm_num_groups, params.conv_in.kernel.dtype
    h = latents_BYXC.astype(dtype)
    if params.post_quant is not None:
        h = _pointwise(h, params.post_quant).astype(dtype)
    h = conv(h, params.conv_in).astype(dtype)
    h = _mid_block(h, params.mid, groups)
    for level in params.levels:
        for block in level.blocks:
            h = _res_block(h, block, groups)
        if level.resample is not None:
            h = conv(upsample(h), level.resample).astype(dtype)
    return conv(_activate(h, params.norm_out, groups), params.conv_out)


def decode_tiled(
    params: Decoder[Array], cfg: AutoencoderConfig, latents_BYXC: Float[Array, "B y x C"]
) -> Float[Array, "B Y X 3"]:
    """`decode` in overlapping tiles of `sample_size` pixels, blended: the memory of one tile.

    Norms and attention see their tile only, so this is another picture than the untiled one; the
    same as the reference's with tiling on. Latents within one tile are not tiled.
    """
    side = cfg.sample_size // cfg.scale_factor
    blend = int(cfg.sample_size * TILE_OVERLAP)
    return _tiled(lambda z: decode(params, cfg, z), latents_BYXC, side, blend, cfg.sample_size)


def encode_tiled(
    params: Encoder[Array], cfg: AutoencoderConfig, image_BYXC: Float[Array, "B Y X 3"]
) -> Float[Array, "B y x C"]:
    """`encode` in overlapping tiles, see `decode_tiled`."""
    side = cfg.sample_size // cfg.scale_factor
    blend = int(side * TILE_OVERLAP)
    return _tiled(lambda x: encode(params, cfg, x), image_BYXC, cfg.sample_size, blend, side)


TILE_OVERLAP = 0.25
"""Part of a tile that it shares with the next one."""


def _tiled(
    function: Callable[[Array], Array], x_BYXC: Array, side: int, blend: int, made: int
) -> Array:
    """Apply `function` to tiles of `side` rows and columns, which become `made` of them, and put
    the results together, `blend` rows and columns fading into each other."""
    _, Y, X, _ = x_BYXC.shape
    if side >= Y and side >= X:
        return function(x_BYXC)
    step = int(side * (1 - TILE_OVERLAP))
    places = [(y, x) for y in range(0, Y, step) for x in range(0, X, step)]
    tiles = {(y, x): x_BYXC[:, y : y + side, x : x + side] for y, x in places}
    done: dict[tuple[int, int], Array] = {}
    for shape in dict.fromkeys(tile.shape for tile in tiles.values()):
        alike = [place for place, tile in tiles.items() if tile.shape == shape]
        # One after the other: only one tile's memory is needed at a time.
        results = lax.map(function, jnp.stack([tiles[place] for place in alike]))
        done.update(zip(alike, results, strict=True))
    rows = []
    keep = made - blend
    for y in range(0, Y, step):
        for x in range(0, X, step):
            tile = done[y, x]
            # Neighbours are blended already, as in the reference.
            if y:
                tile = _blend(done[y - step, x], tile, blend, axis=1)
            if x:
                tile = _blend(done[y, x - step], tile, blend, axis=2)
            done[y, x] = tile
        rows.append(
            jnp.concatenate([done[y, x][:, :keep, :keep] for x in range(0, X, step)], axis=2)
        )
    return jnp.concatenate(rows, axis=1)


def _blend(before: Array, tile: Array, extent: int, axis: int) -> Array:
    """Fade from the end of `before` into the beginning of `tile`."""
    extent = min(extent, before.shape[axis], tile.shape[axis])
    weight = jnp.arange(extent, dtype=jnp.float32) / extent
    weight = weight.reshape([-1 if i == axis else 1 for i in range(4)])
    end = lax.slice_in_dim(before, before.shape[axis] - extent, None, axis=axis)
    begin = lax.slice_in_dim(tile, 0, extent, axis=axis)
    rest = lax.slice_in_dim(tile, extent, None, axis=axis)
    return jnp.concatenate([end * (1 - weight) + begin * weight, rest], axis=axis)


def _activate(x: Array, norm: GroupNorm[Array], groups: int) -> Array:
    return jax.nn.silu(group_norm(x, norm, groups)).astype(x.dtype)


def _res_block(x: Array, block: ResBlock[Array], groups: int) -> Array:
    h = conv(_activate(x, block.norm1, groups), block.conv1).astype(x.dtype)
    h = conv(_activate(h, block.norm2, groups), block.conv2)
    skip = x.astype(jnp.float32) if block.shortcut is None else _pointwise(x, block.shortcut)
    return (skip + h).astype(x.dtype)


def _mid_block(x: Array, mid: MidBlock[Array], groups: int) -> Array:
    x = _res_block(x, mid.first, groups)
    if mid.attention is not None:
        x = _attend(x, mid.attention, groups)
    return _res_block(x, mid.second, groups)


def _attend(x: Array, weights: MidAttention[Array], groups: int) -> Array:
    B, Y, X, C = x.shape
    y = group_norm(x, weights.norm, groups).astype(x.dtype)
    y = y.reshape(B, Y * X, C, out_sharding=BY_BATCH)
    bias = weights.qkv_bias.astype(jnp.float32)[:, None, None]
    qkv = (contract("BLC,SDC->SBLD", y, weights.qkv) + bias).astype(x.dtype)
    q, k, v = qkv[..., None, :]
    o = attention(q, k, v, heads_axis=None)[:, :, 0]
    out = contract("BLC,DC->BLD", o, weights.out) + weights.out_bias.astype(jnp.float32)
    out = out.reshape(B, Y, X, C, out_sharding=BY_BATCH)
    return (x.astype(jnp.float32) + out).astype(x.dtype)


def _pointwise(x: Array, weights: Conv[Array]) -> Array:
    """A 1x1 convolution, as the matrix product that it is."""
    kernel = weights.kernel[:, :, 0, 0]
    return contract("BYXC,DC->BYXD", x, kernel) + weights.bias.astype(jnp.float32)


__all__ = [
    "Autoencoder",
    "AutoencoderConfig",
    "decode",
    "decode_tiled",
    "encode",
    "encode_tiled",
    "spec",
]
