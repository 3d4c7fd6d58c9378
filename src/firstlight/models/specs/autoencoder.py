# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 autoencoder: architecture and parameters.

Kernels are (out, in, rows, columns) as stored. "Levels" are resolutions, from the encoder's
finest to its coarsest and the other way round in the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from firstlight.models.params import DType, Leaf, ParamSpec, params
from firstlight.models.specs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig:
    """`vae/config.json` under diffusers' key names (class AutoencoderKLFlux2)."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    decoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    latent_channels: int = 32
    norm_num_groups: int = 32
    sample_size: int = 1024
    use_quant_conv: bool = True
    use_post_quant_conv: bool = True
    mid_block_add_attention: bool = True
    batch_norm_eps: float = 1e-4

    @property
    def scale_factor(self) -> int:
        """Image pixels per latent cell, along each side."""
        return 2 ** (len(self.block_out_channels) - 1)

    @property
    def pixel_multiple(self) -> int:
        """Image pixels per transformer token, along each side: two latent cells."""
        return 2 * self.scale_factor

    @property
    def token_channels(self) -> int:
        return 4 * self.latent_channels

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], where: str = "vae/config.json"
    ) -> AutoencoderConfig:
        """Read and check the architecture. Raises CheckpointError listing every fault."""
        f = Fields(data, where)
        f.only("_class_name", "AutoencoderKLFlux2", default="AutoencoderKLFlux2")
        f.only("act_fn", "silu", default="silu")
        f.only("in_channels", 3, default=3)
        f.only("out_channels", 3, default=3)
        f.only("patch_size", (2, 2), default=(2, 2))
        widths = f.integers("block_out_channels", (128, 256, 512, 512))
        decoder_widths = widths
        if data.get("decoder_block_out_channels") is not None:
            decoder_widths = f.integers("decoder_block_out_channels")
        config = cls(
            block_out_channels=widths,
            decoder_block_out_channels=decoder_widths,
            layers_per_block=f.integer("layers_per_block", 2),
            latent_channels=f.integer("latent_channels", 32),
            norm_num_groups=f.integer("norm_num_groups", 32),
            sample_size=f.integer("sample_size", 1024),
            use_quant_conv=f.flag("use_quant_conv", True),
            use_post_quant_conv=f.flag("use_post_quant_conv", True),
            mid_block_add_attention=f.flag("mid_block_add_attention", True),
            batch_norm_eps=f.number("batch_norm_eps", 1e-4),
        )
        f.check(
            len(widths) == len(decoder_widths),
            f"block_out_channels {widths} and decoder_block_out_channels {decoder_widths} "
            "differ in length",
        )
        for key, kind in (
            ("down_block_types", "DownEncoderBlock2D"),
            ("up_block_types", "UpDecoderBlock2D"),
        ):
            f.only(key, (kind,) * len(widths), default=(kind,) * len(widths))
        f.check(
            all(width % config.norm_num_groups == 0 for width in (*widths, *decoder_widths)),
            f"block widths {(*widths, *decoder_widths)} must be multiples of norm_num_groups "
            f"{config.norm_num_groups}",
        )
        f.done()
        return config


@params
class Conv(Generic[Leaf]):
    kernel: Leaf
    bias: Leaf


@params
class GroupNorm(Generic[Leaf]):
    scale: Leaf
    bias: Leaf


@params
class ResBlock(Generic[Leaf]):
    norm1: GroupNorm[Leaf]
    conv1: Conv[Leaf]
    norm2: GroupNorm[Leaf]
    conv2: Conv[Leaf]
    shortcut: Conv[Leaf] | None


@params
class MidAttention(Generic[Leaf]):
    """Single-head self-attention over all latent cells; q, k, v stacked on a leading axis."""

    norm: GroupNorm[Leaf]
    qkv: Leaf
    qkv_bias: Leaf
    out: Leaf
    out_bias: Leaf


@params
class MidBlock(Generic[Leaf]):
    first: ResBlock[Leaf]
    attention: MidAttention[Leaf] | None
    second: ResBlock[Leaf]


@params
class Level(Generic[Leaf]):
    blocks: tuple[ResBlock[Leaf], ...]
    resample: Conv[Leaf] | None


@params
class Encoder(Generic[Leaf]):
    conv_in: Conv[Leaf]
    levels: tuple[Level[Leaf], ...]
    mid: MidBlock[Leaf]
    norm_out: GroupNorm[Leaf]
    conv_out: Conv[Leaf]
    quant: Conv[Leaf] | None


@params
class Decoder(Generic[Leaf]):
    post_quant: Conv[Leaf] | None
    conv_in: Conv[Leaf]
    mid: MidBlock[Leaf]
    levels: tuple[Level[Leaf], ...]
    norm_out: GroupNorm[Leaf]
    conv_out: Conv[Leaf]


@params
class LatentStats(Generic[Leaf]):
    """Per-channel statistics of patchified latents, always float32 (see docs/numerics.md)."""

    mean: Leaf
    var: Leaf


@params
class Autoencoder(Generic[Leaf]):
    """`encoder` is None in a pipeline that was asked for no reference image."""

    encoder: Encoder[Leaf] | None
    decoder: Decoder[Leaf]
    stats: LatentStats[Leaf]


def spec(cfg: AutoencoderConfig, dtype: DType) -> Autoencoder[ParamSpec]:
    """All parameters of the autoencoder, encoder included."""
    make = _Builder(dtype)
    widths, up_widths = cfg.block_out_channels, tuple(reversed(cfg.decoder_block_out_channels))
    z, attention, n = cfg.latent_channels, cfg.mid_block_add_attention, cfg.layers_per_block
    stats = ParamSpec((cfg.token_channels,), (None,), "float32")
    return Autoencoder(
        encoder=Encoder(
            conv_in=make.conv(3, widths[0], 3),
            levels=make.levels(widths[0], widths, n),
            mid=make.mid(widths[-1], attention),
            norm_out=make.norm(widths[-1]),
            conv_out=make.conv(widths[-1], 2 * z, 3),
            quant=make.conv(2 * z, 2 * z, 1) if cfg.use_quant_conv else None,
        ),
        decoder=Decoder(
            post_quant=make.conv(z, z, 1) if cfg.use_post_quant_conv else None,
            conv_in=make.conv(z, up_widths[0], 3),
            mid=make.mid(up_widths[0], attention),
            levels=make.levels(up_widths[0], up_widths, n + 1),
            norm_out=make.norm(up_widths[-1]),
            conv_out=make.conv(up_widths[-1], 3, 3),
        ),
        stats=LatentStats(mean=stats, var=stats),
    )


class _Builder:
    """Parameter trees of the blocks that encoder and decoder share."""

    def __init__(self, dtype: DType) -> None:
        self.dtype: DType = dtype

    def leaf(self, *shape: int) -> ParamSpec:
        return ParamSpec(shape, (None,) * len(shape), self.dtype)

    def conv(self, inputs: int, outputs: int, size: int) -> Conv[ParamSpec]:
        return Conv(kernel=self.leaf(outputs, inputs, size, size), bias=self.leaf(outputs))

    def norm(self, width: int) -> GroupNorm[ParamSpec]:
        return GroupNorm(scale=self.leaf(width), bias=self.leaf(width))

    def block(self, inputs: int, outputs: int) -> ResBlock[ParamSpec]:
        return ResBlock(
            norm1=self.norm(inputs),
            conv1=self.conv(inputs, outputs, 3),
            norm2=self.norm(outputs),
            conv2=self.conv(outputs, outputs, 3),
            shortcut=self.conv(inputs, outputs, 1) if inputs != outputs else None,
        )

    def mid(self, width: int, attention: bool) -> MidBlock[ParamSpec]:
        attend = MidAttention(
            norm=self.norm(width),
            qkv=self.leaf(3, width, width),
            qkv_bias=self.leaf(3, width),
            out=self.leaf(width, width),
            out_bias=self.leaf(width),
        )
        return MidBlock(
            first=self.block(width, width),
            attention=attend if attention else None,
            second=self.block(width, width),
        )

    def levels(
        self, inputs: int, widths: tuple[int, ...], blocks: int
    ) -> tuple[Level[ParamSpec], ...]:
        """One level per width; all but the last change the resolution at their end."""
        made: list[Level[ParamSpec]] = []
        for index, width in enumerate(widths):
            last = index == len(widths) - 1
            made.append(
                Level(
                    blocks=tuple(
                        self.block(inputs if i == 0 else width, width) for i in range(blocks)
                    ),
                    resample=None if last else self.conv(width, width, 3),
                )
            )
            inputs = width
        return tuple(made)
