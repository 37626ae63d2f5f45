"""Room for swap files on a node's disk: checked before training, by whoever runs on that node.

Runs anywhere: the driver's node check and each train worker. Imports nothing but the errors: no torch, no ray.
"""

from __future__ import annotations

import os

from raydist.errors import UserError


def check(path: str, nbytes: int) -> None:
    """That the folder `path` is there, can be written, and has room for `nbytes`: those of all ranks of this node.

    Raises UserError, which names the path, the bytes that are needed and those that are free.
    """
    where = f"offload.path: {path}"
    if not os.path.isdir(path):
        what = "is no folder" if os.path.exists(path) else "is not there"
        raise UserError(f"{where} {what}", "make it on every node, on a fast local disk, or name another folder")
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=effective):
        raise UserError(f"{where} cannot be written by user {os.geteuid()}", "change its mode, or name another folder")
    if free(path) < nbytes:
        raise no_room(path, nbytes)


def free(path: str) -> int:
    """Bytes that a user without privileges may still write to the file system of `path`."""
    room = os.statvfs(path)
    return room.f_bavail * room.f_frsize


def no_room(path: str, nbytes: int) -> UserError:
    """The error for a disk that is too small."""
    return UserError(
        f"offload.path: {path} has no room for the optimizer's state: {nbytes:,} bytes are needed "
        f"({nbytes / 2**30:.1f} GiB), {free(path):,} are free",
        "free some space, name a folder on a larger disk, or spread the job over more nodes",
    )
