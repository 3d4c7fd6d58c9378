# SPDX-License-Identifier: Apache-2.0
"""Several prompts, two pictures each; any of them made again alone, bit for bit."""

import numpy as np

from firstlight import Pipeline
from firstlight.image import save_image

pipe = Pipeline.from_pretrained("demo")
prompts = ["pizza, green background", "a penguin", "a red apple on a white background"]
out = pipe(prompts, num_images_per_prompt=2, seed=100)
for image, prompt, seed, metadata in zip(
    out.images, out.prompts, out.seeds, out.metadata, strict=True
):
    # save_image never overwrites and keeps the metadata in the file: see `firstlight info FILE`.
    path = save_image(image, f"{seed}.png", metadata)
    print(path, seed, prompt)

alone = pipe(out.prompts[3], seed=out.seeds[3])
assert np.array_equal(np.asarray(alone.images[0]), np.asarray(out.images[3]))
