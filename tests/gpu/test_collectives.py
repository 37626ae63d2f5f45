"""NCCL in a process group of one rank: the properties of collectives that one GPU can test."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from raydist import registry
from raydist.worker import build, distributed
from raydist.worker.comm import compressors
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.collective_counters import CollectiveCounters
from tests.gpu.device import CUDA, DEVICE, VOCAB, Trainer, alone, cuda_only, job

N = 1 << 20
BYTES = 4 * N


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    """Initialized as under torchrun: one rank, and the backend that raydist chooses for its device."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    about = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    before = {name: os.environ.get(name) for name in about}
    os.environ.update(about)
    backend = distributed.choose_backend(DEVICE).value
    dist.init_process_group(backend, device_id=DEVICE if CUDA else None)
    yield
    dist.destroy_process_group()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_every_collective_is_counted_and_timed_by_the_device() -> None:
    """Count and bytes follow nccl-tests; seconds are those of the kernels, and of the stream's waits for them."""
    x, whole = torch.ones(N, device=DEVICE), torch.empty(N, device=DEVICE)
    dist.all_reduce(x)  # the first NCCL call creates the communicator
    log = CollectiveCounters(DEVICE)
    log.install()
    try:
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()  # type: ignore[union-attr]
        dist.all_gather_into_tensor(whole, x)
        dist.reduce_scatter_tensor(x, whole)
        dist.broadcast(x, 0)
        if CUDA:
            torch.cuda.synchronize()
        totals = log.totals()
    finally:
        log.close()
    assert log.problem is None
    assert {op: (t.count, t.bytes) for op, t in totals.items() if t.count} == {
        "all_reduce": (2, 2 * BYTES),
        "all_gather": (1, BYTES),
        "reduce_scatter": (1, BYTES),
        "broadcast": (1, BYTES),
    }
    for total in totals.values():
        assert total.wire_bytes == 0 or total is totals["broadcast"]  # there is no peer
        if total.count:
            assert 0 < total.seconds < 1
            assert 0 <= total.exposed_seconds < 1
    assert totals["all_reduce"].exposed_seconds > 0


@cuda_only
def test_what_is_beside_training_is_not_waited_for() -> None:
    """Another stream's wait is not training's, whose engine waits for the collective; a barrier on the host is timed there."""
    control = dist.new_group(backend="gloo")
    control.bound_device_id = None
    x, other = torch.ones(N, device=DEVICE), torch.cuda.Stream(DEVICE)
    dist.all_reduce(x)
    log = CollectiveCounters(DEVICE)
    log.install()
    try:
        with log.backward():
            work = dist.all_reduce(x, async_op=True)
            other.wait_stream(torch.cuda.current_stream(DEVICE))
            assert [call.waited for _, call in log._backward or ()] == [False]
        assert work is not None
        dist.barrier(group=control)
        torch.cuda.synchronize()
        totals = log.totals()
    finally:
        log.close()
    assert log.problem is None
    assert (totals["all_reduce"].count, totals["other"].count) == (1, 1)
    assert totals["all_reduce"].exposed_seconds > 0


@cuda_only
def test_two_streams_have_no_scratch_in_common() -> None:
    """One thread launches what several lanes compress, each on a stream of its own."""
    like, found = torch.empty(N, device=DEVICE), []
    for _ in range(2):
        with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
            found.append(compressors.scratch(like))
    assert found[0].data_ptr() != found[1].data_ptr()


def ddp(watched: bool) -> list[torch.Tensor]:
    """Weights after three steps of torch's DDP."""
    torch.manual_seed(0)
    spec = job()
    model = DistributedDataParallel(build.build_model(spec, VOCAB).to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    trainer = Trainer(spec)
    log = CollectiveCounters(DEVICE)
    if watched:
        log.install()
    try:
        for _ in range(3):
            with log.backward() if watched else nullcontext():
                trainer.loss(model, 4).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    finally:
        log.close()
    if watched:
        assert log.totals()["all_reduce"].count >= 3
    return [p.detach().cpu() for p in model.parameters()]


def test_watched_weights_are_the_same_bits() -> None:
    """Counting changes no bit."""
    assert all(torch.equal(a, b) for a, b in zip(ddp(False), ddp(True), strict=True))


@pytest.mark.parametrize("strategy", ["zero3", "hsdp"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("parameters", ["none", "cpu"])
def test_sharded_over_a_mesh_of_one(strategy: str, precision: str, parameters: str) -> None:
    """FSDP2's all-gathers, streams and copies to the host run, and the gradients equal the plain model's.

    fp32: equal to 1e-6. bf16: to 4%, since the embedding, gathered in bf16, accumulates its gradients in bf16.
    """
    spec = job(precision=precision, parallel={"strategy": strategy, "shard": 1 if strategy == "hsdp" else None},
               offload={"parameters": parameters})  # fmt: skip
    plain = Trainer(job(precision=precision))
    plain.loss(plain.model, 4).backward()  # type: ignore[no-untyped-call]
    made = registry.load("parallel", strategy)(spec, Mesh(alone()))
    model = build.build_model(spec, VOCAB)
    made._fully_shard(model)
    assert isinstance(model, FSDPModule)
    if parameters == "none":
        model.to(DEVICE)
    else:
        for name, buffer in model.named_buffers():
            setattr(model, name, buffer.to(DEVICE))
    plain.loss(model, 4).backward()  # type: ignore[no-untyped-call]
    for (name, ours), theirs in zip(model.named_parameters(), plain.model.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        assert theirs.grad is not None
        a, b = ours.grad.to_local().cpu(), theirs.grad.cpu()
        assert (a - b).norm() <= (1e-6 if precision == "fp32" else 4e-2) * b.norm(), name
