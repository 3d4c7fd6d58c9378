# SPDX-License-Identifier: Apache-2.0
"""Names and shapes of every tensor that diffusers and transformers store, from a `config.json`.

Written down apart from the package's own weight tables, so that a fault there is seen here.
`num_batches_tracked`, which holds no weight, is left out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

Shapes = dict[str, tuple[int, ...]]


def transformer(config: dict[str, Any]) -> Shapes:
    """Flux2Transformer2DModel without guidance embedding; linear layers have no biases."""
    heads, head = config["num_attention_heads"], config["attention_head_dim"]
    d, channels = heads * head, config["in_channels"]
    mlp = int(d * config["mlp_ratio"])
    shapes: Shapes = {
        "x_embedder.weight": (d, channels),
        "context_embedder.weight": (d, config["joint_attention_dim"]),
        "time_guidance_embed.timestep_embedder.linear_1.weight": (
            d,
            config["timestep_guidance_channels"],
        ),
        "time_guidance_embed.timestep_embedder.linear_2.weight": (d, d),
        "double_stream_modulation_img.linear.weight": (6 * d, d),
        "double_stream_modulation_txt.linear.weight": (6 * d, d),
        "single_stream_modulation.linear.weight": (3 * d, d),
        "norm_out.linear.weight": (2 * d, d),
        "proj_out.weight": (channels, d),
    }
    projections = (
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "add_q_proj",
        "add_k_proj",
        "add_v_proj",
        "to_add_out",
    )
    for i in range(config["num_layers"]):
        block = f"transformer_blocks.{i}"
        for name in projections:
            shapes[f"{block}.attn.{name}.weight"] = (d, d)
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{block}.attn.{name}.weight"] = (head,)
        for name in ("ff", "ff_context"):
            shapes[f"{block}.{name}.linear_in.weight"] = (2 * mlp, d)
            shapes[f"{block}.{name}.linear_out.weight"] = (d, mlp)
    for i in range(config["num_single_layers"]):
        block = f"single_transformer_blocks.{i}.attn"
        shapes[f"{block}.to_qkv_mlp_proj.weight"] = (3 * d + 2 * mlp, d)
        shapes[f"{block}.to_out.weight"] = (d, d + mlp)
        shapes[f"{block}.norm_q.weight"] = (head,)
        shapes[f"{block}.norm_k.weight"] = (head,)
    return shapes


def text_encoder(config: dict[str, Any]) -> Shapes:
    """Qwen3ForCausalLM, all layers and the language head included."""
    d, head, mlp = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: Shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], d),
        "model.norm.weight": (d,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], d)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
            f"{layer}.self_attn.q_proj.weight": (queries, d),
            f"{layer}.self_attn.k_proj.weight": (keys, d),
            f"{layer}.self_attn.v_proj.weight": (keys, d),
            f"{layer}.self_attn.o_proj.weight": (d, queries),
            f"{layer}.self_attn.q_norm.weight": (head,),
            f"{layer}.self_attn.k_norm.weight": (head,),
            f"{layer}.mlp.gate_proj.weight": (mlp, d),
            f"{layer}.mlp.up_proj.weight": (mlp, d),
            f"{layer}.mlp.down_proj.weight": (d, mlp),
        }
    return shapes


def autoencoder(config: dict[str, Any]) -> Shapes:
    """AutoencoderKLFlux2 with both 1x1 convolutions as the configuration says."""
    widths = config["block_out_channels"]
    up = list(reversed(config.get("decoder_block_out_channels") or widths))
    z, blocks = config["latent_channels"], config["layers_per_block"]
    shapes: Shapes = {"bn.running_mean": (4 * z,), "bn.running_var": (4 * z,)}
    _conv(shapes, "encoder.conv_in", 3, widths[0], 3)
    _levels(shapes, "encoder.down_blocks", "downsamplers", [widths[0], *widths], blocks)
    _ends(shapes, "encoder", widths[-1], widths[-1], 2 * z)
    _conv(shapes, "decoder.conv_in", z, up[0], 3)
    _levels(shapes, "decoder.up_blocks", "upsamplers", [up[0], *up], blocks + 1)
    _ends(shapes, "decoder", up[0], up[-1], 3)
    if config.get("use_quant_conv", True):
        _conv(shapes, "quant_conv", 2 * z, 2 * z, 1)
    if config.get("use_post_quant_conv", True):
        _conv(shapes, "post_quant_conv", z, z, 1)
    return shapes


def _ends(shapes: Shapes, part: str, middle: int, last: int, outputs: int) -> None:
    """The middle block and the output layers, named alike in the encoder and the decoder."""
    for i in range(2):
        _resnet(shapes, f"{part}.mid_block.resnets.{i}", middle, middle)
    attention = f"{part}.mid_block.attentions.0"
    _affine(shapes, f"{attention}.group_norm", (middle,))
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        _affine(shapes, f"{attention}.{name}", (middle, middle))
    _affine(shapes, f"{part}.conv_norm_out", (last,))
    _conv(shapes, f"{part}.conv_out", last, outputs, 3)


def _levels(shapes: Shapes, part: str, resample: str, widths: list[int], blocks: int) -> None:
    """`widths` are the inputs of the first level and the outputs of each."""
    last = len(widths) - 2
    for level, (inputs, outputs) in enumerate(pairwise(widths)):
        for i in range(blocks):
            _resnet(shapes, f"{part}.{level}.resnets.{i}", outputs if i else inputs, outputs)
        if level < last:
            _conv(shapes, f"{part}.{level}.{resample}.0.conv", outputs, outputs, 3)


def _resnet(shapes: Shapes, name: str, inputs: int, outputs: int) -> None:
    _affine(shapes, f"{name}.norm1", (inputs,))
    _conv(shapes, f"{name}.conv1", inputs, outputs, 3)
    _affine(shapes, f"{name}.norm2", (outputs,))
    _conv(shapes, f"{name}.conv2", outputs, outputs, 3)
    if inputs != outputs:
        _conv(shapes, f"{name}.conv_shortcut", inputs, outputs, 1)


def _conv(shapes: Shapes, name: str, inputs: int, outputs: int, size: int) -> None:
    _affine(shapes, name, (outputs, inputs, size, size))


def _affine(shapes: Shapes, name: str, weight: tuple[int, ...]) -> None:
    shapes[f"{name}.weight"] = weight
    shapes[f"{name}.bias"] = weight[:1]
