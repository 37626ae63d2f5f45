"""The micro-batch that a cell begins with: one that fits into memory, where larger ones are known not to.

Runs in: the driver; from the threads of cells. Imports neither ray nor torch.

A run that is out of memory goes on with half the micro-batch, by itself (`recovery.on_oom`), and its events say so. A cell that
begins again, after a failure, a restart of the driver or an exploit, begins with what its run's events say last. So does a cell
whose passes need the same memory.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace

from raydist.cluster.run.request import Request
from raydist.records import Event
from raydist.run.log import read_events
from raydist.spec import JobSpec


class MicroBatches:
    """What is known of the cells of one sweep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most: dict[str, int] = {}
        """What decides on a pass's memory -> sequences that one may have."""

    def fitted(self, request: Request, told: int | None = None) -> Request:
        """The same, with a smaller micro-batch if one is known to be needed: from the run's events, from cells like it, or `told`.

        Raises StorageError.
        """
        spec = request.spec
        with self._lock:
            known = [self._most.get(_needs(spec)), told]
        if request.run.exists():
            known.append(shrunk(read_events(request.run)))
        most = min([spec.train.micro_batch, *(n for n in known if n is not None)])
        micro_batch = next(n for n in range(most, 0, -1) if spec.train.global_batch % n == 0)
        if micro_batch == spec.train.micro_batch:
            return request
        train = spec.train.model_copy(update={"micro_batch": micro_batch})
        return replace(request, spec=spec.model_copy(update={"train": train}))

    def learn(self, spec: JobSpec, micro_batch: int) -> None:
        """A cell like that has run out of memory, and went on with `micro_batch`."""
        with self._lock:
            needs = _needs(spec)
            self._most[needs] = min(micro_batch, self._most.get(needs, micro_batch))


def shrunk(events: Iterable[Event]) -> int | None:
    """The micro-batch that a run went on with when it was last out of memory; None if it never was."""
    found = None
    for event in events:
        if event.kind == "decision" and event.data.get("micro_batch") is not None:
            found = int(event.data["micro_batch"])
    return found


def _needs(spec: JobSpec) -> str:
    """Equal for jobs of which a pass over as many sequences needs the same memory: whatever may change that is in it."""
    train, cluster = spec.train, spec.cluster
    told = {
        "parts": [part.model_dump(mode="json") for part in (spec.model, spec.precision, spec.parallel, spec.offload)],
        "train": [train.compile, train.checkpoint_activations, train.deterministic],
        "optimizer": spec.optim.name,
        "workers": [cluster.workers, cluster.cpus_per_worker, cluster.gpus_per_worker, cluster.env],
    }
    return json.dumps(told, sort_keys=True)
