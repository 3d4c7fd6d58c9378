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

from firstlight.cli.clock import Budget
from firstlight.cli.display import Display, make_display
from firstlight.cli.names import Naming, naming
from firstlight.config import MAX_SEED, EngineConfig, GenerateConfig, ReportConfig
from firstlight.errors import ConfigError
from firstlight.image import save_image

if TYPE_CHECKING:
    from firstlight.pipeline import Pipeline, Result


def run_generate(
    engine: EngineConfig, picture: GenerateConfig, report: ReportConfig, like: Path | None
) -> None:
    """Make and save the pictures. Everything that can be refused is refused before loading."""
    budget = Budget()
    names = naming(picture.output)
    prompts = _prompts(picture)
    _check_seed(picture, len(prompts) * picture.num_images)
    _check_profile(picture.profile)
    with make_display(report) as display:
        pipe = _open_pipeline(engine, picture, display, budget)
        gc.freeze()  # what is alive now stays; see main()
        gc.enable()
        made = _Made()
        try:
            with _profiler(picture.profile):
                seconds = _draw(pipe, prompts, names, picture, display, made)
        except BaseException:
            if made.paths:  # what was saved before the failure is a result, too
                _print_pictures(made, report, {})
            raise
        budget.seconds["save"] = made.save_seconds
        budget.seconds["generate"] = sum(seconds)
        if like is not None:
            from firstlight.cli.like import warn_of_differences

            warn_of_differences(str(like), made.metadata[0], engine, picture)
        timings = budget.close()
        stages = {"load": pipe.load_timings, "generate": made.timings}
        _tell_times(display, timings, seconds, stages if report.verbose else {})
    repeat = {"seconds": seconds, "min": min(seconds), "median": _median(seconds)}
    _print_pictures(made, report, {"timings": {**timings, "stages": stages}, "repeat": repeat})


@dataclasses.dataclass
class _Made:
    """The pictures of a run, saved already."""

    paths: list[Path] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)
    prompts: list[str] = dataclasses.field(default_factory=list)
    metadata: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    save_seconds: float = 0.0


def _open_pipeline(
    engine: EngineConfig, picture: GenerateConfig, display: Display, budget: Budget
) -> Pipeline:
    with budget.part("import"):
        from firstlight.pipeline import Pipeline

    settings = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    sizes = None
    if picture.width is not None and picture.height is not None:
        sizes = [(picture.height, picture.width)]
    elif picture.width is not None or picture.height is not None:
        sizes = []  # half of the size is the model's own, known when it is open
    with budget.part("load"):
        return Pipeline.from_pretrained(
            settings.pop("model"), **settings, sizes=sizes, progress=display.advance
        )


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
    names: Naming,
    picture: GenerateConfig,
    display: Display,
    made: _Made,
) -> list[float]:
    """Make the pictures `repeat` times, saving those of the first time to `made` as they come;
    return the seconds of each time."""
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
    total = len(prompts) * picture.num_images
    begun = time.perf_counter()
    for result in draw(seed=picture.seed):
        _save(result, made, names, picture.overwrite)
        display.advance("save", len(made.paths), total)
    seconds = [time.perf_counter() - begun - made.save_seconds]
    for _ in range(1, picture.repeat):
        begun = time.perf_counter()
        for _ in draw(seed=made.seeds):
            pass
        seconds.append(time.perf_counter() - begun)
    return seconds


def _save(result: Result, made: _Made, names: Naming, overwrite: bool) -> None:
    begun = time.perf_counter()
    (image,), (seed,), (prompt,) = result.images, result.seeds, result.prompts
    path = names.path(prompt=prompt, seed=seed, index=len(made.paths))
    # --overwrite is about files of earlier runs: pictures of one run never replace each other.
    replace = overwrite and path not in made.paths
    made.paths.append(save_image(image, path, result.metadata[0], overwrite=replace))
    made.seeds.append(seed)
    made.prompts.append(prompt)
    made.metadata += result.metadata
    for stage, value in result.timings.items():
        made.timings[stage] = made.timings.get(stage, 0.0) + value
    made.save_seconds += time.perf_counter() - begun


def _tell_times(
    display: Display,
    timings: dict[str, float],
    seconds: list[float],
    stages: dict[str, dict[str, float]],
) -> None:
    if len(seconds) > 1:
        for turn, value in enumerate(seconds, 1):
            display.note(f"repetition {turn} of {len(seconds)}: {value:.3f} s")
        display.note(f"min {min(seconds):.3f} s, median {_median(seconds):.3f} s")
    for part, inner in stages.items():
        for name, value in inner.items():
            display.note(f"{part}: {name} {value:.3f} s")
    parts = ", ".join(f"{name} {value:.2f}" for name, value in timings.items() if name != "total")
    display.note(f"total {timings['total']:.2f} s since the process started ({parts})")


def _median(seconds: list[float]) -> float:
    """The standard library's module would add 5 ms to every start."""
    ranked = sorted(seconds)
    return (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2


def _print_pictures(made: _Made, report: ReportConfig, more: dict[str, Any]) -> None:
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
