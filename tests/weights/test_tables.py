# SPDX-License-Identifier: Apache-2.0
"""The weight tables against an independent list of names and shapes, at the real sizes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import keys
import pytest

from firstlight.models.params import named_leaves
from firstlight.models.specs import autoencoder, text_encoder, transformer
from firstlight.weights import klein
from firstlight.weights.component import Component
from firstlight.weights.reader import Tensor
from firstlight.weights.rules import Rule, expand

TRANSFORMERS = {
    "4B": dict(num_layers=5, num_single_layers=20, num_attention_heads=24, joint=7680, tensors=169),
    "9B": dict(
        num_layers=8, num_single_layers=24, num_attention_heads=32, joint=12288, tensors=233
    ),
}
TEXT_ENCODERS = {
    "4B": dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    "8B": dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
}


def stored(label: str, shapes: keys.Shapes) -> Component:
    """What the headers of such a checkpoint would say."""
    tensors = {
        name: Tensor(Path("x"), name, "BF16", shape, 0, 2 * math.prod(shape))
        for name, shape in shapes.items()
    }
    return Component(label, tensors)


def check(spec: Any, rules: list[Rule], shapes: keys.Shapes, unread: tuple[str, ...] = ()) -> None:
    """Every tensor is used or unread on purpose, every parameter filled, every shape equal."""
    made = expand(rules, dict(named_leaves(spec)), stored("x", shapes), unread)
    assert made.problems == []


@pytest.mark.parametrize("size", TRANSFORMERS)
def test_transformer(size: str) -> None:
    facts = TRANSFORMERS[size]
    config = {
        "in_channels": 128,
        "num_layers": facts["num_layers"],
        "num_single_layers": facts["num_single_layers"],
        "num_attention_heads": facts["num_attention_heads"],
        "attention_head_dim": 128,
        "joint_attention_dim": facts["joint"],
        "timestep_guidance_channels": 256,
        "mlp_ratio": 3.0,
        "guidance_embeds": False,
    }
    cfg = transformer.TransformerConfig.from_json(config)
    shapes = keys.transformer(config)
    assert len(shapes) == facts["tensors"]
    check(transformer.spec(cfg, "bfloat16"), klein.transformer_rules(cfg), shapes)


@pytest.mark.parametrize("size", TEXT_ENCODERS)
@pytest.mark.parametrize("taps", [(9, 18, 27), (27, 9, 36), (0,)])
def test_text_encoder(size: str, taps: tuple[int, ...]) -> None:
    config = {
        **TEXT_ENCODERS[size],
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1e6,
        "rope_scaling": None,
    }
    cfg = text_encoder.TextEncoderConfig.from_json(config, taps)
    shapes = keys.text_encoder(config)
    assert ("lm_head.weight" in shapes) != config["tie_word_embeddings"]
    check(
        text_encoder.spec(cfg, "bfloat16"),
        klein.text_encoder_rules(cfg),
        shapes,
        klein.text_encoder_unread(cfg),
    )


@pytest.mark.parametrize("decoder", [None, [96, 192, 384, 384]])
@pytest.mark.parametrize("quant", [True, False])
def test_autoencoder(decoder: list[int] | None, quant: bool) -> None:
    config = {
        "block_out_channels": [128, 256, 512, 512],
        "decoder_block_out_channels": decoder,
        "layers_per_block": 2,
        "latent_channels": 32,
        "use_quant_conv": quant,
        "use_post_quant_conv": quant,
    }
    cfg = autoencoder.AutoencoderConfig.from_json(config)
    shapes = keys.autoencoder(config)
    # The batch counter of the statistics is the 251st tensor of the whole autoencoder.
    assert len(shapes) == (250 if quant else 246)
    check(autoencoder.spec(cfg, "bfloat16"), klein.autoencoder_rules(cfg), shapes)


def test_the_check_sees_a_fault_of_the_table() -> None:
    cfg = autoencoder.AutoencoderConfig()
    specs = dict(named_leaves(autoencoder.spec(cfg, "bfloat16")))
    rules = klein.autoencoder_rules(cfg)
    nothing = Component("x")
    with pytest.raises(ValueError, match=r"rules fill 0 of 128 elements of stats\.var"):
        expand(rules[:-1], specs, nothing)
    with pytest.raises(ValueError, match=r"rules fill 256 of 128 elements of stats\.var"):
        expand([*rules, rules[-1]], specs, nothing)
    half = Rule("stats.var", "bn.running_var", (256,), rows=(0, 128))
    with pytest.raises(ValueError, match=r"rules use 128 of 256 elements of bn\.running_var"):
        expand([*rules[:-1], half], specs, nothing)


def test_the_check_sees_two_rules_in_one_place() -> None:
    """The counts are right: only the places are not."""
    cfg = autoencoder.AutoencoderConfig()
    specs = dict(named_leaves(autoencoder.spec(cfg, "bfloat16")))
    rules = klein.autoencoder_rules(cfg)

    def instead(target: str, *, part: int) -> list[Rule]:
        return [
            dataclasses.replace(rule, part=0)
            if (rule.target, rule.part) == (target, part)
            else rule
            for rule in rules
        ]

    with pytest.raises(ValueError, match=r"fill elements of decoder\.mid\.attention\.qkv twice"):
        expand(instead("decoder.mid.attention.qkv", part=2), specs, Component("x"))
    whole = next(rule for rule in rules if rule.target == "stats.var")
    halves = [dataclasses.replace(whole, shape=(256,), rows=rows) for rows in ((0, 128), (64, 192))]
    halves[1] = dataclasses.replace(halves[1], target="stats.mean")
    others = [rule for rule in rules if not rule.target.startswith("stats")]
    with pytest.raises(ValueError, match=r"use elements of bn\.running_var twice"):
        expand([*others, *halves], specs, Component("x"))
