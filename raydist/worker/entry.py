"""What Ray Train calls in each worker: the one door between Ray and the loop.

Runs in: each train worker, on Ray. The only module of worker/ that imports ray; hands ray's handles on as plain callables.
"""

from __future__ import annotations

import os
import time
import traceback
from typing import Any

import ray

from raydist.errors import RankFailed, RaydistError

_PUSH_TIMEOUT_S = 10.0


def train(config: dict[str, Any]) -> dict[str, Any]:
    """One attempt on this rank. `config` is plain: spec, run, dataset, attempt, until, allow_spec_change, and `monitor`.

    Gives `Outcome.to_dict()`. Raises RankFailed with the plain facts of whatever went wrong.
    """
    rank = int(os.environ["RANK"])
    try:
        return _train(config)
    except BaseException as error:
        if isinstance(error, SystemExit | KeyboardInterrupt) and not isinstance(error, Exception):
            error = RuntimeError(f"the train function ended with {type(error).__name__}: {error}")
        raise RankFailed(
            rank,
            type(error).__name__,
            "; ".join(filter(None, (error.message, error.hint)))
            if isinstance(error, RaydistError)
            else str(error).strip(),
            # What raydist raises says where and how to mend it; anything else needs the lines that led to it.
            "" if isinstance(error, RaydistError) else "".join(traceback.format_exception(error)),
            time.time(),
            tuple(c.__name__ for c in type(error).__mro__),
        ) from None


def _train(config: dict[str, Any]) -> dict[str, Any]:
    # Torch comes in here, not at the top: the driver imports this module's name, never torch.
    from raydist.rundir import RunDir
    from raydist.spec import parse
    from raydist.worker import setup
    from raydist.worker.loop import Door, Job, train

    spec = parse(config["spec"])
    rank = setup.start(
        gpus=config["gpus"],
        threads=max(1, int(spec.cluster.cpus_per_worker)),
        timeout_s=spec.recovery.timeout_s,
        node_ip=ray.util.get_node_ip_address(),
    )
    job = Job(
        spec=spec,
        run=RunDir(config["run"]),
        dataset=config["dataset"],
        attempt=config["attempt"],
        until=config["until"],
        allow_spec_change=config["allow_spec_change"],
    )
    outcome = train(job, rank, _door(config["monitor"], Door) if rank.first else None)
    setup.stop(rank)
    return outcome.to_dict()


def _door(monitor: Any, door: Any) -> Any:
    def push(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> str | None:
        reply = ray.get(monitor.push.remote(records, events), timeout=_PUSH_TIMEOUT_S)
        command = reply["command"]
        return str(command) if command else None

    def durable() -> None:
        ray.get(monitor.flush.remote(), timeout=_PUSH_TIMEOUT_S)

    return door(push=push, durable=durable)
