# SPDX-License-Identifier: Apache-2.0
"""`firstlight generate`: prompts in, PNG files and their seeds out."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.budget import account, one_line, table
from firstlight.cli.display import Display, make_display
from firstlight.cli.names import naming
from firstlight.cli.process import TIMELINE
from firstlight.cli.saving import Made, Saver
from firstlight.config import MAX_SEED, EngineConfig, GenerateConfig, ReportConfig
from firstlight.errors import ConfigError
from firstlight.timeline import MAIN, Span, Timeline

if TYPE_CHECKING:
    from firstlight.pipeline import Pipeline


def run_generate(
    engine: EngineConfig, picture: GenerateConfig, report: ReportConfig, like: Path | None
) -> None:
    """Make and save the pictures. Everything that can be refused is refused before loading."""
    timeline = TIMELINE
    names = naming(picture.output)
    prompts = _prompts(picture)
    total = len(prompts) * picture.num_images
    _check_seed(picture, total)
    _check_profile(picture.profile)
    timeline.add(Span(MAIN, "command line", timeline.spans[0].end or 0.0, timeline.clock()))
    with make_display(report) as display:
        pipe = _open_pipeline(engine, picture, display, timeline)
        gc.freeze()  # what is alive now stays; see main()
        gc.enable()
        saver = Saver(names, picture, timeline, total, display.advance)
        try:
            with _profiler(picture.profile), saver:
                seconds = _draw(pipe, prompts, picture, saver, timeline)
        except BaseException:
            if saver.made.paths:  # what was saved before the failure is a result, too
                _print_pictures(saver.made, report, {})
            raise
        made = saver.made
        if like is not None:
            from firstlight.cli.like import warn_of_differences

            warn_of_differences(str(like), made.metadata[0], engine, picture)
        facts = account(timeline, timeline.clock())
        facts["stages"] = made.timings
        _tell_times(display, facts, seconds, verbose=report.verbose)
    repeat = {"seconds": seconds, "min": min(seconds), "median": _median(seconds)}
    _print_pictures(made, report, {"timings": facts, "repeat": repeat})


def _open_pipeline(
    engine: EngineConfig, picture: GenerateConfig, display: Display, timeline: Timeline
) -> Pipeline:
    settings = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    sizes = None
    if picture.width is not None and picture.height is not None:
        sizes = [(picture.height, picture.width)]
    elif picture.width is not None or picture.height is not None:
        sizes = []  # half of the size is the model's own, known when it is open
    of_layout = ("mesh", "images_per_device", "executable_cache", "offload")
    layout = {name: settings.pop(name) for name in of_layout}
    with timeline.span("imports"):
        from firstlight.weights.loading import Loading

        # Reading begins here, before jax is imported.
        loading = Loading(
            settings.pop("model"), **settings, progress=display.advance, timeline=timeline
        )
        try:
            from firstlight.pipeline import Pipeline
            from firstlight.start import Layout
        except BaseException:
            loading.close()
            raise
    return Pipeline.from_loading(loading, Layout(**layout, sizes=sizes), display.advance)


def _prompts(picture: GenerateConfig) -> list[str]:
    if picture.prompt_file is None:
        if not picture.prompt:
            raise ConfigError("no prompt; give one or more, or --prompt-file, or --like")
        return list(picture.prompt)
    try:
        text = picture.prompt_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompt_file {str(picture.prompt_file)!r} cannot be read: {error}"
        ) from error
    lines = (line.strip() for line in text.splitlines())
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise ConfigError(f"prompt_file {str(picture.prompt_file)!r} contains no prompt")
    return prompts


def _check_seed(picture: GenerateConfig, images: int) -> None:
    if picture.seed is not None and picture.seed + images - 1 > MAX_SEED:
        raise ConfigError(
            f"seed is {picture.seed}; for {images} pictures at most {MAX_SEED + 1 - images} is "
            "allowed, since picture i uses seed + i"
        )


def _check_profile(folder: Path | None) -> None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"profile is {str(folder)!r}; {error.strerror}") from error


def _profiler(folder: Path | None) -> contextlib.AbstractContextManager[Any]:
    if folder is None:
        return contextlib.nullcontext()
    import jax

    return jax.profiler.trace(folder)


def _draw(
    pipe: Pipeline,
    prompts: list[str],
    picture: GenerateConfig,
    saver: Saver,
    timeline: Timeline,
) -> list[float]:
    """Make the pictures `repeat` times, saving those of the first time as they come; return the
    seconds of each time."""
    draw = functools.partial(
        pipe.stream,
        prompts,
        height=picture.height,
        width=picture.width,
        num_inference_steps=picture.steps,
        guidance_scale=picture.guidance,
        num_images_per_prompt=picture.num_images,
        max_sequence_length=picture.max_sequence_length,
    )
    begun = time.perf_counter()
    results = draw(seed=picture.seed)
    with timeline.span("first image"):
        first = next(results)
    saver.add(first)
    with timeline.span("other images"):
        for result in results:
            saver.add(result)
    seconds = [time.perf_counter() - begun]
    saver.finish()
    for _ in range(1, picture.repeat):
        begun = time.perf_counter()
        with timeline.span("repetition"):
            for _ in draw(seed=saver.made.seeds):
                pass
        seconds.append(time.perf_counter() - begun)
    return seconds


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
