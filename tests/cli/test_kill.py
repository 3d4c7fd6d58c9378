# SPDX-License-Identifier: Apache-2.0
"""kill -9 at any moment leaves nothing half-written, and the next start works."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from firstlight.executable_cache import ExecutableCache

MOMENTS = 20


def start(tmp_path: Path, name: str) -> subprocess.Popen:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTLIGHT_")}
    return subprocess.Popen(
        [
            sys.executable, "-m", "firstlight", "generate", "a red apple", "--seed", "1",
            "--quiet", "--steps", "2", "--overwrite", "--output", str(tmp_path / "out" / name),
            "--executable-cache", str(tmp_path / "kept"),
        ],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def pixels(path: Path) -> bytes:
    with Image.open(path) as image:
        return image.tobytes()


def test_kill_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(0)
    (tmp_path / "out").mkdir()
    first = start(tmp_path, "expected.png")
    assert first.communicate()[1] == "" and first.returncode == 0
    expected = pixels(tmp_path / "out" / "expected.png")
    kept = sorted(path.name for path in (tmp_path / "kept").iterdir())
    killed = 0
    for _ in range(MOMENTS):
        # A program is missing, so that the killed start has something to write.
        (tmp_path / "kept" / rng.choice(kept)).unlink(missing_ok=True)
        process = start(tmp_path, "killed.png")
        time.sleep(rng.uniform(0.05, 3.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
        for path in (tmp_path / "kept").iterdir():
            assert path.name in kept
            assert ExecutableCache(tmp_path / "kept").read(path.stem) is not None
        for path in (tmp_path / "out").iterdir():
            assert path.name in ("expected.png", "killed.png")
            assert pixels(path) == expected
        after = start(tmp_path, "killed.png")
        _, err = after.communicate()
        assert (after.returncode, err) == (0, "")
        assert pixels(tmp_path / "out" / "killed.png") == expected
        assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == kept
        (tmp_path / "out" / "killed.png").unlink()
    assert killed >= MOMENTS // 3, "the moments come too late to test anything"


def test_two_starts_at_once_share_a_cache(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    both = [start(tmp_path, f"{name}.png") for name in "ab"]
    results = [(process.communicate()[1], process.returncode) for process in both]
    assert results == [("", 0), ("", 0)]
    assert pixels(tmp_path / "out" / "a.png") == pixels(tmp_path / "out" / "b.png")
    kept = list((tmp_path / "kept").iterdir())
    assert len(kept) == 4
    assert all(ExecutableCache(tmp_path / "kept").read(path.stem) for path in kept)
