# SPDX-License-Identifier: Apache-2.0
"""Prompts to token ids: klein's fixed chat text, right padding, attention mask."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from firstlight.errors import CheckpointError, FirstlightWarning

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HubTokenizer

# One user turn, the generation prompt, thinking switched off. Written out here because the
# template file of a checkpoint may be missing, and because templates change between library
# versions while the model was trained on exactly this text.
CHAT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


@dataclass(frozen=True)
class Tokenizer:
    """`encode` is a pure function of the prompt; the padding token comes from the checkpoint."""

    inner: HubTokenizer
    pad_id: int

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> Tokenizer:
        """Load `tokenizer.json` and the pad token of `tokenizer_config.json` from `folder`.

        Raises CheckpointError if a file is missing or unreadable, if one of the chat text's
        special tokens is unknown, or if ids do not fit the text encoder's `vocab_size`.
        """
        from tokenizers import Tokenizer as HubTokenizer

        path = folder / "tokenizer.json"
        try:
            inner = HubTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error
        inner.no_padding()
        inner.no_truncation()
        pad = _pad_token(folder)
        missing = [t for t in (*SPECIAL_TOKENS, pad) if inner.token_to_id(t) is None]
        pad_id = inner.token_to_id(pad)
        if missing or pad_id is None:
            raise CheckpointError(f"{path} lacks the special tokens {', '.join(missing)}")
        largest = max(inner.get_vocab(with_added_tokens=True).values())
        if largest >= vocab_size:
            raise CheckpointError(
                f"{path} has token id {largest}; the text encoder's vocab_size is {vocab_size}"
            )
        return cls(inner, pad_id)

    def encode(self, prompt: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """(ids, mask) of one prompt, each (length,) int32; pads on the right, mask 1 on tokens.

        A prompt that needs more than `length` tokens (the chat text's own included) is cut on the
        right, as in the reference, with a FirstlightWarning that says how many were lost.
        """
        tokens = self.inner.encode(CHAT.format(prompt=prompt), add_special_tokens=False).ids
        if len(tokens) > length:
            warnings.warn(
                f"the prompt {_shorten(prompt)!r} needs {len(tokens)} tokens (chat text included), "
                f"max_sequence_length is {length}: the last {len(tokens) - length} are lost",
                FirstlightWarning,
                stacklevel=2,
            )
        tokens = tokens[:length]
        ids = np.full(length, self.pad_id, np.int32)
        ids[: len(tokens)] = tokens
        mask = np.zeros(length, np.int32)
        mask[: len(tokens)] = 1
        return ids, mask


def _pad_token(folder: Path) -> str:
    path = folder / "tokenizer_config.json"
    try:
        settings: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    pad = settings.get("pad_token") if isinstance(settings, dict) else None
    # Older writers store an added-token object instead of its text.
    pad = pad.get("content") if isinstance(pad, dict) else pad
    if not isinstance(pad, str):
        raise CheckpointError(f"{path}: pad_token is {pad!r}; the text of a token is needed")
    return pad


def _shorten(prompt: str, limit: int = 40) -> str:
    return prompt if len(prompt) <= limit else prompt[: limit - 3] + "..."
