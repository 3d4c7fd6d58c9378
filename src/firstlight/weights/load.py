# SPDX-License-Identifier: Apache-2.0
"""From files to final buffers: what to read, and reading it with many threads at once.

A parameter's buffer is allocated once, in its final shape and dtype, aligned so that XLA's CPU
backend takes it as it is. Bytes go from the file straight into it; only where the stored dtype
differs, or where columns of a matrix go to different parameters, do they pass through a scratch
buffer, small enough to stay in the processor's cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from firstlight.errors import CheckpointError
from firstlight.models.params import ParamSpec, named_leaves
from firstlight.weights.component import Component
from firstlight.weights.reader import ITEM_BYTES, Source, Stamp
from firstlight.weights.rules import Piece, Rule, expand

ALIGNMENT = 64
"""Bytes: what XLA's CPU backend asks of a buffer that it is to use without a copy."""

CHUNK_BYTES = 16 << 20
"""Bytes of one read call: large enough for the storage, small enough to share among threads."""

SCRATCH_BYTES = 4 << 20
"""Bytes of one read call that goes through a scratch buffer."""

AHEAD_BYTES = 4 << 30
"""Bytes of buffers that may be filled ahead of the one that is waited for. On accelerators the
buffers are given back one by one, so this and not the model's size is what the host must hold."""

THREADS = 8

HOST_DTYPES: dict[str, np.dtype] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
}


Block = tuple[Piece, ...]
"""The same rows of one tensor, contiguous in the file; each piece takes some of the columns."""


@dataclass(frozen=True)
class Plan:
    """Everything needed to load one component: checked, nothing read yet.

    `problems` lists what is wrong with the files; a plan with problems cannot be read.
    """

    specs: dict[str, ParamSpec]
    pieces: list[Piece]
    stamps: dict[Path, Stamp]
    problems: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read from the files."""
        return sum(_nbytes(block) for block in _blocks(self.pieces))

    def only(self, *subtrees: str) -> Plan:
        """The same plan for some of the tree's top-level fields (`"decoder"`, ...)."""
        unknown = set(subtrees) - {path.split(".")[0] for path in self.specs}
        if unknown:
            raise ValueError(f"no parameters are called {', '.join(sorted(unknown))}")
        return replace(
            self,
            specs={k: v for k, v in self.specs.items() if k.split(".")[0] in subtrees},
            pieces=[piece for piece in self.pieces if piece.target.split(".")[0] in subtrees],
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
        be read, or changes meanwhile, or if the plan has problems.
        """
        if self.problems:
            raise CheckpointError("the weights do not fit", tuple(self.problems))
        source = Source(self.stamps)
        with source.opened(), ThreadPoolExecutor(threads, "firstlight-read") as pool:

            def submit(block: Block, buffers: Mapping[str, np.ndarray]) -> list[Future[None]]:
                direct = _is_direct(block, buffers)
                limit = chunk_bytes if direct else min(chunk_bytes, SCRATCH_BYTES)
                return [
                    pool.submit(_read, source, part, buffers, on_bytes)
                    for part in _cut(block, limit)
                ]

            reading = _Reading(self.specs, _blocks(self.pieces), submit)
            try:
                for path in self.specs:
                    yield path, reading.finish(path)
                source.check_unchanged()
            finally:
                pool.shutdown(cancel_futures=True)


class _Reading:
    """Buffers that are being filled, begun in the order in which they will be asked for."""

    def __init__(
        self,
        specs: Mapping[str, ParamSpec],
        blocks: Iterable[Block],
        submit: Callable[[Block, Mapping[str, np.ndarray]], list[Future[None]]],
    ) -> None:
        self._specs = specs
        self._submit = submit
        self._waiting = deque(specs)
        self._ahead = 0
        self._buffers: dict[str, np.ndarray] = {}
        self._reads: dict[str, list[Future[None]]] = {path: [] for path in specs}
        order = {path: number for number, path in enumerate(specs)}
        self._blocks: dict[str, list[Block]] = {path: [] for path in specs}
        for block in blocks:
            first = min((piece.target for piece in block), key=order.__getitem__)
            self._blocks[first].append(block)

    def finish(self, path: str) -> np.ndarray:
        """Wait until the buffer of `path` is full; let others be filled meanwhile."""
        while self._waiting and (path in self._waiting or self._ahead < AHEAD_BYTES):
            self._begin(self._waiting.popleft())
        for read in self._reads.pop(path):
            read.result()
        spec = self._specs[path]
        self._ahead -= spec.nbytes
        return self._buffers.pop(path).reshape(spec.shape)

    def _begin(self, path: str) -> None:
        self._ahead += self._specs[path].nbytes
        self._allocate(path)
        for block in self._blocks.pop(path):
            targets = {piece.target for piece in block}
            reads = self._submit(block, {target: self._allocate(target) for target in targets})
            for target in targets:
                self._reads[target] += reads

    def _allocate(self, path: str) -> np.ndarray:
        if path not in self._buffers:
            spec = self._specs[path]
            self._buffers[path] = aligned_empty(spec.size, HOST_DTYPES[spec.dtype])
        return self._buffers[path]


class Counter:
    """Adds up bytes from many threads and reports the sum."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.total = 0
        self._report = report
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Count `count` more bytes and report the sum so far."""
        with self._lock:
            self.total += count
            self._report(self.total)


def plan(
    spec_tree: Any, rules: Iterable[Rule], component: Component, unread: Iterable[str] = ()
) -> Plan:
    """Match a component's files with its parameters; collects all problems, reads no weight."""
    specs = dict(named_leaves(spec_tree))
    made = expand(rules, specs, component, unread)
    return Plan(specs, made.pieces, component.stamps, component.problems + made.problems)


def aligned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An uninitialised one-dimensional array that starts at a multiple of `ALIGNMENT`."""
    raw = np.empty(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size * dtype.itemsize].view(dtype)


def _blocks(pieces: Iterable[Piece]) -> list[Block]:
    """Put together what one read delivers."""
    blocks: dict[tuple[str, tuple[int, int]], list[Piece]] = {}
    for piece in pieces:
        blocks.setdefault((piece.tensor.name, piece.rows), []).append(piece)
    return [tuple(block) for block in blocks.values()]


def _row_bytes(block: Block) -> int:
    return block[0].width * ITEM_BYTES[block[0].tensor.dtype]


def _nbytes(block: Block) -> int:
    first, last = block[0].rows
    return (last - first) * _row_bytes(block)


def _cut(block: Block, limit: int) -> Iterator[Block]:
    """Cut a block into reads of at most `limit` bytes, but of one row at least."""
    first, last = block[0].rows
    step = max(1, limit // _row_bytes(block))
    for begin in range(first, last, step):
        rows = begin, min(begin + step, last)
        yield tuple(
            replace(piece, rows=rows, at=piece.at + (begin - first) * piece.run) for piece in block
        )


def _is_direct(block: Block, buffers: Mapping[str, np.ndarray]) -> bool:
    """Whether the file's bytes are the target's, in the same order."""
    (piece, *others) = block
    stored = HOST_DTYPES[piece.tensor.dtype]
    return not others and piece.run == piece.width and buffers[piece.target].dtype == stored


def _read(
    source: Source,
    block: Block,
    buffers: Mapping[str, np.ndarray],
    on_bytes: Callable[[int], None],
) -> None:
    """Read one block into its place in the targets' buffers."""
    tensor, (first, last) = block[0].tensor, block[0].rows
    offset = tensor.offset + first * _row_bytes(block)
    if _is_direct(block, buffers):
        source.read_into(tensor.file, offset, _place(block[0], buffers).view(np.uint8))
    else:
        scratch = np.empty((last - first, block[0].width), HOST_DTYPES[tensor.dtype])
        source.read_into(tensor.file, offset, scratch.reshape(-1).view(np.uint8))
        for piece in block:
            target = _place(piece, buffers).reshape(last - first, piece.run)
            _copy(scratch[:, slice(*piece.columns)], target)
    on_bytes(_nbytes(block))


def _place(piece: Piece, buffers: Mapping[str, np.ndarray]) -> np.ndarray:
    return buffers[piece.target][piece.at : piece.at + piece.size]


def _copy(values: np.ndarray, target: np.ndarray) -> None:
    if values.dtype == target.dtype:
        # As bytes: NumPy copies elements of ml_dtypes' types one by one.
        target.view(np.uint8)[...] = values.view(np.uint8)
    else:
        # NumPy and ml_dtypes round to nearest, halves to even.
        target[...] = values
