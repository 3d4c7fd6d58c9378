# SPDX-License-Identifier: Apache-2.0
"""A pipeline without a model: it answers like the real one, at once, and records its calls.

Run as a program, it is the command line with this pipeline in place of the real one:
`python tests/fake_pipeline.py generate "a fox"`.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from types import SimpleNamespace

from PIL import Image

ENVIRONMENT = {
    "versions": {"firstlight": "0.1.0", "jax": "0.10.2"},
    "device_kind": "cpu",
    "cores": 2,
    "mesh": "data=1,model=1",
}


class FakePipeline:
    """Pictures are drawn from a hash of everything that should decide about them."""

    def __init__(self, engine, job, display, timeline, *, environment=ENVIRONMENT, seconds=0.0):
        with timeline.span("imports"):
            pass
        self.engine = engine
        self.environment = environment
        self.seconds = seconds
        self.progress = display.advance
        self.calls = []
        self.progress("load", 500_000, 1_000_000)
        self.progress("load", 1_000_000, 1_000_000)
        self.progress("compile", 1, 1)

    def stream(self, prompts, **request):
        self.calls.append({"prompt": prompts, **request})
        count = request["num_images_per_prompt"]
        steps = request["num_inference_steps"] or 4
        every = [prompt for prompt in prompts for _ in range(count)]
        seed = request["seed"]
        if seed is None:
            seed = random.randrange(2**32 - len(every))
        seeds = seed if isinstance(seed, list) else [seed + i for i in range(len(every))]
        for step in range(steps):
            time.sleep(self.seconds)
            self.progress("denoise", step + 1, steps)
        metadata = [
            self._metadata(prompt, seed, steps, request)
            for prompt, seed in zip(every, seeds, strict=True)
        ]
        timings = {"encode": 0.1, "denoise": 0.2, "decode": 0.1}
        for entry in metadata:
            yield SimpleNamespace(
                images=[self._draw(entry)],
                seeds=[entry["seed"]],
                prompts=[entry["prompt"]],
                metadata=[entry],
                timings=timings,
            )

    def _metadata(self, prompt, seed, steps, request):
        return {
            "prompt": prompt,
            "seed": seed,
            "num_inference_steps": steps,
            "guidance_scale": request["guidance_scale"] or 1.0,
            "width": request["width"] or 64,
            "height": request["height"] or 64,
            "max_sequence_length": request["max_sequence_length"] or 48,
            "model": self.engine.model,
            "revision": self.engine.revision,
            "dtype": self.engine.dtype,
            "is_distilled": self.engine.is_distilled is not False,
            "images_per_device": self.engine.images_per_device,
            **self.environment,
        }

    def _draw(self, entry):
        size = (entry["width"], entry["height"])
        color = hashlib.sha256(repr(sorted(entry.items(), key=str)).encode()).digest()[:3]
        return Image.new("RGB", size, tuple(color))


if __name__ == "__main__":
    from firstlight.cli import drawing, main

    seconds = float(os.environ.get("FAKE_SECONDS_PER_STEP", "0"))
    drawing._open_pipeline = lambda *args: FakePipeline(*args, seconds=seconds)
    main()
