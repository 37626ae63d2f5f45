"""The offloaded optimizer: AdamW's bits, for any place and chunk size; its scratch file is always removed."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raydist import registry
from raydist.errors import StorageError, UserError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, OptimSpec
from raydist.spec.running import OffloadSpec
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.optim import optimizers
from raydist.worker.optim.offload import adamw, swap_space, swapfile
from raydist.worker.optim.offload.adamw import OffloadedAdamW, build
from raydist.worker.optim.offload.layout import ALIGN, FLOATS, Layout
from raydist.worker.parallel import ParallelStrategy, ParamShard

CPU = torch.device("cpu")
SHAPES = {
    "w0": (37, 29),
    "b0": (37,),
    "w1": (3, 1025),
    "gain": (),
    "none": (0, 8),
    "w2": (64, 64),
    "b2": (5,),
    "w3": (1, 1),
}
"""Matrices and the rest are in two groups, so that a chunk has pieces of both. `none`: a rank past the end of an uneven split."""
MODES = ["cpu", "nvme"]
MIB = 2.0**-20
Grads = Callable[[int], dict[str, torch.Tensor | None]]


def gradients(step: int) -> dict[str, torch.Tensor | None]:
    """The gradients of `step`, always the same. In step 3 some are None, as for experts that got no token."""
    generator = torch.Generator().manual_seed(step)
    grads: dict[str, torch.Tensor | None] = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
    return grads | ({"b0": None, "w1": None} if step == 3 else {})


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {n: nn.Parameter(torch.randn(s, generator=generator)) for n, s in SHAPES.items()}


SPEC = OptimSpec(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9))


class Run:
    """Parameters and an optimizer: an offloaded one, or torch's if `mode` is None."""

    def __init__(self, mode: str | None, folder: Path, chunk_mb: float = 8192 * MIB) -> None:
        self.named = parameters()
        self.shards = {n: ParamShard(p) for n, p in self.named.items()}
        self.optimizer: Any
        if mode is None:
            self.optimizer = optimizers.build(self.shards, SPEC, CPU)
        else:
            offload = OffloadSpec(optimizer=mode, path=str(folder), chunk_mb=chunk_mb)  # type: ignore[arg-type]
            self.optimizer = build(self.shards, SPEC, offload, CPU, "rank0")

    def set_grads(self, step: int) -> None:
        for name, grad in gradients(step).items():
            self.named[name].grad = grad
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / step

    def steps(self, first: int, last: int) -> Run:
        for step in range(first, last + 1):
            self.set_grads(step)
            self.optimizer.step()
        return self

    def values(self) -> dict[str, torch.Tensor]:
        """All parameters and all of the optimizer's state, copied."""
        found = {n: p.detach().clone() for n, p in self.named.items()}
        for name, parameter in self.named.items():
            state = self.optimizer.state.get(parameter, {})
            found |= {f"{name}.{slot}": value.detach().clone() for slot, value in state.items()}
        return found


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    """Equal bit for bit, with the same names, shapes and dtypes."""
    assert one.keys() == two.keys()
    assert all(one[n].shape == two[n].shape and one[n].dtype == two[n].dtype for n in one)
    return all(torch.equal(one[n].view(torch.int32), two[n].view(torch.int32)) for n in one)


@pytest.fixture
def memory(tmp_path: Path) -> Callable[[int], dict[str, torch.Tensor]]:
    """memory(n): the values after n steps of torch's fused AdamW."""
    return lambda last: Run(None, tmp_path).steps(1, last).values()


# --- the same bits


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunk_mb", [1 * MIB, 16384 * MIB, 8.0])
@pytest.mark.parametrize("mode", MODES)
def test_bits_of_adamw_in_memory(mode: str, chunk_mb: float, threads: int, tmp_path: Path, memory: Any) -> None:
    """Six steps: two groups, odd sizes, weight decay, a changing lr, missing gradients, a parameter without rows."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (run := Run(mode, tmp_path, chunk_mb)).optimizer:
            for step in range(1, 7):
                if step % 2:
                    run.optimizer.prefetch()
                run.steps(step, step)
            assert same(run.values(), memory(6))
    finally:
        torch.set_num_threads(before)


def test_bits_of_a_large_parameter(tmp_path: Path) -> None:
    """A parameter that spans many chunks, and that the kernel splits over threads at other places."""
    start = torch.randn(300_007, generator=torch.Generator().manual_seed(0))
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    whole = torch.optim.AdamW([theirs], lr=1e-3, fused=True)
    offload = OffloadSpec(optimizer="nvme", path=str(tmp_path), chunk_mb=0.1)
    group = {"name": "decay", "params": [("w", ours)], "weight_decay": 0.01}
    with OffloadedAdamW([group], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, offload=offload, tag="rank0") as part:
        assert len(part._layout.chunks) == 25
        for step in range(3):
            ours.grad = torch.randn(300_007, generator=torch.Generator().manual_seed(step))
            theirs.grad = ours.grad.clone()
            part.step()
            whole.step()
        assert torch.equal(ours, theirs)
        assert torch.equal(part.state[ours]["exp_avg_sq"], whole.state[theirs]["exp_avg_sq"])


@pytest.mark.parametrize("size", [1, FLOATS, 3 * FLOATS, 10**9])
def test_layout_has_each_value_once_and_cuts_between_vectors(size: int) -> None:
    """The pieces cover every parameter without overlap, and each begins at a vector boundary of the whole parameter."""
    counts = {3: 5000, 2: 0, 1: 1, 0: 70_001}
    layout = Layout.of(counts, size)
    pieces: dict[int, list[tuple[int, int]]] = {n: [] for n in counts}
    used = torch.zeros(layout.total, dtype=torch.int32)
    for k, chunk in enumerate(layout.chunks):
        for piece in chunk:
            assert piece.first % ALIGN == 0
            assert k * layout.size + piece.at == layout.starts[piece.parameter] + piece.first
            assert piece.here.stop <= layout.size
            used[k * layout.size + piece.at : k * layout.size + piece.here.stop] += 1
            pieces[piece.parameter].append((piece.first, piece.last))
    assert used.max() == 1
    assert layout.total % FLOATS == 0
    assert layout.size % FLOATS == 0
    for number, count in counts.items():
        ends = [0, *(last for _, last in pieces[number])]
        assert ends == [*(first for first, _ in pieces[number]), count] or (count == 0 and not pieces[number])
    assert list(layout.starts) == [3, 2, 1, 0]
    assert sorted(layout.starts.values()) == list(layout.starts.values())


def test_last_parameter_comes_first(tmp_path: Path) -> None:
    """Chunks follow the order of backward: the model's order decides, not the groups'."""
    with (run := Run("cpu", tmp_path)).optimizer as optimizer:
        ordered = sorted(optimizer._layout.starts, key=lambda n: (optimizer._layout.starts[n], -n))
        names = {p: n for n, p in run.named.items()}
        assert [names[optimizer._parameters[n]] for n in ordered] == list(SHAPES)[::-1]


def test_groups_are_those_of_the_optimizer_in_memory(tmp_path: Path) -> None:
    """The same keys, names, decay and parameters: a checkpoint of one can be loaded by the other."""
    with (run := Run("nvme", tmp_path)).optimizer as optimizer:

        def plain(made: torch.optim.Optimizer) -> list[dict[str, Any]]:
            return [{k: v for k, v in g.items() if k != "params"} for g in made.param_groups]

        assert plain(optimizer) == plain(Run(None, tmp_path).optimizer)
        assert [g["param_names"] for g in optimizer.param_groups] == [
            ["w0", "w1", "none", "w2", "w3"],
            ["b0", "gain", "b2"],
        ]
        assert all(run.named[n] is p for g in optimizer.param_groups for n, p in zip(g["param_names"], g["params"]))  # noqa: B905


@pytest.mark.parametrize("mode", MODES)
def test_skipped_step_changes_nothing(mode: str, tmp_path: Path, memory: Any) -> None:
    """fp16 overflow: backward began, and no update followed. The next step is unaffected."""
    with (run := Run(mode, tmp_path)).optimizer:
        run.steps(1, 2)
        run.optimizer.prefetch()
        run.optimizer.scale_grads(0.5)
        run.optimizer.prefetch()
        assert same(run.steps(3, 4).values(), memory(4))


@pytest.mark.parametrize("mode", MODES)
def test_scale_grads_is_a_product_before_the_update(mode: str, tmp_path: Path) -> None:
    """The same bits as with gradients that the strategy scaled itself, factor by factor; only for one step."""
    scaled, plain = Run(mode, tmp_path), Run(None, tmp_path)
    with scaled.optimizer:
        for step in (1, 2):
            scaled.set_grads(step)
            plain.set_grads(step)
            if step == 1:
                for factor in (0.3, 1.7):
                    scaled.optimizer.scale_grads(factor)
                    for parameter in plain.named.values():
                        assert parameter.grad is not None
                        parameter.grad.mul_(factor)
            scaled.optimizer.step()
            plain.optimizer.step()
        assert same(scaled.values(), plain.values())


# --- parameters on a device: here simulated by the CPU


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters are treated as on a device: they and their gradients are copied to the host and back."""
    monkeypatch.setattr(adamw, "_device_of", lambda parameters: torch.device("xpu"))  # a device without streams here


@pytest.mark.parametrize("chunk_mb", [1 * MIB, 8.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("on_device")
def test_bits_of_a_device(mode: str, chunk_mb: float, tmp_path: Path, memory: Any) -> None:
    """With gradients fetched early, with ones scaled after that, and with none fetched early."""
    with (run := Run(mode, tmp_path, chunk_mb)).optimizer:
        for step in range(1, 7):
            run.set_grads(step)
            run.optimizer.prefetch()
            if step % 2:
                for parameter in run.named.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(2.0)  # not final yet
                run.optimizer.gradients_final(run.named.values())
                for parameter in run.named.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.5)
            elif step == 4:
                run.optimizer.gradients_final(list(run.named.values())[:3])
            run.optimizer.step()
        assert same(run.values(), memory(6))


@pytest.mark.usefixtures("on_device")
def test_early_gradients_are_not_fetched_again(tmp_path: Path, memory: Any) -> None:
    """The update uses gradients fetched during backward; those not fetched early are fetched in time."""
    with (run := Run("cpu", tmp_path)).optimizer:
        run.set_grads(1)
        run.optimizer.prefetch()
        run.optimizer.gradients_final(run.named.values())
        for parameter in run.named.values():
            assert parameter.grad is not None
            parameter.grad.data.fill_(1e6)  # without changing the version counter
        run.optimizer.step()
        assert same(run.values(), memory(1))
        for step in (2, 3):  # no new tensors: only address and version distinguish the steps
            for name, grad in gradients(step).items():
                parameter = run.named[name]
                if grad is None or parameter.grad is None:
                    parameter.grad = grad
                else:
                    parameter.grad.copy_(grad)
            for group in run.optimizer.param_groups:
                group["lr"] = 1e-2 / step
            run.optimizer.step()
        assert same(run.values(), memory(3))


@pytest.mark.usefixtures("on_device")
def test_weights_come_beside_backward(tmp_path: Path, memory: Any) -> None:
    """The update uses weights that `prefetch` fetched; weights written later are fetched in time."""
    with (run := Run("cpu", tmp_path)).optimizer:
        run.set_grads(1)
        run.optimizer.prefetch()
        for parameter in run.named.values():
            parameter.data.fill_(1e6)  # without changing the version counter
        with torch.no_grad():
            run.named["w2"].copy_(parameters()["w2"])
        run.optimizer.step()
        assert same(run.values(), memory(1))


@pytest.mark.usefixtures("on_device")
def test_early_gradients_of_a_skipped_step_are_forgotten(tmp_path: Path, memory: Any) -> None:
    """The next step's gradients may have the same address and the same version."""
    with (run := Run("cpu", tmp_path)).optimizer:
        run.set_grads(1)
        run.optimizer.prefetch()
        for name, grad in gradients(7).items():
            run.named[name].grad.data.copy_(grad)  # type: ignore[union-attr]
        run.optimizer.gradients_final(run.named.values())
        for name, grad in gradients(1).items():
            run.named[name].grad.data.copy_(grad)  # type: ignore[union-attr]
        run.optimizer.prefetch()
        run.optimizer.step()
        assert same(run.values(), memory(1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("on_device")
def test_weights_loaded_between_steps_are_seen(mode: str, tmp_path: Path) -> None:
    """A restore writes parameters on the device: the next update starts from them, not from the host's older copy."""
    offloaded, plain = Run(mode, tmp_path), Run(None, tmp_path)
    with offloaded.optimizer:
        for run in (offloaded, plain):
            run.steps(1, 2)
            with torch.no_grad():
                for parameter in run.named.values():
                    parameter.detach().copy_(torch.full_like(parameter, 0.25))
            run.steps(3, 4)
        assert same(offloaded.values(), plain.values())


@pytest.mark.usefixtures("on_device")
def test_watch_backward_takes_the_last_micro_batch(tmp_path: Path) -> None:
    """Two micro-batches: each gradient is fetched after the second one's backward has added its part, and not before."""
    torch.manual_seed(0)
    results = []
    for offloaded in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 3))
        shards = {n: ParamShard(p) for n, p in model.named_parameters()}
        optimizer: Any = optimizers.build(shards, SPEC, CPU)
        if offloaded:
            optimizer = build(shards, SPEC, OffloadSpec(optimizer="cpu"), CPU, "rank0")
            optimizer.watch_backward()
        data = torch.randn(3, 2, 4, 7)
        for step in range(3):
            for i in range(2):
                loss = model(data[step, i]).square().sum()
                if offloaded and i == 1:
                    optimizer.prefetch()
                loss.backward()
                if offloaded:
                    fetched = len(optimizer._host._final)
                    assert fetched == (4 if i else 0)
            optimizer.step()
            model.zero_grad()
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- checkpoints


@pytest.mark.parametrize("direct", [True, False])
def test_state_is_what_the_file_has(direct: bool, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of `state` show each step's new moments; the next step uses exactly what is written to them."""
    if not direct:
        monkeypatch.setattr(swapfile, "_O_DIRECT", 0)
    with (run := Run("nvme", tmp_path)).optimizer:
        held = {n: run.optimizer.state[p]["exp_avg"] for n, p in run.named.items()}
        for step in (1, 2, 3):
            run.steps(step, step)
            wanted = memory(step)
            assert all(torch.equal(held[n], wanted[f"{n}.exp_avg"]) for n in held)
            assert same(run.values(), wanted)
        plain = Run(None, tmp_path).steps(1, 3)
        for other in (run, plain):
            with torch.no_grad():
                for parameter in other.named.values():
                    state = other.optimizer.state[parameter]
                    state["exp_avg"].fill_(0.5)
                    state["exp_avg_sq"].mul_(3.0)
                    state["step"].fill_(10.0)
            other.steps(4, 5)
        assert same(run.values(), plain.values())


def test_state_is_whole_until_the_update(tmp_path: Path, memory: Any) -> None:
    """A checkpoint is copied during forward and backward: nothing of the state is written before `step`."""
    with (run := Run("nvme", tmp_path)).optimizer:
        run.steps(1, 2)
        run.set_grads(3)
        run.optimizer.prefetch()
        assert same(run.values(), memory(2))
        run.optimizer.step()  # after pages of the file were mapped between prefetch and the writes
        assert same(run.values(), memory(3))


def test_what_was_read_ahead_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass reads and writes every chunk once, whether it began with `prefetch` or with `step`."""
    calls: list[tuple[str, int]] = []

    def counted(name: str) -> Callable[..., int]:
        real = getattr(os, name)
        return lambda fd, buffers, offset: (calls.append((name, offset)), real(fd, buffers, offset))[1]

    with (run := Run("nvme", tmp_path)).optimizer as optimizer:
        run.steps(1, 1)
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(swapfile.os, name, counted(name))
        places = len(optimizer._layout.chunks) * 2
        for ahead in (True, False):
            calls.clear()
            if ahead:
                optimizer.prefetch()
                optimizer.prefetch()
            run.steps(2, 2)
            assert len(calls) == len(set(calls)) == 2 * places


def test_checkpoints_cross(tmp_path: Path, memory: Any) -> None:
    """Saved from one place and resumed at any other, through real checkpoints: the same bits as without interruption."""
    for number, (saves, loads) in enumerate(
        [(None, "nvme"), ("nvme", None), ("nvme", "cpu"), ("cpu", "nvme"), ("nvme", "nvme")]
    ):
        store = RunDir(str(tmp_path / str(number)))
        first, second = Run(saves, tmp_path).steps(1, 3), Run(loads, tmp_path)

        def state(run: Run) -> TrainState:
            model = nn.ParameterDict(run.named)
            return TrainState(model, run.optimizer, run.shards)

        saver = Saver(
            store, rank=0, world_size=1, group=None, asynchronous=True, keep=1, attempt=1, spec_hash="", numbers={},
            on_event=lambda event: None,
        )  # fmt: skip
        saver.start(3, *state(first).capture())
        first.set_grads(4)
        saver.before_update()
        first.optimizer.step()
        assert saver.wait()
        saver.close()
        found = restore.choose(store)
        assert found is not None
        target = state(second)
        tensors, rank_tensors, _ = target.capture()
        restore.load(store, found, tensors, rank_tensors)
        target.restore(tensors, rank_tensors, found.plain)
        assert same(second.values(), memory(3))
        assert same(second.steps(4, 5).values(), memory(5))


def sharded(rank: Rank, strategy: str, folder: str) -> tuple[bool, int]:
    """Two steps, a checkpoint's tensors loaded into a second run, and two more: (AdamW's bits, values in this rank's file)."""
    results = []
    for mode in ("none", "nvme"):
        made = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(5, 33), nn.Tanh(), nn.Linear(33, 3))
            spec = JobSpec.model_validate(
                {
                    "data": {"source": "any"},
                    "train": {"steps": 4},
                    "cluster": {"workers": 2},
                    "parallel": {"strategy": strategy},
                    "offload": {"optimizer": mode, "path": folder, "chunk_mb": 0.008},
                }
            )
            split: ParallelStrategy = registry.load("parallel", strategy)(spec, Mesh(rank))
            split.wrap(model, lambda module: module(torch.ones(1, 5)).sum())
            if mode == "none":
                optimizer: Any = optimizers.build(split.shards(), spec.optim, CPU)
            else:
                optimizer = build(split.shards(), spec.optim, spec.offload, CPU, f"rank{rank.rank}")
            made.append((model, split, optimizer, TrainState(model, optimizer, split.shards())))

        def step(number: int, model: nn.Module, split: ParallelStrategy, optimizer: Any, state: TrainState) -> None:
            data = torch.randn(4, 5, generator=torch.Generator().manual_seed(number * 2 + rank.rank))
            own = [shard.local for shard in split.shards().values()]
            versions = [local._version for local in own]
            with split.accumulate(last=True):
                loss = split.module(data).square().sum()  # gathers the rows of others
                assert versions == [local._version for local in own], "the copy on the host would be fetched again"
                loss.backward()
            split.finish_grads()
            optimizer.step()
            split.zero_grad()
            split.updated()

        first, second = made
        for number in (1, 2):
            step(number, *first)
        saved, into = first[3].capture()[0], second[3].capture()[0]
        for name, tensor in into.items():
            here, there = ((t.to_local() if isinstance(t, DTensor) else t) for t in (tensor, saved[name]))
            with torch.no_grad():
                here.copy_(there)
        second[1].updated()
        for number in (3, 4):
            step(number, *second)
        ends = second[3].capture()[0]
        results.append({n: t.to_local() if isinstance(t, DTensor) else t for n, t in ends.items()})
    in_memory, in_file = results
    equal = list(in_memory) == list(in_file) and all(torch.equal(in_memory[n], in_file[n]) for n in in_file)
    return equal, sum(t.numel() for t in second[2].state[next(iter(split.shards().values())).local].values())


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_rows_of_a_sharded_model(strategy: str, tmp_path: Path, ranks: Any) -> None:
    """Each of two ranks offloads its own rows, whose version a gather leaves as it is; the state is transferred between the runs'
    files as DTensors."""
    rows = [17 * 5, 16 * 5]
    assert ranks.run(sharded, 2, strategy, str(tmp_path)) == [(True, 2 * n + 1) for n in rows]


@pytest.mark.parametrize("mode", MODES)
def test_state_dict_and_load_state_dict(mode: str, tmp_path: Path, memory: Any) -> None:
    """Compatible with AdamW's in both directions; data read ahead is discarded; the state stays in place."""
    plain = Run(None, tmp_path).steps(1, 3)
    with (run := Run(mode, tmp_path)).optimizer as optimizer:
        held = optimizer.state[run.named["w0"]]["exp_avg"]
        optimizer.prefetch()
        optimizer.load_state_dict(plain.optimizer.state_dict())
        for name, parameter in run.named.items():
            parameter.data.copy_(plain.named[name])
        assert optimizer.state[run.named["w0"]]["exp_avg"] is held
        run.steps(4, 5)
        assert same(run.values(), memory(5))
        back = Run(None, tmp_path)
        back.optimizer.load_state_dict(optimizer.state_dict())
        for name, parameter in back.named.items():
            parameter.data.copy_(run.named[name])
    assert same(back.steps(6, 6).values(), memory(6))


# --- the file


def test_without_o_direct(tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses it, at open (as older tmpfs) or at the first read, is used through the page cache."""
    real, refused = fcntl.fcntl, []

    def refuse(fd: int, command: int, flags: int = 0) -> int:
        if command == fcntl.F_SETFL and flags & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, flags)

    with (run := Run("nvme", tmp_path)).optimizer as optimizer:
        assert same(run.steps(1, 3).values(), memory(3))
    monkeypatch.setattr(swapfile.fcntl, "fcntl", refuse)
    with (run := Run("nvme", tmp_path)).optimizer as optimizer:
        assert refused
        assert not optimizer._moments._file.direct
        assert same(run.steps(1, 3).values(), memory(3))
    monkeypatch.undo()

    def refuse_first(fd: int, buffers: Any, offset: int) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(swapfile.os, "preadv", refuse_first)
    file = swapfile.SwapFile(str(tmp_path), 8192, "rank0")
    monkeypatch.undo()
    assert not file.direct
    assert not real(file._fd, fcntl.F_GETFL) & os.O_DIRECT
    file.close()


def open_files(folder: Path) -> list[str]:
    """This process's open files there, and its swap threads."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(link))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return [f for f in found if f.startswith(str(folder))] + [
        t.name for t in threading.enumerate() if t.name.startswith("raydist-swap")
    ]


@pytest.mark.parametrize("way", ["close", "with", "forgotten", "forgotten while reading"])
def test_closed_in_every_way(way: str, tmp_path: Path) -> None:
    """Threads end and files are closed; a tensor of the state that is still referenced stays readable, and keeps its memory."""
    run: Any = Run("nvme", tmp_path).steps(1, 2)
    assert open_files(tmp_path)
    assert not list(tmp_path.iterdir())
    threads = [t for t in threading.enumerate() if t.name.startswith("raydist-swap")]
    kept = run.optimizer.state[run.named["w0"]]["exp_avg"]
    wanted = kept.clone()
    if way == "close":
        run.optimizer.close()
        run.optimizer.close()
        with pytest.raises(AssertionError, match="closed"):
            run.optimizer.step()
    elif way == "with":
        with run.optimizer:
            pass
    elif way == "forgotten while reading":
        run.optimizer.prefetch()
    del run
    gc.collect()
    assert torch.equal(kept, wanted)
    del kept
    for thread in threads:
        thread.join(240)
    assert not open_files(tmp_path)


CHILD = """
import sys, torch
from torch import nn
from raydist.spec.running import OffloadSpec
from raydist.worker.optim.offload import swapfile
from raydist.worker.optim.offload.adamw import OffloadedAdamW
torch.set_num_threads(1)
folder, how = sys.argv[1:3]
if how == "no O_TMPFILE":
    swapfile._O_TMPFILE = 0
if how == "buffered":
    swapfile._O_DIRECT = 0
def make(n, chunk_mb):
    p = nn.Parameter(torch.ones(n))
    p.grad = torch.ones(n)
    offload = OffloadSpec(optimizer="nvme", path=folder, chunk_mb=chunk_mb)
    group = {"name": "decay", "params": [("w", p)], "weight_decay": 0.1}
    return p, OffloadedAdamW([group], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, offload=offload, tag="rank0")
"""


@pytest.mark.parametrize("how", ["O_TMPFILE", "no O_TMPFILE"])
def test_sigkill_leaves_no_file(how: str, tmp_path: Path) -> None:
    """Killed in the middle of its updates, with a file that was unlinked after creation or never had a name: no file remains."""
    code = CHILD + "p, o = make(1 << 20, 0.5)\no.step()\nprint('stepping', flush=True)\nwhile True: o.step()\n"
    child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), how], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == "stepping\n"
        held = [os.readlink(f) for f in Path(f"/proc/{child.pid}/fd").iterdir()]
        assert any(f.startswith(str(tmp_path)) and f.endswith("(deleted)") for f in held)
        child.kill()
    assert child.wait() == -9
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", ["O_DIRECT", "buffered"])
def test_memory_stays_under_its_bound(how: str, tmp_path: Path) -> None:
    """Peak resident memory of three updates grows by the buffers (4 MiB) and a slack of 8 MiB, for a state of 128 MiB.

    VmHWM counts pages of the mapping as well, so the update does not touch any. A checkpoint touches those of the whole state,
    and the next update drops them.
    """
    code = CHILD + """
def status(key):
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) for line in f if line.startswith(key)) / 1024
_, small = make(1 << 16, 0.1)
small.step()  # what the first update loads of torch
p, o = make(1 << 24, 1.0)
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")  # the peak counts from now on
before = status("VmRSS")
for _ in range(3):
    o.prefetch()
    o.step()
peak = status("VmHWM")
seen = sum(float(t.sum()) for t in o.state[p].values())
captured = status("VmRSS")
o.step()
print(peak - before, captured - before, status("VmRSS") - before, seen)
"""  # fmt: skip
    out = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), how], capture_output=True, text=True, timeout=120, check=False
    )
    assert out.returncode == 0, out.stderr
    peak, captured, after, seen = map(float, out.stdout.split())
    assert peak < 12
    assert captured > 128
    assert after < 12
    assert seen > 0


# --- errors


def test_folder_that_will_not_do(tmp_path: Path) -> None:
    """One clear error each, before any file is created."""
    (tmp_path / "file").write_text("")
    cases = [
        (tmp_path / "missing", 1, r"offload.path: .*/missing does not exist\n  create it on every node"),
        (tmp_path / "file", 1, r"/file is not a folder"),
        (tmp_path, 1 << 60, r"has no room .* 1,152,921,504,606,846,976 bytes are needed \(.* GiB\), [\d,]+ are free"),
    ]
    for path, nbytes, message in cases:
        with pytest.raises(UserError, match=message):
            swap_space.check(str(path), nbytes)
        with pytest.raises(UserError, match=message):
            swapfile.SwapFile(str(path), max(nbytes, 4096), "rank0")
    swap_space.check(str(tmp_path), 1 << 20)
    with tempfile.TemporaryDirectory() as folder:  # not in tmp_path, which only its owner may enter
        os.chmod(folder, 0o555)
        if root := os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(UserError, match=f"{folder} cannot be written by user"):
                swap_space.check(folder, 1)
        finally:
            if root:
                os.seteuid(0)


def test_check_needs_no_torch() -> None:
    """The driver's node check imports it, and the driver has no torch."""
    code = "import sys, raydist.worker.optim.offload.swap_space; assert not {'torch', 'ray'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_disk_that_is_full_after_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks are allocated at the start: a disk that fills up after the check is a clear error too, and nothing is left."""
    shm = Path("/dev/shm")  # its size is fixed
    monkeypatch.setattr(swap_space, "check", lambda path, nbytes: None)
    size = shutil.disk_usage(shm).total + (1 << 30) & ~4095
    before = open_files(shm)
    with pytest.raises(UserError, match=f"/dev/shm has no room .*{size:,} bytes are needed"):
        swapfile.SwapFile(str(shm), size, "rank0")
    assert set(open_files(shm)) <= set(before)


def test_file_that_ends_too_early(tmp_path: Path) -> None:
    """A short read names file and offset; after it only a restart helps."""
    with (run := Run("nvme", tmp_path)).optimizer as optimizer:
        run.steps(1, 1)
        file = optimizer._moments._file
        size = os.fstat(file._fd).st_size
        os.ftruncate(file._fd, size - 4096)
        run.set_grads(2)
        with pytest.raises(
            StorageError, match=rf"{tmp_path} \(swap file of rank0\): read of 4096 bytes at offset {size - 4096}: "
        ):
            optimizer.step()
        with pytest.raises(StorageError, match=r"an earlier update failed half-way.*\n.*last checkpoint"):
            optimizer.step()


def test_write_that_is_refused(tmp_path: Path) -> None:
    """A real EFBIG at the last chunks: the error names file, offset and cause."""
    with (run := Run("nvme", tmp_path)).optimizer as optimizer:
        run.steps(1, 1)
        size = os.fstat(optimizer._moments._file._fd).st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        run.set_grads(2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size - 4096, hard))
        try:
            with pytest.raises(StorageError, match=rf"write of 4096 bytes at offset {size - 4096}: File too large"):
                optimizer.step()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_partial_transfers_are_completed(tmp_path: Path) -> None:
    """The kernel may transfer less than requested: the rest follows."""
    file = swapfile.SwapFile(str(tmp_path), 16384, "rank0")
    moved = []

    def half(fd: int, buffers: list[memoryview], offset: int) -> int:
        moved.append((len(buffers[0]), offset))
        return max(len(buffers[0]) // 2 // 4096 * 4096, 4096)

    file._move(half, "read", memoryview(bytearray(16384)), 0)
    assert moved == [(16384, 0), (8192, 8192), (4096, 12288)]
    file.close()


def test_what_it_does_not_take(tmp_path: Path) -> None:
    """Other dtypes, other strides, and an unsupported kernel: one clear error each."""
    offload = OffloadSpec(optimizer="cpu")
    for tensor in (torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(4, 3).t()):
        with pytest.raises(UserError, match="offload.optimizer: w is not a dense fp32 tensor"):
            build({"w": ParamShard(nn.Parameter(tensor))}, SPEC, offload, CPU, "rank0")
    with pytest.raises(UserError, match="optim.fused: false"):
        build({}, OptimSpec(fused=False), offload, CPU, "rank0")


def test_rank_without_any_value(tmp_path: Path) -> None:
    """More ranks than rows: there is no file, and each step still counts."""
    empty = nn.Parameter(torch.zeros(0, 4))
    offload = OffloadSpec(optimizer="nvme", path=str(tmp_path))
    with build({"w": ParamShard(empty)}, SPEC, offload, CPU, "rank3") as optimizer:
        empty.grad = torch.zeros(0, 4)
        optimizer.prefetch()
        optimizer.step()
        state = optimizer.state[empty]
        assert float(state["step"]) == 1
        assert state["exp_avg"].shape == (0, 4)
        assert not open_files(tmp_path)
