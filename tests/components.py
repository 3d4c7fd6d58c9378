# SPDX-License-Identifier: Apache-2.0
"""A model folder's networks, loaded by the package and called one at a time on NumPy arrays.

Arrays have the reference's layout: pictures and latents (B, C, Y, X), token rows (B, N, C).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight import sampling
from firstlight.compile import Compiler
from firstlight.models import autoencoder, text_encoder, transformer
from firstlight.models.params import DATA
from firstlight.placement import place
from firstlight.sharding import make_mesh, param_shardings
from firstlight.timeline import Timeline
from firstlight.weights.folder import open_model
from firstlight.weights.load import Reading
from firstlight.weights.plan import merged

COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}
"""Each function runs once: compile quickly. The pipeline's tests compile as users do."""


class Components:
    """The three networks of one folder on one device, each function compiled on first use."""

    def __init__(self, folder: Path, dtype: str = "float32") -> None:
        self.mesh = make_mesh()
        self.model = open_model(folder, dtype=dtype)
        shardings = {
            name: param_shardings(specs, self.mesh) for name, specs in self.model.specs.items()
        }
        reading = Reading(merged(self.model.plans))
        self.weights = place(reading, shardings, Compiler(self.mesh, None), Timeline.from_now())

    def text(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """(B, T) int32 token ids and mask -> text states (B, T, J)."""
        cfg = self.model.text_encoder
        weights = self.weights["text_encoder"]
        return self._run(lambda p, *a: text_encoder.encode(p, cfg, *a), weights, ids, mask)

    def velocity(
        self,
        x: np.ndarray,
        text: np.ndarray,
        timestep: np.ndarray,
        image_ids: np.ndarray,
        cache: Any = None,
    ) -> np.ndarray:
        """One transformer call: x (B, N, C), text (B, T, J), timestep (B,), image_ids (N, 4)."""
        cfg = self.model.transformer
        ids = np.concatenate([sampling.text_ids(text.shape[1]), image_ids])
        rope = sampling.rope_table(cfg, ids)
        return self._run(
            lambda p, shared, *a: transformer.denoise(p, cfg, *a, *shared),
            self.weights["transformer"],
            x,
            text,
            timestep,
            shared=(rope, cache),
        )

    def extract(self, x: np.ndarray, rope: Any) -> Any:
        """Reference tokens (B, N, C) -> their keys and values in every block, on the device."""
        cfg, weights = self.model.transformer, self.weights["transformer"]
        with jax.set_mesh(self.mesh):
            rows = jax.device_put(x, NamedSharding(self.mesh, P(DATA)))
            tables = jax.device_put(rope, NamedSharding(self.mesh, P()))
            extract = jax.jit(lambda p, x, rope: transformer.extract(p, cfg, x, rope))
            return extract(weights, rows, tables)

    def tiled(self, direction: str, x: np.ndarray, tile: int) -> np.ndarray:
        """`encode` or `decode` in tiles of `tile` pixels."""
        cfg = dataclasses.replace(self.model.vae, sample_size=tile)
        weights = getattr(self.weights["vae"], f"{direction}r")
        function = getattr(autoencoder, f"{direction}_tiled")
        rows = self._run(lambda p, x: function(p, cfg, x), weights, _last(x))
        return rows.transpose(0, 3, 1, 2)

    def encode(self, image: np.ndarray) -> np.ndarray:
        """(B, 3, Y, X) in [-1, 1] -> mean latents (B, C, y, x)."""
        cfg, weights = self.model.vae, self.weights["vae"].encoder
        rows = self._run(lambda p, x: autoencoder.encode(p, cfg, x), weights, _last(image))
        return rows.transpose(0, 3, 1, 2)

    def decode(self, latents: np.ndarray) -> np.ndarray:
        """(B, C, y, x) -> (B, 3, Y, X) around [-1, 1]."""
        cfg, weights = self.model.vae, self.weights["vae"].decoder
        rows = self._run(lambda p, x: autoencoder.decode(p, cfg, x), weights, _last(latents))
        return rows.transpose(0, 3, 1, 2)

    def _run(
        self, function: Callable[..., Any], params: Any, *batched: np.ndarray, shared: Any = None
    ) -> np.ndarray:
        """`function(params, [shared,] *batched)`, compiled, on arrays placed as the engine does."""
        with jax.set_mesh(self.mesh):
            rows = [jax.device_put(a, NamedSharding(self.mesh, P(DATA))) for a in batched]
            if shared is not None:
                everywhere = NamedSharding(self.mesh, P())
                rows.insert(
                    0,
                    jax.tree.map(
                        lambda a: a if isinstance(a, jax.Array) else jax.device_put(a, everywhere),
                        shared,
                    ),
                )
            lowered = jax.jit(function).lower(params, *rows)
            return np.asarray(lowered.compile(COMPILER_OPTIONS)(params, *rows))


def _last(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))
