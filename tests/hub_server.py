"""A hub on this machine: as much of the Hugging Face Hub's interface as `snapshot_download` uses, over files in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_INFO = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/revision/([^?]+)")
_INFO_MAIN = re.compile(r"/api/(models|datasets)/([^/?]+/[^/?]+)(?:\?|$)")
_TREE = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)/tree/([^/?]+)")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
DENIED = {"absent": (404, "RepoNotFound"), "gated": (403, "GatedRepo"), "broken": (500, "")}


class Hub:
    """`commits[KIND ORG/NAME]`: its versions, each a table of files; `asked`: the paths of all requests."""

    def __init__(self) -> None:
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.asked: list[str] = []
        self.url = ""

    def put(self, kind: str, name: str, files: dict[str, bytes]) -> str:
        """A further commit, which `main` then is. Returns its hash."""
        self.commits.setdefault(f"{kind} {name}", []).append(files)
        return self.hash_of(f"{kind} {name}", len(self.commits[f"{kind} {name}"]) - 1)

    def put_folder(self, kind: str, name: str, folder: Path) -> str:
        return self.put(kind, name, {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()})

    @staticmethod
    def hash_of(what: str, number: int) -> str:
        return hashlib.sha1(f"{what} {number}".encode()).hexdigest()

    def find(self, what: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        every = self.commits[what]
        hashes = [self.hash_of(what, number) for number in range(len(every))]
        place = {"main": len(every) - 1, "first": 0}.get(revision, hashes.index(revision) if revision in hashes else None)
        return None if place is None else (hashes[place], every[place])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        return None

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        self.hub.asked.append(self.path)
        if found := _FILE.match(self.path):
            kind, name, revision, file = "datasets" if found[1] else "models", found[2], found[3], found[4].partition("?")[0]
        elif found := _INFO.match(self.path) or _TREE.match(self.path) or _INFO_MAIN.match(self.path):
            kind, name, revision, file = found[1], found[2], found[3] if found.lastindex == 3 else "main", ""
        else:
            return self._send(404, b"{}", body, {"X-Error-Code": "EntryNotFound"})
        what = f"{kind[:-1]} {name}"
        denied = DENIED.get(name.partition("/")[2]) or (None if what in self.hub.commits else DENIED["absent"])
        if denied:
            return self._send(denied[0], b"{}", body, {"X-Error-Code": denied[1], "X-Error-Message": denied[1]})
        if (at := self.hub.find(what, revision)) is None:
            return self._send(404, b"{}", body, {"X-Error-Code": "RevisionNotFound"})
        commit, files = at
        if file:
            content = files[file]
            tag = hashlib.sha1(content).hexdigest()
            return self._send(200, content, body, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})
        if "/tree/" in self.path:
            oid = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
            rows = [{"type": "file", "path": n, "size": len(c), "oid": oid[n]} for n, c in files.items()]
            return self._send(200, json.dumps(rows).encode(), body, {})
        told = {"id": name, "sha": commit, "private": False, "downloads": 0, "likes": 0, "tags": []}
        told["siblings"] = [{"rfilename": each} for each in files]
        self._send(200, json.dumps(told).encode(), body, {})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@contextmanager
def running() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=10)
