# SPDX-License-Identifier: Apache-2.0
"""Several devices (four that share this CPU): the same bits over `data`, nearly so over `model`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

RUN = """
import hashlib, json, sys
from dataclasses import replace
import numpy as np
from firstlight import Pipeline

dtype = sys.argv[1]
rng = np.random.default_rng(0)
large, small = (rng.integers(0, 255, s, np.uint8) for s in ((128, 128, 3), (64, 96, 3)))

def modes(mesh):
    pipe = Pipeline.from_pretrained(
        "demo", dtype=dtype, mesh=mesh, sizes=[], executable_cache=False
    )
    few = dict(seed=1, num_inference_steps=1, output_type="np")
    made = {"text": pipe(["a cat", "a fox", "pizza"], **few)}
    made["edit"] = pipe(
        ["green"] * 3, image=[[large], [small], [large]], height=128, width=128, **few
    )
    pipe._engine.caches_references = True
    made["cached"] = pipe(["green"] * 2, image=large, **few)
    pipe._engine.caches_references = False
    pipe.model = replace(pipe.model, is_distilled=False)
    made["guided"] = pipe(["a cat", "a fox"], guidance_scale=3.0, **few)
    return {name: result.images for name, result in made.items()}

one = modes("data=1")
found = {}
for mesh in sys.argv[2:]:
    many = modes(mesh)
    found[mesh] = {
        name: [bool(np.array_equal(many[name], one[name])),
               float(np.abs(many[name] - one[name]).max())]
        for name in one
    }
print(json.dumps(found))
"""


def run(dtype: str, *meshes: str) -> dict[str, dict[str, list]]:
    flags = "--xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-c", RUN, dtype, *meshes],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("dtype", "meshes"),
    [
        ("float32", ["data=2", "model=2"]),
        pytest.param("float32", ["data=4", "data=2,model=2"], marks=pytest.mark.full),
        pytest.param("bfloat16", ["data=2", "data=4"], marks=pytest.mark.full),
    ],
)
def test_every_mode(dtype: str, meshes: list[str]) -> None:
    for mesh, modes in run(dtype, *meshes).items():
        assert set(modes) == {"text", "edit", "cached", "guided"}
        for name, (equal, gap) in modes.items():
            if "model" in mesh:
                assert gap < 2e-5, f"{name} on {mesh}"
            else:
                assert equal, f"{name} on {mesh}: {gap}"
