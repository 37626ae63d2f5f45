"""The HTTP server of `raydist dashboard`: aiohttp, which Ray's own dashboard uses. It answers GET only, and changes nothing, unless
it is started with --allow-actions: then a POST to a run's address asks that run for something (actions.py).

Runs in: one process; pages are read and drawn in THREADS threads beside the server's.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.csv
from aiohttp import web

from raydist.dashboard import actions, views
from raydist.dashboard.access import HEADERS, PARAMETER, Door
from raydist.dashboard.cache import EVERY_S, Live
from raydist.dashboard.document import LIBRARY, LOOK, SCRIPTS, Parts, document, plain
from raydist.dashboard.site import Place, Site
from raydist.errors import RaydistError, UsageError
from raydist.redact import redact
from raydist.storage import Storage

THREADS = 4
BEAT_S = 15.0
"""A stream says at least this often that it is there; a run that has ended, which may be resumed, is looked at this often."""
STREAMS = 400
"""Number of browsers' tabs that are followed; one more is refused, and tries again."""
SLOW_S = 60.0
"""A reader that takes nothing for this long is given up."""
_CSV_ROWS = 1 << 14
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class Server:
    """A dashboard over these storages. `made`: identifies this process in versions, which begin anew with it."""

    def __init__(self, homes: Sequence[Storage], door: Door) -> None:
        self._site, self._door = Site(homes, door.acts), door
        self._made = secrets.token_hex(4)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dashboard")
        self._closing, self._streams = asyncio.Event(), 0

    def app(self) -> web.Application:
        """Its routes; each request passes `_answer` first."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = await self._answer(request, handler)
            if not answer.prepared:
                for name, value in HEADERS.items():
                    answer.headers.setdefault(name, value)
            return answer

        async def closing(_: web.Application) -> None:
            self._closing.set()

        app = web.Application(middlewares=[guard])
        app.router.add_get("/", self._list)
        app.router.add_get("/run/{storage:\\d+}/{name}", self._run)
        app.router.add_get("/cell/{storage:\\d+}/{sweep}/{name}", self._run)
        app.router.add_get("/sweep/{storage:\\d+}/{name}", self._sweep)
        if self._door.acts:
            app.router.add_post("/run/{storage:\\d+}/{name}/{action}", self._act)
            app.router.add_post("/cell/{storage:\\d+}/{sweep}/{name}/{action}", self._act)
        app.router.add_get("/look.css", _file("text/css", LOOK))
        for path, text in SCRIPTS.items():
            app.router.add_get(path, _file("text/javascript", text, kept=path == LIBRARY))
        app.on_shutdown.append(closing)
        return app

    def close(self) -> None:
        """Ends the threads; what they read is given up."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if (why := self._door.refused(request.method, request.headers)) is not None:
            return _html(plain("Refused", f"{why}."), 403)
        if PARAMETER in request.query and request.match_info.http_exception is None:
            if not self._door.knows(request.query[PARAMETER]):
                return _html(plain("Refused", "This token is not the present one."), 401)
            # No redirect: after a link from another site, only a navigation of this page's own sends the new cookie.
            answer = _html(plain("Dashboard", "Opening the dashboard.", refresh=request.rel_url.raw_path))
            answer.headers["Set-Cookie"] = self._door.set_cookie()
            return answer
        if not self._door.knows(request.cookies.get(self._door.cookie)):
            return _html(plain("Refused", "Open the address that raydist dashboard has printed."), 401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return _html(plain("Not here", "There is no such page."), error.status)
        except UsageError as error:
            return _html(plain("Not understood", f"{error.message}: {error.hint}."), 400)
        except RaydistError as error:
            return _html(plain("Not here", error.message), 404)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception:
            traceback.print_exc(file=sys.stderr)
            return _html(plain("Failed", "The dashboard failed; its terminal has the error."), 500)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return await self._show(request, self._site.list(), [])

    async def _sweep(self, request: web.Request) -> web.StreamResponse:
        place = await self._thread(self._site.sweep, int(request.match_info["storage"]), request.match_info["name"])
        return await self._show(request, self._site.sweep_page(place), [_TOP])

    async def _run(self, request: web.Request) -> web.StreamResponse:
        view = views.parse(request.query)
        place, path = await self._thread(self._place, request)
        if request.query.get("download") == "steps.csv":
            return await self._csv(request, place)
        return await self._show(request, self._site.run_page(place, view), path)

    async def _act(self, request: web.Request) -> web.StreamResponse:
        place, _ = await self._thread(self._place, request)
        try:
            told, status = await self._thread(actions.ask, self._site.folder(place), request.match_info["action"]), 202
        except RaydistError as error:
            told, status = f"{error.message}: {error.hint}" if error.hint else error.message, 409
        return web.json_response({"told": redact(told)}, status=status)

    def _place(self, request: web.Request) -> tuple[Place, list[tuple[str, str]]]:
        asked = request.match_info
        storage = int(asked["storage"])
        if "sweep" not in asked:
            return self._site.run(storage, asked["name"]), [_TOP]
        above = request.rel_url.with_query(None).parent
        sweep = str(above).replace("/cell/", "/sweep/", 1)
        return self._site.cell(storage, asked["sweep"], asked["name"]), [_TOP, (asked["sweep"], sweep)]

    async def _show(self, request: web.Request, live: Live[Parts], path: list[tuple[str, str]]) -> web.StreamResponse:
        """The page; or, with `since` in the query, what changes after that version, as long as the browser listens."""
        since = request.query.get("since")
        if since is not None:
            return await self._stream(request, live, request.headers.get("Last-Event-ID", since))
        shown = await self._newest(live)
        return _html(document(shown, f"{self._made}-{shown.version}", path))

    async def _newest(self, live: Live[Parts]) -> Parts:
        found = live.fresh
        if found is None:
            found = await self._thread(live.get)
        return found.value

    async def _stream(self, request: web.Request, live: Live[Parts], since: str) -> web.StreamResponse:
        """Server-sent events, each with the parts that are newer than what the browser has. Nothing is queued: a slow reader
        gets the newest version when it has read the previous one."""
        if self._streams >= STREAMS:
            raise web.HTTPServiceUnavailable
        made, _, number = since.partition("-")
        known = int(number) if made == self._made and number.isascii() and number.isdigit() and len(number) < 12 else 0
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        self._streams += 1
        try:
            await answer.prepare(request)
            while not self._closing.is_set():
                shown = await self._newest(live)
                message = b":\n\n"
                if shown.version != known:
                    message = f"id: {self._made}-{shown.version}\ndata: ".encode() + shown.news(known) + b"\n\n"
                async with asyncio.timeout(SLOW_S):
                    await answer.write(message)
                known = shown.version
                wait = BEAT_S if shown.ended else min(max(live.due_in, EVERY_S), BEAT_S)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._closing.wait()
        except (ConnectionError, TimeoutError):  # it is gone, or does not read
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return answer

    async def _csv(self, request: web.Request, place: Place) -> web.StreamResponse:
        """One row per step; a slow reader holds one piece in memory."""
        steps = (await self._thread(self._site.steps(place).get)).value
        answer = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/csv; charset=utf-8"})
        answer.headers["Content-Disposition"] = 'attachment; filename="steps.csv"'
        await answer.prepare(request)
        for start in range(0, max(steps.num_rows, 1), _CSV_ROWS):
            await answer.write(await self._thread(_csv, steps.slice(start, _CSV_ROWS), start == 0))
        await answer.write_eof()
        return answer

    async def _thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *arguments)


_TOP = ("runs and sweeps", "/")


def _csv(rows: pa.Table, head: bool) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.csv.write_csv(rows, sink, pyarrow.csv.WriteOptions(include_header=head))
    return bytes(sink.getvalue())


def _html(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="text/html", charset="utf-8")


def _file(kind: str, text: str, kept: bool = False) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        found = web.Response(text=text, content_type=kind, charset="utf-8")
        if kept:
            found.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return found

    return answer


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


async def serve(
    homes: Sequence[Storage],
    listening: socket.socket,
    door: Door,
    ready: Callable[[], None],
    until: int | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, or until the descriptor `until` is at its end. `ready` is called once it answers."""
    stop, server = asyncio.Event(), Server(homes, door)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if until is not None:
        asyncio.get_running_loop().add_reader(until, stop.set)
    # A stream whose browser has gone ends at once.
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True)
    await runner.setup()
    try:
        await web.SockSite(runner, listening).start()
        ready()
        await stop.wait()
    finally:
        await runner.cleanup()
        server.close()
