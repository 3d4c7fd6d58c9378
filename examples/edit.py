# SPDX-License-Identifier: Apache-2.0
"""Change a picture by a text, then only a part of it, with the packaged model."""

import numpy as np
from PIL import Image

from firstlight import Pipeline

pipe = Pipeline.from_pretrained("demo", sizes=[])
apple = pipe("a red apple on a blue background", seed=1).images[0]
apple.save("apple.png")

green = pipe("make the background green", image=apple, seed=3).images[0]
green.save("green.png")

mask = Image.new("L", apple.size, 0)
mask.paste(255, (0, 0, 128, 40))
repainted = pipe(
    "make the background green", image=apple, mask_image=mask, padding_mask_crop=8, seed=3
).images[0]
repainted.save("repainted.png")
kept = np.asarray(mask) == 0
assert np.array_equal(np.asarray(repainted)[kept], np.asarray(apple)[kept])
print("apple.png, green.png, repainted.png")
