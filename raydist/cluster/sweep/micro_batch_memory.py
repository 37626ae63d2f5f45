"""The micro-batch that a trial starts with: one that fits into memory, if larger ones are known not to fit.

Runs in: the driver, in the trials' threads. Imports neither ray nor torch.

A run that is out of memory continues with half the micro-batch (`recovery.on_oom`) and logs that as an event. A trial that
starts again (after a failure, a restart of the driver or an exploit) uses the last micro-batch in its run's events. So does
another trial whose passes need the same memory. With train.virtual_ranks the micro-batch stays, and activations are recomputed
instead, for that trial alone. The size of a micro-batch is `train.micro_batch`, in sequences; with
data.batching it is data.batching.max_tokens.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from raydist.cluster.run.request import Request
from raydist.records import Event
from raydist.run.log import read_events
from raydist.spec import JobSpec
from raydist.spec.training import LossSpec


class MicroBatches:
    """The micro-batches that fit, for the trials of one sweep."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._most: dict[str, int] = {}
        """Settings that determine a pass's memory (see `_needs`) -> size of the largest micro-batch that fits."""

    def fitted(self, request: Request, earlier: int | None = None) -> Request:
        """The request, with a smaller micro-batch if one is known to be needed: from the run's events, equal trials, or `earlier`.

        Raises StorageError.
        """
        spec = request.spec
        if spec.train.virtual_ranks is not None:  # the shapes of passes decide bits
            recomputes = request.run.exists() and recomputed(read_events(request.run))
            full = spec.with_fields({"train.checkpoint_activations": "full"})
            return replace(request, spec=full) if recomputes else request
        with self._lock:
            known = [self._most.get(_needs(spec)), earlier]
        if request.run.exists():
            known.append(shrunk(read_events(request.run)))
        most = min([size(spec), *(n for n in known if n is not None)])
        if spec.data.batching is not None:
            tokens = max(most, spec.longest)
            return request if tokens >= size(spec) else replace(request, spec=spec.with_max_tokens(tokens))
        micro_batch = next(n for n in range(most, 0, -1) if spec.train.global_batch % n == 0)
        if micro_batch == spec.train.micro_batch:
            return request
        return replace(request, spec=spec.with_fields({"train.micro_batch": micro_batch}))

    def learn(self, spec: JobSpec, size: int) -> None:
        """A trial with such a spec ran out of memory and continued with micro-batches of that size."""
        with self._lock:
            needs = _needs(spec)
            self._most[needs] = min(size, self._most.get(needs, size))


def size(spec: JobSpec) -> int:
    """Of a micro-batch: sequences, or with data.batching tokens."""
    return spec.train.micro_batch if spec.data.batching is None else spec.data.batching.max_tokens


def size_field(spec: JobSpec) -> str:
    """The name of that size in events."""
    return "micro_batch" if spec.data.batching is None else "max_tokens"


def shrunk(events: Iterable[Event]) -> int | None:
    """The size of the micro-batches with which a run continued after it last ran out of memory; None if it never did."""
    found = None
    for event in events:
        if event.kind == "decision":
            sizes = (event.data.get(name) for name in ("micro_batch", "max_tokens"))
            found = next((int(n) for n in sizes if n is not None), found)
    return found


def recomputed(events: Iterable[Event]) -> bool:
    """Whether a run ran out of memory, and continued with recomputed activations."""
    return any(event.kind == "decision" and event.data.get("checkpoint_activations") == "full" for event in events)


def _needs(spec: JobSpec) -> str:
    """Key of all settings that affect a pass's memory: jobs with equal keys need the same memory per sequence, or per token."""
    train, cluster = spec.train, spec.cluster
    settings: dict[str, Any] = {
        "parts": [part.model_dump(mode="json") for part in (spec.model, spec.precision, spec.parallel, spec.offload)],
        "train": [train.compile, train.checkpoint_activations, train.deterministic],
        "optimizer": spec.optim.name,
        "workers": [cluster.workers, cluster.cpus_per_worker, cluster.gpus_per_worker, cluster.env],
    }
    if spec.data.batching is not None:
        settings["batching"] = [spec.longest, spec.data.batching.max, spec.row_multiple]
    if train.loss != LossSpec() or spec.optim.options:
        settings["extensions"] = [train.loss.model_dump(mode="json"), spec.optim.options]
    return json.dumps(settings, sort_keys=True)
