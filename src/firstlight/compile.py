# SPDX-License-Identifier: Apache-2.0
"""Programs compiled from shapes alone, several at once, and kept on disk between processes."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from firstlight import environment
from firstlight.executable_cache import ExecutableCache
from firstlight.models.layers import Kernels, tracing_for
from firstlight.models.params import MODEL
from firstlight.timeline import Timeline


def compiler_options(platform: str) -> dict[str, Any]:
    """Options every program is compiled with on `platform`; part of the executable's key."""
    # Keeping intermediate sums wider than declared would make bits depend on what gets fused.
    options: dict[str, Any] = {"xla_allow_excess_precision": False}
    if platform == "cpu":
        # XLA's CPU backend slices bfloat16 stacks as float32, and this pass then moves the
        # conversion before a scan: a float32 copy of all weights (15 GB for 4B).
        options["xla_disable_hlo_passes"] = "while-loop-invariant-code-motion"
    return options


UNLOADABLE = (
    ValueError, TypeError, LookupError, EOFError, AttributeError, ImportError,
    pickle.UnpicklingError,
)  # fmt: skip
"""What reading an executable of another kind may raise."""

JAX_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_default_matmul_precision",
    "jax_threefry_partitionable",
)
"""Settings of jax that change what a function is traced to."""


@dataclass(frozen=True)
class Program:
    """A pure function and the abstract arguments (shapes, dtypes, shardings) it is compiled for.

    `function(*args)` returns a flat tuple of arrays. `identity` states, as JSON-able data, all
    that the function's behaviour depends on besides its arguments: with the arguments' shapes it
    names the program in every process. The leaves of the arguments numbered in `donated` may be
    overwritten by the result.
    """

    name: str
    function: Callable[..., tuple[jax.Array, ...]]
    args: tuple[Any, ...]
    identity: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    donated: tuple[int, ...] = ()

    def lower(self, mesh: Mesh) -> jax.stages.Lowered:
        """Trace and lower for `mesh`; the lowered function takes the arguments as flat leaves."""
        structure = jax.tree.structure(self.args)

        def flat(*leaves: jax.Array) -> tuple[jax.Array, ...]:
            return self.function(*jax.tree.unflatten(structure, leaves))

        with jax.set_mesh(mesh), tracing_for(_kernels(mesh)):
            return jax.jit(flat, donate_argnums=self.donated).lower(*jax.tree.leaves(self.args))


def _kernels(mesh: Mesh) -> Kernels:
    if mesh.devices.flat[0].platform != "cpu":
        return Kernels()
    return Kernels(widen=not environment.cpu_multiplies_bfloat16(), flatten=mesh.shape[MODEL] == 1)


@dataclass(frozen=True)
class Executable:
    """A compiled program. Calling it with other shapes or shardings raises; it never recompiles."""

    program: Program
    compiled: jax.stages.Compiled
    seconds: float
    from_cache: bool

    def __call__(self, *args: Any) -> tuple[jax.Array, ...]:
        """Run it. Raises TypeError for arguments it was not compiled for."""
        return self.compiled(*jax.tree.leaves(args))


class Compiler:
    """Compiles programs for one mesh on background threads; asks the disk first.

    `compiled` and `loaded` count programs built here and taken from the cache. Each program's way
    is on the timeline, on the lane of its thread, up to a span of no length called
    `ready_name(program)`.
    """

    def __init__(
        self,
        mesh: Mesh,
        cache: ExecutableCache | None,
        threads: int = 3,
        timeline: Timeline | None = None,
    ) -> None:
        self.mesh = mesh
        self.cache = cache
        self.timeline = timeline or Timeline.from_now()
        self.compiled = 0
        self.loaded = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="firstlight-compile")
        self._futures: dict[str, Future[Executable]] = {}
        self._keeping: list[Future[None]] = []
        self._lock = threading.Lock()

    def submit(self, program: Program) -> Future[Executable]:
        """Start making `program` unless it was asked for before (programs are named uniquely)."""
        with self._lock:
            future = self._futures.get(program.name)
            if future is None:
                future = self._pool.submit(self._make, program)
                self._futures[program.name] = future
            return future

    def ready(self, program: Program) -> Executable:
        """The executable of `program`, submitted now if it was not before."""
        future = self.submit(program)
        if future.done():
            return future.result()
        with self.timeline.wait(ready_name(program)):
            return future.result()

    def flush(self) -> None:
        """Wait until all programs compiled so far are kept on disk."""
        for future in self._keeping:
            future.result()

    def close(self) -> None:
        """Drop what has not begun; what has begun ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(self, program: Program) -> Executable:
        start = time.perf_counter()
        lane = threading.current_thread().name.removeprefix("firstlight-")
        fields = key_fields(program, self.mesh)
        key = digest(fields)
        with self.timeline.span(f"load {program.name}", lane=lane) as facts:
            compiled = self._load(program, key)
            from_cache = facts["hit"] = compiled is not None
            if not from_cache:
                facts["why"] = None if self.cache is None else self.cache.explain(key, fields)
        if compiled is None:
            with self.timeline.span(f"trace and lower {program.name}", lane=lane):
                lowered = program.lower(self.mesh)
            with self.timeline.span(f"compile {program.name}", lane=lane):
                options = compiler_options(self.mesh.devices.flat[0].platform)
                compiled = lowered.compile(compiler_options=options)
            if self.cache is not None:
                self._keep(self.cache, key, fields, compiled)
        with self._lock:
            self.loaded += from_cache
            self.compiled += not from_cache
        with self.timeline.span(ready_name(program), lane=lane, hit=from_cache):
            return Executable(program, compiled, time.perf_counter() - start, from_cache)

    def _keep(
        self,
        cache: ExecutableCache,
        key: str,
        fields: dict[str, Any],
        compiled: jax.stages.Compiled,
    ) -> None:
        """Write to the cache behind what waits for a thread now: nobody waits for the writing."""

        def write() -> None:
            with self.timeline.span(f"keep {fields['program']}", lane="keep"):
                cache.write(key, serialize_executable.serialize(compiled)[0], fields)

        try:
            future = self._pool.submit(write)
        except RuntimeError:  # closed meanwhile
            return
        with self._lock:
            self._keeping.append(future)

    def _load(self, program: Program, key: str) -> jax.stages.Compiled | None:
        payload = None if self.cache is None else self.cache.read(key)
        if payload is None or self.cache is None:
            return None
        inputs = jax.tree.structure((tuple(jax.tree.leaves(program.args)), {}))
        outputs = jax.tree.structure((0,) * program.outputs)
        try:
            return serialize_executable.deserialize_and_load(
                payload, inputs, outputs, execution_devices=list(self.mesh.devices.flat)
            )
        except (*UNLOADABLE, jax.errors.JaxRuntimeError) as error:
            self.cache.drop(key, f"it cannot be loaded ({type(error).__name__}: {error})")
            return None


def ready_name(program: Program) -> str:
    """Name of the span that marks the end of making a program."""
    return f"{program.name} ready"


def program_key(program: Program, mesh: Mesh) -> str:
    """Hex digest of everything that can change the executable; equal in every process."""
    return digest(key_fields(program, mesh))


def digest(fields: dict[str, Any]) -> str:
    """The key that fields make."""
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def key_fields(program: Program, mesh: Mesh) -> dict[str, Any]:
    """The fields of `program_key`, for explaining why two keys differ."""
    devices = list(mesh.devices.flat)
    return {
        "program": program.name,
        "identity": program.identity,
        "arguments": [
            [list(leaf.shape), str(leaf.dtype), str(leaf.sharding.spec)]
            for leaf in jax.tree.leaves(program.args)
        ],
        "donated": list(program.donated),
        "mesh": [[str(name), size] for name, size in mesh.shape.items()],
        "devices": [
            [d.platform, environment.device_kind(d), d.id, d.process_index] for d in devices
        ],
        "cores": environment.usable_cores() if devices[0].platform == "cpu" else None,
        "versions": environment.versions(),
        "source": environment.source_digest(),
        "compiler_options": compiler_options(devices[0].platform),
        "flags": {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")},
        "jax": {name: str(getattr(jax.config, name)) for name in JAX_SETTINGS},
    }
