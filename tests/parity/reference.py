# SPDX-License-Identifier: Apache-2.0
"""The reference implementations, behind NumPy: diffusers and transformers in float32 on the CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from diffusers.utils import logging as diffusers_logging
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from tests.parity.cases import Case

TOKENIZER = Path(__file__).parents[2] / "src/firstlight/data/demo/tokenizer"

torch.set_num_threads(2)
diffusers_logging.set_verbosity_error()
diffusers_logging.disable_progress_bar()
transformers_logging.disable_progress_bar()


class Reference:
    """One model folder as the reference sees it. Arrays go in and out in the reference's layout:
    pictures and latents (B, C, Y, X), token rows (B, N, C), all float32."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        index = json.loads((folder / "model_index.json").read_text())
        self.taps = tuple(index["text_encoder_out_layers"])
        self.max_sequence_length = index["max_sequence_length"]
        self.pipe = Flux2KleinPipeline.from_pretrained(folder, dtype=dtype)
        self.pipe.set_progress_bar_config(disable=True)

    def cuts(self, prompt: str) -> bool:
        """Does the prompt, with the chat text around it, need more than the tokens allowed?"""
        ids = self.pipe.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}],
            add_generation_prompt=True,
            enable_thinking=False,
            return_dict=False,
        )
        return len(ids) > self.max_sequence_length

    @torch.no_grad()
    def text(self, prompts: Sequence[str]) -> np.ndarray:
        """Text states (B, T, J)."""
        states, _ = self.pipe.encode_prompt(
            list(prompts),
            max_sequence_length=self.max_sequence_length,
            text_encoder_out_layers=self.taps,
        )
        return states.float().numpy()

    @torch.no_grad()
    def velocity(
        self, x: np.ndarray, text: np.ndarray, timestep: np.ndarray, rows: int, columns: int
    ) -> np.ndarray:
        """One transformer call on the tokens of a rows x columns grid; timesteps in [0, 1]."""
        grid = torch.zeros(len(x), 1, rows, columns)
        return self.pipe.transformer(
            hidden_states=torch.tensor(x),
            encoder_hidden_states=torch.tensor(text),
            timestep=torch.tensor(timestep),
            img_ids=self.pipe._prepare_latent_ids(grid),
            txt_ids=self.pipe._prepare_text_ids(torch.tensor(text)),
            guidance=None,
            return_dict=False,
        )[0].numpy()

    @torch.no_grad()
    def encode(self, image: np.ndarray) -> np.ndarray:
        """Mean latents of a picture in [-1, 1]."""
        return self.pipe.vae.encode(torch.tensor(image)).latent_dist.mode().numpy()

    @torch.no_grad()
    def decode(self, latents: np.ndarray) -> np.ndarray:
        return self.pipe.vae.decode(torch.tensor(latents), return_dict=False)[0].numpy()

    def picture(
        self,
        prompts: Sequence[str],
        noise: np.ndarray,
        *,
        steps: int,
        output_type: str = "np",
        **options: Any,
    ) -> np.ndarray:
        """The whole pipeline: (B, Y, X, 3) in [0, 1], or with `latent` (B, C, y, x).

        The size follows from `noise`, (B, 4C, rows, columns).
        """
        multiple = 2 * self.pipe.vae_scale_factor
        out = self.pipe(
            prompt=list(prompts),
            latents=torch.tensor(noise, dtype=self.pipe.dtype),
            height=multiple * noise.shape[2],
            width=multiple * noise.shape[3],
            num_inference_steps=steps,
            guidance_scale=1.0,
            max_sequence_length=self.max_sequence_length,
            text_encoder_out_layers=self.taps,
            output_type=output_type,
            **options,
        ).images
        return out.float().numpy() if isinstance(out, torch.Tensor) else out


def build(case: Case, folder: Path) -> None:
    """Save the case's model, with random weights that let no part of it go unnoticed."""
    generator = torch.Generator().manual_seed(case.seed)
    pipe = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**case.scheduler),
        vae=_randomise(AutoencoderKLFlux2(**case.vae), generator),
        text_encoder=_randomise(
            Qwen3ForCausalLM(Qwen3Config(**case.text_encoder, dtype="float32")), generator
        ),
        tokenizer=Qwen2Tokenizer.from_pretrained(TOKENIZER),
        transformer=_randomise(Flux2Transformer2DModel(**case.transformer), generator),
        is_distilled=True,
    )
    pipe.save_pretrained(folder)
    index = folder / "model_index.json"
    data = json.loads(index.read_text())
    data["max_sequence_length"] = case.max_sequence_length
    data["text_encoder_out_layers"] = list(case.taps)
    data["default_size"] = case.height
    index.write_text(json.dumps(data))


@torch.no_grad()
def _randomise(model: torch.nn.Module, generator: torch.Generator) -> torch.nn.Module:
    """The libraries' own initialisation leaves norms at 1, biases at 0 and attention near uniform:
    a loader that swapped or dropped those would agree all the same."""

    def normal(tensor: torch.Tensor, mean: float, deviation: float) -> None:
        tensor.copy_(mean + deviation * torch.randn(tensor.shape, generator=generator))

    for name, tensor in model.named_parameters():
        if tensor.ndim == 1:
            normal(tensor, 1.0 if name.endswith("weight") else 0.0, 0.3)
        elif "embed_tokens" in name:
            normal(tensor, 0.0, 1.0)
        else:
            normal(tensor, 0.0, tensor[0].numel() ** -0.5)
    for name, tensor in model.named_buffers():
        if name == "bn.running_mean":
            normal(tensor, 0.0, 0.5)
        elif name == "bn.running_var":
            tensor.copy_(0.3 + 2 * torch.rand(tensor.shape, generator=generator))
    return model.eval()
