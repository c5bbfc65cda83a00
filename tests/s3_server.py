"""A real S3 server (moto's, in a process of its own), and a faulty connection to it."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

pytest.importorskip("moto", reason="needs moto's S3 server: pip install 'moto[server]'")
boto3 = pytest.importorskip("boto3", reason="needs boto3: pip install 'clew[aws]'")

SECRET = "wJalrXUtnFEMI+K7MDENG+bPxRfiCYEXAMPLEKEY"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"
BUCKET = "models"


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Runs the server; yields its address. Set the environment with ``account``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import sys; from moto.server import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).read()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < until, "moto's server does not start"
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


def account(url: str) -> dict[str, str]:
    """Environment of a process that uses that server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_MAX_ATTEMPTS": "2",
    }


def put_adapters(folder: Path, names: Iterable[str], prefix: str) -> str:
    """Uploads adapters of a folder, with the account of the environment; returns where they are."""
    client = boto3.session.Session().client("s3")
    client.create_bucket(Bucket=BUCKET)
    for name in names:
        for file in (folder / name).iterdir():
            client.upload_file(str(file), BUCKET, f"{prefix}/{name}/{file.name}")
    return f"s3://{BUCKET}/{prefix}"


@contextlib.contextmanager
def connection(
    url: str, cut: Callable[[str, str, bytes], bytes | tuple[int, bytes] | None]
) -> Iterator[tuple[str, list[str]]]:
    """A proxy before the server; yields its address and the list of requests (``GET /bucket/key``).

    Args:
        cut: method, path and body of an answer -> the body that is sent on (perhaps fewer bytes than are announced), or
            a status and another body. None hangs up at once.
    """
    to = urlsplit(url)
    seen: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            seen.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            server = http.client.HTTPConnection(to.hostname or "", to.port)
            headers = {key: value for key, value in self.headers.items() if key != "Expect"}
            server.request(self.command, self.path, body, headers)
            answer = server.getresponse()
            whole = answer.read()
            self.close_connection = True
            if (sent := cut(self.command, self.path, whole)) is None:
                return
            status = answer.status
            if isinstance(sent, tuple):
                status, whole = sent
                sent = whole
            self.send_response(status)
            for key, value in answer.getheaders():
                if key.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(key, value)
            of_head = self.command == "HEAD" and answer.getheader("Content-Length")
            self.send_header("Content-Length", of_head or str(len(whole)))
            self.end_headers()
            self.wfile.write(sent)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = forward

        def log_message(self, *arguments: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}", seen
    finally:
        proxy.shutdown()
        proxy.server_close()
