# SPDX-License-Identifier: Apache-2.0
"""The packaged model against the reference: sizes, batches, and bfloat16 against float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from skimage.metrics import structural_similarity

import firstlight
from firstlight import Pipeline
from tests.parity.reference import Reference

pytestmark = pytest.mark.parity

DEMO = Path(firstlight.__file__).parent / "data/demo"
PROMPTS = (
    "a red apple on a blue background",
    "grinning face",
    "hamburger on a gray background",
    "a cat",
    "a penguin on a green background",
    "a fox on a yellow background",
    "pizza, purple background",
    "a snowman on a red background",
)
# Square and oblong, token grids of even and odd sides, 256 pixels wide among them.
SIZES = [(64, 64), (128, 256), (80, 208), (176, 176)]
MORE_SIZES = [
    pytest.param((height, width), marks=pytest.mark.full)
    for height in (64, 96, 144, 256, 400)
    for width in (64, 112, 160, 256, 512)
    if (height, width) not in SIZES
]


@pytest.fixture(scope="module")
def theirs():
    return Reference(DEMO)


@pytest.fixture(scope="module")
def ours():
    return Pipeline.from_pretrained(DEMO, dtype="float32")


def noise(seed: int, batch: int, height: int, width: int) -> np.ndarray:
    shape = (batch, 128, height // 16, width // 16)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("size", SIZES + MORE_SIZES, ids=lambda size: f"{size[1]}x{size[0]}")
def test_sizes(size, ours, theirs, agree):
    height, width = size
    latents = noise(height + width, 1, height, width)
    made = ours("a cat", latents=latents, height=height, width=width, output_type="np")
    assert made.images.shape == (1, height, width, 3)
    agree("picture", made.images, theirs.picture(["a cat"], latents, steps=4))


def test_prompts_of_unlike_length_make_the_same_pictures_together_and_alone(ours, theirs, agree):
    prompts = ["a", "a penguin on a green background", "pizza, purple background"]
    latents = noise(3, 3, 128, 128)
    together = ours(prompts, latents=latents, output_type="np").images
    for row, prompt in enumerate(prompts):
        alone = ours(prompt, latents=latents[row : row + 1], output_type="np").images
        np.testing.assert_array_equal(alone[0], together[row])
    agree("picture", together, theirs.picture(prompts, latents, steps=4))


def test_a_device_batch_makes_the_reference_pictures_too(theirs, agree):
    prompts = ["grinning face", "a fox on a yellow background", "a cat"]
    latents = noise(4, 3, 64, 64)
    pipe = Pipeline.from_pretrained(DEMO, dtype="float32", images_per_device=2, sizes=[(64, 64)])
    made = pipe(prompts, latents=latents, height=64, width=64, output_type="np")
    agree("picture", made.images, theirs.picture(prompts, latents, steps=4))


def test_bfloat16_pictures_resemble_the_float32_ones(theirs):
    latents = noise(5, len(PROMPTS), 128, 128)
    pipe = Pipeline.from_pretrained(DEMO, dtype="bfloat16")
    made = pipe(list(PROMPTS), latents=latents, output_type="np").images
    exact = theirs.picture(PROMPTS, latents, steps=4)
    likeness = {
        prompt: structural_similarity(a, b, channel_axis=-1, data_range=1.0)
        for prompt, a, b in zip(PROMPTS, made, exact, strict=True)
    }
    assert min(likeness.values()) >= 0.98, likeness
