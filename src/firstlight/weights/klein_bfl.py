# SPDX-License-Identifier: Apache-2.0
"""The tables of Black Forest Labs' own files: the same parameters under other names.

Source: the mapping of diffusers' converter, checked against the published files' key lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from firstlight.models.specs.autoencoder import AutoencoderConfig
from firstlight.models.specs.transformer import TransformerConfig
from firstlight.weights import klein
from firstlight.weights.rules import Rule


def is_transformer(names: Iterable[str]) -> bool:
    """Do these keys belong to such a file?"""
    return any(name.startswith(("double_blocks.", "single_blocks.")) for name in names)


def is_autoencoder(names: Iterable[str]) -> bool:
    """Do these keys belong to such a file?"""
    return any(name.startswith(("encoder.down.", "decoder.up.")) for name in names)


def transformer_rules(cfg: TransformerConfig) -> list[Rule]:
    """Rules of a transformer file."""
    D, F, K = cfg.width, cfg.mlp_width, cfg.attention_head_dim
    C, J, E = cfg.in_channels, cfg.joint_attention_dim, cfg.timestep_guidance_channels
    ada = "final_layer.adaLN_modulation.1.weight"
    return [
        Rule("time_in", "time_in.in_layer.weight", (D, E)),
        Rule("time_out", "time_in.out_layer.weight", (D, D)),
        Rule("mod_img", "double_stream_modulation_img.lin.weight", (6 * D, D)),
        Rule("mod_txt", "double_stream_modulation_txt.lin.weight", (6 * D, D)),
        Rule("mod_single", "single_stream_modulation.lin.weight", (3 * D, D)),
        Rule("img_in", "img_in.weight", (D, C)),
        Rule("txt_in", "txt_in.weight", (D, J)),
        *_double_stream("img", (D, F, K)),
        *_double_stream("txt", (D, F, K)),
        *_single_blocks(D, F, K),
        # Rows are (shift, scale) here; the parameter's parts are (scale, shift).
        Rule("mod_out", ada, (2 * D, D), part=0, rows=(D, 2 * D)),
        Rule("mod_out", ada, (2 * D, D), part=1, rows=(0, D)),
        Rule("out", "final_layer.linear.weight", (C, D)),
    ]


def _double_stream(stream: str, widths: tuple[int, int, int]) -> Iterator[Rule]:
    D, F, K = widths
    block, to = f"double_blocks.{{n}}.{stream}", f"double.{stream}"
    yield Rule(f"{to}.qkv", f"{block}_attn.qkv.weight", (3 * D, D))
    yield Rule(f"{to}.q_norm", f"{block}_attn.norm.query_norm.scale", (K,))
    yield Rule(f"{to}.k_norm", f"{block}_attn.norm.key_norm.scale", (K,))
    yield Rule(f"{to}.out", f"{block}_attn.proj.weight", (D, D))
    yield Rule(f"{to}.gate_up", f"{block}_mlp.0.weight", (2 * F, D))
    yield Rule(f"{to}.down", f"{block}_mlp.2.weight", (D, F))


def _single_blocks(D: int, F: int, K: int) -> Iterator[Rule]:
    block = "single_blocks.{n}"
    rows, columns = 3 * D + 2 * F, D + F
    fused, out = f"{block}.linear1.weight", f"{block}.linear2.weight"
    yield Rule("single.qkv", fused, (rows, D), rows=(0, 3 * D))
    yield Rule("single.gate_up", fused, (rows, D), rows=(3 * D, rows))
    yield Rule("single.q_norm", f"{block}.norm.query_norm.scale", (K,))
    yield Rule("single.k_norm", f"{block}.norm.key_norm.scale", (K,))
    yield Rule("single.out_attention", out, (D, columns), columns=(0, D))
    yield Rule("single.out_mlp", out, (D, columns), columns=(D, columns))


def autoencoder_rules(cfg: AutoencoderConfig) -> list[Rule]:
    """Rules of an autoencoder file: diffusers' with their names changed, level by level."""
    levels = len(cfg.block_out_channels)
    return [_renamed(rule, levels) for rule in klein.autoencoder_rules(cfg)]


def _renamed(rule: Rule, levels: int) -> Rule:
    name = rule.source
    for half, stack, short, sampler, there in (
        ("encoder", "down_blocks", "down", "downsamplers.0", "downsample"),
        ("decoder", "up_blocks", "up", "upsamplers.0", "upsample"),
    ):
        for level in range(levels):
            place = level if half == "encoder" else levels - 1 - level
            name = name.replace(f"{half}.{stack}.{level}.", f"{half}.@{short}.{place}.")
        name = name.replace(f"@{short}", short).replace(f".{sampler}.", f".{there}.")
        name = name.replace(f"{half}.conv_norm_out", f"{half}.norm_out")
        name = name.replace(f"{half}.mid_block.attentions.0.group_norm", f"{half}.mid.attn_1.norm")
        for ours, theirs in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
            name = name.replace(
                f"{half}.mid_block.attentions.0.{ours}.", f"{half}.mid.attn_1.{theirs}."
            )
        for number in range(2):
            name = name.replace(
                f"{half}.mid_block.resnets.{number}.", f"{half}.mid.block_{number + 1}."
            )
    name = name.replace(".resnets.", ".block.").replace(".conv_shortcut.", ".nin_shortcut.")
    if name.startswith("quant_conv"):
        name = f"encoder.{name}"
    if name.startswith("post_quant_conv"):
        name = f"decoder.{name}"
    is_projection = ".attn_1." in name and ".norm." not in name and name.endswith("weight")
    shape = (*rule.shape, 1, 1) if is_projection else rule.shape
    return replace(rule, source=name, shape=shape)
