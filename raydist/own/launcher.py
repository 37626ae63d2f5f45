"""The rank of this process from the variables of its launcher: torchrun's, Open MPI's or SLURM's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from raydist.errors import UsageError
from raydist.worker.comm import rendezvous

_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""SLURM_STEP_NUM_TASKS, because a batch script outside any srun has SLURM_PROCID and SLURM_NTASKS, too."""

_met: list[Store] = []
"""The store of this process's sessions: the port of the first one is in use as long as the process runs."""
_sessions = 0


def store(environment: Mapping[str, str], timeout_s: float) -> Store | None:
    """Where the ranks of the next session meet, apart from those of the sessions before it; None for a single rank. Every rank."""
    global _sessions
    world = int(environment.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    if not _met:
        _met.append(rendezvous.meet(int(environment["RANK"]), world, timedelta(seconds=timeout_s), b""))
    _sessions += 1
    return PrefixStore(f"session {_sessions}", _met[0])


def translate(environment: MutableMapping[str, str]) -> None:
    """Sets torchrun's variables from those of mpirun or srun. Does nothing if they are set, or if no launcher is found.

    Raises UsageError if there are several ranks and no address where they meet.
    """
    if "RANK" not in environment:
        for name, rank, world, local in _LAUNCHERS:
            if rank in environment and world in environment:
                environment["RANK"], environment["WORLD_SIZE"] = environment[rank], environment[world]
                environment["LOCAL_RANK"] = environment.get(local, "0")
                if name == "srun" and "SLURM_LAUNCH_NODE_IPADDR" in environment and environment["WORLD_SIZE"] != "1":
                    environment.setdefault("MASTER_ADDR", environment["SLURM_LAUNCH_NODE_IPADDR"])
                break
    if int(environment.get("WORLD_SIZE", "1")) > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise UsageError(
                f"{' and '.join(missing)}: not set, and there are {environment['WORLD_SIZE']} ranks",
                "set MASTER_ADDR to the address of rank 0's node and MASTER_PORT to a free port there, on every rank",
            )
