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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from firstlight.errors import CheckpointError

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000
"""Bytes; the limit that the format's own implementation sets."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


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
class Tensor:
    """Where one tensor's bytes lie: `nbytes` from `offset` in `file`, row-major, little-endian."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass
class Component:
    """All tensors of one component of a model, over its files. Faults are in `problems`."""

    label: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def open_component(folder: Path, stem: str) -> Component:
    """Read the headers of `<stem>.safetensors`, or of the shards its index names.

    Reads no weights and raises nothing: what is wrong is noted in the component's `problems`.
    """
    component = Component(folder.name)
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        _add_file(component, single)
    elif index.is_file():
        _add_shards(component, index)
    else:
        pickled = sorted(p.name for p in _files(folder) if p.suffix in PICKLED)
        component.problems.append(
            f"{folder.name}: neither {single.name} nor {index.name} is there"
            + (f" ({', '.join(pickled)}: pickled weights are code and are refused)" * bool(pickled))
        )
    return component


def shard_names(index: Path) -> dict[str, str]:
    """Tensor name -> file name of an index file. Raises CheckpointError."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{_short(index)} cannot be read: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{_short(index)}: weight_map is missing, empty or no object")
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{_short(index)}: {name} is in {file!r}; a file name in the same folder is needed"
            )
    return names


def _add_shards(component: Component, index: Path) -> None:
    try:
        names = shard_names(index)
    except CheckpointError as error:
        component.problems.append(str(error))
        return
    missing = set()
    for file in sorted(set(names.values())):
        path = index.parent / file
        if path.is_file():
            _add_file(component, path)
        else:
            missing.add(file)
            component.problems.append(f"{_short(path)} is missing; {index.name} names it")
    for name, file in names.items():
        tensor = component.tensors.get(name)
        if file not in missing and (tensor is None or tensor.file.name != file):
            if any(_short(index.parent / file) in problem for problem in component.problems):
                continue  # the shard's own fault is reported already
            component.problems.append(f"{_short(index.parent / file)}: {name} is not in it; "
                                      f"{index.name} says so")  # fmt: skip
    for name, tensor in component.tensors.items():
        if name not in names:
            component.problems.append(
                f"{_short(tensor.file)}: {name} is not listed in {index.name}"
            )


def _add_file(component: Component, path: Path) -> None:
    try:
        stamp, tensors = read_header(path)
    except CheckpointError as error:
        component.problems.append(str(error))
        return
    component.stamps[path] = stamp
    for tensor in tensors:
        twin = component.tensors.get(tensor.name)
        if twin is not None:
            component.problems.append(f"{_short(path)}: {tensor.name} is in {twin.file.name} too")
        component.tensors[tensor.name] = tensor


def read_header(path: Path) -> tuple[Stamp, list[Tensor]]:
    """The file's identity and its tensors; raises CheckpointError if a byte is unaccounted for."""
    try:
        with open(path, "rb") as file:
            stamp = Stamp.of(os.fstat(file.fileno()))
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(
                    f"{_short(path)} has {stamp.size} bytes; a safetensors file has at least 8: "
                    "download it again"
                )
            (length,) = struct.unpack("<Q", head)
            if length > MAX_HEADER or 8 + length > stamp.size:
                raise CheckpointError(
                    f"{_short(path)}: the header says it is {length} bytes long; the file has "
                    f"{stamp.size}: it is cut off or no safetensors file"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{_short(path)} cannot be read: {error}") from error
    try:
        header = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{_short(path)}: the header is no JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{_short(path)}: the header is no JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = [_tensor(path, name, entry, start) for name, entry in header.items()]
    _check_layout(path, tensors, start, stamp.size)
    return stamp, tensors


def _tensor(path: Path, name: str, entry: Any, start: int) -> Tensor:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{_short(path)}: {name} has a malformed header entry") from error
    numbers = (*shape, begin, end)
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in numbers):
        raise CheckpointError(f"{_short(path)}: {name} has a malformed header entry")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointError(f"{_short(path)}: {name} has the unknown dtype {dtype!r}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != expected:
        raise CheckpointError(
            f"{_short(path)}: {name} {dtype} {list(shape)} needs {expected} bytes; "
            f"the header gives it {end - begin}"
        )
    return Tensor(path, name, dtype, shape, start + begin, expected)


def _check_layout(path: Path, tensors: list[Tensor], start: int, size: int) -> None:
    position = start
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"{_short(path)}: {tensor.name} begins at byte {tensor.offset}; {position} is "
                "expected (tensors overlap or leave a gap)"
            )
        position += tensor.nbytes
    if position != size:
        what = "cut off" if size < position else "longer than its header says"
        raise CheckpointError(
            f"{_short(path)} is {what}: {size} bytes; {position} are expected. Download it again"
        )


class Source:
    """Open files of one component, for positional reads from any thread. Counts bytes read."""

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
                    raise CheckpointError(f"{_short(path)} cannot be read: {error}") from error
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
                raise CheckpointError(f"{_short(path)} cannot be read: {error}") from error
            if count == 0:
                raise CheckpointError(_changed(path))
            view, offset = view[count:], offset + count

    def read_rows(self, path: Path, offset: int, stride: int, rows: np.ndarray) -> None:
        """Fill each row of `rows` (bytes) from `offset`, `offset + stride`, ..."""
        for number, row in enumerate(rows):
            self.read_into(path, offset + number * stride, row)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a file was replaced or written to while it was read."""
        for path, stamp in self._stamps.items():
            try:
                same = Stamp.of(os.stat(path)) == stamp
            except OSError as error:
                raise CheckpointError(f"{_short(path)} cannot be read: {error}") from error
            if not same:
                raise CheckpointError(_changed(path))


def _changed(path: Path) -> str:
    return f"{_short(path)} was changed while it was being loaded; load it again"


def _files(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _short(path: Path) -> str:
    """Component folder and file name: what a user needs to find the file in the model."""
    return f"{path.parent.name}/{path.name}"
