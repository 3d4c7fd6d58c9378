# SPDX-License-Identifier: Apache-2.0
"""How a parameter is declared, and how trees of parameters are walked. Imports no jax.

A model's parameters are frozen dataclasses, generic in their leaf: one declaration serves as
`Transformer[ParamSpec]` (what must be in the file), `Transformer[NamedSharding]` (where it goes)
and `Transformer[Array]` (the weights). Trees nest dataclasses, tuples and dicts; None marks a
parameter that this architecture does not have.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar, dataclass_transform

from firstlight.errors import ConfigError

Leaf = TypeVar("Leaf")
Class = TypeVar("Class", bound=type)

DType = Literal["bfloat16", "float32"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float32": 4}


def as_dtype(name: str) -> DType:
    """The dtype called `name`. Raises ConfigError for any other than these two."""
    for dtype in typing.get_args(DType):
        if name == dtype:
            return dtype
    raise ConfigError(f"dtype is {name!r}; allowed: {', '.join(DTYPE_BYTES)}")


# Logical axes. `sharding.py` decides which mesh axis, if any, each one is split over.
LAYERS = "layers"  # equal blocks stacked for `lax.scan`
WIDTH = "width"  # the residual stream
HEADS = "heads"
KV_HEADS = "kv_heads"
MLP = "mlp"
VOCAB = "vocab"

# Mesh axes. One mesh has both, also on a single device (1 x 1), so that there is one code path.
DATA = "data"
MODEL = "model"

_classes: list[type] = []


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """One array: its shape, the logical name of each axis (None: never split), its final dtype."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * DTYPE_BYTES[self.dtype]


@dataclass_transform(frozen_default=True, kw_only_default=True)
def params(cls: Class) -> Class:
    """Class decorator: a frozen keyword-only dataclass that jax will know as a pytree."""
    made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    _classes.append(made)
    return made


def register_pytrees() -> None:
    """Tell jax about every `@params` class so far; called by the modules that compute with them."""
    import jax

    while _classes:
        jax.tree_util.register_dataclass(_classes.pop())


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, leaf) in declaration order; absent (None) parameters are left out."""
    for name, child in _children(tree):
        inner = f"{path}.{name}" if path else name
        if _is_node(child):
            yield from named_leaves(child, inner)
        elif child is not None:
            yield inner, child


def map_leaves(function: Callable[[str, Any], Any], tree: Any, path: str = "") -> Any:
    """Return a tree of the same structure with each leaf replaced by `function(path, leaf)`."""
    if tree is None:
        return None
    if not _is_node(tree):
        return function(path, tree)
    mapped = {
        name: map_leaves(function, child, f"{path}.{name}" if path else name)
        for name, child in _children(tree)
    }
    if isinstance(tree, dict):
        return mapped
    return tuple(mapped.values()) if isinstance(tree, tuple) else type(tree)(**mapped)


def nbytes(tree: Any) -> int:
    """Bytes of all parameters of a `ParamSpec` tree in their final dtypes."""
    return sum(spec.nbytes for _, spec in named_leaves(tree))


def count(tree: Any) -> int:
    """Number of parameters of a `ParamSpec` tree."""
    return sum(spec.size for _, spec in named_leaves(tree))


def _is_node(value: Any) -> bool:
    if isinstance(value, ParamSpec):
        return False
    return isinstance(value, tuple | dict) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    )


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(tree, tuple):
        for index, child in enumerate(tree):
            yield str(index), child
    elif isinstance(tree, dict):
        yield from tree.items()
    else:
        for field in dataclasses.fields(tree):
            yield field.name, getattr(tree, field.name)
