"""Imports what the workers of a run import, in such a way that the process can then be forked.

Runs in: the workers' zygote (ray_worker.py). Importing this module is what it is for. Never imports torch.

Ray draws its random ids from a generator that forked processes would share: all of them would give the same ids to their tasks.
The generator is seeded at its first use, so it must not be used before the fork; ray.data draws an id for each of its actor classes
when it is imported. Raises ImportError if two forked processes draw the same id all the same: Ray then starts workers by itself.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from raydist.cluster.ray_private import ActorClassID, WorkerID, actor

MODULES = (
    "raydist.cluster.run.ray_train_adapter",
    "raydist.cluster.run.coordinator",
    "raydist.cluster.run.memory_store",
    "raydist.cluster.preflight",
    "raydist.launch.agent",
    "raydist.observe.run_monitor",
    "raydist.observe.node_monitor",
)
"""What the actors of a run import; with it most of what Ray's default_worker.py does."""


class _FromTheSystem:
    """In place of ActorClassID while modules are imported: ids from the system's generator."""

    @staticmethod
    def from_random() -> Any:
        return ActorClassID(os.urandom(ActorClassID.size()))


def _import_all() -> None:
    actor.ActorClassID = _FromTheSystem
    try:
        for module in MODULES:
            import_module(module)
    finally:
        actor.ActorClassID = ActorClassID


def _drawn() -> bytes:
    """An id that a forked process draws."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writing, WorkerID.from_random().binary())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        drawn = pipe.read()
    os.waitpid(pid, 0)
    return drawn


_import_all()
if _drawn() == _drawn():
    raise ImportError("forked processes draw the same ids: a module uses Ray's generator when it is imported")
