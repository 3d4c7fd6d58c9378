# SPDX-License-Identifier: Apache-2.0
"""Flags > the picture of --like > environment > YAML > defaults, for every setting."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

DEFAULT = {"steps": None, "num_images": 1, "dtype": "bfloat16", "is_distilled": None}
VALUES = {
    "steps": {"flag": 11, "picture": 12, "environment": 13, "yaml": 14},
    "dtype": {
        "flag": "float32",
        "picture": "bfloat16",
        "environment": "float32",
        "yaml": "bfloat16",
    },
    "is_distilled": {"flag": False, "picture": True, "environment": False, "yaml": True},
    "num_images": {"flag": 2, "environment": 3, "yaml": 4},
}
ORDER = ("flag", "picture", "environment", "yaml")


def _observed(command, name):
    request = {"steps": "num_inference_steps", "num_images": "num_images_per_prompt"}
    return command.request[request[name]] if name in request else getattr(command.engine, name)


def _flag(name, value):
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    return [f"--{flag}", value]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        (name, given)
        for name, values in VALUES.items()
        for count in range(len(values) + 1)
        for given in itertools.combinations(values, count)
    ],
)
def test_precedence(command, monkeypatch, name, given):
    values = VALUES[name]
    arguments = ["a fox"]
    if "picture" in given:
        made = command("generate", "a fox", *_flag(name, values["picture"])).paths[0]
        arguments += ["--like", made]
    if "yaml" in given:
        Path("run.yaml").write_text(f"{name}: {values['yaml']}\n")
        arguments += ["--config", "run.yaml"]
    if "environment" in given:
        monkeypatch.setenv(f"FIRSTLIGHT_{name.upper()}", str(values["environment"]))
    if "flag" in given:
        arguments += _flag(name, values["flag"])
    assert command("generate", *arguments).code == 0
    expected = next((values[source] for source in ORDER if source in given), DEFAULT[name])
    assert _observed(command, name) == expected


SAMPLES = {
    "model": ("klein-4b", "klein-4b"),
    "revision": ("v1", "v1"),
    "dtype": ("float32", "float32"),
    "is_distilled": ("false", False),
    "offline": ("true", True),
    "cache_dir": ("hub", Path("hub")),
    "images_per_device": ("2", 2),
    "mesh": ("data=2,model=1", "data=2,model=1"),
}


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("source", ["environment", "yaml"])
def test_every_engine_setting_can_come_from_environment_and_yaml(
    command, monkeypatch, name, source
):
    text, value = SAMPLES[name]
    Path("run.yaml").write_text(f"{name}: {text}\n" if source == "yaml" else "")
    if source == "environment":
        monkeypatch.setenv(f"FIRSTLIGHT_{name.upper()}", text)
    assert command("generate", "a", "--config", "run.yaml").code == 0
    assert getattr(command.engine, name) == value


def test_yaml_keys_may_be_written_with_hyphens_and_empty_values_count_as_absent(command):
    Path("run.yaml").write_text("num-images: 2\nsteps:\nprompt: [a red fox, '#1: \"b\"']\n")
    assert command("generate", "--config", "run.yaml").code == 0
    assert command.request["prompt"] == ["a red fox", '#1: "b"']
    assert command.request["num_images_per_prompt"] == 2
    assert command.request["num_inference_steps"] is None


@pytest.mark.parametrize("prompt", ["a fox, red", '["a", "b"]', '{"a": 1}', "3", "null", "a=b"])
def test_a_prompt_arrives_as_written_from_everywhere(command, monkeypatch, prompt):
    path = command("generate", prompt).paths[0]
    assert command.request["prompt"] == [prompt]
    assert command("generate", "--like", path).code == 0
    assert command.request["prompt"] == [prompt]
    monkeypatch.setenv("FIRSTLIGHT_PROMPT", prompt)
    assert command("generate").code == 0
    assert command.request["prompt"] == [prompt]


def test_a_prompt_may_begin_with_a_hyphen(command):
    assert command("generate", "--", "--fox").code == 0
    assert command.request["prompt"] == ["--fox"]


def test_the_first_source_that_says_what_to_draw_decides(command, monkeypatch):
    Path("prompts.txt").write_text("from the file\n")
    Path("run.yaml").write_text("prompt: from yaml\n")
    assert command("generate", "--prompt-file", "prompts.txt", "--config", "run.yaml").code == 0
    assert command.request["prompt"] == ["from the file"]
    monkeypatch.setenv("FIRSTLIGHT_PROMPT_FILE", "prompts.txt")
    assert command("generate", "from the flag", "--config", "run.yaml").code == 0
    assert command.request["prompt"] == ["from the flag"]
    assert command("generate", "--config", "run.yaml").code == 0
    assert command.request["prompt"] == ["from the file"]
    Path("run.yaml").write_text("prompt: a\nprompt_file: prompts.txt\n")
    monkeypatch.delenv("FIRSTLIGHT_PROMPT_FILE")
    assert "exclude each other" in command("generate", "--config", "run.yaml").error


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("stepz: 4", ["run.yaml", "'stepz'", "did you mean steps"]),
        ("generate:\n  steps: 4", ["run.yaml", "'generate'"]),
        ("config: other.yaml", ["run.yaml", "'config'"]),
        ("like: a.png", ["run.yaml", "'like'"]),
        ("steps: {a: 1}", ["run.yaml", "steps is a mapping"]),
        ("steps: [1, 2]", ["run.yaml", "steps"]),
        ("steps: 2.5", ["run.yaml: steps is '2.5'", "whole number"]),
        ("steps: true", ["run.yaml", "steps", "True"]),
        ("steps: 0", ["steps is 0"]),
        ("dtype: float16", ["run.yaml", "float16", "bfloat16"]),
        ("offline: maybe", ["run.yaml", "offline", "maybe"]),
        ("- a", ["run.yaml", "list"]),
        ("a: [", ["run.yaml", "not valid YAML", "line 1"]),
        ("a: \x00", ["run.yaml", "not valid YAML"]),
    ],
)
def test_a_bad_yaml_file_is_refused_with_its_name(command, text, parts):
    Path("run.yaml").write_text(text)
    result = command("generate", "a", "--config", "run.yaml")
    assert result.code == 2
    for part in parts:
        assert part in result.error
    assert command.pipes == []


def test_a_yaml_file_that_is_absent_is_refused(command):
    result = command("generate", "a", "--config", "absent.yaml")
    assert result.code == 2
    assert "'absent.yaml'" in result.error


def test_a_bad_environment_variable_is_refused_with_its_name(command, monkeypatch):
    monkeypatch.setenv("FIRSTLIGHT_STEPS", "many")
    result = command("generate", "a")
    assert result.code == 2
    assert "FIRSTLIGHT_STEPS" in result.error


def test_an_unknown_environment_variable_is_a_warning(command, monkeypatch):
    monkeypatch.setenv("FIRSTLIGHT_STEPZ", "4")
    monkeypatch.setenv("FIRSTLIGHT_EXECUTABLE_CACHE", "cache")
    result = command("generate", "a")
    warnings = [line for line in result.err.splitlines() if "warning" in line]
    assert result.code == 0
    (line,) = warnings
    assert line.startswith("firstlight: warning: FIRSTLIGHT_STEPZ ignored")
    assert line.endswith("did you mean steps?")


def test_info_takes_what_it_shares_with_generate_from_the_environment(command, monkeypatch):
    monkeypatch.setenv("FIRSTLIGHT_STEPS", "3")
    monkeypatch.setenv("FIRSTLIGHT_MODEL", "absent.png")
    Path("absent.png").write_text("text")
    result = command("info")
    assert result.error == "absent.png is not a picture"
