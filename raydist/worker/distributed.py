"""Makes a process a rank: device, backend, network interface, process group, seeds. Each choice has a reason.

Runs in: each train worker. Torch, never ray. Reads the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raydist.errors import UserError
from raydist.ipc.network_interface import interface_of
from raydist.worker import numerics
from raydist.worker.comm import rendezvous

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Choice(Generic[T]):
    """An automatic choice, and its reason."""

    value: T
    because: str


@dataclass(frozen=True, slots=True)
class Rank:
    """This process as a rank. `control`: a gloo group of all ranks, for collectives that are not part of training."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    node_ip: str
    control: dist.ProcessGroup | None
    notes: tuple[str, ...]

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which reports for all ranks."""
        return self.rank == 0


def choose_device(local_rank: int, gpus: float | None) -> Choice[torch.device]:
    """The device of this rank. `gpus`: GPUs that the job gives each worker; None: those that torch sees, if any.

    Raises UserError if the job gives GPUs and torch sees none.
    """
    if gpus == 0:
        return Choice(torch.device("cpu"), "this run gives its workers no GPU")
    n = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if n == 0:
        if gpus:
            raise UserError(
                f"the job gives each worker {gpus:g} GPUs, but torch {torch.__version__} sees no CUDA device here",
                "install a CUDA build of torch on the nodes, or set cluster.gpus_per_worker: 0",
            )
        return Choice(torch.device("cpu"), "torch sees no CUDA device")
    # The ranks of a node have the same CUDA_VISIBLE_DEVICES, with Ray as with torchrun; a single rank may see its own device only.
    index = local_rank % n
    return Choice(torch.device("cuda", index), f"CUDA device {index} of {n}: {torch.cuda.get_device_name(index)}")


def use_device(device: torch.device) -> None:
    """To be called first in a thread that calls CUDA, also if it only asks for an event: a new thread has the first device, and on
    the first such call CUDA makes a context there, of some 500 MB for each rank of the node."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_backend(device: torch.device) -> Choice[str]:
    """The backend for tensors of this device; CPU tensors always use gloo."""
    if device.type == "cuda":
        return Choice("cpu:gloo,cuda:nccl", f"NCCL for {device}, gloo for CPU tensors")
    return Choice("gloo", f"no CUDA device for {device}")


def choose_interface(node_ip: str) -> Choice[str] | None:
    """Sets the interface of gloo and NCCL, unless the user has set it. Call it before the group starts.

    By default gloo uses the address that the hostname resolves to, often 127.0.0.1, and no other host can connect.
    """
    name = interface_of(node_ip)
    if name is None:
        return None
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return Choice(os.environ["GLOO_SOCKET_IFNAME"], f"it has the address {node_ip}")


def start(
    *,
    gpus: float | None,
    threads: int | None,
    timeout_s: float,
    node_ip: str | None = None,
    met: tuple[Store, bytes] | None = None,
) -> Rank:
    """Makes this process a rank of the group that its environment describes, or a single rank if it describes none.

    `threads`: of torch, on the CPU. `timeout_s`: limit of each collective. If the environment has the attempt's secret, each rank
    proves that it knows it: see comm/rendezvous.py. Raises RankRefused if one does not. `met`: the store where the ranks have met,
    and their secret, in place of the environment's.
    """
    secret = rendezvous.take_secret() if met is None else met[1]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = choose_device(local_rank, gpus)
    backend = choose_backend(device.value)
    node_ip = node_ip or _own_ip()
    notes = [f"device {device.value}: {device.because}"]
    if device.value.type == "cuda":
        torch.cuda.set_device(device.value)
    if threads:  # with a GPU, too: an offloaded optimizer computes on the CPU
        torch.set_num_threads(threads)
    control = None
    if world > 1:
        notes.append(f"backend {backend.value}: {backend.because}")
        if interface := choose_interface(node_ip):
            notes.append(f"interface {interface.value}: {interface.because}")
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend.value,
            store=met[0] if met is not None else rendezvous.meet(rank, world, timeout, secret),
            rank=rank,
            world_size=world,
            timeout=timeout,
            device_id=device.value if device.value.type == "cuda" else None,
        )
        control = dist.new_group(backend="gloo", timeout=timeout)
        control.bound_device_id = None  # the world's, with which torch's barrier would be one of a CUDA tensor
        if secret:
            rendezvous.prove(control, secret)
            rendezvous.prove(dist.distributed_c10d._get_default_group(), secret)
    return Rank(rank, world, local_rank, device.value, backend.value, node_ip, control, tuple(notes))


def stop(rank: Rank) -> None:
    """Leaves the group, after all ranks have called this."""
    if rank.world_size > 1 and dist.is_initialized():
        dist.barrier(group=rank.control)
        dist.destroy_process_group()


def _own_ip() -> str:
    """The address of this host on its route to the rendezvous. Sends no packet."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def derive(seed: int, purpose: str, *parts: int) -> int:
    """A seed of 63 bits for one purpose, independent of the seeds for other purposes."""
    text = ":".join([str(seed), purpose, *map(str, parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_all(seed: int, purpose: str, *parts: int, devices: bool = True) -> None:
    """Seeds torch, numpy and random for one purpose, such as ("init") or ("dropout", rank). `devices`: also the generators of GPUs,
    which takes 0.1 ms even where there are none."""
    value = derive(seed, purpose, *parts)
    (torch.manual_seed if devices else torch.default_generator.manual_seed)(value)
    random.seed(value)
    np.random.seed(value % 2**32)  # the global generator, because users' models draw from it


def be_deterministic() -> None:
    """Selects torch's deterministic algorithms, for bit-equal runs on GPUs. Call it before the first CUDA call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def describe(rank: Rank) -> dict[str, object]:
    """This worker, for the event `workers`: plain values."""
    return {
        "rank": rank.rank,
        "host": socket.gethostname(),
        "node_ip": rank.node_ip,
        "pid": os.getpid(),
        "device": str(rank.device),
        "python": sys.version.split()[0],
        **numerics.own(),
    }
