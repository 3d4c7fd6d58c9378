# SPDX-License-Identifier: Apache-2.0
"""A sentence becomes a picture, with the packaged model."""

from firstlight import Pipeline

pipe = Pipeline.from_pretrained("demo")
out = pipe("a fox on a blue background", seed=7)
out.images[0].save("fox.png")
print(f"fox.png, seed {out.seeds[0]}, {out.timings['total']:.2f} s")
