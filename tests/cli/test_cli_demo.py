# SPDX-License-Identifier: Apache-2.0
"""The command line with the packaged model: what the fake pipeline cannot show."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from firstlight.cli.app import run
from firstlight.image import read_metadata, save_image

PROMPT = "a red apple on a blue background"


@pytest.fixture
def demo(tmp_path, monkeypatch, capsys):
    """Run a command in an empty folder; returns its exit code, stdout lines and stderr lines."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        capsys.readouterr()
        code = run(["generate", *map(str, arguments)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


def _pixels(path):
    with Image.open(path) as image:
        return image.size, image.tobytes()


def test_a_picture_is_made_again_bit_for_bit_from_itself(demo):
    code, lines, _ = demo(PROMPT, "a fox", "--seed", "7")
    assert code == 0
    assert [line.split("\t")[1] for line in lines] == ["seed 7", "seed 8"]
    for path in (line.split("\t")[0] for line in lines):
        code, again, err = demo("--like", path)
        assert code == 0
        again = again[0].split("\t")[0]
        assert again != path
        assert _pixels(again) == _pixels(path)
        assert read_metadata(again) == read_metadata(path)
        assert not [line for line in err if "warning" in line]


def test_a_picture_from_elsewhere_is_made_again_with_a_warning(demo):
    _, (line,), _ = demo(PROMPT, "--seed", "7")
    path = line.split("\t")[0]
    metadata = read_metadata(path)
    elsewhere = {**metadata, "cores": 999, "versions": {**metadata["versions"], "jax": "0.0.1"}}
    with Image.open(path) as image:
        save_image(image, "elsewhere.png", elsewhere)
    code, (line,), err = demo("--like", "elsewhere.png")
    assert code == 0
    assert _pixels(line.split("\t")[0]) == _pixels(path)
    (warning,) = [line for line in err if "warning" in line]
    assert f"cores 999 then, {metadata['cores']} now" in warning
    assert f"versions jax 0.0.1 then, {metadata['versions']['jax']} now" in warning


def test_json_names_everything_that_decides_about_the_picture(demo):
    code, lines, _ = demo(PROMPT, "--json", "--quiet", "--repeat", "2")
    assert code == 0
    document = json.loads("\n".join(lines))
    (entry,) = document["images"]
    assert entry["metadata"] == read_metadata(entry["path"])
    assert set(entry["metadata"]) >= {
        "prompt", "seed", "num_inference_steps", "guidance_scale", "width", "height",
        "max_sequence_length", "model", "revision", "dtype", "is_distilled", "images_per_device",
        "versions", "device_kind", "cores", "mesh",
    }  # fmt: skip
    assert {"firstlight", "jax", "jaxlib"} <= set(entry["metadata"]["versions"])
    assert entry["metadata"]["seed"] == entry["seed"]
    assert len(document["repeat"]["seconds"]) == 2


def test_a_profile_is_written(demo):
    code, _, _ = demo(PROMPT, "--profile", "traces/today", "--quiet")
    assert code == 0
    assert list(Path("traces/today").rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--width", "100", "--height", "64"], "width is 100"),
        (["--model", "absent"], "absent"),
        (["--max-sequence-length", "49"], "max_sequence_length is 49"),
    ],
)
def test_what_the_pipeline_refuses_is_one_line_and_no_file(demo, arguments, part):
    code, out, err = demo(PROMPT, *arguments, "--quiet")
    assert (code, out) == (1, [])
    (line,) = err
    assert line.startswith("firstlight: error: ")
    assert part in line
    assert list(Path().iterdir()) == []


def test_info_describes_the_packaged_model_without_importing_jax(capsys):
    code = (
        "import sys; from firstlight.cli.app import run; "
        "code = run(['info', '--json', '--verbose']); sys.exit(code or 'jax' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    facts = json.loads(result.stdout)
    assert facts["model"] == "demo"
    assert facts["default_size"] == 128
    assert facts["size_multiple"] == 16
    assert facts["num_inference_steps"] == 4
    components = facts["components"]
    assert set(components) == {"text_encoder", "transformer", "vae"}
    assert facts["parameters"] == sum(entry["parameters"] for entry in components.values())
    # A few statistics of the vae stay float32.
    assert 2 * facts["parameters"] < facts["bytes"] < 2.01 * facts["parameters"]
    assert components["text_encoder"]["arrays"]["embed"].startswith("bfloat16 ")
    assert run(["info", "demo", "--dtype", "float32"]) == 0
    assert f"{4 * facts['parameters']:,}" in capsys.readouterr().out


def test_info_lists_the_faults_of_a_damaged_model_in_one_line(tmp_path, capsys):
    from firstlight.weights.hub import DEMO_FOLDER

    for source in DEMO_FOLDER.rglob("*"):
        target = tmp_path / source.relative_to(DEMO_FOLDER)
        if source.is_dir():
            target.mkdir()
        elif source.name != "tokenizer.json":
            target.write_bytes(source.read_bytes()[: 5000 if "vae" in source.parts else None])
    assert run(["info", str(tmp_path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "tokenizer/tokenizer.json is missing; " in line
    assert "vae/diffusion_pytorch_model.safetensors" in line


def test_ctrl_c_during_denoising_ends_with_one_line_and_no_file(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "firstlight", "generate", PROMPT, "--steps", "1000", "--verbose"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in process.stderr:
        if line.startswith("denoise 2 "):
            break
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    others = [line for line in err.splitlines() if not line.startswith("denoise ")]
    assert others == ["firstlight: interrupted"]
    assert list(tmp_path.iterdir()) == []


def test_an_edit_and_its_previews(demo, monkeypatch):
    _, (line,), _ = demo(PROMPT, "--seed", "1", "--output", "apple.png", "--steps", "2")
    assert line == "apple.png\tseed 1"
    edited = ["edit", "apple.png", "make the background green", "--seed", "3", "--preview", "steps"]
    assert run([*edited, "--output", "green.png"]) == 0
    assert sorted(path.name for path in Path("steps").iterdir()) == [
        f"0-{step}.png" for step in range(4)
    ]
    metadata = read_metadata("green.png")
    assert len(metadata["references"]) == 1 and metadata["prompt"] == "make the background green"
    code, _, (error,) = demo("--like", "green.png")
    assert code == 1 and "was made from reference pictures, which it does not contain" in error
