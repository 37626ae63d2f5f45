"""The folder of a memory store in a node's shared memory: its name, its locks, and the names of its files.

Runs anywhere. Plain python, no torch: ranks write here, the nodes' MemoryStore actors (cluster/run/memory_store.py) read and
send.

    /dev/shm/raydist-<uid>-<token>/         mode 0700
        lock                                shared: held by each process that uses the folder; exclusive: to remove it
        bell                                a socket: ranks report here which files they have written
        sent                                the node's MemoryStore writes here how much of them its buddy has, if there is one
        .tmp-slot-00001-of-00004-...        memory that a rank copies into
        checkpoints/step-00000057/          shards and a manifest, as on storage
        buddy/checkpoints/step-00000057/    copies of another node's files

The files outlive the rank that wrote them, not the machine. A shard has its hash in its name: the receiver of a copy checks it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from raydist.checkpoint.manifest import Manifest
from raydist.private_files import is_private_folder, open_private

SHM = Path("/dev/shm")
LOCK, BELL, BUDDY, SENT = "lock", "bell", "buddy", "sent"
SHARED = "vault_shared"
"""A key of a snapshot's plain state: the tensors that every rank holds whole. A rank may need any other rank's shard for them."""
PEERS = "vault_peers"
"""The same: groups of ranks that hold the same bits of some other tensor. A rank may need the shard of any rank of its groups."""
_PREFIX = "raydist-{uid}-"
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)-(\d+)-([0-9a-f]{32})\.bin")
_READ_BYTES = 8 << 20
MESSAGE_ROOM = 16 << 20
"""Free bytes of shared memory without which nodes send no piece of a copy, of 8 MiB. Ray puts it there on both nodes, and where
there is no room Ray's raylet ends by SIGBUS: the whole node would be lost. The other 8 are for the file in which it arrives."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The content of a shard's name."""

    rank: int
    world_size: int
    attempt: int
    xxh3: str

    @property
    def name(self) -> str:
        """The file's name."""
        return f"shard-{self.rank:05d}-of-{self.world_size:05d}-{self.attempt:04d}-{self.xxh3}.bin"

    @classmethod
    def parse(cls, name: str) -> Shard | None:
        """The inverse of `name`; None for the name of any other file."""
        match = _SHARD.fullmatch(name)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None


def new_folder() -> str:
    """A path that no other run has, for all nodes of this run. Creates nothing."""
    return str(SHM / (_PREFIX.format(uid=os.geteuid()) + secrets.token_hex(8)))


class Use:
    """Marks the folder as used by this process, and creates it if it does not exist. Raises OSError if that fails.

    While any process has one, `remove_unused` and cleaners do not touch the folder.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        while True:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            if not is_private_folder(self.folder):
                if not os.path.lexists(self.folder):
                    continue  # another process has just removed it
                raise PermissionError(f"{folder} is not a folder of user {os.geteuid()}, or others may write to it")
            lock = self.folder / LOCK
            try:
                self._lock = open_private(lock, os.O_RDWR | os.O_CREAT)
            except FileNotFoundError:
                continue  # another process has just removed it
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            try:
                if os.path.samestat(os.fstat(self._lock), os.stat(lock)):
                    return
            except FileNotFoundError:
                pass
            os.close(self._lock)

    def close(self) -> None:
        """This process no longer uses the folder."""
        os.close(self._lock)


def remove_unused() -> None:
    """Removes this user's memory stores on this node that no process uses: their run and their cleaner were killed."""
    for lock in SHM.glob(f"{_PREFIX.format(uid=os.geteuid())}*/{LOCK}"):
        remove(lock.parent, wait=False)


def remove(folder: Path, wait: bool) -> bool:
    """Removes a memory store once no process uses it, or (`wait` False) only if none does now; whether it is gone."""
    try:
        if not is_private_folder(folder):
            return not os.path.lexists(folder)
        with os.fdopen(open_private(folder / LOCK, os.O_WRONLY | os.O_CREAT), "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        return True
    except OSError:  # a process uses it
        return False
    return True


def needs(found: Manifest, rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """(shards that every rank reads, shards that `rank` also reads) of a snapshot. From another world size: (all shards, none)."""
    if found.world_size != world_size:
        return set(found.files), set()
    peers = peers_of(found.plain[PEERS]).get(rank, {rank})
    mine = {n for n in found.files if (shard := Shard.parse(n)) is not None and shard.rank in peers}
    shared = shared_files(found)
    return shared, mine - shared


def peers_of(groups: Iterable[Sequence[int]]) -> dict[int, set[int]]:
    """Rank -> all ranks of the groups that it is in. A rank may be in several: different tensors have different holders."""
    found: dict[int, set[int]] = {}
    for group in groups:
        for rank in group:
            found.setdefault(rank, set()).update(group)
    return found


def shared_files(found: Manifest) -> set[str]:
    """The shards of a snapshot that every rank reads, at the world size that took it."""
    return {chunk.file for name in found.plain[SHARED] for chunk in found.tensors[name].chunks}


def ring(folder: Path, **what: Any) -> None:
    """Tells the node's MemoryStore which file has been written, if it runs. Never waits."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(json.dumps(what).encode(), str(folder / BELL))


def tell_sent(folder: Path, step: int, attempt: int) -> None:
    """Notes that this process, the node's MemoryStore, has sent all of its ranks' shards of that snapshot; (0, 0): of none yet."""
    part = folder / f"{SENT}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "snapshot": [step, attempt]}))
    part.rename(folder / SENT)


def sent(folder: Path) -> tuple[tuple[int, int], float] | None:
    """((step, attempt) of the last snapshot sent to the buddy, seconds of processor time that the node's MemoryStore has taken in
    all); None without a buddy or a MemoryStore.
    """
    import psutil

    with contextlib.suppress(OSError, psutil.Error):
        sent = json.loads((folder / SENT).read_text())
        times = psutil.Process(sent["pid"]).cpu_times()
        step, attempt = sent["snapshot"]
        return (step, attempt), times.user + times.system
    return None


def digest(path: Path) -> str:
    """The xxh3-128 of a file, in hex."""
    hasher = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_READ_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def files(folder: Path) -> Iterator[Path]:
    """All files below a folder of a memory store. Other processes write meanwhile: new and deleted files may be listed or not.

    Path.glob would raise FileNotFoundError if a folder is removed while it looks.
    """
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def room(folder: Path) -> tuple[int, int, int]:
    """(free bytes of this node's shared memory, available bytes of its memory, bytes that this memory store already has)."""
    import psutil

    space = os.statvfs(folder)
    held = {}
    for path in files(folder):
        with contextlib.suppress(FileNotFoundError):  # ranks write meanwhile
            facts = path.stat()
            held[facts.st_ino] = facts.st_blocks * 512
    return space.f_bavail * space.f_frsize, int(psutil.virtual_memory().available), sum(held.values())


def node() -> tuple[str, int]:
    """Equal for two processes if and only if they see the same shared memory."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, SHM.stat().st_dev


def no_room(needed: Mapping[str, int], shm: int, memory: int) -> str | None:
    """Why copies of so many bytes do not fit on a node, or None. `needed`: purpose -> bytes."""
    total = sum(needed.values())
    parts = " and ".join(f"{nbytes / 2**30:.2f} GiB for {what}" for what, nbytes in needed.items() if nbytes)
    if total > shm:
        return (
            f"copies in memory take {parts} a node, and {SHM} has {shm / 2**30:.2f} GiB free; make it larger "
            f"(of a container: --shm-size), or set recovery.snapshot_every: null"
        )
    if total > memory:
        return (
            f"copies in memory take {parts} a node, which has {memory / 2**30:.2f} GiB of memory to spare; "
            f"set recovery.snapshot_every: null, or spread the job over more nodes"
        )
    return None
