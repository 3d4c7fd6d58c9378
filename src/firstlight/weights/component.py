# SPDX-License-Identifier: Apache-2.0
"""The weight files of one component: a single safetensors file, or shards under an index."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from firstlight.errors import CheckpointError
from firstlight.weights.reader import Stamp, Tensor, read_header, short

PREFIX = "model.diffusion_model."
"""Of every key, in files that other programs have written."""

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass
class Component:
    """All tensors of one component, over its files. Faults are in `problems`.

    `origin` is the file that lists the tensors: the only weight file, or the index.
    """

    origin: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    stamps: dict[Path, Stamp] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    unlisted: bool = False
    lost: set[str] = field(default_factory=set)

    def explains(self, name: str) -> bool:
        """Whether `problems` already say why the tensor `name` is not in `tensors`."""
        return self.unlisted or name in self.lost


def weight_files(folder: Path, stem: str) -> list[str]:
    """Names of the files in `folder` that hold a component's weights, whether there or not.

    `<stem>.safetensors` if that is there or no index is; else the shards. Raises CheckpointError
    if the index cannot be read.
    """
    single, index = _candidates(folder, stem)
    if single.is_file() or not index.is_file():
        return [single.name]
    return sorted(set(_shard_names(index).values()))


def open_component(folder: Path, stem: str) -> Component:
    """Read the headers of `<stem>.safetensors`, or of the shards its index names.

    Reads no weights and raises nothing: what is wrong is noted in the component's `problems`.
    """
    single, index = _candidates(folder, stem)
    component = Component(short(index if index.is_file() else single))
    if single.is_file() and index.is_file():
        # Libraries differ in which of the two they prefer.
        component.problems.append(f"{short(single)} and {index.name} are both there; remove one")
        component.unlisted = True
    elif single.is_file():
        component.unlisted = _add_file(component, single) is None
    elif index.is_file():
        _add_shards(component, index)
    else:
        component.problems.append(f"{short(single)} is missing, and so is {index.name}")
        component.problems[-1] += _hint(folder)
        component.unlisted = True
    return component


def open_file(path: Path) -> Component:
    """Read the header of one file; keys may begin with the prefix that other programs give them.

    Reads no weights and raises nothing, as `open_component`.
    """
    component = Component(short(path))
    if path.suffix in PICKLED:
        component.problems.append(f"{short(path)}: pickled weights are code and are refused")
        component.unlisted = True
        return component
    component.unlisted = _add_file(component, path) is None
    component.tensors = {
        name.removeprefix(PREFIX): replace(tensor, name=name.removeprefix(PREFIX))
        for name, tensor in component.tensors.items()
    }
    return component


def _candidates(folder: Path, stem: str) -> tuple[Path, Path]:
    """The single file and the index, under their plain names or, where neither is there and there
    is only one, under those of a variant (`<stem>.fp16.safetensors`)."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if not single.is_file() and not index.is_file() and folder.is_dir():
        patterns = (f"{stem}.*.safetensors", f"{stem}.safetensors.index.*.json")
        found = [p for pattern in patterns for p in folder.glob(pattern) if "-of-" not in p.name]
        if len(found) == 1 and found[0].suffix == ".json":
            return single, found[0]
        if len(found) == 1:
            return found[0], index
    return single, index


def _hint(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    pickled = ", ".join(name for name in names if name.endswith(PICKLED))
    others = ", ".join(name for name in names if name.endswith(".safetensors"))
    hint = f"; {others} has another name" if others else ""
    return hint + (f" ({pickled}: pickled weights are code and are refused)" if pickled else "")


def _shard_names(index: Path) -> dict[str, str]:
    """Tensor name -> file name of an index file. Raises CheckpointError."""
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{short(index)} cannot be read: {error}") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not names:
        raise CheckpointError(f"{short(index)}: weight_map is missing, empty or no object")
    for name, file in names.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{short(index)}: {name} is in {file!r}; a file name in the same folder is needed"
            )
    return names


def _add_shards(component: Component, index: Path) -> None:
    try:
        names = _shard_names(index)
    except CheckpointError as error:
        component.problems.append(str(error))
        component.unlisted = True
        return
    by_file: dict[str, list[str]] = {}
    for name, file in names.items():
        by_file.setdefault(file, []).append(name)
    for file, listed in sorted(by_file.items()):
        path = index.parent / file
        if path.is_file():
            found = _add_file(component, path)
        else:
            component.problems.append(f"{short(path)} is missing; {index.name} names it")
            found = None
        absent = listed if found is None else [name for name in listed if name not in found]
        component.lost.update(absent)
        if found is not None:
            component.problems += _disagreements(path, index, absent, found - names.keys())


def _disagreements(
    path: Path, index: Path, absent: Iterable[str], extra: Iterable[str]
) -> list[str]:
    return [
        *(f"{short(path)}: {name} is not in it; {index.name} says so" for name in absent),
        *(f"{short(path)}: {name} is not listed in {index.name}" for name in sorted(extra)),
    ]


def _add_file(component: Component, path: Path) -> frozenset[str] | None:
    """Add the file's tensors and return their names; None if it has no readable header."""
    try:
        header = read_header(path)
    except CheckpointError as error:
        component.problems.append(str(error))
        return None
    component.stamps[path] = header.stamp
    component.problems += header.problems
    for tensor in header.tensors:
        twin = component.tensors.setdefault(tensor.name, tensor)
        if twin is not tensor:
            component.problems.append(f"{tensor.where} is in {twin.file.name} too")
    component.lost.update(header.names - component.tensors.keys())
    return header.names
