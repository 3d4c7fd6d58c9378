# SPDX-License-Identifier: Apache-2.0
"""What pictures are made from: text states and reference tokens, on the devices.

Both live as long as one request: nothing of one request can reach another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from firstlight.programs import Grids
from firstlight.progress import Progress
from firstlight.request import Request

if TYPE_CHECKING:
    from firstlight.engine import Engine

Prompts = tuple[str, ...]


class Texts:
    """Text states (B, T, J) of batches of rows, towards and away from which a request goes."""

    def __init__(self, engine: Engine, request: Request, progress: Progress) -> None:
        self._engine, self._request, self._progress = engine, request, progress
        self._states: dict[Prompts, jax.Array] = {}
        self._tokens: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def prepare(self, batches: Sequence[list[int]]) -> None:
        """Encode what these batches of rows need; what the last call encoded is kept."""
        request = self._request
        if request.prompt_embeds is not None and not request.negative_prompts:
            return
        known, self._states = self._states, {}
        for rows in batches:
            for prompts in self._prompts(rows):
                if prompts not in self._states:
                    found = known.get(prompts)
                    self._states[prompts] = self._encode(prompts) if found is None else found
        # So that the time of each stage is its own.
        jax.block_until_ready(list(self._states.values()))
        self._engine.weights.encoded()

    def of(self, rows: list[int]) -> tuple[jax.Array, jax.Array | None]:
        """States of a batch, and those to steer away from (None without guidance)."""
        request = self._request
        towards = self._given(request.prompt_embeds, rows)
        if towards is None:
            towards = self._states[tuple(request.prompts[row] for row in rows)]
        if not request.guided:
            return towards, None
        away = self._given(request.negative_prompt_embeds, rows)
        if away is None:
            away = self._states[tuple(request.negative_prompts[row] for row in rows)]
        return towards, away

    def put(self, states: np.ndarray) -> jax.Array:
        """Given text states (B, T, J), in the model's dtype."""
        return self._engine.put(states.astype(self._engine.programs.arch.dtype))

    def _prompts(self, rows: list[int]) -> list[Prompts]:
        request = self._request
        sources = [] if request.prompt_embeds is not None else [request.prompts]
        if request.negative_prompts:
            sources.append(request.negative_prompts)
        return [tuple(source[row] for row in rows) for source in sources]

    def _given(self, embeds: np.ndarray | None, rows: list[int]) -> jax.Array | None:
        return None if embeds is None else self.put(embeds[rows])

    def _encode(self, prompts: Prompts) -> jax.Array:
        engine = self._engine
        # Where text states are given, an automatic negative prompt must be as long as they are.
        length = self._request.text_length
        for prompt in prompts:
            if prompt not in self._tokens:
                self._tokens[prompt] = engine.tokenizer.encode(prompt, length)
        ids = np.stack([self._tokens[prompt][0] for prompt in prompts])
        mask = np.stack([self._tokens[prompt][1] for prompt in prompts])
        encode = engine.ready(engine.programs.encode(length))
        (states,) = encode(engine.weights.encoder(), engine.put(ids), engine.put(mask))
        self._progress("encode", 1, 1)
        return states


class References:
    """What each step gets of the references of a batch of rows: their tokens, encoded once a
    request, or, of models that are trained for it, keys and values computed once."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine, self._request = engine, request
        self._tokens: dict[str, jax.Array] = {}
        self._cache: tuple[list[str], Any] | None = None

    def grids(self, row: int) -> Grids:
        """Rows and columns of tokens of each reference of a picture."""
        pictures = self._request.references[row] if self._request.references else ()
        return tuple(self._engine.programs.grid(*p.shape[:2]) for p in pictures)

    def of(self, rows: list[int]) -> Any:
        """The argument `images` of `Programs.denoise`; the rows' grids must be the same."""
        grids = self.grids(rows[0])
        keys, tokens = [], []
        for number, grid in enumerate(grids):
            pictures = [self._request.references[row][number] for row in rows]
            keys.append(_key(pictures, grid))
            tokens.append(self._encode(keys[-1], pictures, grid))
        if not (self._engine.caches_references and grids):
            return tuple(tokens)
        # One cache at a time: it is large, and rows with equal references follow each other.
        if self._cache is None or self._cache[0] != keys:
            self._cache = None
            self._cache = keys, self._extract(grids, tuple(tokens))
        return self._cache[1]

    def source(self, rows: int) -> jax.Array:
        """Token rows (B, N, 4C) of the picture that a request starts from, the same for `rows`."""
        inpaint = self._request.inpaint
        assert inpaint is not None
        pictures = [inpaint.source] * rows
        grid = self._engine.programs.grid(*inpaint.source.shape[:2])
        return self._encode(_key(pictures, grid), pictures, grid)

    def _extract(self, grids: Grids, tokens: tuple[jax.Array, ...]) -> Any:
        engine = self._engine
        engine.check_room("keys and values of references", engine.programs.cache_bytes(grids))
        extract = engine.ready(engine.programs.extract(grids))
        rope = tuple(
            engine.put(table, sharded=False) for table in engine.programs.reference_rope(grids)
        )
        return engine.programs.cache_of(
            extract(engine.weights.painter("transformer"), rope, tokens)
        )

    def _encode(self, key: str, pictures: list[np.ndarray], grid: tuple[int, int]) -> jax.Array:
        if key not in self._tokens:
            engine = self._engine
            encode = engine.ready(engine.programs.reference(*grid, str(pictures[0].dtype)))
            encoder = engine.weights.painter("vae_encoder").encoder
            stats = engine.weights.painter("vae").stats
            (self._tokens[key],) = encode(encoder, stats, engine.put(np.stack(pictures)))
        return self._tokens[key]


class Kept:
    """Keeps a batch's latents to the source of a request, wherever its mask says so."""

    def __init__(self, engine: Engine, request: Request, references: References) -> None:
        self._engine, self._request, self._references = engine, request, references
        self._batch = engine.programs.batch
        # Declared once a call, not at every step.
        size = (request.height, request.width)
        self._noised, self._keep = engine.programs.noised(*size), engine.programs.keep(*size)
        self._mask: jax.Array | None = None
        self._noise: jax.Array | None = None
        inpaint = request.inpaint
        if inpaint is not None and inpaint.mask is not None:
            rows = inpaint.mask.astype(np.float32).reshape(1, -1, 1)
            mask = np.repeat(rows, self._batch, axis=0)
            self._mask = engine.put(mask)

    def begin(self, noise: jax.Array, sigma: np.ndarray) -> jax.Array:
        """The latents of the first step. Given latents are taken as they are, as the reference
        does."""
        self._noise = noise
        self._source = self._references.source(self._batch)
        if self._request.latents is not None:
            return noise
        noised = self._engine.ready(self._noised)
        return noised(noise, self._source, self._level(sigma))[0]

    def after_step(self, x: jax.Array, sigma: np.ndarray) -> jax.Array:
        """What is not to be repainted is the source again, at this noise level."""
        if self._mask is None:
            return x
        keep = self._engine.ready(self._keep)
        return keep(x, self._noise, self._source, self._mask, self._level(sigma))[0]

    def _level(self, sigma: np.ndarray) -> jax.Array:
        return self._engine.put(np.asarray(sigma, np.float32), sharded=False)


def _key(pictures: list[np.ndarray], grid: tuple[int, int]) -> str:
    """Of the pictures' content."""
    content = b"".join(p.tobytes() for p in pictures)
    return f"{hashlib.sha256(content).hexdigest()} {pictures[0].dtype} {grid}"
