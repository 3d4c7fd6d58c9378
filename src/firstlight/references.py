# SPDX-License-Identifier: Apache-2.0
"""Reference pictures for editing: what is given, and what the autoencoder sees of it.

Reference: diffusers' Flux2KleinPipeline and Flux2ImageProcessor.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from firstlight.errors import FirstlightWarning, RequestError

MIN_SIDE = 64
MAX_RATIO = 8
MAX_AREA = 1024 * 1024
"""Pixels of a reference; a larger one is made smaller."""

MAX_REFERENCES = 10
"""Of one picture. Each costs as many tokens as a picture of its size, at every step."""


def prepare(image: Any, name: str, multiple: int) -> np.ndarray:
    """(H, W, 3) uint8 of a reference: upright, at most one megapixel, sides cut to multiples.

    Args:
        image: a PIL image, a uint8 array (H, W, 3 or 4), or the path of a picture.
        name: how messages call it.
        multiple: pixels that the sides must be multiples of.

    Raises:
        RequestError: no picture, too small, or longer than 8 times its width.
    """
    picture = _upright(open_picture(image, name))
    width, height = picture.size
    if min(width, height) < MIN_SIDE:
        raise RequestError(
            f"{name} is {width}x{height} pixels; both sides must have at least {MIN_SIDE}"
        )
    if max(width, height) > MAX_RATIO * min(width, height):
        raise RequestError(
            f"{name} is {width}x{height} pixels; the longer side may be at most {MAX_RATIO} times "
            "the shorter"
        )
    picture = shrink(rgb(picture, name))
    width, height = picture.size
    cut_width, cut_height = width // multiple * multiple, height // multiple * multiple
    left, top = (width - cut_width) // 2, (height - cut_height) // 2
    return np.asarray(picture.crop((left, top, left + cut_width, top + cut_height)))


def open_picture(image: Any, name: str) -> Image.Image:
    """A PIL image of whatever was given. Raises RequestError."""
    if isinstance(image, Image.Image):
        return image
    if isinstance(image, str | os.PathLike):
        try:
            with Image.open(Path(image)) as file:
                file.load()
                return file
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise RequestError(f"{name} {str(image)!r} cannot be read: {error}") from error
    is_bytes = isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3
    if is_bytes and image.shape[2] in (3, 4) and image.size:
        return Image.fromarray(image)
    what = f"{image.dtype} {image.shape}" if isinstance(image, np.ndarray) else repr(image)
    raise RequestError(
        f"{name} is {what[:80]}; a PIL image, a uint8 array (H, W, 3), or a file is needed"
    )


def rgb(picture: Image.Image, name: str) -> Image.Image:
    """Without transparency: what shows through is white, and a warning says so."""
    if "A" in picture.getbands() or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        if picture.getchannel("A").getextrema() != (255, 255):
            warnings.warn(
                f"{name} is transparent in places; white is put behind it",
                FirstlightWarning,
                stacklevel=2,
            )
            white = Image.new("RGBA", picture.size, "white")
            picture = Image.alpha_composite(white, picture)
    return picture.convert("RGB")


def shrink(picture: Image.Image) -> Image.Image:
    """At most `MAX_AREA` pixels, by Lanczos, sides rounded down as the reference does."""
    width, height = picture.size
    if width * height <= MAX_AREA:
        return picture
    scale = math.sqrt(MAX_AREA / (width * height))
    size = int(width * scale), int(height * scale)
    return picture.resize(size, Image.Resampling.LANCZOS)


def _upright(picture: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(picture)


def per_prompt(image: Any, prompts: int) -> list[list[Any]]:
    """Each prompt's list of references: one picture or a list of them goes to all prompts, a list
    of lists gives each prompt its own.

    Raises RequestError if their number does not fit.
    """
    if image is None:
        return [[] for _ in range(prompts)]
    if not _is_list(image):
        return [[image] for _ in range(prompts)]
    nested = [_is_list(entry) for entry in image]
    if any(nested) and not all(nested):
        raise RequestError("image mixes pictures and lists of pictures; give either")
    if not image:
        raise RequestError("image is an empty list; give at least one picture, or leave it out")
    if not any(nested):
        return [list(image) for _ in range(prompts)]
    if len(image) != prompts:
        raise RequestError(
            f"image has {len(image)} lists of references; {prompts} prompts need one each"
        )
    return [list(entry) for entry in image]


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
