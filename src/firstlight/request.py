# SPDX-License-Identifier: Apache-2.0
"""One call's arguments, checked and completed: which pictures are to be made."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstlight.config import MAX_SEED
from firstlight.errors import FirstlightWarning, RequestError
from firstlight.models.variants import Variant
from firstlight.sampling import check_size

MAX_STEPS = 1000
MAX_TOKENS = 16384
"""4 megapixels at 16 pixels a token side."""

MAX_IMAGES_PER_PROMPT = 10_000
OUTPUT_TYPES = ("pil", "np", "latent")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a loaded model implies for a request."""

    variant: Variant
    default_size: int
    pixel_multiple: int
    token_channels: int
    max_sequence_length: int

    def check_size(self, height: int, width: int) -> None:
        """Raise RequestError unless pictures of this size can be made."""
        check_size(height, width, self.pixel_multiple, MAX_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A complete request: one prompt and one seed per picture, everything else common."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    output_type: str
    latents: np.ndarray | None


def complete(
    limits: Limits,
    *,
    prompt: Any,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    num_images_per_prompt: int = 1,
    seed: int | Sequence[int] | None = None,
    latents: Any = None,
    max_sequence_length: int | None = None,
    output_type: str = "pil",
) -> Request:
    """Check a call's arguments and fill in the model's defaults. Raises RequestError.

    Pictures are ordered prompt by prompt; picture i uses seed + i, so that it can be made again
    alone.
    """
    prompts = _prompts(prompt)
    count = _integer("num_images_per_prompt", num_images_per_prompt, 1, MAX_IMAGES_PER_PROMPT)
    prompts = tuple(text for text in prompts for _ in range(count))
    height = limits.default_size if height is None else height
    width = limits.default_size if width is None else width
    limits.check_size(height, width)
    steps = (
        limits.variant.num_inference_steps if num_inference_steps is None else num_inference_steps
    )
    length = limits.max_sequence_length if max_sequence_length is None else max_sequence_length
    if output_type not in OUTPUT_TYPES:
        raise RequestError(f"output_type is {output_type!r}; allowed: {', '.join(OUTPUT_TYPES)}")
    grid = (height // limits.pixel_multiple, width // limits.pixel_multiple)
    return Request(
        prompts=prompts,
        seeds=_seeds(seed, len(prompts)),
        height=height,
        width=width,
        num_inference_steps=_integer("num_inference_steps", steps, 1, MAX_STEPS),
        guidance_scale=_guidance(limits.variant, guidance_scale),
        max_sequence_length=_integer("max_sequence_length", length, 1, limits.max_sequence_length),
        output_type=output_type,
        latents=_latents(latents, (len(prompts), limits.token_channels, *grid)),
    )


def _prompts(prompt: Any) -> tuple[str, ...]:
    if prompt is None:
        raise RequestError("prompt is missing; give a text or a list of texts")
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    if not prompts:
        raise RequestError("prompt is an empty list; give at least one text")
    for index, text in enumerate(prompts):
        if not isinstance(text, str):
            raise RequestError(f"prompt {index} is {text!r}; a text is needed")
        if not text.strip():
            raise RequestError(f"prompt {index} is {text!r}: empty or blank; say what to draw")
    return prompts


def _seeds(seed: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    if seed is None:
        seed = secrets.randbelow(MAX_SEED - count + 2)
    if isinstance(seed, str) or not isinstance(seed, Sequence):
        first = _integer("seed", seed, 0, MAX_SEED)
        if first + count - 1 > MAX_SEED:
            raise RequestError(
                f"seed is {first}; {count} pictures would need seeds up to {first + count - 1}, "
                f"the largest is {MAX_SEED}"
            )
        return tuple(range(first, first + count))
    seeds = tuple(_integer("seed", value, 0, MAX_SEED) for value in seed)
    if len(seeds) != count:
        raise RequestError(f"seed has {len(seeds)} entries; {count} pictures need one each")
    return seeds


def _guidance(variant: Variant, guidance_scale: float | None) -> float:
    """The guidance that is applied: 1.0 means one pass per step."""
    if guidance_scale is None:
        guidance_scale = variant.guidance_scale
    if isinstance(guidance_scale, bool) or not isinstance(guidance_scale, (int, float)):
        raise RequestError(f"guidance_scale is {guidance_scale!r}; a number is needed")
    if not 0 <= guidance_scale < float("inf"):
        raise RequestError(f"guidance_scale is {guidance_scale}; it must be at least 0 and finite")
    if variant.is_distilled:
        if guidance_scale > 1:
            warnings.warn(
                f"guidance_scale {guidance_scale} is ignored: the model is distilled and makes "
                "one pass per step",
                FirstlightWarning,
                stacklevel=4,
            )
        return 1.0
    if guidance_scale > 1:
        raise RequestError(
            f"guidance_scale is {guidance_scale}: classifier-free guidance for base models is not "
            "built yet; guidance_scale=1.0 runs one unguided pass per step"
        )
    return 1.0


def _latents(latents: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    if latents is None:
        return None
    array = np.asarray(latents, np.float32)
    if array.shape != shape:
        raise RequestError(
            f"latents have shape {array.shape}; {shape} is needed "
            "(pictures, token channels, rows, columns)"
        )
    if not np.isfinite(array).all():
        raise RequestError("latents contain values that are not finite")
    return array


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise RequestError(f"{name} is {value!r}; a whole number is needed")
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be {low} to {high}")
    return int(value)
