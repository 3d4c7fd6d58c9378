# SPDX-License-Identifier: Apache-2.0
"""The peer of loading: one component with diffusers or transformers, as their documentation says.

usage: diffusers_load.py FOLDER text_encoder|transformer|vae
"""

import json
import resource
import sys
import time

import torch
from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
from transformers import Qwen3ForCausalLM

folder, component = sys.argv[1:]
classes = {
    "text_encoder": Qwen3ForCausalLM,
    "transformer": Flux2Transformer2DModel,
    "vae": AutoencoderKLFlux2,
}
option = "dtype" if component == "text_encoder" else "torch_dtype"
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
model = (
    classes[component]
    .from_pretrained(folder, subfolder=component, **{option: torch.bfloat16})
    .eval()
)
# Files may be mapped only: a model is there when all of its bytes are.
with torch.no_grad():
    total = sum(float(p.view(-1)[:: 4096 // p.element_size()].sum()) for p in model.parameters())
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"seconds": seconds, "bytes": nbytes, "peak": (peak - before) * 1024}))
