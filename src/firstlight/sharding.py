# SPDX-License-Identifier: Apache-2.0
"""Which device holds what: the mesh, and logical axes mapped onto it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from firstlight.errors import ConfigError
from firstlight.models.params import DATA, HEADS, KV_HEADS, MLP, MODEL, ParamSpec, map_leaves

RULES: dict[str, str] = {HEADS: MODEL, KV_HEADS: MODEL, MLP: MODEL}
"""Mesh axis of each logical axis that is split at all; weights are replicated over `data`."""


def parse_mesh(text: str) -> tuple[int, int]:
    """`"data=2,model=4"` (either may be left out: 1) -> (2, 4). Raises ConfigError."""
    sizes = {DATA: 1, MODEL: 1}
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(data|model)=([1-9]\d*)", part)
        if match is None:
            raise ConfigError(
                f"mesh is {text!r}; write it as data=N,model=M with positive integers"
            )
        sizes[match[1]] = int(match[2])
    return sizes[DATA], sizes[MODEL]


def make_mesh(data: int = 1, model: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A (data, model) mesh of explicit axes over the first data x model devices.

    Raises ConfigError if there are not as many devices.
    """
    devices = jax.devices() if devices is None else devices
    if data * model > len(devices):
        raise ConfigError(
            f"mesh data={data},model={model} needs {data * model} devices; "
            f"{len(devices)} {devices[0].platform} device(s) are present"
        )
    grid = np.asarray(devices[: data * model]).reshape(data, model)
    return Mesh(grid, (DATA, MODEL), axis_types=(AxisType.Explicit, AxisType.Explicit))


def partition(spec: ParamSpec) -> P:
    """The partition of one parameter; no two of its axes may map to one mesh axis."""
    axes = [RULES.get(axis) if axis else None for axis in spec.axes]
    used = [axis for axis in axes if axis is not None]
    if len(set(used)) != len(used):
        raise ValueError(f"logical axes {spec.axes} map to one mesh axis twice: {axes}")
    return P(*axes)


def param_shardings(specs: Any, mesh: Mesh) -> Any:
    """`ParamSpec` tree -> tree of `NamedSharding`."""
    return map_leaves(lambda path, spec: _sharding(path, spec, mesh), specs)


def _sharding(path: str, spec: ParamSpec, mesh: Mesh) -> NamedSharding:
    split = partition(spec)
    for size, axis, name in zip(spec.shape, split, spec.axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ConfigError(
                f"mesh has {axis}={mesh.shape[axis]}; the {size} {name} of {path} cannot be split "
                "evenly by it"
            )
    return NamedSharding(mesh, split)


def abstract_params(specs: Any, mesh: Mesh) -> Any:
    """`ParamSpec` tree -> tree of `jax.ShapeDtypeStruct` with shardings, to compile from."""
    return map_leaves(
        lambda path, spec: jax.ShapeDtypeStruct(
            spec.shape, spec.dtype, sharding=_sharding(path, spec, mesh)
        ),
        specs,
    )
