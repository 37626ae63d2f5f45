"""Injects faults on a rank (raydist/faults defines them).

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raydist.worker.attempt import Job
    from raydist.worker.distributed import Rank
    from raydist.worker.faults.injector import Injector


def injector_of(job: Job, rank: Rank) -> Injector | None:
    """Injects the faults of the job; None if it has none: then nothing that injects is imported."""
    if not job.faults:
        return None
    from raydist.worker.faults.injector import Injector

    memory = job.memory_store.folder if job.memory_store is not None else None
    return Injector(job.faults, job.run, rank, job.attempt, memory, job.agent)


class InjectedError(Exception):
    """Raised by `fault: raise`, like a bug in the user's code; also if a fault cannot be injected."""
