# SPDX-License-Identifier: Apache-2.0
"""`callback_on_step_end`, with the contract that diffusers' pipelines have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from firstlight.engine import Engine, Step
from firstlight.errors import RequestError

TENSORS = ("latents", "prompt_embeds")
PREVIEW = "preview"
"""Not a tensor: a list of small PIL images of what the batch is becoming."""


class StepCallback:
    """Shows a user's function every step and takes back what it changed."""

    def __init__(
        self,
        pipe: Any,
        engine: Engine,
        callback: Callable[..., Any],
        names: Sequence[str],
        size: tuple[int, int],
    ) -> None:
        """Raises RequestError for a callback that cannot be called and names that are none."""
        if not callable(callback):
            raise RequestError(f"callback_on_step_end is {callback!r}; a function is needed")
        unknown = [name for name in names if name not in (*TENSORS, PREVIEW)]
        if isinstance(names, str) or unknown:
            raise RequestError(
                f"callback_on_step_end_tensor_inputs is {names!r}; a list of some of "
                f"{', '.join((*TENSORS, PREVIEW))} is needed"
            )
        self._pipe, self._engine, self._callback = pipe, engine, callback
        self._names, self._size = tuple(names), size

    def __call__(self, step: Step) -> None:
        """Call the user's function. Raises RequestError if what it returns cannot be used."""
        tensors: dict[str, Any] = {"latents": step.latents, "prompt_embeds": step.text}
        if PREVIEW in self._names:
            tensors[PREVIEW] = self._engine.preview(step, *self._size)
        shown = {name: tensors[name] for name in self._names}
        made = self._callback(self._pipe, step.number, step.timestep, shown)
        if not isinstance(made, dict):
            raise RequestError(
                f"callback_on_step_end returned {type(made).__name__}; a dict is needed, empty "
                "where nothing is replaced"
            )
        step.latents = self._replaced("latents", made, step.latents)
        step.text = self._replaced("prompt_embeds", made, step.text)
        step.stop = self._pipe.interrupt

    def _replaced(self, name: str, made: dict[str, Any], before: jax.Array) -> jax.Array:
        value = made.get(name)
        if value is None or value is before:
            return before
        array = np.asarray(value)
        if array.shape != before.shape:
            raise RequestError(
                f"callback_on_step_end returned {name} of shape {array.shape}; {before.shape} is "
                "needed"
            )
        return self._engine.put(array.astype(before.dtype))
