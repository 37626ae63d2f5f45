"""Ray's Jobs API over HTTP: connects a client, or raises one clear error; submits a job with its packaged working directory.

Runs in: `raydist submit`. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raydist.cluster import authentication
from raydist.cluster.head_monitor import answers
from raydist.errors import ClusterUnreachable, UserError
from raydist.printable import printable

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient

_ANSWER_S = 10.0
_AGENT_S = 60.0
"""How long a cluster may have no agent to start a job: the head's registers some seconds after its Jobs API answers."""
_AGAIN_S = 1.0
_NO_AGENT = "No available agent"
_TOO_LARGE = ("413", "Too Large", "Maximum request body size")


def url_of(address: str) -> str:
    """`address` as http://HOST:PORT. Raises UserError if it cannot be the address of a Jobs API."""
    url = address if "://" in address else f"http://{address}"
    hint = "use the dashboard's address, http://HEAD:8265"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"--address {address}: {error}", hint) from None
    if parts.scheme not in ("http", "https") or not host:
        raise UserError(f"--address {address!r} is not the address of a cluster's Jobs API", hint)
    if parts.scheme == "http" and port is not None and answers(f"{host}:{port}"):
        raise UserError(f"--address {address}: the head's GCS answers there, not its Jobs API", hint)
    return url.rstrip("/")


def connect(url: str) -> JobSubmissionClient:
    """A client of the Jobs API at http://HOST:PORT. Raises ClusterUnreachable, or UserError if a retry cannot help."""
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for module in ("dashboard_sdk", "job.sdk"):  # they log each upload and each connection
        logging.getLogger(f"ray.dashboard.modules.{module}").setLevel(logging.WARNING)
    authentication.check_token()
    try:
        # Ray's own client has no timeout.
        version = requests.get(f"{url}/api/version", timeout=_ANSWER_S)
        if version.status_code not in (401, 403) and not _is_ray(version):
            raise ClusterUnreachable(
                f"{url}: the server there is not a Ray dashboard (status {version.status_code})",
                "check the address: http://HEAD:8265",
            )
        return JobSubmissionClient(url)
    except AuthenticationError:
        raise authentication.refused(f"the cluster at {url}") from None
    except (requests.RequestException, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise ClusterUnreachable(
            f"no Jobs API answers at {url}: {_why(error)}",
            "check the address (http://HEAD:8265), and that the cluster is running",
        ) from None


def submit(url: str, entrypoint: str, package: Path, variables: Mapping[str, str]) -> str:
    """Submits a job; returns its id. `package`: the archive of its working directory. Raises the same errors as `connect`."""
    import requests
    from ray.exceptions import AuthenticationError

    client = connect(url)
    environment = {"working_dir": str(package), "env_vars": dict(variables)}
    until = time.monotonic() + _AGENT_S
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env=environment))
        except AuthenticationError:
            raise authentication.refused(f"the cluster at {url}") from None
        except (requests.RequestException, OSError, RuntimeError, ValueError) as error:
            if _NO_AGENT not in str(error):
                raise _refused(url, error, package) from None
            if time.monotonic() >= until:
                raise ClusterUnreachable(
                    f"the cluster at {url} has had no agent that starts jobs for {_AGENT_S:g} s",
                    "see dashboard_agent.log on the head; two heads on one host need a --dashboard-agent-listen-port each",
                ) from None
        time.sleep(_AGAIN_S)


def _refused(url: str, error: Exception, package: Path) -> UserError:
    if any(word in str(error) for word in _TOO_LARGE):
        return UserError(
            f"{url} does not accept a package of {package.stat().st_size:,} bytes (413)",
            "a proxy in front of the dashboard may accept less than its 100 MiB: raise its limit, or ship less (.rayignore)",
        )
    return ClusterUnreachable(
        f"the Jobs API at {url} refused the job: {_why(error)}", "see the dashboard's log on the head"
    )


def _is_ray(answer: object) -> bool:
    try:
        return "ray_version" in answer.json()  # type: ignore[attr-defined]
    except (ValueError, TypeError):
        return False


def _why(error: BaseException) -> str:
    """The reason of the innermost error that has one: the outer ones repeat the address, over several lines."""
    found = ""
    at: BaseException | None = error
    while at is not None:
        found = getattr(at, "strerror", None) or found
        reason = getattr(at.args[0], "reason", None) if at.args else None
        at = reason if isinstance(reason, BaseException) else at.__cause__ or at.__context__
    return found or " ".join(str(error).split())[:300]


def ended(url: str, job: str, away_s: float) -> tuple[str, int | None, str]:
    """Follows a job to its end. Returns its status, the exit code of its driver, and the first line of Ray's message.

    Status LOST: the cluster no longer knows the job, or has not answered for `away_s` seconds. Raises UserError if the cluster no
    longer accepts the token.
    """
    import aiohttp  # Ray's client of jobs, which needs it, raises its errors
    from ray.exceptions import AuthenticationError

    answered = time.monotonic()
    while time.monotonic() - answered < away_s:
        try:
            client = connect(url)
            asyncio.run(_follow(client, job))
            info: Any = client.get_job_info(job)
            answered = time.monotonic()
        except AuthenticationError:
            raise authentication.refused(f"the cluster at {url}") from None
        except (aiohttp.ClientError, OSError, RuntimeError, ClusterUnreachable) as error:
            if "does not exist" in str(error):
                break
            time.sleep(_AGAIN_S)
            continue
        if info.status.is_terminal():
            message = printable(info.message or "").strip().splitlines()
            return info.status.value, info.driver_exit_code, message[0] if message else ""
    return "LOST", None, ""


async def _follow(client: Any, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(printable(lines), end="", file=sys.stderr, flush=True)
