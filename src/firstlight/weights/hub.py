# SPDX-License-Identifier: Apache-2.0
"""Finding a model: packaged, in a folder, in the hub's local cache, and on the hub last."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from firstlight.errors import CheckpointError
from firstlight.models.variants import ALIASES
from firstlight.progress import Progress, silent
from firstlight.weights.folder import missing_files

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent.parent / "data" / "demo"


@dataclass(frozen=True)
class ResolvedModel:
    """A folder in diffusers' layout; `name` and `revision` go into a picture's metadata."""

    path: Path
    name: str
    revision: str | None


def resolve(
    model: str,
    *,
    revision: str | None = None,
    offline: bool = False,
    cache_dir: str | Path | None = None,
    progress: Progress = silent,
) -> ResolvedModel:
    """Find `model`: an existing folder, `"demo"`, an alias, or a hub id (`"org/name"`).

    The hub's local cache is looked at first, with no socket; the network is asked only if files
    are missing there, and never with `offline` or the environment's HF_HUB_OFFLINE. `revision` is
    a branch, a tag or a commit of the hub's repository.

    Raises:
        CheckpointError: not found, not complete, or refused by the hub; says what to do.
    """
    local = _local(model)
    if local is not None:
        if revision is not None:
            raise CheckpointError(
                f"revision is {revision!r}, but {model} is a folder, which has no revisions; "
                "leave it out"
            )
        return ResolvedModel(local, model, None)
    repo = ALIASES.get(model, model)
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repo, re.ASCII):
        raise CheckpointError(
            f"model is {model!r}; give a folder, a hub id like 'org/name', or one of "
            f"{', '.join((DEMO, *ALIASES))}"
        )
    folder = _cached(repo, revision, cache_dir)
    missing = ["all of it"] if folder is None else missing_files(folder)
    if missing or folder is None:
        if offline or _is_offline():
            raise CheckpointError(
                f"{repo} is not complete in the local cache, and the hub is not asked (offline): "
                f"missing {', '.join(missing)}. Load it once while online, or give a folder"
            )
        # The hub's client takes longer to import than all of the above.
        from firstlight.weights.download import download

        folder = download(repo, revision, cache_dir, progress)
    return ResolvedModel(folder, model, folder.name)


def _local(model: str) -> Path | None:
    if model == DEMO:  # a folder of this name in the current one is ./demo
        return DEMO_FOLDER
    path = Path(os.path.expanduser(model)) if model else None
    if path is not None and path.is_dir():
        return path
    if path is not None and path.is_file():
        raise CheckpointError(f"model is {model!r}, a file; give the model's folder")
    return None


def _cached(repo: str, revision: str | None, cache_dir: str | Path | None) -> Path | None:
    """The snapshot's folder in the local cache, complete or not. Opens no socket."""
    from huggingface_hub.constants import DEFAULT_REVISION, HF_HUB_CACHE

    storage = Path(cache_dir or HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}"
    commit = revision or DEFAULT_REVISION
    reference = storage / "refs" / commit
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8").strip()
    folder = storage / "snapshots" / commit
    return folder if folder.is_dir() else None


def _is_offline() -> bool:
    """As the hub's client has it, and also where the environment was set after its import."""
    from huggingface_hub.constants import HF_HUB_OFFLINE

    now = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    return HF_HUB_OFFLINE or now
