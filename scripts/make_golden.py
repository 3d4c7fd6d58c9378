# SPDX-License-Identifier: Apache-2.0
"""Recompute every expected value that depends on the packaged demo model's weights.

    python scripts/make_golden.py           # rewrite tests/golden/demo/*.npz
    python scripts/make_golden.py --check   # write nothing; exit 1 if the files need rewriting

Needs the extra `parity`: values come from diffusers and transformers on the CPU. The cases
(cases.json) and their starting noise (`latents` in each npz; drawn from the case's seed where the
file does not exist yet) stay as they are. Each npz also holds `latent`, the final latents, and
`image`, the picture, both computed in float32, and `image_bf16`, the picture in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "src/firstlight/data/demo"
GOLDEN = ROOT / "tests/golden/demo"

ROUNDING = {"latents": 0.0, "latent": 3e-4, "image": 1.0, "image_bf16": 8.0}
"""Largest differences that other CPUs and library versions bring about: absolute for latents,
levels of 255 for pictures. Other weights differ by far more."""

sys.path.insert(0, str(ROOT))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files, write none")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder (default: packaged demo)")
    parser.add_argument("--output", type=Path, default=GOLDEN, help="folder of cases.json and npz")
    options = parser.parse_args()

    import torch

    from tests.parity.reference import Reference

    exact = Reference(options.model)
    rounded = Reference(options.model, torch.bfloat16)
    default_size = json.loads((options.model / "model_index.json").read_text())["default_size"]
    same = True
    pictures: dict[str, np.ndarray] = {}  # those of earlier cases, which later ones edit
    for case in json.loads((options.output / "cases.json").read_text()):
        path = options.output / f"{case['name']}.npz"
        old = dict(np.load(path)) if path.exists() else {}
        noise = old.get("latents")
        if noise is None:
            noise = _draw(case, default_size, exact)
        images = [Image.fromarray(pictures[name]) for name in case.get("images", [])]
        new = _values(case, noise, images, exact, rounded)
        pictures[case["name"]] = new["image"]
        same = _report(case["name"], old, new) and same
        if not options.check:
            _save(path, new)
    return int(options.check and not same)


def _draw(case: dict[str, Any], default_size: int, reference: Any) -> np.ndarray:
    """Starting noise for a new case: (1, 4C, rows, columns) float32."""
    multiple = 2 * reference.pipe.vae_scale_factor
    rows = case.get("height", default_size) // multiple
    columns = case.get("width", default_size) // multiple
    shape = (1, reference.pipe.transformer.config.in_channels, rows, columns)
    return np.random.default_rng(case["seed"]).standard_normal(shape).astype(np.float32)


def _values(
    case: dict[str, Any], noise: np.ndarray, images: list[Image.Image], exact: Any, rounded: Any
) -> dict[str, Any]:
    prompts, steps = [case["prompt"]], case.get("steps", 4)
    given = {"image": images} if images else {}
    image = exact.picture(prompts, noise, steps=steps, **given)
    image_bf16 = rounded.picture(prompts, noise, steps=steps, **given)
    return {
        "latents": noise,
        "latent": exact.picture(prompts, noise, steps=steps, output_type="latent", **given),
        "image": _bytes(image[0]),
        "image_bf16": _bytes(image_bf16[0]),
    }


def _bytes(image: np.ndarray) -> np.ndarray:
    """[0, 1] to uint8 as diffusers does it: NumPy rounds halves to even."""
    return (image * 255).round().astype(np.uint8)


def _report(name: str, old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> bool:
    """Print how each array differs from the file's; True if by no more than rounding."""
    same, lines = True, []
    for key, array in new.items():
        if key not in old or old[key].shape != array.shape:
            lines.append(f"{key} is new")
            same = False
            continue
        gap = np.abs(old[key].astype(np.float64) - array.astype(np.float64))
        lines.append(f"{key} max {gap.max():.2g} mean {gap.mean():.2g}")
        same &= bool(gap.max() <= ROUNDING[key])
    print(f"{name}: {'same' if same else 'CHANGED'} ({', '.join(lines)})", flush=True)
    return same


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A reader never sees half a file."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
