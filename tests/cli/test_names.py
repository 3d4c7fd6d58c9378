# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from firstlight.cli import names
from firstlight.cli.names import naming, slug
from firstlight.errors import ConfigError


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A red Apple, on a blue background!", "a-red-apple-on-a-blue-background"),
        ("../../etc/passwd", "etc-passwd"),
        ("-rf *", "rf"),
        ("Größe 5½", "größe-51-2"),
        ("狐", "狐"),
        ("\N{FOX FACE}", "image"),
        ("a\nb\tc", "a-b-c"),
    ],
)
def test_a_slug_is_words_and_hyphens(prompt, expected):
    assert slug(prompt) == expected


@pytest.mark.parametrize("prompt", ["word " * 100, "狐" * 100, "x" * 1000, "a狐" * 60])
def test_a_slug_leaves_room_for_the_rest_of_a_file_name(prompt):
    assert 0 < len(slug(prompt).encode()) <= 80
    assert not slug(prompt).endswith("-")


def test_the_default_names_prompt_and_seed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = naming("{prompt}-{seed}.png")
    assert names.path(prompt="A fox", seed=7, index=0) == Path("a-fox-7.png")


@pytest.mark.parametrize("form", ["{}", "{}/"])
def test_a_folder_holds_the_default_names(tmp_path, form):
    names = naming(form.format(tmp_path))
    assert names.path(prompt="A fox", seed=7, index=0) == tmp_path / "a-fox-7.png"


def test_fields_take_formats_and_braces_can_be_written(tmp_path):
    names = naming(f"{tmp_path}/{{{{x}}}}-{{index:03d}}-{{prompt:.3}}.png")
    assert names.path(prompt="A fox", seed=7, index=5).name == "{x}-005-a-f.png"


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        ("{sede}.png", ["'sede'", "{seed}, {index}, {prompt}"]),
        ("{}.png", ["''", "{seed}"]),
        ("{0}.png", ["'0'", "{seed}"]),
        ("{seed.real}.png", ["'seed.real'"]),
        ("{prompt[0]}.png", ["'prompt[0]'"]),
        ("{prompt:d}.png", ["no template"]),
        ("{seed!x}.png", ["no template"]),
        ("{seed:{index}{sede}}.png", ["no template"]),
        ("{seed.png", ["no template", "{{"]),
        ("seed}.png", ["no template"]),
        ("fox", [".png", "folder that exists"]),
        ("fox.gif", [".png", ".webp", ".jpg"]),
        ("fox.png.gif", [".png"]),
        (".png", [".png"]),
        ("absent/fox.png", ["no folder 'absent'"]),
        ("absent/", ["no folder 'absent'"]),
        ("{seed}/fox.png", ["no folder '{seed}'", "file name only"]),
        ("file/fox.png", ["no folder 'file'"]),
    ],
)
def test_what_cannot_be_a_name_is_refused_before_loading(command, output, parts):
    Path("file").touch()
    result = command("generate", "a", "--output", output)
    assert result.code == 2
    assert f"output is {output!r}" in result.error
    for part in parts:
        assert part in result.error
    assert command.pipes == []


def test_a_folder_that_cannot_be_written_to_is_refused_before_loading(tmp_path, monkeypatch):
    # By an injected error: permission bits do not stop a test that runs as root.
    def refuse(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(names, "check_writable", refuse)
    with pytest.raises(ConfigError, match="cannot be written to: Permission denied"):
        naming(f"{tmp_path}/fox.png")
