# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C on a real process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FAKE = str(Path(__file__).with_name("fake_pipeline.py"))


def _start(tmp_path, *flags):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTLIGHT_")}
    environment["FAKE_SECONDS_PER_STEP"] = "0.05"
    return subprocess.Popen(
        [sys.executable, FAKE, "generate", "a fox", "--steps", "10000", *flags],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    "flags", [["--verbose"], ["--verbose", "--debug"], ["--verbose", "--json"]]
)
def test_ctrl_c_ends_with_one_line_and_no_file(tmp_path, flags):
    process = _start(tmp_path, *flags)
    for line in process.stderr:
        if line.startswith("denoise 2 "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert [line for line in err.splitlines() if not line.startswith("denoise ")] == [
        "firstlight: interrupted"
    ]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_does_not_wait_for_threads(tmp_path):
    code = f"""
import runpy, sys, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
runpy.run_path({FAKE!r}, run_name="__main__")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "generate", "a", "--steps", "10000", "--verbose"],
        cwd=tmp_path,
        env={**os.environ, "FAKE_SECONDS_PER_STEP": "0.05"},
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("denoise 2 "):
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == 130


def test_ctrl_c_during_the_first_imports_is_one_line_too(tmp_path):
    code = """
import sys, types
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Finder())
from firstlight.cli import main
main()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr == "firstlight: interrupted\n"


@pytest.mark.parametrize("seconds", [0.15, 0.3, 0.45, 0.6, 0.75])
def test_ctrl_c_while_things_are_imported(tmp_path, seconds):
    """An exception raised inside an import would leave its lock taken, and the process waiting."""
    process = subprocess.Popen(
        [sys.executable, "-m", "firstlight", "generate", "a fox", "--quiet"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    # The very first moments are the interpreter's own, whose traceback nobody can prevent.
    assert process.returncode in (130, -signal.SIGINT)
    assert list(tmp_path.iterdir()) == []
    if process.returncode == 130:
        assert err == "firstlight: interrupted\n"
