# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of the real size with random weights, in diffusers' layout, in little memory."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.bench.real_sizes import REAL_SIZES, Configs
from firstlight.errors import ConfigError
from firstlight.models.specs.autoencoder import AutoencoderConfig
from firstlight.models.specs.text_encoder import TextEncoderConfig
from firstlight.models.specs.transformer import TransformerConfig
from firstlight.weights import klein
from firstlight.weights.folder import CONFIGS, INDEX, STEMS
from firstlight.weights.hub import DEMO_FOLDER
from firstlight.weights.rules import LAYER, Rule

SHARD_BYTES = {"text_encoder": 5_000_000_000, "transformer": 10_000_000_000, "vae": 10_000_000_000}
"""The largest file of each component: what the usual writers of these components use."""

_CHUNK = 8 << 20
"""Values that are made and written at a time."""

Shapes = dict[str, tuple[int, ...]]


def make_checkpoint(
    folder: Path,
    size: str,
    *,
    seed: int = 0,
    configs: Configs | None = None,
    on_bytes: Callable[[int, int], None] = lambda done, total: None,
) -> int:
    """Write a bfloat16 checkpoint of `size` ("4b" or "9b") and return the bytes of its weights.

    Its tokenizer is the packaged model's, whose ids all exist in the real vocabulary. The folder
    appears only when it is complete. `configs` replaces the configurations, for tests.

    Raises ConfigError for an unknown size, a folder that is not empty, or too little room.
    """
    if configs is None:
        if size not in REAL_SIZES:
            raise ConfigError(f"size is {size!r}; {' or '.join(REAL_SIZES)} is needed")
        configs = REAL_SIZES[size]
    folder = Path(os.path.abspath(folder))
    shapes = tensor_shapes(configs)
    total = sum(2 * math.prod(s) for tensors in shapes.values() for s in tensors.values())
    _check_target(folder, total)
    making = folder.with_name(f".{folder.name}.making")
    shutil.rmtree(making, ignore_errors=True)  # of a run that was killed
    try:
        _write(making, configs, shapes, np.random.default_rng(seed), lambda n: on_bytes(n, total))
        if folder.exists():
            folder.rmdir()
        os.replace(making, folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    return total


def tensor_shapes(configs: Configs) -> dict[str, Shapes]:
    """Name and shape of every tensor of every component, those that are never read included."""
    te = dict(configs["text_encoder"])
    layers = te["num_hidden_layers"]
    # Tapping the last layer makes the table list all of them, and the final norm.
    encoder = TextEncoderConfig.from_json(te, (layers,))
    transformer = TransformerConfig.from_json(configs["transformer"])
    vae = AutoencoderConfig.from_json(configs["vae"])
    text = _shapes(klein.text_encoder_rules(encoder), layers)
    if not te["tie_word_embeddings"]:
        text["lm_head.weight"] = (encoder.vocab_size, encoder.hidden_size)
    blocks = {
        "transformer_blocks": transformer.num_layers,
        "single_transformer_blocks": transformer.num_single_layers,
    }
    made: Shapes = {}
    for rule in klein.transformer_rules(transformer):
        made.update(_shapes([rule], blocks.get(rule.source.split(".")[0], 1)))
    return {
        "text_encoder": text,
        "transformer": made,
        "vae": _shapes(klein.autoencoder_rules(vae), 1),
    }


def _shapes(rules: list[Rule], layers: int) -> Shapes:
    return {
        rule.source.replace(LAYER, str(layer)): rule.shape
        for layer in range(layers)
        for rule in rules
    }


def _check_target(folder: Path, total: int) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder is {str(folder)!r}; one that is empty or not there is needed")
    if not folder.parent.is_dir():
        raise ConfigError(f"folder is {str(folder)!r}; there is no folder {str(folder.parent)!r}")
    free = shutil.disk_usage(folder.parent).free
    if free < total * 1.01:
        raise ConfigError(
            f"folder is {str(folder)!r}; {total / 1e9:.1f} GB are needed, "
            f"{free / 1e9:.1f} GB are free"
        )


def _write(
    folder: Path,
    configs: Configs,
    shapes: dict[str, Shapes],
    rng: np.random.Generator,
    on_bytes: Callable[[int], None],
) -> None:
    folder.mkdir()
    for component, config in configs.items():
        path = folder / (INDEX if component == "model_index" else CONFIGS[component])
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    shutil.copytree(DEMO_FOLDER / "tokenizer", folder / "tokenizer")
    done = 0
    for component, tensors in shapes.items():
        stem, files = STEMS[component], list(_split(tensors, SHARD_BYTES[component]))
        names = [f"{stem}.safetensors"]
        if len(files) > 1:
            count = len(files)
            names = [f"{stem}-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
            _write_index(folder / component, stem, names, files)
        for name, part in zip(names, files, strict=True):
            for count in _write_file(folder / component / name, part, rng):
                done += count
                on_bytes(done)


def _split(tensors: Shapes, limit: int) -> Iterator[Shapes]:
    part: Shapes = {}
    size = 0
    for name, shape in tensors.items():
        nbytes = 2 * math.prod(shape)
        if part and size + nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = shape
        size += nbytes
    yield part


def _write_index(folder: Path, stem: str, names: list[str], files: list[Shapes]) -> None:
    weight_map = {t: name for name, part in zip(names, files, strict=True) for t in part}
    total = sum(2 * math.prod(shape) for part in files for shape in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    path = folder / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_file(path: Path, tensors: Shapes, rng: np.random.Generator) -> Iterator[int]:
    """Write one safetensors file; yields the bytes of each portion of values."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors.items():
            left = math.prod(shape)
            while left:
                count = min(left, _CHUNK)
                file.write(_values(name, shape, count, rng).data)
                left -= count
                yield 2 * count


def _values(name: str, shape: tuple[int, ...], count: int, rng: np.random.Generator) -> np.ndarray:
    """Bits of random bfloat16 values: scales and variances are 1, all else is +-[1/64, 1/32)."""
    is_scale = len(shape) == 1 and name.endswith("weight")
    if is_scale or name.endswith("running_var"):
        return np.full(count, 0x3F80, np.uint16)
    bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
    return (bits & 0x807F) | np.uint16(0x3C80)
