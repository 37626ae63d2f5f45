"""A memory store's folder in a node's shared memory: its name, who may remove it, and how the names of its files tell their
content.

Runs anywhere. Plain python, no torch: ranks write here, the nodes' MemoryStore actors (cluster/run/memory_checkpoints.py) read and
send.

    /dev/shm/raydist-<uid>-<token>/         mode 0700
        lock                                held (shared) by everyone who uses the folder; who has it alone may remove it
        bell                                a socket: ranks say here what they have written
        sent                                the node's MemoryStore says here how much of that its buddy has; not where it has none
        .tmp-slot-00001-of-00004-...        memory that a rank copies into
        checkpoints/step-00000057/          shards and a manifest, as on storage
        buddy/checkpoints/step-00000057/    those of another node

The files outlive the rank that wrote them, not the machine. A shard has its hash in its name, so that whoever copies it knows what
should arrive.
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
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from raydist.checkpoint.manifest import Manifest

SHM = Path("/dev/shm")
LOCK, BELL, BUDDY, SENT = "lock", "bell", "buddy", "sent"
SHARED = "vault_shared"
"""In a snapshot's plain state: the tensors of which a rank may need a part of any other rank's shard."""
PEERS = "vault_peers"
"""There too: groups of ranks that hold the same boxes of sharded tensors, each of which one of them saves. [] if none do."""
_PREFIX = "raydist-{uid}-"
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)-(\d+)-([0-9a-f]{32})\.bin")
_READ_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Shard:
    """What a shard's name says."""

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
        """The inverse of `name`; None for any other file's."""
        match = _SHARD.fullmatch(name)
        return cls(int(match[1]), int(match[2]), int(match[3]), match[4]) if match else None


def new_folder() -> str:
    """A path that no other run has, for all nodes of this one. Makes nothing."""
    return str(SHM / (_PREFIX.format(uid=os.geteuid()) + secrets.token_hex(8)))


class Use:
    """The folder, made if need be, for as long as this process uses it. Raises OSError where it cannot be.

    While anybody has one, `remove_unused` and cleaners leave the folder alone.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        while True:
            with contextlib.suppress(FileExistsError):
                self.folder.mkdir(mode=0o700)
            facts = self.folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                raise PermissionError(f"{folder} is not a folder of user {os.geteuid()}")
            lock = self.folder / LOCK
            try:
                self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # it was removed in between
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            try:
                if os.path.samestat(os.fstat(self._lock), os.stat(lock)):
                    return
            except FileNotFoundError:
                pass
            os.close(self._lock)

    def close(self) -> None:
        """This process uses it no more."""
        os.close(self._lock)


def remove_unused() -> None:
    """Removes the memory stores of this user on this node that nobody uses: their run was killed, and so was their cleaner."""
    for lock in SHM.glob(f"{_PREFIX.format(uid=os.geteuid())}*/{LOCK}"):
        remove(lock.parent, wait=False)


def remove(folder: Path, wait: bool) -> bool:
    """Removes a memory store once nobody uses it, or (`wait` False) if nobody does; whether it is gone."""
    try:
        with (folder / LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:
        return True
    except OSError:  # somebody uses it
        return False
    return True


def needs(found: Manifest, rank: int, world_size: int) -> tuple[set[str], set[str]]:
    """(shards that every rank reads, those that `rank` reads besides) of a snapshot: its own, if as many ranks took it."""
    if found.world_size != world_size:
        return set(found.files), set()
    peers = next((p for p in found.plain[PEERS] if rank in p), [rank])
    mine = {n for n in found.files if (shard := Shard.parse(n)) is not None and shard.rank in peers}
    shared = shared_files(found)
    return shared, mine - shared


def shared_files(found: Manifest) -> set[str]:
    """The shards of a snapshot that every rank reads, if as many ranks as took it go on from it."""
    return {chunk.file for name in found.plain[SHARED] for chunk in found.tensors[name].chunks}


def ring(folder: Path, **what: Any) -> None:
    """Tells the node's MemoryStore what has been written, if it is there. Never waits."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(json.dumps(what).encode(), str(folder / BELL))


def tell_sent(folder: Path, step: int, attempt: int) -> None:
    """This process, the node's MemoryStore, has sent all of its ranks' shards of that snapshot; (0, 0): of none yet."""
    part = folder / f"{SENT}.part"
    part.write_text(json.dumps({"pid": os.getpid(), "snapshot": [step, attempt]}))
    part.rename(folder / SENT)


def sent(folder: Path) -> tuple[tuple[int, int], float] | None:
    """((step, attempt) that the buddy was sent last, seconds of processor time that the node's MemoryStore has taken in all); None
    where there is no buddy, or no MemoryStore.
    """
    import psutil

    with contextlib.suppress(OSError, psutil.Error):
        told = json.loads((folder / SENT).read_text())
        times = psutil.Process(told["pid"]).cpu_times()
        step, attempt = told["snapshot"]
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
    """All below a folder of a memory store. Others write meanwhile: a file that comes or goes may be among them or not.

    Not by Path.glob, which raises FileNotFoundError where a folder goes while it looks.
    """
    for place, _, names in os.walk(folder):
        yield from (Path(place, name) for name in names)


def room(folder: Path) -> tuple[int, int, int]:
    """(bytes free in shared memory here, bytes of memory that this node has to spare, bytes that this memory store holds
    already)."""
    import psutil

    space = os.statvfs(folder)
    held = {}
    for path in files(folder):
        with contextlib.suppress(FileNotFoundError):  # others write meanwhile
            facts = path.stat()
            held[facts.st_ino] = facts.st_blocks * 512
    return space.f_bavail * space.f_frsize, int(psutil.virtual_memory().available), sum(held.values())


def node() -> tuple[str, int]:
    """The same for all processes that see the same shared memory, and for no others."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, SHM.stat().st_dev


def no_room(needed: Mapping[str, int], shm: int, memory: int) -> str | None:
    """Why copies of so many bytes do not fit on a node, or None. `needed`: what for -> bytes."""
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
