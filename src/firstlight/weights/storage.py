# SPDX-License-Identifier: Apache-2.0
"""How fast the storage itself is: the bytes of a plan, read one after the other, by one thread."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from firstlight.files import draft
from firstlight.weights.plan import Plan, block_bytes, block_offset

_BUFFER = 16 << 20


def raw_read(plan: Plan) -> tuple[int, float]:
    """Read what `plan` would read, in the order of the files, into one buffer used again and again.

    Returns bytes and seconds. This is the least that any loader can take with one thread: nothing
    is kept.
    """
    ranges: dict[Path, list[tuple[int, int]]] = {}
    for block in plan.blocks():
        begin = block_offset(block)
        ranges.setdefault(block[0].tensor.file, []).append((begin, begin + block_bytes(block)))
    buffer = memoryview(bytearray(_BUFFER))
    start, total = time.perf_counter(), 0
    for path, found in ranges.items():
        handle = os.open(path, os.O_RDONLY)
        try:
            for begin, end in _joined(found):
                total += end - begin
                while begin < end:
                    count = os.preadv(handle, [buffer[: end - begin]], begin)
                    if count == 0:
                        raise OSError(f"{path} ends early")
                    begin += count
        finally:
            os.close(handle)
    return total, time.perf_counter() - start


def evict(paths: Iterable[Path]) -> bool:
    """Ask the system to forget its copies of these files; False where it cannot be asked.

    It keeps what is written to or mapped by anyone, and decides in the end.
    """
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)
    return True


def remember(folder: Path, bytes_per_second: float) -> None:
    """Keep the measured speed of the storage that `folder` is on, for later starts to compare."""
    known = _known()
    known[_device(folder)] = bytes_per_second
    path = _file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with draft(path.parent) as made:
        made.file.write(json.dumps(known).encode())
        made.publish(path, replace=True)


def recall(folder: Path) -> float | None:
    """Bytes per second that were measured of the storage that `folder` is on; None if never."""
    return _known().get(_device(folder))


def _known() -> dict[str, float]:
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RuntimeError):  # RuntimeError: no home folder
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v for k, v in found.items() if isinstance(v, int | float) and v > 0}


def _device(folder: Path) -> str:
    return str(os.stat(folder).st_dev)


def _file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "firstlight" / "storage.json"


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order; neighbours that touch become one."""
    made: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if made and made[-1][1] == begin:
            made[-1] = (made[-1][0], end)
        else:
            made.append((begin, end))
    return made
