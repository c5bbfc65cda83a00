"""A stand-in for the two AWS ends of `sagemaker_ray://`, with TLS, in front of a real Ray dashboard.

It is not AWS. It does what the toolkit for Ray on SageMaker asks of them: an API server of Kubernetes that answers a
RayDashboardConnection with a link, and a gateway that takes the link's token for a session cookie and passes on
everything, the log's websocket too, for whoever has one. Tests end sessions, cut connections and close it.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import subprocess
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientSession, WSMsgType, web

CONNECTIONS = "/apis/connection.access.sagemaker.amazonaws.com/v1alpha1/namespaces/{namespace}/raydashboardconnections"
_HOPS = {"host", "connection", "content-length", "transfer-encoding", "content-encoding", "cookie"}


class Gateway:
    """The stand-in, in a thread of its own.

    Args:
        dashboard: address of the real one.
        folder: for its certificate and the kubeconfig.
        tls: whether it speaks TLS; without, no session is asked for: a plain proxy.

    Attributes:
        sign_ins: sessions given so far.
        let_in: whether the API server accepts the kubeconfig's token.
        to_login: whether a request without a session is sent to a sign-in page instead of refused.
        open: whether it passes anything on; else it answers 503.
    """

    token = "static-token-of-a-test"

    def __init__(self, dashboard: str, folder: Path, tls: bool = True) -> None:
        self.dashboard, self.tls = dashboard, tls
        self.sessions: set[str] = set()
        self.links: set[str] = set()
        self.sign_ins, self.let_in, self.to_login, self.open = 0, True, False, True
        self.requests: list[str] = []
        self._transports: set[asyncio.Transport] = set()
        self.certificate = folder / "gateway.pem"
        self.kubeconfig = folder / "kubeconfig"
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        if tls:
            _make_certificate(self.certificate)
        self.port: int = self._call(self._start())
        scheme = "https" if tls else "http"
        self.url = f"{scheme}://localhost:{self.port}"
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig()))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def _kubeconfig(self) -> dict[str, Any]:
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        return {
            "current-context": "test",
            "contexts": [{"name": "test", "context": {"cluster": "eks", "user": "me"}}],
            "clusters": [{"name": "eks", "cluster": cluster}],
            "users": [{"name": "me", "user": {"token": self.token}}],
        }

    def environment(self) -> dict[str, str]:
        """Variables of a client: its kubeconfig, and whom it trusts."""
        trusted = str(self.certificate)
        return {"KUBECONFIG": str(self.kubeconfig), "REQUESTS_CA_BUNDLE": trusted, "SSL_CERT_FILE": trusted}

    def expire(self) -> None:
        """Ends every session and its connections: six hours are over."""
        self.sessions.clear()
        self.cut()

    def cut(self) -> None:
        """Breaks every open websocket off, without a closing word."""

        async def abort() -> None:
            for transport in list(self._transports):
                transport.abort()

        self._call(abort())

    def close(self) -> None:
        """Stops listening."""
        self._call(self._runner.cleanup())
        self._call(self._session.close())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _start(self) -> int:
        self._session = ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=2**30)
        app.router.add_post(CONNECTIONS, self._connect)
        app.router.add_get("/bearer-auth", self._sign_in)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        context = None
        if self.tls:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.certificate)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def _connect(self, request: web.Request) -> web.Response:
        if not self.let_in or request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"message": "Unauthorized"}, status=401)
        body = await request.json()
        assert body["kind"] == "RayDashboardConnection"
        if (request.match_info["namespace"], body["spec"]["clusterName"]) != ("team-a", "maze"):
            return web.json_response({"message": "not found"}, status=404)
        link = secrets.token_hex(16)
        self.links.add(link)
        return web.json_response({"status": {"connectionUrl": f"{self.url}/?token={link}"}}, status=201)

    async def _sign_in(self, request: web.Request) -> web.Response:
        if request.query.get("token") not in self.links:
            return web.Response(status=401)
        self.links.remove(request.query["token"])  # good for once
        session = secrets.token_hex(16)
        self.sessions.add(session)
        self.sign_ins += 1
        answer = web.Response(status=302, headers={"Location": "/"})
        answer.set_cookie("ray_session", session, secure=True, httponly=True)
        return answer

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(f"{request.method} {request.path}")
        if not self.open:
            return web.Response(status=503)
        if self.tls and request.cookies.get("ray_session") not in self.sessions:
            if self.to_login:
                return web.Response(status=302, headers={"Location": "https://signin.invalid/?token=secret"})
            return web.Response(status=401)
        if request.headers.get("Upgrade", "").lower() == "websocket":
            return await self._pass_websocket(request)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOPS}
        url, body = self.dashboard + request.path_qs, await request.read()
        async with self._session.request(request.method, url, headers=headers, data=body) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in _HOPS}
            return web.Response(status=answer.status, body=await answer.read(), headers=kept)

    async def _pass_websocket(self, request: web.Request) -> web.WebSocketResponse:
        here = web.WebSocketResponse()
        await here.prepare(request)
        transport = request.transport
        assert transport is not None
        self._transports.add(transport)
        try:
            async with self._session.ws_connect(self.dashboard + request.path_qs) as there:
                async for message in there:
                    if message.type == WSMsgType.TEXT:
                        await here.send_str(message.data)
        except ConnectionError:
            pass  # cut
        finally:
            self._transports.discard(transport)
        return here


def _make_certificate(path: Path) -> None:
    """A key and a certificate for localhost that it signs itself, in one file."""
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    key = path.with_suffix(".key")
    subprocess.run([*command, "-keyout", str(key), "-out", str(path)], check=True, capture_output=True)
    path.write_text(path.read_text() + key.read_text())
