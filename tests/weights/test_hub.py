# SPDX-License-Identifier: Apache-2.0
"""Finding models: folders, the local cache without a socket, and the hub last.

The hub's client reads its environment when it is imported, so each case is a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import COMMIT, Hub, serving

from firstlight.errors import CheckpointError
from firstlight.models.variants import ALIASES
from firstlight.weights.hub import DEMO_FOLDER, resolve

REPO = "acme/klein-tiny"

SCRIPT = """
import json, socket, sys
arguments, block = json.loads(sys.argv[1]), json.loads(sys.argv[2])
if block:
    def refuse(*_, **__):
        raise AssertionError("a socket was opened")
    socket.socket.connect = socket.getaddrinfo = refuse
from firstlight.errors import CheckpointError
from firstlight.weights.hub import resolve
try:
    found = resolve(**arguments)
    out = {"path": str(found.path), "name": found.name, "revision": found.revision}
except CheckpointError as error:
    out = {"error": str(error)}
out["hub imported"] = "huggingface_hub" in sys.modules
print(json.dumps(out))
"""

UNWANTED = ("flux-2-klein-tiny.safetensors", "README.md", "teaser.jpg", "other/model.safetensors")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.write_model(tmp_path_factory.mktemp("hub") / "model", shards=2)
    for name in UNWANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"not wanted")
    return folder


@pytest.fixture
def hub(source: Path) -> Iterator[Hub]:
    with serving(source, REPO) as made:
        yield made


@pytest.fixture
def ask(tmp_path: Path, hub: Hub):
    def run(
        model: str = REPO, *, block: bool = False, env: dict[str, str] | None = None, **more: Any
    ) -> dict[str, Any]:
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))},
            "HF_HOME": str(tmp_path / "home"),
            "HF_ENDPOINT": hub.url,
            "NO_PROXY": "127.0.0.1",
            **(env or {}),
        }
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps({"model": model, **more}), json.dumps(block)],
            capture_output=True, text=True, env=environment, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


class TestLocal:
    def test_demo_and_folders_import_no_hub_client(self, ask, source: Path) -> None:
        found = ask("demo", block=True)
        assert found == {
            "path": str(DEMO_FOLDER), "name": "demo", "revision": None, "hub imported": False,
        }  # fmt: skip
        found = ask(str(source), block=True)
        assert found["path"] == str(source) and not found["hub imported"]

    def test_a_folder_wins_over_every_name(self, ask, tmp_path: Path) -> None:
        for name in ("demo", "klein-4b", REPO):
            (tmp_path / name).mkdir(parents=True)
            assert ask(name, block=True)["path"] == name

    @pytest.mark.parametrize("name", ["klein-5b", "a/b/c", "/nowhere/at-all", "./x", "", "a b/c"])
    def test_unknown_names_list_what_is_known(self, name: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            resolve(name)
        for alias in ("demo", *ALIASES, repr(name)):
            assert alias in str(caught.value)

    @pytest.mark.parametrize("name", ["demo", "folder"])
    def test_a_revision_of_something_without_revisions(self, tmp_path: Path, name: str) -> None:
        model = str(tmp_path) if name == "folder" else name
        with pytest.raises(CheckpointError, match=r"revision is 'v1'.*has no revisions"):
            resolve(model, revision="v1")


class TestDownload:
    def test_only_what_is_needed_and_only_once(self, ask, hub: Hub, source: Path) -> None:
        found = ask()
        assert found["revision"] == COMMIT and found["name"] == REPO
        assert sorted(hub.fetched) == sorted(set(hub.files()) - set(UNWANTED))
        hub.fetched.clear()
        for options in ({}, {"offline": True}, {"env": {"HF_HUB_OFFLINE": "1"}}):
            assert ask(block=True, **options) == found
        assert hub.fetched == []

    def test_what_is_missing_is_fetched(self, ask, hub: Hub) -> None:
        path = Path(ask()["path"])
        lost = "transformer/diffusion_pytorch_model-00002-of-00002.safetensors"
        (path / lost).resolve().unlink()
        (path / lost).unlink()
        hub.fetched.clear()
        assert Path(ask()["path"]) == path
        assert hub.fetched == [lost]

    def test_incomplete_and_offline(self, ask, hub: Hub) -> None:
        path = Path(ask()["path"])
        (path / "vae/config.json").unlink()
        for options in ({"offline": True}, {"env": {"HF_HUB_OFFLINE": "1"}}):
            error = ask(block=True, **options)["error"]
            assert "missing vae/config.json" in error and "offline" in error

    def test_never_seen_and_offline(self, ask) -> None:
        error = ask(block=True, offline=True)["error"]
        assert f"{REPO} is not complete in the local cache" in error

    def test_revision_and_cache_dir(self, ask, tmp_path: Path) -> None:
        found = ask(revision=COMMIT, cache_dir=str(tmp_path / "elsewhere"))
        assert found["revision"] == COMMIT
        assert found["path"].startswith(str(tmp_path / "elsewhere"))
        again = ask(revision=COMMIT, cache_dir=str(tmp_path / "elsewhere"), block=True)
        assert again == found

    def test_repository_without_a_needed_file(self, ask, hub: Hub, source: Path) -> None:
        path = source / "scheduler/scheduler_config.json"
        content = path.read_bytes()
        path.unlink()
        try:
            error = ask()["error"]
        finally:
            path.write_bytes(content)
        assert error == f"{REPO} lacks scheduler/scheduler_config.json on the hub"


class TestRefusals:
    @pytest.mark.parametrize("status", [401, 403])
    def test_gated(self, ask, hub: Hub, status: int) -> None:
        hub.refusal = (status, "GatedRepo")
        error = ask()["error"]
        assert f"{REPO} is gated: accept its licence" in error
        assert "set HF_TOKEN" in error and "\n" not in error

    def test_no_such_repository(self, ask) -> None:
        error = ask("acme/absent")["error"]
        assert (
            error.startswith("acme/absent is not on the hub, or is private") and "\n" not in error
        )

    def test_no_such_revision(self, ask) -> None:
        error = ask(revision="v9")["error"]
        assert error == f"{REPO} has no revision 'v9'"

    def test_hub_is_down(self, ask, hub: Hub) -> None:
        hub.refusal = (500, "")
        error = ask()["error"]
        assert error.startswith(f"{REPO} could not be downloaded: ") and "\n" not in error

    def test_no_connection(self, ask) -> None:
        error = ask(env={"HF_ENDPOINT": "http://127.0.0.1:9"})["error"]
        assert error.startswith(f"{REPO} could not be downloaded: ") and "\n" not in error
        assert "Check the connection" in error
