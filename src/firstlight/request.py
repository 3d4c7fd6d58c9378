# SPDX-License-Identifier: Apache-2.0
"""One call's arguments, checked and completed: which pictures are to be made."""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from firstlight import inpaint
from firstlight.config import MAX_SEED
from firstlight.errors import FirstlightWarning, RequestError
from firstlight.inpaint import Inpaint
from firstlight.models.variants import Variant
from firstlight.references import MAX_REFERENCES, per_prompt, prepare
from firstlight.sampling import TIME_SHIFTS, check_size

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
    text_width: int
    max_sequence_length: int

    def check_size(self, height: int, width: int) -> None:
        """Raise RequestError unless pictures of this size can be made."""
        check_size(height, width, self.pixel_multiple, MAX_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A complete request; tuples and arrays have one entry per picture, all else is common.

    `prompt_embeds` (B, T, J) stands for the prompts where it is given. `references` are uint8
    (H, W, 3) pictures that the autoencoder can take.
    """

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    max_sequence_length: int
    output_type: str
    latents: np.ndarray | None
    sigmas: tuple[float, ...] | None = None
    negative_prompts: tuple[str, ...] = ()
    prompt_embeds: np.ndarray | None = None
    negative_prompt_embeds: np.ndarray | None = None
    references: tuple[tuple[np.ndarray, ...], ...] = ()
    inpaint: Inpaint | None = None
    time_shift: str = "reference"

    @property
    def guided(self) -> bool:
        """Whether each step makes two passes, with and without the prompt."""
        return self.guidance_scale > 1

    @property
    def text_length(self) -> int:
        """Tokens of text."""
        embeds = self.prompt_embeds
        return self.max_sequence_length if embeds is None else embeds.shape[1]


def complete(
    limits: Limits,
    *,
    prompt: Any = None,
    image: Any = None,
    image_reference: Any = None,
    mask_image: Any = None,
    padding_mask_crop: int | None = None,
    strength: float | None = None,
    height: int | None = None,
    width: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    negative_prompt: Any = None,
    num_images_per_prompt: int = 1,
    seed: int | Sequence[int] | None = None,
    latents: Any = None,
    prompt_embeds: Any = None,
    negative_prompt_embeds: Any = None,
    sigmas: Any = None,
    max_sequence_length: int | None = None,
    output_type: str = "pil",
    paste_back: bool = False,
    time_shift: str = "reference",
) -> Request:
    """Check a call's arguments and fill in the model's defaults. Raises RequestError.

    Pictures are ordered prompt by prompt; picture i uses seed + i, so that it can be made again
    alone.
    """
    embeds = _embeds("prompt_embeds", prompt_embeds, limits)
    prompts = _prompts(prompt) if embeds is None else _no_prompts(prompt, len(embeds))
    given = len(prompts)
    count = _integer("num_images_per_prompt", num_images_per_prompt, 1, MAX_IMAGES_PER_PROMPT)
    source = None
    if mask_image is None and strength is None:
        _check_editing(image_reference, padding_mask_crop)
        references = _references(image, given, limits)
        height, width = _size(height, width, references, limits)
    else:
        source = _source(image, mask_image, padding_mask_crop, strength, limits, paste_back)
        references = _references(image_reference, given, limits)
        if source.mask is not None:  # what is around the hole guides what comes into it
            references = tuple((source.source, *images) for images in references)
        height, width = _source_size(height, width, source, limits)
    guidance = _guidance(limits.variant, guidance_scale)
    negative = _embeds("negative_prompt_embeds", negative_prompt_embeds, limits)
    _check_negative(negative_prompt, negative, embeds, guidance)
    levels = _sigmas(sigmas)
    steps = num_inference_steps
    if steps is None:
        steps = len(levels) if levels else limits.variant.num_inference_steps
    length = limits.max_sequence_length if max_sequence_length is None else max_sequence_length
    if output_type not in OUTPUT_TYPES:
        raise RequestError(f"output_type is {output_type!r}; allowed: {', '.join(OUTPUT_TYPES)}")
    if time_shift not in TIME_SHIFTS:
        raise RequestError(f"time_shift is {time_shift!r}; allowed: {', '.join(TIME_SHIFTS)}")
    grid = (height // limits.pixel_multiple, width // limits.pixel_multiple)
    pictures = given * count
    steps = _integer("num_inference_steps", steps, 1, MAX_STEPS)
    if source is not None:
        _check_source(source, len(levels) if levels else steps, output_type)
    negatives = _negatives(negative_prompt, given) if guidance > 1 and negative is None else ()
    return Request(
        prompts=_each(prompts, count),
        seeds=_seeds(seed, pictures),
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=_integer("max_sequence_length", length, 1, limits.max_sequence_length),
        output_type=output_type,
        latents=_latents(latents, (pictures, limits.token_channels, *grid)),
        sigmas=levels,
        negative_prompts=_each(negatives, count),
        prompt_embeds=None if embeds is None else embeds.repeat(count, axis=0),
        negative_prompt_embeds=None if negative is None else negative.repeat(count, axis=0),
        references=_each(references, count),
        inpaint=source,
        time_shift=time_shift,
    )


def _each(values: tuple[Any, ...], count: int) -> tuple[Any, ...]:
    return tuple(value for value in values for _ in range(count))


def _no_prompts(prompt: Any, count: int) -> tuple[str, ...]:
    if prompt is not None:
        raise RequestError("prompt and prompt_embeds exclude each other; give one of them")
    return ("",) * count


def _embeds(name: str, value: Any, limits: Limits) -> np.ndarray | None:
    """Text states (prompts, T, J) as float32."""
    if value is None:
        return None
    array = np.asarray(value).astype(np.float32)
    if array.ndim != 3 or 0 in array.shape or array.shape[2] != limits.text_width:
        raise RequestError(
            f"{name} have shape {array.shape}; (prompts, tokens, {limits.text_width}) is needed"
        )
    if not np.isfinite(array).all():
        raise RequestError(f"{name} contain values that are not finite")
    return array


def _check_negative(
    prompt: Any, negative: np.ndarray | None, embeds: np.ndarray | None, guidance: float
) -> None:
    """What is given to steer away from must have an effect, and shapes that fit."""
    if prompt is not None and negative is not None:
        raise RequestError(
            "negative_prompt and negative_prompt_embeds exclude each other; give one of them"
        )
    if guidance <= 1 and (prompt is not None or negative is not None):
        raise RequestError(
            "a negative prompt has no effect without guidance; it needs a base model and "
            "guidance_scale above 1"
        )
    if negative is not None and (embeds is None or negative.shape != embeds.shape):
        shape = None if embeds is None else embeds.shape
        raise RequestError(
            f"negative_prompt_embeds have shape {negative.shape}; prompt_embeds of the same shape "
            f"are needed, not {shape}"
        )


def _negatives(negative_prompt: Any, count: int) -> tuple[str, ...]:
    """One text a prompt; empty, as in the reference, if none is given."""
    if negative_prompt is None:
        return ("",) * count
    texts = (negative_prompt,) if isinstance(negative_prompt, str) else tuple(negative_prompt)
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise RequestError(f"negative_prompt {index} is {text!r}; a text is needed")
    if len(texts) not in (1, count):
        raise RequestError(
            f"negative_prompt has {len(texts)} texts; one, or one for each of {count} prompts, "
            "is needed"
        )
    return texts * count if len(texts) == 1 else texts


def _sigmas(sigmas: Any) -> tuple[float, ...] | None:
    if sigmas is None:
        return None
    array = np.asarray(sigmas, np.float64)
    good = array.ndim == 1 and 0 < len(array) <= MAX_STEPS
    if not good or not ((array > 0) & (array <= 1)).all() or (np.diff(array) >= 0).any():
        raise RequestError(
            f"sigmas are {str(sigmas)[:80]}; falling numbers above 0 and at most 1 are needed"
        )
    return tuple(map(float, array))


def _references(image: Any, prompts: int, limits: Limits) -> tuple[tuple[np.ndarray, ...], ...]:
    made: dict[int, np.ndarray] = {}  # one picture for many prompts is prepared once
    lists = per_prompt(image, prompts)
    ids = [[id(picture) for picture in images] for images in lists]
    shared = all(other == ids[0] for other in ids)
    for number, images in enumerate(lists):
        if len(images) > MAX_REFERENCES:
            raise RequestError(
                f"image: prompt {number} has {len(images)} references; at most {MAX_REFERENCES} "
                "are allowed"
            )
        for index, picture in enumerate(images):
            if id(picture) not in made:
                name = f"image {index}" if shared else f"image {index} of prompt {number}"
                made[id(picture)] = prepare(picture, name, limits.pixel_multiple)
    return tuple(tuple(made[id(picture)] for picture in images) for images in lists)


def _check_editing(image_reference: Any, padding_mask_crop: Any) -> None:
    if image_reference is not None:
        raise RequestError(
            "image_reference goes with mask_image or strength; without them references are image"
        )
    if padding_mask_crop is not None:
        raise RequestError("padding_mask_crop needs mask_image")


def _source(
    image: Any,
    mask_image: Any,
    padding_mask_crop: Any,
    strength: Any,
    limits: Limits,
    paste_back: bool,
) -> Inpaint:
    if image is None or isinstance(image, list | tuple):
        raise RequestError(
            f"image is {'missing' if image is None else 'a list'}; mask_image and strength need "
            "one picture to start from (references are image_reference)"
        )
    return inpaint.prepare(
        image,
        mask_image,
        padding_mask_crop,
        strength,
        multiple=limits.pixel_multiple,
        paste_back=paste_back,
    )


def _source_size(
    height: int | None, width: int | None, source: Inpaint, limits: Limits
) -> tuple[int, int]:
    size = source.source.shape[:2]
    for name, given, own in (("height", height, size[0]), ("width", width, size[1])):
        if given is not None and given != own:
            raise RequestError(f"{name} is {given}; the source's is {own}: leave it out")
    limits.check_size(*size)
    return size[0], size[1]


def _check_source(source: Inpaint, steps: int, output_type: str) -> None:
    source.first_step(steps)
    if source.pasting is not None and output_type != "pil":
        raise RequestError(
            f"output_type is {output_type!r}; only 'pil' can be pasted back (padding_mask_crop)"
        )


def _size(
    height: int | None,
    width: int | None,
    references: tuple[tuple[np.ndarray, ...], ...],
    limits: Limits,
) -> tuple[int, int]:
    """Given sides win; else those of the first reference; else the model's own."""
    default = (limits.default_size, limits.default_size)
    first = list(dict.fromkeys(images[0].shape[:2] for images in references if images))
    if first and None in (height, width):
        if len(first) > 1:
            sizes = ", ".join(f"{w}x{h}" for h, w in first)
            raise RequestError(
                f"the first references have different sizes ({sizes}); give height and width"
            )
        default = first[0]
    made = (default[0] if height is None else height, default[1] if width is None else width)
    limits.check_size(*made)
    return made


def _prompts(prompt: Any) -> tuple[str, ...]:
    if prompt is None:
        raise RequestError("prompt is missing; give a text or a list of texts")
    prompts = (prompt,) if isinstance(prompt, str) else tuple(prompt)
    if not prompts:
        raise RequestError("prompt is an empty list; give at least one text")
    for index, text in enumerate(prompts):
        if not isinstance(text, str):
            raise RequestError(f"prompt {index} is {text!r}; a text is needed")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise RequestError(f"prompt {index} is {text!r}: no valid Unicode (wrong encoding?)")
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
    """The guidance that is applied: 1.0 means one pass per step, and so does less."""
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
    return max(1.0, float(guidance_scale))


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
