# SPDX-License-Identifier: Apache-2.0
"""Tensors that do not fit the architecture; faults of all kinds at once."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from damage import QKV, TEXT, TRANSFORMER, VAE, change, edit_json, problems, rewrite_header
from safetensors.numpy import load_file, save_file

from firstlight.weights.folder import open_model

pytestmark = pytest.mark.usefixtures("no_weight_is_read")


def test_a_good_model_opens(model: Path) -> None:
    opened = open_model(model, dtype="bfloat16")
    assert opened.default_size == 16 and opened.is_distilled


class TestTensors:
    def test_missing(self, model: Path) -> None:
        change(model, TRANSFORMER, lambda values: values.pop(QKV))
        assert problems(model) == (f"{TRANSFORMER}: {QKV} [224, 32] is missing",)

    def test_unknown(self, model: Path) -> None:
        change(model, VAE, lambda v: v.update({"decoder.extra.weight": np.zeros((2, 3), "f4")}))
        assert problems(model) == (
            f"{VAE}: decoder.extra.weight [2, 3] belongs to no parameter of this architecture",
        )

    @pytest.mark.parametrize(
        ("name", "shape", "expected"),
        [
            (QKV, (223, 32), [224, 32]),
            ("single_transformer_blocks.2.attn.to_out.weight", (32, 95), [32, 96]),
            ("transformer_blocks.0.attn.to_q.weight", (32, 31), [32, 32]),
            ("transformer_blocks.0.attn.norm_q.weight", (8,), [16]),
            ("x_embedder.weight", (16, 32), [32, 16]),
        ],
    )
    def test_misshaped(self, model: Path, name: str, shape: tuple, expected: list) -> None:
        change(model, TRANSFORMER, lambda v: v.update({name: np.zeros(shape, np.float32)}))
        assert problems(model) == (
            f"{TRANSFORMER}: {name} has shape {list(shape)}; {expected} is expected",
        )

    @pytest.mark.parametrize(("dtype", "name"), [("int64", "I64"), ("float64", "F64")])
    def test_wrong_dtype(self, model: Path, dtype: str, name: str) -> None:
        key = "proj_out.weight"
        change(model, TRANSFORMER, lambda v: v.update({key: v[key].astype(dtype)}))
        assert problems(model) == (
            f"{TRANSFORMER}: {key} has dtype {name}; BF16, F16, F32 are supported",
        )

    @pytest.mark.parametrize(
        ("dtype", "name"), [("float8_e4m3fn", "F8_E4M3"), ("float8_e8m0fnu", "F8_E8M0")]
    )
    def test_eight_bit_weights(self, model: Path, dtype: str, name: str) -> None:
        """Written by hand: the format's own library has no such NumPy arrays."""
        values = load_file(model / TRANSFORMER)
        key, size = "proj_out.weight", values["proj_out.weight"].size
        values[key] = np.zeros((16, 32), np.uint8)
        save_file(values, model / TRANSFORMER)
        assert np.dtype(getattr(ml_dtypes, dtype)).itemsize * size == values[key].nbytes
        rewrite_header(model / TRANSFORMER, lambda header: header[key].update(dtype=name))
        expected = {
            "F8_E4M3": f"{key} F8_E4M3 [16, 32] is quantised, but its scales are missing or of a "
            "kind that is not known",
            "F8_E8M0": f"{key} has dtype F8_E8M0; BF16, F16, F32 are supported",
        }
        assert problems(model) == (f"{TRANSFORMER}: {expected[name]}",)

    def test_layers_past_the_last_tap_may_be_anything(self, model: Path) -> None:
        def drop(values: dict) -> None:
            for name in list(values):
                if name.startswith(("model.layers.3", "lm_head", "model.norm")):
                    del values[name]
                elif name.startswith("model.layers.2"):
                    values[name] = np.zeros(3, np.int8)

        change(model, TEXT, drop)
        open_model(model, dtype="bfloat16")

    def test_a_layer_too_many_is_unknown(self, model: Path) -> None:
        name = "model.layers.4.mlp.up_proj.weight"
        change(model, TEXT, lambda v: v.update({name: np.zeros((24, 16), np.float32)}))
        assert name in problems(model)[0]


def test_all_faults_are_told_together(model: Path) -> None:
    """Six components' worth of damage, one error."""
    change(model, TRANSFORMER, lambda values: values.pop(QKV))
    change(model, TRANSFORMER, lambda v: v.update({"proj_out.weight": np.zeros((1, 1), "f4")}))
    os.truncate(model / TEXT, 100)
    edit_json(model / "vae/config.json", act_fn="relu")
    edit_json(model / "scheduler/scheduler_config.json", _class_name="Other")
    (model / "tokenizer/tokenizer.json").unlink()
    found = problems(model)
    for part in (QKV, "proj_out.weight", TEXT, "act_fn", "'Other'", "tokenizer.json"):
        assert sum(part in problem for problem in found) == 1, (part, found)
    assert len(found) == 6
