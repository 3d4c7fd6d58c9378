# SPDX-License-Identifier: Apache-2.0
"""Files that appear under their name only when they are complete, whatever happens before."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# What opening a file without a name raises where the file system has none.
_NO_UNNAMED = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOSYS, errno.ENOENT)
# What os.link raises where a file system has no hard links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Draft:
    """A file being written in the folder where it is to appear."""

    def __init__(self, file: BinaryIO, name: Path | None) -> None:
        self.file = file
        self._name = name

    def publish(self, path: Path, *, replace: bool) -> None:
        """Give the file its name; raises `FileExistsError` if that is taken and not to be replaced.

        May be called again with another name after that error.
        """
        self.file.flush()
        if not replace:
            self._link(path)
            return
        # A name that the next writer of the same file finds again, if this process dies here.
        aside = path.with_name(f".{path.name}.new")
        while True:
            aside.unlink(missing_ok=True)
            try:
                self._link(aside)
                os.replace(aside, path)
                return
            except (FileExistsError, FileNotFoundError):
                if not path.parent.is_dir() or (self._name and not self._name.exists()):
                    raise
                continue  # another process replaces the same file: whoever is last wins
            except BaseException:
                aside.unlink(missing_ok=True)
                raise

    def _link(self, path: Path) -> None:
        if self._name is None:
            # The folder's descriptor is not used; giving one selects the call that follows the
            # link in /proc.
            source, options = f"/proc/self/fd/{self.file.fileno()}", {"src_dir_fd": 0}
            os.link(source, path, **options, follow_symlinks=True)
            return
        try:
            os.link(self._name, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            _rename_without_replacing(self._name, path)


@contextlib.contextmanager
def draft(folder: Path) -> Iterator[Draft]:
    """Create a file in `folder` that nobody sees before it is published.

    Where the system allows it the file has no name at all until then, so that not even a killed
    process leaves anything behind.
    """
    file, name = _open(folder)
    try:
        with file:
            yield Draft(file, name)
    finally:
        if name is not None:
            name.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Raise `OSError` unless a file can be created in `folder` (permission bits do not tell)."""
    with draft(folder):
        pass


def _open(folder: Path) -> tuple[BinaryIO, Path | None]:
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            return os.fdopen(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o666), "w+b"), None
        except OSError as error:
            if error.errno not in _NO_UNNAMED:
                raise
    name = folder / f".firstlight-{os.urandom(8).hex()}.tmp"
    handle = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o666)
    return os.fdopen(handle, "w+b"), name


def _rename_without_replacing(source: Path, path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    try:
        os.replace(source, path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
