"""Snapshots on real ranks and real shared memory: the state that a killed rank leaves there, and how a restart uses it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.base_weights import BASE
from raydist.cluster.run.memory_checkpoint_recovery import place
from raydist.cluster.run.memory_store import MemoryStore
from raydist.data.prepare import prepare
from raydist.errors import UserError
from raydist.run.directory import RunDir, begin_attempt
from raydist.spec import JobSpec
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.checkpoint import memory_manager
from raydist.worker.checkpoint.memory_manager import MemoryCheckpointer, MemoryStoreJob
from raydist.worker.checkpoint.memory_saver import MemorySaver, Slot
from raydist.worker.checkpoint.staging import Stage
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.lora import A, B
from raydist.worker.step import TrainStep
from tests.exact import weights as whole
from tests.training import run
from tests.worker.model.families import theirs
from tests.worker.test_lora import CHANGES
from tests.worker.test_lora import job as lora_job

STEPS, CONTEXT = 9, 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(3)
    (folder / "a.txt").write_text("\n".join("".join(choose.choices("abcdefgh ", k=40)) for _ in range(40)))
    out = folder / "tokens"
    prepare([str(folder / "a.txt")], str(out), eval_fraction=0.2)
    return str(out)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A memory store's folder with its node's MemoryStore, as created by a private run's driver."""
    memory_store = MemoryStore(memory_layout.new_folder())
    memory_store.link(None, None, range(2), 2)
    yield memory_store._folder
    memory_store.close()
    assert not memory_store._folder.exists()


def spec_of(dataset: str, strategy: str = "ddp", every: Any = 2, checkpoint: int | None = 4) -> JobSpec:
    """Nine steps with dropout; a snapshot after every second step, a checkpoint after every fourth."""
    return JobSpec.model_validate(
        {
            "data": {"path": dataset},
            "model": {"layers": 2, "width": 16, "heads": 2, "context": CONTEXT, "dropout": 0.1},
            "train": {"steps": STEPS, "global_batch": 6, "micro_batch": 2},
            "parallel": {"strategy": strategy},
            "checkpoint": {"every": checkpoint},
            "eval": {"every": None},
            "recovery": {"snapshot_every": every},
        }
    )


def trained(
    rank: Rank, spec: JobSpec, path: str, memory_store: dict[str, Any] | None, attempt: int, kill: Any = None
) -> Any:
    """An attempt: (steps, events) as rank 0 reported them. `kill`: (rank, step) for a SIGKILL there; with a third element, in the
    middle of the snapshot that is taken after that step."""
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        steps.extend(new)
        events.extend(told)

    step = TrainStep.__call__

    def deadly(self: TrainStep, number: int, *args: Any, **kwargs: Any) -> Any:
        if kill is not None and number > 1:
            memory_stores[0].checkpoints._memory_store._saver.wait()  # so that it is known which snapshots exist
            memory_stores[0].checkpoints._saver.wait()
        if kill is not None and (rank.rank, number) == tuple(kill[:2]):
            if len(kill) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            Stage.view = torn  # type: ignore[method-assign]
        return step(self, number, *args, **kwargs)

    def torn(self: Stage, part: Any) -> Any:
        self._buffer.fill_(7)
        os.kill(os.getpid(), signal.SIGKILL)

    memory_stores: list[Any] = []
    from raydist.worker import loop

    made = loop._Run.train

    def train_and_tell(self: Any) -> Any:
        memory_stores.append(self)
        return made(self)

    TrainStep.__call__, loop._Run.train = deadly, train_and_tell  # type: ignore[method-assign]
    run = RunDir(path)
    try:
        if rank.first and attempt not in run.lineage().begun:
            begin_attempt(run, attempt)
        job = Job(
            spec,
            run,
            str(spec.data.path),
            attempt,
            None,
            False,
            memory_store=MemoryStoreJob(**memory_store) if memory_store else None,
        )
        train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)
    finally:
        TrainStep.__call__, loop._Run.train = step, made  # type: ignore[method-assign]
    return steps, events


def weights(path: Path) -> dict[str, bytes]:
    """Every tensor of the last checkpoint, including the optimizer's and the ranks' random states."""
    run, found = RunDir(path), {}
    for name, entry in manifest.read(run, STEPS).tensors.items():
        parts = []
        for chunk in sorted(entry.chunks, key=lambda c: c.offsets):
            with run.storage.open(manifest.path(STEPS, chunk.file)) as source:
                source.seek(chunk.start)
                parts.append(source.read(chunk.length))
        found[name] = b"".join(parts)
    return found


def exact(steps: list[dict[str, Any]]) -> list[Any]:
    return [(s["step"], s["loss"], s["grad_norm"], s["samples_hash"]) for s in steps]


def newest(folder: Path, world: int, after: int = 0) -> dict[str, Any]:
    """The newest snapshot, as the driver would announce it to the ranks."""
    memory_store = MemoryStore.__new__(MemoryStore)
    memory_store._folder = folder
    found = place({"n": memory_store.inventory()}, dict.fromkeys(range(world), "n"), after=after)
    assert found is not None
    return {"folder": str(folder), "step": found.copy.step, "manifest": found.copy.manifest}


@pytest.mark.parametrize(("strategy", "virtual_ranks"), [("ddp", None), ("zero2", 3), ("zero3", None)])
def test_a_killed_rank_costs_the_steps_since_the_last_copy(
    ranks: Any, dataset: str, tmp_path: Path, folder: Path, strategy: str, virtual_ranks: int | None
) -> None:
    """SIGKILL of rank 1 in step 8: the run resumes from the snapshot of step 6, not the checkpoint of 4, with the bits of an
    undisturbed run; with virtual ranks of one on one rank.

    Then SIGKILL of rank 1 in step 7: the restarted ranks have not overwritten the snapshot of step 6.
    """
    spec = spec_of(dataset, strategy)
    spec = spec.model_copy(update={"train": spec.train.model_copy(update={"virtual_ranks": virtual_ranks})})
    calm = 2 if virtual_ranks is None else 1
    expected, _ = run(ranks, trained, calm, spec, str(tmp_path / "calm"), None, 1)[0]
    path = tmp_path / "killed"
    died = ranks.run(trained, 2, spec, str(path), {"folder": str(folder)}, 1, (1, 8))
    assert isinstance(died[1], ChildProcessError)
    assert RunDir(path).committed() == [4]
    job = newest(folder, 2, after=4)
    assert job["step"] == 6
    died = ranks.run(trained, 2, spec, str(path), job, 2, (1, 7))
    assert isinstance(died[1], ChildProcessError)
    again = newest(folder, 2, after=4)
    assert again == job
    steps, events = run(ranks, trained, 2, spec, str(path), again, 3)[0]
    assert [(e["step"], e["source"]) for e in events if e["kind"] == "resumed"] == [(6, "memory")]
    assert [s["step"] for s in steps] == [7, 8, 9]
    assert exact(steps) == exact(expected)[6:]
    if virtual_ranks is None:
        assert weights(path) == weights(tmp_path / "calm")
    assert whole(RunDir(path), STEPS) == whole(RunDir(tmp_path / "calm"), STEPS)
    assert RunDir(path).lineage().begun == {1: 0, 2: 6, 3: 6}


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_adapters_go_on_from_memory(ranks: Any, dataset: str, tmp_path: Path, folder: Path, strategy: str) -> None:
    """SIGKILL of rank 1 in step 8 of a run that trains adapters: the copy of step 6 has adapters and their moments alone, and the
    run resumes from it with the bits of an undisturbed one."""
    theirs("qwen3", **CHANGES).save_pretrained(tmp_path / "base")
    spec = lora_job(
        tmp_path / "base", dataset, tmp_path / "job", {"dropout": 0.1}, parallel={"strategy": strategy},
        train={"steps": STEPS, "global_batch": 6, "micro_batch": 2}, checkpoint={"every": 4}, eval={"every": None},
        recovery={"snapshot_every": 2}, cluster={"workers": 2},
    )  # fmt: skip
    expected, _ = run(ranks, trained, 2, spec, str(tmp_path / "calm"), None, 1)[0]
    path = tmp_path / "killed"
    died = ranks.run(trained, 2, spec, str(path), {"folder": str(folder)}, 1, (1, 8))
    assert isinstance(died[1], ChildProcessError)
    job = newest(folder, 2, after=4)
    assert job["step"] == 6
    copied = manifest.read(RunDir(str(folder)), 6, job["manifest"])
    saved = {name for name in copied.tensors if name.startswith("model/")}
    assert len(saved) == 2 * 2 * 7
    assert all(name.endswith((A, B)) for name in saved)
    assert {name.split("/")[1] for name in copied.tensors if name.startswith("optim/")} == {
        n.split("/")[1] for n in saved
    }
    assert set(copied.plain[BASE]["frozen"]).isdisjoint(name.split("/")[1] for name in saved)
    steps, events = run(ranks, trained, 2, spec, str(path), job, 2)[0]
    assert [(e["step"], e["source"]) for e in events if e["kind"] == "resumed"] == [(6, "memory")]
    assert exact(steps) == exact(expected)[6:]
    assert weights(path) == weights(tmp_path / "calm")


def test_a_flipped_byte_means_storage(ranks: Any, dataset: str, tmp_path: Path, folder: Path) -> None:
    """One bit of one shard in memory is wrong: the file is reported, and the run resumes from step 4 on storage, with the same
    bits."""
    spec = spec_of(dataset)
    expected, _ = run(ranks, trained, 2, spec, str(tmp_path / "calm"), None, 1)[0]
    path = tmp_path / "killed"
    ranks.run(trained, 2, spec, str(path), {"folder": str(folder)}, 1, (1, 8))
    job = newest(folder, 2)
    (shard,) = folder.glob("checkpoints/step-00000006/shard-00001-*")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    steps, events = run(ranks, trained, 2, spec, str(path), job, 2)[0]
    (rejected,) = [e for e in events if e["kind"] == "checkpoint_rejected"]
    assert (rejected["step"], Path(rejected["file"]).name) == (6, shard.name)
    assert [(e["step"], e["source"]) for e in events if e["kind"] == "resumed"] == [(4, "storage")]
    assert exact(steps) == exact(expected)[4:]
    assert weights(path) == weights(tmp_path / "calm")


def test_another_number_of_ranks_goes_on(ranks: Any, dataset: str, tmp_path: Path, folder: Path) -> None:
    """Three ranks resume from a snapshot of two: the same samples in every step, and then snapshots of three."""
    spec = spec_of(dataset, "zero3", checkpoint=None)
    ranks.run(trained, 2, spec, str(tmp_path), {"folder": str(folder)}, 1, (1, 8))
    steps, events = run(ranks, trained, 3, spec, str(tmp_path), newest(folder, 3), 2)[0]
    expected, _ = run(ranks, trained, 2, spec, str(tmp_path / "calm"), None, 1)[0]
    assert [(e["step"], e["source"]) for e in events if e["kind"] == "resumed"] == [(6, "memory")]
    assert [s["samples_hash"] for s in steps] == [s["samples_hash"] for s in expected[6:]]
    assert [s["loss"] for s in steps] == pytest.approx(
        [s["loss"] for s in expected[6:]], rel=0.1
    )  # other dropout masks


def test_a_death_in_mid_copy_keeps_the_older_copy(ranks: Any, dataset: str, tmp_path: Path, folder: Path) -> None:
    """SIGKILL of rank 1 while it copies step 6, half of it written: the snapshot of step 4 is complete, and the bits at the end
    are the same."""
    spec = spec_of(dataset, "zero2", checkpoint=None)
    expected, _ = run(ranks, trained, 2, spec, str(tmp_path / "calm"), None, 1)[0]
    died = ranks.run(trained, 2, spec, str(tmp_path / "killed"), {"folder": str(folder)}, 1, (1, 6, "copy"))
    assert isinstance(died[1], ChildProcessError)
    (torn,) = folder.glob(".tmp-slot-00001-*")
    assert set(torn.read_bytes()) == {7}
    job = newest(folder, 2)
    assert job["step"] == 4
    steps, _ = run(ranks, trained, 2, spec, str(tmp_path / "killed"), job, 2)[0]
    assert exact(steps) == exact(expected)[4:]
    assert weights(tmp_path / "killed") == weights(tmp_path / "calm")


def test_two_attempts_took_the_same_step(kit: Any, tmp_path: Path) -> None:
    """The first attempt's shard and manifest of a step are kept while the third attempt, which resumes from it, reuses the second
    attempt's leftover of that step; the third attempt keeps two snapshots of its own, as usual."""

    def attempt(number: int, kept: tuple[int, int] | None) -> Any:
        common = {"rank": 0, "world_size": 1, "group": None, "spec_hash": "", "numbers": {}, "on_event": print}
        return MemorySaver(tmp_path, kept=kept, attempt=number, **common)

    def take(saver: Any, step: int) -> None:
        saver.start(step, kit.state(step), kit.own(step), {"step": step})
        assert saver.wait()

    def there() -> set[str]:
        return {f"{p.parent.name[-1]} {p.name[:25]}" for p in tmp_path.glob("checkpoints/*/*")}

    take(attempt(1, None), 2)
    second = attempt(2, None)
    second._before_commit = lambda: 1 / 0
    second.start(2, kit.state(2), kit.own(2), {"step": 2})
    assert not second.wait()
    old = {"2 shard-00000-of-00001-0001", "2 MANIFEST-0001.json"}
    assert there() == {*old, "2 shard-00000-of-00001-0002"}
    third = attempt(3, (2, 1))
    take(third, 4)
    new = {"4 shard-00000-of-00001-0003", "4 MANIFEST-0003.json"}
    assert there() == old | new
    take(third, 6)
    assert there() == {*new, "6 shard-00000-of-00001-0003", "6 MANIFEST-0003.json"}


def test_a_copy_costs_its_sending_too(kit: Any, folder: Path) -> None:
    """If the node has a buddy, a snapshot is complete once the buddy has it, and the MemoryStore's processor time counts; a fixed
    number of steps waits for neither."""

    def over(step: int, every: Any, send: bool) -> list[bool]:
        """Whether the snapshot's cost is known: when it is committed, and once the buddy has it."""
        common = {"rank": 0, "world_size": 1, "group": None, "spec_hash": "", "numbers": {}, "on_event": print}
        memory_store = MemoryCheckpointer(MemoryStoreJob(str(folder)), every, resumed=0, attempt=step, **common)
        memory_store.prepare(kit.state(step), kit.own(step))
        memory_layout.tell_sent(folder, 0, 0)  # this process replaces its node's MemoryStore
        memory_store.start(step, kit.state(step), kit.own(step), {"step": step})
        assert memory_store._saver.wait()
        memory_store.stepped(0.1, False)
        found = [memory_store._interval.cost is not None]
        if send:
            begun = time.process_time()
            while time.process_time() - begun < 0.3:
                pass
            memory_layout.tell_sent(folder, step, step)
            memory_store.stepped(0.1, False)
            found.append((memory_store._interval.cost or 0.0) >= 0.29)
        memory_store.close()
        return found

    assert over(1, "auto", send=True) == [False, True]
    assert over(2, 1, send=False) == [True]
    (folder / memory_layout.SENT).unlink()
    assert memory_layout.sent(folder) is None


@pytest.mark.parametrize("every", [2, "auto"])
def test_no_room_in_shared_memory(ranks: Any, dataset: str, tmp_path: Path, folder: Path, every: Any) -> None:
    """With a fixed interval it is refused with the sizes and the remedy; by default training continues without snapshots, with a
    note."""
    spec = spec_of(dataset, every=every)
    results = ranks.run(little_room, 2, spec, str(tmp_path), str(folder), 4096, False)
    if every == "auto":
        steps, events = results[0]
        assert [s["step"] for s in steps] == list(range(1, STEPS + 1))
        (text,) = [e["text"] for e in events if e["kind"] == "note" and "in memory" in e["text"]]
    else:
        assert all(isinstance(r, UserError) for r in results)
        text = results[0].message
    assert "/dev/shm has 0.00 GiB free" in text
    assert "--shm-size" in text
    assert not list(folder.glob("checkpoints/*"))


def test_room_for_messages_between_nodes(ranks: Any, dataset: str, tmp_path: Path, folder: Path) -> None:
    """Copies that leave no room for what nodes send each other are refused; on one node they fit."""
    spec = spec_of(dataset, every=2)
    for result in ranks.run(little_room, 2, spec, str(tmp_path / "two"), str(folder), 8 << 20, True):
        assert isinstance(result, UserError)
        assert "0.02 GiB for messages between nodes a node, and /dev/shm has 0.01 GiB free" in result.message
    steps, _ = ranks.run(little_room, 2, spec, str(tmp_path / "one"), str(folder), 8 << 20, False)[0]
    assert len(steps) == STEPS


def little_room(rank: Rank, spec: JobSpec, path: str, folder: str, free: int, two: bool) -> Any:
    """Trains with so many bytes free in shared memory. `two`: as if each rank were on a node of its own."""
    room, node = memory_layout.room, memory_manager._node
    memory_layout.room = lambda folder: (free, 1 << 40, 0)
    if two:
        memory_manager._node = lambda: f"node of rank {rank.rank}"
    try:
        return trained(rank, spec, path, {"folder": folder}, 1)
    finally:
        memory_layout.room, memory_manager._node = room, node


def test_a_full_shared_memory_is_no_bus_error(kit: Any, tmp_path: Path) -> None:
    """Allocating a slot raises, where a write to its pages would kill the process."""
    slot = Slot(torch.device("cpu"), tmp_path, tmp_path / ".tmp-slot")
    with pytest.raises(OSError, match="No space|too large"):
        slot.reserve(1 << 50)


def test_a_rank_without_a_part_has_an_empty_shard(kit: Any, tmp_path: Path) -> None:
    """Of a model with fewer tensors than ranks. Without the file no snapshot would be whole."""
    slot = Slot(torch.device("cpu"), tmp_path, tmp_path / ".tmp-slot")
    slot.path.write_bytes(b"of an earlier process")
    for step in (2, 4):
        slot.copy([])
        slot.publish(step, memory_layout.Shard(1, 4, 1, "0" * 32).name)
        assert (slot.holds, slot.path.stat().st_size) == ((step, 1), 0)
        slot.withdraw()


def test_two_copies_at_most(ranks: Any, dataset: str, tmp_path: Path, folder: Path) -> None:
    """After any number of snapshots a rank's memory is two slots; the same two files are overwritten."""
    spec = spec_of(dataset, every=1, checkpoint=None)
    run(ranks, trained, 2, spec, str(tmp_path), {"folder": str(folder)}, 1)
    files = [p for p in folder.rglob("*") if p.is_file() and "of-00002" in p.name]
    assert len(files) == 4
    sizes = {p.stat().st_size for p in files if "-00001-of" in p.name}
    assert len(sizes) == 1
    assert len(list(folder.glob("checkpoints/*/MANIFEST-*"))) <= 2


def test_folders_go_while_one_looks(tmp_path: Path) -> None:
    """Ranks delete a step's folder while the MemoryStore of their node lists files: the remaining files are listed, nothing
    raises."""
    paths = {tmp_path / f"step-{n:08d}" / "shard" for n in (1, 2)}
    for path in paths:
        path.parent.mkdir()
        path.touch()
    looking = memory_layout.files(tmp_path)
    first = next(looking)
    (other,) = paths - {first}
    shutil.rmtree(other.parent)
    assert list(looking) == []
