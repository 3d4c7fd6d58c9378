# SPDX-License-Identifier: Apache-2.0
"""Saving pictures behind the drawing of the next ones."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstlight.cli.names import Naming
from firstlight.config import PictureConfig
from firstlight.image import save_image
from firstlight.timeline import Timeline

if TYPE_CHECKING:
    from firstlight.pipeline import Result

_MOST_PENDING = 8
"""Pictures that may wait to be saved: a slow disk must not fill the memory."""

SAVE = "save"


@dataclass
class Made:
    """The pictures of a run, saved already."""

    paths: list[Path] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)


class Saver:
    """Takes pictures in order and saves them on a thread of its own; a context manager that saves
    what is pending also when its body fails."""

    def __init__(
        self, names: Naming, picture: PictureConfig, timeline: Timeline, total: int, progress: Any
    ) -> None:
        self.made = Made()
        self._names, self._picture, self._timeline = names, picture, timeline
        self._total, self._progress = total, progress
        self._asked: set[Path] = set()
        self._pending: deque[tuple[Future[Path], Result]] = deque()
        self._pool = ThreadPoolExecutor(1, "firstlight-save")

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: object, *failure: object) -> None:
        try:
            self.finish()
        except Exception:
            if kind is None:  # else the first failure is the one to tell
                raise
        finally:
            self._pool.shutdown(cancel_futures=True)

    def add(self, result: Result) -> None:
        """Save one picture soon. Raises what saving an earlier one raised."""
        (seed,), (prompt,) = result.seeds, result.prompts
        index = len(self.made.paths) + len(self._pending)
        path = self._names.path(prompt=prompt, seed=seed, index=index)
        # --overwrite is about files of earlier runs: pictures of one run never replace each other.
        replace = self._picture.overwrite and path not in self._asked
        self._asked.add(path)
        self._pending.append((self._pool.submit(self._save, result, path, replace), result))
        while self._pending[0][0].done() or len(self._pending) > _MOST_PENDING:
            self._settle()
            if not self._pending:
                return

    def finish(self) -> None:
        """Wait until all are saved."""
        while self._pending:
            self._settle()

    def _settle(self) -> None:
        future, result = self._pending.popleft()
        if future.done():
            path = future.result()
        else:
            with self._timeline.wait(SAVE):
                path = future.result()
        made = self.made
        made.paths.append(path)
        made.seeds += result.seeds
        made.prompts += result.prompts
        made.metadata += result.metadata
        for stage, seconds in result.timings.items():
            made.timings[stage] = made.timings.get(stage, 0.0) + seconds
        self._progress(SAVE, len(made.paths), self._total)

    def _save(self, result: Result, path: Path, replace: bool) -> Path:
        with self._timeline.span(SAVE, lane=SAVE):
            return save_image(
                result.images[0],
                path,
                result.metadata[0],
                overwrite=replace,
                compression=self._picture.compression,
            )
