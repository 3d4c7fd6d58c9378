# SPDX-License-Identifier: Apache-2.0
"""The peer of `firstlight generate`: the same picture with diffusers, as its documentation says.

usage: diffusers_generate.py FOLDER PROMPT SIZE DTYPE OUTPUT
"""

import sys

import torch
from diffusers import Flux2KleinPipeline

folder, prompt, size, dtype, output = sys.argv[1:]
pipe = Flux2KleinPipeline.from_pretrained(folder, torch_dtype=getattr(torch, dtype))
pipe.set_progress_bar_config(disable=True)
image = pipe(
    prompt=prompt,
    height=int(size),
    width=int(size),
    num_inference_steps=4,
    guidance_scale=1.0,
    # The packaged model's own settings, which diffusers does not read from model_index.json.
    max_sequence_length=48,
    text_encoder_out_layers=(2, 4, 6),
    generator=torch.Generator().manual_seed(1),
).images[0]
image.save(output)
