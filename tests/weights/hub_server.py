# SPDX-License-Identifier: Apache-2.0
"""As much of the Hugging Face hub as a download needs, on the loopback interface."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Serves the files of `folder` as `repo`; remembers which were fetched.

    `refusal` is an HTTP status and an error code: of every answer, or with `only_files` of those
    that hold a file's content (a gated repository describes itself to anybody).
    """

    def __init__(self, folder: Path, repo: str) -> None:
        self.folder = folder
        self.repo = repo
        self.refusal: tuple[int, str] | None = None
        self.only_files = False
        self.fetched: list[str] = []
        self.url = ""

    def files(self) -> dict[str, bytes]:
        return {
            str(path.relative_to(self.folder)): path.read_bytes()
            for path in self.folder.rglob("*")
            if path.is_file()
        }

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        api, files = f"/api/models/{self.repo}/revision/", f"/{self.repo}/resolve/"
        if path == f"/api/models/{self.repo}":
            path = api + "main"
        if not path.startswith((api, files)):
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        if self.refusal and (path.startswith(files) or not self.only_files):
            return self.refusal[0], {"X-Error-Code": self.refusal[1]}, b""
        revision, _, name = path.removeprefix(api).removeprefix(files).partition("/")
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        content = self.files()
        if path.startswith(api):
            siblings = [{"rfilename": key, "size": len(data)} for key, data in content.items()]
            answer = {"id": self.repo, "sha": COMMIT, "siblings": siblings}
            return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()
        if name not in content:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        data = content[name]
        if method == "GET":
            self.fetched.append(name)
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{_digest(data)}"'}, data


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def serving(folder: Path, repo: str) -> Iterator[Hub]:
    hub = Hub(folder, repo)

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            status, headers, body = hub.answer(self.command, urlparse(self.path).path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = respond

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
