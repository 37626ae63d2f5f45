"""Checks, before any worker is reserved, whether this cluster can run this job. One error lists all problems.

Runs in: the driver, and as one zero-CPU task on each node of a cluster. Never imports torch.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raydist.checkpoint import huggingface
from raydist.checkpoint.memory_layout import SHM
from raydist.cluster import node_facts, nodes
from raydist.cluster.session import Session
from raydist.data import tokenizers
from raydist.errors import PreflightError, RaydistError, UserError
from raydist.spec import JobSpec, lora
from raydist.spec.huggingface import HUB
from raydist.storage import Storage
from raydist.worker.optim.offload import swap_space

_NODES_S, _MEASURE_S = 60.0, 60.0
"""How long all nodes together may take to answer, and how much longer if all write to the storage at once."""
_LOOK_S = 1.0
_COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")


def gpus_per_worker(spec: JobSpec, resources: Mapping[str, float]) -> float:
    """GPUs of each worker. `auto`: 1 if the cluster has enough GPUs for all workers, else 0."""
    wanted = spec.cluster.gpus_per_worker
    if wanted != "auto":
        return float(wanted)
    return 1.0 if resources.get("GPU", 0.0) >= spec.cluster.least else 0.0


def check_early(spec: JobSpec, *, local: bool) -> None:
    """Checks that need neither Ray nor the data. `local`: the job will train on this host.

    Raises PreflightError; UserError for the weights of `model.hf` and of `model.name: transformers`, and for a tokenizer that has
    more ids than the former have rows.
    """
    found = host_gpus() if local else None
    asked = spec.cluster.gpus_per_worker
    problems = []
    if asked == 0 or found is not None:
        problems += check_precision(spec, gpus_per_worker(spec, {"GPU": found or 0}))
    if found == 0 and asked not in ("auto", 0):
        problems.append(
            f"cluster.gpus_per_worker: {asked:g}, but this machine has no GPU; set it to 0 or auto, or give --address "
            "of a cluster"
        )
    for place in spec.checkpoint.replicas:
        try:
            Storage(place)
        except UserError as error:
            problems.append(f"checkpoint.replicas: {error}")
    if problems:
        raise PreflightError("\n".join(problems))
    weights = weights_of(spec) if spec.model.hf is None else None
    if weights is not None and not weights.startswith(HUB):
        huggingface.tensors_of(Storage(weights))
    if spec.model.hf is not None:
        format, ids = huggingface.format_for(spec.model), 0  # those of a prepared dataset are in it
        if spec.data.path is None:
            ids = tokenizers.vocabulary(spec.data.tokenizer) or tokenizers.load(spec.data.tokenizer).vocab_size
        rows = spec.model.rows(ids)
        shapes = format.shapes(spec.model, rows)
        huggingface.check(Storage(spec.model.hf), spec.model, format, shapes)
        if spec.model.lora is not None:
            lora.chosen(lora.linear_names(shapes), spec.model.lora.targets)


def weights_of(spec: JobSpec) -> str | None:
    """The folder with the weights that the model starts from."""
    found = spec.model.options.get("weights") if spec.model.name == "transformers" else spec.model.hf
    return found if isinstance(found, str) else None


def check_precision(spec: JobSpec, gpus: float) -> list[str]:
    """Problems with the precision, for workers with `gpus` GPUs each: one line, or none. Pure."""
    if spec.precision.params != "fp16" or gpus:
        return []
    why = (
        "cluster.gpus_per_worker is 0"
        if spec.cluster.gpus_per_worker == 0
        else "there are not enough GPUs here for one per worker"
    )
    return [f"precision: fp16 needs GPUs (CPUs have no fast fp16 kernels), and {why}; set precision: bf16 or fp32"]


def host_gpus() -> int | None:
    """GPUs of this host, at least as many as Ray may use; None if NVML cannot count them, such as AMD's."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return 0
    if Path("/dev/kfd").exists():
        return None
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return 0
    except pynvml.NVMLError as error:
        return 0 if error.value == pynvml.NVML_ERROR_DRIVER_NOT_LOADED else None


def check_resources(spec: JobSpec, resources: Sequence[Mapping[str, float]]) -> list[str]:
    """Missing resources, given each node's `resources` ({"CPU": 8.0, "GPU": 4.0}): one line, or none. Pure."""
    cluster = spec.cluster
    total = {k: sum(n.get(k, 0.0) for n in resources) for k in cluster.each(0.0)}
    each = cluster.each(gpus_per_worker(spec, total))
    fits = spec.parallel.whole(nodes.places(resources, each, spec.parallel.together))
    if fits >= cluster.least:
        return []
    asked = f"{cluster.least} workers of {nodes.amount(each)}"
    available = f"{len(resources)} node{'s' if len(resources) != 1 else ''} with {nodes.amount(total)} in all"
    remedy = f"set cluster.workers: {fits}" if fits else "reduce the resources per worker in cluster:"
    share = math.floor(10 * total["CPU"] / cluster.least) / 10
    if fits and share and len(resources) == 1 and all(name == "CPU" or not need for name, need in each.items()):
        remedy += f", or let them share CPUs, cluster.cpus_per_worker: {share:g}"
    if spec.parallel.together > 1:
        asked += f", each {spec.parallel.together} on one node (parallel.tensor)"
    return [f"the job asks for {asked}, the cluster has {available}: {fits} would fit; {remedy}, or add nodes"]


def joined(spec: JobSpec, session: Session, wait_s: float) -> Session:
    """The session once the cluster has enough nodes for the job, or after `wait_s` seconds, with its present resources."""
    import ray

    until = time.monotonic() + wait_s
    while (
        check_resources(spec, [node["Resources"] for node in usable_nodes(spec, session)]) and time.monotonic() < until
    ):
        time.sleep(_LOOK_S)
    return replace(session, resources={k: float(v) for k, v in ray.cluster_resources().items()})


def check(
    spec: JobSpec, session: Session, run_uri: str, dataset: str | None, *, measure: bool = False
) -> dict[str, Any]:
    """Raises PreflightError with all problems: resources; on each node versions, storage, data and modules, and what it lacks of
    `cluster.resources`. Returns what each node has, by its address: see `node_facts.look`.

    A node that has just died is not counted, though Ray may still list it for a while. `dataset`: None: none is needed.
    `measure`: also the speed of the storage, which is otherwise measured only if `cluster.resources` says what it must be.
    """
    alive = answering(session)
    usable = usable_nodes(spec, session, alive)
    problems = check_labels(spec, alive) or check_resources(spec, [node["Resources"] for node in usable])
    problems += check_precision(spec, gpus_per_worker(spec, session.resources))
    asked = spec.cluster.resources
    measure = measure or asked.storage_mb_s is not None or asked.storage_iops is not None
    # A private Ray runs on this host only, where the driver has already read the spec and the data and written to storage.
    if session.private:
        has = {
            session.node_ip: node_facts.look(session.node_ip, spec.offload.path) | (_speed(run_uri) if measure else {})
        }
        problems += check_offload(spec.offload.path) + check_copies(spec.snapshot_every)
        problems += check_compiler(spec.train.compile)
        problems += node_facts.lacks(asked, has[session.node_ip])
    else:
        with _marked(Storage(run_uri)) as mark:
            has, found = _check_nodes(spec, usable, run_uri, dataset, measure, mark)
        problems += found
    if problems:
        raise PreflightError("\n".join(problems))
    return has


def answering(session: Session) -> list[dict[str, Any]]:
    """The nodes that answer, as `ray.nodes()` lists them."""
    gone = set() if session.private else nodes.unreachable()
    return [n for n in nodes.listed() if n["Alive"] and n["NodeID"] not in gone]


def usable_nodes(
    spec: JobSpec, session: Session, alive: Sequence[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The nodes that the job may use, as `ray.nodes()` lists them; of `alive` (default: of all that answer)."""
    found = answering(session) if alive is None else alive
    return [node for node in found if nodes.usable(node, spec.cluster.resources)]


def check_labels(spec: JobSpec, alive: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels and custom resources of `cluster.resources` that no node has: one line each, with what the nodes have. Pure."""
    problems = []
    for key, value in spec.cluster.resources.labels.items():
        there = Counter((node.get("Labels") or {}).get(key) for node in alive)
        if not there[value]:
            known = ", ".join(f"{key}={each} ({count})" for each, count in there.items() if each is not None)
            problems.append(
                f"cluster.resources.labels: {key}={value}: no node has it; the nodes have {known or f'no label {key}'}; "
                f"correct it, or start nodes with `ray start --labels {key}={value}`"
            )
    for name, count in spec.cluster.resources.custom.items():
        if not any(node["Resources"].get(name) for node in alive):
            start = f"`ray start --resources '{json.dumps({name: math.ceil(count)})}'`"
            problems.append(
                f"cluster.resources.custom: {name}: no node has it; correct the name, or start nodes with {start}"
            )
    return problems


def _speed(uri: str) -> dict[str, float]:
    return dict(zip(("storage_mb_s", "storage_iops"), node_facts.storage_speed(uri), strict=True))


@contextmanager
def _marked(storage: Storage) -> Iterator[str]:
    """The name of a file that the storage has within the block: a node that does not see it has another storage."""
    mark = f".shared-{uuid.uuid4().hex[:8]}"
    storage.write(mark, b"raydist")
    try:
        yield mark
    finally:
        storage.delete(mark)


def _check_nodes(
    spec: JobSpec, alive: Sequence[Mapping[str, Any]], run_uri: str, dataset: str | None, measure: bool, mark: str
) -> tuple[dict[str, Any], list[str]]:
    """What each node has, and the problems of all. `mark`: see `_marked`."""
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    modules = sorted({n.partition(":")[0] for n in (spec.model.name, spec.parallel.strategy) if ":" in n})
    look = ray.remote(num_cpus=0, max_retries=0)(look_around)
    clock = ray.remote(num_cpus=0, max_retries=0)(_clock)
    places = {n["NodeManagerAddress"]: NodeAffinitySchedulingStrategy(n["NodeID"], soft=False) for n in alive}
    pending = {
        look.options(scheduling_strategy=place).remote(
            run_uri,
            dataset,
            modules,
            spec.offload.path,
            spec.snapshot_every,
            weights_of(spec),
            mark,
            ip,
            measure,
            spec.train.compile,
        ): ip
        for ip, place in places.items()
    }
    here = node_facts.versions()
    each = spec.cluster.each(gpus_per_worker(spec, _total(alive)))
    holds = {n["NodeManagerAddress"] for n in alive if nodes.places([n["Resources"]], each)}
    seen: dict[str, dict[str, Any]] = {}
    asked_at: dict[str, float] = {}
    found: dict[str, list[str]] = {}
    limit = _NODES_S + (_MEASURE_S if measure else 0.0)
    until = time.monotonic() + limit
    while pending and (left := until - time.monotonic()) > 0:
        ray.wait([*pending], timeout=left)
        ready, _ = ray.wait([*pending], num_returns=len(pending), timeout=0)
        told_at = time.time()
        for ref in ready:
            ip = pending.pop(ref)
            try:
                answer = ray.get(ref)
            except RayError as error:
                line = str(error).strip().splitlines()[-1]
                found[ip] = [f"cannot run raydist: {line}; install raydist {here['raydist']} there"]
                continue
            if ip not in seen:
                # It has a process for tasks now, so its clock comes at once: it is known to milliseconds.
                seen[ip], asked_at[ip] = answer, time.time()
                pending[clock.options(scheduling_strategy=places[ip]).remote()] = ip
                continue
            found[ip] = node_facts.differs(seen[ip]["versions"], here, answer, asked_at[ip], told_at)
            found[ip] += seen[ip]["problems"]
            if ip in holds:
                found[ip] += node_facts.lacks(spec.cluster.resources, seen[ip]["has"])
    silent = [f"no answer in {limit:g} s; see `ray status` and its raylet's log"]
    problems = [f"node {ip}: {problem}" for ip in places for problem in found.get(ip, silent)]
    has = {ip: seen[ip]["has"] for ip in places if ip in seen}
    return has, problems + [
        f"{line}; install the same" for line in node_facts.odd(has, {"nccl": "NCCL"}) if each["GPU"]
    ]


def _clock() -> float:
    return time.time()


def _total(alive: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {"GPU": sum(n["Resources"].get("GPU", 0.0) for n in alive)}


def check_offload(path: str | None) -> list[str]:
    """Problems of this host with the folder for offloaded optimizer state. Only the workers know the size of that state."""
    try:
        if path is not None:
            swap_space.check(path, 0)
    except UserError as error:
        return [f"{error.message}; {error.hint}"]
    return []


def check_copies(every: int | str | None) -> list[str]:
    """Problems of this host with shared memory, which holds memory checkpoints. Only the workers know their size."""
    if not isinstance(every, int) or (SHM.is_dir() and os.access(SHM, os.W_OK | os.X_OK)):
        return []  # `auto` turns memory checkpoints off then
    return [f"recovery.snapshot_every: {every} needs {SHM}, which does not exist or is not writable; set it to null"]


def check_compiler(compiles: bool | str) -> list[str]:
    """Problems of this host with `train.compile`: torch and Triton call a compiler."""
    if not compiles or any(map(os.environ.get, ("CC", "CXX"))) or any(map(shutil.which, _COMPILERS)):
        return []
    shown = "blocks" if compiles == "blocks" else "true"
    return [f"train.compile: {shown} needs a C++ compiler, and there is none; install g++, or set it to false"]


def look_around(
    run_uri: str,
    dataset: str | None,
    modules: Sequence[str],
    offload_path: str | None = None,
    snapshot_every: int | str | None = None,
    weights: str | None = None,
    mark: str | None = None,
    address: str = "",
    measure: bool = False,
    compiles: bool | str = False,
) -> dict[str, Any]:
    """Runs on one node: its versions, what it has, and the problems that a worker would have there. `mark`: a file of the run's
    folder that the driver has written. `address`: the node's. `measure`: also the speed of the storage. `compiles`:
    `train.compile`.
    """
    has = node_facts.look(address, offload_path)
    problems = check_offload(offload_path) + check_copies(snapshot_every) + check_compiler(compiles)
    probe = f".probe-{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
    try:
        storage = Storage(run_uri)
        if mark is not None and not storage.exists(mark):  # nothing is written into it
            problems.append(
                f"{storage.uri} is another folder there: it lacks a file that the driver has just written; use a --storage "
                "that all nodes share (is it mounted there?)"
            )
        else:
            storage.write(probe, b"raydist")
            storage.delete(probe)
            has |= _speed(run_uri) if measure else {}
    except RaydistError as error:
        problems.append(f"{error.message}; use a --storage that every node can write to")
    try:
        if dataset is not None and not Storage(dataset).exists("index.json"):
            problems.append(f"the dataset {dataset} was not found; put it on storage that every node can read")
    except RaydistError as error:
        problems.append(f"{error.message}; put the dataset on storage that every node can read")
    try:
        if weights is not None and not Storage(weights).exists("config.json"):
            problems.append(
                f"the weights {weights} were not found; put them on shared storage, under the same path on every node"
            )
    except RaydistError as error:
        problems.append(f"the weights: {error.message}; put them on storage that every node can read")
    problems += [
        f"no module {m!r}; run from the folder that holds it, or install it there"
        for m in modules
        if not _importable(m)
    ]
    return {"versions": node_facts.versions(), "has": has, "problems": problems}


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
