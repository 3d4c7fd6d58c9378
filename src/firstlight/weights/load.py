# SPDX-License-Identifier: Apache-2.0
"""Reading a plan with many threads at once, straight into final buffers.

A parameter's buffer is allocated once, in its final shape and dtype, aligned so that XLA's CPU
backend takes it as it is. Bytes go from the file straight into it; only where the stored dtype
differs, or where columns of a matrix go to different parameters, do they pass through a scratch
buffer, small enough to stay in the processor's cache.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import numpy as np

from firstlight.errors import CheckpointError
from firstlight.timeline import Span, Timeline
from firstlight.weights.buffers import Buffer
from firstlight.weights.plan import (
    Block,
    Part,
    Plan,
    Step,
    block_bytes,
    block_offset,
    cut,
    piece_bytes,
)
from firstlight.weights.quantised import Dequantiser
from firstlight.weights.reader import Source
from firstlight.weights.rules import Piece

CHUNK_BYTES = 128 << 20
"""Bytes of one read call. While jax is being imported the interpreter stands still for half a
second: what the system has been asked for by then is what is read meanwhile (8 threads: 1 GiB)."""

SCRATCH_BYTES = 4 << 20
"""Bytes of one read call that goes through a scratch buffer."""

STAGING_BYTES = 1 << 30
"""Bytes that may have been read and not been given back, on the way to an accelerator."""

THREADS = 8

LANE = "read"

# What is read while jax is being imported must not wait for ml_dtypes, which takes half as long:
# until they are handed out or converted, bfloat16 values are two bytes.
_CARRIERS: dict[str, np.dtype] = {
    "BF16": np.dtype(np.uint16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32),
}


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


class Reading:
    """A plan being read in the background; its parts are taken in order, by one thread.

    At most `budget` bytes are read and not given back at any time (more only where a single part
    is larger); without a budget, everything is read as fast as the storage delivers.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        budget: int | None = STAGING_BYTES,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        on_bytes: Callable[[int], None] = lambda count: None,
        timeline: Timeline | None = None,
    ) -> None:
        """Open the files and begin to read. Raises CheckpointError: see `Plan.problems`."""
        if plan.problems:
            raise CheckpointError("the weights do not fit", tuple(plan.problems))
        self.plan = plan
        self.most_held = 0
        self._budget = budget
        self._chunk_bytes = chunk_bytes
        self._on_bytes = on_bytes
        self._lanes = _Lanes(plan, timeline)
        self._held = 0
        self._shares: dict[Part, int] = {}
        self._reads: dict[Part, list[Future[None]]] = {}
        self._buffers: dict[str, Buffer] = {}
        steps = plan.steps((budget or STAGING_BYTES) // 8)
        self._waiting = deque(steps)
        self._order = deque(step.part for step in steps)
        self._of_path: dict[str, list[Part]] = {}
        for step in steps:
            self._of_path.setdefault(step.part.path, []).append(step.part)
        self._source = Source(plan.stamps)
        self._stack = ExitStack()
        self._stack.enter_context(self._source.opened())
        self._dequantiser = Dequantiser(self._source)
        self._pool = ThreadPoolExecutor(threads, "firstlight-read")
        self._advance()

    def lift_budget(self) -> None:
        """Read without a bound: the buffers are where the parameters stay."""
        self._budget = None
        self._advance()

    def waits(self) -> bool:
        """Whether the next part is not being read for want of budget."""
        return bool(self._order) and bool(self._waiting) and self._waiting[0].part == self._order[0]

    @property
    def upcoming(self) -> Part | None:
        """The part that `take` will return."""
        return self._order[0] if self._order else None

    def rows(self) -> dict[str, list[int]]:
        """Rows of each part of each parameter."""
        return {
            path: [part.end - part.begin for part in parts] for path, parts in self._of_path.items()
        }

    def ready(self) -> bool:
        """Whether the next part can be taken without waiting."""
        reads = self._reads.get(self._order[0]) if self._order else None
        return reads is not None and all(read.done() for read in reads)

    def take(self) -> Part | None:
        """Wait until the next part is read, and return it; None when all were taken.

        Raises CheckpointError if a file cannot be read or has changed.
        """
        if not self._order:
            self._source.check_unchanged()
            self.close()
            return None
        part = self._order.popleft()
        while self._waiting and part not in self._reads:
            self._begin(self._waiting.popleft())
        for read in self._reads.pop(part):
            read.result()
        return part

    def array(self, part: Part) -> np.ndarray:
        """The parameter's rows that the part is about: (rows, ...), a view of its buffer."""
        spec = self.plan.specs[part.path]
        values = self._buffers[part.path].array.reshape(spec.shape)[part.begin : part.end]
        return _as(spec.dtype, values)

    def whole(self, path: str) -> np.ndarray:
        """The buffer of a parameter whose parts were all taken; it now belongs to the caller."""
        for part in self._of_path[path]:
            self._held -= self._shares.pop(part, 0)
        self._advance()
        spec = self.plan.specs[path]
        return _as(spec.dtype, self._buffers.pop(path).array.reshape(spec.shape))

    def give_back(self, part: Part) -> None:
        """Let go of a part's memory, so that more may be read."""
        spec = self.plan.specs[part.path]
        row = spec.size // spec.shape[0]
        buffer = self._buffers[part.path]
        buffer.give_back(part.begin * row, part.end * row)
        self._held -= self._shares.pop(part, 0)
        if part == self._of_path[part.path][-1]:
            del self._buffers[part.path]
        self._advance()

    def close(self) -> None:
        """Stop reading. What was handed out stays valid."""
        self._pool.shutdown(cancel_futures=True)
        self._stack.close()
        self._waiting.clear()

    def _advance(self) -> None:
        """Begin parts while the budget has room."""
        while self._waiting:
            cost = sum(size for _, size in self._costs(self._waiting[0]))
            if self._budget is not None and self._held and self._held + cost > self._budget:
                return
            self._begin(self._waiting.popleft())

    def _costs(self, step: Step) -> Iterator[tuple[Part, int]]:
        for block in step.blocks:
            parts = self.plan.parts_of(block, self._of_path)
            for part, piece in zip(parts, block, strict=True):
                yield part, piece_bytes(piece, self.plan.specs[part.path])

    def _begin(self, step: Step) -> None:
        for part, size in self._costs(step):
            self._shares[part] = self._shares.get(part, 0) + size
            self._held += size
        self.most_held = max(self.most_held, self._held)
        self._allocate(step.part.path)
        self._reads.setdefault(step.part, [])
        for block in step.blocks:
            parts = set(self.plan.parts_of(block, self._of_path))
            buffers = {part.path: self._allocate(part.path) for part in parts}
            direct = _is_direct(block, buffers)
            limit = self._chunk_bytes if direct else min(self._chunk_bytes, SCRATCH_BYTES)
            for piece in cut(block, limit):
                read = self._pool.submit(self._read, piece, buffers)
                for part in parts:
                    self._reads.setdefault(part, []).append(read)

    def _allocate(self, path: str) -> np.ndarray:
        if path not in self._buffers:
            spec = self.plan.specs[path]
            self._buffers[path] = Buffer(spec.size, _CARRIERS[spec.dtype])
        return self._buffers[path].array

    def _read(self, block: Block, buffers: Mapping[str, np.ndarray]) -> None:
        """Read one block into its place in the targets' buffers."""
        self._lanes.begin(block)
        tensor, (first, last) = block[0].tensor, block[0].rows
        if _is_direct(block, buffers):
            target = _place(block[0], buffers).view(np.uint8)
            self._source.read_into(tensor.file, block_offset(block), target)
        else:
            raw = np.empty((last - first, block_bytes(block) // (last - first)), np.uint8)
            self._source.read_into(tensor.file, block_offset(block), raw.reshape(-1))
            if tensor.scaling is not None:
                scratch, stored = self._dequantiser.values(tensor, raw, first), "F32"
            else:
                scratch, stored = raw.view(_CARRIERS[tensor.dtype]), tensor.dtype
            for piece in block:
                target = _place(piece, buffers).reshape(last - first, piece.run)
                final = self.plan.specs[piece.target].dtype
                _copy(scratch[:, slice(*piece.columns)], stored, target, final)
        self._lanes.end(block)
        self._on_bytes(block_bytes(block))


class _Lanes:
    """One span for each component: from the beginning of its first read to the end of its last."""

    def __init__(self, plan: Plan, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._lock = threading.Lock()
        self._spans: dict[str, Span] = {}
        self._left: dict[str, int] = {}
        for piece in plan.pieces:
            name = span_name(piece.target)
            self._left[name] = self._left.get(name, 0) + piece.size

    def begin(self, block: Block) -> None:
        name = span_name(block[0].target)
        if self._timeline is not None and name not in self._spans:
            with self._lock:
                if name not in self._spans:
                    span = Span(LANE, name, self._timeline.clock(), facts={"bytes": 0})
                    self._spans[name] = span
                    self._timeline.add(span)

    def end(self, block: Block) -> None:
        if self._timeline is None:
            return
        name = span_name(block[0].target)
        with self._lock:
            self._left[name] -= sum(piece.size for piece in block)
            self._spans[name].facts["bytes"] += block_bytes(block)
            if self._left[name] == 0:
                self._spans[name].end = self._timeline.clock()


def span_name(path: str) -> str:
    """Name of the span in which a parameter's component is read."""
    return f"read {path.split('.')[0]}"


def read(plan: Plan, **options: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (parameter's dotted path, finished buffer) while further ones are being read.

    Options and errors are those of `Reading`.
    """
    reading = Reading(plan, budget=None, **options)
    try:
        left = {path: spec.shape[0] for path, spec in plan.specs.items()}
        while (part := reading.take()) is not None:
            left[part.path] -= part.end - part.begin
            if left[part.path] == 0:
                yield part.path, reading.whole(part.path)
    finally:
        reading.close()


def _is_direct(block: Block, buffers: Mapping[str, np.ndarray]) -> bool:
    """Whether the file's bytes are the target's, in the same order."""
    (piece, *others) = block
    stored = _CARRIERS.get(piece.tensor.dtype)
    return not others and piece.run == piece.width and buffers[piece.target].dtype == stored


def _place(piece: Piece, buffers: Mapping[str, np.ndarray]) -> np.ndarray:
    return buffers[piece.target][piece.at : piece.at + piece.size]


def _copy(values: np.ndarray, stored: str, target: np.ndarray, final: str) -> None:
    if values.dtype == target.dtype:
        target[...] = values
    else:
        # NumPy and ml_dtypes round to nearest, halves to even.
        _as(final, target)[...] = _as(stored, values)


def _as(dtype: str, values: np.ndarray) -> np.ndarray:
    """`values` as what they are, where they are bfloat16 in a carrier's dtype."""
    if dtype not in ("BF16", "bfloat16"):
        return values
    import ml_dtypes

    return values.view(ml_dtypes.bfloat16)
