# SPDX-License-Identifier: Apache-2.0
"""`firstlight edit`: pictures and a text in, other pictures out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from firstlight.cli.drawing import Job, run_job
from firstlight.config import EditConfig, EngineConfig, ReportConfig
from firstlight.errors import ConfigError


def run_edit(engine: EngineConfig, edit: EditConfig, report: ReportConfig) -> None:
    """Edit the pictures. Raises ConfigError for flags that do not go together."""
    if len(edit.inputs) < 2:
        raise ConfigError(
            "give one or more pictures and then the text: firstlight edit PICTURE... TEXT"
        )
    *pictures, prompt = edit.inputs
    for name in (*pictures, *edit.reference, *([] if edit.mask is None else [str(edit.mask)])):
        if not Path(name).is_file():
            hint = "; the text comes last" if name in pictures else ""
            raise ConfigError(f"{name!r} is no file{hint}")
    run_job(engine, Job(edit, [prompt], _conditions(edit, pictures)), report)


def _conditions(edit: EditConfig, pictures: list[str]) -> dict[str, Any]:
    if edit.mask is None and edit.strength is None:
        for name in ("reference", "padding_mask_crop"):
            if getattr(edit, name):
                raise ConfigError(f"{name} needs mask or strength")
        return {"image": list(pictures)}
    if len(pictures) != 1:
        raise ConfigError(
            f"{len(pictures)} pictures are given; mask and strength need one to start from "
            "(others are --reference)"
        )
    conditions: dict[str, Any] = {"image": pictures[0], "strength": edit.strength}
    if edit.mask is not None:
        conditions |= {"mask_image": str(edit.mask), "paste_back": edit.paste_back}
    if edit.padding_mask_crop is not None:
        conditions["padding_mask_crop"] = edit.padding_mask_crop
    if edit.reference:
        conditions["image_reference"] = list(edit.reference)
    return conditions
