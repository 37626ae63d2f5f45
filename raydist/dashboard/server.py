"""The HTTP server of `raydist dashboard`: a starlette application, served by uvicorn. It answers GET only, and changes nothing,
unless it is started with --allow-actions: then a POST to a run's address asks that run for something (actions.py).

Runs in: one process; pages are read and drawn in THREADS threads beside the server's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import traceback
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import pyarrow as pa
import pyarrow.csv
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from raydist.dashboard import actions, views
from raydist.dashboard.access import HEADERS, PARAMETER, AccessPolicy, names
from raydist.dashboard.cache import EVERY_S, Live
from raydist.dashboard.document import LIBRARY, LOOK, SCRIPTS, Parts, document, plain
from raydist.dashboard.site import Place, Site
from raydist.errors import RaydistError, UsageError
from raydist.redact import redact
from raydist.storage import Storage

THREADS = 4
BEAT_S = 15.0
"""A stream says at least this often that it is there; a run that has ended, which may be resumed, is looked at this often."""
CLIENTS = 800
"""Number of connections; one more is closed at once. With them and its files, a process stays below 1,024 descriptors."""
LONGEST = 4000
"""Characters of a path; Python makes no number of more than 4,300 digits."""
STREAMS = 400
"""Number of browsers' tabs that are followed; one more is refused, and tries again."""
SLOW_S = 60
"""A client that has neither sent a whole request nor received any of its answer for this long is disconnected."""
_CSV_ROWS = 1 << 14
T = TypeVar("T")


class Server:
    """A dashboard over these storages, as an ASGI application. `closing`: once set, streams end. `pool`: its threads. `made`:
    identifies this process in versions, which begin anew with it."""

    def __init__(self, homes: Sequence[Storage], access: AccessPolicy) -> None:
        self._site, self._access = Site(homes, access.acts), access
        self._made = secrets.token_hex(4)
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dashboard")
        self.closing, self._streams = asyncio.Event(), set[Any]()
        runs = "/run/{storage:int}/{name}", "/cell/{storage:int}/{sweep}/{name}"
        routes = [Route("/", self._list), Route("/sweep/{storage:int}/{name}", self._sweep)]
        routes += [Route(path, self._run) for path in runs]
        if access.acts:
            routes += [Route(f"{path}/{{action}}", self._act, methods=["POST"]) for path in runs]
        for path, text in {"/look.css": LOOK, **SCRIPTS}.items():
            routes.append(Route(path, _file(path, text), methods=["GET"]))
        wrong = dict.fromkeys((HTTPException, RaydistError, Exception), _wrong)
        self._app = Starlette(routes=routes, exception_handlers=wrong)
        self._app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""
        answer = self._before_pages(Request(scope)) or self._app
        await answer(scope, receive, send)

    def _before_pages(self, request: Request) -> Response | None:
        """The answer to a request that may not see pages, or that brings the token; None to all others."""
        if (why := self._access.refused(request.method, request.headers)) is not None:
            answer = _plain("Refused", f"{why}.", 403)
            answer.headers["Connection"] = "close"  # what follows may be the body
            return answer
        if len(request.scope["path"]) > LONGEST:
            return _plain("Not here", "There is no such page.", 404)
        token = request.query_params.get(PARAMETER)
        if token is not None and any(route.matches(request.scope)[0] is Match.FULL for route in self._app.routes):
            if not self._access.knows(token):
                return _plain("Refused", "This token is not the present one.", 401)
            # No redirect: after a link from another site, only a navigation of this page's own sends the new cookie.
            answer = _plain("Dashboard", "Opening the dashboard.", refresh=quote(request.scope["path"]))
            answer.headers["Set-Cookie"] = self._access.set_cookie()
            return answer
        if not self._access.admits(request.headers.get("Cookie", "")):
            return _plain("Refused", "Open the address that raydist dashboard has printed.", 401)
        return None

    async def _list(self, request: Request) -> Response:
        return await self._show(request, self._site.list(), [])

    async def _sweep(self, request: Request) -> Response:
        asked = request.path_params
        place = await self._thread(self._site.sweep, asked["storage"], asked["name"])
        return await self._show(request, self._site.sweep_page(place), [_TOP])

    async def _run(self, request: Request) -> Response:
        view = views.parse(request.query_params)
        place, path = await self._thread(self._place, request)
        if request.query_params.get("download") == "steps.csv":
            return await self._csv(place)
        return await self._show(request, self._site.run_page(place, view), path)

    async def _act(self, request: Request) -> Response:
        place, _ = await self._thread(self._place, request)
        try:
            message, status = (
                await self._thread(actions.ask, self._site.folder(place), request.path_params["action"]),
                202,
            )
        except RaydistError as error:
            message, status = f"{error.message}: {error.hint}" if error.hint else error.message, 409
        return JSONResponse({"message": redact(message)}, status, HEADERS)

    def _place(self, request: Request) -> tuple[Place, list[tuple[str, str]]]:
        asked = request.path_params
        storage, name, sweep = asked["storage"], asked["name"], asked.get("sweep")
        if sweep is None:
            return self._site.run(storage, name), [_TOP]
        return self._site.cell(storage, sweep, name), [_TOP, (sweep, f"/sweep/{storage}/{quote(sweep, safe='')}")]

    async def _show(self, request: Request, live: Live[Parts], path: list[tuple[str, str]]) -> Response:
        """The page; or, with `since` in the query, what changes after that version, as long as the browser listens."""
        since = request.query_params.get("since")
        if since is not None and request.method == "GET":
            return self._stream(live, request.headers.get("Last-Event-ID", since))
        shown = await self._newest(live)
        return HTMLResponse(document(shown, f"{self._made}-{shown.version}", path), headers=HEADERS)

    async def _newest(self, live: Live[Parts]) -> Parts:
        found = live.fresh
        if found is None:
            found = await self._thread(live.get)
        return found.value

    def _stream(self, live: Live[Parts], since: str) -> Response:
        request = asyncio.current_task()
        assert request is not None
        if len(self._streams) >= STREAMS:
            raise HTTPException(503)
        self._streams.add(request)
        request.add_done_callback(self._streams.discard)
        made, _, number = since.partition("-")
        known = int(number) if made == self._made and number.isascii() and number.isdigit() and len(number) < 12 else 0
        kind = {"Content-Type": "text/event-stream"}
        return StreamingResponse(self._messages(live, known), headers={**HEADERS, **kind})

    async def _messages(self, live: Live[Parts], known: int) -> AsyncIterator[bytes]:
        """Server-sent events, each with the parts that are newer than what the browser has. Nothing is queued: a slow reader
        gets the newest version when it has read the previous one."""
        while not self.closing.is_set():
            shown = await self._newest(live)
            if shown.version != known:
                yield f"id: {self._made}-{shown.version}\ndata: ".encode() + shown.news(known) + b"\n\n"
            else:
                yield b":\n\n"
            yield b""  # uvicorn waits before it sends, not after: here until the message has been taken
            known = shown.version
            wait = BEAT_S if shown.ended else min(max(live.due_in, EVERY_S), BEAT_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self.closing.wait()

    async def _csv(self, place: Place) -> Response:
        """One row per step; a slow reader holds two pieces in memory."""
        steps = (await self._thread(self._site.steps(place).get, True)).value

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, max(steps.num_rows, 1), _CSV_ROWS):
                yield await self._thread(_csv, steps.slice(start, _CSV_ROWS), start == 0)

        kept = {"Content-Disposition": 'attachment; filename="steps.csv"', "Content-Type": "text/csv; charset=utf-8"}
        return StreamingResponse(pieces(), headers={**HEADERS, **kept})

    async def _thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.pool, call, *arguments)


_TOP = ("runs and sweeps", "/")


def _csv(rows: pa.Table, head: bool) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, sink, pyarrow.csv.WriteOptions(include_header=head))
    return bytes(sink.getvalue())


async def _wrong(_: Request, error: Exception) -> Response:
    match error:
        case HTTPException():
            return _plain("Not here", "There is no such page.", error.status_code)
        case UsageError():
            return _plain("Not understood", f"{error.message}: {error.hint}.", 400)
        case RaydistError():
            return _plain("Not here", error.message, 404)
    traceback.print_exception(error)
    return _plain("Failed", "The dashboard failed; its terminal has the error.", 500)


def _plain(title: str, words: str, status: int = 200, refresh: str | None = None) -> Response:
    return HTMLResponse(plain(title, words, refresh), status, HEADERS)


def _file(path: str, text: str) -> Response:
    kept = {"Cache-Control": "private, max-age=31536000, immutable"} if path == LIBRARY else {}
    return Response(text, 200, {**HEADERS, **kept}, "text/css" if path.endswith(".css") else "text/javascript")


def listener(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 takes any free one. Raises UsageError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None) or 0  # below 0: of a host name that has no address
        why = os.strerror(number) if number > 0 else getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"{host}:{port}: cannot listen there: {why}", "give another --port; 0 takes any free one"
        ) from None


class _Connection(H11Protocol):
    """A client's connection. It is aborted if for SLOW_S it was the client's turn: to send a whole request, or to take more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > CLIENTS:
            transport.abort()
        self._pauses = 0
        self._look(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._pauses += 1

    def _look(self, before: object) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        now = self.cycle, answering, self._pauses, self.transport.get_write_buffer_size()
        if now == before and (self.flow.write_paused or not answering):
            self.transport.abort()
        else:
            self._timer = self.loop.call_later(SLOW_S, self._look, now)


async def serve(
    homes: Sequence[Storage],
    listening: socket.socket,
    access: AccessPolicy,
    ready: Callable[[], None],
    until: int | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, or until the descriptor `until` is at its end. `ready` is called once it answers."""
    pages = Server(homes, access)
    # uvicorn would log each bad request: clients could fill the terminal. Errors of pages are printed by _wrong.
    quiet: dict[str, Any] = {"log_config": None, "log_level": "critical", "server_header": False}
    only: dict[str, Any] = {"http": _Connection, "ws": "none", "lifespan": "off", "proxy_headers": False, "workers": 1}
    times: dict[str, Any] = {"timeout_keep_alive": SLOW_S, "timeout_graceful_shutdown": 1}
    server = uvicorn.Server(uvicorn.Config(pages, **quiet, **only, **times))

    def stop() -> None:
        server.should_exit = True
        pages.closing.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    if until is not None:
        asyncio.get_running_loop().add_reader(until, stop)
    # Not server.serve(): it takes the signals, and ends the process by them.
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup([listening])
    pages.pool.submit(names)  # else the first request with a foreign Host would keep all others waiting for it
    try:
        ready()
        await server.main_loop()
    finally:
        pages.closing.set()
        await server.shutdown([listening])
        pages.pool.shutdown(wait=False, cancel_futures=True)
