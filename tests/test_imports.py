# SPDX-License-Identifier: Apache-2.0
"""Imports point one way, and what must not need jax does not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import firstlight

ROOT = Path(firstlight.__file__).parent

# Lower layers first; a module may import from its own layer and those before it.
LAYERS = [
    ["errors", "config", "progress", "environment", "timeline", "files"],
    ["models.params", "models.variants"],
    ["models.specs"],
    ["models"],
    ["weights", "sharding", "sampling", "tokenizer", "image", "executable_cache"],
    ["references"],
    ["inpaint"],
    ["compile", "request"],
    ["placement"],
    ["programs", "residency"],
    ["engine", "conditions", "previews"],
    ["callbacks"],
    ["start"],
    ["pipeline"],
    ["bench"],
    ["cli", "__main__", "__init__"],
]


def _modules() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py"))


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _layer(module: str) -> int:
    best = max(
        (
            (len(prefix), number)
            for number, layer in enumerate(LAYERS)
            for prefix in layer
            if module == prefix or module.startswith(prefix + ".")
        ),
        default=None,
    )
    assert best is not None, f"{module} has no place in the layers"
    return best[1]


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    modules = {f"firstlight.{_name(path)}" for path in _modules()}
    return {name.removeprefix("firstlight.") for name in found if name in modules}


@pytest.mark.parametrize("path", _modules(), ids=_name)
def test_imports_point_down(path: Path) -> None:
    module = _name(path)
    if path.parent == ROOT and path.name == "__init__.py":
        return
    upward = {name for name in _imports(path) if _layer(name) > _layer(module)}
    assert not upward, f"{module} imports {sorted(upward)} from layers above its own"


@pytest.mark.parametrize("path", sorted((ROOT / "models").rglob("*.py")), ids=_name)
def test_models_import_only_arrays(path: Path) -> None:
    outside = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [node.module] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        outside |= {name.split(".")[0] for name in names if name}
    assert outside <= sys.stdlib_module_names | {"jax", "numpy", "jaxtyping", "firstlight"}


@pytest.mark.parametrize(
    "module",
    [
        "firstlight",
        "firstlight.config",
        "firstlight.models.specs.transformer",
        "firstlight.models.specs.text_encoder",
        "firstlight.models.specs.autoencoder",
        "firstlight.weights.folder",
        "firstlight.weights.load",
        "firstlight.weights.hub",
        "firstlight.weights.loading",
        "firstlight.timeline",
        "firstlight.tokenizer",
        "firstlight.cli",
    ],
)
def test_starts_without_jax(module: str) -> None:
    """Headers are checked and weights read before jax is there."""
    code = f"import sys, {module}; print([m for m in ('jax', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    assert firstlight.Pipeline.from_pretrained
    assert set(firstlight.__all__) >= {"Pipeline", "Result", "FirstlightError"}
