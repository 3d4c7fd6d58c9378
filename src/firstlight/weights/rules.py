# SPDX-License-Identifier: Apache-2.0
"""Which bytes of which tensor become which parameter: rules, and the check that they add up.

A rule maps one checkpoint tensor, or a block of its rows or columns, onto one slice of a
parameter. Elements keep their order within a block, so every rule is a positional read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from firstlight.models.params import LAYERS, ParamSpec
from firstlight.weights.reader import Component, Tensor

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
    """A block of a tensor and where it lands: `height` runs of `run` elements, `stride` apart,
    from element `start` of the tensor on, become the target's elements from `at` on."""

    target: str
    tensor: Tensor
    at: int
    start: int
    height: int
    run: int
    stride: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.height * self.run


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
    used: dict[str, int] = {}
    filled = dict.fromkeys(specs, 0)
    for rule in rules:
        for layer, source in _sources(rule, specs[rule.target]):
            tensor = component.tensors.get(source)
            piece = _piece(rule, specs[rule.target], tensor or _absent(source), layer)
            used[source] = used.get(source, 0) + piece.size
            filled[rule.target] += piece.size
            made.pieces.append(piece)
            if source not in sources:
                sources[source] = rule
                made.problems += _faults(component, rule, source)
    for target, count in filled.items():
        if count != specs[target].size:
            raise ValueError(f"rules fill {count} of {specs[target].size} elements of {target}")
    for source, count in used.items():
        if count != math.prod(sources[source].shape):
            raise ValueError(f"rules use {count} of {math.prod(sources[source].shape)} of {source}")
    made.problems += _unknown(component, used.keys(), tuple(unread))
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
    per_layer = math.prod(spec.shape[1:]) if LAYER in rule.source else 0
    if rule.columns:
        first, last = rule.columns
        height, stride = rule.shape
        run, start = last - first, first
    else:
        first, last = rule.rows or (0, rule.shape[0])
        stride = math.prod(rule.shape[1:])
        height, run, start = 1, (last - first) * stride, first * stride
    at = layer * per_layer + (rule.part or 0) * height * run
    return Piece(rule.target, tensor, at, start, height, run, stride)


def _faults(component: Component, rule: Rule, source: str) -> Iterator[str]:
    tensor = component.tensors.get(source)
    if tensor is None:
        yield f"{component.label}: {source} {list(rule.shape)} is missing"
        return
    where = f"{component.label}/{tensor.file.name}: {source}"
    if tensor.shape != rule.shape:
        yield f"{where} has shape {list(tensor.shape)}; {list(rule.shape)} is expected"
    if tensor.dtype not in FLOATING:
        yield f"{where} has dtype {tensor.dtype}; {', '.join(FLOATING)} are supported"


def _unknown(component: Component, used: Iterable[str], unread: tuple[str, ...]) -> Iterator[str]:
    exact = {*used, *(name for name in unread if not name.endswith("*"))}
    prefixes = tuple(name[:-1] for name in unread if name.endswith("*"))
    for name, tensor in component.tensors.items():
        if name not in exact and not any(name.startswith(prefix) for prefix in prefixes):
            yield (
                f"{component.label}/{tensor.file.name}: {name} {list(tensor.shape)} belongs to no "
                "parameter of this architecture"
            )


def _absent(source: str) -> Tensor:
    """Stands for a missing tensor, so that the rules can be checked without any file."""
    return Tensor(Path(), source, "BF16", (), 0, 0)
