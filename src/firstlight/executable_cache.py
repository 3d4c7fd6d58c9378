# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept on disk: a second start compiles nothing.

An entry is one file: a magic line, the SHA-256 of all that follows, the length of a JSON
description, the description (the fields its key is made of), the payload. Executables are code, so
the folder must belong to this user and be writable by nobody else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.environment import differences
from firstlight.errors import ConfigError, FirstlightWarning
from firstlight.files import draft

_KIND = b"firstlight executable "
MAGIC = _KIND + b"2\n"
_HEAD = len(MAGIC) + 32 + 8

FOLDER_VARIABLE = "FIRSTLIGHT_EXECUTABLE_CACHE"
SIZE_VARIABLE = "FIRSTLIGHT_EXECUTABLE_CACHE_BYTES"
DEFAULT_SIZE = 10 << 30


def default_folder() -> Path:
    """`$FIRSTLIGHT_EXECUTABLE_CACHE`, else `firstlight/executables` in the user's cache folder."""
    chosen = os.environ.get(FOLDER_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "firstlight" / "executables"


def size_limit() -> int:
    """`$FIRSTLIGHT_EXECUTABLE_CACHE_BYTES`, else 10 GiB. Raises ConfigError if it is no number."""
    chosen = os.environ.get(SIZE_VARIABLE) or str(DEFAULT_SIZE)
    if not chosen.isascii() or not chosen.isdigit():
        raise ConfigError(f"{SIZE_VARIABLE} is {chosen!r}; a whole number of bytes is needed")
    return int(chosen)


@dataclass(frozen=True)
class Entry:
    """One kept program: its key, the file's bytes, when it was last used, its description."""

    key: str
    nbytes: int
    used: float
    fields: dict[str, Any]


class ExecutableCache:
    """Entries by key (a hex digest). An entry that is no good is a miss, never an error."""

    def __init__(self, folder: Path, limit: int = DEFAULT_SIZE) -> None:
        self.folder = folder
        self.limit = limit

    @classmethod
    def open(cls, folder: Path | None = None) -> ExecutableCache | None:
        """The cache in `folder` (created, private, if absent); None with a warning if unusable.

        Raises ConfigError if the environment's size limit is no number.
        """
        limit = size_limit()
        try:
            folder = default_folder() if folder is None else folder.expanduser()
        except RuntimeError as error:
            _warn(f"compiled programs are not kept: {error}")
            return None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.stat()
        except OSError as error:
            _warn(f"compiled programs are not kept: {folder} cannot be used ({error})")
            return None
        if hasattr(os, "getuid") and (
            status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        ):
            _warn(
                f"compiled programs are not kept: {folder} can be written by other users "
                "(programs are code); make it yours with mode 700 or choose another folder"
            )
            return None
        return cls(folder, limit)

    def read(self, key: str) -> bytes | None:
        """The payload under `key`, or None. A damaged entry is removed with one warning."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        if not _is_intact(content):
            self.drop(key, "it is damaged")
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the time of use decides what is evicted first
        return content[_HEAD + _description_bytes(content) :]

    def write(self, key: str, payload: bytes, fields: Mapping[str, Any]) -> None:
        """Keep `payload` under `key`; on failure (a full disk) warn and leave no partial file.

        `fields` are what the key is made of. The entries used longest ago make room.
        """
        description = json.dumps(fields, sort_keys=True).encode()
        body = struct.pack("<Q", len(description)) + description + payload
        if len(MAGIC) + 32 + len(body) > self.limit:
            _warn(
                f"a compiled program of {len(body)} bytes is not kept: {SIZE_VARIABLE} allows "
                f"{self.limit}"
            )
            return
        try:
            with draft(self.folder) as made:
                made.file.write(MAGIC + hashlib.sha256(body).digest() + body)
                made.publish(self._path(key), replace=True)
            self._evict(keep=key)
        except OSError as error:
            _warn(f"a compiled program could not be kept in {self.folder}: {error}")

    def drop(self, key: str, reason: str) -> None:
        """Remove an unusable entry and say so once; the program is then compiled afresh."""
        path = self._path(key)
        with contextlib.suppress(OSError):  # it may lie where nothing can be removed
            path.unlink(missing_ok=True)
        _warn(f"the kept program {path.name} is dropped: {reason}; it is compiled afresh")

    def entries(self) -> list[Entry]:
        """All entries, those used last first; files that are no entries are left out."""
        found = (self._entry(path) for path in self._files())
        return sorted(filter(None, found), key=lambda entry: entry.used, reverse=True)

    def clear(self) -> tuple[int, int]:
        """Remove all entries; returns their number and bytes."""
        count = nbytes = 0
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                size = path.stat().st_size
                path.unlink()
                count, nbytes = count + 1, nbytes + size
        return count, nbytes

    def explain(self, key: str, fields: Mapping[str, Any]) -> list[str] | None:
        """Why there is no entry for `key`: what sets it apart from the most similar entry of the
        same program, or that there is none. None if there is an entry."""
        if self._path(key).is_file():
            return None
        fields = json.loads(json.dumps(fields))  # as it is stored
        named = fields.get("program")
        similar = [
            _differences(entry.fields, fields)
            for entry in self.entries()
            if entry.fields.get("program") == named
        ]
        return min(similar, key=len) if similar else [f"no program {named!r} was kept before"]

    def _evict(self, keep: str) -> None:
        found = [(path, path.stat()) for path in self._files()]
        total = sum(status.st_size for _, status in found)
        for path, status in sorted(found, key=lambda pair: pair[1].st_mtime):
            if total <= self.limit:
                return
            if path != self._path(keep):
                path.unlink(missing_ok=True)
                total -= status.st_size

    def _files(self) -> Iterator[Path]:
        """Files that begin as entries do, of any version: nothing else is ours to remove."""
        for path in self.folder.glob("*.exe"):
            with contextlib.suppress(OSError), open(path, "rb") as file:
                if file.read(len(_KIND)) == _KIND:
                    yield path

    def _entry(self, path: Path) -> Entry | None:
        try:
            with open(path, "rb") as file:
                head = file.read(_HEAD)
                if head[: len(MAGIC)] != MAGIC or len(head) < _HEAD:
                    return None
                status = os.fstat(file.fileno())
                length = _description_bytes(head)
                if length > status.st_size:
                    return None
                fields = json.loads(file.read(length))
        except (OSError, ValueError):
            return None
        return Entry(path.stem, status.st_size, status.st_mtime, fields)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.exe"


def _differences(before: Any, now: Any) -> list[str]:
    """One line for each field that differs: `versions.jax: 0.10.2 then, 0.11.0 now`."""
    found = differences(before, now, absent="absent", joint=".")
    return [f"{name}: {_short(old)} then, {_short(new)} now" for name, old, new in found]


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_intact(content: bytes) -> bool:
    return (
        len(content) >= _HEAD
        and content[: len(MAGIC)] == MAGIC
        and content[len(MAGIC) : len(MAGIC) + 32]
        == hashlib.sha256(memoryview(content)[len(MAGIC) + 32 :]).digest()
    )


def _description_bytes(content: bytes) -> int:
    (length,) = struct.unpack_from("<Q", content, len(MAGIC) + 32)
    return length


def _warn(message: str) -> None:
    warnings.warn(message, FirstlightWarning, stacklevel=3)
