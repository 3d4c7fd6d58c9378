# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled programs: prompts and seeds in, arrays of pictures out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from firstlight import sampling
from firstlight.compile import Compiler, Executable, Program
from firstlight.errors import DeviceError
from firstlight.models.specs.scheduler import SchedulerConfig
from firstlight.programs import Programs
from firstlight.progress import Progress
from firstlight.request import Request
from firstlight.residency import Residency
from firstlight.timeline import Timeline
from firstlight.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One finished picture on the host: (H, W, 3) uint8 or float32, or (C, y, x) latents."""

    array: np.ndarray
    prompt: str
    seed: int


class Engine:
    """One model on one mesh. Not thread-safe: one call at a time."""

    def __init__(
        self,
        *,
        programs: Programs,
        compiler: Compiler,
        scheduler: SchedulerConfig,
        tokenizer: Tokenizer,
        weights: Residency,
    ) -> None:
        self.programs = programs
        self.compiler = compiler
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.weights = weights
        self._ropes: dict[tuple[int, int, int], tuple[jax.Array, ...]] = {}

    def run(self, request: Request, progress: Progress, timeline: Timeline) -> Iterator[Picture]:
        """Make the request's pictures, in order, `programs.batch` at a time.

        Spans called encode, denoise and decode go to the timeline.

        Raises DeviceError, naming the stage, if latents or decoded values are not finite.
        """
        call = _Call(self, request, progress)
        batches = _batches(len(request.prompts), self.programs.batch)
        prompts = [tuple(request.prompts[row] for row in rows) for rows in batches]
        # A text encoder that does not stay is asked for once a request.
        ahead = len(batches) if self.weights.policy != "all" else 1
        states: dict[tuple[str, ...], jax.Array] = {}
        for number, rows in enumerate(batches):
            if number % ahead == 0:
                with timeline.span("encode"):
                    states = call.encode(prompts[number : number + ahead])
            text = states[prompts[number]]
            with timeline.span("denoise"):
                x = call.starting_latents(rows)
                x = call.denoise(x, text, done=number, batches=len(batches))
            with timeline.span("decode"):
                arrays, finite = (to_host(array) for array in call.decode(x))
            # Rows that only fill up the last batch repeat its last picture.
            real = rows[: len(request.prompts) - number * self.programs.batch]
            for index, row in enumerate(real):
                _check_finite(finite[index], request, row)
                progress("decode", row + 1, len(request.prompts))
                yield Picture(
                    array=arrays[index], prompt=request.prompts[row], seed=request.seeds[row]
                )

    def ready(self, program: Program) -> Executable:
        """The executable of `program`, compiled now if it was not asked for before."""
        return self.compiler.ready(program)

    def rope(self, height: int, width: int, length: int) -> tuple[jax.Array, ...]:
        """Rotation tables on the devices; kept, since every call of a size needs the same."""
        key = (height, width, length)
        if key not in self._ropes:
            tables = self.programs.rope(*key)
            self._ropes[key] = tuple(self.put(table, sharded=False) for table in tables)
        return self._ropes[key]

    def put(self, array: np.ndarray, *, sharded: bool = True) -> jax.Array:
        """The one place where arguments enter the devices: a row per picture, or replicated."""
        return jax.device_put(array, self.programs.sharding(sharded))


class _Call:
    """The stages of one request."""

    def __init__(self, engine: Engine, request: Request, progress: Progress) -> None:
        self.engine = engine
        self.request = request
        self.progress = progress
        self.shape = (request.height, request.width, request.max_sequence_length)
        # Declared once a call, not once a batch; a new size compiles both at the same time.
        programs, submit = engine.programs, engine.compiler.submit
        self._decoder = submit(programs.decode(*self.shape[:2], request.output_type))
        self._step = submit(programs.denoise(*self.shape))
        self.steps = self._steps()
        self._states: dict[tuple[str, ...], jax.Array] = {}
        self._rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def _steps(self) -> list[jax.Array]:
        """(timestep, sigma, next sigma) of each step, on the devices before the loop starts."""
        request, programs = self.request, self.engine.programs
        rows, columns = programs.grid(request.height, request.width)
        levels = sampling.sigmas(self.engine.scheduler, request.num_inference_steps, rows * columns)
        # The reference scales to training steps and back, in float32; so do we.
        train = np.float32(self.engine.scheduler.num_train_timesteps)
        times = (levels[:-1] * train) / np.float32(1000)
        steps = np.stack([times, levels[:-1], levels[1:]], axis=-1)
        return [self.engine.put(step, sharded=False) for step in steps]

    def encode(self, batches: list[tuple[str, ...]]) -> dict[tuple[str, ...], jax.Array]:
        """Text states of each different batch; those of the last call are not made again."""
        known, self._states = self._states, {}
        for prompts in dict.fromkeys(batches):
            found = known.get(prompts)
            self._states[prompts] = self._encode(prompts) if found is None else found
        # So that the time of each stage is its own.
        jax.block_until_ready(list(self._states.values()))
        self.engine.weights.encoded()
        return self._states

    def _encode(self, prompts: tuple[str, ...]) -> jax.Array:
        length = self.request.max_sequence_length
        for prompt in prompts:
            if prompt not in self._rows:
                self._rows[prompt] = self.engine.tokenizer.encode(prompt, length)
        ids = np.stack([self._rows[prompt][0] for prompt in prompts])
        mask = np.stack([self._rows[prompt][1] for prompt in prompts])
        encode = self.engine.ready(self.engine.programs.encode(length))
        weights = self.engine.weights.encoder()
        (states,) = encode(weights, self.engine.put(ids), self.engine.put(mask))
        self.progress("encode", 1, 1)
        return states

    def starting_latents(self, rows: list[int]) -> jax.Array:
        request, programs = self.request, self.engine.programs
        if request.latents is not None:
            pack = self.engine.ready(programs.pack(request.height, request.width))
            return pack(self.engine.put(request.latents[rows]))[0]
        noise = self.engine.ready(programs.noise(request.height, request.width))
        seeds = np.asarray([request.seeds[row] for row in rows], np.uint32)
        return noise(self.engine.put(seeds))[0]

    def denoise(self, x: jax.Array, text: jax.Array, *, done: int, batches: int) -> jax.Array:
        engine, step = self.engine, self._step.result()
        rope, weights = engine.rope(*self.shape), engine.weights.painter("transformer")
        total = batches * len(self.steps)
        previous = x
        for index, levels in enumerate(self.steps):
            # At most one step runs ahead of the host: the bar is true and a cancel works.
            previous.block_until_ready()
            previous = x
            (x,) = step(weights, x, text, rope, levels)
            self.progress("denoise", done * len(self.steps) + index, total)
        x.block_until_ready()
        self.progress("denoise", (done + 1) * len(self.steps), total)
        return x

    def decode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        vae = self.engine.weights.painter("vae")
        return self._decoder.result()(vae.decoder, vae.stats, x)


def to_host(array: jax.Array) -> np.ndarray:
    """The one place where results leave the devices."""
    return np.asarray(array)


def _batches(count: int, size: int) -> list[list[int]]:
    """0..count-1 in runs of `size`; the last run is filled up by repeating its last entry."""
    return [
        [min(start + offset, count - 1) for offset in range(size)]
        for start in range(0, count, size)
    ]


def _check_finite(finite: np.ndarray, request: Request, row: int) -> None:
    own = request.latents is not None
    picture = f"picture {row} (from given latents)" if own else f"seed {request.seeds[row]}"
    for good, stage in zip(finite, ("denoised latents", "decoded picture"), strict=True):
        if not good:
            raise DeviceError(
                f"the {stage} of {picture} contain values that are not finite: no picture is "
                "made. Damaged weights or a dtype with too little range are the usual causes; "
                "try dtype float32"
            )
