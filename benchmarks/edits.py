# SPDX-License-Identifier: Apache-2.0
"""Edits with 1, 2 and 4 references, plain and cached, and guided pictures, against diffusers.

usage: python benchmarks/edits.py [--model FOLDER] [--size 128] [--steps 4] [--rounds 5]

Both sides in one process, in turn, after a first call that is not counted; bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import Flux2KleinKVPipeline, Flux2KleinPipeline
from PIL import Image

import firstlight
from firstlight import Pipeline

DEMO = Path(firstlight.__file__).parent / "data" / "demo"
PROMPT = "make the background green"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=str(DEMO))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    pipe = Pipeline.from_pretrained(options.model, sizes=[])
    loaded = Flux2KleinPipeline.from_pretrained(options.model, torch_dtype=torch.bfloat16)
    rng = np.random.default_rng(0)
    side = options.size
    images = [Image.fromarray(rng.integers(0, 255, (side, side, 3), np.uint8)) for _ in range(4)]
    common = dict(height=side, width=side, num_inference_steps=options.steps)
    text = dict(
        max_sequence_length=pipe.model.max_sequence_length,
        text_encoder_out_layers=pipe.model.text_encoder.out_layers,
    )
    distilled = pipe.model

    def ours(count: int, cached: bool, guidance: float) -> None:
        pipe.model = replace(distilled, is_distilled=guidance == 1)
        pipe._engine.caches_references = cached
        given = {"image": images[:count]} if count else {}
        pipe(PROMPT, seed=1, guidance_scale=guidance, **given, **common)

    def theirs(count: int, cached: bool, guidance: float) -> None:
        kind = Flux2KleinKVPipeline if cached else Flux2KleinPipeline
        made = kind(**{**loaded.components, "is_distilled": guidance == 1})
        made.set_progress_bar_config(disable=True)
        given = {"image": images[:count]} if count else {}
        extra = {} if cached else {"guidance_scale": guidance}
        made(prompt=PROMPT, **given, **extra, **common, **text)

    print(f"{side} px, {options.steps} steps, seconds, medians of {options.rounds}:")
    cases = [(0, False, 1.0), (1, False, 1.0), (2, False, 1.0), (4, False, 1.0)]
    cases += [(1, True, 1.0), (2, True, 1.0), (4, True, 1.0), (0, False, 4.0)]
    for count, cached, guidance in cases:
        taken: dict[str, list[float]] = {"ours": [], "theirs": []}
        for number in range(options.rounds + 1):
            for name, call in (("ours", ours), ("theirs", theirs)):
                begun = time.perf_counter()
                call(count, cached, guidance)
                if number:
                    taken[name].append(time.perf_counter() - begun)
        mine, other = (statistics.median(taken[name]) for name in ("ours", "theirs"))
        what = f"{count} references{', cached' * cached}{', guided' * (guidance > 1)}"
        print(f"{what:24} firstlight {mine:.3f}  diffusers {other:.3f}  ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
