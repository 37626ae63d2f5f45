"""Ray's authentication token: whether to send one, where Ray reads it, and the errors for a missing or a wrong token.

Runs in: the driver, and `raydist submit`. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from raydist.errors import ClusterUnreachable, UserError
from raydist.paths import local_path

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_FILE = ".ray/auth_token"
_ANSWER_S = 10.0
_GIVE = f"put the token that `ray get-auth-token` prints on the head in {TOKEN}, in a file that {TOKEN_PATH} names, or in ~/{_FILE}"


def token_mode() -> dict[str, str]:
    """Variables that make Ray's clients send the token, if there is one: `ray start --head` then requires it.

    Empty if RAY_AUTH_MODE is already set to something.
    """
    if os.environ.get(MODE) or not _source():
        return {}
    return {MODE: "token"}


def reread() -> None:
    """Makes Ray read the mode and the token from os.environ again: it caches the first ones that it reads in this process."""
    from raydist.cluster.ray_private import AuthenticationTokenLoader, Config

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def check_token() -> None:
    """Raises UserError if RAY_AUTH_MODE is `token` and no token can be read."""
    if _mode() != "token" or os.environ.get(TOKEN):
        return
    if not (source := _source()):
        raise UserError(
            f"{MODE} is token, but there is no token", f"{_GIVE}; unset {MODE} for a cluster that requires none"
        )
    path = Path(os.environ.get(TOKEN_PATH) or local_path("~") / _FILE)
    try:
        empty = not path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}", _GIVE) from None
    if empty:
        raise UserError(f"{source}: is empty", _GIVE)


def refused(where: str) -> UserError:
    """The error for a cluster that requires a token and got none, or a wrong one. `where`: the cluster, with its address."""
    mode, source = _mode(), _source()
    if not source:
        kept = "" if mode in ("", "token") else f"; and unset {MODE}, which is {mode}"
        return UserError(f"{where} requires a token, and there is none here", _GIVE + kept)
    if mode not in ("", "token"):
        return UserError(
            f"{where} requires a token, but with {MODE}={mode} Ray sends none", f"set {MODE}=token, or unset it"
        )
    return UserError(f"{where} rejects the token of {source}: the cluster has a different one", _GIVE)


def check_head(address: str) -> dict[str, str]:
    """The variable with which Ray's client connects to the head at HOST:PORT: with a token only if the head requires one. For a
    driver that uses a token requires one, too, and so refuses the workers of a cluster without.

    Raises UserError if the head rejects the token, or requires none and RAY_AUTH_MODE is `token`; ClusterUnreachable if no Ray head
    answers. Ray's own client would retry for 20 s and give no reason.
    """
    mode = _mode()
    modes = [mode or "disabled"]
    if mode == "token" or (not mode and _source()):
        modes = ["disabled", "token"]
    for each in modes:
        if _accepts(address, each):
            if mode == "token" and each != "token":
                raise UserError(
                    f"the Ray cluster at {address} requires no token, and with {MODE}=token this driver would refuse its workers",
                    f"unset {MODE}, or start the cluster with it",
                )
            return {MODE: each}
    raise refused(f"the Ray cluster at {address}")


def _accepts(address: str, mode: str) -> bool:
    """Whether the head accepts what Ray's client sends in that mode. Raises ClusterUnreachable, and UserError for an unreadable
    token."""
    import grpc

    from raydist.cluster.ray_private import init_grpc_channel

    before = os.environ.get(MODE)
    os.environ[MODE] = mode
    try:
        check_token()
        reread()
        channel = init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)])  # as in Ray's own client
    finally:
        os.environ.pop(MODE)
        if before is not None:
            os.environ[MODE] = before
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_ANSWER_S)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            return False
        why = error.details() or error.code().name
        raise ClusterUnreachable(
            f"cannot connect to the Ray cluster at {address}: {' '.join(why.split())}",
            "check the address: HOST:PORT of the head's GCS, which `ray start --head` prints; its port is 6379 by default",
        ) from None
    finally:
        channel.close()
    return True


def _mode() -> str:
    return os.environ.get(MODE, "").lower()


def _source() -> str:
    """The variable or file from which Ray reads the token, as shown to the user; "" if there is none."""
    if os.environ.get(TOKEN):
        return TOKEN
    if path := os.environ.get(TOKEN_PATH):
        return f"{path} ({TOKEN_PATH})"
    return f"~/{_FILE}" if (local_path("~") / _FILE).is_file() else ""
