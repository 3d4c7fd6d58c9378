# SPDX-License-Identifier: Apache-2.0
"""Parameters onto devices, part by part, while further ones are being read.

On a CPU a parameter's buffer becomes the array, without a copy. An accelerator gets each part as
soon as it is read, and the part's host memory is given back as soon as it has arrived: what the
host must hold is the reading's budget, however large the model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from firstlight.compile import Compiler, Program
from firstlight.models.params import ParamSpec, map_leaves, named_leaves, register_pytrees
from firstlight.timeline import Timeline
from firstlight.weights.boxes import Box
from firstlight.weights.load import Reading, span_name
from firstlight.weights.plan import Part

register_pytrees()

Put = Callable[[np.ndarray, NamedSharding], jax.Array]
PutWhole = Callable[[str, np.ndarray], jax.Array]


def local_boxes(specs: Any, shardings: Any) -> dict[str, Box]:
    """Of each parameter, what this host's devices hold of it, by path."""
    where = dict(named_leaves(shardings))
    return {path: _local_box(spec.shape, where[path]) for path, spec in named_leaves(specs)}


def _local_box(shape: tuple[int, ...], sharding: NamedSharding) -> Box:
    indices = sharding.addressable_devices_indices_map(shape).values()
    ranges = [
        [axis.indices(size)[:2] for axis, size in zip(index or (), shape, strict=True)]
        for index in indices
    ]
    return tuple(
        (min(begin for begin, _ in axis), max(end for _, end in axis))
        for axis in zip(*ranges, strict=True)
    )


def put_copy(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Start a transfer; the host's memory may be used again when the result is ready."""
    return jax.device_put(array, sharding, may_alias=False)


def place(
    reading: Reading,
    shardings: Any,
    compiler: Compiler,
    timeline: Timeline,
    *,
    specs: Any = None,
    put: Put | None = None,
) -> Any:
    """Take all of `reading` and return the tree of `shardings` with an array in each place.

    Where `reading` is of `local_boxes` only, `specs` must be the whole parameters. `put` makes an
    array from a part's values; by default the platform decides, see above. Raises CheckpointError.
    """
    where = dict(named_leaves(shardings))
    on_cpu = compiler.mesh.devices.flat[0].platform == "cpu"
    if specs is not None:
        placing = _Whole(reading, _sharer(specs, where), lift=on_cpu)
    elif on_cpu and put is None:
        placing = _Whole(reading, lambda p, array: jax.device_put(array, where[p]), lift=True)
    else:
        placing = _Staged(reading, where, compiler, put or put_copy)
    try:
        with timeline.span("place"):
            while (part := _next(reading, placing, timeline)) is not None:
                placing.add(part)
            arrays = placing.finish()
    except BaseException:
        reading.close()  # or its threads would go on reading for nobody
        raise
    return map_leaves(lambda path, _: arrays[path], shardings)


def _sharer(specs: Any, where: dict[str, NamedSharding]) -> PutWhole:
    """Puts this host's box of a parameter: each device gets its share of it."""
    shapes = {path: spec.shape for path, spec in named_leaves(specs)}

    def put(path: str, values: np.ndarray) -> jax.Array:
        shape, sharding = shapes[path], where[path]
        starts = [begin for begin, _ in _local_box(shape, sharding)]

        def share(index: Any) -> np.ndarray:
            bounds = zip(index, shape, starts, strict=True)
            ranges = ((axis.indices(size)[:2], start) for axis, size, start in bounds)
            return values[tuple(slice(b - start, e - start) for (b, e), start in ranges)]

        return jax.make_array_from_callback(shape, sharding, share).block_until_ready()

    return put


def _next(reading: Reading, placing: _Whole | _Staged, timeline: Timeline) -> Part | None:
    if reading.waits():
        placing.make_room()
    upcoming = reading.upcoming
    if upcoming is None or reading.ready():
        return reading.take()
    with timeline.wait(span_name(upcoming.path)):
        return reading.take()


class _Whole:
    """Whole buffers become arrays."""

    def __init__(self, reading: Reading, put: PutWhole, *, lift: bool) -> None:
        self._reading, self._put = reading, put
        self._left = {path: spec.shape[0] for path, spec in reading.plan.specs.items()}
        self._arrays: dict[str, jax.Array] = {}
        if lift:
            reading.lift_budget()

    def make_room(self) -> None:
        """Nothing is given back but with a whole parameter."""

    def add(self, part: Part) -> None:
        self._left[part.path] -= part.end - part.begin
        if self._left[part.path] == 0:
            whole = self._reading.whole(part.path)
            self._arrays[part.path] = self._put(part.path, whole)

    def finish(self) -> dict[str, jax.Array]:
        return self._arrays


class _Staged:
    """Parts are sent one by one and written into their parameter on the devices."""

    def __init__(
        self, reading: Reading, where: dict[str, NamedSharding], compiler: Compiler, put: Put
    ) -> None:
        self._reading, self._where, self._put = reading, where, put
        self._compiler = compiler
        self._arrays: dict[str, jax.Array] = {}
        self._sent: deque[tuple[Part, jax.Array]] = deque()
        # All at once: they compile while the first parts are read.
        for path, rows in reading.rows().items():
            if len(rows) > 1:
                for program in self._programs(path, set(rows)):
                    compiler.submit(program)

    def make_room(self) -> None:
        """Wait until the reading can go on, or nothing is on its way any more."""
        while self._sent and self._reading.waits():
            self._settle()

    def add(self, part: Part) -> None:
        values = self._reading.array(part)
        array = self._put(values, self._where[part.path])
        self._sent.append((part, array))
        if len(values) == self._reading.plan.specs[part.path].shape[0]:
            self._arrays[part.path] = array
        else:
            self._write(part, array)
        while self._sent and self._sent[0][1].is_ready():  # pyright: ignore[reportAttributeAccessIssue]
            self._settle()

    def finish(self) -> dict[str, jax.Array]:
        while self._sent:
            self._settle()
        return self._arrays

    def _settle(self) -> None:
        part, array = self._sent.popleft()
        array.block_until_ready()
        self._reading.give_back(part)

    def _write(self, part: Part, rows: jax.Array) -> None:
        begin, write = (
            self._compiler.submit(program).result()
            for program in self._programs(part.path, {part.end - part.begin})
        )
        whole = self._arrays.pop(part.path, None)
        if whole is None:
            (whole,) = begin()
        at = jax.device_put(np.int32(part.begin), NamedSharding(self._compiler.mesh, jax.P()))
        (self._arrays[part.path],) = write(whole, rows, at)

    def _programs(self, path: str, rows: set[int]) -> list[Program]:
        spec, sharding = self._reading.plan.specs[path], self._where[path]
        return [_empty(spec, sharding), *(_writer(spec, sharding, count) for count in sorted(rows))]


def _empty(spec: ParamSpec, sharding: NamedSharding) -> Program:
    """A parameter of zeros, to be written to."""

    def function() -> tuple[jax.Array]:
        return (jnp.zeros(spec.shape, spec.dtype, out_sharding=sharding),)

    return Program(f"empty {_words(spec, sharding)}", function, ())


def _writer(spec: ParamSpec, sharding: NamedSharding, rows: int) -> Program:
    """Write `rows` rows into a parameter, in place, at a row that is given."""

    def function(whole: jax.Array, part: jax.Array, at: jax.Array) -> tuple[jax.Array]:
        return (lax.dynamic_update_slice_in_dim(whole, part, at, axis=0),)

    whole, part = (
        jax.ShapeDtypeStruct(shape, spec.dtype, sharding=sharding)
        for shape in (spec.shape, (rows, *spec.shape[1:]))
    )
    at = jax.ShapeDtypeStruct((), "int32", sharding=NamedSharding(sharding.mesh, jax.P()))
    name = f"write {rows} of {_words(spec, sharding)}"
    return Program(name, function, (whole, part, at), donated=(0,))


def _words(spec: ParamSpec, sharding: NamedSharding) -> str:
    return f"{spec.dtype} {'x'.join(map(str, spec.shape))} {sharding.spec}"
