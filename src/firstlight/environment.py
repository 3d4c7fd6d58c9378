# SPDX-License-Identifier: Apache-2.0
"""What this process runs on: everything that can change a compiled program or a picture's bits."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any


@cache
def versions() -> dict[str, str]:
    """Versions of firstlight and of what it computes with; absent packages are left out."""
    found = {}
    for name in ("firstlight", "jax", "jaxlib", "libtpu"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@cache
def source_digest() -> str:
    """Digest of firstlight's own source, so that an edited checkout never meets stale programs."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def usable_cores() -> int:
    """Cores this process may run on: XLA's CPU backend splits (and so rounds) sums by it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _cpu_info() -> dict[str, str]:
    """Fields of the first core in /proc/cpuinfo; empty where there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu_flags() -> str:
    return _cpu_info().get("flags") or _cpu_info().get("Features") or ""


def cpu_description() -> str:
    """Model name and a digest of the instruction-set flags, from the operating system."""
    name = _cpu_info().get("model name") or platform.processor() or platform.machine()
    return f"{name} [{hashlib.sha256(_cpu_flags().encode()).hexdigest()[:8]}]"


def cpu_multiplies_bfloat16() -> bool:
    """Does this CPU have instructions for bfloat16 products (AVX512-BF16, AMX, Arm BF16)?"""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(_cpu_flags().split())


def differences(
    before: Any, now: Any, *, absent: str, joint: str, name: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """(name, value then, value now) of each field that differs between two JSON-able values; names
    of nested fields are put together by `joint`, and `absent` stands for a field that is not there.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            inner = f"{name}{joint}{key}" if name else str(key)
            pair = before.get(key, absent), now.get(key, absent)
            yield from differences(*pair, absent=absent, joint=joint, name=inner)
    elif before != now:
        yield name, before, now


def device_kind(device: Any) -> str:
    """The kind of a jax device; CPUs are told apart by model and instruction set."""
    return f"cpu: {cpu_description()}" if device.platform == "cpu" else str(device.device_kind)
