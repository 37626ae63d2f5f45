"""What a node has, and how it differs from what `cluster.resources` asks for or from the other nodes.

`look`, `versions` and `storage_speed` run as a task on each node; the rest is pure. Never imports torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from typing import Any

import xxhash

import raydist
from raydist.checkpoint.memory_layout import SHM
from raydist.run.lease import SKEW_S
from raydist.spec.resources import ResourcesSpec
from raydist.storage import Storage

_GIB = 1 << 30
_BYTES, _FILES_S = 64 << 20, 1.0
_VERSIONS = ("raydist", "torch", "ray", "pyarrow")
_FILES = "raydist's files"
_ODD = {"gpu": "GPU model", "driver": "driver of the GPUs", "nccl": "NCCL"}
_SHOWN = 3
"""Nodes that a note lists."""


def look(address: str, disk: str | None = None) -> dict[str, Any]:
    """This host: `gpu` is None if its GPUs are of several models, "" without GPUs; sizes in GiB; `network_gbit` None if the driver
    of the interface with that address does not say it."""
    import psutil

    models, driver = host_gpus()
    return {
        "cpus": os.cpu_count(),
        "gpus": len(models),
        "gpu": "" if not models else models[0] if len({*models}) == 1 else None,
        "driver": driver,
        "nccl": _nccl() if models else "",
        "memory_gib": psutil.virtual_memory().total / _GIB,
        "shm_gib": shutil.disk_usage(SHM).total / _GIB if SHM.is_dir() else 0.0,
        "disk_gib": _free(disk),
        "network_gbit": _network(address),
    }


def versions() -> dict[str, str | None]:
    """What must agree on all nodes; None for a missing package. Reads metadata and raydist's own files, and imports nothing."""
    found: dict[str, str | None] = {"python": platform.python_version().rsplit(".", 1)[0]}
    for name in _VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    # Run from a source folder, as `ray job submit --working-dir .` does.
    found["raydist"] = found["raydist"] or raydist.__version__
    return found | {_FILES: source_hash(Path(raydist.__file__).parent)}


def source_hash(folder: Path) -> str:
    """Of the names and the bytes of its Python files: two checkouts may have one version."""
    hashed = xxhash.xxh3_64()
    for path in sorted(folder.rglob("*.py")):
        hashed.update(f"{path.relative_to(folder).as_posix()}\0".encode())
        hashed.update(path.read_bytes())
    return hashed.hexdigest()


def _free(folder: str | None) -> float:
    with suppress(OSError):
        return shutil.disk_usage(folder or tempfile.gettempdir()).free / _GIB
    return 0.0


def host_gpus() -> tuple[list[str], str]:
    """The models of this host's GPUs, and the version of their driver."""
    import pynvml

    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles], str(
                pynvml.nvmlSystemGetDriverVersion()
            )
        finally:
            pynvml.nvmlShutdown()
    return [], ""


def _nccl() -> str:
    """The version of the NCCL that torch's wheel brings; "" without such a wheel."""
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(PackageNotFoundError):
            return version(name)
    return next((d.version for d in distributions() if (d.name or "").startswith("nvidia-nccl")), "")


def _network(address: str) -> float | None:
    import psutil

    speeds = psutil.net_if_stats()
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses) and name in speeds:
            return speeds[name].speed / 1000 or None
    return None


def storage_speed(uri: str) -> tuple[float, float]:
    """MB/s of one file, and files a second of 1 KiB, that this host writes to that folder. Raises StorageError."""
    storage, prefix = Storage(uri), f".speed-{uuid.uuid4().hex[:8]}"
    data = os.urandom(1 << 20) * (_BYTES >> 20)
    written: list[str] = []

    def timed(name: str, data: bytes) -> float:
        begun = time.perf_counter()
        written.append(name)
        storage.write(name, data)
        return time.perf_counter() - begun

    try:
        rate = len(data) / 1e6 / timed(f"{prefix}-large", data)
        spent, files = 0.0, 0
        while spent < _FILES_S:
            spent += timed(f"{prefix}-{files}", data[:1024])
            files += 1
        return rate, files / spent
    finally:
        for name in written:
            storage.delete(name)


def lacks(asked: ResourcesSpec, has: Mapping[str, Any]) -> list[str]:
    """What a node lacks of `cluster.resources`: one line for each field."""
    found = []
    if asked.gpu is not None and asked.gpu.lower() not in (has["gpu"] or "").lower():
        found.append(f"cluster.resources.gpu: {asked.gpu}, but it has {has['gpu'] or 'GPUs of several models'}"
                     if has["gpus"] else f"cluster.resources.gpu: {asked.gpu}, but it has no GPU")  # fmt: skip
    units = {"cpus": "CPUs", "gpus": "GPUs", "memory_gib": "GiB of memory", "shm_gib": f"GiB in {SHM}", "disk_gib": "GiB free",
             "network_gbit": "Gbit/s", "storage_mb_s": "MB/s to the storage", "storage_iops": "files/s to the storage"}  # fmt: skip
    for field, unit in units.items():
        least, there = getattr(asked, field), has.get(field)
        if least is not None and there is not None and there < least:
            found.append(f"cluster.resources.{field}: {least:g}, but it has {there:.4g} {unit}")
    return found


def differs(
    facts: Mapping[str, str | None], here: Mapping[str, str | None], clock: float, asked_at: float, told_at: float
) -> list[str]:
    """How a node differs from the driver, which has `here`: one line for each of `versions`, and one for a clock that is off by
    more than a run's lease allows. `clock`: the node's, in the driver's time between `asked_at` and `told_at`."""
    found = []
    for name, mine in here.items():
        there = facts.get(name)
        if there != mine and name != _FILES:
            found.append(f"{name} is {there or 'missing'}, the driver's is {mine}; install the same")
        elif there != mine and facts.get("raydist") == here["raydist"]:
            found.append(f"its raydist {here['raydist']} has other files than the driver's; install the same")
    ahead, behind = clock - told_at, asked_at - clock
    if max(ahead, behind) > SKEW_S:
        found.append(
            f"its clock is {max(ahead, behind):.0f} s {'ahead of' if ahead > behind else 'behind'} the driver's; a run's lease "
            f"allows {SKEW_S:g} s: synchronise the clocks (chrony, ntpd)"
        )
    return found


def notes(asked: ResourcesSpec, nodes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What does not stop a run: nodes whose GPUs or driver differ from those of most, and what could not be compared with
    `cluster.resources`."""
    found = odd(nodes)
    unknown = [ip for ip, has in nodes.items() if has.get("network_gbit") is None]
    if asked.network_gbit is not None and unknown:
        more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
        found.append(
            f"cluster.resources.network_gbit: {asked.network_gbit:g} was not checked on {', '.join(unknown[:_SHOWN])}{more}: the "
            "driver of the interface does not say its speed; `raydist check` measures it"
        )
    return found


def odd(nodes: Mapping[str, Mapping[str, Any]], fields: Mapping[str, str] = _ODD) -> list[str]:
    """Nodes with GPUs whose model, driver or NCCL differs from that of most: one line each."""
    found = []
    with_gpus = {ip: has for ip, has in nodes.items() if has["gpus"]}
    for field, what in fields.items():
        counts = Counter(has[field] for has in with_gpus.values())
        if len(counts) > 1:
            usual, many = counts.most_common(1)[0]
            found += [
                f"node {ip}: {what} is {has[field] or 'unknown'}, that of {many} of {len(with_gpus)} nodes is {usual}"
                for ip, has in with_gpus.items()
                if has[field] != usual
            ]
    return found
