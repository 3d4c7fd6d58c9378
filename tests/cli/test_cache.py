# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest

from firstlight.cli.app import run
from firstlight.executable_cache import ExecutableCache


@pytest.fixture
def cache(tmp_path: Path) -> ExecutableCache:
    made = ExecutableCache.open(tmp_path / "kept")
    assert made is not None
    fields = {"program": "noise 128x128", "devices": [["cpu", "cpu: X", 0, 0]], "versions": {}}
    made.write("aa11", b"x" * 1000, fields)
    made.write("bb22", b"x" * 2000, {**fields, "program": "decode 128x128 pil"})
    return made


def firstlight(capsys, *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run([str(argument) for argument in arguments])
    return (code, *capsys.readouterr())


def test_list(cache, capsys) -> None:
    code, out, err = firstlight(capsys, "cache", "--executable-cache", cache.folder)
    assert (code, err) == (0, "")
    assert "noise 128x128  (1 x cpu: X)" in out and "2 programs" in out
    _, out, _ = firstlight(capsys, "cache", "--executable-cache", cache.folder, "--json")
    listed = json.loads(out)
    assert {entry["program"] for entry in listed["programs"]} == {
        "noise 128x128", "decode 128x128 pil",
    }  # fmt: skip
    assert listed["bytes"] == sum(entry["bytes"] for entry in listed["programs"])


def test_clear(cache, capsys) -> None:
    code, out, _ = firstlight(capsys, "cache", "--clear", "--executable-cache", cache.folder)
    assert code == 0 and "2 programs removed" in out
    assert list(cache.folder.iterdir()) == []


def test_why(cache, capsys) -> None:
    """Beside a program of the same name, what differs; of others, that they were never kept."""
    where = ("--executable-cache", cache.folder, "--json")
    code, out, _ = firstlight(capsys, "cache", "--why", *where)
    assert code == 0
    reasons = json.loads(out)["programs"]
    assert reasons["denoise 128x128 48"] == ["no program 'denoise 128x128 48' was kept before"]
    assert any(line.startswith("devices: ") for line in reasons["noise 128x128"])
    assert any(line.startswith("versions.jax: absent then") for line in reasons["noise 128x128"])


def test_why_not_after_a_start(tmp_path: Path, capsys) -> None:
    from firstlight import Pipeline

    pipe = Pipeline.from_pretrained("demo", executable_cache=tmp_path / "kept")
    pipe._engine.compiler.flush()
    _, out, _ = firstlight(capsys, "cache", "--why", "--executable-cache", tmp_path / "kept")
    assert [line.split(": ")[1] for line in out.splitlines()] == ["kept"] * 4


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--why", "--clear"], "why and clear exclude each other"),
        (["--executable-cache", "off"], "executable_cache is 'off'"),
    ],
)
def test_refused(capsys, flags: list[str], message: str) -> None:
    code, _, err = firstlight(capsys, "cache", *flags)
    assert code == 2 and message in err


def test_bench_refuses_what_makes_no_sense(tmp_path: Path, capsys) -> None:
    assert firstlight(capsys, "bench", "cold", "--runs", 0)[0] == 2
    assert firstlight(capsys, "bench", "make", tmp_path / "x", "--model", "5b")[0] == 2
    assert not (tmp_path / "x").exists()
