"""The rank of this process from the variables of its launcher: torchrun's, or those of Open MPI, SLURM, MPICH or Intel MPI."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store

from raydist.errors import UsageError
from raydist.worker.comm import rendezvous

_LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
)
"""Of Open MPI; of MPICH and Intel MPI, whose ranks in a SLURM job also have SLURM's, of the process that started them; of SLURM
(srun sets no MPI_LOCALRANKID). SLURM_STEP_NUM_TASKS, because a batch script outside any srun has SLURM_PROCID and SLURM_NTASKS,
too."""

_met: list[tuple[Store, bytes]] = []
"""The store of this process's sessions, and the secret of its ranks: the port is in use as long as the process runs, and the
secret is no longer in the environment."""
_sessions = 0


def store(environment: Mapping[str, str], timeout_s: float) -> tuple[Store, bytes] | None:
    """Where the ranks of the next session meet, apart from those of the sessions before it, and the secret that each must know;
    None for a single rank. Every rank. Raises RankRefused."""
    global _sessions
    world = int(environment.get("WORLD_SIZE", "1"))
    if world == 1:
        return None
    if not _met:
        secret = rendezvous.take_secret()
        _met.append((rendezvous.meet(int(environment["RANK"]), world, timedelta(seconds=timeout_s), secret), secret))
    _sessions += 1
    store, secret = _met[0]
    return PrefixStore(f"session {_sessions}", store), secret


def translate(environment: MutableMapping[str, str]) -> None:
    """Sets torchrun's variables from those of mpirun or srun. Does nothing if they are set, or if no launcher is found.

    Raises UsageError if there are several ranks and no address where they meet.
    """
    if "RANK" not in environment:
        for name, rank, world, local in _LAUNCHERS:
            if all(variable in environment for variable in (rank, world, local)):
                environment["RANK"], environment["WORLD_SIZE"] = environment[rank], environment[world]
                environment["LOCAL_RANK"] = environment[local]
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
