# SPDX-License-Identifier: Apache-2.0
"""The configurations of klein 4B and 9B as their repositories have them, and nothing else."""

from __future__ import annotations

from typing import Any

Configs = dict[str, dict[str, Any]]

_TRANSFORMER = {
    "_class_name": "Flux2Transformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [32, 32, 32, 32],
    "eps": 1e-6,
    "guidance_embeds": False,
    "in_channels": 128,
    "mlp_ratio": 3.0,
    "out_channels": None,
    "patch_size": 1,
    "rope_theta": 2000,
    "timestep_guidance_channels": 256,
}
_TEXT_ENCODER = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 1_000_000, "rope_type": "default"},
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_VAE = {
    "_class_name": "AutoencoderKLFlux2",
    "act_fn": "silu",
    "batch_norm_eps": 1e-4,
    "batch_norm_momentum": 0.1,
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "in_channels": 3,
    "latent_channels": 32,
    "layers_per_block": 2,
    "mid_block_add_attention": True,
    "norm_num_groups": 32,
    "out_channels": 3,
    "patch_size": [2, 2],
    "sample_size": 1024,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "use_post_quant_conv": True,
    "use_quant_conv": True,
}
_SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "shift_terminal": None,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
_INDEX = {
    "_class_name": "Flux2KleinPipeline",
    "is_distilled": True,
    "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
    "text_encoder": ["transformers", "Qwen3ForCausalLM"],
    "tokenizer": ["transformers", "Qwen2TokenizerFast"],
    "transformer": ["diffusers", "Flux2Transformer2DModel"],
    "vae": ["diffusers", "AutoencoderKLFlux2"],
}


def _model(transformer: dict[str, Any], text_encoder: dict[str, Any]) -> Configs:
    return {
        "model_index": _INDEX,
        "scheduler": _SCHEDULER,
        "transformer": {**_TRANSFORMER, **transformer},
        "text_encoder": {**_TEXT_ENCODER, **text_encoder},
        "vae": _VAE,
    }


REAL_SIZES: dict[str, Configs] = {
    "4b": _model(
        dict(num_layers=5, num_single_layers=20, num_attention_heads=24, joint_attention_dim=7680),
        dict(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True),
    ),
    "9b": _model(
        dict(num_layers=8, num_single_layers=24, num_attention_heads=32, joint_attention_dim=12288),
        dict(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False),
    ),
}
"""Configurations by size, then by component; `model_index` among them."""
