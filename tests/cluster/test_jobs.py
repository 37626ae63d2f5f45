"""The Jobs API and the head: a wrong address or token is one clear error, within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from raydist.cluster import authentication, jobs
from raydist.errors import ClusterUnreachable, UserError


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A user without a token; Ray's own state is restored at the end."""
    for name in (authentication.MODE, authentication.TOKEN, authentication.TOKEN_PATH):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    authentication.reread()
    yield
    monkeypatch.undo()
    authentication.reread()


@pytest.fixture
def dashboard() -> Iterator[Any]:
    """An HTTP server; `answers` maps path -> (status, body), or a list of these, of which the last one stays; other paths return
    404."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            self.rfile.read(length)
            path = self.path if self.path in self.server.answers else self.path.rpartition("/")[0]  # type: ignore[attr-defined]
            answer = self.server.answers.get(path, (404, ""))  # type: ignore[attr-defined]
            if isinstance(answer, list):
                answer = answer.pop(0) if len(answer) > 1 else answer[0]
            status, body = answer
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        do_PUT = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.answers = {"/api/version": (200, '{"ray_version": "2.60.0"}')}  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def head() -> Iterator[str]:
    """A GCS that refuses every token."""
    with gcs(lambda token: False) as address:
        yield address


@contextlib.contextmanager
def gcs(accepts: Callable[[str | None], bool]) -> Iterator[str]:
    """A head that answers requests with a token, or without one: None, if it accepts that."""

    class Checks(grpc.ServerInterceptor):  # type: ignore[misc]
        def intercept_service(self, go_on: Any, call: Any) -> Any:
            def answer(request: bytes, context: Any) -> bytes:
                if not accepts(dict(call.invocation_metadata).get("authorization")):
                    context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    server = grpc.server(futures.ThreadPoolExecutor(1), interceptors=[Checks()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


GIVE = "ray get-auth-token"


@pytest.mark.parametrize(
    ("env", "says", "hint"),
    [
        ({}, "requires a token, and there is none here", GIVE),
        ({"RAY_AUTH_MODE": "disabled"}, "requires a token, and there is none here", "unset RAY_AUTH_MODE"),
        ({"RAY_AUTH_MODE": "token"}, "RAY_AUTH_MODE is token, but there is no token", "unset RAY_AUTH_MODE"),
        ({"RAY_AUTH_TOKEN": "f" * 40}, "rejects the token of RAY_AUTH_TOKEN", GIVE),
        ({"RAY_AUTH_TOKEN": "f" * 40, "RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled Ray", "or unset it"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/such"}, "/no/such (RAY_AUTH_TOKEN_PATH): cannot be read: No such file", GIVE),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "/dev/null (RAY_AUTH_TOKEN_PATH): is empty", GIVE),
    ],
)
def test_a_token_that_is_missing_or_wrong(
    monkeypatch: pytest.MonkeyPatch, dashboard: Any, head: str, env: dict[str, str], says: str, hint: str
) -> None:
    """The Jobs API and the head raise the same error, with the cause and the matching remedy."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for name, value in authentication.token_mode().items():
        monkeypatch.setenv(name, value)
    authentication.reread()
    dashboard.answers["/api/version"] = (403 if "RAY_AUTH_TOKEN" in env else 401, "no")
    for ask in (lambda: jobs.connect(dashboard.url), lambda: authentication.check_head(head)):
        with pytest.raises(UserError) as caught:
            ask()
        assert says in caught.value.message
        assert hint in caught.value.hint
        assert "\n" not in caught.value.message


@pytest.mark.parametrize("mode", [None, ""], ids=["unset", "empty"])
def test_a_token_is_used_only_where_the_head_requires_one(monkeypatch: pytest.MonkeyPatch, mode: str | None) -> None:
    """Otherwise the driver would refuse the workers of a cluster without a token; RAY_AUTH_MODE=token there is an error."""
    token = "f" * 40
    monkeypatch.setenv("RAY_AUTH_TOKEN", token)
    if mode is not None:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    before = dict(os.environ)
    with gcs(lambda sent: sent == f"Bearer {token}") as closed, gcs(lambda sent: True) as opened:
        assert authentication.check_head(closed) == {"RAY_AUTH_MODE": "token"}
        assert authentication.check_head(opened) == {"RAY_AUTH_MODE": "disabled"}
        assert dict(os.environ) == before
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert authentication.check_head(closed) == {"RAY_AUTH_MODE": "token"}
        with pytest.raises(
            UserError, match=r"requires no token, and with RAY_AUTH_MODE=token .*\s*unset RAY_AUTH_MODE"
        ):
            authentication.check_head(opened)


def test_what_is_no_address_of_a_jobs_api(dashboard: Any, head: str) -> None:
    """Each is refused with the reason; HOST:PORT alone means http."""
    for address, says in {
        "": "is not the address", "ray://h:1": "is not the address", "http://": "is not the address",
        "http://h:x": "Port could not be cast",
        head: "the head's GCS answers there", f"http://{head}": "the head's GCS answers there",
    }.items():  # fmt: skip
        with pytest.raises(UserError, match=says) as caught:
            jobs.url_of(address)
        assert "http://HEAD:8265" in caught.value.hint
    bare = dashboard.url.removeprefix("http://")
    assert jobs.url_of(bare) == jobs.url_of(f"{dashboard.url}/") == dashboard.url


def test_a_jobs_api_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, dashboard: Any) -> None:
    """Refused connection, no answer, unknown host, not Ray: each error has its reason, and may be retried."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        found = {f"http://127.0.0.1:{mute.getsockname()[1]}": "timed out"}
        found |= {"http://127.0.0.1:1": "Connection refused", "http://no-such-host.invalid:8265": ""}
        found |= {dashboard.url.replace("http:", "https:"): "SSL"}
        for url, says in found.items():
            monkeypatch.setattr(jobs, "_ANSWER_S", 0.2 if says == "timed out" else 240.0)
            with pytest.raises(ClusterUnreachable, match=f"no Jobs API answers at {url}: .*{says}"):
                jobs.connect(url)
    for status, body in ((404, ""), (200, "<html>"), (200, "[]")):
        dashboard.answers["/api/version"] = (status, body)
        with pytest.raises(ClusterUnreachable, match=rf"not a Ray dashboard \(status {status}\)"):
            jobs.connect(dashboard.url)


def test_a_package_that_is_refused(dashboard: Any, tmp_path: Path) -> None:
    """413 has its own remedy and is not retried; another refusal has its reason."""
    archive = tmp_path / "package.zip"
    archive.write_bytes(b"PK\x05\x06" + bytes(18))
    dashboard.answers["/api/packages/gcs"] = (413, "Maximum request body size 104857600 exceeded")
    with pytest.raises(UserError, match=r"does not accept a package of 22 bytes \(413\)\n.*proxy") as caught:
        jobs.submit(dashboard.url, "true", archive, {})
    assert not isinstance(caught.value, ClusterUnreachable)
    dashboard.answers["/api/packages/gcs"] = (500, "out\nof disk")
    with pytest.raises(ClusterUnreachable, match="refused the job: Request failed with status code 500: out of disk"):
        jobs.submit(dashboard.url, "true", archive, {})


def test_a_cluster_whose_agent_is_not_up_yet(monkeypatch: pytest.MonkeyPatch, dashboard: Any, tmp_path: Path) -> None:
    """Ray's HTTP 500 is no refusal: the job is sent again until there is an agent, within a limit."""
    monkeypatch.setattr(jobs, "_AGAIN_S", 0.01)
    archive = tmp_path / "package.zip"
    archive.write_bytes(b"PK\x05\x06" + bytes(18))
    none = (500, "No available agent to submit job, please try again later.")
    dashboard.answers["/api/packages/gcs"] = (200, "")
    dashboard.answers["/api/jobs/"] = [none, none, (200, '{"job_id": "j-7", "submission_id": "j-7"}')]
    assert jobs.submit(dashboard.url, "true", archive, {}) == "j-7"
    dashboard.answers["/api/jobs/"] = [none]
    monkeypatch.setattr(jobs, "_AGENT_S", 0.1)
    with pytest.raises(
        ClusterUnreachable, match=r"has had no agent that starts jobs for 0\.1 s\s*see dashboard_agent.log"
    ):
        jobs.submit(dashboard.url, "true", archive, {})


def test_control_characters_of_a_jobs_log_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A job prints what its ranks and files contain; escape sequences that are cut between two messages do nothing either."""

    class Client:
        async def tail_job_logs(self, job: str) -> AsyncIterator[str]:
            for lines in ("\x1b]0;title\x07step 1\n", "\x1b[31mred\x1b", "[2J\u202e\x9b7m\n"):
                yield lines

    asyncio.run(jobs._follow(Client(), "job"))
    assert capsys.readouterr().err == "step 1\nred[2J\n"
