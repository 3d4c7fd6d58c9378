# SPDX-License-Identifier: Apache-2.0
"""Finding a model: packaged, in a folder, in the hub's local cache, and on the hub last."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firstlight.errors import CheckpointError
from firstlight.models.variants import ALIASES
from firstlight.progress import Progress, silent
from firstlight.weights.folder import CLASSES, REQUIRED, STEMS
from firstlight.weights.reader import shard_names

DEMO = "demo"
DEMO_FOLDER = Path(__file__).parent.parent / "data" / "demo"

PATTERNS = ["model_index.json", *(f"{component}/*" for component in CLASSES)]
"""Files of a repository that are wanted: not its single-file weights, not its pictures."""


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
    are missing there, and never with `offline` or the environment's HF_HUB_OFFLINE.

    Raises:
        CheckpointError: not found, not complete, or refused by the hub; says what to do.
    """
    local = (
        Path(model) if model and Path(model).is_dir() else DEMO_FOLDER if model == DEMO else None
    )
    if local is not None:
        if revision is not None:
            raise CheckpointError(
                f"revision is {revision!r}, but {model} is a folder, which has no revisions; "
                "leave it out"
            )
        return ResolvedModel(local, model, None)
    repo = ALIASES.get(model, model)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo) or repo.startswith((".", "/")):
        raise CheckpointError(
            f"model is {model!r}; give a folder, a hub id like 'org/name', or one of "
            f"{', '.join((DEMO, *ALIASES))}"
        )
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    folder = _cached(repo, revision, cache_dir)
    missing = ["the repository"] if folder is None else missing_files(folder)
    if missing and offline:
        raise CheckpointError(
            f"{repo} is not complete in the local cache, and the hub is not asked (offline): "
            f"missing {', '.join(missing)}. Load it once while online, or give a folder"
        )
    if missing or folder is None:
        folder = _download(repo, revision, cache_dir)
        missing = missing_files(folder)
        if missing:
            raise CheckpointError(f"{repo} lacks {', '.join(missing)} on the hub")
    return ResolvedModel(folder, model, folder.name)


def missing_files(folder: Path) -> list[str]:
    """Files that a model folder needs and does not have, weight shards included."""
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    for component, stem in STEMS.items():
        single = folder / component / f"{stem}.safetensors"
        index = folder / component / f"{stem}.safetensors.index.json"
        if single.is_file():
            continue
        if not index.is_file():
            missing.append(f"{component}/{single.name}")
            continue
        shards = sorted(set(shard_names(index).values()))
        missing += [f"{component}/{n}" for n in shards if not (index.parent / n).is_file()]
    return missing


def _cached(repo: str, revision: str | None, cache_dir: str | Path | None) -> Path | None:
    """The snapshot's folder in the local cache, complete or not. Opens no socket."""
    from huggingface_hub import try_to_load_from_cache

    index = try_to_load_from_cache(repo, "model_index.json", cache_dir, revision)
    return Path(index).parent if isinstance(index, str) else None


def _download(repo: str, revision: str | None, cache_dir: str | Path | None) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download

    page = f"https://huggingface.co/{repo}"
    arguments: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    try:
        return Path(snapshot_download(repo, allow_patterns=PATTERNS, **arguments))
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence at {page} while logged in, then set HF_TOKEN "
            "to a token of that account (or run `hf auth login`)"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is not on the hub, or is private: check the name; for a private repository "
            "set HF_TOKEN"
        ) from error
    except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{repo} could not be downloaded: {reason}. Check the connection and try again; "
            "finished files are kept"
        ) from error
