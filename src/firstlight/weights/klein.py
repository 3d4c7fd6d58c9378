# SPDX-License-Identifier: Apache-2.0
"""The tables: names and shapes of stored tensors, and the parameters they fill. Nothing else.

Sources: diffusers' Flux2Transformer2DModel and AutoencoderKLFlux2, transformers' Qwen3Model.
"""

from __future__ import annotations

from collections.abc import Iterator

from firstlight.models.specs.autoencoder import AutoencoderConfig
from firstlight.models.specs.text_encoder import TextEncoderConfig
from firstlight.models.specs.transformer import TransformerConfig
from firstlight.weights.rules import Rule

AUTOENCODER_UNREAD = ("bn.num_batches_tracked",)
"""The statistics are fixed: how many batches they were gathered from has no effect."""


def transformer_rules(cfg: TransformerConfig) -> list[Rule]:
    """Rules of `transformer/`."""
    D, F, K = cfg.width, cfg.mlp_width, cfg.attention_head_dim
    C, J, E = cfg.in_channels, cfg.joint_attention_dim, cfg.timestep_guidance_channels
    embedder = "time_guidance_embed.timestep_embedder"
    return [
        Rule("time_in", f"{embedder}.linear_1.weight", (D, E)),
        Rule("time_out", f"{embedder}.linear_2.weight", (D, D)),
        Rule("mod_img", "double_stream_modulation_img.linear.weight", (6 * D, D)),
        Rule("mod_txt", "double_stream_modulation_txt.linear.weight", (6 * D, D)),
        Rule("mod_single", "single_stream_modulation.linear.weight", (3 * D, D)),
        Rule("img_in", "x_embedder.weight", (D, C)),
        Rule("txt_in", "context_embedder.weight", (D, J)),
        *_double_stream("img", ("to_q", "to_k", "to_v", "to_out.0"), "", "ff", (D, F, K)),
        *_double_stream(
            "txt",
            ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
            "added_",
            "ff_context",
            (D, F, K),
        ),
        *_single_blocks(D, F, K),
        Rule("mod_out", "norm_out.linear.weight", (2 * D, D)),
        Rule("out", "proj_out.weight", (C, D)),
    ]


def _double_stream(
    stream: str,
    projections: tuple[str, str, str, str],
    norm: str,
    mlp: str,
    widths: tuple[int, int, int],
) -> Iterator[Rule]:
    D, F, K = widths
    block, to = "transformer_blocks.{n}", f"double.{stream}"
    *qkv, out = projections
    for part, name in enumerate(qkv):
        yield Rule(f"{to}.qkv", f"{block}.attn.{name}.weight", (D, D), part=part)
    yield Rule(f"{to}.q_norm", f"{block}.attn.norm_{norm}q.weight", (K,))
    yield Rule(f"{to}.k_norm", f"{block}.attn.norm_{norm}k.weight", (K,))
    yield Rule(f"{to}.out", f"{block}.attn.{out}.weight", (D, D))
    yield Rule(f"{to}.gate_up", f"{block}.{mlp}.linear_in.weight", (2 * F, D))
    yield Rule(f"{to}.down", f"{block}.{mlp}.linear_out.weight", (D, F))


def _single_blocks(D: int, F: int, K: int) -> Iterator[Rule]:
    block = "single_transformer_blocks.{n}.attn"
    fused, out = f"{block}.to_qkv_mlp_proj.weight", f"{block}.to_out.weight"
    rows, columns = 3 * D + 2 * F, D + F
    yield Rule("single.qkv", fused, (rows, D), rows=(0, 3 * D))
    yield Rule("single.gate_up", fused, (rows, D), rows=(3 * D, rows))
    yield Rule("single.q_norm", f"{block}.norm_q.weight", (K,))
    yield Rule("single.k_norm", f"{block}.norm_k.weight", (K,))
    yield Rule("single.out_attention", out, (D, columns), columns=(0, D))
    yield Rule("single.out_mlp", out, (D, columns), columns=(D, columns))


def text_encoder_rules(cfg: TextEncoderConfig) -> list[Rule]:
    """Rules of `text_encoder/`: nothing past the last tapped layer."""
    D, F, K = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    queries, keys = cfg.num_attention_heads * K, cfg.num_key_value_heads * K
    block, to = "model.layers.{n}", "layers"
    rules = [Rule("embed", "model.embed_tokens.weight", (cfg.vocab_size, D))]
    if cfg.layers_read:
        rules += [
            Rule(f"{to}.input_norm", f"{block}.input_layernorm.weight", (D,)),
            Rule(f"{to}.q", f"{block}.self_attn.q_proj.weight", (queries, D)),
            Rule(f"{to}.kv", f"{block}.self_attn.k_proj.weight", (keys, D), part=0),
            Rule(f"{to}.kv", f"{block}.self_attn.v_proj.weight", (keys, D), part=1),
            Rule(f"{to}.q_norm", f"{block}.self_attn.q_norm.weight", (K,)),
            Rule(f"{to}.k_norm", f"{block}.self_attn.k_norm.weight", (K,)),
            Rule(f"{to}.out", f"{block}.self_attn.o_proj.weight", (D, queries)),
            Rule(f"{to}.post_norm", f"{block}.post_attention_layernorm.weight", (D,)),
            Rule(f"{to}.gate_up", f"{block}.mlp.gate_proj.weight", (F, D), part=0),
            Rule(f"{to}.gate_up", f"{block}.mlp.up_proj.weight", (F, D), part=1),
            Rule(f"{to}.down", f"{block}.mlp.down_proj.weight", (D, F)),
        ]
    if cfg.needs_final_norm:
        rules.append(Rule("final_norm", "model.norm.weight", (D,)))
    return rules


def text_encoder_unread(cfg: TextEncoderConfig) -> tuple[str, ...]:
    """Tensors that no tapped state depends on."""
    later = range(cfg.layers_read, cfg.num_hidden_layers)
    norm = () if cfg.needs_final_norm else ("model.norm.weight",)
    return ("lm_head.weight", *norm, *(f"model.layers.{n}.*" for n in later))


def autoencoder_rules(cfg: AutoencoderConfig) -> list[Rule]:
    """Rules of `vae/`, encoder included."""
    z, widths, up = (
        cfg.latent_channels,
        cfg.block_out_channels,
        cfg.decoder_block_out_channels[::-1],
    )
    stats = (cfg.token_channels,)
    encoder = [
        *_conv("encoder.conv_in", "encoder.conv_in", 3, widths[0], 3),
        *_levels(
            ("encoder", "down_blocks", "downsamplers"), widths[0], widths, cfg.layers_per_block
        ),
        *_mid("encoder", widths[-1], cfg.mid_block_add_attention),
        *_norm("encoder.norm_out", "encoder.conv_norm_out", widths[-1]),
        *_conv("encoder.conv_out", "encoder.conv_out", widths[-1], 2 * z, 3),
    ]
    decoder = [
        *_conv("decoder.conv_in", "decoder.conv_in", z, up[0], 3),
        *_levels(("decoder", "up_blocks", "upsamplers"), up[0], up, cfg.layers_per_block + 1),
        *_mid("decoder", up[0], cfg.mid_block_add_attention),
        *_norm("decoder.norm_out", "decoder.conv_norm_out", up[-1]),
        *_conv("decoder.conv_out", "decoder.conv_out", up[-1], 3, 3),
    ]
    if cfg.use_quant_conv:
        encoder += _conv("encoder.quant", "quant_conv", 2 * z, 2 * z, 1)
    if cfg.use_post_quant_conv:
        decoder += _conv("decoder.post_quant", "post_quant_conv", z, z, 1)
    return [
        *encoder,
        *decoder,
        Rule("stats.mean", "bn.running_mean", stats),
        Rule("stats.var", "bn.running_var", stats),
    ]


def _conv(target: str, source: str, inputs: int, outputs: int, size: int) -> Iterator[Rule]:
    yield Rule(f"{target}.kernel", f"{source}.weight", (outputs, inputs, size, size))
    yield Rule(f"{target}.bias", f"{source}.bias", (outputs,))


def _norm(target: str, source: str, width: int) -> Iterator[Rule]:
    yield Rule(f"{target}.scale", f"{source}.weight", (width,))
    yield Rule(f"{target}.bias", f"{source}.bias", (width,))


def _res_block(target: str, source: str, inputs: int, outputs: int) -> Iterator[Rule]:
    yield from _norm(f"{target}.norm1", f"{source}.norm1", inputs)
    yield from _conv(f"{target}.conv1", f"{source}.conv1", inputs, outputs, 3)
    yield from _norm(f"{target}.norm2", f"{source}.norm2", outputs)
    yield from _conv(f"{target}.conv2", f"{source}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        yield from _conv(f"{target}.shortcut", f"{source}.conv_shortcut", inputs, outputs, 1)


def _mid(half: str, C: int, attention: bool) -> Iterator[Rule]:
    target, source = f"{half}.mid", f"{half}.mid_block"
    yield from _res_block(f"{target}.first", f"{source}.resnets.0", C, C)
    yield from _res_block(f"{target}.second", f"{source}.resnets.1", C, C)
    if not attention:
        return
    target, source = f"{target}.attention", f"{source}.attentions.0"
    yield from _norm(f"{target}.norm", f"{source}.group_norm", C)
    for part, name in enumerate(("to_q", "to_k", "to_v")):
        yield Rule(f"{target}.qkv", f"{source}.{name}.weight", (C, C), part=part)
        yield Rule(f"{target}.qkv_bias", f"{source}.{name}.bias", (C,), part=part)
    yield Rule(f"{target}.out", f"{source}.to_out.0.weight", (C, C))
    yield Rule(f"{target}.out_bias", f"{source}.to_out.0.bias", (C,))


def _levels(
    names: tuple[str, str, str], inputs: int, widths: tuple[int, ...], blocks: int
) -> Iterator[Rule]:
    half, levels, resamplers = names
    for n, width in enumerate(widths):
        target, source = f"{half}.levels.{n}", f"{half}.{levels}.{n}"
        for i in range(blocks):
            yield from _res_block(
                f"{target}.blocks.{i}", f"{source}.resnets.{i}", inputs if i == 0 else width, width
            )
        if n < len(widths) - 1:
            resample = f"{source}.{resamplers}.0.conv"
            yield from _conv(f"{target}.resample", resample, width, width, 3)
        inputs = width
