# SPDX-License-Identifier: Apache-2.0
"""What a picture is becoming, cheaply: a linear map from latents to colours, on the host.

The map is fitted to the model's own autoencoder, by least squares over the latents of patterns.
A preview shows colours and shapes at an eighth of the size, not detail.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from firstlight.engine import Engine

_SIDE, _COUNT = 64, 108


class Previewer:
    """Turns token rows into small pictures. Fitted when it is made, to 108 patterns."""

    def __init__(self, engine: Engine) -> None:
        programs = engine.programs
        multiple = programs.arch.vae.pixel_multiple
        side = -(-_SIDE // multiple) * multiple
        stats = engine.weights.painter("vae").stats
        mean, var = np.asarray(stats.mean), np.asarray(stats.var)
        self._scale, self._shift = np.sqrt(var + programs.arch.vae.batch_norm_eps), mean
        encode = engine.ready(programs.reference(side // multiple, side // multiple))
        encoder = engine.weights.painter("vae_encoder").encoder
        latents, colours = [], []
        for picture in _pictures(side):
            batch = np.repeat(picture[None], programs.batch, axis=0)
            (tokens,) = encode(encoder, stats, engine.put(batch))
            cells = self._cells(np.asarray(tokens)[0], side // multiple, side // multiple)
            latents.append(cells.reshape(-1, cells.shape[-1]))
            cell = side // cells.shape[0]
            unit = picture.reshape(cells.shape[0], cell, cells.shape[1], cell, 3) / 255
            colours.append(unit.mean(axis=(1, 3)).reshape(-1, 3))
        inputs = np.concatenate(latents)
        inputs = np.concatenate([inputs, np.ones((len(inputs), 1))], axis=1)
        self._map, *_ = np.linalg.lstsq(inputs, np.concatenate(colours))

    def __call__(self, tokens: np.ndarray, rows: int, columns: int) -> Image.Image:
        """(N, 4C) float32 token rows of one clean picture -> a picture of its latents' size."""
        cells = self._cells(tokens, rows, columns)
        unit = np.clip(cells @ self._map[:-1] + self._map[-1], 0, 1)
        return Image.fromarray(np.round(unit * 255).astype(np.uint8))

    def _cells(self, tokens: np.ndarray, rows: int, columns: int) -> np.ndarray:
        """Latents (2 rows, 2 columns, C), on the autoencoder's scale."""
        cells = (tokens * self._scale + self._shift).reshape(rows, columns, -1, 2, 2)
        return cells.transpose(0, 3, 1, 4, 2).reshape(2 * rows, 2 * columns, -1)


def _pictures(side: int) -> Iterator[np.ndarray]:
    """(side, side, 3) uint8: random colours, from plain to finely patterned; the same each time."""
    rng = np.random.default_rng(0)
    for number in range(_COUNT):
        coarse = 1 + number % 9
        small = rng.integers(0, 256, (coarse, coarse, 3), np.uint8)
        smooth = Image.Resampling.BICUBIC if number % 2 else Image.Resampling.NEAREST
        yield np.asarray(Image.fromarray(small).resize((side, side), smooth))


def clean(before: np.ndarray, after: np.ndarray, sigma: float, sigma_next: float) -> np.ndarray:
    """The clean picture that a step was on its way to: x - sigma v, v from the step itself."""
    velocity = (after - before) / (sigma_next - sigma)
    return after - sigma_next * velocity
