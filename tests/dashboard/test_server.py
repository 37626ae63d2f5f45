"""The dashboard's server over its socket: who gets what, and nobody gets more."""

from __future__ import annotations

import asyncio
import csv
import http.client
import io
import json
import os
import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import Any
from urllib.parse import quote, urlsplit

import pytest

from raydist.cli import main as cli
from raydist.dashboard import actions, cache, server
from raydist.dashboard.access import AccessPolicy, names
from raydist.dashboard.announced import link
from raydist.dashboard.document import LIBRARY
from raydist.dashboard.server import STREAMS
from raydist.errors import UsageError
from raydist.report.html.page import library
from raydist.run import driver_process, requests
from raydist.run.directory import RunDir
from raydist.run.driver_process import this_process
from raydist.run.status import write_state
from raydist.storage import Storage
from tests.dashboard.conftest import EVIL, LOST_AFTER_S, Dashboard, acting, running
from tests.report import story

PAGES = ("/", "/run/0/base", "/sweep/0/tuned", "/look.css", LIBRARY, "/chart.js", "/live.js")


@contextmanager
def followed(dashboard: Dashboard, path: str, **headers: str) -> Iterator[Iterator[tuple[str, dict[str, Any] | None]]]:
    """What the stream of that page says: its kind and, of an event, its id and data; of a sign of life, "" and None."""
    place = urlsplit(dashboard.url)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=300)
    while True:
        connection.request("GET", path, headers={"Cookie": dashboard.cookie, **headers})
        answer = connection.getresponse()
        if answer.status != 503:
            break
        answer.read()  # the streams of the test before are being closed
    assert (answer.status, answer.getheader("Content-Type")) == (200, "text/event-stream")

    def messages() -> Iterator[tuple[str, dict[str, Any] | None]]:
        while line := answer.readline().decode():
            if line == ":\n":
                yield "", None
            elif line.startswith("id: "):
                yield line[4:-1], json.loads(answer.readline().decode().removeprefix("data: "))

    try:
        yield messages()
    finally:
        connection.close()


def test_every_page_needs_the_token(dashboard: Dashboard) -> None:
    """Without the cookie, and with a wrong one, even for the scripts; a wrong token in the address sets no cookie."""
    for path in (*PAGES, "/no-such-page"):
        assert dashboard.ask(path, Cookie="")[0] == 401
        assert dashboard.ask(path, Cookie=dashboard.cookie + "x")[0] == 401
        assert dashboard.ask(path, Cookie=f"raydist={dashboard.token}")[0] == 401
    status, headers, _ = dashboard.ask("/?token=wrong", Cookie="")
    assert (status, "Set-Cookie" in headers) == (401, False)
    status, headers, body = dashboard.ask(f"/?token={dashboard.token}", Cookie="")
    assert (status, headers["Set-Cookie"]) == (200, f"{dashboard.cookie}; HttpOnly; SameSite=Strict; Path=/")
    assert 'http-equiv="refresh" content="0;url=/"' in body
    assert dashboard.token not in body
    assert [dashboard.ask(path)[0] for path in PAGES] == [200] * len(PAGES)


def test_other_sites_get_nothing_with_the_cookie(dashboard: Dashboard) -> None:
    """A foreign Host, a foreign Origin, another method: refused before anything is read."""
    assert dashboard.ask("/", Host="evil.example")[0] == 403
    assert dashboard.ask("/", Origin="http://evil.example")[0] == 403
    assert dashboard.ask("/run/0/base", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert dashboard.ask("/run/0/base", method)[0] == 403


def test_every_answer_forbids_scripts_frames_and_caches(dashboard: Dashboard) -> None:
    """Also a refused one; no answer has a script or a style sheet inside."""
    for path, cookie in [
        (path, cookie) for path in (*PAGES, "/none", "/run/0/none") for cookie in (dashboard.cookie, "")
    ]:
        _, headers, body = dashboard.ask(path, Cookie=cookie)
        rules = dict(rule.split(" ", 1) for rule in headers["Content-Security-Policy"].split("; "))
        assert (rules["default-src"], rules["script-src"], rules["style-src"]) == ("'none'", "'self'", "'self'")
        assert rules["frame-ancestors"] == "'none'"
        kept = path == LIBRARY and cookie
        assert headers["Cache-Control"] == ("private, max-age=31536000, immutable" if kept else "no-store")
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"
        if "html" in headers["Content-Type"]:
            assert (
                re.findall(
                    r"<script(?! src=\"/[\w-]+\.js\" defer></script>| type=\"application/json\">)|<style| on\w+=\"",
                    body,
                )
                == []
            )


@pytest.mark.parametrize(
    "path",
    [
        "/run/0/none", "/run/1/base", "/run/99999999999999999999/base", "/run/0/secret", "/run/0/tuned", "/sweep/0/base",
        "/run/0/linked", "/run/0/..", "/run/0/.", "/run/0/%2e%2e%2foutside%2fprivate", "/run/0/..%2foutside%2fprivate",
        "/run/0/base%2f..%2fbase", "/run/0/base%00", "/run/0/%2fetc", "/run/0/.data", "/cell/0/tuned/..%2f..%2fbase",
        "/cell/0/tuned/%2e%2e", "/cell/0/base/x", "/cell/0/..%2fruns/base", "/run/0/" + "a" * 3000, "/run/0/base/spec.yaml",
        "/live.js/../../server.py", "/run/0/base?with=..%2foutside%2fprivate", "/%2e%2e/%2e%2e/etc/passwd",
        "/run/0/%252e%252e%252fetc", "/run/0/base%0a", "/run/0/..%5coutside%5cprivate", "/run/0%00/base", "/live.js%00",
        "//run/0/base", "/run/0/%ff%c0%ae%c0%ae",
        "/run/%D9%A0/base", "/run/-0/base", "/sweep/0/tuned%2fruns", "/run/0/base;x",
    ],
)  # fmt: skip
def test_addresses_lead_only_to_runs_and_sweeps_of_the_storage(dashboard: Dashboard, path: str) -> None:
    """Not to its other folders, through links or `..` to others, or to files: nothing of them is told."""
    status, _, body = dashboard.ask(path)
    assert status == 404 or (path.endswith("private") and "no &#x27;../outside/private&#x27; is here" in body)
    assert "loss" not in body.lower() or "<h2>Problem</h2>" in body


@pytest.mark.parametrize("query", ["first=x", "y=z", "last=1&first=2", "rank=-1", "attempt=0", "with=a,b,c,d,e,f"])
def test_a_view_that_makes_no_sense_is_one_clear_error(dashboard: Dashboard, query: str) -> None:
    """With the field and the remedy, and status 400."""
    status, _, body = dashboard.ask(f"/run/0/base?{query}")
    assert status == 400
    assert re.search(r"<p>(first|y|last|rank|attempt|with): .+</p>", body)


def test_text_of_runs_is_text(dashboard: Dashboard) -> None:
    """Names, specs and output are escaped, in pages and in the parts sent later, and have no control characters."""
    path = f"/run/0/{quote(EVIL)}"
    for address in ("/", path, f"{path}?rank=0", f"/run/0/base?with={quote(EVIL)}"):
        status, _, body = dashboard.ask(address)
        assert status == 200
        assert "<img" not in body
        assert "&lt;img src=x onerror=owned=1&gt;" in body
    with followed(dashboard, f"{path}?since=x") as messages:
        _, told = next(messages)
    assert told is not None
    assert "<img" not in "".join(told["parts"].values())
    assert "&lt;script&gt;owned=1&lt;/script&gt;\nred\n" in told["parts"]["logs"]


def test_output_of_earlier_attempts(dashboard: Dashboard) -> None:
    """Of the newest attempt unless another is asked for; of one that has not begun, the page says so."""
    for query, words in [
        ("", "what rank 0 printed in attempt 2"),
        ("?attempt=1", 'what rank 0 printed in attempt 1.</p><pre class="log" tabindex="0">of the first\n</pre>'),
        ("?attempt=1&rank=1", "Rank 1 has printed nothing in attempt 1;"),
        ("?attempt=3", "There is no attempt 3: the newest is 2."),
    ]:
        status, _, body = dashboard.ask(f"/run/0/{quote(EVIL)}{query}")
        assert (status, words in body) == (200, True)


def test_only_changed_parts_are_sent(dashboard: Dashboard) -> None:
    """A stream with the present version says only that it is there; one with that of another process, or none, sends everything.
    After a reconnect, the browser's own version counts."""
    with followed(dashboard, "/run/0/base?since=x") as messages:
        while True:  # the doctor examines it; the test's own limit is that of pytest
            version, told = next(messages)
            if told is not None and told["ended"]:
                break
    for since, headers in [(version, {}), ("x", {"Last-Event-ID": version})]:
        with followed(dashboard, f"/run/0/base?since={since}", **headers) as messages:
            assert next(messages) == ("", None)
    for other in ("", "0", "other-1", f"{version}x", "é"):
        with followed(dashboard, f"/run/0/base?since={quote(other)}") as messages:
            again, told = next(messages)
        assert told is not None
        assert (again, [*told["parts"]]) == (version, told["order"])
        assert told["order"][0] == "head"


def test_the_steps_as_csv(dashboard: Dashboard) -> None:
    """One row per step with its columns; of a step trained twice, the last."""
    status, headers, body = dashboard.ask("/run/0/base?download=steps.csv")
    rows = [*csv.DictReader(io.StringIO(body))]
    assert (status, headers["Content-Disposition"]) == (200, 'attachment; filename="steps.csv"')
    assert [int(row["step"]) for row in rows] == [*range(1, 201)]
    assert float(rows[149]["loss"]) == 90.0
    assert {row["attempt"] for row in rows[50:]} == {"2"}


def test_silent_and_slow_clients_do_not_keep_others_waiting(dashboard: Dashboard) -> None:
    """With 500 open connections, of which some have sent half a request, and some do not read their answer or their stream, a page
    is served. One more stream than STREAMS is refused."""
    place = urlsplit(dashboard.url)
    address = str(place.hostname), int(place.port or 0)
    head = f" HTTP/1.1\r\nHost: {place.netloc}\r\nCookie: {dashboard.cookie}\r\n\r\n"
    whole, stream = (f"GET /run/0/base{query}{head}".encode() for query in ("", "?since=x"))

    def connected(sent: bytes) -> socket.socket:
        client = stack.enter_context(socket.create_connection(address, timeout=300))
        client.sendall(sent)
        return client

    with ExitStack() as stack:
        for number in range(500 - STREAMS):
            connected((b"", b"GET / HT", whole)[number % 3])
        for _ in range(STREAMS):
            connected(stream)
        assert dashboard.ask("/run/0/base")[0] == 200
        while connected(stream).recv(12) != b"HTTP/1.1 503":
            pass  # the server has not begun all of them yet


def test_requests_that_are_malformed_or_hide_another_are_answered_once(dashboard: Dashboard) -> None:
    """Then the connection is closed: nothing after them is taken for a request. The server prints nothing of them."""
    place = urlsplit(dashboard.url)
    address = str(place.hostname), int(place.port or 0)
    own = f"Host: {place.netloc}\r\nCookie: {dashboard.cookie}\r\n"
    hidden = f"GET /live.js HTTP/1.1\r\n{own}\r\n"
    length, chunked = f"Content-Length: {len(hidden)}\r\n", "Transfer-Encoding: chunked\r\n"
    for sent, status in [
        (f"GET / HTTP/1.1\r\n{own}{length}\r\n{hidden}", 403),
        (f"GET / HTTP/1.1\r\n{own}{length}{chunked}\r\n0\r\n\r\n{hidden}", 403),
        (f"GET / HTTP/1.1\r\n{own}{chunked}\r\nx\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}{chunked}\r\n", 403),
        (f"GET / HTTP/1.1\r\n{own}Transfer-Encoding: xchunked\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}Content-Length: 1\r\nContent-Length: 2\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}Content-Length: +1\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}Host: evil.example\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}X : 1\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}X: a\0b\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\n{own}X: {'a' * 1_000_000}\r\n\r\n{hidden}", 400),
        (f"GET /\x7f HTTP/1.1\r\n{own}\r\n{hidden}", 400),
        (f"GET / HTTP/1.1\r\nCookie: {dashboard.cookie}\r\n\r\n{hidden}", 400),
        (f"GET / HTTP/1.0\r\nCookie: {dashboard.cookie}\r\n\r\n{hidden}", 403),
        (f"GET / HTTP/1.1\r\nHost: x@{place.netloc}\r\nCookie: {dashboard.cookie}\r\n\r\n{hidden}", 403),
        (f"CONNECT evil.example:80 HTTP/1.1\r\n{own}\r\n{hidden}", 403),
        (f"OPTIONS * HTTP/1.1\r\n{own}\r\n{hidden}", 403),
        ("GET /\r\n\r\n", 400),
        ("\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + "\n" * 9, 400),
    ]:
        with socket.create_connection(address, timeout=300) as client, suppress(ConnectionError):
            client.sendall(sent.encode("latin-1"))
            answers = b""
            while more := client.recv(1 << 16):
                answers += more
            assert re.findall(rb"HTTP/1.1 (\d+)", answers) == [str(status).encode()], sent[:200]
    assert dashboard.ask("/")[0] == 200


def test_addresses_in_other_forms_lead_nowhere_else(dashboard: Dashboard) -> None:
    """An absolute address, escapes, an upgrade to another protocol, a HEAD of a stream, a number that is too long for Python."""
    own = urlsplit(dashboard.url).netloc
    assert dashboard.ask("http://evil.example/")[0] == 403
    assert dashboard.ask("http://evil.example/", Host=own)[0] == 404
    assert "Set-Cookie" not in dashboard.ask(f"http://evil.example/?token={dashboard.token}", Cookie="", Host=own)[1]
    assert dashboard.ask("/run/0/base/")[0] == 404
    assert dashboard.ask(f"/run/{'9' * 5000}/base")[0] == 404
    assert dashboard.ask("/%72un/0/base")[0] == 200
    body = dashboard.ask(f"/run/0/%22%3Fa%23%0a%5c?token={dashboard.token}", Cookie="")[2]
    assert 'http-equiv="refresh" content="0;url=/run/0/%22%3Fa%23%0A%5C"' in body
    status, headers, body = dashboard.ask("/run/0/base?since=x", "HEAD")
    assert (status, headers["Content-Type"], body) == (200, "text/html; charset=utf-8", "")
    for protocol in ("websocket", "h2c"):
        upgrade = {
            "Connection": "Upgrade",
            "Upgrade": protocol,
            "Sec_WebSocket_Key": "x" * 22 + "==",
            "Sec_WebSocket_Version": "13",
        }
        assert dashboard.ask("/", **upgrade)[0] == 200
        assert dashboard.ask("/", Cookie="", **upgrade)[0] == 401
    assert "Server" not in dashboard.ask("/")[1]
    assert dashboard.ask("/", Cookie="a=" + '"\\"' * 5000)[0] == 401


def test_clients_that_send_or_take_nothing_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent, one with half a head, one that does not read its answer; at once, one more than CLIENTS. Meanwhile a
    thread asks for this host's name, for which no client waits."""
    ended: Queue[object] = Queue()
    asking: Queue[str] = Queue()
    names.cache_clear()
    monkeypatch.setattr(socket, "getfqdn", lambda: (asking.put(threading.current_thread().name), "")[1])
    lost = server._Connection.connection_lost
    monkeypatch.setattr(server, "SLOW_S", 1)
    monkeypatch.setattr(server._Connection, "connection_lost", lambda self, exc: (lost(self, exc), ended.put(self)))
    (tmp_path / "runs").mkdir()
    ended_by, ends = os.pipe()

    def clients(address: tuple[str, int], access: AccessPolicy) -> None:
        head = f"GET {LIBRARY} HTTP/1.1\r\nHost: {address[0]}\r\nCookie: {access.cookie}={access.token}\r\n"
        with ExitStack() as stack:
            stack.callback(os.close, ends)
            for sent in ("", "GET / HT", f"{head}\r\n"):
                client = stack.enter_context(socket.socket())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(address)
                with suppress(ConnectionError):
                    client.sendall(sent.encode())
            for _ in range(3):
                ended.get(timeout=300)
            taken = 0
            with suppress(ConnectionError):
                while piece := client.recv(1 << 16):
                    taken += len(piece)
            assert taken < len(library())
            monkeypatch.setattr(server, "CLIENTS", 0)
            with socket.create_connection(address, timeout=300) as more, suppress(ConnectionError):
                more.sendall(f"{head}\r\n".encode())
                assert more.recv(1) == b""

    async def serving() -> None:
        with server.listener("127.0.0.1", 0) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            access = AccessPolicy(*listening.getsockname())
            thread = threading.Thread(target=clients, args=(listening.getsockname(), access))
            await server.serve([Storage(tmp_path / "runs")], listening, access, thread.start, until=ended_by)
            thread.join()

    asyncio.run(serving())
    os.close(ended_by)
    names.cache_clear()
    assert asking.get_nowait().startswith("dashboard")


def test_an_object_store(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list and a run's page; and its stream, which sends only what is written meanwhile, until the doctor has examined the run
    that has ended."""
    for module in (cache, server):
        monkeypatch.setattr(module, "EVERY_S", 0.1)
    monkeypatch.setattr(cache, "SHARE", 1.0)
    monkeypatch.setattr(driver_process, "LOST_AFTER_S", LOST_AFTER_S)
    home = Storage(s3.uri("pages"))
    run = story.story(RunDir(home.at("base")))
    running(run, 7)
    until, ends = os.pipe()

    def browse(dashboard: Dashboard) -> list[Any]:
        with open(ends, "wb"), followed(dashboard, "/run/0/base?since=x") as messages:
            told = [next(messages)[1]]
            pages = [dashboard.ask(path)[::2] for path in ("/", "/run/0/base")]
            write_state(run, {"status": "finished", "heartbeat_at": time.time(), "driver": this_process(), "step": 200})
            while not (told[-1] and told[-1]["ended"]):
                told.append(next(messages)[1])
            return [*pages, *filter(None, told)]

    async def serving() -> list[Any]:
        with server.listener("127.0.0.1", 0) as listening, ThreadPoolExecutor(1) as pool:
            access = AccessPolicy(*listening.getsockname())
            dashboard = Dashboard(Path(), f"http://127.0.0.1:{access.port}/?token={access.token}")
            browsing: list[Future[list[Any]]] = []
            await server.serve(
                [home], listening, access, lambda: browsing.append(pool.submit(browse, dashboard)), until
            )
            return browsing[0].result()

    listed, page, first, *later = asyncio.run(serving())
    os.close(until)
    assert (listed[0], page[0]) == (200, 200)
    assert '"/run/0/base"' in listed[1]
    assert ">running<" in page[1]
    assert (">running<" in first["parts"]["head"], first["ended"]) == (True, False)
    heads = [told["parts"]["head"] for told in later if "head" in told["parts"]]
    assert ">finished<" in heads[-1]
    assert all(told["parts"].keys() < first["parts"].keys() for told in later)
    assert 'class="findings"' in later[-1]["parts"]["doctor"]


def test_other_commands_find_the_dashboard_of_a_storage(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the address of the run's page, without the token; not for another storage, nor one whose process has gone. Its file is for
    this user alone."""
    cache = dashboard.home.parent / "cache"
    monkeypatch.setenv("RAYDIST_CACHE", str(cache))
    (file,) = (cache / "dashboards").iterdir()
    assert (file.stat().st_mode & 0o777, dashboard.token in file.read_text()) == (0o600, False)
    assert link(RunDir(dashboard.home / "base")) == f"{dashboard.address}/run/0/base"
    assert link(RunDir(dashboard.home / EVIL)) == f"{dashboard.address}/run/0/{quote(EVIL)}"
    assert link(RunDir(dashboard.home.parent / "outside" / "private")) is None
    told = json.loads(file.read_text())
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    elsewhere = str(dashboard.home.parent / "outside")
    dead = file.with_name("1.json")
    dead.write_text(json.dumps({**told, "storages": [elsewhere], "process": {**told["process"], "pid": ended.pid}}))
    foreign = file.with_name("2.json")
    foreign.write_text(json.dumps({**told, "storages": [elsewhere], "process": {**told["process"], "host": "another"}}))
    file.with_name("3.json").write_text("{")
    assert link(RunDir(dashboard.home.parent / "outside" / "private")) is None
    assert (dead.exists(), foreign.exists()) == (False, True)
    for name in ("2.json", "3.json"):
        file.with_name(name).unlink()


def test_a_bad_request_of_the_command_is_one_error(dashboard: Dashboard, capsys: pytest.CaptureFixture[str]) -> None:
    """A storage that does not exist, a port that is taken, an address of another host: exit code 2, with the remedy."""
    place = urlsplit(dashboard.url)
    for arguments, words in [
        ([f"{dashboard.home}/none"], r"none \(--storage\) does not exist\n  name a folder or URI"),
        (
            [str(dashboard.home), "--port", str(place.port)],
            r"cannot listen there: Address already in use\n  give another --port",
        ),
        ([str(dashboard.home), "--host", "192.0.2.1"], r"192.0.2.1:8275: cannot listen there: "),
    ]:
        with pytest.raises(SystemExit) as caught:
            cli.main(["dashboard", *arguments])
        printed = capsys.readouterr()
        assert (caught.value.code, printed.out) == (2, "")
        assert re.search(words, printed.err)


def test_of_two_requests_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered in two threads, which look at the same time whether one is on its way."""
    both, ends, run = threading.Barrier(2), threading.Event(), RunDir(tmp_path / "a")

    class Looked(set[tuple[str, str]]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # the other one does not come here as long as this one has the lock
            return found

    monkeypatch.setattr(actions, "_asked", Looked())

    def ask(_: int) -> str:
        try:
            return actions._beside(run, "trace", ends.wait, "asked")
        except UsageError as error:
            return error.message

    with ThreadPoolExecutor(2) as pool:
        told = sorted(pool.map(ask, range(2)))
    ends.set()
    assert told == ["asked", "run a is asked for a trace already"]


def test_actions_only_where_they_are_allowed_and_only_from_its_own_pages(tmp_path: Path) -> None:
    """Each is a request in the run's folder that says who asks; twice at once is refused, as is all that is no running run. Without
    this page's Origin, as from a form or another site, and without the cookie nothing is asked. The server stops although a page
    follows."""
    with ExitStack() as stack, acting(tmp_path) as (served, run, lease):
        own = {"Origin": served.address, "Sec_Fetch_Site": "same-origin"}
        page = served.ask("/run/0/live")[2]
        assert re.findall(r'data-act="(\w+)"', page) == ["checkpoint", "trace", "stop"]
        assert "data-act" not in served.ask("/run/0/over")[2]
        for headers in (
            {}, {"Origin": "null"}, {"Origin": "http://evil.example"}, {**own, "Sec_Fetch_Site": "cross-site"},
            {**own, "Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},
        ):  # fmt: skip
            assert served.ask("/run/0/live/stop", "POST", **headers)[0] == 403
        assert served.ask("/run/0/live/stop", "POST", Cookie="", **own)[0] == 401
        assert served.ask("/run/0/live/stop")[0] == 405
        assert served.ask("/run/0/live", "POST", **own)[0] == 405
        assert served.ask("/run/0/none/stop", "POST", **own)[0] == 404
        assert served.ask("/run/0/live/erase", "POST", **own)[0] == 409
        assert "is finished" in served.ask("/run/0/over/stop", "POST", **own)[2]
        assert (requests.pending(run), lease.asked_to_stop()) == ([], None)
        for action in ("checkpoint", "trace"):
            assert served.ask(f"/run/0/live/{action}", "POST", **own)[0] == 202
            status, _, told = served.ask(f"/run/0/live/{action}", "POST", **own)
            assert (status, "already" in told) == (409, True)
        while len(asked := requests.pending(run)) < 2:
            time.sleep(0.05)
        assert {(one.what, one.steps, one.by.endswith(", on the dashboard")) for one in asked} == {
            ("checkpoint", 0, True), ("trace", 3, True),
        }  # fmt: skip
        assert served.ask("/run/0/live/stop", "POST", **own)[0] == 202
        while (who := lease.asked_to_stop()) is None:
            time.sleep(0.05)
        assert ", on the dashboard, process" in who
        messages = stack.enter_context(followed(served, "/run/0/live?since=x"))
        assert next(messages)[1] is not None
