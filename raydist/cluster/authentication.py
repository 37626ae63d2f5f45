"""The token that a cluster may ask for: whether to show one, where it is, and what to do where it is missing or wrong.

Runs in: the driver, and `raydist submit`. Imports ray inside functions; never torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from raydist.errors import UserError

MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_FILE = ".ray/auth_token"
_ANSWER_S = 10.0
_GIVE = f"put the token that `ray get-auth-token` prints on the head in {TOKEN}, in a file that {TOKEN_PATH} names, or in ~/{_FILE}"


def token_mode() -> dict[str, str]:
    """Authenticate if there is a token: `ray start --head` then asks for one, and Ray's clients must be told so."""
    if MODE in os.environ or not _source():
        return {}
    return {MODE: "token"}


def reread() -> None:
    """Ray keeps the mode and the token that it first met in this process: it must look at os.environ once more."""
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def check_token() -> None:
    """Raises UserError where Ray is told to show a token, and there is none that can be read."""
    if _mode() != "token" or os.environ.get(TOKEN):
        return
    if not (source := _source()):
        raise UserError(
            f"{MODE} is token, and there is no token", f"{_GIVE}; unset {MODE} for a cluster that asks for none"
        )
    path = Path(os.environ.get(TOKEN_PATH) or Path.home() / _FILE)
    try:
        empty = not path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source}: cannot be read: {getattr(error, 'strerror', None) or error}", _GIVE) from None
    if empty:
        raise UserError(f"{source}: is empty", _GIVE)


def refused(where: str) -> UserError:
    """The error for a cluster that wants a token and was shown none, or not its own. `where`: its address."""
    mode, source = _mode(), _source()
    if not source:
        kept = "" if mode in ("", "token") else f"; and unset {MODE}, which is {mode}"
        return UserError(f"{where} asks for a token, and there is none here", _GIVE + kept)
    if mode not in ("", "token"):
        return UserError(
            f"{where} asks for a token, and {MODE}={mode} keeps Ray from showing one", f"set {MODE}=token, or unset it"
        )
    return UserError(f"{where} refuses the token of {source}: it has another one", _GIVE)


def check_head(address: str) -> None:
    """Asks the head at HOST:PORT whether it takes the token: Ray's own client would try for 20 s, and not say why.

    Raises UserError where it does not, or where it does not answer as a head of Ray does.
    """
    import grpc
    from ray._private.grpc_utils import init_grpc_channel

    check_token()
    channel = init_grpc_channel(address, options=[("grpc.enable_http_proxy", 0)])  # as Ray's own
    try:
        channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_ANSWER_S)
    except grpc.RpcError as error:
        if error.code() == grpc.StatusCode.UNAUTHENTICATED:
            raise refused(f"the Ray cluster at {address}") from None
        why = error.details() or error.code().name
        raise UserError(
            f"cannot connect to the Ray cluster at {address}: {' '.join(why.split())}",
            "check the address: HOST:PORT of the head's GCS, which `ray start --head` prints; its port is 6379 by default",
        ) from None
    finally:
        channel.close()


def _mode() -> str:
    return os.environ.get(MODE, "").lower()


def _source() -> str:
    """Where Ray takes a token from, as a user calls it; "" if there is none."""
    if os.environ.get(TOKEN):
        return TOKEN
    if path := os.environ.get(TOKEN_PATH):
        return f"{path} ({TOKEN_PATH})"
    return f"~/{_FILE}" if (Path.home() / _FILE).is_file() else ""
