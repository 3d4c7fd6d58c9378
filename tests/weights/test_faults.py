# SPDX-License-Identifier: Apache-2.0
"""Every fault of a checkpoint is found before any weight is read, and all are told at once."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from firstlight.errors import CheckpointError
from firstlight.weights.folder import open_model

TRANSFORMER = "transformer/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"
QKV = "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return tiny.write_model(tmp_path / "model", shards=3)


@pytest.fixture(autouse=True)
def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise AssertionError("weights were read")

    monkeypatch.setattr(os, "preadv", refuse)


def problems(folder: Path) -> tuple[str, ...]:
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


def test_a_good_model_opens(model: Path) -> None:
    opened = open_model(model, dtype="bfloat16")
    assert opened.default_size == 16 and opened.is_distilled


class TestTensors:
    def test_missing(self, model: Path) -> None:
        change(model, TRANSFORMER, lambda values: values.pop(QKV))
        assert problems(model) == (f"transformer: {QKV} [224, 32] is missing",)

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


class TestFiles:
    def test_truncated(self, model: Path) -> None:
        path = model / TRANSFORMER
        size = path.stat().st_size
        os.truncate(path, size - 5)
        (problem,) = problems(model)
        assert f"{TRANSFORMER} is cut off: {size - 5} bytes; {size} are expected" in problem

    def test_padded(self, model: Path) -> None:
        path = model / VAE
        size = path.stat().st_size
        os.truncate(path, size + 3)
        (problem,) = problems(model)
        assert f"{VAE} is longer than its header says: {size + 3} bytes; {size} are" in problem

    @pytest.mark.parametrize("content", [b"", b"\x01\x02\x03"])
    def test_too_short(self, model: Path, content: bytes) -> None:
        (model / TEXT).write_bytes(content)
        (problem,) = problems(model)
        assert f"{TEXT} has {len(content)} bytes; a safetensors file has at least 8" in problem

    def test_header_longer_than_the_file(self, model: Path) -> None:
        path = model / TEXT
        path.write_bytes(struct.pack("<Q", 1 << 40) + path.read_bytes()[8:])
        (problem,) = problems(model)
        assert f"{TEXT}: the header says it is {1 << 40} bytes long" in problem

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            (b"\xff\xfe", "the header is no JSON"),
            (b"{", "the header is no JSON"),
            (b"[]", "the header is no JSON object"),
        ],
    )
    def test_header_is_no_json(self, model: Path, header: bytes, message: str) -> None:
        rewrite_header(model / TEXT, lambda _: header)
        (problem,) = problems(model)
        assert problem.startswith(f"{TEXT}: {message}")

    @pytest.mark.parametrize(
        "entry",
        [
            None,
            {"dtype": "F32", "shape": [1]},
            {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [1], "data_offsets": [0]},
            {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]},
            {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]},
            {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]},
            {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        ],
    )
    def test_malformed_entry(self, model: Path, entry: object) -> None:
        rewrite_header(model / TEXT, lambda header: header.update({"model.norm.weight": entry}))
        (problem,) = problems(model)
        assert problem.startswith(f"{TEXT}: model.norm.weight ")

    def test_overlapping_tensors(self, model: Path) -> None:
        def overlap(header: dict) -> None:
            first, second = "model.layers.0.self_attn.q_norm.weight", "model.norm.weight"
            header[second]["data_offsets"] = [
                header[first]["data_offsets"][0],
                header[first]["data_offsets"][0] + 64,
            ]

        rewrite_header(model / TEXT, overlap)
        (problem,) = problems(model)
        assert problem.startswith(TEXT) and "overlap or leave a gap" in problem

    def test_folder_without_weights(self, model: Path) -> None:
        (model / VAE).unlink()
        (problem,) = problems(model)
        assert problem.startswith("vae: neither diffusion_pytorch_model.safetensors nor")

    @pytest.mark.parametrize("name", ["diffusion_pytorch_model.bin", "model.ckpt", "x.pt"])
    def test_pickled_weights_are_refused(self, model: Path, name: str) -> None:
        (model / VAE).rename(model / "vae" / name)
        (problem,) = problems(model)
        assert f"({name}: pickled weights are code and are refused)" in problem


class TestShards:
    INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
    SHARD = "diffusion_pytorch_model-00002-of-00003.safetensors"

    def edit_map(self, folder: Path, edit: Callable[[dict], object]) -> None:
        path = folder / self.INDEX
        index = json.loads(path.read_text())
        edit(index["weight_map"])
        path.write_text(json.dumps(index))

    def test_good(self, sharded: Path) -> None:
        open_model(sharded, dtype="bfloat16")

    def test_missing_shard(self, sharded: Path) -> None:
        (sharded / "transformer" / self.SHARD).unlink()
        assert problems(sharded) == (
            f"transformer/{self.SHARD} is missing; {Path(self.INDEX).name} names it",
        )

    def test_index_names_absent_files(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({QKV: "absent.safetensors"}))
        found = problems(sharded)
        assert f"transformer/absent.safetensors is missing; {Path(self.INDEX).name}" in found[0]

    def test_tensor_is_not_in_its_shard(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({"ghost.weight": self.SHARD}))
        assert problems(sharded) == (
            f"transformer/{self.SHARD}: ghost.weight is not in it; {Path(self.INDEX).name} says so",
        )

    def test_tensor_is_not_in_the_index(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.pop(QKV))
        (problem,) = problems(sharded)
        assert problem.endswith(f"{QKV} is not listed in {Path(self.INDEX).name}")

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {}}'])
    def test_unreadable_index(self, sharded: Path, content: str) -> None:
        (sharded / self.INDEX).write_text(content)
        (problem,) = problems(sharded)
        assert problem.startswith(self.INDEX)

    def test_index_cannot_point_out_of_the_folder(self, sharded: Path) -> None:
        self.edit_map(sharded, lambda names: names.update({QKV: "../vae/x.safetensors"}))
        (problem,) = problems(sharded)
        assert "a file name in the same folder is needed" in problem

    def test_damaged_shard_is_told_once(self, sharded: Path) -> None:
        path = sharded / "transformer" / self.SHARD
        os.truncate(path, path.stat().st_size - 1)
        (problem,) = problems(sharded)
        assert problem.startswith(f"transformer/{self.SHARD} is cut off")


class TestConfigs:
    @pytest.mark.parametrize(
        ("component", "changes", "message"),
        [
            ("model_index", {"_class_name": "Flux2Pipeline"}, "_class_name is 'Flux2Pipeline'"),
            ("model_index", {"_class_name": None}, "_class_name is None"),
            (
                "model_index",
                {"text_encoder": ["transformers", "Mistral3ForConditionalGeneration"]},
                "text_encoder is ['transformers', 'Mistral3ForConditionalGeneration']; "
                "one of Qwen3ForCausalLM",
            ),
            ("model_index", {"is_distilled": "yes"}, "is_distilled is 'yes'; true or false"),
            ("model_index", {"default_size": 0}, "default_size is 0"),
            ("model_index", {"text_encoder_out_layers": []}, "text_encoder_out_layers is []"),
            ("transformer", {"_class_name": "FluxTransformer2DModel"}, "_class_name is 'FluxTra"),
            ("transformer", {"guidance_embeds": True}, "guidance_embeds is True"),
            ("transformer", {"num_layers": "2"}, "num_layers is '2'; an integer"),
            ("transformer", {"patch_size": 2}, "patch_size is 2; only 1"),
            ("transformer", {"out_channels": 8}, "out_channels is 8; only 16"),
            ("transformer", {"axes_dims_rope": [4, 4, 4, 2]}, "adds up to 14"),
            ("transformer", {"axes_dims_rope": [3, 5, 4, 4]}, "must be even numbers"),
            ("vae", {"_class_name": "AutoencoderKL"}, "_class_name is 'AutoencoderKL'"),
            ("vae", {"act_fn": "relu"}, "act_fn is 'relu'"),
            ("vae", {"norm_num_groups": 3}, "must be multiples of norm_num_groups 3"),
            ("vae", {"patch_size": [1, 1]}, "patch_size is (1, 1); only (2, 2)"),
            ("text_encoder", {"model_type": "mistral"}, "model_type is 'mistral'"),
            ("text_encoder", {"num_key_value_heads": 3}, "is not a multiple"),
            ("text_encoder", {"use_sliding_window": True}, "use_sliding_window is True"),
            ("text_encoder", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
            ("text_encoder", {"num_hidden_layers": 1}, "must lie in 0..num_hidden_layers (1)"),
            ("scheduler", {"_class_name": "DDIMScheduler"}, "_class_name is 'DDIMScheduler'"),
            ("scheduler", {"use_karras_sigmas": True}, "use_karras_sigmas is True"),
            ("scheduler", {"time_shift_type": "cubic"}, "time_shift_type is 'cubic'"),
        ],
    )
    def test_refused(self, model: Path, component: str, changes: dict, message: str) -> None:
        names = {"model_index": "model_index.json", "scheduler": "scheduler/scheduler_config.json"}
        file = names.get(component, f"{component}/config.json")
        edit_json(model / file, **changes)
        found = problems(model)
        assert any(p.startswith(f"{file}: ") and message in p for p in found), found

    def test_text_encoder_that_does_not_fit(self, model: Path) -> None:
        edit_json(model / "model_index.json", text_encoder_out_layers=[1, 2, 2])
        assert problems(model) == (
            "the text encoder does not fit the transformer: 3 taps x hidden_size 16 = 48; "
            "joint_attention_dim is 32",
        )

    def test_vae_with_other_latent_channels(self, tmp_path: Path) -> None:
        folder = tiny.write_model(tmp_path / "m", vae={"latent_channels": 16})
        assert problems(folder) == (
            "the vae does not fit the transformer: 4 x latent_channels 16 = 64; in_channels is 16",
        )

    @pytest.mark.parametrize(
        "file",
        [
            "model_index.json",
            "scheduler/scheduler_config.json",
            "text_encoder/config.json",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
            "transformer/config.json",
            "vae/config.json",
        ],
    )
    def test_missing_file(self, model: Path, file: str) -> None:
        (model / file).unlink()
        assert f"{file} is missing" in problems(model)

    @pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
    def test_json_that_is_none(self, model: Path, content: str) -> None:
        (model / "vae/config.json").write_text(content, encoding="latin-1")
        assert problems(model)[0].startswith("vae/config.json ")

    def test_a_file_is_no_model(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        assert problems(tmp_path / "file") == (f"{tmp_path / 'file'} is not a folder",)


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


@pytest.mark.parametrize(
    ("index", "given", "expected"),
    [
        ({}, None, True),
        ({"is_distilled": False}, None, False),
        ({"is_distilled": False}, True, True),
        ({}, False, False),
    ],
)
def test_variant_is_read_and_can_be_overridden(model, index, given, expected) -> None:
    edit_json(model / "model_index.json", **index)
    opened = open_model(model, dtype="float32", is_distilled=given)
    assert opened.is_distilled is expected
    assert opened.variant.num_inference_steps == (4 if expected else 50)


@pytest.mark.parametrize(
    ("class_name", "expected"),
    [
        ("Flux2KleinPipeline", False),
        ("Flux2KleinInpaintPipeline", False),
        ("Flux2KleinKVPipeline", True),
    ],
)
def test_variant_without_the_key(model: Path, class_name: str, expected: bool) -> None:
    path = model / "model_index.json"
    index = json.loads(path.read_text())
    del index["is_distilled"]
    path.write_text(json.dumps(index | {"_class_name": class_name}))
    assert open_model(model, dtype="float32").is_distilled is expected
