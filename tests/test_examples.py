# SPDX-License-Identifier: Apache-2.0
"""Every example runs as it stands, in an empty folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PICTURES = {"edit": 3, "one_picture": 1, "many_prompts": 6, "own_noise": 0}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert len(list(tmp_path.glob("*.png"))) == PICTURES[path.stem]
