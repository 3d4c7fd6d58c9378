# SPDX-License-Identifier: Apache-2.0
"""`firstlight edit` with the fake pipeline: what reaches the call, and what is refused before."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture(autouse=True)
def pictures(command):
    for name in ("cat.png", "dog.png", "mask.png"):
        Image.new("RGB", (64, 64)).save(name)


def conditions(command) -> dict:
    usual = {
        "prompt", "height", "width", "num_inference_steps", "guidance_scale", "negative_prompt",
        "num_images_per_prompt", "max_sequence_length", "seed", "time_shift",
    }  # fmt: skip
    return {name: value for name, value in command.request.items() if name not in usual}


def test_references_in_order(command):
    result = command("edit", "cat.png", "dog.png", "both on a sofa", "--seed", "3")
    assert result.code == 0 and len(result.paths) == 1
    assert command.request["prompt"] == ["both on a sofa"]
    assert conditions(command) == {"image": ["cat.png", "dog.png"]}


def test_a_mask_with_further_references(command):
    result = command(
        "edit", "cat.png", "a hat", "--mask", "mask.png", "--strength", "0.5", "--reference",
        "dog.png", "--padding-mask-crop", "4", "--no-paste-back",
    )  # fmt: skip
    assert result.code == 0
    assert conditions(command) == {
        "image": "cat.png",
        "mask_image": "mask.png",
        "strength": 0.5,
        "padding_mask_crop": 4,
        "paste_back": False,
        "image_reference": ["dog.png"],
    }


def test_previews(command):
    assert command("generate", "a fox", "--preview", "steps").code == 0
    assert command.request["callback_on_step_end_tensor_inputs"] == ["preview"]
    assert Path("steps").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give one or more pictures and then the text"),
        (["cat.png"], "give one or more pictures and then the text"),
        (["absent.png", "a hat"], "'absent.png' is no file; the text comes last"),
        (["a hat", "cat.png"], "'a hat' is no file; the text comes last"),
        (["cat.png", "a hat", "--mask", "absent.png"], "'absent.png' is no file"),
        (["cat.png", "dog.png", "a hat", "--mask", "mask.png"], "2 pictures are given"),
        (["cat.png", "a hat", "--reference", "dog.png"], "reference needs mask or strength"),
        (["cat.png", "a hat", "--padding-mask-crop", "3"], "padding_mask_crop needs mask"),
        (["cat.png", "a hat", "--strength", "x"], "strength"),
        (["cat.png", "a hat", "--preview", "cat.png"], "preview is 'cat.png'"),
    ],
)
def test_refused_before_loading(command, arguments, message):
    result = command("edit", *arguments)
    assert result.code == 2 and message in result.error
    assert command.pipes == []
