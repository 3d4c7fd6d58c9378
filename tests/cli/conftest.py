# SPDX-License-Identifier: Apache-2.0
"""The command line run inside the test, with the fake pipeline in place of the real one."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from fake_pipeline import FakePipeline

from firstlight.cli import drawing
from firstlight.cli.app import run


@dataclasses.dataclass
class Finished:
    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def paths(self) -> list[Path]:
        return [Path(line.split("\t")[0]) for line in self.lines]

    @property
    def error(self) -> str:
        """The single line of stderr; a failure must print exactly one."""
        assert self.out == ""
        (line,) = self.err.splitlines()
        assert line.startswith("firstlight: error: ")
        return line.removeprefix("firstlight: error: ")


class Command:
    def __init__(self, capsys):
        self.capsys = capsys
        self.pipes: list[FakePipeline] = []
        self.environment: dict = {}

    def open(self, *arguments):
        self.pipes.append(FakePipeline(*arguments, **self.environment))
        return self.pipes[-1]

    def __call__(self, *arguments) -> Finished:
        self.pipes.clear()
        self.capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        out, err = self.capsys.readouterr()
        return Finished(code, out, err)

    @property
    def engine(self):
        (pipe,) = self.pipes
        return pipe.engine

    @property
    def request(self) -> dict:
        (pipe,) = self.pipes
        return pipe.calls[0]


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Call it with arguments; it runs in an empty folder, with no FIRSTLIGHT_* variables set."""
    for name in [name for name in os.environ if name.startswith("FIRSTLIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    command = Command(capsys)
    monkeypatch.setattr(drawing, "_open_pipeline", command.open)
    return command
