# SPDX-License-Identifier: Apache-2.0
"""Starting noise and latents as arrays: what parity tests and interpolations are made of."""

import numpy as np

from firstlight import Pipeline

pipe = Pipeline.from_pretrained("demo", dtype="float32")
side = 128 // pipe.limits.pixel_multiple
rng = np.random.default_rng(0)
a, b = rng.standard_normal((2, pipe.limits.token_channels, side, side), np.float32)
# On the circle between two noises every point is again standard normal noise.
angles = np.linspace(0, np.pi / 2, 3)
noise = np.stack([np.cos(t) * a + np.sin(t) * b for t in angles])
out = pipe(["a cat"] * 3, latents=noise, output_type="np")
print(out.images.shape, out.images.dtype)
latents = pipe("a cat", latents=noise[:1], output_type="latent").images
print(latents.shape)
