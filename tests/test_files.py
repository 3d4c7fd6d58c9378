# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, also where a process is killed in between."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from firstlight.files import draft


@pytest.fixture(params=["unnamed", "named"], autouse=True)
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With and without files that have no name yet."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE")
    return request.param


def write(folder: Path, name: str, content: bytes, *, replace: bool) -> None:
    with draft(folder) as made:
        made.file.write(content)
        made.publish(folder / name, replace=replace)


def test_a_new_file(tmp_path: Path) -> None:
    write(tmp_path, "a", b"hello", replace=False)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"hello"


def test_a_taken_name_is_not_replaced_unless_told_to(tmp_path: Path) -> None:
    write(tmp_path, "a", b"one", replace=False)
    with pytest.raises(FileExistsError):
        write(tmp_path, "a", b"two", replace=False)
    assert (tmp_path / "a").read_bytes() == b"one"
    write(tmp_path, "a", b"three", replace=True)
    assert (tmp_path / "a").read_bytes() == b"three"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError), draft(tmp_path) as made:
        made.file.write(b"half")
        raise ValueError
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_replaced(tmp_path: Path) -> None:
    """Killed between the two steps of replacing: the next writer of that file tidies up."""
    (tmp_path / ".a.new").write_bytes(b"left behind")
    write(tmp_path, "a", b"new", replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_kill_while_writing_leaves_nothing(tmp_path: Path, system: str) -> None:
    code = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom firstlight.files import draft\n"
        "with draft(Path(sys.argv[1])) as made:\n"
        "    made.file.write(b'x' * 10_000_000)\n    made.file.flush()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    assert list(tmp_path.iterdir()) == []
