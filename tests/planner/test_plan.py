"""Plans against measurements: the allocator's peak in a real pass, and figures computed by hand.

Plans against real ranks are in test_ranks.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from raydist import registry
from raydist.data.batches import MicroBatch
from raydist.errors import UserError
from raydist.planner import measure as measure_module
from raydist.planner.advice import advise
from raydist.planner.estimate import estimate, measured_pass
from raydist.planner.estimate import refusal as untrainable
from raydist.planner.facts import ROOT, Activations, Estimate, Machine, Model, Moment, Param, Pass, Peak
from raydist.planner.live import LiveBytes
from raydist.planner.measure import Planner
from raydist.planner.pipeline import StageBytes, heaviest_moment
from raydist.planner.shares import shard_of
from raydist.planner.speed import NAMES, Device, find, refusal, speed
from raydist.planner.target import OnTarget, wide_on_cuda
from raydist.planner.traffic import last_share, traffic
from raydist.spec import JobSpec
from raydist.worker import model_transforms as compute
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.flops import GPUS
from raydist.worker.parallel._tensor import TensorParallel
from raydist.worker.precision import Precision
from raydist.worker.step import loss_sum
from tests.planner.jobs import SMALL, VOCAB, job


def plan(spec: JobSpec, strategy: str, machine: Machine, vocab: int = VOCAB) -> Estimate:
    """The estimate of one strategy."""
    planner = Planner(spec, vocab, machine.device)
    return estimate(strategy, spec, machine, planner.model(), planner.measure(measured_pass(strategy, spec, machine)))


# --- by hand

TINY = Model(
    (
        Param("embedding.weight", (10, 4), True, ROOT),
        Param("blocks.0.weight", (6, 4), True, 0),
        Param("blocks.1.weight", (6, 4), True, 1),
        Param("head.bias", (10,), True, ROOT),
    ),
    buffers=8,
)
"""98 parameters. On 3 ranks, in whole rows: 4 x 4 + 2 x 4 + 2 x 4 + 4 = 36 on the fullest rank; the root 20, a block 8."""

MEASURED = Activations(70, (Peak("forward", 0, 100, 0), Peak("loss", 0, 80, 60), Peak("backward", 40, 300, 10)))

BY_HAND = {
    # Whole: 4 x 98 each, AdamW 8 x 98 and 4 for each of 4 step counts. Two micro-batches accumulate beside the buckets. An
    # all-reduce sends 2 x 2/3 x 392.
    "ddp": dict(parameters=392, gradients=392, optimizer=800, gathered=40, in_flight=392, sent=523),
    # 8 x 36 + 16. Two slots of the largest unit, the root: packed for 3 ranks, the received parts, and its sum. Sent:
    # 2 x 36 x (4 + 4).
    "zero1": dict(parameters=392, gradients=392, optimizer=304, gathered=40, in_flight=1120, sent=576),
    # Gradients of 36; two micro-batches: 2 x 36 x (2 x 4 + 4).
    "zero2": dict(parameters=392, gradients=144, optimizer=304, gathered=40, in_flight=1120, sent=864),
    # The root's 3 x 20 and a block's 3 x 8, fp32, and 40 as measured; in flight the next block's 96, the root's 240 that the
    # micro-batch before has scattered, and 240 to receive the root's. Sent in each of two micro-batches: the root and the last
    # block once, the first twice, and gradients: 2 x 2 x 4 x (20 + 16 + 8 + 36).
    "zero3": dict(parameters=144, gradients=144, optimizer=304, gathered=376, in_flight=576, sent=1280),
}  # fmt: skip


@pytest.mark.parametrize("strategy", BY_HAND)
def test_a_tiny_model_by_hand(strategy: str) -> None:
    """Every figure of 98 parameters on 3 ranks equals the one computed by hand."""
    spec = job(train={"global_batch": 6, "micro_batch": 1})
    found = estimate(strategy, spec, Machine(3, 8, "cpu"), TINY, MEASURED)
    assert {k: getattr(found, k) for k in BY_HAND[strategy]} == BY_HAND[strategy]
    assert (found.phase, found.activations, found.loss) == ("backward", 300, 10)
    assert found.total == found.state + 8 + found.gathered + found.in_flight + found.activations + found.loss


def test_the_peak_is_where_most_lives() -> None:
    """The worst phase counts, with tensors gathered and in flight then: here the root's own gradients, at the end of backward."""
    small = Activations(0, (Peak("forward", 0, 1, 0), Peak("loss", 0, 1, 1), Peak("backward", 0, 1, 0)))
    found = estimate("zero3", job(train={"global_batch": 6, "micro_batch": 1}), Machine(3, 8, "cpu"), TINY, small)
    # Gathered root and its whole gradients, 3 x 20 x 4 each; the reduce-scatter's packed gradients, their sum, received parts.
    assert (found.phase, found.gathered, found.in_flight) == ("end", 240 + 240, 240 + 80 + 240)
    large = Activations(0, (Peak("forward", 0, 1, 0), Peak("loss", 0, 1, 9999), Peak("backward", 0, 1, 0)))
    found = estimate("zero3", job(train={"global_batch": 6, "micro_batch": 1}), Machine(3, 8, "cpu"), TINY, large)
    # The last block is kept for backward; FSDP2 still has its gathered buffer, and what the micro-batch before has scattered.
    assert (found.phase, found.gathered, found.in_flight) == ("loss", 240 + 96, 96 + 240 + 240)


def test_a_frozen_root_is_gathered_all_the_same() -> None:
    """Frozen parameters have no gradients and no optimizer state; the peak is where the root's all-gather overlaps with a
    block's."""
    frozen = Model((Param("embedding.weight", (30, 4), False, ROOT), *TINY.params[1:3]), 0)
    small = Activations(0, (Peak("forward", 0, 1, 0), Peak("loss", 0, 1, 1), Peak("backward", 0, 1, 0)))
    found = estimate("zero3", job(train={"global_batch": 6, "micro_batch": 1}), Machine(3, 8, "cpu"), frozen, small)
    assert (found.parameters, found.gradients, found.optimizer) == (4 * (40 + 16), 4 * 16, 8 * 16 + 8)
    assert (found.phase, found.gathered, found.in_flight) == ("start", 480 + 96, 480 + 96 + 96)


def test_hsdp_by_hand() -> None:
    """4 ranks in groups of 2: shards of halves (20 + 4, 12, 12 and 5 numbers), gathered in bf16, summed across the groups."""
    spec = job(train={"global_batch": 8, "micro_batch": 2}, precision="bf16", parallel={"shard": 2})
    found = estimate("hsdp", spec, Machine(4, 8, "cpu"), TINY, MEASURED)
    # On the fullest rank 5 x 4 + 3 x 4 + 3 x 4 + 5 = 49; the root 25, a block 12.
    assert (found.shard, found.parameters, found.gradients, found.optimizer) == (2, 196, 196, 8 * 49 + 16)
    # backward: (25 + 12) x 2 ranks x 2 bytes, and 40; in flight 12 x 2 x 2, the sum's 12 x 2 x 4 + 12 x 4, and to receive the
    # root's 25 x 2 x 4.
    assert (found.phase, found.gathered, found.in_flight) == ("backward", 148 + 40, 48 + 96 + 48 + 200)
    # (2 - 1) x ((25 + 2 x 12 + 12) x 2 + 49 x 4), and an all-reduce of 49 x 4 over two groups.
    assert found.sent == 61 * 2 + 196 + 196


IN_PAIRS = {"parallel": {"tensor": 2}, "cluster": {"workers": 8}}


def test_tensor_groups_by_hand() -> None:
    """6 ranks in groups of two are 3 replicas: the state as on 3 ranks. Two micro-batches' bytes as measured, and gradients of the
    parameters that both ranks have whole: 58 of 98, or with zero1 the fullest rank's rows, 20. Both halves of an all-reduce."""
    cut = Model((Param("embedding.weight", (10, 4), True, ROOT, whole=(20, 4)), *TINY.params[1:]), 8)
    spec = job(train={"global_batch": 6, "micro_batch": 1}, parallel={"tensor": 2}, cluster={"workers": 6})
    measured = Activations(70, MEASURED.peaks, tensor_sent=100)
    for strategy, partial in (("ddp", 58), ("zero1", 20)):
        found = estimate(strategy, spec, Machine(6, 8, "cpu"), cut, measured)
        assert {k: getattr(found, k) for k in BY_HAND[strategy]} == BY_HAND[strategy]
        assert found.tensor_sent == 2 * 100 + 4 * partial
    assert (cut.size(), cut.whole_size()) == (98, 138)


def test_a_batch_is_divided_over_replicas() -> None:
    """8 ranks in groups of two: 4 replicas with 2 sequences each; 4 ranks of a node are hsdp's group of 2 replicas."""
    spec = job(**IN_PAIRS, train={"global_batch": 8, "micro_batch": 1})
    assert spec.batches(8) == (1, 2)
    machine = Machine(8, 4, "cpu")
    assert [shard_of(strategy, spec, machine) for strategy in ("ddp", "hsdp", "zero3")] == [1, 2, 4]


def test_offload_by_hand() -> None:
    """On GPUs an offloaded optimizer takes 16 bytes per parameter on the host, or 8 on disk; none on the device."""
    machine = Machine(3, 8, "cuda")
    cpu = estimate("zero1", job(offload={"optimizer": "cpu"}), machine, TINY, MEASURED)
    assert (cpu.optimizer, cpu.host, cpu.disk) == (0, 304 + 2 * 144, 0)
    nvme = estimate("zero1", job(offload={"optimizer": "nvme", "path": "/x"}), machine, TINY, MEASURED)
    assert (nvme.optimizer, nvme.disk, nvme.host) == (0, 304, 304 + 2 * 144)  # four chunks would hold more
    sharded = job(parallel={"strategy": "zero3"}, offload={"parameters": "cpu"})
    everything = estimate("zero3", sharded, machine, TINY, MEASURED)
    assert (everything.state, everything.host) == (0, 144 + 144 + 304)
    alone = estimate(
        "zero3", sharded, Machine(1, 8, "cuda"), TINY, MEASURED
    )  # nothing is sharded, so nothing is offloaded
    assert (alone.state, alone.host) == (392 + 392 + 800, 0)
    here = estimate("zero1", job(offload={"optimizer": "cpu"}), Machine(3, 8, "cpu"), TINY, MEASURED)
    assert (here.optimizer, here.host) == (304, 0)


SLOW = Device("none", half=1000.0, fp32=100.0, efficiency=0.5, node=20.0, network=5.0, host=48.0, memory=0)
"""FLOP/s and bytes/s for 98 parameters: so slow that kernel launches are negligible."""
CPU_ADAM = {"offload": {"optimizer": "cpu"}}


@pytest.mark.parametrize(
    ("strategy", "sections", "machine", "compute", "exposed", "offload"),
    [
        # 2 micro-batches x 128 tokens x 6 FLOPs at 50 FLOP/s: 30.72 s, a third of it forward. The last backward is 10.24 s, a
        # micro-batch's forward 5.12. Sent: 523 bytes / 20, all of them the last bucket; 288 / 20 twice, of which the sum of the
        # root, 50 of 98, overlaps with nothing, and 14.4 - 5.12; 576 / 20 - 20.48, and 14.4 - 5.12; 1280 / 20.
        ("ddp", {}, Machine(3, 8, "cuda"), 30.72, 26.15, 0.0),
        ("zero1", {}, Machine(3, 8, "cuda"), 30.72, 14.4 * 50 / 98 + 9.28, 0.0),
        ("zero2", {}, Machine(3, 8, "cuda"), 30.72, 8.32 + 9.28, 0.0),
        ("zero3", {}, Machine(3, 8, "cuda"), 30.72, 64 - 30.72, 0.0),
        # Two ranks per node: each has the network bandwidth of both for the ring.
        ("zero3", {}, Machine(3, 2, "cuda"), 30.72, 128 - 30.72, 0.0),
        ("zero1", {}, Machine(1, 8, "cuda"), 3 * 30.72, 0.0, 0.0),
        ("zero3", {}, Machine(3, 8, "cpu"), 30.72, 64, 0.0),  # nothing overlaps on gloo
        # Blocks are recomputed in backward: the last one takes 15.36 s.
        ("zero1", {"train": {"checkpoint_activations": "full"}}, Machine(3, 8, "cuda"), 40.96, 14.4 * 50 / 98 + 9.28, 0.0),
        # 36 of 98 values, fp32: 144 bytes / 48 to the host, during backward, and back again.
        ("zero1", CPU_ADAM, Machine(3, 8, "cuda"), 30.72, 14.4 * 50 / 98 + 9.28, 3.0),
        # 3072 tokens at 500 FLOP/s; in a group of two 318 bytes, between the groups 196, by one GPU's network.
        ("hsdp", {"precision": "bf16", "parallel": {"shard": 2}, "train": {"global_batch": 8, "micro_batch": 2}},
         Machine(4, 2, "cuda"), 3.072, 318 / 20 - 3.072 + 196 / 5 - 2.048, 0.0),
    ],
)  # fmt: skip
def test_the_speed_of_a_tiny_model_by_hand(
    strategy: str, sections: dict[str, Any], machine: Machine, compute: float, exposed: float, offload: float
) -> None:
    """FLOPs over a fraction of the precision's peak, plus the part of the communication that exceeds the compute it overlaps
    with."""
    sections = {**sections, "train": {"global_batch": 6, "micro_batch": 1, **sections.get("train", {})}}
    spec = job(**sections)
    found = speed(strategy, spec, machine, TINY, SLOW, flops_per_token=6.0)
    assert [found.compute, found.exposed, found.offload] == pytest.approx([compute, exposed, offload])
    assert found.seconds == pytest.approx(compute + exposed + offload)
    assert found.tokens_per_second == pytest.approx(spec.train.global_batch * 128 / found.seconds)


@pytest.mark.parametrize(
    ("strategy", "asked", "share"),
    [
        # 61 MiB: buckets of 1, 25, 25 and 10 MiB; of 1 and six of 10 MiB.
        ("ddp", None, 10 / 61),
        ("ddp", 10.0, 10 / 61),
        ("ddp", 100.0, 60 / 61),
        # The root has 1 MiB.
        ("zero1", None, 1 / 61),
    ],
)
def test_what_is_sent_after_the_last_pass(strategy: str, asked: float | None, share: float) -> None:
    """ddp's last bucket, or the parameters of no block."""
    mib = 2**18  # values
    model = Model((Param("head", (1, mib), True, ROOT), *(Param(f"{n}", (4, mib), True, n) for n in range(15))), 0)
    machine = Machine(2, 2, "cpu")
    assert last_share(strategy, job(parallel={"bucket_mb": asked}), machine, model) == pytest.approx(share)


def test_experts_have_buckets_of_their_own() -> None:
    """Of 2 ranks with different experts, ddp sums the other parameters alone: 9 MiB, in buckets of 1 and 8."""
    mib = 2**18
    params = (Param("dense", (9, mib), True, 0), Param("experts", (40, mib), True, 0, replicas=Fraction(1, 2)))
    spec = job(model={"name": "mixtral"}, parallel={"expert": 2}, cluster={"workers": 2})
    assert last_share("ddp", spec, Machine(2, 2, "cpu"), Model(params, 0)) == pytest.approx(8 / 9)


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1.0), ("zero1", 0.5), ("zero2", 0.5)])
def test_compressed_gradients(strategy: str, share: float) -> None:
    """int8 sends a quarter of the gradients' bytes, and gathers parameters as before; what is left of them is held twice. What topk
    and powersgd send depends on their options."""
    model = Model((Param("head", (1024, 1024), True, ROOT),), 0)
    plain, machine = job(), Machine(2, 1, "cpu")
    int8 = job(comm={"compress": "int8"})
    before, after = traffic(strategy, plain, machine, model), traffic(strategy, int8, machine, model)
    assert (after.gathers, after.across) == (before.gathers, before.across)
    assert after.sums == pytest.approx(before.sums * (8 + 32 / 1024) / 32)
    assert before.sums == pytest.approx(4 * 2**20 * share)
    for compress, options, sent in (
        ("topk", {}, 8 * 0.01 * 2**20),
        ("topk", {"ratio": 0.25}, 8 * 0.25 * 2**20),
        ("powersgd", {"rank": 8}, 4 * 8 * 2048),
    ):
        made = traffic(strategy, job(comm={"compress": compress, "options": options}), machine, model)
        assert made.sums == pytest.approx(sent * share)

    def held(spec: JobSpec, machine: Machine) -> int:
        return estimate(strategy, spec, machine, model, Activations(0, (Peak("forward", 0, 0, 0),))).in_flight

    for ranks, encoded, decoded in ((2, 2, 4), (4, 3, 5)) if strategy == "ddp" else ((2, 2, 2), (4, 2, 1)):
        at = Machine(ranks, 1, "cpu")
        expected = (8 + encoded * (1 + 4 / 1024) + decoded) * 2**20
        assert held(int8, at) - held(plain, at) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("compress", "number"), [("none", 4.0), ("int8", 1 + 4 / 1024)])
def test_outer_steps(compress: str, number: float) -> None:
    """On average a step sends an all-reduce's bytes over comm.every. Outer weights and momentum are held by rows, rounded sums need
    whole outer weights; buffers are those of a fragment. zero2 cannot train the job."""
    model = Model((Param("head", (1024, 1024), True, ROOT),), 0)
    plain, machine, size = job(), Machine(2, 1, "cpu"), 2**20
    apart = job(comm={"every": 32, "fragments": 2, "compress": compress}, cluster={"workers": 2})
    assert traffic("ddp", apart, machine, model).sums == pytest.approx(number * size / 32, rel=1e-4)

    def held(spec: JobSpec) -> int:
        return estimate("ddp", spec, machine, model, Activations(0, (Peak("forward", 0, 0, 0),))).in_flight

    state = 8 * size / 2 + (4 * size if compress == "int8" else 4 * size / 2)
    assert held(apart) - held(plain) == pytest.approx(state + (2 * number + 4) * size / 2, rel=1e-4)
    assert "comm.every: 32" in str(untrainable("zero2", apart, machine, model))


@pytest.mark.parametrize(
    ("per_node", "ring", "group"),
    [
        (8, 20.0, 20.0),
        # Two replicas of a node: the rings of both tensor ranks share the network of four ranks.
        (4, 10.0, 20.0),
        # A group on two nodes has the network of the one rank that is alone there.
        (3, 5.0, 5.0),
    ],
)
def test_a_tensor_group_waits_for_its_messages(per_node: int, ring: float, group: float) -> None:
    """Half the computation on each of two ranks; nothing overlaps with what they send each other."""
    spec = job(train={"global_batch": 6, "micro_batch": 1}, parallel={"tensor": 2}, cluster={"workers": 6})
    machine = Machine(6, per_node, "cuda")
    # 4 bytes for each of 98 gradients that are whole on both ranks, and two micro-batches of 4.
    found = speed("ddp", spec, machine, TINY, SLOW, 6.0, [Activations(0, (), tensor_sent=4)])
    assert found.compute == pytest.approx(30.72 / 2)
    assert found.exposed == pytest.approx(523 / ring + 400 / group)
    assert found.communication == pytest.approx(523 / ring + 400 / group)


def test_a_small_model_waits_for_its_kernels() -> None:
    """Two blocks and the root, each at least 1 ms per micro-batch; a third of it forward."""
    fast = find("h100")
    assert fast is not None
    found = speed("ddp", job(train={"global_batch": 6, "micro_batch": 1}), Machine(3, 8, "cuda"), TINY, fast, 6.0)
    assert (found.compute, found.exposed) == pytest.approx((6e-3, 523 / 450e9))
    assert found.communication == pytest.approx(523 / 450e9)


@pytest.mark.parametrize(
    ("name", "known", "node", "network", "gib"),
    [
        ("h100", "H100", 450e9, 50e9, 79.1),
        ("NVIDIA H100 80GB HBM3", "H100", 450e9, 50e9, 79.1),
        ("h200-nvl", "H200 NVL", 64e9, None, 139.8),
        ("NVIDIA A100-SXM4-80GB", "A100", 300e9, 25e9, 79.1),
        ("NVIDIA A100-SXM4-40GB", "A100", 300e9, 25e9, 39.4),
        ("NVIDIA A100 80GB PCIe", "A100", 32e9, None, 79.1),
        ("A100", "A100", 300e9, 25e9, 79.1),
        ("a100-80", "A100", 300e9, 25e9, 79.1),
        ("a100-40gb", "A100", 300e9, 25e9, 39.4),
        ("V100", "V100", 150e9, 6.25e9, 15.7),
        ("Tesla V100-SXM2-32GB", "V100", 150e9, 6.25e9, 31.7),
        ("rtx 4090", "RTX 4090", 32e9, None, 23.6),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 32e9, None, 23.6),
        ("AMD Instinct MI300X", "MI300X", 448e9, None, 191.6),
    ],
)
def test_gpus_by_name(name: str, known: str, node: float, network: float | None, gib: float) -> None:
    """Names as written by users, drivers and Ray; a PCIe card has no NVLink to all others, and no network of its own."""
    found = find(name)
    assert found is not None
    assert (found.name, found.node, found.network, found.memory) == (known, node, network, int(gib * 2**30))
    assert found.half == GPUS[known].half > found.fp32 == GPUS[known].fp32


@pytest.mark.parametrize(
    "name", ["rtx-5090", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GeForce RTX 4090 D", "a100-41", "h100-foo", ""]
)
def test_other_gpus_are_not_guessed(name: str) -> None:
    """A slice of a GPU, a slower one with the same number, and one that does not exist with that memory."""
    assert find(name) is None


def test_every_name_is_found() -> None:
    """A user can write each name that a message lists."""
    assert all(find(name) is not None for name in NAMES)


def test_what_is_not_reckoned() -> None:
    """A disk, a network, and parameters on the host: the speed is unknown, so there is no estimate."""
    card, machine = find("l40s"), Machine(16, 8, "cuda")
    assert card is not None
    assert "--between-nodes" in str(refusal(job(), machine, card))
    assert refusal(job(), machine, card.but(0.5, None, 12.5)) is None
    assert refusal(job(), Machine(8, 8, "cuda"), card) is None
    old = find("t4")
    assert old is not None
    assert "no bf16" in str(refusal(job(precision="bf16"), Machine(8, 8, "cuda"), old))
    assert "disk" in str(refusal(job(offload={"optimizer": "nvme", "path": "/x"}), Machine(8, 8, "cuda"), card))
    sharded = job(parallel={"strategy": "zero3"}, offload={"parameters": "cpu"})
    assert "offload.parameters" in str(refusal(sharded, Machine(8, 8, "cuda"), card))


def test_buffers_are_as_many_as_are_made() -> None:
    """planner/estimate.py imports no torch; its copy of the number of buffers equals that of the strategies and the swap file."""
    from raydist.planner import estimate as formulas
    from raydist.worker.optim.offload import hostcopy, moments
    from raydist.worker.parallel import _zero as zero

    assert zero.IN_FLIGHT == formulas._IN_FLIGHT
    assert hostcopy.WINDOW == moments.BUFFERS == formulas._SWAP_BUFFERS


@pytest.mark.parametrize(
    ("ranks", "whole", "micro", "expected"),
    [(2, 32, 8, (8, 2)), (4, 6, 2, (2, 1)), (3, 32, 8, (6, 2)), (32, 32, 8, (1, 1))],
)
def test_micro_batches_are_as_the_loader_deals_them(
    ranks: int, whole: int, micro: int, expected: tuple[int, int]
) -> None:
    """The largest micro-batch, and their number, agree with `share` in data/batches.py."""
    import numpy as np

    from raydist.data.batches import share

    spec = job(train={"global_batch": whole, "micro_batch": micro})
    assert spec.batches(ranks) == expected
    dealt = [share(np.arange(whole), r, ranks, micro) for r in range(ranks)]
    assert expected == (max(len(m) for parts in dealt for m in parts), len(dealt[0]))


# --- activations


def test_the_largest_micro_batch_counts() -> None:
    """With data.batching a pass has as many rows of the longest length as fit; the others are as many as the global batch needs."""
    batching = {"max_tokens": 64, "global_tokens": 300}
    by_tokens = job(data={"source": "x", "batching": batching}, model={"context": 8}, train={"steps": 1})
    assert by_tokens.batches(3) == (8, 2)
    in_sequences = job(data={"source": "x", "batching": {"max_tokens": 64, "max": 3}}, model={"context": 8})
    assert in_sequences.batches(2) == (3, 2)
    planner = Planner(job(data={"source": "x", "batching": {"max_tokens": 24}}, model={"context": 8}), VOCAB, "cpu")
    assert (
        planner.measure(Pass(3, "none", False, False)).saved
        == Planner(job(model={"context": 8}), VOCAB, "cpu").measure(Pass(3, "none", False, False)).saved
    )


def allocated_peak(work: Callable[[], None]) -> int:
    """The peak of torch's CPU allocator above its value at the start, from the profiler's memory events."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    now = most = 0
    assert profiled.profiler is not None
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def real_pass(spec: JobSpec, rank: Rank | None = None) -> Callable[[], None]:
    """Forward and backward of one micro-batch on real tensors; gradients are freed at once. `rank`: of a tensor group."""
    torch.manual_seed(0)
    module: nn.Module = registry.load("model", spec.model.name)(spec.model, VOCAB).train()
    if rank is not None:
        TensorParallel(Mesh.of(spec, rank)).split(module)
    compute.prepare(module, spec.train)
    for p in module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))  # type: ignore[no-untyped-call]
    tokens = torch.randint(0, VOCAB, (spec.train.micro_batch, spec.model.context))
    documents = torch.zeros(tokens.shape, dtype=torch.int32) if spec.data.pack else None
    precision = Precision(spec.precision, torch.device("cpu"))

    def work() -> None:
        with precision.autocast():
            loss = loss_sum(module, MicroBatch(tokens, tokens, documents))
        loss.backward()  # type: ignore[no-untyped-call]

    work()
    return work


def allocated_by_a_pass(spec: JobSpec) -> int:
    """The allocator's peak over a real pass."""
    return allocated_peak(real_pass(spec))


PASSES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": "bf16"},
    "grouped": {"model": {**SMALL, "kv_heads": 2, "qk_norm": True}},
    "packed": {"data": {"source": "any", "pack": True}, "precision": "bf16"},
    "mlp": {"model": {"name": "mlp", "layers": 4, "width": 128, "context": 128}},
    "experts": {"model": {**SMALL, "name": "mixtral", "hidden": 128}},
}
RECOMPUTED = [
    ("fp32", "full"),
    ("bf16", "selective"),
    ("packed", "full"),
    ("mlp", "selective"),
    ("grouped", "selective"),
    ("experts", "selective"),
]


@pytest.mark.parametrize(("name", "checkpoint"), [*((name, "none") for name in PASSES), *RECOMPUTED])
def test_activations_are_what_a_real_pass_takes(name: str, checkpoint: str) -> None:
    """The peak of a pass on fake tensors is within 5% of the allocator's on real tensors (without recomputation: 0.1%)."""
    spec = job(**PASSES[name], train={"checkpoint_activations": checkpoint})
    measured = Planner(spec, VOCAB, "cpu").measure(measured_pass("ddp", spec, Machine(1, 1, "cpu")))
    planned = max(p.total for p in measured.peaks)
    assert planned == pytest.approx(allocated_by_a_pass(spec), rel=0.001 if checkpoint == "none" else 0.05)


def test_a_tensor_rank_s_pass_takes_less() -> None:
    """Between the layers each of two ranks has half of the tokens, and in them half of the heads and columns."""

    def planned(world: int) -> int:
        spec = job(parallel={"tensor": world}, cluster={"workers": world})
        measured = Planner(spec, VOCAB, "cpu").measure(measured_pass("ddp", spec, Machine(world, world, "cpu")))
        return max(p.total for p in measured.peaks)

    assert planned(2) < 0.75 * planned(1)


THREE_STAGES = {"pipeline": 3, "pipeline_cut": [1, 5, 1]}


@pytest.mark.parametrize(
    ("name", "mesh", "how"),
    [
        ("gpt", {}, Pass(2, "none", False, False)),
        ("gpt", {}, Pass(2, "full", True, True)),
        ("gpt", {}, Pass(1, "selective", False, True)),
        ("gpt", {"tensor": 2}, Pass(2, "full", True, True)),
        ("gpt", {**THREE_STAGES, "tensor": 2}, Pass(1, "selective", False, True)),
        ("mixtral", {**THREE_STAGES, "context": 2, "expert": 2}, Pass(2, "full", False, False)),
    ],
)
def test_further_blocks_are_as_the_third(
    monkeypatch: pytest.MonkeyPatch, name: str, mesh: dict[str, Any], how: Pass
) -> None:
    """A pass of seven equal blocks, measured with two and three, has to the byte the figures of a pass of all. What each stage
    sends, from a pass of two blocks alone, is what its own pass sends."""
    world = mesh.get("tensor", 1) * mesh.get("context", 1) * mesh.get("pipeline", 1)
    model = {**SMALL, "name": name, "layers": 7, "width": 32, "context": 16}
    spec = job(model=model, parallel=mesh, cluster={"workers": world}, precision="bf16")
    passes = [replace(how, stage=n) for n in range(mesh.get("pipeline", 1))]
    how = passes[len(passes) // 2]
    planner = Planner(spec, VOCAB, "cuda")
    short, sends = planner.measure(how), [planner.sends(one) for one in passes]
    monkeypatch.setattr(measure_module, "_FEW", 99)
    whole = Planner(spec, VOCAB, "cuda")
    assert short == whole.measure(how)
    for sent, one in zip(sends, map(whole.measure, passes), strict=True):
        assert sent == Activations(0, (), one.tensor_sent, passed_on=one.passed_on, exchanged=one.exchanged)
    assert (sum(sent.tensor_sent for sent in sends) > 0) == (len(mesh) > 0)
    assert (sum(sent.exchanged for sent in sends) > 0) == ("expert" in mesh)


def test_a_pipeline_by_hand() -> None:
    """Two ranks, four micro-batches: the first has two in flight, one of them at work, and what it has sent and receives next."""
    stage = StageBytes(Activations(70, (), copied=5, passed_on=30), [Moment("backward", 1, 2, 300, 0)], 0, 1000, 0)
    # The other micro-batch's 70 and 5; its output, sent, until its backward pass; before the last one, the next gradient.
    assert heaviest_moment(0, 2, 4, [stage], "cuda") == Moment("backward", 6, 2 + 1000 + 30 + 30, 370, 0)
    last = StageBytes(Activations(70, (), copied=5), [Moment("loss", 1, 2, 300, 9)], 30, 1000, 0)
    # It has one in flight; of three gradients none is known to have arrived, and the next input comes.
    assert heaviest_moment(1, 2, 4, [last], "cuda") == Moment("loss", 1, 2 + 1000 + 3 * 30, 300, 9)
    # Of a rank with two stages, on gloo two receives have started instead of one.
    of_cuda, of_cpu = (heaviest_moment(0, 2, 6, [stage, last], device) for device in ("cuda", "cpu"))
    assert of_cpu == replace(of_cuda, in_flight=of_cuda.in_flight + 30)


def test_the_gradients_of_the_rank_with_the_most() -> None:
    """What `raydist bench` reduces: of a pipeline, the stages of one rank."""
    spec = job(model={**SMALL, "tie_embeddings": False}, parallel={"pipeline": 2}, cluster={"workers": 2})
    whole, cut = Planner(job(model=spec.model.model_dump()), VOCAB, "cpu").model(), Planner(spec, VOCAB, "cpu").model()
    sizes = [stage.model.size(trained=True) for stage in cut.stages]
    assert whole.most_trained(1) == whole.size(trained=True) == sum(sizes)
    assert cut.most_trained(2) == max(sizes) < sum(sizes)


def test_stages_cost_the_experts_that_a_token_takes() -> None:
    """A block with 32 experts, of which a token takes 2 beside a shared one, each a third as wide, costs as much as a dense one."""
    options = {"n_routed_experts": 32, "moe_intermediate_size": 128, "first_k_dense_replace": 2}
    fields = {"name": "deepseek", "hidden": 384, "options": options}
    spec = job(model={**SMALL, **fields}, parallel={"pipeline": 2}, cluster={"workers": 2})
    stages = Planner(spec, 300, "cpu").model().stages
    assert [stage.blocks for stage in stages] == [2, 2]
    assert stages[1].share == pytest.approx(0.52, abs=0.02)  # and it has the head


def test_a_plan_leaves_no_process_group() -> None:
    """The group of the measured passes is destroyed, also after an error. Another one of this process is left as it is."""
    planner = Planner(job(**IN_PAIRS), VOCAB, "cpu")
    assert planner.measure(Pass(2, "none", False, False)).tensor_sent > 0
    assert not dist.is_initialized()
    with pytest.raises(UserError, match="none of its 1 parts"):
        Planner(job(**IN_PAIRS), 1, "cpu").model()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match="initialize the default process group twice"):
            planner.model()
        assert dist.get_backend() == "gloo"
    finally:
        dist.destroy_process_group()


def test_flops_are_those_of_the_whole_model() -> None:
    """Tensor ranks share the work: their count is that of one process; a rank's own parameters are fewer."""
    alone, shared = Planner(job(), VOCAB, "cpu"), Planner(job(**IN_PAIRS), VOCAB, "cpu")
    assert shared.flops_per_token() == alone.flops_per_token()
    assert shared.model().whole_size() == alone.model().size() > 1.9 * shared.model().size()


def test_saved_is_what_autograd_keeps() -> None:
    """`saved` counts the storages that autograd's hooks see saved for backward, without weights."""
    spec = job()
    module: nn.Module = registry.load("model", "gpt")(spec.model, VOCAB)
    tokens = torch.randint(0, VOCAB, (4, 128))
    weights = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), tokens)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_sum(module, MicroBatch(tokens, tokens))
    assert loss.requires_grad
    saved = Planner(spec, VOCAB, "cpu").measure(Pass(4, "none", False, False)).saved
    assert saved == pytest.approx(sum(kept.values()), rel=0.01)


def test_phases() -> None:
    """The loss phase has logits and their logarithms in fp32; backward has a unit's whole gradients, if they are held."""
    spec = job(model={**SMALL, "layers": 8, "tie_embeddings": False})
    planner = Planner(spec, 8192, "cpu")
    wait = {p.phase: p for p in planner.measure(Pass(4, "none", False, hold=True)).peaks}
    assert list(wait) == ["forward", "loss", "backward"]
    logits = 4 * 128 * 8192 * 4
    assert wait["loss"].loss == pytest.approx(2.0 * logits, rel=0.05)
    assert wait["forward"].loss == 0
    assert wait["backward"].loss < logits / 8
    # The head's, from the loss on; the peak of backward is in a block, with its own.
    block = sum(p.part(1) for p in planner.model().params if p.unit == 7)
    assert 8192 * 128 * 4 < wait["backward"].whole <= (8192 * 128 + block) * 4
    go = {p.phase: p for p in planner.measure(Pass(4, "none", False, hold=False)).peaks}
    assert go["backward"].whole == 0


@pytest.mark.parametrize("name", ["gpt", "mlp"])
@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_recomputation_is_the_target_s_too(name: str, checkpoint: Any) -> None:
    """For a GPU, backward recomputes the same tensors that forward computed: torch refuses different ones."""
    planner = Planner(job(model={**SMALL, "name": name}, precision="bf16"), VOCAB, "cuda")
    kept, again = (planner.measure(Pass(4, how, True, True)).saved for how in ("none", checkpoint))
    assert again < kept


def test_full_recomputation_keeps_the_blocks_inputs_only() -> None:
    """Each additional layer saves one more residual stream, B x T x D in fp32."""
    how = Pass(4, "full", False, False)
    few, many = (Planner(job(model={**SMALL, "layers": n}), VOCAB, "cpu").measure(how).saved for n in (2, 5))
    assert many - few == 3 * 4 * 128 * 128 * 4


def test_attention_s_kernel_is_the_target_s() -> None:
    """GPUs: flash in half precision, memory-efficient with a mask or in fp32, also of grouped heads. CPUs have flash too."""

    def kernel(target: Any, **sections: Any) -> tuple[str, int]:
        planner = Planner(job(**sections), VOCAB, target)
        saved = planner.measure(Pass(4, "none", False, False)).saved
        return planner.attention, saved

    assert kernel("cuda", precision="bf16")[0] == "flash"
    assert kernel("cuda", precision="bf16", data={"source": "any", "pack": True})[0] == "memory-efficient"
    # Of grouped heads each query head gets its own keys and values: not T x T numbers of a sequence, but T x K of each head.
    for sections in ({"precision": "bf16", "data": {"source": "any", "pack": True}}, {}):
        own, whole = kernel("cuda", **sections)
        grouped, saved = kernel("cuda", model={**SMALL, "kv_heads": 1}, **sections)
        assert own == grouped == "memory-efficient"
        assert saved <= whole
    assert kernel("cuda", model={**SMALL, "kv_heads": 1}, precision="bf16")[0] == "flash"
    assert kernel("cpu")[0] == "flash"
    assert kernel("cpu", model={"name": "mlp", "layers": 1, "width": 8, "context": 128})[0] == "none"


def test_flash_takes_few_bits_and_whole_eights() -> None:
    """Under autocast fp32 queries are cast to bf16 for the flash kernel, and heads of 12 are padded to 16."""
    with FakeTensorMode(), OnTarget(True), torch.autocast("cpu", dtype=torch.bfloat16):
        query_BHTK = torch.zeros(2, 4, 8, 12)
        with LiveBytes([query_BHTK]) as live:
            out_BHTK = F.scaled_dot_product_attention(query_BHTK, query_BHTK, query_BHTK, is_causal=True)
    assert "_scaled_dot_product_flash_attention" in live.operators
    assert (out_BHTK.shape, out_BHTK.dtype) == (query_BHTK.shape, torch.bfloat16)
    assert out_BHTK.untyped_storage().nbytes() == 2 * 4 * 8 * 16 * 2


def test_functions_compute_in_cuda_s_formats() -> None:
    """Under CUDA's autocast norms, powers and softmax are fp32, mixed arguments use the widest format, matrix products bf16."""
    few, wide = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 4)

    def formats(cuda: bool) -> list[torch.dtype]:
        with OnTarget(cuda), torch.autocast("cpu", dtype=torch.bfloat16):
            products = [F.linear(wide, wide), torch.einsum("ij,kj->ik", wide, wide), F.gelu(few)]
            made = [F.layer_norm(few, (4,)), few**2, 2**few, few.softmax(-1), torch.addcmul(few, few, few), *products]
        return [t.dtype for t in made]

    narrow = torch.bfloat16
    assert formats(cuda=True) == [torch.float32] * 4 + [narrow] * 4
    assert formats(cuda=False) == [narrow] * 8
    with OnTarget(True), torch.autocast("cpu", dtype=torch.bfloat16), LiveBytes([few, wide]) as live:
        kept = torch.addcmul(wide, few, wide)
    assert kept.dtype is torch.float32
    assert live.peaks["forward", 0]["whole"] == few.numel() * 4  # its copy in the widest format


def test_autocast_is_cuda_s_where_that_is_the_target() -> None:
    """LayerNorm computes in fp32 under CUDA's autocast and in bf16 under the CPU's: it saves twice as much."""
    assert {"layer_norm", "softmax", "log_softmax", "exp", "pow", "rsqrt"} <= wide_on_cuda()
    assert not {"linear", "mm", "addcmul", "einsum", "gelu"} & wide_on_cuda()
    spec = job(model={"name": "mlp", "layers": 3, "width": 128, "context": 128}, precision="bf16")
    how = Pass(4, "none", True, False)  # weights in bf16: so is the residual stream
    cuda, cpu = (Planner(spec, VOCAB, t).measure(how).saved for t in ("cuda", "cpu"))  # type: ignore[arg-type]
    stream = 4 * 128 * 128
    # In each layer the norm saves its input in fp32 instead of bf16, and means and deviations too; the product saves bf16 in both.
    assert cuda - cpu == 3 * (stream * 2 + 2 * 4 * 128 * 2)


class Free(nn.Module):
    """A user's own model, without blocks; it reads a value of a tensor if `reads` is set."""

    def __init__(self, width: int, vocab: int, reads: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, width), nn.Linear(width, vocab)
        self.reads = reads

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        if self.reads and x_BTD.mean().item() > 0:
            x_BTD = x_BTD * 2
        out: Tensor = self.head(F.silu(x_BTD))
        return out


def build(spec: Any, vocab_size: int) -> nn.Module:
    return Free(spec.width, vocab_size, bool(spec.options.get("reads")))


def test_a_model_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Any module that runs on fake tensors can be planned, also without blocks; one that reads a value is refused with a remedy."""
    (tmp_path / "their_own_model.py").write_text(
        f"from pathlib import Path\nimport runpy\nbuild = lambda *a: runpy.run_path({__file__!r})['build'](*a)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = {"name": "their_own_model:build", "width": 16, "context": 8}
    spec = job(model=model)
    found = plan(spec, "zero3", Machine(2, 8, "cpu"), vocab=32)
    assert found.parameters == 4 * (32 * 16 + 32 * 16 + 32) // 2
    reads = job(model={**model, "options": {"reads": True}})
    with pytest.raises(
        UserError, match=r'model "their_own_model:build" cannot be run without values.*\n.*no \.item\(\)'
    ):
        Planner(reads, 32, "cpu").measure(Pass(4, "none", False, False))


@pytest.mark.parametrize(
    ("workers", "parallel", "most"),
    [
        (2, {}, 113),  # of the embedding, 1021 x 128
        (4, {"strategy": "hsdp", "shard": 2}, 102),  # 511 rows on the ranks of a copy
        (8, {"pipeline": 4}, 93),  # 344 x 128: two stages have neither embedding nor head
        (4, {"tensor": 2}, 102),  # half of the embedding's rows
        (4, {"tensor": 4}, None),  # one replica: nothing is compressed
        (1, {}, None),
    ],
)
def test_a_compressor_that_takes_no_matrix(workers: int, parallel: dict[str, Any], most: int | None) -> None:
    """The model is refused as by a rank of the job's mesh, with the rank that would do."""

    def planned(rank: int) -> Planner:
        comm = {"compress": "powersgd", "options": {"rank": rank}}
        return Planner(job(comm=comm, cluster={"workers": workers}, parallel=parallel), VOCAB, "cpu")

    if most is None:
        assert planned(128).checked() is not None
        return
    assert planned(most).checked() is not None
    for check in (planned(most + 1).checked, planned(most + 1).model):
        with pytest.raises(UserError, match=f"comm.options.rank: {most + 1}: no matrix .*\n.*at most {most}$"):
            check()


def test_what_cannot_be_built_without_values_is_not_checked() -> None:
    """A plan says why; the start of a run leaves it to the workers."""
    unbuilt = Planner(job(model={"name": "json:loads"}), VOCAB, "cpu")
    assert unbuilt.checked() is None
    with pytest.raises(UserError, match='model "json:loads" cannot be built without values: TypeError'):
        unbuilt.model()


# --- advice

GIB = 2**30


def layered(blocks: int = 8, rows: int = 2**20, width: int = 64) -> Model:
    """Blocks of 64M parameters each: 256 MiB in fp32, 2 GiB for 8."""
    return Model(tuple(Param(f"blocks.{i}.w", (rows, width), True, i) for i in range(blocks)), 0)


def measure(how: Pass) -> Activations:
    """1 GiB per sequence; a quarter of it with full recomputation, half of it with selective."""
    share = {"none": 1.0, "selective": 0.5, "full": 0.25}[how.checkpoint]
    return Activations(0, (Peak("backward", 0, int(GIB * share * how.micro_batch), 0),))


def advice(memory: float, **sections: Any) -> Any:
    spec = job(train={"global_batch": 64, "micro_batch": 2}, cluster={"workers": 16}, **sections)
    return advise(spec, Machine(16, 8, "cuda", round((memory * GIB + GIB) / 0.95)), layered(), measure)


@pytest.mark.parametrize(
    ("usable", "strategy", "changes"),
    [
        (12.1, "ddp", {}),  # 2 + 2 + 4, 2 for accumulation beside the buckets, 2 of activations
        (6.9, "zero1", {}),  # 2 + 2 + 4/16, two slots of 17/16 blocks, 2
        (5.0, "zero2", {}),  # 2 + 2/16 + 4/16, slots, 2
        (3.9, "hsdp", {}),  # 8/8, blocks in flight, 2
        (3.3, "zero3", {}),  # 8/16, the same, 2
        (3.1, "zero3", {"offload.optimizer": "cpu"}),
        (2.9, "hsdp", {"train.checkpoint_activations": "selective"}),
        (2.1, "zero3", {"train.checkpoint_activations": "selective", "offload.optimizer": "cpu"}),
        (1.8, "zero3", {"train.checkpoint_activations": "full"}),
        (1.6, "zero3", {"train.checkpoint_activations": "full", "offload.optimizer": "cpu"}),
        (1.3, "zero3", {"train.checkpoint_activations": "full", "offload.optimizer": "cpu", "train.micro_batch": 1}),
    ],
)
def test_the_cheapest_that_fits(usable: float, strategy: str, changes: dict[str, Any]) -> None:
    """As memory shrinks: strategies in order, then offload to the host, then recomputation, then smaller micro-batches."""
    pick = advice(usable).pick
    assert pick is not None
    assert pick.estimate.strategy == strategy
    assert {k: v for k, v in pick.changes.items() if k != "parallel.strategy"} == changes
    assert pick.estimate.total <= usable * GIB


def test_nothing_fits() -> None:
    """No pick, and a sentence with the smallest requirement and its configuration."""
    found = advice(0.4)
    assert found.pick is None
    assert found.suggestions[0].startswith(
        "Nothing fits: even with all options that save memory and micro-batches of 1, zero3 needs 1."
    )
    assert [row.fits for row in found.rows] == [False] * 5


def test_the_largest_micro_batch() -> None:
    """The largest divisor of a rank's 4 sequences that fits is named, and advised if it is larger than the job's."""
    found = advice(16.0)
    assert (found.pick.estimate.strategy, found.pick.micro_batch) == ("ddp", 4)
    assert any("train.micro_batch: 4 is the largest" in text for text in found.suggestions)
    tight = advice(7.0)
    assert (tight.pick.estimate.strategy, tight.pick.micro_batch) == ("zero1", 2)
    assert not any("train.micro_batch" in text for text in tight.suggestions)


def test_one_rank_keeps_the_job_s_strategy() -> None:
    """All strategies are equivalent there: none is advised over the job's own."""
    spec = job(parallel={"strategy": "zero2"})
    found = advise(spec, Machine(1, 8, "cuda", 80 * GIB), layered(), measure)
    assert found.pick is not None
    assert (found.pick.estimate.strategy, found.pick.changes, found.pick.estimate.sent) == ("zero2", {}, 0)
    assert found.pick.because == "one rank has nothing to share, and it fits."
    assert len({row.estimate.total for row in found.rows if row.estimate}) == 1


def test_hsdp_with_one_group_is_zero3() -> None:
    """Of the two the job's own is advised, and zero3 if it uses neither."""
    for own, advised in (("ddp", "zero3"), ("hsdp", "hsdp"), ("zero3", "zero3")):
        spec = job(parallel={"strategy": own}, cluster={"workers": 8})
        found = advise(
            spec, Machine(8, 8, "cuda", round(4.7 * GIB)), layered(), lambda how: measure(Pass(1, "full", False, False))
        )
        assert found.pick is not None
        assert found.pick.estimate.strategy == advised


def test_without_memory_nothing_is_judged() -> None:
    """Sizes only: no row is marked as fitting or not, and there is no pick."""
    spec = job(cluster={"workers": 2})
    found = advise(spec, Machine(2, 8, "cpu"), layered(), measure)
    assert found.pick is None
    assert [row.fits for row in found.rows] == [None] * 5
    assert all(row.estimate is not None for row in found.rows)


def test_what_cannot_train_says_why() -> None:
    """Whole-matrix optimizers, groups that do not divide the ranks and offload of whole parameters are refused, with the reason."""
    muon = advice(30.0, optim={"name": "muon"})
    assert [row.refused for row in muon.rows] == [None, *["muon works on whole matrices"] * 4]
    odd = advise(job(train={"global_batch": 12, "micro_batch": 1}), Machine(6, 4, "cuda", 80 * GIB), layered(), measure)
    assert next(r.refused for r in odd.rows if r.strategy == "hsdp") == "groups of 4 do not make 6 ranks"
    on_host = advice(30.0, parallel={"strategy": "zero3"}, offload={"parameters": "cpu"})
    assert [row.refused is None for row in on_host.rows] == [False, False, False, True, True]
    assert on_host.pick.estimate.strategy == "hsdp"
