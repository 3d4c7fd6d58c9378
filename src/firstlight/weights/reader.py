# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: headers checked to the byte, and positional reads.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes without
gaps. Reference: the format description of the safetensors project.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.errors import CheckpointError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1,
    "F8_E5M2FNUZ": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000
"""Bytes; the limit that the format's own implementation sets."""

REPLACE = "delete it and download it again"


@dataclass(frozen=True)
class Stamp:
    """Identity of a file's content when its header was read."""

    size: int
    modified_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        """From what `stat` says of a file."""
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)


@dataclass(frozen=True)
class Scaling:
    """How a quantised tensor's values are made whole: a scale of it all, and one of each block."""

    scale: Tensor
    blocks: Tensor | None = None


@dataclass(frozen=True)
class Tensor:
    """Where one tensor's bytes lie: `nbytes` from `offset` in `file`, row-major, little-endian."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    scaling: Scaling | None = None

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{short(self.file)}: {self.name}"


@dataclass(frozen=True)
class Header:
    """What a file says of itself. Tensors with a malformed entry have a name and a problem only."""

    stamp: Stamp
    names: frozenset[str]
    tensors: tuple[Tensor, ...]
    problems: tuple[str, ...]


def read_header(path: Path) -> Header:
    """Read a file's header and check that it accounts for every byte of the file.

    Raises CheckpointError if there is no header to speak of; lesser faults are in its `problems`.
    """
    stamp, raw = _read_header_bytes(path)
    try:
        entries = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{short(path)}: the header is no JSON ({error})") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{short(path)}: the header is no JSON object")
    entries.pop("__metadata__", None)
    start = 8 + len(raw)
    tensors, problems = [], []
    for name, entry in entries.items():
        try:
            tensors.append(_tensor(path, name, entry, start))
        except CheckpointError as error:
            problems.append(str(error))
    if not problems:
        problems += _layout_problems(path, tensors, start, stamp.size)
    return Header(stamp, frozenset(entries), tuple(tensors), tuple(problems))


def _read_header_bytes(path: Path) -> tuple[Stamp, bytes]:
    try:
        with open(path, "rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(
                    f"{short(path)} has {stamp.size} bytes; a safetensors file has at least 8: "
                    f"{REPLACE}"
                )
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER or 8 + length > stamp.size:
                raise CheckpointError(
                    f"{short(path)}: the header says it is {length} bytes long; the file has "
                    f"{stamp.size}: it is cut off or no safetensors file; {REPLACE}"
                )
            return stamp, file.read(length)
    except OSError as error:
        raise CheckpointError(f"{short(path)} cannot be read: {error}") from error


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = (*shape, begin, end)
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, name, entry) from error
    if not isinstance(shape, list) or not isinstance(dtype, str):
        raise _malformed(path, name, entry)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise _malformed(path, name, entry)
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"{short(path)}: {name} has the unknown dtype {dtype!r}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{short(path)}: {name} {dtype} {shape} needs {expected} bytes; "
            f"the header gives it {end - begin}"
        )
    return Tensor(path, name, dtype, tuple(shape), start + begin, expected)


def _malformed(path: Path, name: str, entry: Any) -> CheckpointError:
    return CheckpointError(f"{short(path)}: {name} has a malformed header entry {repr(entry)[:80]}")


def _layout_problems(path: Path, tensors: list[Tensor], start: int, size: int) -> Iterator[str]:
    position = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            yield (
                f"{tensor.where} begins at byte {tensor.offset}; {position} is expected (tensors "
                "overlap or leave a gap)"
            )
            return
        position += tensor.nbytes
    if position != size:
        what = "cut off" if size < position else "longer than its header says"
        yield f"{short(path)} is {what}: {size} bytes; {position} are expected; {REPLACE}"


class Source:
    """The files of one component, for positional reads from any thread while they are open."""

    def __init__(self, stamps: dict[Path, Stamp]) -> None:
        self._stamps = stamps
        self._handles: dict[Path, int] = {}

    @contextmanager
    def opened(self) -> Iterator[Source]:
        """Open all files, and check that none has changed since its header was read."""
        try:
            for path, stamp in self._stamps.items():
                try:
                    self._handles[path] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{short(path)} cannot be read: {error}") from error
                if Stamp.of(os.fstat(self._handles[path])) != stamp:
                    raise CheckpointError(_changed(path))
            yield self
        finally:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()

    def read_into(self, path: Path, offset: int, buffer: np.ndarray) -> None:
        """Fill `buffer` (contiguous bytes) from `offset`. Raises CheckpointError."""
        view = buffer.data
        while view:
            try:
                count = os.preadv(self._handles[path], [view], offset)
            except OSError as error:
                raise CheckpointError(f"{short(path)} cannot be read: {error}") from error
            if count == 0:
                raise CheckpointError(_changed(path))
            view, offset = view[count:], offset + count

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced or written to while it was read."""
        for path, stamp in self._stamps.items():
            try:
                same = Stamp.of(os.stat(path)) == stamp
            except OSError as error:
                raise CheckpointError(f"{short(path)} cannot be read: {error}") from error
            if not same:
                raise CheckpointError(_changed(path))


def _changed(path: Path) -> str:
    return f"{short(path)} was changed while it was being loaded; load it again"


def short(path: Path) -> str:
    """Component folder and file name: what a user needs to find the file in the model."""
    return f"{path.parent.name}/{path.name}"
