# SPDX-License-Identifier: Apache-2.0
"""What is asked of the pipeline, what is printed, and what is on disk afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from fake_pipeline import FakePipeline

from firstlight.errors import DeviceError, FirstlightWarning
from firstlight.image import read_metadata

FAKE = str(Path(__file__).with_name("fake_pipeline.py"))


def test_defaults_are_left_to_the_model(command):
    result = command("generate", "a fox")
    assert result.code == 0
    assert command.engine.model == "demo"
    assert command.request == {
        "prompt": ["a fox"],
        "height": None,
        "width": None,
        "num_inference_steps": None,
        "guidance_scale": None,
        "negative_prompt": None,
        "time_shift": "reference",
        "num_images_per_prompt": 1,
        "max_sequence_length": None,
        "seed": None,
    }


def test_flags_reach_the_pipeline(command):
    flags = "--width 64 --height 80 --steps 3 --guidance 2.5 --seed 9 --num-images 2"
    result = command("generate", "a fox", *flags.split(), "--max-sequence-length", "20")
    assert result.code == 0
    assert command.request == {
        "prompt": ["a fox"],
        "height": 80,
        "width": 64,
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "negative_prompt": None,
        "time_shift": "reference",
        "num_images_per_prompt": 2,
        "max_sequence_length": 20,
        "seed": 9,
    }


def test_several_prompts_are_one_call_and_each_picture_prints_path_and_seed(command):
    result = command("generate", "a fox", "a cat", "--num-images", "2", "--seed", "7")
    assert len(command.pipes[0].calls) == 1
    assert result.lines == [
        "a-fox-7.png\tseed 7",
        "a-fox-8.png\tseed 8",
        "a-cat-9.png\tseed 9",
        "a-cat-10.png\tseed 10",
    ]
    stored = [read_metadata(path) for path in result.paths]
    assert [entry["seed"] for entry in stored] == [7, 8, 9, 10]
    assert [entry["prompt"] for entry in stored] == ["a fox", "a fox", "a cat", "a cat"]


def test_a_seed_that_was_not_given_is_printed_and_stored(command):
    result = command("generate", "a fox", "--quiet")
    (line,) = result.lines
    seed = int(line.split("\tseed ")[1])
    assert read_metadata(result.paths[0])["seed"] == seed
    assert result.err == ""


def test_json_is_one_document(command):
    result = command("generate", "a fox", "--seed", "7", "--num-images", "2", "--json")
    document = json.loads(result.out)
    assert set(document) == {"images", "timings", "repeat"}
    first, second = document["images"]
    assert {name: first[name] for name in ("path", "seed", "prompt")} == {
        "path": "a-fox-7.png",
        "seed": 7,
        "prompt": "a fox",
    }
    assert second["seed"] == 8
    assert first["metadata"] == read_metadata("a-fox-7.png")
    timings = document["timings"]
    path = timings["critical_path"]
    assert sum(seconds for _, seconds in path) == pytest.approx(timings["total"])
    names = {name for name, _ in path}
    assert {"process start", "command line", "first image"} <= names
    assert timings["limited_by"] in names
    assert set(timings["stages"]) == {"encode", "denoise", "decode"}
    assert len(document["repeat"]["seconds"]) == 1


def test_repeat_makes_the_same_pictures_again_and_reports_each_time(command):
    result = command("generate", "a fox", "--repeat", "4", "--json")
    (pipe,) = command.pipes
    seeds = [call["seed"] for call in pipe.calls]
    document = json.loads(result.out)
    assert seeds == [None] + [[document["images"][0]["seed"]]] * 3
    repeat = document["repeat"]
    ranked = sorted(repeat["seconds"])
    assert len(ranked) == 4
    assert repeat["min"] == ranked[0]
    assert repeat["median"] == pytest.approx((ranked[1] + ranked[2]) / 2)
    spans = [span["name"] for span in document["timings"]["spans"]]
    assert spans.count("repetition") >= 3
    assert len(list(Path().iterdir())) == 1
    err = command("generate", "a fox", "--repeat", "3").err
    assert sum(line.startswith("repetition ") for line in err.splitlines()) == 3
    assert "median" in err


def test_pictures_of_one_run_never_replace_each_other(command):
    for flags in ([], ["--overwrite"]):
        result = command("generate", "a", "b", "--output", "x.png", *flags)
        assert [read_metadata(path)["prompt"] for path in result.paths] == ["a", "b"]
    assert sorted(path.name for path in Path().iterdir()) == ["x-1.png", "x-2.png", "x.png"]


def test_a_file_that_exists_stays_unless_overwrite_is_given(command):
    Path("x.png").write_text("mine")
    assert command("generate", "a", "--output", "x.png").paths == [Path("x-1.png")]
    assert Path("x.png").read_text() == "mine"
    assert command("generate", "a", "--output", "x.png", "--overwrite").paths == [Path("x.png")]
    assert read_metadata("x.png")["prompt"] == "a"


def test_two_commands_at_once_keep_all_their_pictures(tmp_path):
    argv = [sys.executable, FAKE, "generate", "a", "--output", "x.png", "--num-images", "20"]
    processes = [
        subprocess.Popen([*argv, "--seed", seed], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for seed in ("100", "200")
    ]
    printed = [
        line for process in processes for line in process.communicate(timeout=60)[0].split("\n")
    ]
    paths = [line.split("\t")[0] for line in printed if line]
    assert len(set(paths)) == 40
    seeds = {read_metadata(tmp_path / path)["seed"] for path in paths}
    assert seeds == {*range(100, 120), *range(200, 220)}


def test_prompts_from_a_file_skip_blank_lines_and_comments(command):
    text = "\ufeffa fox\n\n  # not this\n  a cat  \r\n#nor this\nthe 1# dog"
    Path("prompts.txt").write_text(text, encoding="utf-8")
    assert command("generate", "--prompt-file", "prompts.txt").code == 0
    assert command.request["prompt"] == ["a fox", "a cat", "the 1# dog"]


@pytest.mark.parametrize("data", [b"", b"# only this\n\n", b"\xff\xfe\xff"])
def test_a_prompt_file_without_prompts_is_refused(command, data):
    Path("prompts.txt").write_bytes(data)
    result = command("generate", "--prompt-file", "prompts.txt")
    assert result.code == 2
    assert "prompt_file 'prompts.txt' " in result.error
    assert command.pipes == []


def test_warnings_are_one_line_and_quiet_hides_them(command, monkeypatch):
    draw = FakePipeline.stream

    def warn(self, *arguments, **request):
        for _ in range(2):
            warnings.warn("3 tokens\nlost", FirstlightWarning, stacklevel=1)
        return draw(self, *arguments, **request)

    monkeypatch.setattr(FakePipeline, "stream", warn)
    lines = command("generate", "a").err.splitlines()
    assert lines.count("firstlight: warning: 3 tokens lost") == 2
    assert command("generate", "a", "--quiet").err == ""


def test_quiet_ordinary_and_verbose_tell_more_and_more(command):
    lines = {
        flag: command("generate", "a", "--steps", "3", flag).err.splitlines()
        for flag in ("--quiet", "--no-quiet", "--verbose")
    }
    assert lines["--quiet"] == []
    stages = [line.split()[0] for line in lines["--no-quiet"]]
    assert stages == ["load", "compile", "denoise", "save", "total"]
    assert "denoise 3 of 3 steps" in lines["--no-quiet"][2]
    assert [line.split()[:4] for line in lines["--verbose"] if line.startswith("denoise")] == [
        ["denoise", str(step), "of", "3"] for step in (1, 2, 3)
    ]
    assert "pictures: decode 0.100 s" in lines["--verbose"]
    assert "critical path:" in lines["--verbose"]


@pytest.mark.parametrize("edits", [False, True])
def test_the_pipeline_is_opened_with_the_engine_settings_and_the_request(monkeypatch, edits):
    # The seam itself, against a stand-in for the module that imports jax.
    from types import ModuleType, SimpleNamespace

    from firstlight.cli import drawing
    from firstlight.config import EngineConfig, GenerateConfig
    from firstlight.timeline import Timeline
    from firstlight.weights import loading

    opened = {}

    class Loading:
        def __init__(self, model, **settings):
            opened.update(settings, model=model)

    class Pipeline:
        @staticmethod
        def from_loading(begun, layout, progress):
            assert isinstance(begun, Loading)
            opened.update(layout, progress=progress)

    monkeypatch.setattr(loading, "Loading", Loading)
    for name, contents in (
        ("firstlight.pipeline", {"Pipeline": Pipeline}),
        ("firstlight.start", {"Layout": dict}),
    ):
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    display = SimpleNamespace(advance=print)
    engine = EngineConfig(model="m", dtype="float32", is_distilled=False, images_per_device=2)
    job = drawing.Job(GenerateConfig(), ["a fox"], {"image": ["x.png"]} if edits else {})
    timeline = Timeline.from_now()
    drawing._open_pipeline(engine, job, display, timeline)
    assert [span.name for span in timeline.spans] == ["imports"]
    assert opened == {
        **{name: value for name, value in vars(engine).items() if name not in engine.files},
        "files": engine.files,
        "request": job.request,
        "components": (*loading.NEEDED, "vae_encoder") if edits else loading.NEEDED,
        "progress": print,
        "timeline": timeline,
    }


@pytest.mark.parametrize("flags", [[], ["--json"]])
@pytest.mark.parametrize("error", [DeviceError("not finite"), KeyboardInterrupt()])
def test_pictures_made_before_a_failure_are_kept(command, monkeypatch, flags, error):
    draw = FakePipeline.stream

    def fail_at_the_third(self, *arguments, **request):
        for index, result in enumerate(draw(self, *arguments, **request)):
            if index == 2:
                raise error
            yield result

    monkeypatch.setattr(FakePipeline, "stream", fail_at_the_third)
    arguments = ["generate", "a", "b", "c", "--seed", "4", "--quiet", *flags]
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            command(*arguments)
        out = command.capsys.readouterr().out
    else:
        result = command(*arguments)
        assert result.code == 1
        assert result.err == "firstlight: error: not finite\n"
        out = result.out
    paths = ["a-4.png", "b-5.png"]
    assert sorted(path.name for path in Path().iterdir()) == paths
    if flags:
        assert [image["path"] for image in json.loads(out)["images"]] == paths
    else:
        assert out == "a-4.png\tseed 4\nb-5.png\tseed 5\n"
    assert [read_metadata(path)["seed"] for path in paths] == [4, 5]
