"""A stand-in for the model hub: real HTTP on this machine, with what ``huggingface_hub`` asks for and no more.

Two servers, as there: the hub itself (the API, and small files, which lie in git), and another host that large files
are redirected to by signed addresses and that must never be shown a token. Faults are given file by file and used up
one a request. Every request is recorded.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".json.gz")  # what lies in LFS, whatever its size
PAGE = 5  # entries of a tree listing
SIGNATURE = "s1gnature-that-nobody-may-print"


@dataclass
class Fault:
    """What happens to one GET of a file.

    ``status`` is answered instead; ``cut`` and ``reset`` end the connection after as many bytes (in order, or by
    RST), ``corrupt`` flips the byte there, ``hold`` stops there, sets ``reached`` and waits for ``release``.
    """

    status: int | None = None
    cut: int | None = None
    reset: int | None = None
    corrupt: int | None = None
    hold: int | None = None
    reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Request:
    """One request: which server it came to, method, path (decoded), Range header, whether it bore a token."""

    host: str
    method: str
    path: str
    range: str | None
    token: bool


class Hub:
    """Repositories with their commits, and the requests made for them.

    Attributes:
        files: {(repository, commit): {path: content}}.
        refs: {repository: {branch or tag: commit}}.
        access: {repository: "gated" | "private" | "forbidden"}; "gated" and "private" open to any token.
        faults: {path in the repository, or "info": faults to come}.
        requests: everything that was asked so far.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.access: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.requests: list[Request] = []
        self.lock = threading.Lock()
        self.endpoint = self.store = ""

    def push(self, repository: str, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit; returns it."""
        content = repr(
            (len(self.files), sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items()))
        )
        commit = hashlib.sha1(content.encode()).hexdigest()
        self.files[repository, commit] = dict(files)
        self.refs.setdefault(repository, {})[branch] = commit
        return commit

    def bodies(self, path: str | None = None) -> list[Request]:
        """The GET requests for contents of files (of one path in the repository)."""
        found = [r for r in self.requests if r.method == "GET" and (r.host == "store" or "/resolve/" in r.path)]
        return [r for r in found if path is None or r.path.endswith(f"/{path}")]

    def next_fault(self, name: str) -> Fault:
        with self.lock:
            waiting = self.faults.get(name)
            return waiting.pop(0) if waiting else Fault()


def folder_files(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """The files of a folder by their paths in a repository."""
    return {prefix + p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def serve() -> Iterator[Hub]:
    """A running hub; its address is ``endpoint``."""
    hub = Hub()
    servers = []
    for host in ("hub", "store"):
        handler = type("Handler", (_Handler,), {"hub": hub, "host": host})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_address[1]}"
    hub.store = f"http://localhost:{servers[1].server_address[1]}"  # another host by its name
    try:
        yield hub
    finally:
        for fault in (fault for faults in hub.faults.values() for fault in faults):
            fault.release.set()
        for server in servers:
            server.shutdown()
            server.server_close()


def is_large(path: str) -> bool:
    return path.endswith(LARGE)


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _pointer_id(content: bytes) -> str:
    """What git itself holds of a large file."""
    sha = hashlib.sha256(content).hexdigest()
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha}\nsize {len(content)}\n"
    return _blob_id(pointer.encode())


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    folders = {parent.as_posix() for path in files for parent in Path(path).parents} - {"."}
    entries: list[dict[str, Any]] = [
        {"type": "directory", "path": f, "size": 0, "oid": "0" * 40} for f in sorted(folders)
    ]
    for path, content in sorted(files.items()):
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": _blob_id(content)}
        if is_large(path):
            entry["oid"] = _pointer_id(content)
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return entries


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: Hub
    host: str

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path), parse_qs(url.query)
        token = self.headers.get("Authorization")
        ranged = self.headers.get("Range")
        self.hub.requests.append(Request(self.host, self.command, path, ranged, token is not None))
        if self.host == "store":
            assert query["Signature"] == [SIGNATURE]
            _, owner, name, commit, inner = path.split("/", 4)
            return self._body(inner, self.hub.files[f"{owner}/{name}", commit][inner])
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/(.+)", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api is None and file is None:  # the library also asks for things that nothing depends on
            return self._refuse(404, "NotFound")
        repository, revision = (api[1], api[3]) if api else (file[1], file[2])
        if repository not in self.hub.refs:
            return self._refuse(404, "RepoNotFound")
        access = self.hub.access.get(repository)
        if access == "forbidden" or (access and token is None):
            codes = {"gated": (403, "GatedRepo"), "private": (401, ""), "forbidden": (403, "")}
            return self._refuse(*codes[access])
        commit = self.hub.refs[repository].get(revision, revision)
        files = self.hub.files.get((repository, commit))
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        if file:
            return self._resolve(repository, commit, file[3], files)
        if (status := self.hub.next_fault("info").status) is not None:
            return self._refuse(status, "")
        if api[2] == "revision":
            return self._json({"id": repository, "sha": commit, "siblings": [{"rfilename": path} for path in files]})
        start = int(query.get("cursor", ["0"])[0])
        entries, rest = _tree(files), f"{self.hub.endpoint}{url.path}?recursive=True&cursor={start + PAGE}"
        more = {"Link": f'<{rest}>; rel="next"'} if start + PAGE < len(entries) else {}
        return self._json(entries[start : start + PAGE], more)

    def _resolve(self, repository: str, commit: str, path: str, files: dict[str, bytes]) -> None:
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        content, named = files[path], {"X-Repo-Commit": commit}
        if not is_large(path):
            return self._body(path, content, {**named, "ETag": f'"{_blob_id(content)}"'})
        self._start(
            302,
            {
                **named,
                "Location": f"{self.hub.store}/{repository}/{commit}/{path}?Signature={SIGNATURE}",
                "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Linked-Size": str(len(content)),
                "Content-Length": "0",
            },
        )

    def _body(self, path: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        headers = {**(headers or {}), "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._start(200, {**headers, "Content-Length": str(len(content))})
        fault = self.hub.next_fault(path)
        if fault.status is not None:
            return self._refuse(fault.status, "")
        if fault.corrupt is not None:
            at = fault.corrupt
            content = content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]
        ranged = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(ranged[1]) if ranged else 0
        if ranged:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._start(206 if ranged else 200, {**headers, "Content-Length": str(len(content) - start)})
        stop = next((n for n in (fault.cut, fault.reset, fault.hold) if n is not None), None)
        try:
            self.wfile.write(content[start:stop])
            self.wfile.flush()
            if fault.hold is not None:
                fault.reached.set()
                fault.release.wait(120)
                self.wfile.write(content[stop:])
        except (BrokenPipeError, ConnectionResetError):  # the client was killed
            self.close_connection = True
        if fault.reset is not None:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        if fault.cut is not None or fault.reset is not None:
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        self._json({"error": "no"}, {"X-Error-Code": code} if code else {}, status)

    def _json(self, content: Any, headers: dict[str, str] | None = None, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self._start(status, {**(headers or {}), "Content-Type": "application/json", "Content-Length": str(len(data))})
        if self.command != "HEAD":
            self.wfile.write(data)

    def _start(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
