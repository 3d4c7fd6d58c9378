# SPDX-License-Identifier: Apache-2.0
"""Each host reads its own part of every parameter, and no row that it does not need."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tiny
from reading import read

from firstlight.models.params import HEADS, KV_HEADS, MLP, named_leaves
from firstlight.weights.boxes import overread, restricted
from firstlight.weights.folder import ModelFolder, open_model

SPLIT = (HEADS, KV_HEADS, MLP)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    folder = tiny.write_model(
        tmp_path_factory.mktemp("model") / "m", text_encoder={"num_key_value_heads": 2}
    )
    return open_model(folder, dtype="bfloat16")


def boxes_of(specs: object, host: int, hosts: int) -> dict:
    """The share of one host, split over the axes that a mesh's model axis splits."""
    made = {}
    for path, spec in named_leaves(specs):
        box = []
        for size, axis in zip(spec.shape, spec.axes, strict=True):
            share = size // hosts if axis in SPLIT else size
            begin = host * share if axis in SPLIT else 0
            box.append((begin, begin + share))
        made[path] = tuple(box)
    return made


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_hosts_read_their_shares(model: ModelFolder, component: str) -> None:
    plan, specs = model.plans[component], model.specs[component]
    whole = read(plan)
    shares = [restricted(plan, boxes_of(specs, host, 2)) for host in range(2)]
    for host, share in enumerate(shares):
        boxes = boxes_of(specs, host, 2)
        found = read(share, chunk_bytes=1000)
        assert found.keys() == whole.keys()
        for path, value in found.items():
            wanted = whole[path][tuple(slice(*axis) for axis in boxes[path])]
            assert value.tobytes() == np.ascontiguousarray(wanted).tobytes(), path
    split = sum(s.nbytes for p, s in named_leaves(specs) if set(s.axes) & set(SPLIT))
    assert split > 0
    for share in shares:
        assert share.nbytes < plan.nbytes
        # The stored values are float32, the parameters bfloat16.
        needed = 2 * sum(spec.nbytes for spec in share.specs.values())
        assert share.nbytes - overread(share) == needed


def test_only_rows_of_columns_are_read_in_vain(model: ModelFolder) -> None:
    plan, specs = model.plans["transformer"], model.specs["transformer"]
    share = restricted(plan, boxes_of(specs, 0, 2))
    in_vain = {
        block[0].target
        for block in share.blocks()
        if sum(piece.run for piece in block) < block[0].width
    }
    assert in_vain == {
        "double.img.out", "double.img.down", "double.txt.out", "double.txt.down",
        "single.out_attention",
    }  # fmt: skip
    assert overread(share) > 0 and overread(plan) == 0


@pytest.mark.parametrize("axis", range(5))
def test_any_axis_before_the_rows_and_the_first_within_them(model: ModelFolder, axis: int) -> None:
    """qkv of the double blocks, (layers, 3, H, K, D): every axis but D is rows of the file."""
    plan = model.plans["transformer"].only("double")
    path = "double.img.qkv"
    shape = plan.specs[path].shape
    for begin, end in itertools.combinations(range(shape[axis] + 1), 2):
        box = [(0, size) for size in shape]
        box[axis] = (begin, end)
        found = read(restricted(plan, {path: tuple(box)}))[path]
        wanted = read(plan)[path].take(range(begin, end), axis=axis)
        assert found.tobytes() == wanted.tobytes()
        if end - begin > 1 and axis > 2:
            break


def test_an_axis_that_is_scattered_within_rows_is_refused(model: ModelFolder) -> None:
    plan = model.plans["transformer"]
    shape = plan.specs["double.img.out"].shape
    box = [(0, size) for size in shape]
    box[-1] = (0, 3)
    with pytest.raises(ValueError, match="is not the first within a row"):
        restricted(plan, {"double.img.out": tuple(box)})


def test_files_are_untouched_by_a_box_of_everything(model: ModelFolder, tmp_path: Path) -> None:
    plan = model.plans["transformer"]
    everything = {p: tuple((0, n) for n in s.shape) for p, s in plan.specs.items()}
    assert sorted(restricted(plan, everything).pieces, key=str) == sorted(plan.pieces, key=str)
