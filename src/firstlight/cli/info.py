# SPDX-License-Identifier: Apache-2.0
"""`firstlight info`: how a picture was made, or what a model consists of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from firstlight.config import ModelConfig, ReportConfig
from firstlight.image import EXTENSIONS, read_metadata
from firstlight.models.params import count, named_leaves, nbytes


def run_info(model: ModelConfig, report: ReportConfig) -> None:
    """Print a description of the picture that `model` names, or else of the model."""
    path = Path(model.model)
    if path.is_file() or path.suffix.lower() in EXTENSIONS:
        facts = read_metadata(path)
    else:
        facts = _describe_model(model, arrays=report.verbose)
    if report.json:
        print(json.dumps(facts, indent=2))
    else:
        for line in _lines(facts):
            print(line)


def _describe_model(model: ModelConfig, *, arrays: bool) -> dict[str, Any]:
    from firstlight.weights.folder import open_model
    from firstlight.weights.hub import resolve

    found = resolve(
        model.model, revision=model.revision, offline=model.offline, cache_dir=model.cache_dir
    )
    folder = open_model(
        found.path,
        dtype=model.dtype,
        is_distilled=model.is_distilled,
        name=found.name,
        revision=found.revision,
        files={k: v for k, v in model.files.items() if v is not None},
    )
    components = {name: _describe_tree(tree, arrays) for name, tree in folder.specs.items()}
    return {
        "model": folder.name,
        "revision": folder.revision,
        "folder": str(folder.path),
        "class": folder.class_name,
        "dtype": folder.dtype,
        "is_distilled": folder.is_distilled,
        "num_inference_steps": folder.variant.num_inference_steps,
        "guidance_scale": folder.variant.guidance_scale,
        "default_size": folder.default_size,
        "size_multiple": folder.vae.pixel_multiple,
        "max_sequence_length": folder.max_sequence_length,
        "parameters": sum(entry["parameters"] for entry in components.values()),
        "bytes": sum(entry["bytes"] for entry in components.values()),
        "stored_bytes": {k: dict(v) for k, v in folder.stored_bytes.items()},
        "components": components,
    }


def _describe_tree(tree: Any, arrays: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"parameters": count(tree), "bytes": nbytes(tree)}
    if arrays:
        facts["arrays"] = {
            name: f"{spec.dtype} {' x '.join(map(str, spec.shape))}"
            for name, spec in named_leaves(tree)
        }
    return facts


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
