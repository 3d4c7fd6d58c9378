# SPDX-License-Identifier: Apache-2.0
"""A tiny klein with random weights in diffusers' layout, made without torch or diffusers.

Tensor names and shapes come from `keys.py`, which is written down apart from the package's tables.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import keys
import numpy as np
from safetensors.numpy import save_file

from firstlight.weights.hub import DEMO_FOLDER

CONFIGS: dict[str, dict[str, Any]] = {
    "model_index": {
        "_class_name": "Flux2KleinPipeline",
        "is_distilled": True,
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen3ForCausalLM"],
        "tokenizer": ["transformers", "Qwen2TokenizerFast"],
        "transformer": ["diffusers", "Flux2Transformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLFlux2"],
        "max_sequence_length": 32,
        "text_encoder_out_layers": [1, 2],
        "default_size": 16,
    },
    "transformer": {
        "_class_name": "Flux2Transformer2DModel",
        "in_channels": 16,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "timestep_guidance_channels": 32,
        "mlp_ratio": 2.0,
        "axes_dims_rope": [4, 4, 4, 4],
        "guidance_embeds": False,
    },
    "text_encoder": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 3008,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
        "tie_word_embeddings": False,
    },
    "vae": {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": [8, 8],
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
        "layers_per_block": 1,
        "latent_channels": 4,
        "norm_num_groups": 4,
    },
    "scheduler": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "use_dynamic_shifting": True,
        "shift": 3.0,
    },
}

STEMS = {
    "text_encoder": "model",
    "transformer": "diffusion_pytorch_model",
    "vae": "diffusion_pytorch_model",
}
TABLES = {
    "text_encoder": keys.text_encoder,
    "transformer": keys.transformer,
    "vae": keys.autoencoder,
}

Tensors = dict[str, np.ndarray]


def tensors(component: str, config: dict[str, Any], seed: int = 0) -> Tensors:
    """Random float32 tensors of one component: small, norms and variances around 1."""
    rng = np.random.default_rng([seed, len(component)])
    made = {}
    for name, shape in TABLES[component](config).items():
        value = rng.standard_normal(shape, np.float32) * 0.1
        is_scale = (len(shape) == 1 and name.endswith("weight")) or name.endswith("running_var")
        made[name] = value * 0.5 + 1 if is_scale else value
    if component == "vae":
        made["bn.num_batches_tracked"] = np.asarray(7, np.int64)
    return made


def write_tensors(folder: Path, stem: str, values: Tensors, shards: int = 1) -> None:
    """One file, or `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(values, folder / f"{stem}.safetensors")
        return
    names = sorted(values)
    weight_map = {}
    for number in range(shards):
        file = f"{stem}-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: values[name] for name in names[number::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index))


def write_json(folder: Path, component: str, config: dict[str, Any]) -> None:
    names = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
    path = folder / names.get(component, f"{component}/config.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    dtype: Any = np.float32,
    shards: int = 1,
    **changes: dict[str, Any],
) -> Path:
    """A whole model; `changes` replaces keys of components' configurations, by component."""
    configs = copy.deepcopy(CONFIGS)
    for component, values in changes.items():
        configs[component] |= values
    for component, config in configs.items():
        write_json(folder, component, config)
    for component, stem in STEMS.items():
        values = tensors(component, configs[component], seed)
        cast = {k: v.astype(dtype) if v.dtype == np.float32 else v for k, v in values.items()}
        write_tensors(folder / component, stem, cast, shards)
    shutil.copytree(DEMO_FOLDER / "tokenizer", folder / "tokenizer")
    return folder
