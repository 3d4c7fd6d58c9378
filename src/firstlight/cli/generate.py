# SPDX-License-Identifier: Apache-2.0
"""`firstlight generate`: prompts in, pictures and their seeds out."""

from __future__ import annotations

from pathlib import Path

from firstlight.cli.drawing import Job, run_job
from firstlight.config import EngineConfig, GenerateConfig, ReportConfig
from firstlight.errors import ConfigError


def run_generate(
    engine: EngineConfig, picture: GenerateConfig, report: ReportConfig, like: Path | None
) -> None:
    """Draw the prompts."""
    run_job(engine, Job(picture, _prompts(picture), like=like), report)


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
