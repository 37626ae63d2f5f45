"""The nodes' memory stores on a real Ray: copies on a buddy, fetching missing files, and cleanup.

Two actors on one node stand for two nodes: each has its own folder, as two machines have.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import xxhash

from raydist.checkpoint import memory_layout
from raydist.checkpoint.manifest import FileEntry, Manifest
from raydist.checkpoint.memory_layout import PEERS, SHARED, Shard, Use
from raydist.cluster.run import memory_checkpoints
from raydist.cluster.run.memory_checkpoint_recovery import Copy, Fetch, Inventory
from raydist.cluster.run.memory_checkpoints import MemoryCheckpoints
from raydist.cluster.run.memory_store import PIECE_BYTES, MemoryStore, start_actor
from raydist.cluster.session import open_session, worker_environment
from raydist.run.directory import RunDir, begin_attempt, step_folder
from tests.needs import MAP_ROOT, require


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Starts Ray with one node; the node's id."""
    here = Path(__file__).parent
    with open_session(
        "local", env=worker_environment(), log_dir=tmp_path_factory.mktemp("logs"), python_path=[str(here.parents[1])]
    ):
        yield ray.get_runtime_context().get_node_id()


@pytest.fixture
def two(node: str) -> Iterator[list[tuple[Any, Path]]]:
    """Two memory stores, each the other's buddy: ranks 0 and 1 are on the first, 2 and 3 on the second."""
    folders = [memory_layout.new_folder() for _ in range(2)]
    memory_stores = [start_actor(folder, node) for folder in folders]
    link(memory_stores)
    yield [(memory_store, Path(folder)) for memory_store, folder in zip(memory_stores, folders, strict=True)]
    for memory_store in memory_stores:
        ray.kill(memory_store)
    until(lambda: not any(os.path.exists(f) for f in folders))


def link(memory_stores: list[Any]) -> None:
    ray.get([v.link.remote(v, memory_stores[1 - i], [2 * i, 2 * i + 1], 4) for i, v in enumerate(memory_stores)])


def until(true: Callable[[], Any], timeout_s: float = 240.0) -> Any:
    """Waits for something that another process does."""
    deadline = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.02)
    return found


def write(folder: Path, step: int, rank: int, kept: int | None, size: int = 1000) -> str:
    """What a rank does when its shard is complete."""
    content = f"{rank}/{step}/".encode() * (size // 5)
    name = Shard(rank, 4, 1, xxhash.xxh3_128_hexdigest(content)).name
    place = folder / step_folder(step)
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(content)
    memory_layout.ring(folder, step=step, name=name, kept=kept)
    return name


def commit(folders: list[Path], step: int, names: list[str]) -> None:
    """What rank 0 does, and what all ranks report then."""
    files = {n: FileEntry(0, "") for n in names}
    made = Manifest(step, 4, 1, 0.0, "", files, {}, {SHARED: [], PEERS: []})
    (folders[0] / step_folder(step) / "MANIFEST-0001.json").write_bytes(made.dumps())
    memory_layout.ring(folders[0], step=step, name="MANIFEST-0001.json", kept=step)
    for name in names:
        shard = Shard.parse(name)
        assert shard is not None
        memory_layout.ring(folders[shard.rank // 2], step=step, name=name, kept=step)


def shards(folder: Path, step: int) -> set[str]:
    return {p.name for p in (folder / "buddy" / step_folder(step)).glob("[!.]*")}


def test_each_keeps_the_others_two_newest(two: list[tuple[Any, Path]]) -> None:
    """Shards are sent to the buddy as soon as they are complete, also in several pieces; the manifest when it exists. Older files
    are deleted. Each store reports which files the other has."""
    folders = [folder for _, folder in two]
    for step in (1, 2, 3):
        size = 2 * PIECE_BYTES if step == 3 else 1000
        names = [write(folders[r // 2], step, r, step - 1 or None, size) for r in range(4)]
        until(lambda names=names, step=step: shards(folders[0], step) == set(names[2:]))  # type: ignore[misc]
        assert (told := memory_layout.sent(folders[0])) is not None
        assert told[1] > 0
        commit(folders, step, names)
        until(lambda names=names, step=step: shards(folders[1], step) == {*names[:2], "MANIFEST-0001.json"})  # type: ignore[misc]
        until(lambda step=step: memory_layout.sent(folders[0])[0] == memory_layout.sent(folders[1])[0] == (step, 1))  # type: ignore[misc, index]
    until(lambda: not shards(folders[1], 1) and not shards(folders[1], 2))
    for rank, folder in ((0, folders[1]), (3, folders[0])):
        (copied,) = (folder / "buddy" / step_folder(3)).glob(f"shard-{rank:05d}-*")
        shard = Shard.parse(copied.name)
        assert shard is not None
        assert copied.stat().st_size > PIECE_BYTES
        assert memory_layout.digest(copied) == shard.xxh3
    inventory = ray.get(two[1][0].inventory.remote())
    assert {name for step, name in inventory.files if step == 3} == set(names[2:])
    assert {name for step, name in inventory.buddy if step == 3} == set(names[:2])
    assert [c.step for c in inventory.copies] == [3]


def test_a_store_with_old_numbers_removes_nothing_of_this_attempt(two: list[tuple[Any, Path]]) -> None:
    """Its ranks have other numbers since a lost node, and it is told that after the order to train. It removes files of ranks that
    are not its own once there is a newer copy, but none that this attempt may still need."""
    (_, folder), (_, buddy) = two
    old = folder / step_folder(5) / Shard(3, 4, 1, f"{0:032x}").name
    mine = folder / step_folder(6) / Shard(2, 3, 2, f"{1:032x}").name
    newest = folder / step_folder(7) / Shard(2, 3, 2, f"{2:032x}").name
    for path in (old, mine, newest):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"1")
    memory_layout.ring(folder, step=7, name=newest.name, kept=7)
    until(lambda: not old.exists())
    name = write(folder, 8, 0, None)
    until(lambda: shards(buddy, 8) == {name})  # all files of the call before have been looked at
    assert mine.exists()


def test_a_node_fetches_what_it_lacks(two: list[tuple[Any, Path]], node: str) -> None:
    """A new node fetches from another node's memory, checks hashes, and sends its own ranks' files to its buddy. A damaged file
    is reported and not stored."""
    folders = [folder for _, folder in two]
    names = [write(folders[r // 2], 5, r, None) for r in range(4)]
    until(lambda: shards(folders[0], 5) == set(names[2:]))
    new = memory_layout.new_folder()
    memory_store = start_actor(new, node)
    ray.get(memory_store.link.remote(memory_store, two[0][0], [0], 4))
    sources = {"a": two[0][0], "b": two[1][0]}
    wanted = [Fetch(names[2], 1, "a"), Fetch(names[0], 1, "a"), Fetch(names[3], 1, "b")]
    assert ray.get(memory_store.fetch.remote(5, wanted, sources)) == []
    assert {p.name for p in (Path(new) / step_folder(5)).iterdir()} == {names[0], names[2], names[3]}
    until(lambda: shards(folders[0], 5) == {names[0], *names[2:]})
    (folders[0] / step_folder(5) / names[1]).write_bytes(b"x")
    (problem,) = ray.get(memory_store.fetch.remote(5, [Fetch(names[1], 1, "a"), Fetch("gone", 1, "a")][:1], sources))
    assert "hash" in problem
    assert not (Path(new) / step_folder(5) / names[1]).exists()
    # Its own buddy's files need no copy.
    assert ray.get(two[0][0].fetch.remote(5, [Fetch(names[2], 1, "a")], {})) == []
    assert (folders[0] / step_folder(5) / names[2]).stat().st_nlink == 2
    ray.kill(memory_store)
    until(lambda: not os.path.exists(new))


def test_a_killed_memory_store_comes_back(two: list[tuple[Any, Path]]) -> None:
    """SIGKILL of the actor: the folder stays while a rank uses it, and files written in the meantime are sent after the
    restart."""
    (memory_store, folder), (_, other) = two
    rank = Use(str(folder))
    pid = ray.get(memory_store.__ray_call__.remote(lambda self: os.getpid()))
    os.kill(pid, signal.SIGKILL)
    name = write(folder, 7, 0, None)

    def back() -> bool:
        try:
            return bool(ray.get(memory_store.__ray_call__.remote(lambda self: os.getpid()), timeout=10) != pid)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return False

    until(back)
    assert (folder / step_folder(7) / name).exists()
    link([v for v, _ in two])
    until(lambda: shards(other, 7) == {name})
    rank.close()


def test_a_killed_memory_store_learns_its_ranks_again(
    node: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells a memory store its ranks and buddy once, and again after Ray has restarted it."""
    monkeypatch.setattr(memory_checkpoints, "_LINK_S", 0.1)
    found = MemoryCheckpoints(RunDir(tmp_path), private=False, note=pytest.fail)
    found.job(1, {0: node, 1: node})
    memory_store = found._nodes[node]

    def known() -> tuple[int, set[int]]:
        try:
            return ray.get(memory_store.__ray_call__.remote(lambda self: (os.getpid(), {*self._ranks})), timeout=10)  # type: ignore[no-any-return]
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return 0, set()

    pid = until(lambda: (now := known())[1] == {0, 1} and now[0])
    os.kill(pid, signal.SIGKILL)
    until(lambda: (now := known())[0] not in (0, pid) and now[1] == {0, 1})
    found.close()
    until(lambda: not os.path.exists(found.folder))


class Nodes:
    """The memory stores of nodes with a rank each, as the driver sees them: `job` says what each of their calls was."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        begin_attempt(RunDir(tmp_path), 1)
        self.there: dict[str, Inventory] = {}
        self.calls: list[tuple[str, str]] = []
        self.problem = ""
        self.linked: list[tuple[str, Any, int]] = []

        def start(folder: str, node: str) -> SimpleNamespace:
            def link(me: Any, buddy: Any, ranks: Any, world_size: int) -> None:
                self.linked.append((node, ranks, world_size))

            return SimpleNamespace(link=SimpleNamespace(remote=link), closed=SimpleNamespace(remote=object))

        monkeypatch.setattr(memory_checkpoints, "start_actor", start)
        self.found = MemoryCheckpoints(RunDir(tmp_path), private=True, note=lambda text: None)
        self.found._private = False
        monkeypatch.setattr(self.found, "_alive", lambda: {*self.there})
        monkeypatch.setattr(self.found, "_ask", self._ask)
        monkeypatch.setattr(self.found, "_leave", lambda nodes: None)
        monkeypatch.setattr(self.found, "_restarted", lambda: None)

    def _ask(self, calls: Any, timeout_s: float) -> dict[str, Any]:
        self.calls += [(method, node) for node, (method, _) in sorted(calls.items())]
        if any(method == "fetch" for method, _ in calls.values()):
            problem, self.problem = self.problem, ""
            return {node: [problem] if problem else [] for node in calls}
        return {node: self.there[node] for node in calls if node in self.there}

    def save(self, step: int, attempt: int, nodes: str) -> None:
        """The ranks of these nodes take a copy, which the next one in the ring keeps, too."""
        names = [Shard(r, len(nodes), attempt, f"{step:032x}").name for r in range(len(nodes))]
        made = Copy(step, attempt, f"MANIFEST-{attempt:04d}.json", len(nodes), dict.fromkeys(names, 1), frozenset())
        for r, node in enumerate(nodes):
            copies = [made] if r < 2 else []
            self.there[node] = Inventory({(step, names[r]): 1}, copies, {(step, names[r - 1]): 1})

    def job(self, attempt: int, nodes: str, gone: str = "") -> tuple[Any, list[tuple[str, str]]]:
        self.calls.clear()
        return self.found.job(attempt, dict(enumerate(nodes)), gone)["step"], [*self.calls]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Five nodes, whose ranks took a copy in attempt 1."""
    made = Nodes(tmp_path, monkeypatch)
    made.job(1, "abcde")
    made.save(20, 1, "abcde")
    return made


def test_few_nodes_are_asked(nodes: Nodes) -> None:
    """Of a node that trained in the last attempt the driver knows what it has. It asks the node of rank 0 and its buddy, which have
    the manifest, and again when the next attempt has taken a copy, or none."""
    asked = [("inventory", "a"), ("inventory", "b"), ("fetch", "a")]
    assert nodes.job(2, "abcde") == (20, asked)
    assert nodes.job(3, "abcde") == (20, asked)
    nodes.save(30, 3, "abcde")
    assert nodes.job(4, "abcde") == (30, asked)


def test_the_buddy_of_a_lost_node_is_asked(nodes: Nodes) -> None:
    """And the node that has its ranks now, which fetches their files. A node that Ray still lists, and that does not answer, is not
    asked: a restart would wait for it."""
    nodes.there["x"] = Inventory()
    step, calls = nodes.job(2, "abxde", gone="c")
    assert step == 20
    assert calls == [("inventory", n) for n in "abdx"] + [("fetch", "a"), ("fetch", "x")]


def test_new_buddies_are_told_at_once_and_new_numbers_later(nodes: Nodes) -> None:
    """After a lost node: which node has its files copied by another one than before is told before the order to train, as are those
    that are asked something; those whose ranks only have other numbers are told after it."""
    nodes.there["f"] = Inventory()
    nodes.job(2, "abcdef")
    nodes.save(30, 2, "abcdef")
    nodes.linked.clear()
    step, calls = nodes.job(3, "abcef", gone="d")
    assert (step, calls) == (30, [*(("inventory", n) for n in "abe"), ("fetch", "a")])
    assert nodes.linked == [("c", [2], 5)]
    nodes.found._link()
    assert nodes.linked == [("c", [2], 5), ("f", [4], 5)]


def test_a_node_whose_memory_store_was_killed_is_asked(nodes: Nodes) -> None:
    """Its files may have been removed: then they come from its buddy."""
    nodes.found._killed.add("c")
    nodes.there["c"] = Inventory()
    step, calls = nodes.job(2, "abcde")
    assert step == 20
    assert calls == [("inventory", n) for n in "abcd"] + [("fetch", "a"), ("fetch", "c")]
    assert nodes.job(3, "abcde")[1][:3] == [("inventory", "a"), ("inventory", "b"), ("fetch", "a")]


def test_all_are_asked_if_that_does_not_suffice(nodes: Nodes) -> None:
    """No copy is known, or it is of another attempt than the last one, or a node cannot fetch a file: all others are asked, too."""
    rest = [("inventory", n) for n in "cde"]
    first = [("inventory", "a"), ("inventory", "b")]
    nodes.problem = "no such file"
    assert nodes.job(2, "abcde") == (20, [*first, ("fetch", "a"), *rest, ("fetch", "a")])
    nodes.save(30, 1, "abcde")
    assert nodes.job(3, "abcde") == (30, [*first, *rest, ("fetch", "a")])
    nodes.there = dict.fromkeys("abcde", Inventory())
    assert nodes.job(4, "abcde") == (None, [*first, *rest])


FULL_SHM = """
import os
from pathlib import Path
from raydist.checkpoint import memory_layout
from raydist.cluster.run.memory_checkpoint_recovery import Fetch
from raydist.cluster.run.memory_store import MemoryStore
from raydist.run.directory import step_folder

store = MemoryStore(memory_layout.new_folder())
file = store._folder / step_folder(1) / "file"
file.parent.mkdir(parents=True)
file.write_bytes(b"1")
full = Path("/dev/shm/full")
for size in (1, 10, 1):
    full.write_bytes(bytes(size << 20))
    try:
        print(store.read(1, "file", 0))
    except OSError as error:
        print(error)
    (told,) = store.fetch(1, [Fetch("other", 1, "a")], {"a": None})
    print(told)
store.close()
"""


def test_no_piece_is_sent_into_a_full_shared_memory() -> None:
    """In a mount namespace with 24 MiB in /dev/shm: a file is neither served nor asked for where Ray would put it into shared
    memory that is nearly full, because that ends Ray's raylet."""
    require("util-linux")
    mounted = 'mount -t tmpfs -o size=24m,mode=1777 tmpfs /dev/shm && exec "$@"'
    command = ["unshare", "--mount", *MAP_ROOT, "sh", "-c", mounted, "sh", sys.executable, "-c", FULL_SHM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    full = "[Errno 28] 13 MiB are free, 16 are needed: '/dev/shm'"
    asked = "other: AttributeError: 'NoneType' object has no attribute 'read'"
    assert done.stdout.splitlines() == ["b'1'", asked, full, f"other: OSError: {full}", "b'1'", asked]


def test_what_killed_runs_left_goes(tmp_path: Path) -> None:
    """The cleaner of a killed memory store deletes its folder, but not before the last rank has exited. If the cleaner was killed
    too, the next memory store deletes it."""
    folder = memory_layout.new_folder()
    code = "import sys, time\nfrom raydist.cluster.run.memory_store import MemoryStore\n"
    code += f"MemoryStore({folder!r})\nprint(flush=True)\ntime.sleep(100)"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    rank = Use(folder)
    process.kill()
    process.communicate()
    assert not memory_layout.remove(Path(folder), wait=False)
    memory_layout.remove_unused()
    assert os.path.exists(folder), "a rank uses it"
    rank.close()
    until(lambda: not os.path.exists(folder))
    left = Use(memory_layout.new_folder())
    (left.folder / "checkpoints").mkdir()
    left.close()
    MemoryStore(memory_layout.new_folder()).close()
    assert not left.folder.exists()
