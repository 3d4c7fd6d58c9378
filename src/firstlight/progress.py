# SPDX-License-Identifier: Apache-2.0
"""How long-running work tells a front end where it stands."""

from __future__ import annotations

from typing import Literal, Protocol

Stage = Literal["download", "load", "compile", "encode", "denoise", "decode", "save"]


class Progress(Protocol):
    """Receives every advance of every stage; may be called from several threads at once.

    `done` and `total` are bytes for `download` and `load`, programs for `compile`, steps for
    `denoise` (over all batches of the call), and images for `encode`, `decode` and `save`.
    """

    def __call__(self, stage: Stage, done: int, total: int) -> None:
        """Say that `done` of `total` are done; called with 0 when a stage begins."""


def silent(stage: Stage, done: int, total: int) -> None:
    """The default `Progress`: tells nobody."""
