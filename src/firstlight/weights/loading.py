# SPDX-License-Identifier: Apache-2.0
"""A model found, checked and read in the background: this may begin before jax is there."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from firstlight.models.params import as_dtype
from firstlight.progress import Progress, silent
from firstlight.timeline import Timeline
from firstlight.weights.folder import ModelFolder, open_model
from firstlight.weights.hub import resolve
from firstlight.weights.load import STAGING_BYTES, Counter, Reading
from firstlight.weights.plan import Plan, merged
from firstlight.weights.storage import recall

RESOLVE = "resolve"
"""Name of the span in which the model is found and its headers are checked."""

COMPONENTS: dict[str, tuple[str, tuple[str, ...] | None]] = {
    "text_encoder": ("text_encoder", None),
    "transformer": ("transformer", None),
    "vae": ("vae", ("decoder", "stats")),
    "vae_encoder": ("vae", ("encoder",)),
}
"""What is loaded as one: a component of the model, and the parts of it (None: all)."""

NEEDED = ("text_encoder", "transformer", "vae")
"""What text to image loads, in the order in which it is needed."""


class Loading:
    """What was begun in the background: `folder()` and `take_reading()` wait for it.

    Begins at once. `close()` stops it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "bfloat16",
        revision: str | None = None,
        offline: bool = False,
        cache_dir: str | Path | None = None,
        is_distilled: bool | None = None,
        files: Mapping[str, str | Path | None] | None = None,
        components: tuple[str, ...] = NEEDED,
        staging_bytes: int = STAGING_BYTES,
        read_threads: int | None = None,
        progress: Progress = silent,
        timeline: Timeline | None = None,
    ) -> None:
        """`files` are those of `open_model`; `components` are names of `COMPONENTS`, in the order
        of reading.

        Raises ConfigError for an unknown dtype; all other errors come from `folder()`.
        """
        as_dtype(dtype)  # before anything is downloaded
        self.components = components
        self.timeline = timeline or Timeline.from_now()
        self._progress = progress
        self._staging = staging_bytes
        self._threads = {} if read_threads is None else {"threads": read_threads}
        self._closed = False
        self._taken = False
        self._lock = threading.Lock()
        self._folder: Future[ModelFolder] = Future()
        self._reading: Future[Reading] = Future()
        settings = dict(revision=revision, offline=offline, cache_dir=cache_dir)
        paths = {k: Path(v).expanduser() for k, v in (files or {}).items() if v is not None}
        thread = threading.Thread(
            target=self._run,
            args=(str(model), settings, dict(dtype=dtype, is_distilled=is_distilled, files=paths)),
            name="firstlight-loading",
            daemon=True,  # an ending process waits for no download
        )
        thread.start()

    def folder(self) -> ModelFolder:
        """The model's files, checked. Raises CheckpointError, as `resolve` and `open_model` do."""
        return self._folder.result()

    def begun(self) -> bool:
        """Whether `folder()` and `take_reading()` can be answered without waiting."""
        return self._reading.done()

    def take_reading(self) -> Reading | None:
        """The weights being read; None if they were taken before, or reading was stopped.

        Raises CheckpointError if they cannot be read.
        """
        with self._lock:
            taken, self._taken = self._taken, True
        return None if taken or self._closed else self._reading.result()

    def close(self) -> None:
        """Stop, unless the reading was taken: what has been asked for already may still come."""
        with self._lock:
            if self._closed or self._taken:
                return
            self._closed = True
        if self._reading.done() and self._reading.exception() is None:
            self._reading.result().close()

    def _run(self, model: str, where: dict[str, Any], how: dict[str, Any]) -> None:
        try:
            with self.timeline.span(RESOLVE, lane="resolve"):
                found = resolve(model, **where, progress=self._progress)
                folder = open_model(found.path, name=found.name, revision=found.revision, **how)
            self.timeline.note("stored_bytes", folder.stored_bytes)
            if (raw := recall(folder.path)) is not None:
                self.timeline.note("raw_read_bytes_per_second", raw)
            self._folder.set_result(folder)
        except BaseException as error:
            self._folder.set_exception(error)
            self._reading.set_exception(error)
            return
        try:
            reading = self._begin(folder)
        except BaseException as error:
            self._reading.set_exception(error)
            return
        with self._lock:
            if self._closed:
                reading.close()
            self._reading.set_result(reading)

    def _begin(self, folder: ModelFolder) -> Reading:
        plan = needed(folder, self.components)
        self._progress("load", 0, plan.nbytes)
        counter = Counter(lambda count: self._progress("load", count, plan.nbytes))
        return Reading(
            plan,
            budget=self._staging,
            on_bytes=counter.add,
            timeline=self.timeline,
            **self._threads,
        )


def needed(folder: ModelFolder, names: Iterable[str] = NEEDED) -> Plan:
    """The plan of these components; paths begin with their names."""
    plans = {}
    for name in names:
        component, parts = COMPONENTS[name]
        plan = folder.plans[component]
        plans[name] = plan if parts is None else plan.only(*parts)
    return merged(plans)


def needed_specs(folder: ModelFolder, names: Iterable[str] = NEEDED) -> dict[str, Any]:
    """The `ParamSpec` trees of these components; a part that is not loaded is None."""
    made = {}
    for name in names:
        component, parts = COMPONENTS[name]
        tree = folder.specs[component]
        if parts is not None:
            absent = [f.name for f in dataclasses.fields(tree) if f.name not in parts]
            tree = dataclasses.replace(tree, **dict.fromkeys(absent))
        made[name] = tree
    return made
