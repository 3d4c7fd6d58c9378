# SPDX-License-Identifier: Apache-2.0
"""Pictures that are partly kept: a source, where it is repainted, and putting the result back.

Reference: diffusers' Flux2KleinInpaintPipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from firstlight.errors import RequestError
from firstlight.references import MIN_SIDE, open_picture, rgb, shrink

DEFAULT_STRENGTH = 0.8

Box = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Inpaint:
    """What a request starts from instead of noise alone.

    `source` is (H, W, 3), uint8 or float32 in [0, 1]; `mask` (rows, columns) of image tokens, 1
    where it is repainted, None if everywhere. `pasting` says how the result goes back.
    """

    source: np.ndarray
    mask: np.ndarray | None
    strength: float
    pasting: Pasting | None = None

    def first_step(self, steps: int) -> int:
        """The step of the whole schedule that is made first. Raises RequestError if none is."""
        first = int(max(steps - min(steps * self.strength, steps), 0))
        if first >= steps:
            raise RequestError(
                f"strength is {self.strength}; of {steps} steps none is left to make: give more"
            )
        return first


@dataclass(frozen=True, eq=False)
class Pasting:
    """Puts a result over the picture it came from: into a box of it, where the mask is bright."""

    original: Image.Image
    mask: Image.Image
    box: Box | None

    def __call__(self, result: Image.Image) -> Image.Image:
        """Pixels where the mask is black are the original's, bit for bit."""
        if self.box is not None:
            left, top, right, bottom = self.box
            placed = Image.new("RGB", self.original.size)
            placed.paste(_cover(result, right - left, bottom - top), (left, top))
            result = placed
        return Image.composite(result, self.original, self.mask)


def prepare(
    image: Any,
    mask_image: Any,
    padding_mask_crop: Any,
    strength: Any,
    *,
    multiple: int,
    paste_back: bool = False,
) -> Inpaint:
    """Read a source and its mask. Raises RequestError for what cannot be used."""
    strength = _strength(strength)
    original = shrink(rgb(ImageOps.exif_transpose(open_picture(image, "image")), "image"))
    width, height = (side // multiple * multiple for side in original.size)
    if min(original.size) < MIN_SIDE:
        raise RequestError(
            f"image is {original.width}x{original.height} pixels; both sides must have at least "
            f"{MIN_SIDE}"
        )
    if mask_image is None:
        if padding_mask_crop is not None:
            raise RequestError("padding_mask_crop needs mask_image")
        source = original.resize((width, height), Image.Resampling.LANCZOS)
        return Inpaint(source=np.asarray(source), mask=None, strength=strength)
    mask = _mask(mask_image, original.size, exact=padding_mask_crop is not None)
    box = None
    source, shaped = original, mask
    if padding_mask_crop is not None:
        box = crop_box(mask, _padding(padding_mask_crop), width / height)
        source, shaped = (_fill(part.crop(box), width, height) for part in (original, mask))
    source = source.resize((width, height), Image.Resampling.LANCZOS)
    shaped = shaped.resize((width, height), Image.Resampling.LANCZOS).convert("L")
    pasting = None
    if box is not None:
        pasting = Pasting(original, mask, box)
    elif paste_back:
        pasting = Pasting(source, mask.resize(source.size, Image.Resampling.NEAREST), None)
    tokens = token_mask(np.asarray(shaped), multiple)
    return Inpaint(source=np.asarray(source), mask=tokens, strength=strength, pasting=pasting)


def token_mask(mask: np.ndarray, multiple: int) -> np.ndarray:
    """(H, W) uint8 -> (H/m, W/m) float32: 1 from half brightness on, then the mean of the four
    pixels in the middle of each token (bilinear sampling at its centre)."""
    hard = (mask.astype(np.float32) / 255 >= 0.5).astype(np.float32)
    middle = multiple // 2
    cells = hard.reshape(hard.shape[0] // multiple, multiple, -1, multiple)
    return cells[:, middle - 1 : middle + 1, :, middle - 1 : middle + 1].mean(axis=(1, 3))


def crop_box(mask: Image.Image, padding: int, ratio: float) -> Box:
    """The box around everything bright, padded, grown to width / height = `ratio`, within the
    picture. Raises RequestError if the mask is black."""
    found = mask.getbbox()
    if found is None:
        raise RequestError("mask_image is black; nothing is to be repainted")
    left, top, right, bottom = found
    left, top = max(left - padding, 0), max(top - padding, 0)
    right, bottom = min(right + padding, mask.width), min(bottom + padding, mask.height)
    if (right - left) / (bottom - top) > ratio:
        top, bottom = _grown(top, bottom, int((right - left) / ratio), mask.height)
    else:
        left, right = _grown(left, right, int((bottom - top) * ratio), mask.width)
    return left, top, right, bottom


def _grown(begin: int, end: int, size: int, limit: int) -> tuple[int, int]:
    """Grow evenly on both sides to `size`, then shift into 0..limit."""
    more = size - (end - begin)
    begin, end = begin - more // 2, end + more - more // 2
    if end >= limit:
        begin, end = begin - (end - limit), limit
    if begin < 0:
        begin, end = 0, end - begin
    return begin, min(end, limit)


def _mask(mask_image: Any, size: tuple[int, int], *, exact: bool) -> Image.Image:
    mask = ImageOps.exif_transpose(open_picture(mask_image, "mask_image")).convert("L")
    if mask.size == size:
        return mask
    if exact or abs(mask.width * size[1] - mask.height * size[0]) > max(size):
        raise RequestError(
            f"mask_image is {mask.width}x{mask.height} pixels; image is {size[0]}x{size[1]} (at "
            "most one megapixel of it): they must have the same shape"
        )
    return mask.resize(size, Image.Resampling.LANCZOS)


def _strength(strength: Any) -> float:
    strength = DEFAULT_STRENGTH if strength is None else strength
    if (
        isinstance(strength, bool)
        or not isinstance(strength, int | float)
        or not 0 <= strength <= 1
    ):
        raise RequestError(f"strength is {strength!r}; a number from 0 to 1 is needed")
    return float(strength)


def _padding(padding: Any) -> int:
    if isinstance(padding, bool) or not isinstance(padding, int) or padding < 0:
        raise RequestError(f"padding_mask_crop is {padding!r}; a whole number of pixels is needed")
    return padding


def _cover(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Resized to cover the size, the middle of it."""
    return ImageOps.fit(picture, (width, height), Image.Resampling.LANCZOS)


def _fill(picture: Image.Image, width: int, height: int) -> Image.Image:
    """Fitted into the size, edges drawn out to fill it."""
    scale = min(width / picture.width, height / picture.height)
    fitted = picture.width, picture.height
    if scale != 1:
        fitted = (
            (width, picture.height * width // picture.width)
            if width / height < picture.width / picture.height
            else (picture.width * height // picture.height, height)
        )
    small = np.asarray(picture.resize(fitted, Image.Resampling.LANCZOS))
    left, top = width // 2 - fitted[0] // 2, height // 2 - fitted[1] // 2
    around = [(top, height - fitted[1] - top), (left, width - fitted[0] - left)]
    around += [(0, 0)] * (small.ndim - 2)
    return Image.fromarray(np.pad(small, around, mode="edge"))
