# SPDX-License-Identifier: Apache-2.0
"""Help, exit codes and the single line that an error is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_pipeline import FakePipeline

from firstlight.errors import CheckpointError, DeviceError, RequestError

HEAVY = ("jax", "numpy", "PIL", "huggingface_hub", "tokenizers", "ml_dtypes")
FAKE = str(Path(__file__).with_name("fake_pipeline.py"))

IMPORTED = f"""
import sys
from firstlight.cli.app import run
code = run(sys.argv[1:])
print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["info", "--help"], ["--version"], [], ["generate"]],
)
def test_help_and_refusals_import_nothing_heavy(arguments):
    result = subprocess.run(
        [sys.executable, "-c", IMPORTED, *arguments], capture_output=True, text=True
    )
    assert result.returncode == (2 if arguments == ["generate"] else 0)
    assert result.stderr.splitlines()[-1] == "[]"


def test_importing_the_package_imports_nothing_heavy_and_names_errors_lazily():
    code = f"""
import sys, firstlight
assert issubclass(firstlight.ConfigError, firstlight.FirstlightError)
assert "Pipeline" in dir(firstlight) and firstlight.__version__
sys.exit(any(name in sys.modules for name in {HEAVY}))
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_pipeline_is_a_public_name():
    import firstlight
    from firstlight import pipeline

    assert firstlight.Pipeline is pipeline.Pipeline
    assert firstlight.Result is pipeline.Result


def test_a_name_the_package_does_not_have_is_an_attribute_error():
    import firstlight

    with pytest.raises(AttributeError, match="Pipelin"):
        firstlight.Pipelin  # noqa: B018


@pytest.mark.parametrize("program", [["-m", "firstlight"], [FAKE]])
def test_the_program_runs_as_a_module_and_exits_with_the_code(program):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FIRSTLIGHT_")}
    result = subprocess.run(
        [sys.executable, *program, "generate", "--steps", "0"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert (result.returncode, result.stdout) == (2, "")
    expected = "firstlight: error: steps is 0; a whole number of at least 1 is needed\n"
    assert result.stderr == expected


def test_version_is_the_package_version(command):
    import firstlight

    assert command("--version").out.strip() == firstlight.__version__


def test_help_names_every_flag_of_the_settings(command):
    from firstlight.config import EditConfig, EngineConfig, GenerateConfig, ReportConfig

    for name, picture in (("generate", GenerateConfig), ("edit", EditConfig)):
        text = command(name, "--help").out
        for config in (EngineConfig, picture, ReportConfig):
            for field in config.__dataclass_fields__:
                assert f"--{field.replace('_', '-')}" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["generate"], ["no prompt", "--prompt-file", "--like"]),
        (["generate", ""], ["prompt is ('',)", "blank"]),
        (["generate", "a", " "], ["prompt is ('a', ' ')", "blank"]),
        (["generate", "a", "--stpes", "3"], ["--stpes", "--steps", "generate --help"]),
        (["generate", "a", "--steps"], ["--steps", "requires an argument"]),
        (["generate", "a", "--steps", "x"], ["--steps is 'x'", "whole number"]),
        (["generate", "a", "--steps", "2.5"], ["--steps is '2.5'", "whole number"]),
        (["generate", "a", "--steps", "2", "--steps", "3"], ["--steps", "multiple times"]),
        (["generate", "a", "--dtype", "float16"], ["float16", "bfloat16", "float32"]),
        (["generate", "a", "--seed", "-1"], ["seed is -1", "at least 0"]),
        (["generate", "a", "--seed", "4294967296"], ["seed is 4294967296", "4294967295"]),
        (["generate", "a", "b", "--seed", "4294967295"], ["2 pictures", "4294967294"]),
        (["generate", "a", "--guidance", "x"], ["--guidance", '"x"', "float"]),
        (["generate", "a", "--guidance", "nan"], ["guidance is nan", "finite"]),
        (["generate", "a", "--quiet", "--verbose"], ["quiet and verbose exclude"]),
        (["generate", "a", "--prompt-file", "x"], ["prompt and prompt_file exclude"]),
        (["generate", "--prompt-file", "absent"], ["'absent' cannot be read"]),
        (["generate", "a", "--profile", "file/x"], ["profile is 'file/x'"]),
        (["info", "a", "b"], ["unexpected 'b'", "info --help"]),
        (["genrate", "a"], ["genrate", "generate"]),
        (["--frobnicate"], ["--frobnicate"]),
    ],
)
def test_wrong_usage_is_one_line_and_code_2_before_anything_is_loaded(command, arguments, parts):
    Path("file").touch()
    result = command(*arguments)
    assert result.code == 2
    for part in parts:
        assert part in result.error
    assert command.pipes == []
    assert [path.name for path in Path().iterdir()] == ["file"]


PROBLEMS = tuple(f"vae/x.safetensors: tensor {n} is missing" for n in range(25))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RequestError("width is 65;\n  64 or 80"), "width is 65; 64 or 80"),
        (CheckpointError("m is damaged", PROBLEMS[:2]), f"m is damaged: {'; '.join(PROBLEMS[:2])}"),
        (CheckpointError("m is absent"), "m is absent"),
        (DeviceError("the picture is not finite"), "the picture is not finite"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ZeroDivisionError("x"), "unexpected ZeroDivisionError: x (--debug shows where)"),
    ],
)
def test_a_failure_is_one_line_and_code_1_and_leaves_no_file(command, monkeypatch, error, line):
    def fail(*arguments, **named):
        raise error

    monkeypatch.setattr(FakePipeline, "stream", fail)
    result = command("generate", "a", "--quiet")
    assert (result.code, result.error) == (1, line)
    assert list(Path().iterdir()) == []


def test_many_problems_are_cut_in_the_line_and_whole_with_debug(command, monkeypatch):
    def fail(*arguments, **named):
        raise CheckpointError("m is damaged", PROBLEMS)

    monkeypatch.setattr(FakePipeline, "__init__", fail)
    result = command("generate", "a")
    assert result.error.endswith(f"{PROBLEMS[19]}; and 5 more (--debug lists them)")
    result = command("generate", "a", "--debug")
    assert "Traceback" in result.err
    assert PROBLEMS[24] in result.err
    assert result.err.splitlines()[-1].startswith("firstlight: error: m is damaged")


def test_info_prints_what_a_picture_carries(command):
    path = command("generate", "a fox", "--seed", "7").paths[0]
    result = command("info", path)
    assert result.code == 0
    entries = dict(line.split(maxsplit=1) for line in result.lines if "  " in line.strip())
    assert entries["prompt"] == "a fox"
    assert entries["seed"] == "7"
    assert entries["jax"] == "0.10.2"
    stored = json.loads(command("info", path, "--json").out)
    assert (stored["prompt"], stored["seed"]) == ("a fox", 7)
    assert stored["versions"]["jax"] == "0.10.2"


def test_info_on_a_file_without_settings_fails(command):
    Path("notes.txt").write_text("a fox")
    result = command("info", "notes.txt")
    assert (result.code, result.error) == (1, "notes.txt is not a picture")
