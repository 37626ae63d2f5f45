"""Checks the free space for swap files on a node's disk, before training, on that node.

Runs anywhere: in the driver's node check and in each train worker. Imports only the errors: no torch, no ray.
"""

from __future__ import annotations

import os
import shutil

from raydist.errors import UserError


def check(path: str, nbytes: int) -> None:
    """Checks that the folder `path` exists, is writable, and has `nbytes` free: the bytes of all ranks of this node.

    Raises UserError, which names the path, the needed bytes and the free bytes.
    """
    where = f"offload.path: {path}"
    if not os.path.isdir(path):
        what = "is not a folder" if os.path.exists(path) else "does not exist"
        raise UserError(f"{where} {what}", "create it on every node, on a fast local disk, or name another folder")
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=effective):
        raise UserError(f"{where} cannot be written by user {os.geteuid()}", "change its mode, or name another folder")
    if shutil.disk_usage(path).free < nbytes:
        raise no_room(path, nbytes)


def no_room(path: str, nbytes: int) -> UserError:
    """The error for a disk that is too small."""
    return UserError(
        f"offload.path: {path} has no room for the optimizer's state: {nbytes:,} bytes are needed "
        f"({nbytes / 2**30:.1f} GiB), {shutil.disk_usage(path).free:,} are free",
        "free some space, name a folder on a larger disk, or spread the job over more nodes",
    )
