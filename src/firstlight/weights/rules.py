# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which tensor become which parameter: rules, and the check that they add up.

A rule maps one checkpoint tensor, or a block of its rows or columns, onto one slice of a
parameter. Elements keep their order within a block: loading never transposes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path

from firstlight.models.params import LAYERS, ParamSpec
from firstlight.weights.component import Component
from firstlight.weights.reader import Tensor

LAYER = "{n}"
"""In a rule's source: one tensor per layer, stacked on the parameter's leading axis."""

FLOATING = ("BF16", "F16", "F32")
"""Dtypes that weights may be stored in; they are converted to the parameter's own."""


@dataclass(frozen=True)
class Rule:
    """The tensor `source` (a checkpoint key), of this `shape`, fills the parameter `target`.

    `part` selects an index of the target's first axis (after the layer axis); `rows` or `columns`
    a block (start, stop) of a matrix.
    """

    target: str
    source: str
    shape: tuple[int, ...]
    part: int | None = None
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class Piece:
    """A block of a tensor and where it lands: row by row in the target's elements from `at` on.

    The tensor is seen as a matrix: one row for each index of its first axis, `width` elements long.
    `rows` and `columns` are (start, stop).
    """

    target: str
    tensor: Tensor
    width: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    at: int

    @property
    def run(self) -> int:
        """Number of columns."""
        return _length(self.columns)

    @property
    def size(self) -> int:
        """Number of elements."""
        return _length(self.rows) * self.run


@dataclass
class Expansion:
    """The pieces that fill every parameter, and all that is wrong with the files."""

    pieces: list[Piece] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def expand(
    rules: Iterable[Rule],
    specs: Mapping[str, ParamSpec],
    component: Component,
    unread: Iterable[str] = (),
) -> Expansion:
    """Match `rules` with a component's tensors.

    Faults of the files are collected, none raises: a tensor that is missing, of another shape or
    of a dtype that weights do not have, and one that no rule uses and `unread` does not list
    (names ending in `*` are prefixes). Faults of the rules themselves (parameters or tensors not
    covered exactly once) raise ValueError.
    """
    made = Expansion()
    sources: dict[str, Rule] = {}
    for rule in rules:
        for layer, source in _sources(rule, specs[rule.target]):
            tensor = component.tensors.get(source) or _absent(source)
            made.pieces.append(_piece(rule, specs[rule.target], tensor, layer))
            if source not in sources:
                sources[source] = rule
                made.problems += _faults(component, rule, source)
    _check_targets(made.pieces, specs)
    _check_sources(made.pieces, sources)
    made.problems += _unknown(component, sources.keys(), tuple(unread))
    return made


def _sources(rule: Rule, spec: ParamSpec) -> Iterator[tuple[int, str]]:
    if LAYER not in rule.source:
        yield 0, rule.source
        return
    if spec.axes[0] != LAYERS:
        raise ValueError(f"{rule.target} is filled layer by layer but is not stacked")
    for layer in range(spec.shape[0]):
        yield layer, rule.source.replace(LAYER, str(layer))


def _piece(rule: Rule, spec: ParamSpec, tensor: Tensor, layer: int) -> Piece:
    width = math.prod(rule.shape[1:])
    rows, columns = rule.rows or (0, rule.shape[0]), rule.columns or (0, width)
    per_layer = math.prod(spec.shape[1:]) if LAYER in rule.source else 0
    at = layer * per_layer + (rule.part or 0) * _length(rows) * _length(columns)
    return Piece(rule.target, tensor, width, rows, columns, at)


def _check_targets(pieces: Iterable[Piece], specs: Mapping[str, ParamSpec]) -> None:
    """Every element of every parameter is filled once."""
    filled: dict[str, list[tuple[int, int]]] = {target: [] for target in specs}
    for piece in pieces:
        filled[piece.target].append((piece.at, piece.at + piece.size))
    for target, blocks in filled.items():
        count = sum(map(_length, blocks))
        if count != specs[target].size:
            raise ValueError(f"rules fill {count} of {specs[target].size} elements of {target}")
        if any(start < stop for (_, stop), (start, _) in pairwise(sorted(blocks))):
            raise ValueError(f"rules fill elements of {target} twice")


def _check_sources(pieces: Iterable[Piece], rules: Mapping[str, Rule]) -> None:
    """Every element of every tensor goes to one place."""
    used: dict[str, list[Piece]] = {source: [] for source in rules}
    for piece in pieces:
        used[piece.tensor.name].append(piece)
    for source, blocks in used.items():
        count, size = sum(block.size for block in blocks), math.prod(rules[source].shape)
        if count != size:
            raise ValueError(f"rules use {count} of {size} elements of {source}")
        for a, b in combinations(blocks, 2):
            if _meet(a.rows, b.rows) and _meet(a.columns, b.columns):
                raise ValueError(f"rules use elements of {source} twice")


def _length(block: tuple[int, int]) -> int:
    return block[1] - block[0]


def _meet(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _faults(component: Component, rule: Rule, source: str) -> Iterator[str]:
    tensor = component.tensors.get(source)
    if tensor is None:
        if not component.explains(source):
            yield f"{component.origin}: {source} {list(rule.shape)} is missing"
        return
    if tensor.shape != rule.shape:
        yield f"{tensor.where} has shape {list(tensor.shape)}; {list(rule.shape)} is expected"
    if tensor.dtype not in FLOATING and tensor.scaling is None:
        yield f"{tensor.where} has dtype {tensor.dtype}; {', '.join(FLOATING)} are supported"


def _unknown(component: Component, used: Iterable[str], unread: tuple[str, ...]) -> Iterator[str]:
    exact = {*used, *(name for name in unread if not name.endswith("*"))}
    prefixes = tuple(name[:-1] for name in unread if name.endswith("*"))
    for name, tensor in component.tensors.items():
        if name not in exact and not any(name.startswith(prefix) for prefix in prefixes):
            yield (
                f"{tensor.where} {list(tensor.shape)} belongs to no parameter of this architecture"
            )


def _absent(source: str) -> Tensor:
    """Stands for a missing tensor, so that the rules can be checked without any file."""
    return Tensor(Path(), source, "BF16", (), 0, 0)
