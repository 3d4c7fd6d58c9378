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
from firstlight.weights.load import Reading, span_name
from firstlight.weights.plan import Part

register_pytrees()

Put = Callable[[np.ndarray, NamedSharding], jax.Array]


def put_copy(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Start a transfer; the host's memory may be used again when the result is ready."""
    return jax.device_put(array, sharding, may_alias=False)


def place(
    reading: Reading,
    shardings: Any,
    compiler: Compiler,
    timeline: Timeline,
    *,
    put: Put | None = None,
) -> Any:
    """Take all of `reading` and return the tree of `shardings` with an array in each place.

    `put` makes an array from a part's values; by default the platform decides, see above. Raises
    CheckpointError.
    """
    where = dict(named_leaves(shardings))
    on_cpu = compiler.mesh.devices.flat[0].platform == "cpu"
    placing = _Aliased(reading, where) if put is None and on_cpu else _Staged(
        reading, where, compiler, put or put_copy
    )  # fmt: skip
    with timeline.span("place"):
        while (part := _next(reading, placing, timeline)) is not None:
            placing.add(part)
        arrays = placing.finish()
    return map_leaves(lambda path, _: arrays[path], shardings)


def _next(reading: Reading, placing: _Aliased | _Staged, timeline: Timeline) -> Part | None:
    if reading.waits():
        placing.make_room()
    upcoming = reading.upcoming
    if upcoming is None or reading.ready():
        return reading.take()
    with timeline.wait(span_name(upcoming.path)):
        return reading.take()


class _Aliased:
    """Whole buffers become arrays."""

    def __init__(self, reading: Reading, where: dict[str, NamedSharding]) -> None:
        self._reading, self._where = reading, where
        self._left = {path: spec.shape[0] for path, spec in reading.plan.specs.items()}
        self._arrays: dict[str, jax.Array] = {}
        reading.lift_budget()

    def make_room(self) -> None:
        """Nothing is given back: there is no budget."""

    def add(self, part: Part) -> None:
        self._left[part.path] -= part.end - part.begin
        if self._left[part.path] == 0:
            whole = self._reading.whole(part.path)
            self._arrays[part.path] = jax.device_put(whole, self._where[part.path])

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
