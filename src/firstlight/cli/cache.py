# SPDX-License-Identifier: Apache-2.0
"""`firstlight cache`: what is kept, why something is not, and clearing it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from firstlight.config import EngineConfig, ReportConfig
from firstlight.errors import ConfigError
from firstlight.executable_cache import Entry, ExecutableCache


def run_cache(
    engine: EngineConfig,
    report: ReportConfig,
    *,
    why: bool,
    clear: bool,
    width: int | None,
    height: int | None,
) -> None:
    """List, explain or clear. Raises ConfigError for a folder that cannot be used."""
    if why and clear:
        raise ConfigError("why and clear exclude each other; give one of them")
    cache = _open(engine.executable_cache)
    if clear:
        count, nbytes = cache.clear()
        facts: dict[str, Any] = {"folder": str(cache.folder), "removed": count, "bytes": nbytes}
        text = [f"{cache.folder}: {count} programs removed, {nbytes / 1e6:.1f} MB"]
    elif why:
        facts = {"folder": str(cache.folder), "programs": _explain(cache, engine, width, height)}
        text = [_reason(name, reasons) for name, reasons in facts["programs"].items()]
    else:
        entries = cache.entries()
        total = sum(entry.nbytes for entry in entries)
        facts = {
            "folder": str(cache.folder),
            "bytes": total,
            "limit": cache.limit,
            "programs": [_facts(entry) for entry in entries],
        }
        text = [_line(entry) for entry in entries]
        text.append(
            f"{cache.folder}: {len(entries)} programs, {total / 1e6:.1f} MB of at most "
            f"{cache.limit / 1e6:.0f}"
        )
    print(json.dumps(facts, indent=2) if report.json else "\n".join(text))


def _open(where: str | None) -> ExecutableCache:
    if where == "off":
        raise ConfigError("executable_cache is 'off'; a folder, or nothing, is needed here")
    cache = ExecutableCache.open(None if where is None else Path(where))
    if cache is None:
        raise ConfigError("the folder of kept programs cannot be used; see the warning")
    return cache


def _explain(
    cache: ExecutableCache, engine: EngineConfig, width: int | None, height: int | None
) -> dict[str, list[str] | None]:
    """For each program that a start would make: None if it is kept, else why it is not."""
    from firstlight.compile import digest, key_fields
    from firstlight.models.params import DATA
    from firstlight.programs import Programs
    from firstlight.sharding import make_mesh, parse_mesh
    from firstlight.start import architecture, wanted_programs
    from firstlight.weights.folder import open_model
    from firstlight.weights.hub import resolve

    found = resolve(
        engine.model, revision=engine.revision, offline=engine.offline, cache_dir=engine.cache_dir
    )
    files = {k: v for k, v in engine.files.items() if v is not None}
    folder = open_model(found.path, dtype=engine.dtype, name=found.name, files=files)
    mesh = make_mesh(*parse_mesh(engine.mesh or ""))
    batch = mesh.shape[DATA] * engine.images_per_device
    programs = Programs(architecture(folder), mesh, batch)
    size = (height or folder.default_size, width or folder.default_size)
    fields = [key_fields(p, mesh) for p in wanted_programs(folder, programs, [size])]
    return {f["program"]: cache.explain(digest(f), f) for f in fields}


def _reason(name: str, reasons: list[str] | None) -> str:
    return f"{name}: {'kept' if reasons is None else '; '.join(reasons)}"


def _facts(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.key,
        "program": entry.fields.get("program"),
        "bytes": entry.nbytes,
        "used": entry.used,
        "devices": entry.fields.get("devices"),
        "versions": entry.fields.get("versions"),
    }


def _line(entry: Entry) -> str:
    devices = entry.fields.get("devices") or [["?", "?"]]
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
    return (
        f"{entry.key[:12]}  {entry.nbytes / 1e6:8.1f} MB  {when}  "
        f"{entry.fields.get('program')}  ({len(devices)} x {devices[0][1]})"
    )
