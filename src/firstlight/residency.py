# SPDX-License-Identifier: Apache-2.0
"""Which components' parameters are on the devices, and whether they fit there."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jax.sharding import Mesh

from firstlight.errors import ConfigError, DeviceError
from firstlight.models.params import DTYPE_BYTES, ParamSpec, named_leaves
from firstlight.sharding import param_shardings

Policy = Literal["all", "offload", "swap"]
"""all: everything stays. offload: the text encoder goes after encoding and comes again for the next
prompt. swap: besides, it is never there together with the other components."""

ENCODER = ("text_encoder",)
PAINTERS = ("transformer", "vae")
ON_DEMAND = ("vae_encoder",)
"""Loaded with the painters when a request first has references."""


class Residency:
    """Parameter trees by component, read again when they are asked for and not there."""

    def __init__(
        self,
        policy: Policy,
        load: Callable[[tuple[str, ...]], dict[str, Any]],
        first: tuple[str, ...] = (*ENCODER, *PAINTERS),
    ) -> None:
        self._first = first
        self.policy: Policy = policy
        self.trees: dict[str, Any] = {}
        self._load = load

    def prepare(self) -> None:
        """Load what the first request needs first, and all else that may stay beside it."""
        self.need(ENCODER if self.policy == "swap" else self._first)

    def need(self, names: tuple[str, ...]) -> None:
        """Make these components be there."""
        missing = tuple(name for name in names if name not in self.trees)
        if missing and self.policy == "swap":
            leaving = PAINTERS + ON_DEMAND if set(names) & set(ENCODER) else ENCODER
            for name in leaving:
                self.trees.pop(name, None)
        if missing:
            self.trees.update(self._load(missing))

    def encoder(self) -> Any:
        """The text encoder's parameters."""
        self.need(ENCODER)
        return self.trees["text_encoder"]

    def painter(self, name: str) -> Any:
        """The parameters of one of the other components."""
        if name not in self.trees:
            self.need((*PAINTERS, *ON_DEMAND) if name in ON_DEMAND else PAINTERS)
        return self.trees[name]

    def encoded(self) -> None:
        """Say that no prompt is left to encode for now."""
        if self.policy != "all":
            self.trees.pop("text_encoder", None)


def choose_policy(
    needs: Mapping[str, int], available: int | None, offload: str | None, place: str
) -> Policy:
    """How components share the memory; None leaves it to the sizes (bytes).

    Raises ConfigError for an unknown `offload`, DeviceError if the components do not fit even one
    after the other.
    """
    if offload not in (None, *ENCODER):
        raise ConfigError(f"offload is {offload!r}; 'text_encoder' or nothing is allowed")
    encoder = sum(needs[name] for name in ENCODER)
    painters = sum(size for name, size in needs.items() if name not in ENCODER)
    if available is None or encoder + painters <= available:
        return "offload" if offload else "all"
    if max(encoder, painters) > available:
        raise DeviceError(f"the model does not fit: {statement(needs, available, place)}")
    return "swap"


def statement(needs: Mapping[str, int], available: int | None, place: str) -> str:
    """What is needed and what is there, in words."""
    parts = ", ".join(f"{name} {_gigabytes(size)}" for name, size in needs.items())
    there = "unknown" if available is None else _gigabytes(available)
    return f"parameters need {_gigabytes(sum(needs.values()))} ({parts}) on {place}; free: {there}"


def bytes_per_device(specs: Mapping[str, Any], mesh: Mesh) -> dict[str, int]:
    """Bytes of each component's parameters on one device; on CPUs, whose devices share one
    memory, on all of them."""
    shares = mesh.devices.size if mesh.devices.flat[0].platform == "cpu" else 1
    return {
        name: shares * sum(_shard_bytes(leaves))
        for name, tree in specs.items()
        for leaves in [zip(_leaves(tree), _leaves(param_shardings(tree, mesh)), strict=True)]
    }


def _leaves(tree: Any) -> list[Any]:
    return [leaf for _, leaf in named_leaves(tree)]


def _shard_bytes(leaves: Iterable[tuple[ParamSpec, Any]]) -> Iterable[int]:
    for spec, sharding in leaves:
        yield math.prod(sharding.shard_shape(spec.shape)) * DTYPE_BYTES[spec.dtype]


def available_bytes(device: Any) -> int | None:
    """Memory that is free on a device; None where nothing tells."""
    if device.platform == "cpu":
        return _host_bytes()
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0)


def _host_bytes() -> int | None:
    """What the system can give out without swapping, within the limit set for this process."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="utf-8").strip()
        used = Path("/sys/fs/cgroup/memory.current").read_text(encoding="utf-8").strip()
        if limit != "max":
            # Cached files count as used there, although they make room.
            found.append(int(limit) - int(used) + _cached_bytes())
    except (OSError, ValueError):
        pass
    if not found and hasattr(os, "sysconf"):
        try:
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (OSError, ValueError):
            return None
    return min(found, default=None)


def _cached_bytes() -> int:
    for line in Path("/sys/fs/cgroup/memory.stat").read_text(encoding="utf-8").splitlines():
        if line.startswith("file "):
            return int(line.split()[1])
    return 0


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e7 else f"{count / 1e6:.2f} MB"
