# SPDX-License-Identifier: Apache-2.0
"""`firstlight bench`: measuring starts, and checkpoints to measure them with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.cli import interruptible
from firstlight.cli.display import make_display
from firstlight.config import COMPONENT_FILES, ModelConfig, ReportConfig
from firstlight.errors import ConfigError


def run_cold(
    model: ModelConfig,
    report: ReportConfig,
    *,
    runs: int,
    evict: bool,
    generate: dict[str, int | None],
) -> None:
    """Measure and print; see `firstlight.bench.cold`."""
    if runs < 1:
        raise ConfigError(f"runs is {runs}; a whole number of at least 1 is needed")
    for name in ("revision", "is_distilled", "offline", "cache_dir", *COMPONENT_FILES):
        if getattr(model, name):
            raise ConfigError(
                f"{name} has no effect on bench cold; give a model and its dtype only"
            )
    from firstlight.bench.cold import ColdRun, lines, measure, summary

    interruptible()

    flags = [f"--{name}={value}" for name, value in generate.items() if value is not None]
    run = ColdRun(model=model.model, dtype=model.dtype, runs=runs, evict=evict, flags=tuple(flags))
    with make_display(report) as display:
        facts = summary(measure(run, display.note))
    if report.json:
        print(json.dumps(facts, indent=2))
    else:
        print("\n".join(lines(facts)))


def run_make(folder: Path, size: str, seed: int, report: ReportConfig) -> None:
    """Write the checkpoint and print its folder."""
    from firstlight.bench.make import make_checkpoint

    interruptible()

    with make_display(report) as display:
        nbytes = make_checkpoint(
            folder,
            size,
            seed=seed,
            on_bytes=lambda done, total: display.advance("save", done, total),
        )
    facts: dict[str, Any] = {"folder": str(folder), "bytes": nbytes}
    print(json.dumps(facts) if report.json else f"{folder}\t{nbytes / 1e9:.1f} GB")
