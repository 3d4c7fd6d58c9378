# SPDX-License-Identifier: Apache-2.0
"""What to read, from where, to where, and in which order. Reads nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firstlight.models.params import DTYPE_BYTES, ParamSpec, named_leaves
from firstlight.weights.component import Component
from firstlight.weights.quantised import NVFP4
from firstlight.weights.reader import ITEM_BYTES, Stamp
from firstlight.weights.rules import Piece, Rule, expand

Block = tuple[Piece, ...]
"""The same rows of one tensor, contiguous in the file; each piece takes some of the columns."""


@dataclass(frozen=True)
class Part:
    """Rows `begin` to `end` of the first axis of the parameter `path`: what is read, handed on
    and given back together."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Step:
    """A part, and the blocks to read for it that no earlier step has read."""

    part: Part
    blocks: list[Block]


@dataclass(frozen=True)
class Plan:
    """Everything needed to load parameters: checked, nothing read yet.

    `problems` lists what is wrong with the files; a plan with problems cannot be read.
    """

    specs: dict[str, ParamSpec]
    pieces: list[Piece]
    stamps: dict[Path, Stamp]
    problems: list[str]

    @property
    def nbytes(self) -> int:
        """Bytes that will be read from the files."""
        return sum(block_bytes(block) for block in self.blocks())

    def blocks(self) -> list[Block]:
        """Put together what one read delivers."""
        blocks: dict[tuple[Path, str, tuple[int, int]], list[Piece]] = {}
        for piece in self.pieces:
            key = (piece.tensor.file, piece.tensor.name, piece.rows)
            blocks.setdefault(key, []).append(piece)
        return [tuple(block) for block in blocks.values()]

    def only(self, *subtrees: str) -> Plan:
        """The same plan for some of the tree's top-level fields (`"decoder"`, ...)."""
        unknown = set(subtrees) - {_top(path) for path in self.specs}
        if unknown:
            raise ValueError(f"no parameters are called {', '.join(sorted(unknown))}")
        return replace(
            self,
            specs={k: v for k, v in self.specs.items() if _top(k) in subtrees},
            pieces=[piece for piece in self.pieces if _top(piece.target) in subtrees],
        )

    def steps(self, part_bytes: int) -> list[Step]:
        """The order of reading, in parts of at most `part_bytes` (but one row at least).

        Parameters that share blocks (columns of one matrix) advance together, so that neither has
        to be held while the other is read.
        """
        blocks = self.blocks()
        parts = [
            part
            for group in _groups(list(self.specs), blocks)
            for part in _parts({path: self.specs[path] for path in group}, part_bytes)
        ]
        order = {part: number for number, part in enumerate(parts)}
        of_path: dict[str, list[Part]] = {}
        for part in parts:
            of_path.setdefault(part.path, []).append(part)
        steps = [Step(part, []) for part in parts]
        for block in blocks:
            for cut in _cut_at(block, of_path[block[0].target], self.specs[block[0].target]):
                first = min(order[part] for part in self.parts_of(cut, of_path))
                steps[first].blocks.append(cut)
        return steps

    def parts_of(self, block: Block, of_path: Mapping[str, list[Part]]) -> Iterator[Part]:
        """The part that each piece of a block belongs to."""
        for piece in block:
            row = piece.at // _row_size(self.specs[piece.target])
            yield next(part for part in of_path[piece.target] if part.begin <= row < part.end)


def plan(
    spec_tree: Any, rules: Iterable[Rule], component: Component, unread: Iterable[str] = ()
) -> Plan:
    """Match a component's files with its parameters; collects all problems, reads no weight."""
    specs = dict(named_leaves(spec_tree))
    made = expand(rules, specs, component, unread)
    return Plan(specs, made.pieces, component.stamps, component.problems + made.problems)


def merged(plans: Mapping[str, Plan]) -> Plan:
    """One plan of several; the parameters' paths begin with the plans' names."""
    return Plan(
        specs={f"{name}.{k}": v for name, plan in plans.items() for k, v in plan.specs.items()},
        pieces=[
            replace(piece, target=f"{name}.{piece.target}")
            for name, plan in plans.items()
            for piece in plan.pieces
        ],
        stamps={path: stamp for plan in plans.values() for path, stamp in plan.stamps.items()},
        problems=[problem for plan in plans.values() for problem in plan.problems],
    )


def block_bytes(block: Block) -> int:
    """Bytes of a block in its file."""
    first, last = block[0].rows
    return (last - first) * _row_bytes(block)


def piece_bytes(piece: Piece, spec: ParamSpec) -> int:
    """Bytes that a piece takes up in its parameter."""
    return piece.size * DTYPE_BYTES[spec.dtype]


def block_offset(block: Block) -> int:
    """Where a block begins in its file."""
    return block[0].tensor.offset + block[0].rows[0] * _row_bytes(block)


def cut(block: Block, limit: int) -> Iterator[Block]:
    """Cut a block into reads of at most `limit` bytes, but of one row at least."""
    first, last = block[0].rows
    step = max(1, limit // _row_bytes(block))
    for begin in range(first, last, step):
        yield _rows(block, begin, min(begin + step, last))


def _top(path: str) -> str:
    return path.split(".")[0]


def _row_bytes(block: Block) -> int:
    piece = block[0]
    if piece.tensor.dtype == NVFP4:
        return piece.width // 2
    return piece.width * ITEM_BYTES[piece.tensor.dtype]


def _rows(block: Block, begin: int, end: int) -> Block:
    first = block[0].rows[0]
    return tuple(
        replace(piece, rows=(begin, end), at=piece.at + (begin - first) * piece.run)
        for piece in block
    )


def _row_size(spec: ParamSpec) -> int:
    """Elements of one index of the first axis."""
    return spec.size // spec.shape[0]


def _groups(paths: list[str], blocks: Iterable[Block]) -> list[list[str]]:
    """Parameters that share blocks, in the order of the first of each."""
    leader = {path: path for path in paths}
    for block in blocks:
        targets = {leader[piece.target] for piece in block}
        if len(targets) > 1:
            chosen = min(targets, key=paths.index)
            leader = {path: chosen if to in targets else to for path, to in leader.items()}
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(leader[path], []).append(path)
    return list(groups.values())


def _parts(group: dict[str, ParamSpec], part_bytes: int) -> Iterator[Part]:
    """Runs of rows, the group's parameters in turn."""
    rows = {spec.shape[0] for spec in group.values()}
    largest = max(spec.nbytes for spec in group.values())
    (count,) = rows if len(rows) == 1 else (1,)
    step = _even_step(count, max(1, part_bytes * count // largest))
    for begin in range(0, count, step):
        for path, spec in group.items():
            end = spec.shape[0] if begin + step >= count else begin + step
            yield Part(path, begin, end)


def _even_step(count: int, most: int) -> int:
    """A step of at most `most` that divides `count` if there is one not much smaller: equal parts
    need one program less to be put together on a device."""
    even = next(step for step in range(min(most, count), 0, -1) if count % step == 0)
    return even if 2 * even >= most else min(most, count)


def _cut_at(block: Block, parts: list[Part], spec: ParamSpec) -> Iterator[Block]:
    """Cut a block that reaches over several parts (a matrix read by rows) where they meet."""
    piece = block[0]
    row, (first, last) = _row_size(spec), piece.rows
    begin = first
    for part in parts:
        # Elements from the piece's beginning to the part's end, in rows of the file.
        end = first + (part.end * row - piece.at) // piece.run
        end = min(end, last)
        if end > begin:
            yield _rows(block, begin, end)
            begin = end
