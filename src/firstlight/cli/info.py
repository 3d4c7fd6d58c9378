# SPDX-License-Identifier: Apache-2.0
"""`firstlight info`: how a picture was made, or what a model consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.config import ModelConfig, ReportConfig
from firstlight.image import read_metadata


def run_info(model: ModelConfig, report: ReportConfig) -> None:
    """Print a description of the file that `model` names, or else of the model."""
    is_picture = Path(model.model).is_file()
    facts = read_metadata(model.model) if is_picture else _describe_model(model)
    if report.json:
        print(json.dumps(facts, indent=2))
    else:
        for line in _lines(facts):
            print(line)


def _describe_model(model: ModelConfig) -> dict[str, Any]:
    raise NotImplementedError


def _lines(facts: dict[str, Any], indent: str = "") -> list[str]:
    width = max((len(key) for key in facts), default=0)
    lines = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}", *_lines(value, indent + "  ")]
        else:
            lines.append(f"{indent}{key:<{width}}  {_text(value)}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000:
        return f"{value:,}"
    return "-" if value is None else str(value)
