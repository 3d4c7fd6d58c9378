# SPDX-License-Identifier: Apache-2.0
"""Fetching from the hub exactly the files that are missing. Imports the hub's client."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub import errors as hub
from huggingface_hub.utils import tqdm

from firstlight.errors import CheckpointError
from firstlight.progress import Progress
from firstlight.weights.folder import INDEX, REQUIRED, STEMS, missing_files
from firstlight.weights.load import Counter

FILES_AT_ONCE = 8


def download(
    repo: str, revision: str | None, cache_dir: str | Path | None, progress: Progress
) -> Path:
    """Complete the snapshot of `repo` in the hub's local cache and return its folder.

    Raises CheckpointError: refused, not found, no connection, or a needed file is not there.
    """
    with _explained(repo, revision):
        # Asked first: the client gives up at once here, but after many retries where it fetches.
        listing = HfApi().model_info(repo, revision=revision, files_metadata=True).siblings
        sizes = {file.rfilename: file.size or 0 for file in listing or ()}
        if INDEX not in sizes:
            raise CheckpointError(f"{repo} holds no model in diffusers' layout: no {INDEX}")
        # Under the name of the revision: so the cache remembers which commit that is.
        index = hf_hub_download(
            repo, INDEX, revision=revision, cache_dir=cache_dir, tqdm_class=_bar(_ignore)
        )
        folder = Path(index).parent
        fetch = partial(_fetch, repo, folder, cache_dir)
        indexes = [f"{name}/{stem}.safetensors.index.json" for name, stem in STEMS.items()]
        small = [name for name in (*REQUIRED, *indexes) if name in sizes]
        fetch(small, _ignore)
        # Only now is it known which shards there are.
        missing = missing_files(folder)
        lacking = [name for name in missing if name not in sizes]
        if lacking:
            raise CheckpointError(f"{repo} lacks {', '.join(lacking)} on the hub")
        total = sum(sizes[name] for name in missing)
        counter = Counter(lambda done: progress("download", min(done, total), total))
        counter.add(0)
        fetch(missing, counter.add)
    return folder


def _fetch(
    repo: str,
    folder: Path,
    cache_dir: str | Path | None,
    names: list[str],
    on_bytes: Callable[[int], None],
) -> None:
    def one(name: str) -> None:
        hf_hub_download(
            repo, name, revision=folder.name, cache_dir=cache_dir, tqdm_class=_bar(on_bytes)
        )

    with ThreadPoolExecutor(FILES_AT_ONCE, "firstlight-download") as pool:
        try:
            for _ in pool.map(one, names):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def _ignore(count: int) -> None:
    """Small files are not worth a bar."""


def _bar(on_bytes: Callable[[int], None]) -> Any:
    """Make the class of a progress bar that draws nothing and passes byte counts on."""

    class Bar(tqdm):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **{**named, "disable": True})
            on_bytes(int(named.get("initial") or 0))  # what an earlier attempt has left

        def update(self, n: float | None = 1) -> None:
            on_bytes(int(n or 0))

        def update_transfer(self, n: float | None = 1) -> None:
            """Bytes on the wire, where these are counted apart from the file's own."""

        def set_transfer_postfix_str(self, *_: Any, **__: Any) -> None:
            """Rates are the front end's business."""

    return Bar


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn what the hub's client raises into one line that says what to do."""
    try:
        yield
    except hub.GatedRepoError as error:
        raise CheckpointError(
            f"{repo} is gated: accept its licence at {constants.ENDPOINT}/{repo} while logged in, "
            "then set HF_TOKEN to a token of that account (or run `hf auth login`)"
        ) from error
    except hub.RevisionNotFoundError as error:
        raise CheckpointError(f"{repo} has no revision {revision!r}") from error
    except hub.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{repo} is no folder here and not on the hub, or is private: check the name; for a "
            "private repository set HF_TOKEN"
        ) from error
    except hub.HFValidationError as error:
        raise CheckpointError(f"{repo} is no hub id: {_reason(error)}") from error
    except (OSError, RuntimeError, *_transport_errors()) as error:
        raise CheckpointError(
            f"{repo} could not be downloaded: {_reason(error)}. Check the connection and try "
            "again; finished files are kept"
        ) from error


def _transport_errors() -> tuple[type[Exception], ...]:
    """Errors of the library under the hub's client, which it lets through (1.x uses httpx)."""
    modules = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return tuple(module.HTTPError for module in modules)


def _reason(error: BaseException) -> str:
    """The first line of the error that was at the root of it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
