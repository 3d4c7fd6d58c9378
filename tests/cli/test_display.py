# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from firstlight.cli.display import Bars, Display, Lines, describe, make_display
from firstlight.config import ReportConfig

FAKE = str(Path(__file__).with_name("fake_pipeline.py"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("load", 500_000, 2_000_000, 0.5), "load 0.5 of 2.0 MB, 1 MB/s"),
        (("download", 3_000_000_000, 8_000_000_000, 10), "download 3.0 of 8.0 GB, 300 MB/s"),
        (("load", 0, 2_000_000, 0.0), "load 0.0 of 2.0 MB"),
        (("compile", 1, 3, 1.0), "compile 1 of 3 programs"),
        (("denoise", 2, 4, 1.0), "denoise 2 of 4 steps"),
        (("decode", 2, 4, 1.0), "decode 2 of 4 pictures"),
    ],
)
def test_an_advance_in_words(arguments, text):
    assert describe(*arguments) == text


def test_the_display_follows_the_settings_and_the_terminal(monkeypatch):
    assert type(make_display(ReportConfig(quiet=True))) is Display
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert type(make_display(ReportConfig())) is Lines
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert type(make_display(ReportConfig())) is Bars
    assert type(make_display(ReportConfig(quiet=True))) is Display


def test_a_long_stage_tells_that_it_is_alive(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    lines = Lines()
    for done in range(0, 21):
        lines.advance("denoise", done, 20)
        now[0] += 1.0
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "denoise 5 of 20 steps",
        "denoise 10 of 20 steps",
        "denoise 15 of 20 steps",
        "denoise 20 of 20 steps in 20.00 s",
    ]


def test_every_step_is_told_on_request_but_not_every_chunk_of_a_file(capsys):
    lines = Lines(every=True)
    for stage in ("load", "denoise"):
        for done in range(4):
            lines.advance(stage, done, 3)
    told = [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line.split(" ")[0] for line in told] == ["load"] + ["denoise"] * 4


def test_a_stage_without_work_is_not_told(capsys):
    Lines().advance("compile", 0, 0)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [Lines, Bars])
def test_advances_may_come_from_many_threads(make, capsys):
    with make() as display:
        threads = [
            threading.Thread(target=lambda: [display.advance("load", n, 1000) for n in range(500)])
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        display.advance("load", 1000, 1000)
    assert "of 0.0 MB" in capsys.readouterr().err


def test_bars_show_every_stage_and_stay_on_screen(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with Bars() as bars:
        for _ in range(2):
            bars.advance("denoise", 1, 2)
            bars.advance("denoise", 2, 2)
        bars.advance("compile", 0, 0)
        bars.note("[bold]total 1.00 s[/bold]")
    text = terminal.getvalue()
    last = text[text.rindex("denoise 2 of 2 steps") - 400 :]
    assert last.count("denoise 2 of 2 steps") >= 2
    assert "[bold]total 1.00 s[/bold]" in text


def test_a_terminal_gets_bars_and_a_pipe_does_not(tmp_path):
    pty = pytest.importorskip("pty", reason="pseudo-terminals are a POSIX feature")
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    process = subprocess.Popen(
        [sys.executable, FAKE, "generate", "a", "--seed", "1"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # how Linux tells that the other end is closed
            break
        if not shown:
            break
    os.close(ours)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out == b"a-1.png\tseed 1\n"
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}".encode() in shown
    assert b"save 1 of 1 pictures" in shown
