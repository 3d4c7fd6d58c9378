# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 autoencoder: pictures to latents and back.

B batch, Y rows, X columns, C channels; latents are unnormalised and unpatchified here.
Reference: diffusers AutoencoderKLFlux2.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
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


__all__ = ["Autoencoder", "AutoencoderConfig", "decode", "encode", "spec"]
