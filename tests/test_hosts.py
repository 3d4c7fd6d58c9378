# SPDX-License-Identifier: Apache-2.0
"""Two processes that act as two hosts: each reads its own shards only."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import tiny

HOST = """
import json, sys
import jax
coordinator, rank, folder = sys.argv[1:]
jax.distributed.initialize(coordinator, 2, int(rank))
import numpy as np
from firstlight.compile import Compiler
from firstlight.models.params import named_leaves
from firstlight.placement import local_boxes, place
from firstlight.sharding import make_mesh, param_shardings
from firstlight.timeline import Timeline
from firstlight.weights import load
from firstlight.weights.boxes import restricted
from firstlight.weights.folder import open_model
mesh = make_mesh(1, 2)
model = open_model(folder, dtype="bfloat16")
specs, plan = model.specs["transformer"], model.plans["transformer"]
shardings = param_shardings(specs, mesh)
share = restricted(plan, local_boxes(specs, shardings))
reading = load.Reading(share)
tree = place(reading, shardings, Compiler(mesh, None), Timeline.from_now(), specs=specs)
whole = dict(load.read(plan))
equal = all(
    np.array_equal(
        np.asarray(shard.data).view(np.uint16), whole[path][shard.index].view(np.uint16)
    )
    for path, array in named_leaves(tree)
    for shard in array.addressable_shards
)
shapes = all(a.shape == whole[path].shape for path, a in named_leaves(tree))
print(json.dumps([equal, shapes, share.nbytes, plan.nbytes, len(jax.local_devices())]))
"""


def test_each_host_reads_its_own_shards(tmp_path: Path) -> None:
    folder = tiny.write_model(tmp_path / "m")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, coordinator, str(rank), str(folder)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for host in hosts:
        out, err = host.communicate(timeout=120)
        assert host.returncode == 0, err
        equal, shapes, read, everything, devices = json.loads(out.splitlines()[-1])
        assert equal and shapes and devices == 1
        assert 0 < read < everything
