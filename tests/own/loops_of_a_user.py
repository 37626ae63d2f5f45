"""Sessions of two ranks, one after another, in one pair of processes. Prints JSON: what each has made.

Argument: the storage.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import raydist.own as rd
from raydist.api.runs import Run
from raydist.errors import TraceFailed, TrainingStopped, UserError
from raydist.launch import standalone
from raydist.own import launcher
from raydist.run import lease
from raydist.run.directory import RunDir
from raydist.worker.comm import rendezvous

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SAMPLES, BATCH, STEPS = 25, 8, 6
"""The last batch of an epoch has one sample, so one of two ranks has none."""


class Net(nn.Module):
    """Blocks of which the strategies split each. Parameters outside come first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.last = nn.Linear(7, 1)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        """B samples, F features."""
        x_BF = self.first(x_BF)
        for block in self.blocks:
            x_BF = x_BF + block(x_BF).tanh()
        made: torch.Tensor = self.last(x_BF)
        return made


class Drawn:
    """Samples that are drawn anew each time, as random transforms do it."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Any:
        index, x, wanted = data()[number]
        return index, x + 0.1 * torch.randn(6), wanted


class Iterated(torch.utils.data.IterableDataset[float]):
    """A stream without a state."""

    def __iter__(self) -> Iterator[float]:
        yield 1.0


class Stream:
    """Numbers and samples in order, with a state."""

    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "at": self.at,
            "of": len(self.data),
            "as": torch.tensor(self.at),
        }  # a tensor, as states of generators are

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["at"] == state["as"].item()
        self.at = state["at"]


@dataclass(frozen=True)
class Batch:
    """One of a collate_fn that gives objects."""

    x: torch.Tensor
    tokens: int
    rest: Any


class Encoding(UserDict[str, torch.Tensor]):
    """As that of transformers."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: value.to(device) for name, value in self.items()})


def data() -> Any:
    """(number, features, target) of each sample."""
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
    return torch.utils.data.TensorDataset(torch.arange(SAMPLES), x, x.sum(1, keepdim=True).sin())


def trained(
    storage: str,
    name: str,
    strategy: str,
    until: int | None = None,
    dataset: Any = None,
    leaves: int | None = None,
    model: Any = None,
    killed_at: int | None = None,
) -> dict[str, Any]:
    """A session that all ranks leave in step `until`, or rank `leaves` alone: its losses, last rate, weights, and this rank's
    samples."""
    torch.manual_seed(5)
    model = (model or Net)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    ids, rates = [], []
    with rd.session(
        model,
        optimizer,
        data() if dataset is None else dataset,
        steps=STEPS,
        batch=BATCH,
        micro_batch=3,
        name=name,
        storage=storage,
        clip=1.0,
        strategy=strategy,
        scheduler=scheduler,
        every=2,
    ) as s:
        for index, x, wanted in s:
            if s.number == until and leaves in (None, s.rank.rank):
                break
            if s.number == killed_at and s.rank.rank == s.rank.world_size - 1:
                while RunDir(f"{storage}/{name}").newest_step() != killed_at - 1:  # it is saved in the background
                    time.sleep(0.05)
                os.kill(os.getpid(), signal.SIGKILL)
            s.model.train(len(index) > 1)  # batch norm has no variance of one sample
            s.backward((s.model(x) - wanted).square().mean(), weight=len(index))
            rates.append(optimizer.param_groups[0]["lr"])
            s.step()
            ids += index.tolist() if s.counts else []
    # Of zero3 a rank has some rows of each weight; of the others all, as they are after the last step.
    state = model.state_dict().values()
    weights = [] if strategy == "zero3" else [value.double().sum().item().hex() for value in state]
    return {"losses": [loss.hex() for loss in s.losses], "ids": ids, "rate": rates[-1], "weights": weights}


def asked(storage: str) -> dict[str, Any]:
    """A session that trains until it is asked for a checkpoint and then for its end: its last step, and the checkpoints. Rank 0's
    process asks, as any other could."""
    standalone.HEARTBEAT_S = lease.STOP_LOOK_S = 0.05
    model, run = Net(), Run(RunDir(f"{storage}/asked"))
    saved, untraced = list[int](), list[str]()

    def ask() -> None:
        try:
            run.trace(timeout=120)
        except TraceFailed as error:
            untraced.append(error.message)
        saved.append(run.save(timeout=120))
        run.stop(wait=False)

    thread = threading.Thread(target=ask, daemon=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with rd.session(
        model, optimizer, data(), steps=200_000, batch=4, name=run.name, storage=storage, every=200_000
    ) as s:
        for _, x, wanted in s:
            if s.number == 2 and s.rank.first:
                thread.start()
            s.backward((s.model(x) - wanted).square().mean(), weight=len(x))
            s.step()
    if s.rank.first:
        thread.join()
    kept = [one["step"] for one in run.checkpoints]
    return {"step": s.number, "saved": saved, "untraced": untraced, "checkpoints": kept, "status": run.status}


def refused(*args: Any, **more: Any) -> str:
    """What the session says that fails on every rank."""
    try:
        trained(*args, **more)
    except (TrainingStopped, UserError) as error:
        dist.destroy_process_group()
        return error.message
    return "it was trained"


def noisy(storage: str, name: str, killed_at: int | None = None, dataset: Any = None) -> dict[str, Any]:
    """With all that draws random numbers, and with running statistics."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))

    return trained(storage, name, "zero2", dataset=dataset or Drawn(), model=build, killed_at=killed_at)


def main() -> None:
    """All sessions."""
    storage = sys.argv[1]
    torch.set_num_threads(1)
    proofs, prove = list[bytes](), rendezvous.prove

    def proving(group: dist.ProcessGroup, secret: bytes) -> None:
        proofs.append(secret)
        prove(group, secret)

    rendezvous.prove = proving
    made: dict[str, Any] = {"noisy": [noisy(storage, "noisy")]}
    loader = torch.utils.data.DataLoader(Drawn(), batch_size=5, shuffle=True, num_workers=2)
    made["noisy loader"] = [noisy(storage, "noisy-loader", dataset=loader)]
    for strategy in STRATEGIES:
        made[strategy] = [trained(storage, strategy, strategy)]
        made[f"{strategy} paused"] = [trained(storage, f"{strategy}-paused", strategy, until) for until in (4, None)]
    changes = enumerate(("zero3", "ddp", "zero2", "zero1"), 2)
    made["crossed"] = [trained(storage, "crossed", strategy, until) for until, strategy in changes]
    made["stream"] = [trained(storage, "stream", "zero2", None, Stream(data()))]
    made["stream paused"] = [trained(storage, "stream-paused", "zero2", until, Stream(data())) for until in (4, None)]
    made["left"] = [refused(storage, f"left-{strategy}", strategy, 3, leaves=1) for strategy in ("ddp", "zero3")]
    apart = Stream([*data()][int(os.environ["RANK"]) :])
    made["apart"] = refused(storage, "apart", "ddp", None, apart)
    assert "ray" not in sys.modules
    made["asked"] = asked(storage)
    made["proofs"], made["sessions"] = [secret.decode() for secret in proofs], launcher._sessions
    print(json.dumps(made))


if __name__ == "__main__":
    main()
