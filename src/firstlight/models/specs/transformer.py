# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 transformer: architecture and parameters.

Linear weights are (out, in) as stored. Letters: D width, H heads, K head width, F MLP width,
C token channels, n stacked blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from firstlight.models.params import (
    HEADS,
    LAYERS,
    MLP,
    WIDTH,
    DType,
    Leaf,
    ParamSpec,
    params,
)
from firstlight.models.specs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """`transformer/config.json` under diffusers' key names (class Flux2Transformer2DModel)."""

    in_channels: int
    num_layers: int
    num_single_layers: int
    attention_head_dim: int
    num_attention_heads: int
    joint_attention_dim: int
    timestep_guidance_channels: int = 256
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = 2000.0
    eps: float = 1e-6

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @property
    def mlp_width(self) -> int:
        return int(self.width * self.mlp_ratio)

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], where: str = "transformer/config.json"
    ) -> TransformerConfig:
        """Read and check the architecture. Raises CheckpointError listing every fault.

        Missing keys take the defaults of diffusers' class; `guidance_embeds: true` (FLUX.2 [dev])
        and a patch size other than 1 are refused.
        """
        f = Fields(data, where)
        f.only("_class_name", "Flux2Transformer2DModel", default="Flux2Transformer2DModel")
        f.only("patch_size", 1, default=1)
        f.only("guidance_embeds", False, default=True)
        in_channels = f.integer("in_channels", 128)
        if data.get("out_channels") is not None:
            f.only("out_channels", in_channels)
        config = cls(
            in_channels=in_channels,
            num_layers=f.integer("num_layers", 8),
            num_single_layers=f.integer("num_single_layers", 48),
            attention_head_dim=f.integer("attention_head_dim", 128),
            num_attention_heads=f.integer("num_attention_heads", 48),
            joint_attention_dim=f.integer("joint_attention_dim", 15360),
            timestep_guidance_channels=f.integer("timestep_guidance_channels", 256, minimum=2),
            mlp_ratio=f.number("mlp_ratio", 3.0),
            axes_dims_rope=f.integers("axes_dims_rope", (32, 32, 32, 32)),
            rope_theta=f.number("rope_theta", 2000),
            eps=f.number("eps", 1e-6),
        )
        f.check(
            len(config.axes_dims_rope) == 4,
            f"axes_dims_rope {config.axes_dims_rope} needs 4 axes (time, row, column, token)",
        )
        f.check(
            sum(config.axes_dims_rope) == config.attention_head_dim,
            f"axes_dims_rope {config.axes_dims_rope} adds up to {sum(config.axes_dims_rope)}, "
            f"attention_head_dim is {config.attention_head_dim}",
        )
        f.check(
            all(size % 2 == 0 for size in config.axes_dims_rope),
            f"axes_dims_rope {config.axes_dims_rope} must be even numbers (rotated in pairs)",
        )
        f.check(
            config.timestep_guidance_channels % 2 == 0,
            f"timestep_guidance_channels {config.timestep_guidance_channels} must be even",
        )
        f.done()
        return config


@params
class Stream(Generic[Leaf]):
    """One modality (image or text) of the double-stream blocks, stacked over the blocks."""

    qkv: Leaf
    q_norm: Leaf
    k_norm: Leaf
    out: Leaf
    gate_up: Leaf
    down: Leaf


@params
class DoubleBlocks(Generic[Leaf]):
    img: Stream[Leaf]
    txt: Stream[Leaf]


@params
class SingleBlocks(Generic[Leaf]):
    """Parallel attention and MLP. The checkpoint's fused matrices are kept apart at the boundary
    between attention and MLP, so that heads and MLP can each be split over devices."""

    qkv: Leaf
    q_norm: Leaf
    k_norm: Leaf
    gate_up: Leaf
    out_attention: Leaf
    out_mlp: Leaf


@params
class Transformer(Generic[Leaf]):
    time_in: Leaf
    time_out: Leaf
    mod_img: Leaf
    mod_txt: Leaf
    mod_single: Leaf
    img_in: Leaf
    txt_in: Leaf
    double: DoubleBlocks[Leaf]
    single: SingleBlocks[Leaf]
    mod_out: Leaf
    out: Leaf


def spec(cfg: TransformerConfig, dtype: DType) -> Transformer[ParamSpec]:
    """The transformer's parameters. Modulations keep their chunks on the leading axis:
    (shift, scale, gate) for attention then MLP; `mod_out` is (scale, shift), diffusers' order."""
    D, H, K, F = cfg.width, cfg.num_attention_heads, cfg.attention_head_dim, cfg.mlp_width
    C, J, E = cfg.in_channels, cfg.joint_attention_dim, cfg.timestep_guidance_channels

    def leaf(*dims: tuple[int, str | None]) -> ParamSpec:
        return ParamSpec(tuple(d for d, _ in dims), tuple(axis for _, axis in dims), dtype)

    d, h, k, f = (D, WIDTH), (H, HEADS), (K, None), (F, MLP)

    def stream(n: tuple[int, str]) -> Stream[ParamSpec]:
        return Stream(
            qkv=leaf(n, (3, None), h, k, d),
            q_norm=leaf(n, k),
            k_norm=leaf(n, k),
            out=leaf(n, d, h, k),
            gate_up=leaf(n, (2, None), f, d),
            down=leaf(n, d, f),
        )

    double, single = (cfg.num_layers, LAYERS), (cfg.num_single_layers, LAYERS)
    return Transformer(
        time_in=leaf(d, (E, None)),
        time_out=leaf(d, (D, None)),
        mod_img=leaf((6, None), d, (D, None)),
        mod_txt=leaf((6, None), d, (D, None)),
        mod_single=leaf((3, None), d, (D, None)),
        img_in=leaf(d, (C, None)),
        txt_in=leaf(d, (J, None)),
        double=DoubleBlocks(img=stream(double), txt=stream(double)),
        single=SingleBlocks(
            qkv=leaf(single, (3, None), h, k, d),
            q_norm=leaf(single, k),
            k_norm=leaf(single, k),
            gate_up=leaf(single, (2, None), f, d),
            out_attention=leaf(single, d, h, k),
            out_mlp=leaf(single, d, f),
        ),
        mod_out=leaf((2, None), d, (D, None)),
        out=leaf((C, None), d),
    )
