# SPDX-License-Identifier: Apache-2.0
"""The commands, where their settings come from, and how errors leave."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter
from cyclopts.exceptions import CycloptsError, UnknownCommandError, UnusedCliTokensError

from firstlight.cli.display import one_line, show_warnings, tell
from firstlight.cli.sources import apply_sources, split_environment, warn_of_unknown_variables
from firstlight.config import EditConfig, EngineConfig, GenerateConfig, ModelConfig, ReportConfig
from firstlight.errors import CheckpointError, ConfigError, FirstlightError

_MOST_PROBLEMS = 20

_MODEL = Group("Model", sort_key=2)
_FILES = Group("Settings from files", sort_key=3)

GenerateArgs = Annotated[GenerateConfig, Parameter(name="*", group=Group("Picture", sort_key=1))]
ModelArgs = Annotated[ModelConfig, Parameter(name="*", group=_MODEL)]
EditArgs = Annotated[EditConfig, Parameter(name="*", group=Group("Picture", sort_key=1))]
EngineArgs = Annotated[EngineConfig, Parameter(name="*", group=_MODEL)]
ReportArgs = Annotated[ReportConfig, Parameter(name="*", group=Group("Report", sort_key=4))]


ConfigFile = Annotated[
    Path | None,
    Parameter(
        group=_FILES,
        help="Read settings from this YAML file; its keys are the names of the flags.",
    ),
]


def generate(
    picture: GenerateArgs = GenerateConfig(),  # noqa: B008 (frozen)
    *,
    like: Annotated[
        Path | None,
        Parameter(
            group=_FILES,
            help="Make this picture again from the settings stored in it; flags win over them.",
        ),
    ] = None,
    config: ConfigFile = None,
    engine: EngineArgs = EngineConfig(),  # noqa: B008 (frozen)
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """Draw pictures from prompts and save them as PNG files that say how they were made.

    Prints one line a picture: its path, a tab, and its seed.

    Settings come from flags, then the picture named by --like, then the environment
    (FIRSTLIGHT_STEPS=8 is --steps 8), then the file named by --config, then the defaults.
    """
    from firstlight.cli.generate import run_generate

    run_generate(engine, picture, report, like)


def edit(
    edit: EditArgs = EditConfig(),  # noqa: B008 (frozen)
    *,
    config: ConfigFile = None,
    engine: EngineArgs = EngineConfig(),  # noqa: B008 (frozen)
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """Edit pictures as a text says: `firstlight edit cat.png "make the background green"`.

    The result has the first picture's size unless --width and --height are given. With --mask only
    a part is repainted.
    """
    from firstlight.cli.edit import run_edit

    run_edit(engine, edit, report)


def info(
    model: ModelArgs = ModelConfig(),  # noqa: B008 (frozen)
    *,
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """Print what a model consists of or, given a picture's file, how it was made."""
    from firstlight.cli.info import run_info

    run_info(model, report)


def cache(
    engine: EngineArgs = EngineConfig(),  # noqa: B008 (frozen)
    *,
    why: Annotated[
        bool, Parameter(help="Say for each program of the model whether it is kept, or why not.")
    ] = False,
    clear: Annotated[bool, Parameter(help="Remove all kept programs.")] = False,
    width: Annotated[int | None, Parameter(help="Pixels, for --why. Default: the model's.")] = None,
    height: Annotated[
        int | None, Parameter(help="Pixels, for --why. Default: the model's.")
    ] = None,
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """List the compiled programs that are kept for the next start."""
    from firstlight.cli.cache import run_cache

    run_cache(engine, report, why=why, clear=clear, width=width, height=height)


def bench_cold(
    model: ModelArgs = ModelConfig(),  # noqa: B008 (frozen)
    *,
    runs: Annotated[int, Parameter(help="Rounds of floor, first start, second start, read.")] = 3,
    evict: Annotated[
        bool, Parameter(help="Have the system forget the weight files before each start.")
    ] = False,
    width: Annotated[int | None, Parameter(help="Pixels. Default: the model's own size.")] = None,
    height: Annotated[int | None, Parameter(help="Pixels. Default: the model's own size.")] = None,
    steps: Annotated[int | None, Parameter(help="Denoising steps. Default: the model's.")] = None,
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """Measure starts of this model on this machine, from process start to picture, in processes
    of their own: first (nothing compiled) and second, beside the floor and a raw read."""
    from firstlight.cli.bench import run_cold

    size = {"width": width, "height": height, "steps": steps}
    run_cold(model, report, runs=runs, evict=evict, generate=size)


def bench_make(
    folder: Annotated[Path, Parameter(help="Folder to write; empty or not there.")],
    *,
    size: Annotated[str, Parameter(name="--model", help="Whose size: 4b or 9b.")] = "4b",
    seed: Annotated[int, Parameter(help="Of the random weights.")] = 0,
    report: ReportArgs = ReportConfig(),  # noqa: B008 (frozen)
) -> None:
    """Write a checkpoint of a real model's size with random weights, to measure starts without
    the licence and the download (4b: 16 GB, 9b: 35 GB)."""
    from firstlight.cli.bench import run_make

    run_make(folder, size, seed, report)


def _version() -> str:
    from firstlight import __version__

    return __version__


def _shown_default(value: Any) -> str | None:
    return None if value is None or value is False or value == () else str(value)


def build_app() -> App:
    """Return the command line. Building it imports no jax, and nothing of it runs a model."""
    app = App(
        name="firstlight",
        help="FLUX.2 [klein] image generation in JAX.",
        version=_version,
        config=apply_sources,
        default_parameter=Parameter(
            negative_iterable=(), env_var_split=split_environment, show_default=_shown_default
        ),
    )
    for function in (generate, edit, info, cache):
        app.command(_command(function.__name__, function))
    bench = App(name="bench", help="Measure starts on this machine.", version_flags=())
    bench.command(_command("cold", bench_cold))
    bench.command(_command("make", bench_make))
    app.command(bench)
    return app


def _command(name: str, function: Callable[..., None]) -> App:
    # Named here: else pages and help written under `python -m` name that program instead.
    command = App(name=name, version_flags=())
    command.default(function)
    return command


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; only Ctrl-C is left to the caller."""
    report = ReportConfig()
    try:
        try:
            command, bound, _ = build_app().parse_args(
                list(arguments), exit_on_error=False, print_error=False
            )
        except CycloptsError as error:
            raise ConfigError(_usage(error)) from error
        report = bound.arguments.get("report", report)
        with show_warnings(quiet=report.quiet):
            warn_of_unknown_variables()
            command(*bound.args, **bound.kwargs)
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except Exception as error:
        if report.debug:
            import traceback

            traceback.print_exc()
        tell("error", _explain(error))
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _usage(error: CycloptsError) -> str:
    if isinstance(error, UnusedCliTokensError):
        text = f"unexpected {' '.join(error.unused_tokens or ())!r}"
    else:
        text = one_line(str(error))
    command = "" if isinstance(error, UnknownCommandError) else " ".join(error.command_chain or ())
    text = text if text.endswith("?") else f"{text.rstrip('.')}."
    return f"{text} See {' '.join(filter(None, ('firstlight', command, '--help')))}"


def _explain(error: Exception) -> str:
    if isinstance(error, CheckpointError) and error.problems:
        problems = error.problems[:_MOST_PROBLEMS]
        hidden = len(error.problems) - len(problems)
        more = f"; and {hidden} more (--debug lists them)" if hidden else ""
        headline = str(error).splitlines()[0]
        return f"{headline}: {'; '.join(problems)}{more}"
    if isinstance(error, FirstlightError | OSError):
        return str(error)
    return f"unexpected {type(error).__name__}: {error} (--debug shows where)"
