# SPDX-License-Identifier: Apache-2.0
"""`--like` makes a picture again from its own metadata, and says what is not the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_pipeline import ENVIRONMENT
from PIL import Image

from firstlight.image import read_metadata, save_image

MADE = "--seed 9 --steps 3 --width 80 --height 96 --guidance 1.5 --dtype float32 --revision v1"


def _pixels(path):
    with Image.open(path) as image:
        return image.size, image.tobytes()


def _warnings(result):
    return [line for line in result.err.splitlines() if line.startswith("firstlight: warning: ")]


@pytest.fixture
def made(command):
    extra = ["--model", "m", "--images-per-device", "2", "--no-is-distilled"]
    result = command("generate", "a fox", *MADE.split(), *extra, "--max-sequence-length", "30")
    return result.paths[0]


def test_the_picture_is_made_again_under_a_new_name(command, made):
    result = command("generate", "--like", made)
    assert result.code == 0
    assert result.paths == [Path("a-fox-9-1.png")]
    assert _pixels(made) == _pixels(result.paths[0])
    assert read_metadata(made) == read_metadata(result.paths[0])
    assert _warnings(result) == []


def test_a_picture_of_a_batch_is_made_again_alone(command):
    paths = command("generate", "a", "b", "--num-images", "2", "--seed", "5").paths
    for path in paths:
        (again,) = command("generate", "--like", path).paths
        assert _pixels(path) == _pixels(again)


def test_flags_win_over_the_picture_without_a_warning(command, made):
    result = command("generate", "a cat", "--like", made, "--steps", "2", "--num-images", "2")
    assert [path.name for path in result.paths] == ["a-cat-9.png", "a-cat-10.png"]
    before, after = read_metadata(made), read_metadata(result.paths[0])
    changed = {key for key in before if before[key] != after[key]}
    assert changed == {"prompt", "num_inference_steps"}
    assert _warnings(result) == []


def test_another_model_does_not_inherit_what_belongs_to_the_picture_s_model(command, made):
    result = command("generate", "--like", made, "--model", "other")
    assert result.code == 0
    assert command.engine.model == "other"
    assert command.engine.revision is None
    assert command.engine.is_distilled is None
    assert command.request["max_sequence_length"] is None
    assert command.request["seed"] == 9
    assert _warnings(result) == []


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"versions": {"firstlight": "0.1.0", "jax": "0.11.0"}}, ["jax 0.10.2 then, 0.11.0 now"]),
        ({"device_kind": "TPU v6e"}, ["device_kind cpu then, TPU v6e now"]),
        ({"cores": 1}, ["cores 2 then, 1 now"]),
        ({"mesh": "data=2,model=1"}, ["mesh data=1,model=1 then, data=2,model=1 now"]),
        (
            {"versions": {"firstlight": "0.1.0", "jax": "0.10.2", "libtpu": "1"}, "cores": 8},
            ["cores 2 then, 8 now", "libtpu not recorded then, 1 now"],
        ),
    ],
)
def test_one_warning_names_every_difference(command, made, change, parts):
    command.environment = {"environment": {**ENVIRONMENT, **change}}
    result = command("generate", "--like", made)
    assert result.code == 0
    (line,) = _warnings(result)
    assert str(made) in line
    for part in parts:
        assert part in line
    assert line.count(" then, ") == len(parts)


def test_a_setting_that_the_pipeline_did_not_follow_is_a_difference(command, made, monkeypatch):
    command.environment = {"environment": {**ENVIRONMENT, "revision": "v2"}}
    (line,) = _warnings(command("generate", "--like", made))
    assert "revision v1 then, v2 now" in line


def test_a_picture_without_settings_is_refused_before_loading(command):
    Image.new("RGB", (8, 8)).save("plain.png")
    result = command("generate", "--like", "plain.png")
    assert result.code == 1
    assert "plain.png does not say how it was made" in result.error
    assert command.pipes == []
    assert "no such file" in command("generate", "--like", "absent.png").error


def test_a_picture_with_settings_of_the_wrong_kind_is_refused(command):
    from firstlight.image import save_image

    save_image(Image.new("RGB", (8, 8)), "odd.png", {"prompt": "a", "seed": "many"})
    result = command("generate", "--like", "odd.png")
    assert result.code == 2
    assert "odd.png: seed is 'many'" in result.error


def test_a_picture_made_from_given_noise_is_refused(command, made):
    metadata = {**read_metadata(made), "seed": None}
    path = save_image(Image.new("RGB", (80, 96)), "noise.png", metadata)
    result = command("generate", "--like", path)
    assert result.code == 1
    assert "noise.png was made from starting noise given by its maker" in result.error
    assert command.pipes == []
