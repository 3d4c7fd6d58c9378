# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `edit` have in common: opening the model, drawing, saving, telling."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli import interruptible
from firstlight.cli.budget import account, one_line, table
from firstlight.cli.display import Display, make_display
from firstlight.cli.names import naming
from firstlight.cli.process import TIMELINE
from firstlight.cli.saving import Made, Saver
from firstlight.config import COMPONENT_FILES, MAX_SEED, EngineConfig, PictureConfig, ReportConfig
from firstlight.errors import ConfigError, FirstlightWarning
from firstlight.timeline import MAIN, Span, Timeline

if TYPE_CHECKING:
    from firstlight.pipeline import Pipeline
    from firstlight.request import Limits, Request


@dataclasses.dataclass(frozen=True)
class Job:
    """Pictures to be drawn: their prompts, and further arguments of the call."""

    picture: PictureConfig
    prompts: list[str]
    conditions: dict[str, Any] = dataclasses.field(default_factory=dict)
    like: Path | None = None

    @property
    def total(self) -> int:
        """Number of pictures."""
        return len(self.prompts) * self.picture.num_images

    def arguments(self) -> dict[str, Any]:
        """Of `Pipeline.stream`, all but the prompts and the seed."""
        picture = self.picture
        return {
            "height": picture.height,
            "width": picture.width,
            "num_inference_steps": picture.steps,
            "guidance_scale": picture.guidance,
            "negative_prompt": picture.negative_prompt,
            "time_shift": picture.time_shift,
            "num_images_per_prompt": picture.num_images,
            "max_sequence_length": picture.max_sequence_length,
            **self.conditions,
        }

    def request(self, limits: Limits) -> Request:
        """The request that is going to be made, so that its programs are ready in time."""
        from firstlight.request import complete

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FirstlightWarning)  # the call itself will warn
            return complete(limits, prompt=self.prompts, **self.arguments())


def run_job(engine: EngineConfig, job: Job, report: ReportConfig) -> None:
    """Make and save the pictures. Everything that can be refused is refused before loading."""
    timeline, picture = TIMELINE, job.picture
    names = naming(picture.output)
    _check_seed(picture, job.total)
    for name in ("profile", "preview"):
        _check_folder(name, getattr(picture, name))
    timeline.add(Span(MAIN, "command line", timeline.spans[0].end or 0.0, timeline.clock()))
    with make_display(report) as display:
        pipe = _open_pipeline(engine, job, display, timeline)
        interruptible()
        gc.freeze()  # what is alive now stays; see main()
        gc.enable()
        saver = Saver(names, picture, timeline, job.total, display.advance)
        try:
            with _profiler(picture.profile), saver:
                seconds = _draw(pipe, job, saver, timeline)
        except BaseException:
            if saver.made.paths:  # what was saved before the failure is a result, too
                _print_pictures(saver.made, report, {})
            raise
        made = saver.made
        if job.like is not None:
            from firstlight.cli.like import warn_of_differences

            warn_of_differences(str(job.like), made.metadata[0], engine, picture)
        facts = account(timeline, timeline.clock())
        facts["stages"] = made.timings
        _tell_times(display, facts, seconds, verbose=report.verbose)
    repeat = {"seconds": seconds, "min": min(seconds), "median": _median(seconds)}
    _print_pictures(made, report, {"timings": facts, "repeat": repeat})


def _open_pipeline(
    engine: EngineConfig, job: Job, display: Display, timeline: Timeline
) -> Pipeline:
    settings = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    of_layout = ("mesh", "images_per_device", "executable_cache", "offload", "vae_tiling")
    layout = {name: settings.pop(name) for name in of_layout}
    for name in COMPONENT_FILES:
        settings.pop(name)
    with timeline.span("imports"):
        from firstlight.weights.loading import NEEDED, Loading

        # Reading begins here, before jax is imported.
        loading = Loading(
            settings.pop("model"),
            **settings,
            files=engine.files,
            components=(*NEEDED, "vae_encoder") if _encodes(job) else NEEDED,
            progress=display.advance,
            timeline=timeline,
        )
        try:
            from firstlight.pipeline import Pipeline
            from firstlight.start import Layout
        except BaseException:
            loading.close()
            raise
    return Pipeline.from_loading(loading, Layout(**layout, request=job.request), display.advance)


def _encodes(job: Job) -> bool:
    """Whether pictures go into the autoencoder: references, or previews being fitted to it."""
    return "image" in job.conditions or job.picture.preview is not None


def _check_seed(picture: PictureConfig, images: int) -> None:
    if picture.seed is not None and picture.seed + images - 1 > MAX_SEED:
        raise ConfigError(
            f"seed is {picture.seed}; for {images} pictures at most {MAX_SEED + 1 - images} is "
            "allowed, since picture i uses seed + i"
        )


def _check_folder(name: str, folder: Path | None) -> None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{name} is {str(folder)!r}; {error.strerror}") from error


def _profiler(folder: Path | None) -> contextlib.AbstractContextManager[Any]:
    if folder is None:
        return contextlib.nullcontext()
    import jax

    return jax.profiler.trace(folder)


def _draw(pipe: Pipeline, job: Job, saver: Saver, timeline: Timeline) -> list[float]:
    """Make the pictures `repeat` times, saving those of the first time as they come; return the
    seconds of each time."""
    draw = functools.partial(pipe.stream, job.prompts, **job.arguments())
    watch = {} if job.picture.preview is None else _preview(job.picture.preview)
    begun = time.perf_counter()
    results = draw(seed=job.picture.seed, **watch)
    with timeline.span("first image"):
        first = next(results)
    saver.add(first)
    with timeline.span("other images"):
        for result in results:
            saver.add(result)
    seconds = [time.perf_counter() - begun]
    saver.finish()
    for _ in range(1, job.picture.repeat):
        begun = time.perf_counter()
        with timeline.span("repetition"):
            for _ in draw(seed=saver.made.seeds):
                pass
        seconds.append(time.perf_counter() - begun)
    return seconds


def _preview(folder: Path) -> dict[str, Any]:
    """Arguments of a call that leave a small picture of every step in `folder`."""
    from firstlight.image import save_image

    begun = 0

    def save(pipe: Pipeline, step: int, timestep: float, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal begun
        images = tensors["preview"]
        begun += len(images) if step == 0 else 0
        for place, image in enumerate(images):
            path = folder / f"{begun - len(images) + place}-{step}.png"
            save_image(image, path, {"timestep": timestep}, overwrite=True)
        return {}

    return {"callback_on_step_end": save, "callback_on_step_end_tensor_inputs": ["preview"]}


def _tell_times(
    display: Display, facts: dict[str, Any], seconds: list[float], *, verbose: bool
) -> None:
    if len(seconds) > 1:
        for turn, value in enumerate(seconds, 1):
            display.note(f"repetition {turn} of {len(seconds)}: {value:.3f} s")
        display.note(f"min {min(seconds):.3f} s, median {_median(seconds):.3f} s")
    if verbose:
        for line in table(facts):
            display.note(line)
        for stage, value in facts["stages"].items():
            display.note(f"pictures: {stage} {value:.3f} s")
    display.note(one_line(facts))


def _median(seconds: list[float]) -> float:
    """The standard library's module would add 5 ms to every start."""
    ranked = sorted(seconds)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def _print_pictures(made: Made, report: ReportConfig, more: dict[str, Any]) -> None:
    if not report.json:
        for path, seed in zip(made.paths, made.seeds, strict=True):
            print(f"{path}\tseed {seed}", flush=True)
        return
    images = [
        {"path": str(path), "seed": seed, "prompt": prompt, "metadata": metadata}
        for path, seed, prompt, metadata in zip(
            made.paths, made.seeds, made.prompts, made.metadata, strict=True
        )
    ]
    print(json.dumps({"images": images, **more}, indent=2), flush=True)
