# SPDX-License-Identifier: Apache-2.0
"""Runs the compiled programs: prompts and seeds in, arrays of pictures out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from PIL import Image

from firstlight import previews, sampling
from firstlight.compile import Compiler, Executable, Program
from firstlight.conditions import Kept, References, Texts
from firstlight.errors import DeviceError
from firstlight.models.specs.scheduler import SchedulerConfig
from firstlight.previews import Previewer
from firstlight.programs import Grids, Programs
from firstlight.progress import Progress
from firstlight.request import Request
from firstlight.residency import Residency, available_bytes
from firstlight.timeline import Timeline
from firstlight.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One finished picture on the host: (H, W, 3) uint8 or float32, or (C, y, x) latents.

    `index` is its place in the request.
    """

    array: np.ndarray
    prompt: str
    seed: int
    index: int


@dataclass
class Step:
    """A finished step of a batch: number (from 0), training timestep, state on the devices, and
    the latents and noise levels before and after it.

    Whoever watches may replace `latents` (B, N, 4C) and `text` (B, T, J), or end the loop.
    """

    number: int
    timestep: float
    rows: list[int]
    latents: jax.Array
    text: jax.Array
    before: jax.Array
    sigmas: tuple[float, float]
    stop: bool = False


OnStep = Callable[[Step], None]


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
        caches_references: bool = False,
    ) -> None:
        self.caches_references = caches_references
        self.programs = programs
        self.compiler = compiler
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.weights = weights
        self._previewer: Previewer | None = None
        self._ropes: dict[tuple[int, int, int, Grids], tuple[jax.Array, ...]] = {}

    def run(
        self,
        request: Request,
        progress: Progress,
        timeline: Timeline,
        on_step: OnStep | None = None,
    ) -> Iterator[Picture]:
        """Make the request's pictures, `programs.batch` at a time.

        They come in order, except that pictures of one batch must have references of the same
        sizes. Spans called encode, references, denoise and decode go to the timeline.

        Raises DeviceError, naming the stage, if latents or decoded values are not finite.
        """
        call = _Call(self, request, progress, on_step)
        batches = _batches(request, self.programs.batch, call.references.grids)
        # A text encoder that does not stay is asked for once a request.
        ahead = len(batches) if self.weights.policy != "all" else 1
        for number, batch in enumerate(batches):
            if number % ahead == 0:
                with timeline.span("encode"):
                    call.texts.prepare([b.rows for b in batches[number : number + ahead]])
            with timeline.span("references"):
                images = call.references.of(batch.rows)
            with timeline.span("denoise"):
                x = call.denoise(batch, images, done=number, batches=len(batches))
            with timeline.span("decode"):
                arrays, finite = (to_host(array) for array in call.decode(x))
            for place, row in enumerate(batch.rows[: batch.real]):
                _check_finite(finite[place], request, row)
                call.made += 1
                progress("decode", call.made, len(request.prompts))
                yield Picture(
                    array=arrays[place],
                    prompt=request.prompts[row],
                    seed=request.seeds[row],
                    index=row,
                )

    def encode_prompts(self, request: Request, progress: Progress) -> np.ndarray:
        """Text states (B, T, J) of a request's prompts, on the host, in the model's dtype."""
        texts = Texts(self, request, progress)
        batches = _batches(request, self.programs.batch, lambda row: ())
        texts.prepare([batch.rows for batch in batches])
        states = [to_host(texts.of(batch.rows)[0])[: batch.real] for batch in batches]
        return np.concatenate(states)

    def check_room(self, what: str, nbytes: int) -> None:
        """Say, before it is taken, what memory is needed over all devices; raises DeviceError if
        it is not there."""
        device = self.programs.mesh.devices.flat[0]
        share = nbytes if device.platform == "cpu" else nbytes // self.programs.mesh.devices.size
        free = available_bytes(device)
        self.compiler.timeline.note("reference_cache_bytes", nbytes)
        if free is not None and share > free:
            raise DeviceError(
                f"{what} need {share / 1e9:.2f} GB on each device; {free / 1e9:.2f} GB are free: "
                "give fewer or smaller references"
            )

    def preview(self, step: Step, height: int, width: int) -> list[Image.Image]:
        """Small pictures of what a step's batch is becoming, one for each row."""
        if self._previewer is None:
            self._previewer = Previewer(self)
        before, after = to_host(step.before), to_host(step.latents)
        rows, columns = self.programs.grid(height, width)
        return [
            self._previewer(tokens, rows, columns)
            for tokens in previews.clean(before, after, *step.sigmas)
        ]

    def ready(self, program: Program) -> Executable:
        """The executable of `program`, compiled now if it was not asked for before."""
        return self.compiler.ready(program)

    def rope(self, height: int, width: int, length: int, grids: Grids) -> tuple[jax.Array, ...]:
        """Rotation tables on the devices; kept, since every call of a size needs the same."""
        key = (height, width, length, grids)
        if key not in self._ropes:
            tables = self.programs.rope(*key)
            self._ropes[key] = tuple(self.put(table, sharded=False) for table in tables)
        return self._ropes[key]

    def put(self, array: np.ndarray, *, sharded: bool = True) -> jax.Array:
        """The one place where arguments enter the devices: a row per picture, or replicated."""
        return jax.device_put(array, self.programs.sharding(sharded))


@dataclass(frozen=True)
class _Batch:
    """Rows of a request that are made together; those after the first `real` only fill up."""

    rows: list[int]
    real: int
    grids: Grids


class _Call:
    """The stages of one request."""

    def __init__(
        self, engine: Engine, request: Request, progress: Progress, on_step: OnStep | None
    ) -> None:
        self.engine = engine
        self.request = request
        self.progress = progress
        self.on_step = on_step
        self.made = 0
        self.texts = Texts(engine, request, progress)
        self.references = References(engine, request)
        self.size = (request.height, request.width)
        # Declared once a call, not once a batch; a new size compiles all at the same time.
        self._decoder = engine.compiler.submit(
            engine.programs.decode(*self.size, request.output_type)
        )
        self._steps: dict[Grids, Program] = {}
        for row in range(len(request.prompts)):
            self._step(self.references.grids(row))
        self.times, self.steps, self.sigmas = self._schedule()
        self.kept = None if request.inpaint is None else Kept(engine, request, self.references)

    def _step(self, grids: Grids) -> Program:
        if grids not in self._steps:
            programs, request = self.engine.programs, self.request
            program = programs.denoise(
                *self.size,
                request.text_length,
                grids,
                guided=request.guided,
                cached=self.engine.caches_references and bool(grids),
            )
            self.engine.compiler.submit(program)
            self._steps[grids] = program
        return self._steps[grids]

    def _schedule(self) -> tuple[np.ndarray, list[jax.Array], np.ndarray]:
        """Of each step that is made: its timestep, its (timestep, sigma, next sigma, guidance) on
        the devices before the loop starts, and the noise levels from its own on."""
        request, programs = self.request, self.engine.programs
        rows, columns = programs.grid(*self.size)
        levels = sampling.sigmas(
            self.engine.scheduler,
            request.num_inference_steps,
            rows * columns,
            request.sigmas,
            request.time_shift,
        )
        if request.inpaint is not None:
            levels = levels[request.inpaint.first_step(len(levels) - 1) :]
        # The reference scales to training steps and back, in float32; so do we.
        times = levels[:-1] * np.float32(self.engine.scheduler.num_train_timesteps)
        guidance = np.full_like(times, request.guidance_scale)
        steps = np.stack([times / np.float32(1000), levels[:-1], levels[1:], guidance], axis=-1)
        return times, [self.engine.put(step, sharded=False) for step in steps], levels

    def starting_latents(self, rows: list[int]) -> jax.Array:
        request, programs = self.request, self.engine.programs
        if request.latents is not None:
            pack = self.engine.ready(programs.pack(*self.size))
            return pack(self.engine.put(request.latents[rows]))[0]
        noise = self.engine.ready(programs.noise(*self.size))
        seeds = np.asarray([request.seeds[row] for row in rows], np.uint32)
        return noise(self.engine.put(seeds))[0]

    def denoise(self, batch: _Batch, images: Any, *, done: int, batches: int) -> jax.Array:
        engine = self.engine
        text, negative = self.texts.of(batch.rows)
        x = self.starting_latents(batch.rows)
        if self.kept is not None:
            x = self.kept.begin(x, self.sigmas[0])
        step = engine.ready(self._step(batch.grids))
        # Cached keys are rotated already.
        grids = () if engine.caches_references else batch.grids
        rope = engine.rope(*self.size, self.request.text_length, grids)
        weights = engine.weights.painter("transformer")
        total, before = batches * len(self.steps), done * len(self.steps)
        previous = x
        for index, levels in enumerate(self.steps):
            # At most one step runs ahead of the host: the bar is true and a cancel works.
            previous.block_until_ready()
            previous = x
            (x,) = step(weights, x, text, rope, levels, images, negative)
            if self.kept is not None:
                x = self.kept.after_step(x, self.sigmas[index + 1])
            if self.on_step is not None:
                x.block_until_ready()
                seen = Step(
                    number=index,
                    timestep=float(self.times[index]),
                    rows=batch.rows,
                    latents=x,
                    text=text,
                    before=previous,
                    sigmas=(float(self.sigmas[index]), float(self.sigmas[index + 1])),
                )
                self.on_step(seen)
                x, text = seen.latents, seen.text
                if seen.stop:
                    break
            self.progress("denoise", before + index, total)
        x.block_until_ready()
        self.progress("denoise", before + len(self.steps), total)
        return x

    def decode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        vae = self.engine.weights.painter("vae")
        return self._decoder.result()(vae.decoder, vae.stats, x)


def to_host(array: jax.Array) -> np.ndarray:
    """The one place where results leave the devices."""
    return np.asarray(array)


def _batches(request: Request, size: int, grids: Callable[[int], Grids]) -> list[_Batch]:
    """Runs of `size` rows whose references have the same sizes, in order of their first row; the
    last run of each is filled up by repeating its last row."""
    groups: dict[Grids, list[int]] = {}
    for row in range(len(request.prompts)):
        groups.setdefault(grids(row), []).append(row)
    made = []
    for layout, rows in groups.items():
        for start in range(0, len(rows), size):
            real = rows[start : start + size]
            made.append(_Batch(real + real[-1:] * (size - len(real)), len(real), layout))
    return sorted(made, key=lambda batch: batch.rows[0])


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
