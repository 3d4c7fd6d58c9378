# SPDX-License-Identifier: Apache-2.0
"""The packaged model draws what it is asked for, and what diffusers draws from the same noise.

Expected values: tests/golden/demo, made by scripts/make_golden.py.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from firstlight import Pipeline
from firstlight.errors import FirstlightWarning

GOLDEN = Path(__file__).parent / "golden/demo"
CASES = {case["name"]: case for case in json.loads((GOLDEN / "cases.json").read_text())}


@pytest.fixture(scope="module")
def pipe():
    return Pipeline.from_pretrained("demo", dtype="float32")


@pytest.fixture(scope="module")
def bfloat16():
    return Pipeline.from_pretrained("demo")


def run(pipe: Pipeline, name: str, output_type: str) -> np.ndarray:
    """The case's picture (or latents), from the noise that the reference started with."""
    case, noise = CASES[name], expected(name)["latents"]
    with contextlib.ExitStack() as stack:
        if name == "long_prompt":
            stack.enter_context(pytest.warns(FirstlightWarning, match="are lost"))
        made = pipe(
            case["prompt"],
            latents=noise,
            height=16 * noise.shape[2],
            width=16 * noise.shape[3],
            num_inference_steps=case.get("steps"),
            output_type=output_type,
            image=[Image.fromarray(expected(n)["image"]) for n in case.get("images", [])] or None,
        )
    return np.asarray(made.images[0])


def expected(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return dict(arrays)


@pytest.mark.parametrize("name", CASES)
def test_float32_picture_is_the_references(name, pipe):
    ours, theirs = run(pipe, name, "pil"), expected(name)["image"]
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == np.uint8
    gap = np.abs(ours.astype(int) - theirs.astype(int))
    assert gap.max() <= 1
    assert np.mean(gap == 0) >= 0.999


@pytest.mark.parametrize("name", CASES)
def test_float32_latents_are_the_references(name, pipe):
    ours, theirs = run(pipe, name, "latent"), expected(name)["latent"][0]
    assert ours.shape == theirs.shape and ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_picture_is_nearer_to_float32_than_the_references(name, bfloat16):
    """What float32 latents, schedule and sums are for: half the reference's error, in practice."""
    arrays = expected(name)
    exact = arrays["image"].astype(int)
    ours = np.abs(run(bfloat16, name, "pil").astype(int) - exact)
    theirs = np.abs(arrays["image_bf16"].astype(int) - exact)
    assert ours.mean() <= 0.9 * theirs.mean()


def test_np_output_is_the_picture_before_rounding(pipe):
    units = run(pipe, "cat", "np")
    assert units.dtype == np.float32 and units.min() >= 0 and units.max() <= 1
    np.testing.assert_array_equal(np.round(units * 255).astype(np.uint8), run(pipe, "cat", "pil"))


# How each named colour differs from the others, for r, g, b in [0, 1]. The differences asked for
# are far from both the colours drawn and each other's, so that a retrained model still passes.
COLOURS = {
    "red": lambda r, g, b: (r - np.maximum(g, b) > 0.3) & (g < 0.4),
    "green": lambda r, g, b: g - np.maximum(r, b) > 0.05,
    "blue": lambda r, g, b: (b - g > 0.15) & (g > r),
    "yellow": lambda r, g, b: (np.minimum(r, g) - b > 0.25) & (np.abs(r - g) < 0.3) & (g > 0.65),
    "orange": lambda r, g, b: (r - g > 0.15) & (g - b > 0.15),
    "purple": lambda r, g, b: (r - g > 0.08) & (b - r > 0.08),
    "pink": lambda r, g, b: (r - b > 0.05) & (b - g > 0.05) & (g > 0.4),
    "gray": lambda r, g, b: (spread(r, g, b) < 0.12) & (r > 0.35) & (r < 0.8),
    "black": lambda r, g, b: np.maximum(np.maximum(r, g), b) < 0.3,
    "white": lambda r, g, b: np.minimum(np.minimum(r, g), b) > 0.85,
}


def spread(r, g, b):
    return np.maximum(np.maximum(r, g), b) - np.minimum(np.minimum(r, g), b)


def share(pixels: np.ndarray, colour: str) -> float:
    """Share of the pixels (..., 3) that have the colour."""
    return float(COLOURS[colour](*np.moveaxis(pixels, -1, 0)).mean())


@pytest.mark.parametrize(
    "prompt, border, centre",
    [
        ("a red apple on a blue background", "blue", "red"),
        ("a green apple on a red background", "red", "green"),
        ("a blue heart on a yellow background", "yellow", "blue"),
        ("broccoli on a pink background", "pink", "green"),
        ("a lemon, purple background", "purple", "yellow"),
        ("an orange on a black background", "black", "orange"),
        ("a red heart on a green background", "green", "red"),
        ("a blue heart on an orange background", "orange", "blue"),
        ("a lemon on a gray background", "gray", "yellow"),
        ("a red heart", "white", "red"),  # white unless told otherwise
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_prompt_gives_the_colours_it_names(prompt, border, centre, seed, pipe):
    image = pipe(prompt, seed=seed, output_type="np").images[0]
    edge, height, width = 6, *image.shape[:2]
    frame = np.ones((height, width), bool)
    frame[edge:-edge, edge:-edge] = False
    assert share(image[frame], border) > 0.9
    middle = image[3 * height // 8 : 5 * height // 8, 3 * width // 8 : 5 * width // 8]
    assert share(middle, centre) > 0.8


@pytest.mark.parametrize("colour", COLOURS)
def test_a_colour_is_told_from_all_others(colour):
    samples = {
        "red": (0.87, 0.24, 0.24),
        "green": (0.36, 0.71, 0.35),
        "blue": (0.28, 0.50, 0.86),
        "yellow": (0.97, 0.85, 0.30),
        "orange": (0.95, 0.58, 0.25),
        "purple": (0.55, 0.35, 0.79),
        "pink": (0.93, 0.58, 0.75),
        "gray": (0.58, 0.58, 0.61),
        "black": (0.14, 0.12, 0.14),
        "white": (0.99, 0.99, 1.00),
    }
    matching = [name for name, rgb in samples.items() if share(np.array([rgb]), colour) == 1]
    assert matching == [colour]
