# SPDX-License-Identifier: Apache-2.0
"""Damaging a model folder, and what is then said about it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.weights.folder import open_model

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
QKV = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight"


def problems(folder: Path) -> tuple[str, ...]:
    """The faults of the one error that opening `folder` raises."""
    with pytest.raises(CheckpointError) as caught:
        open_model(folder, dtype="bfloat16")
    assert all(problem in str(caught.value) for problem in caught.value.problems)
    return caught.value.problems


def change(folder: Path, file: str, edit: Callable[[dict], None]) -> None:
    values = load_file(folder / file)
    edit(values)
    save_file(values, folder / file)


def rewrite_header(path: Path, edit: Callable[[dict], object]) -> None:
    """Change the JSON header, leaving the data as it is."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edited = edit(header)
    text = edited if isinstance(edited, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def edit_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
