"""Replicas of checkpoints: copied beside training, verified, used when the original is bad, and repaired from the good copy."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint import manifest, mirrors
from raydist.checkpoint.mirrors import Mirrors, newest_attempt, replica_of
from raydist.errors import CheckpointCorrupt, StorageError, UserError
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import RunDir, begin_attempt, resume_attempt, start_anew
from raydist.worker.checkpoint import restore
from raydist.worker.distributed import Rank
from tests.mounting import Disk


class Kept:
    """A run of one rank whose commits are copied to replicas, and all its events."""

    def __init__(self, kit: Any, folder: Path | str, uris: list[str], attempt: int = 1, **options: Any) -> None:
        self.one = kit.OneRank(folder, attempt=attempt, keep=options.get("keep", 10))
        self.run, self.events = self.one.run, self.one.events
        self.said = threading.Condition()
        given = {"keep": 10, "verify_every": None, **options}
        self.replicas = Mirrors(self.run, uris, attempt=attempt, on_event=self.hear, **given)

    def hear(self, event: Event) -> None:
        with self.said:
            self.events.append(event)
            self.said.notify_all()

    def save(self, step: int) -> None:
        self.one.save(step)
        assert self.one.saver.wait()
        self.replicas.committed()

    def until(self, met: Callable[[], bool]) -> None:
        """Waits until an event makes the condition true."""
        with self.said:
            assert self.said.wait_for(met, timeout=240), self.events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [e.data for e in self.events if e.kind == kind]


def begun(folder: Path, number: int = 1, step: int = 0) -> None:
    begin_attempt(RunDir(folder), number)
    resume_attempt(RunDir(folder), number, step)


def shard(run: RunDir, step: int) -> Path:
    (found,) = Path(run.uri, "checkpoints", f"step-{step:08d}").glob("shard-*")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def same_files(run: RunDir, other: RunDir) -> bool:
    names = run.storage.files("checkpoints", recursive=True)
    return names == other.storage.files("checkpoints", recursive=True) and all(
        run.storage.read(n) == other.storage.read(n) for n in names
    )


def test_every_commit_is_copied(kit: Any, tmp_path: Path, s3: Any) -> None:
    """To a folder and to an object store, byte for byte, with the attempts' notes; pruned alike; each event has its size in
    bytes."""
    begun(tmp_path / "runs" / "a")
    uris = [str(tmp_path / "second"), s3.uri("third")]
    kept = Kept(kit, tmp_path / "runs" / "a", uris, keep=2)
    for step in (1, 2, 3, 4):
        kept.save(step)
    kept.replicas.close(60)
    assert kept.run.committed() == [3, 4]
    for uri in uris:
        replica = replica_of(kept.run, uri)
        assert replica.name == "a"
        assert same_files(kept.run, replica)
        assert replica.lineage() == kept.run.lineage()
        assert [manifest.verify(replica, step) for step in (3, 4)] == [[], []]
        saved = {e["step"]: e["bytes"] for e in kept.of("replica_saved") if e["replica"] == redact(uri)}
        assert saved[4] == manifest.read(kept.run, 4).nbytes
    assert not [e for e in kept.of("replica_failed") if e["replica"] == uris[0]]


def test_a_replica_that_is_away_costs_an_event(kit: Any, tmp_path: Path) -> None:
    """The other replica has everything; the unavailable one gets all of it once it is back."""
    (tmp_path / "second").write_text("a file in the way")
    uris = [str(tmp_path / "second"), str(tmp_path / "third")]
    kept = Kept(kit, tmp_path / "a", uris)
    kept.save(1)
    kept.until(lambda: bool(kept.of("replica_failed")) and bool(kept.of("replica_saved")))
    assert {e["replica"] for e in kept.of("replica_failed")} == {uris[0]}
    assert "Not a directory" in kept.of("replica_failed")[0]["cause"]
    (tmp_path / "second").unlink()
    kept.save(2)
    kept.replicas.close(60)
    assert [replica_of(kept.run, uri).committed() for uri in uris] == [[1, 2], [1, 2]]


NEW_PROCESS = """
import sys, threading
from raydist.checkpoint.mirrors import Mirrors
from raydist.run.directory import RunDir
said = lambda event: print(event.data["cause"])
Mirrors(RunDir(sys.argv[1]), [sys.argv[2]], keep=10, attempt=2, verify_every=None, on_event=said).close(60)
"""


def test_an_unmounted_replica_is_not_written(kit: Any, tmp_path: Path) -> None:
    """Nothing is below the mount point, whether it was unmounted under the process that copies or before that started; a restart
    reports it. Once mounted, it gets the rest. Deleted, it is made again once the run's note of it is deleted."""
    begun(tmp_path / "a")
    disk = Disk(tmp_path)
    uri = str(disk.home)
    kept = Kept(kit, tmp_path / "a", [uri], verify_every=1)
    kept.save(1)
    kept.until(lambda: bool(kept.of("replica_saved")))
    disk.unmount()
    kept.save(2)
    kept.replicas.close(60)
    assert list(disk.home.iterdir()) == []
    (note,) = kept.run.storage.files("mirrors")
    cause = f"its run's folder is gone; is its file system mounted? If it was deleted, delete {kept.run.uri}/{note} too"
    assert cause in kept.of("replica_failed")[0]["cause"]
    assert kept.of("checkpoint_damaged") == []
    begun(tmp_path / "a", 2, 2)
    command = [sys.executable, "-c", NEW_PROCESS, kept.run.uri, uri]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert cause in found.stdout
    events: list[Event] = []
    assert restore.choose_from(kept.run, [uri], on_event=events.append)
    assert [e.kind for e in events] == ["replica_failed"]
    disk.mount()  # it asserts that nothing was written below
    later = Kept(kit, tmp_path / "a", [uri], attempt=2)
    later.replicas.close(60)
    assert replica_of(kept.run, uri).committed() == [1, 2]
    shutil.rmtree(replica_of(kept.run, uri).uri)
    Path(kept.run.uri, note).unlink()
    anew = Kept(kit, tmp_path / "a", [uri], attempt=2)
    anew.replicas.close(60)
    assert replica_of(kept.run, uri).committed() == [1, 2]
    disk.unmount()


def test_nobody_waits_for_one_that_hangs(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits continue; the end of the run waits for a bounded time and reports it, and the next start copies the rest."""
    may_copy, copying = threading.Event(), threading.Event()
    copy = mirrors.copy
    monkeypatch.setattr(mirrors, "copy", lambda *a: (copying.set(), may_copy.wait(), copy(*a))[2])
    kept = Kept(kit, tmp_path / "a", [str(tmp_path / "second")])
    kept.save(1)
    assert copying.wait(240)
    kept.save(2)
    kept.replicas.close(0.05)
    (failed,) = kept.of("replica_failed")
    assert "still being copied 0.05 s after the end" in failed["cause"]
    monkeypatch.undo()
    again = Kept(kit, tmp_path / "a", [str(tmp_path / "second")])
    again.until(lambda: {e["step"] for e in again.of("replica_saved")} == {1, 2})
    again.replicas.close(60)
    assert replica_of(kept.run, str(tmp_path / "second")).committed() == [1, 2]
    may_copy.set()
    assert kept.replicas._copiers[0].over.wait(240)


def test_what_was_being_copied_goes_at_the_end(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that became due for deletion while a replica was reading it is deleted later."""
    may_copy, copying = threading.Event(), threading.Event()
    blocks = mirrors._blocks
    monkeypatch.setattr(mirrors, "_blocks", lambda *a: (copying.set(), may_copy.wait(), blocks(*a))[2])
    kept = Kept(kit, tmp_path / "a", [str(tmp_path / "second")], keep=1)
    kept.save(1)
    assert copying.wait(240)
    kept.save(2)
    assert kept.run.committed() == [1, 2]
    may_copy.set()
    kept.replicas.close(60)
    assert kept.run.committed() == [2]
    assert replica_of(kept.run, str(tmp_path / "second")).committed() == [2]


def test_what_is_bad_is_not_copied(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that changed at its source, and one that arrives changed, get no manifest."""
    one = kit.OneRank(tmp_path / "a")
    one.save(1)
    one.save(2)
    target = RunDir(tmp_path / "second" / "a")
    name = manifest_of = one.run.manifest(1)
    flip(shard(one.run, 1))
    with pytest.raises(CheckpointCorrupt, match=r"shard-.*its bytes are not those that were written"):
        mirrors.copy(one.run, target, 1, manifest_of)
    copy_shard = mirrors.copy_shard

    def damaged(*arguments: Any) -> None:
        copy_shard(*arguments)
        flip(shard(target, 2))

    monkeypatch.setattr(mirrors, "copy_shard", damaged)
    with pytest.raises(StorageError, match=r"not as it was copied: .*second"):
        mirrors.copy(one.run, target, 2, name)
    assert target.committed() == []
    monkeypatch.undo()
    mirrors.copy(one.run, target, 2, name)
    assert manifest.verify(target, 2) == []


def test_restored_from_a_replica(kit: Any, tmp_path: Path) -> None:
    """If corrupt in the run, the replica's is used, with events; if in both, the one before; if all is deleted, the replica's."""
    uri = str(tmp_path / "second")
    kept = Kept(kit, tmp_path / "a", [uri])
    for step in (10, 20):
        kept.save(step)
    kept.replicas.close(60)
    replica = replica_of(kept.run, uri)
    (tmp_path / "broken" / "a").mkdir(parents=True)
    (tmp_path / "broken" / "a" / "attempts").write_text("no folder, and so it cannot be listed")

    def chosen() -> tuple[str, int, list[str]]:
        events: list[Event] = []
        found = restore.choose_from(kept.run, [str(tmp_path / "broken"), uri], on_event=events.append)
        assert found is not None
        into = kit.empty()
        restore.load(*found, into, {})
        assert kit.same(into, kit.state(found[1].step))
        return found[0].uri, found[1].step, [e.kind for e in events]

    assert chosen() == (kept.run.uri, 20, ["replica_failed"])
    flip(shard(kept.run, 20))
    assert chosen() == (replica.uri, 20, ["replica_failed", "checkpoint_rejected", "replica_used"])
    flip(shard(replica, 20))
    assert chosen() == (kept.run.uri, 10, ["replica_failed", "checkpoint_rejected", "checkpoint_rejected"])
    shutil.rmtree(kept.run.uri)
    assert chosen() == (replica.uri, 10, ["replica_failed", "checkpoint_rejected", "replica_used"])
    flip(shard(replica, 10))
    with pytest.raises(CheckpointCorrupt, match="all checkpoints are damaged"):
        restore.choose_from(kept.run, [uri])


def test_a_replica_that_gives_no_answer_holds_up_no_start(
    kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replica is asked once, for a bounded time, and reported; the run's own checkpoint is used."""
    one = kit.OneRank(tmp_path / "a")
    one.save(10)
    one.save(20)
    flip(shard(one.run, 20))
    asked: list[str] = []
    never, lineage = threading.Event(), RunDir.lineage

    def hang(run: RunDir) -> Any:
        if "second" in run.uri:
            asked.append(run.uri)
            never.wait()
        return lineage(run)

    monkeypatch.setattr(RunDir, "lineage", hang)
    monkeypatch.setattr(mirrors, "LOOK_S", 0.05)
    events: list[Event] = []
    found = restore.choose_from(one.run, [str(tmp_path / "second")], on_event=events.append)
    assert found is not None
    assert (found[0].uri, found[1].step) == (one.run.uri, 10)
    assert [e.kind for e in events] == ["replica_failed", "checkpoint_rejected"]
    assert events[0].data["cause"] == "no answer in 0.05 s"
    assert len(asked) == 1
    assert newest_attempt(one.run, [str(tmp_path / "second")]) == 0
    never.set()


def test_a_run_whose_folder_was_lost_counts_on(kit: Any, tmp_path: Path) -> None:
    """The next attempt has a number above those that the replica knows, so its commits count there too."""
    uri = str(tmp_path / "second")
    for number, step in ((1, 0), (2, 10)):
        begun(tmp_path / "a", number, step)
    kept = Kept(kit, tmp_path / "a", [uri], attempt=2)
    kept.save(20)
    kept.replicas.close(60)
    shutil.rmtree(kept.run.uri)
    assert newest_attempt(kept.run, ["/dev/null/nowhere", uri]) == 2
    found = restore.choose_from(kept.run, [uri])
    assert found is not None
    restore.load(*found, kit.empty(), {})
    begun(tmp_path / "a", 3, 20)
    later = Kept(kit, tmp_path / "a", [uri], attempt=3)
    later.save(30)
    later.replicas.close(60)
    assert replica_of(kept.run, uri).committed() == [20, 30]


def test_a_replica_knows_what_is_void(kit: Any, tmp_path: Path) -> None:
    """Its own notes count where the run's are lost: a late commit of a superseded attempt is not restored from it."""
    uri = str(tmp_path / "second")
    begun(tmp_path / "a")
    one = kit.OneRank(tmp_path / "a")
    one.save(10)
    one.save(30)
    begun(tmp_path / "a", 2, 10)
    shutil.move(tmp_path / "a", tmp_path / "second" / "a")
    found = restore.choose_from(RunDir(tmp_path / "a"), [uri])
    assert found is not None
    assert found[1].step == 10


def test_what_is_void_counts_in_no_replica(kit: Any, tmp_path: Path) -> None:
    """After `--fresh` a replica's old checkpoints are not restored, even if the replica was unreachable at that time."""
    uri = str(tmp_path / "second")
    begun(tmp_path / "a")
    kept = Kept(kit, tmp_path / "a", [uri])
    kept.save(10)
    kept.replicas.close(60)
    start_anew(kept.run)
    assert replica_of(kept.run, uri).committed() == [10], "it has not heard of it"
    assert restore.choose_from(kept.run, [uri]) is None
    begun(tmp_path / "a", 3)
    anew = Kept(kit, tmp_path / "a", [uri], attempt=3)
    anew.save(5)
    anew.replicas.close(60)
    assert replica_of(kept.run, uri).committed() == [5]
    assert replica_of(kept.run, uri).storage.folders("checkpoints") == ["step-00000005"]


def test_a_cut_off_attempt_copies_nothing(kit: Any, tmp_path: Path) -> None:
    """Nor does it prune a replica that a newer attempt now manages."""
    begun(tmp_path / "a")
    kit.OneRank(tmp_path / "a").save(10)
    begin_attempt(RunDir(tmp_path / "a"), 2)
    kept = Kept(kit, tmp_path / "a", [str(tmp_path / "second")])
    kept.replicas.committed()
    kept.replicas.close(60)
    assert kept.events == []
    assert replica_of(kept.run, str(tmp_path / "second")).committed() == []


@pytest.mark.parametrize("bad", ["shard", "manifest", "replica"])
def test_old_checkpoints_are_verified_and_mended(kit: Any, tmp_path: Path, bad: str) -> None:
    """On every second commit: a flipped byte is reported, and repaired from the good copy, in either direction."""
    uri = str(tmp_path / "second")
    kept = Kept(kit, tmp_path / "a", [uri], verify_every=2)
    replica = replica_of(kept.run, uri)
    kept.save(1)
    kept.until(lambda: len(kept.of("replica_saved")) == 1)
    place, good = (replica, kept.run) if bad == "replica" else (kept.run, replica)
    file = Path(place.uri, manifest.path(1, "MANIFEST-0001.json")) if bad == "manifest" else shard(place, 1)
    flip(file)
    assert kept.of("checkpoint_damaged") == []
    kept.save(2)
    kept.until(lambda: bool(kept.of("checkpoint_damaged")))
    (damaged,) = kept.of("checkpoint_damaged")
    assert (damaged["step"], damaged["file"], damaged["mended_from"]) == (1, str(file), good.uri)
    assert [manifest.verify(p, 1) for p in (kept.run, replica)] == [[], []]
    kept.replicas.close(60)


def test_damage_without_a_replica_is_named(kit: Any, tmp_path: Path) -> None:
    """The event says that it could not be repaired, and training continues."""
    kept = Kept(kit, tmp_path / "a", [], verify_every=1)
    kept.one.save(1)
    flip(shard(kept.run, 1))
    kept.save(2)
    kept.until(lambda: bool(kept.of("checkpoint_damaged")))
    (damaged,) = kept.of("checkpoint_damaged")
    assert (damaged["step"], damaged["mended_from"]) == (1, None)
    assert "its bytes are not those that were written" in damaged["cause"]
    kept.replicas.close(0.0)


def test_a_replica_is_another_place(kit: Any, tmp_path: Path) -> None:
    """A replica in the run's own folder is refused."""
    with pytest.raises(UserError, match="holds the run itself"):
        replica_of(RunDir(tmp_path / "a"), str(tmp_path))


def choose(rank: Rank, run: str, uri: str) -> Any:
    """The place and step that a group of ranks agrees on."""
    events: list[Event] = []
    found = restore.choose_from(
        RunDir(run), [uri], rank=rank.rank, world_size=rank.world_size, group=rank.control, on_event=events.append
    )
    assert found is not None
    return found[0].uri, found[1].step, [e.kind for e in events]


def test_ranks_agree_on_the_place(ranks: Any, kit: Any, tmp_path: Path) -> None:
    """Three ranks that share the reading use the replica together, and only rank 0 reports it."""
    uri = str(tmp_path / "second")
    kept = Kept(kit, tmp_path / "a", [uri])
    kept.save(10)
    kept.replicas.close(60)
    flip(shard(kept.run, 10))
    found = ranks.run(choose, 3, kept.run.uri, uri)
    place = (replica_of(kept.run, uri).uri, 10)
    assert found == [(*place, ["checkpoint_rejected", "replica_used"]), (*place, []), (*place, [])]
