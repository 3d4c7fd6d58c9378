# SPDX-License-Identifier: Apache-2.0
"""Qwen3 text encoder, up to the last tapped layer: architecture and parameters.

Letters: D width, H query heads, G key/value heads, K head width, F MLP width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

from firstlight.models.params import (
    HEADS,
    KV_HEADS,
    LAYERS,
    MLP,
    VOCAB,
    WIDTH,
    DType,
    Leaf,
    ParamSpec,
    params,
)
from firstlight.models.specs.fields import Fields


@dataclass(frozen=True, kw_only=True)
class TextEncoderConfig:
    """`text_encoder/config.json` under transformers' key names (Qwen3), and the tapped layers.

    `out_layers` are indices of hidden states: 0 is the embedding, k the residual stream after
    layer k; `num_hidden_layers` itself is the final-normed state.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    out_layers: tuple[int, ...]

    @property
    def layers_read(self) -> int:
        return max(self.out_layers)

    @property
    def needs_final_norm(self) -> bool:
        return self.num_hidden_layers in self.out_layers

    @property
    def output_width(self) -> int:
        return self.hidden_size * len(self.out_layers)

    @classmethod
    def from_json(
        cls,
        data: Mapping[str, Any],
        out_layers: tuple[int, ...],
        where: str = "text_encoder/config.json",
    ) -> TextEncoderConfig:
        """Read and check the architecture. Raises CheckpointError listing every fault.

        Accepts both spellings of the RoPE settings (`rope_theta`, `rope_parameters`).
        """
        f = Fields(data, where)
        f.only("model_type", "qwen3", default="qwen3")
        f.only("hidden_act", "silu", default="silu")
        f.only("attention_bias", False, default=False)
        f.only("use_sliding_window", False, default=False)
        rope = data.get("rope_parameters") or {}
        scaling = data.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or not isinstance(scaling, Mapping):
            f.check(False, "rope_parameters and rope_scaling must be objects or null")
            rope, scaling = {}, {}
        layers = data.get("layer_types") or []
        f.check(
            isinstance(layers, list) and all(kind == "full_attention" for kind in layers),
            f"layer_types is {layers!r}; only 'full_attention' is supported",
        )
        for settings in (rope, scaling):
            kind = settings.get("rope_type", settings.get("type", "default"))
            f.check(kind == "default", f"rope_type is {kind!r}; only 'default' is supported")
        theta = Fields(
            {"rope_theta": rope.get("rope_theta", data.get("rope_theta", 10000.0))}, where
        )
        heads = f.integer("num_attention_heads")
        config = cls(
            hidden_size=f.integer("hidden_size"),
            intermediate_size=f.integer("intermediate_size"),
            num_hidden_layers=f.integer("num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=f.integer("num_key_value_heads", heads),
            head_dim=f.integer("head_dim", 128, minimum=2),
            vocab_size=f.integer("vocab_size"),
            rms_norm_eps=f.number("rms_norm_eps", 1e-6),
            rope_theta=theta.number("rope_theta"),
            out_layers=out_layers,
        )
        f.problems += theta.problems
        f.check(
            config.num_attention_heads % config.num_key_value_heads == 0,
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}",
        )
        f.check(config.head_dim % 2 == 0, f"head_dim {config.head_dim} must be even")
        f.check(
            all(0 <= tap <= config.num_hidden_layers for tap in out_layers),
            f"text_encoder_out_layers {list(out_layers)} must lie in 0..num_hidden_layers "
            f"({config.num_hidden_layers})",
        )
        f.done()
        return config


@params
class EncoderLayers(Generic[Leaf]):
    """Equal Qwen3 decoder layers, stacked."""

    input_norm: Leaf
    q: Leaf
    kv: Leaf
    q_norm: Leaf
    k_norm: Leaf
    out: Leaf
    post_norm: Leaf
    gate_up: Leaf
    down: Leaf


@params
class TextEncoder(Generic[Leaf]):
    embed: Leaf
    layers: EncoderLayers[Leaf]
    final_norm: Leaf | None


def spec(cfg: TextEncoderConfig, dtype: DType) -> TextEncoder[ParamSpec]:
    """The parameters that the tapped hidden states depend on, and no others."""
    n, d = (cfg.layers_read, LAYERS), (cfg.hidden_size, WIDTH)
    h, g = (cfg.num_attention_heads, HEADS), (cfg.num_key_value_heads, KV_HEADS)
    k, f = (cfg.head_dim, None), (cfg.intermediate_size, MLP)

    def leaf(*dims: tuple[int, str | None]) -> ParamSpec:
        return ParamSpec(tuple(size for size, _ in dims), tuple(axis for _, axis in dims), dtype)

    return TextEncoder(
        embed=leaf((cfg.vocab_size, VOCAB), d),
        layers=EncoderLayers(
            input_norm=leaf(n, d),
            q=leaf(n, h, k, d),
            kv=leaf(n, (2, None), g, k, d),
            q_norm=leaf(n, k),
            k_norm=leaf(n, k),
            out=leaf(n, d, h, k),
            post_norm=leaf(n, d),
            gate_up=leaf(n, (2, None), f, d),
            down=leaf(n, d, f),
        ),
        final_norm=leaf(d) if cfg.needs_final_norm else None,
    )
