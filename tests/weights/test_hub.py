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
    socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
told = []
from firstlight.errors import CheckpointError
from firstlight.weights.hub import resolve
try:
    found = resolve(**arguments, progress=lambda *advance: told.append(advance))
    out = {"path": str(found.path), "name": found.name, "revision": found.revision}
except CheckpointError as error:
    out = {"error": str(error)}
out["hub imported"] = [m for m in ("huggingface_hub", "httpx", "httpx2") if m in sys.modules]
out["told"] = told
print(json.dumps(out))
"""

UNWANTED = (
    "flux-2-klein-tiny.safetensors",
    "README.md",
    "teaser.jpg",
    "other/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "tokenizer/vocab.json",
    "tokenizer/chat_template.jinja",
    "transformer/diffusion_pytorch_model.fp16.safetensors",
)


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
        assert "B/s" not in done.stderr, "the client's own bars are seen"
        return json.loads(done.stdout)

    return run


class TestLocal:
    def test_demo_and_folders_import_no_hub_client(self, ask, source: Path) -> None:
        found = ask("demo", block=True)
        assert (found["path"], found["name"]) == (str(DEMO_FOLDER), "demo")
        assert found["revision"] is None and found["hub imported"] == []
        found = ask(str(source), block=True)
        assert found["path"] == str(source) and not found["hub imported"]

    def test_a_folder_wins_over_every_name_but_demo(self, ask, tmp_path: Path) -> None:
        for name in ("klein-4b", REPO):
            (tmp_path / name).mkdir(parents=True)
            assert ask(name, block=True)["path"] == name
        (tmp_path / "demo").mkdir()  # must not break the default; ./demo means the folder
        assert ask("demo", block=True)["path"] == str(DEMO_FOLDER)
        assert ask("./demo", block=True)["path"] == "demo"

    def test_the_home_folder_may_be_abbreviated(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "klein").mkdir()
        assert resolve("~/klein").path == tmp_path / "klein"

    def test_a_file_is_no_model(self, tmp_path: Path, monkeypatch) -> None:
        """Not even where its path looks like a hub id."""
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "klein.safetensors").write_bytes(b"")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(CheckpointError, match=r"'models/klein\.safetensors', a file; give the"):
            resolve("models/klein.safetensors")

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
            again = ask(block=True, **options)
            assert (again["path"], again["revision"]) == (found["path"], COMMIT)
            assert again["hub imported"] == ["huggingface_hub"], "its client takes long to import"
            assert again["told"] == []
        assert hub.fetched == []

    def test_progress(self, ask, hub: Hub) -> None:
        """Bytes of the weights, from 0 to all."""
        told = ask()["told"]
        total = sum(
            len(data)
            for name, data in hub.files().items()
            if name.endswith(".safetensors") and name not in UNWANTED
        )
        assert told[0] == ["download", 0, total]
        assert told[-1] == ["download", total, total]
        done = [advance[1] for advance in told]
        assert done == sorted(done)

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
        shard = "text_encoder/model-00002-of-00002.safetensors"
        for name in ("model_index.json", "vae/config.json", shard):
            (path / name).unlink()
        for options in ({"offline": True}, {"env": {"HF_HUB_OFFLINE": "1"}}):
            error = ask(block=True, **options)["error"]
            assert f"missing model_index.json, vae/config.json, {shard}. Load it once" in error
            assert "offline" in error

    def test_incomplete_and_no_connection(self, ask, hub: Hub) -> None:
        path = Path(ask()["path"])
        (path / "vae/config.json").unlink()
        error = ask(env={"HF_ENDPOINT": "http://127.0.0.1:9"})["error"]
        assert error.startswith(f"{REPO} could not be downloaded: ") and "lacks" not in error

    def test_never_seen_and_offline(self, ask) -> None:
        error = ask(block=True, offline=True)["error"]
        assert f"{REPO} is not complete in the local cache" in error

    def test_revision_and_cache_dir(self, ask, tmp_path: Path) -> None:
        found = ask(revision=COMMIT, cache_dir=str(tmp_path / "elsewhere"))
        assert found["revision"] == COMMIT
        assert found["path"].startswith(str(tmp_path / "elsewhere"))
        again = ask(revision=COMMIT, cache_dir=str(tmp_path / "elsewhere"), block=True)
        assert again["path"] == found["path"]

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
    @pytest.mark.parametrize(("status", "only_files"), [(401, True), (403, True), (403, False)])
    def test_gated(self, ask, hub: Hub, status: int, only_files: bool) -> None:
        hub.refusal, hub.only_files = (status, "GatedRepo"), only_files
        error = ask()["error"]
        assert f"{REPO} is gated: accept its licence at {hub.url}/{REPO} " in error
        assert "set HF_TOKEN" in error and "\n" not in error

    def test_gated_in_the_middle(self, ask, hub: Hub) -> None:
        """Cached in part, described to anybody, and its files refused."""
        path = Path(ask()["path"])
        (path / "vae/config.json").unlink()
        (path / "vae/config.json").resolve().unlink(missing_ok=True)
        hub.refusal, hub.only_files = (403, "GatedRepo"), True
        assert "is gated: accept its licence" in ask()["error"]

    def test_no_such_repository(self, ask) -> None:
        error = ask("acme/absent")["error"]
        assert error.startswith("acme/absent is no folder here and not on the hub, or is private")
        assert "\n" not in error

    def test_another_kind_of_repository(self, ask, hub: Hub, tmp_path: Path) -> None:
        hub.folder = tmp_path / "empty"
        error = ask()["error"]
        assert error == f"{REPO} holds no model in diffusers' layout: no model_index.json"

    @pytest.mark.parametrize("name", ["acme/a--b", "acme/a.git"])
    def test_names_that_the_hub_does_not_allow(self, ask, name: str) -> None:
        assert ask(name)["error"].startswith(f"{name} is no hub id: ")

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
