# SPDX-License-Identifier: Apache-2.0
"""Compiled programs kept on disk: a second start compiles nothing.

An entry is one file: a magic line, the SHA-256 of the payload, the payload. Executables are code,
so the folder must belong to this user and be writable by nobody else.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import warnings
from pathlib import Path

from firstlight.errors import FirstlightWarning

MAGIC = b"firstlight executable 1\n"


def default_folder() -> Path:
    """`$FIRSTLIGHT_EXECUTABLE_CACHE`, else `firstlight/executables` in the user's cache folder."""
    chosen = os.environ.get("FIRSTLIGHT_EXECUTABLE_CACHE")
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "firstlight" / "executables"


class ExecutableCache:
    """Entries by key (a hex digest). An entry that is no good is a miss, never an error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls, folder: Path | None = None) -> ExecutableCache | None:
        """The cache in `folder` (created, private, if absent); None with a warning if unusable."""
        folder = default_folder() if folder is None else folder
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
        return cls(folder)

    def read(self, key: str) -> bytes | None:
        """The payload under `key`, or None. A damaged entry is removed with one warning."""
        path = self._path(key)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        head = len(MAGIC) + 32
        payload = content[head:]
        if content[: len(MAGIC)] == MAGIC and content[len(MAGIC) : head] == _digest(payload):
            return payload
        self.drop(key, "it is damaged")
        return None

    def write(self, key: str, payload: bytes) -> None:
        """Keep `payload` under `key`; on failure (a full disk) warn and leave no partial file."""
        temporary = None
        try:
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".writing-")
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + _digest(payload) + payload)
            os.replace(temporary, self._path(key))
        except OSError as error:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)
            _warn(f"a compiled program could not be kept in {self.folder}: {error}")

    def drop(self, key: str, reason: str) -> None:
        """Remove an unusable entry and say so once; the program is then compiled afresh."""
        path = self._path(key)
        path.unlink(missing_ok=True)
        _warn(f"the kept program {path.name} is dropped: {reason}; it is compiled afresh")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.exe"


def _digest(payload: bytes) -> bytes:
    return hashlib.sha256(payload).digest()


def _warn(message: str) -> None:
    warnings.warn(message, FirstlightWarning, stacklevel=3)
