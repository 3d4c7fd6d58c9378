# SPDX-License-Identifier: Apache-2.0
"""From a model being read to an engine: weights stream while programs compile."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from firstlight import residency
from firstlight.compile import Compiler, Program
from firstlight.engine import Engine
from firstlight.errors import ConfigError
from firstlight.executable_cache import FOLDER_VARIABLE, ExecutableCache
from firstlight.models.params import DATA, MODEL
from firstlight.models.variants import KV_PIPELINE
from firstlight.placement import local_boxes, place
from firstlight.programs import Architecture, Programs
from firstlight.progress import Progress
from firstlight.request import Limits, Request
from firstlight.residency import Residency
from firstlight.sharding import make_mesh, param_shardings, parse_mesh
from firstlight.timeline import Timeline
from firstlight.tokenizer import Tokenizer
from firstlight.weights.boxes import overread, restricted
from firstlight.weights.folder import ModelFolder
from firstlight.weights.load import Reading
from firstlight.weights.loading import COMPONENTS, RESOLVE, Loading, needed, needed_specs


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How an engine is to lie on the devices; see `Pipeline.from_pretrained`."""

    mesh: str | Mesh | None = None
    images_per_device: int = 1
    sizes: Sequence[tuple[int, int]] | None = None
    executable_cache: bool | str | Path | None = True
    offload: str | None = None
    vae_tiling: bool | None = None
    request: Callable[[Limits], Request] | None = None
    """The first request, if it is known: its programs are compiled instead of those of `sizes`."""


def start(loading: Loading, layout: Layout, progress: Progress) -> tuple[ModelFolder, Engine]:
    """Wait for the model's files, then load and compile; returns when both are done.

    Raises what `Pipeline.from_pretrained` raises.
    """
    timeline = loading.timeline
    compiler = None
    try:
        with timeline.span("devices"):
            mesh = _mesh(layout.mesh)
            count = _positive("images_per_device", layout.images_per_device)
        with timeline.wait(RESOLVE):
            folder = loading.folder()
        cache = open_cache(layout.executable_cache)
        compiler = Compiler(mesh, cache, timeline=timeline)
        batch = mesh.shape[DATA] * count
        programs = Programs(architecture(folder), mesh, batch, layout.vae_tiling)
        with timeline.span("submit programs"):
            wanted = _wanted(folder, programs, layout)
            for program in wanted:
                compiler.submit(program)
        progress("compile", 0, len(wanted))
        weights = _residency(loading, folder, compiler, layout.offload)
        with timeline.span("tokenizer"):
            tokenizer = Tokenizer.from_folder(folder.tokenizer, folder.text_encoder.vocab_size)
        weights.prepare()
        for done, program in enumerate(wanted, 1):
            compiler.ready(program)
            progress("compile", done, len(wanted))
    except BaseException:
        loading.close()
        if compiler is not None:
            compiler.close()
        raise
    engine = Engine(
        programs=programs,
        compiler=compiler,
        scheduler=folder.scheduler,
        tokenizer=tokenizer,
        weights=weights,
        caches_references=caches_references(folder),
    )
    return folder, engine


def open_cache(where: bool | str | Path | None) -> ExecutableCache | None:
    """The cache in a folder, or in the default one (None, True); False and "off" mean none."""
    if where is None or where is True:
        where = os.environ.get(FOLDER_VARIABLE) or None
    if where is False or where == "off":
        return None
    return ExecutableCache.open(None if where is None else Path(where))


def architecture(folder: ModelFolder) -> Architecture:
    """What the programs depend on."""
    return Architecture(
        transformer=folder.transformer,
        text_encoder=folder.text_encoder,
        vae=folder.vae,
        dtype=folder.dtype,
    )


def limits(folder: ModelFolder) -> Limits:
    """What requests to this model must keep to."""
    return Limits(
        variant=folder.variant,
        default_size=folder.default_size,
        pixel_multiple=folder.vae.pixel_multiple,
        token_channels=folder.transformer.in_channels,
        text_width=folder.transformer.joint_attention_dim,
        max_sequence_length=folder.max_sequence_length,
    )


def _wanted(folder: ModelFolder, programs: Programs, layout: Layout) -> list[Program]:
    if layout.request is None:
        return wanted_programs(folder, programs, layout.sizes)
    return programs.of_request(layout.request(limits(folder)), caches=caches_references(folder))


def caches_references(folder: ModelFolder) -> bool:
    """Whether the model is trained to see references once and not at every step."""
    return folder.class_name == KV_PIPELINE


def wanted_programs(
    folder: ModelFolder, programs: Programs, sizes: Sequence[tuple[int, int]] | None
) -> list[Program]:
    """The programs of every size, (height, width); those are checked before any is made."""
    sizes = [(folder.default_size, folder.default_size)] if sizes is None else sizes
    for height, width in sizes:
        limits(folder).check_size(height, width)
    length = folder.max_sequence_length
    made = [p for size in sizes for p in programs.text_to_image(*size, length, "pil")]
    return list({program.name: program for program in made}.values())


def _residency(
    loading: Loading, folder: ModelFolder, compiler: Compiler, offload: str | None
) -> Residency:
    mesh, timeline = compiler.mesh, loading.timeline
    specs = needed_specs(folder, loading.components)
    needs = residency.bytes_per_device(specs, mesh)
    device = mesh.devices.flat[0]
    available = residency.available_bytes(device)
    where = "the host" if device.platform == "cpu" else device.device_kind
    policy = residency.choose_policy(needs, available, offload, where)
    timeline.note("memory", residency.statement(needs, available, where))
    timeline.note("policy", policy)
    every = needed_specs(folder, COMPONENTS)
    shardings = {name: param_shardings(tree, mesh) for name, tree in every.items()}

    # Of several hosts, each reads what its own devices hold.
    alone = jax.process_count() == 1

    ready = False

    def load(names: tuple[str, ...]) -> dict[str, Any]:
        nonlocal ready
        # The account of the start must not grow with what is read again for later prompts.
        account, ready = Timeline.from_now() if ready else timeline, True
        where = {name: shardings[name] for name in names}
        if alone:
            reading = loading.take_reading() if set(names) == set(specs) else None
            reading = reading or Reading(needed(folder, names), timeline=account)
            return place(reading, where, compiler, account)
        mine = {name: every[name] for name in names}
        plan = restricted(needed(folder, names), local_boxes(mine, where))
        timeline.note("overread_bytes", overread(plan))
        return place(Reading(plan, timeline=account), where, compiler, account, specs=mine)

    if policy == "swap" or not alone:
        loading.close()
    return Residency(policy, load, loading.components)


def _mesh(mesh: str | Mesh | None) -> Mesh:
    if isinstance(mesh, Mesh):
        if tuple(mesh.axis_names) != (DATA, MODEL):
            raise ConfigError(f"mesh has axes {mesh.axis_names}; ('data', 'model') are needed")
        return mesh
    return make_mesh(*parse_mesh(mesh or ""))


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; a whole number of at least 1 is needed")
    return value
