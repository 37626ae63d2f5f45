"""Drivers that these tests start as processes, and train functions for their workers.

`python drivers.py private LOGS` opens a private session, prints it as one JSON line, then reads commands from stdin: "train"
runs an attempt and prints its value; end of file ends the session. `python drivers.py attach ADDRESS LOGS` runs one
attempt on a cluster.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from raydist.cluster.run.fit import AttemptResult, WorkerKind, run_attempt
from raydist.cluster.session import Session, open_session, worker_environment
from raydist.errors import RankFailed


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Connects the ranks by sockets, as a process group does; then ends as `config["end"]` says for this rank."""
    import socket

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        with socket.create_server(address, reuse_port=True) as server:
            peers = [server.accept()[0] for _ in range(world - 1)]
    else:
        peers = [_dial(address)]
    facts = {
        "rank": rank,
        "pid": os.getpid(),
        "parent": os.getppid(),
        "torch": "torch" in sys.modules,
        "env": {
            k: os.environ.get(k)
            for k in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OURS")
        },
        "cwd": os.getcwd(),
    }
    if started := config.get("started"):
        Path(started, str(rank)).write_text(str(os.getpid()))
    match config.get("end", {}).get(str(rank), config.get("end", {}).get("*")):
        case "raise":
            raise ValueError("bad sample 17")
        case "told":
            raise RankFailed(
                rank, "NonFinite", "loss is nan", "Traceback: told", time.time(), ("NonFinite", "TrainingStopped")
            )
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "wait":
            for peer in peers:
                if peer.recv(1) == b"":  # a closed connection, as a collective would notice it
                    raise ConnectionResetError("Connection reset by peer")
        case "file":
            while not Path(config["file"]).exists():
                time.sleep(0.02)
    return facts


def _dial(address: tuple[str, int]) -> Any:
    import socket

    while True:  # rank 0 may not listen yet
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.02)


def attempt(session: Session, config: dict[str, Any] | None = None, cpus: float = 0.5, **kwargs: Any) -> AttemptResult:
    """One attempt of `train` on two workers of half a CPU each."""
    defaults: dict[str, Any] = {"run_name": "t", "workers": 2, "kind": WorkerKind({"CPU": cpus}, {"OURS": "1"})}
    return run_attempt(train, config or {}, session=session, **{**defaults, **kwargs})


def _bystander(path: str) -> Any:
    """An actor that writes its process id to `path`, and whose process hangs after Ray has shut it down."""
    import ray

    class Bystander:
        def leave(self) -> None:
            Path(path).write_text(str(os.getpid()))
            atexit.register(time.sleep, 1000)
            ray.actor.exit_actor()

    actor = ray.remote(Bystander).options(num_cpus=0).remote()
    actor.leave.remote()
    return actor


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _main() -> None:
    kind, *rest = sys.argv[1:]
    if kind == "private":
        with open_session("local", env=worker_environment(), log_dir=Path(rest[0])) as session:
            # After open_session: ray.init() sets a handler for SIGTERM, not for SIGINT.
            signal.signal(signal.SIGINT, lambda *_: _say(interrupted=True))
            _say(address=session.address, temp=str(session.temp_dir), token=os.environ["RAY_AUTH_TOKEN"])
            for line in sys.stdin:
                config = json.loads(line)
                if "bystander" in config:
                    signal.signal(signal.SIGTERM, lambda *_: _say(interrupted=True))
                    bystander = _bystander(config["bystander"])  # noqa: F841 - it ends with this process
                result = attempt(session, config)
                _say(value=result.value, cause=result.failure and result.failure.cause)
    else:
        env = worker_environment()
        with open_session(rest[0], env=env, log_dir=Path(rest[1]), working_dir=Path.cwd()) as session:
            result = attempt(session)
            _say(
                private=session.private,
                address=session.address,
                value=result.value,
                cause=result.failure and result.failure.cause,
            )


if __name__ == "__main__":
    _main()
