# SPDX-License-Identifier: Apache-2.0
"""From files to final buffers: what to read, and reading it with many threads at once.

A parameter's buffer is allocated once, in its final shape and dtype, aligned so that XLA's CPU
backend takes it as it is. Bytes go from the file straight into it; only where the stored dtype
differs do they pass through a small scratch buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from firstlight.models.params import ParamSpec, named_leaves
from firstlight.weights.reader import ITEM_BYTES, Component, Source, Stamp
from firstlight.weights.rules import Piece, Rule, expand

ALIGNMENT = 64
"""Bytes: what XLA's CPU backend asks of a buffer that it is to use without a copy."""

CHUNK_BYTES = 16 << 20
"""Bytes of one read call: large enough for the storage, small enough to share among threads."""

THREADS = 8

HOST_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


@dataclass(frozen=True)
class Plan:
    """Everything needed to load one component: checked, nothing read yet.

    `problems` lists what is wrong with the files; a plan with problems cannot be read.
    """

    specs: dict[str, ParamSpec]
    pieces: list[Piece]
    stamps: dict[Any, Stamp]
    problems: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read from the files."""
        return sum(p.size * ITEM_BYTES[p.tensor.dtype] for p in self.pieces)

    def only(self, *subtrees: str) -> Plan:
        """The same plan for some of the tree's top-level fields (`"decoder"`, ...)."""
        return Plan(
            {k: v for k, v in self.specs.items() if k.split(".")[0] in subtrees},
            [piece for piece in self.pieces if piece.target.split(".")[0] in subtrees],
            self.stamps,
            self.problems,
        )

    def read(
        self,
        *,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        on_bytes: Callable[[int], None] = lambda count: None,
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (parameter's dotted path, finished buffer) while further ones are being read.

        `on_bytes` is told of every read, from any thread. Raises CheckpointError if a file cannot
        be read, or changes meanwhile.
        """
        source = Source(self.stamps)
        by_target: dict[str, list[Piece]] = {path: [] for path in self.specs}
        for piece in self.pieces:
            by_target[piece.target].append(piece)
        with source.opened(), ThreadPoolExecutor(threads, "firstlight-read") as pool:
            pending: list[tuple[str, np.ndarray, list[Future[None]]]] = []
            try:
                for path, spec in self.specs.items():
                    buffer = aligned_empty(spec.size, HOST_DTYPES[spec.dtype])
                    reads = [
                        pool.submit(_read, source, part, buffer, on_bytes)
                        for piece in by_target[path]
                        for part in _parts(piece, chunk_bytes)
                    ]
                    pending.append((path, buffer.reshape(spec.shape), reads))
                while pending:
                    path, buffer, reads = pending.pop(0)
                    for read in reads:
                        read.result()
                    yield path, buffer
                source.check_unchanged()
            finally:
                for _, _, reads in pending:
                    for read in reads:
                        read.cancel()


def plan(
    spec_tree: Any, rules: Iterable[Rule], component: Component, unread: Iterable[str] = ()
) -> Plan:
    """Match a component's files with its parameters; collects all problems, reads no weight."""
    specs = dict(named_leaves(spec_tree))
    if component.problems:
        # Headers that cannot be trusted would only add follow-up faults.
        return Plan(specs, [], component.stamps, list(component.problems))
    made = expand(rules, specs, component, unread)
    return Plan(specs, made.pieces, component.stamps, made.problems)


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised one-dimensional array that starts at a multiple of `ALIGNMENT`."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)


def _parts(piece: Piece, chunk_bytes: int) -> Iterator[Piece]:
    """Cut a piece into reads of about `chunk_bytes`."""
    item = ITEM_BYTES[piece.tensor.dtype]
    chunk = max(1, chunk_bytes // item)
    if piece.height == 1:
        for begin in range(0, piece.run, chunk):
            count = min(chunk, piece.run - begin)
            yield Piece(
                piece.target, piece.tensor, piece.at + begin, piece.start + begin, 1, count, count
            )
        return
    rows = max(1, chunk // piece.stride)
    for row in range(0, piece.height, rows):
        yield Piece(
            piece.target,
            piece.tensor,
            piece.at + row * piece.run,
            piece.start + row * piece.stride,
            min(rows, piece.height - row),
            piece.run,
            piece.stride,
        )


def _read(
    source: Source,
    part: Piece,
    buffer: np.ndarray,
    on_bytes: Callable[[int], None],
) -> None:
    """Read one part of a piece into its place in the target's buffer."""
    stored = HOST_DTYPES[part.tensor.dtype]
    target = buffer[part.at : part.at + part.size]
    direct = stored == buffer.dtype
    landing = target if direct else np.empty(part.size, stored)
    rows = landing.view(np.uint8).reshape(part.height, part.run * stored.itemsize)
    offset = part.tensor.offset + part.start * stored.itemsize
    if part.height == 1:
        source.read_into(part.tensor.file, offset, rows[0])
    else:
        source.read_rows(part.tensor.file, offset, part.stride * stored.itemsize, rows)
    if not direct:
        # NumPy and ml_dtypes round to nearest, halves to even.
        target[:] = landing.astype(buffer.dtype)
    on_bytes(part.size * stored.itemsize)
