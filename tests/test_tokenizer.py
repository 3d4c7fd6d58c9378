# SPDX-License-Identifier: Apache-2.0
"""klein's chat text, padding and truncation."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest

from firstlight.errors import CheckpointError, FirstlightWarning
from firstlight.tokenizer import CHAT, Tokenizer
from firstlight.weights.hub import DEMO_FOLDER

FOLDER = DEMO_FOLDER / "tokenizer"
VOCABULARY = 3008


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(FOLDER, VOCABULARY)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "tokenizer"))


def test_chat_text() -> None:
    """The rendered text of the reference's template, written out independently."""
    assert CHAT.format(prompt="a {fox}") == (
        "<|im_start|>user\na {fox}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_layout(tokenizer: Tokenizer) -> None:
    ids, mask = tokenizer.encode("a fox", 48)
    real = int(mask.sum())
    assert ids.dtype == mask.dtype == np.int32
    assert ids.shape == mask.shape == (48,)
    assert list(mask) == [1] * real + [0] * (48 - real)
    assert set(ids[real:]) == {3000}
    specials = [int(i) for i in ids[:real] if i >= 3000]
    assert specials == [3001, 3002, 3001, 3003, 3004]
    assert tokenizer.inner.decode([int(i) for i in ids[:real]], skip_special_tokens=False) == (
        CHAT.format(prompt="a fox")
    )


def test_prompt_is_inserted_verbatim(tokenizer: Tokenizer) -> None:
    plain, _ = tokenizer.encode("a fox", 48)
    spaced, _ = tokenizer.encode(" a fox ", 48)
    assert not np.array_equal(plain, spaced)


def test_composed_and_decomposed_characters_are_one(tokenizer: Tokenizer) -> None:
    composed, _ = tokenizer.encode("caf\u00e9", 48)
    decomposed, _ = tokenizer.encode("cafe\u0301", 48)
    np.testing.assert_array_equal(composed, decomposed)


def test_a_prompt_that_just_fits_is_not_cut(tokenizer: Tokenizer) -> None:
    _, mask = tokenizer.encode("a fox", 48)
    needed = int(mask.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, exact = tokenizer.encode("a fox", needed)
    assert exact.all()


@pytest.mark.parametrize("lost", [1, 2, 7])
def test_cut_prompt_warns_with_the_number_lost(tokenizer: Tokenizer, lost: int) -> None:
    whole, mask = tokenizer.encode("a fox", 48)
    needed = int(mask.sum())
    with pytest.warns(FirstlightWarning, match=rf"needs {needed} tokens.* last {lost} are lost"):
        ids, mask = tokenizer.encode("a fox", needed - lost)
    np.testing.assert_array_equal(ids, whole[: needed - lost])
    assert mask.all()


def test_template_file_is_not_needed(copied: Path, tokenizer: Tokenizer) -> None:
    (copied / "chat_template.jinja").unlink()
    other = Tokenizer.from_folder(copied, VOCABULARY)
    np.testing.assert_array_equal(other.encode("a cat", 48)[0], tokenizer.encode("a cat", 48)[0])


def test_settings_in_the_file_change_nothing(copied: Path, tokenizer: Tokenizer) -> None:
    """Padding and truncation stored by whoever used the file last must not leak in."""
    path = copied / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Left", "max_length": 5, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(content))
    other = Tokenizer.from_folder(copied, VOCABULARY)
    np.testing.assert_array_equal(other.encode("a cat", 48)[0], tokenizer.encode("a cat", 48)[0])


def test_pad_token_object(copied: Path) -> None:
    path = copied / "tokenizer_config.json"
    path.write_text(json.dumps({"pad_token": {"content": "<|im_end|>", "lstrip": False}}))
    assert Tokenizer.from_folder(copied, VOCABULARY).pad_id == 3002


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "cannot be read"),
        ("{}", "pad_token is None"),
        ('{"pad_token": "<|nothing|>"}', r"lacks the special tokens <\|nothing\|>"),
    ],
)
def test_bad_settings(copied: Path, settings: str, message: str) -> None:
    (copied / "tokenizer_config.json").write_text(settings)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(copied, VOCABULARY)


def test_damaged_tokenizer(copied: Path) -> None:
    (copied / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        Tokenizer.from_folder(copied, VOCABULARY)


def test_vocabulary_that_the_text_encoder_lacks() -> None:
    with pytest.raises(CheckpointError, match=r"token id 3004.* vocab_size is 3000"):
        Tokenizer.from_folder(FOLDER, 3000)
