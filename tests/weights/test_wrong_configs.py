# SPDX-License-Identifier: Apache-2.0
"""Configurations that describe no supported model, or no consistent one."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import tiny
from damage import QKV, TEXT, TRANSFORMER, VAE, change, edit_json, problems

from firstlight.weights.folder import open_model

pytestmark = pytest.mark.usefixtures("no_weight_is_read")


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
            ("model_index", {"vae": [None, None]}, "vae is [None, None]; one of Autoencoder"),
            ("model_index", {"vae": []}, "vae is []; one of AutoencoderKLFlux2 is needed"),
            ("model_index", {"scheduler": ["diffusers", "DDIMScheduler"]}, "scheduler is ['diff"),
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
            (
                "text_encoder",
                {"architectures": ["Qwen3Model"]},
                "architectures is ('Qwen3Model',); only ('Qwen3ForCausalLM',) is supported",
            ),
            ("text_encoder", {"num_key_value_heads": 3}, "is not a multiple"),
            ("text_encoder", {"rope_parameters": 7}, "must be objects or null"),
            ("text_encoder", {"layer_types": ["sliding_attention"]}, "layer_types is"),
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

    def test_keys_that_may_be_left_out(self, model: Path) -> None:
        """Older writers name no classes in the components' own files."""
        for file, key in [
            ("transformer/config.json", "_class_name"),
            ("vae/config.json", "_class_name"),
            ("scheduler/scheduler_config.json", "_class_name"),
            ("text_encoder/config.json", "architectures"),
            ("text_encoder/config.json", "model_type"),
            ("model_index.json", "vae"),
        ]:
            content = json.loads((model / file).read_text())
            del content[key]
            (model / file).write_text(json.dumps(content))
        open_model(model, dtype="bfloat16")

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

    def test_an_empty_folder_is_no_model(self, tmp_path: Path) -> None:
        assert problems(tmp_path) == (
            f"{tmp_path} holds no model in diffusers' layout: model_index.json is missing",
        )

    @pytest.mark.parametrize("index", [None, "{", {"_class_name": "Flux2Pipeline"}])
    def test_without_a_good_index_the_rest_is_checked(self, model: Path, index: object) -> None:
        """But not what depends on it: which layers of the text encoder are needed."""
        path = model / "model_index.json"
        if isinstance(index, dict):
            edit_json(path, **index)
        elif index is None:
            path.unlink()
        else:
            path.write_text(index)
        edit_json(model / "text_encoder/config.json", head_dim=7)
        change(model, TRANSFORMER, lambda values: values.pop(QKV))
        os.truncate(model / TEXT, 5)
        found = problems(model)
        assert len(found) == 4 and found[0].startswith("model_index.json")
        for part in ("head_dim 7 must be even", QKV, f"{TEXT} has 5 bytes"):
            assert sum(part in problem for problem in found) == 1

    def test_a_bad_configuration_hides_no_damaged_file(self, model: Path) -> None:
        edit_json(model / "vae/config.json", act_fn="relu")
        os.truncate(model / VAE, 5)
        config, file = problems(model)
        assert "act_fn" in config and f"{VAE} has 5 bytes" in file


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
