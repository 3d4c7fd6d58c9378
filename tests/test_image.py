# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from firstlight import image as image_module
from firstlight.errors import RequestError
from firstlight.files import check_writable
from firstlight.image import METADATA_KEY, read_metadata, save_image

METADATA = {"prompt": 'a fox, 狐, \n "quoted"', "seed": 4294967295, "versions": {"jax": "0.10.2"}}


@pytest.fixture
def pixels():
    return np.random.default_rng(0).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def test_pixels_and_metadata_come_back_as_they_were(tmp_path, pixels):
    path = save_image(pixels, tmp_path / "fox.png", METADATA)
    assert path == tmp_path / "fox.png"
    assert read_metadata(path) == METADATA
    with Image.open(path) as image:
        assert image.mode == "RGB"
        np.testing.assert_array_equal(np.asarray(image), pixels)
        assert image.info["Description"] == METADATA["prompt"]
        assert image.info["Software"] == "firstlight"


def test_a_pil_image_is_saved_too(tmp_path, pixels):
    path = save_image(Image.fromarray(pixels), tmp_path / "fox.PNG", {})
    assert read_metadata(path) == {}


def test_metadata_that_another_program_moved_behind_the_pixels_is_found(tmp_path, pixels):
    path = save_image(pixels, tmp_path / "fox.png", METADATA)
    data = path.read_bytes()
    start = data.index(b"iTXt" + METADATA_KEY.encode()) - 4
    end = start + int.from_bytes(data[start : start + 4], "big") + 12
    tail = data.index(b"IEND") - 4
    path.write_bytes(data[:start] + data[end:tail] + data[start:end] + data[tail:])
    assert read_metadata(path) == METADATA


def test_taken_names_get_suffixes_and_nothing_is_replaced(tmp_path, pixels):
    paths = [save_image(pixels, tmp_path / "fox.png", {"n": n}) for n in range(3)]
    assert [path.name for path in paths] == ["fox.png", "fox-1.png", "fox-2.png"]
    assert [read_metadata(path)["n"] for path in paths] == [0, 1, 2]


def test_overwrite_replaces(tmp_path, pixels):
    for n in range(2):
        assert save_image(pixels, tmp_path / "fox.png", {"n": n}, overwrite=True).name == "fox.png"
    assert read_metadata(tmp_path / "fox.png") == {"n": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["fox.png"]


def test_without_hard_links_names_are_still_claimed_one_by_one(tmp_path, pixels, monkeypatch):
    def refuse(*paths, **options):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.delattr(os, "O_TMPFILE")
    paths = [save_image(pixels, tmp_path / "fox.png", {"n": n}) for n in range(2)]
    assert [path.name for path in paths] == ["fox.png", "fox-1.png"]
    assert [read_metadata(path)["n"] for path in paths] == [0, 1]
    assert len(list(tmp_path.iterdir())) == 2


SAVE_MANY = """
import sys
from pathlib import Path
from PIL import Image
from firstlight.image import save_image
Path(sys.argv[1], "ready-" + sys.argv[2]).touch()
while len(list(Path(sys.argv[1]).glob("ready-*"))) < 2:
    pass
for n in range(50):
    save_image(Image.new("RGB", (8, 8)), sys.argv[1] + "/fox.png", {"from": sys.argv[2], "n": n})
"""


def test_two_processes_never_take_the_same_name(tmp_path):
    processes = [
        subprocess.Popen([sys.executable, "-c", SAVE_MANY, str(tmp_path), name]) for name in "ab"
    ]
    assert [process.wait(60) for process in processes] == [0, 0]
    stored = [read_metadata(path) for path in tmp_path.glob("fox*.png")]
    found = {(entry["from"], entry["n"]) for entry in stored}
    assert len(stored) == 100
    assert found == {(name, n) for name in "ab" for n in range(50)}
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_failure_while_writing_leaves_no_file(tmp_path, pixels, monkeypatch, overwrite):
    def fail(self, file, **options):
        file.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", fail)
    with pytest.raises(OSError, match="No space left"):
        save_image(pixels, tmp_path / "fox.png", {}, overwrite=overwrite)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_claiming_leaves_no_file(tmp_path, pixels, monkeypatch):
    def refuse(*paths, **options):
        raise OSError(errno.EPERM, "no links here")

    def interrupt(*paths):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_image(pixels, tmp_path / "fox.png", {})
    assert list(tmp_path.iterdir()) == []


def test_the_file_has_the_permissions_of_any_new_file(tmp_path, pixels):
    (tmp_path / "plain").touch()
    path = save_image(pixels, tmp_path / "fox.png", {})
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("name", ["fox.gif", "fox.bmp", "fox"])
def test_other_extensions_are_refused_with_the_allowed_one(tmp_path, pixels, name):
    with pytest.raises(RequestError, match=r"is not supported; use \.png"):
        save_image(pixels, tmp_path / name, {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 4), "u1")],
)
def test_arrays_that_are_no_rgb_picture_are_refused(tmp_path, array):
    with pytest.raises(RequestError, match=re.escape(f"{array.dtype} {array.shape}")):
        save_image(array, tmp_path / "fox.png", {})
    assert list(tmp_path.iterdir()) == []


def test_metadata_that_is_no_json_is_refused_before_a_file_appears(tmp_path, pixels):
    with pytest.raises(ValueError, match="JSON"):
        save_image(pixels, tmp_path / "fox.png", {"guidance": float("nan")})
    assert list(tmp_path.iterdir()) == []


def _png_with(text: str | None) -> bytes:
    info = PngInfo()
    if text is not None:
        info.add_itxt(METADATA_KEY, text)
    path = Path("made.png")
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path.read_bytes()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "no such file"),
        (lambda: b"not a picture", "is not a picture"),
        (lambda: b"", "is not a picture"),
        (lambda: _png_with(None), "does not say how it was made"),
        (lambda: _png_with("{"), "is damaged"),
        (lambda: _png_with("[1]"), "is damaged"),
        (lambda: _png_with(None)[:45], "cannot be read"),
    ],
)
def test_what_carries_no_settings_is_refused(tmp_path, monkeypatch, make, message):
    monkeypatch.chdir(tmp_path)
    if (data := make()) is not None:
        Path("fox.png").write_bytes(data)
    with pytest.raises(RequestError, match=message) as caught:
        read_metadata("fox.png")
    assert "fox.png" in str(caught.value)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(RequestError, match="cannot be read"):
        read_metadata(tmp_path)


def test_check_writable_leaves_nothing(tmp_path):
    check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        check_writable(tmp_path / "absent")


def test_importing_the_module_imports_no_image_library():
    code = f"import sys, {image_module.__name__}; sys.exit('PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
