# SPDX-License-Identifier: Apache-2.0
"""Plans for a part of each parameter: what one host of several reads."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from firstlight.weights.plan import Plan
from firstlight.weights.rules import Piece

Box = tuple[tuple[int, int], ...]
"""Of each axis of a parameter, the indices (start, stop) that are wanted."""


def restricted(plan: Plan, boxes: Mapping[str, Box]) -> Plan:
    """The plan that reads only these boxes; its specs have the boxes' shapes.

    Rows of a matrix that are not wanted are not read. Columns are: what a box leaves of a row lies
    in short runs, and rows are read whole (see `overread`).
    """
    shapes = {path: list(plan.specs[path].shape) for path in boxes}
    pieces: dict[str, list[Piece]] = {}
    for piece in plan.pieces:
        pieces.setdefault(piece.target, []).append(piece)
    for path, box in boxes.items():
        for axis, wanted in enumerate(box):
            shape = shapes[path]
            if wanted != (0, shape[axis]):
                pieces[path] = [
                    part for piece in pieces[path] for part in _cut(piece, shape, axis, wanted)
                ]
                shape[axis] = wanted[1] - wanted[0]
    specs = {
        path: replace(spec, shape=tuple(shapes.get(path, spec.shape)))
        for path, spec in plan.specs.items()
    }
    return replace(plan, specs=specs, pieces=[piece for path in specs for piece in pieces[path]])


def overread(plan: Plan) -> int:
    """Bytes that reading `plan` reads from the files and does not use."""
    used = sum(
        piece.size * block[0].tensor.nbytes // math.prod(block[0].tensor.shape)
        for block in plan.blocks()
        for piece in block
    )
    return plan.nbytes - used


def _cut(piece: Piece, shape: list[int], axis: int, wanted: tuple[int, int]) -> Iterator[Piece]:
    """What is left of a piece when `axis` of its parameter keeps the indices `wanted`."""
    begin, end = wanted
    inner = math.prod(shape[axis + 1 :])
    whole, kept = shape[axis] * inner, (end - begin) * inner
    if whole <= piece.run and whole < piece.size:
        # The axis lies within the file's rows: some columns of every row.
        if whole != piece.run:
            raise ValueError(f"axis {axis} of {piece.target} is not the first within a row")
        first = piece.columns[0] + begin * inner
        at = piece.at // whole * kept
        yield replace(piece, columns=(first, first + kept), at=at)
        return
    # Elements of the parameter that are kept come in runs, one for each index of the axes before.
    for outer in range(piece.at // whole, math.ceil((piece.at + piece.size) / whole)):
        start = max(piece.at, outer * whole + begin * inner)
        stop = min(piece.at + piece.size, outer * whole + end * inner)
        if start >= stop:
            continue
        rows = (start - piece.at) // piece.run, (stop - piece.at) // piece.run
        if (start - piece.at) % piece.run or (stop - piece.at) % piece.run:
            raise ValueError(f"axis {axis} of {piece.target} cuts the file's rows")
        at = outer * kept + start - outer * whole - begin * inner
        offset = piece.rows[0]
        yield replace(piece, rows=(offset + rows[0], offset + rows[1]), at=at)
