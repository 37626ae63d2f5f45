"""Which dashboards of this user run on this host, so that `raydist train` can name the page of its run.

Runs in: the user's processes. Each dashboard has a file in the user's cache folder, for this user alone; the token is not in it.
Must stay light: `raydist train` imports it.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import quote

from raydist.parsing import LINE_BYTES, parse_json
from raydist.paths import cache_folder
from raydist.private_files import make_private_folder, open_private
from raydist.run.directory import RunDir
from raydist.run.driver_process import gone, this_process
from raydist.storage import Storage


@contextmanager
def announced(homes: Sequence[Storage], address: str) -> Iterator[None]:
    """Meanwhile `link` finds this process's dashboard over these storages. Without a cache folder it is not found, and works."""
    path = cache_folder() / "dashboards" / f"{os.getpid()}.json"
    entry = {"address": address, "storages": [home.uri for home in homes], "process": this_process()}
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(path.parent)
        with open(open_private(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), "wb") as file:
            file.write(json.dumps(entry).encode())
    except OSError:
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def link(run: RunDir) -> str | None:
    """The address of that run's page, for a browser that has opened the dashboard; None if no dashboard shows its storage."""
    home = run.home.uri
    for path in sorted((cache_folder() / "dashboards").glob("*.json")):
        try:
            with open(open_private(path), "rb") as file:
                entry = parse_json(file.read(LINE_BYTES), LINE_BYTES)
            process, storages = entry["process"], list(entry["storages"])
            if process["host"] != socket.gethostname():
                continue  # a home folder that several hosts share: its 127.0.0.1 is another one
            if gone(process):
                path.unlink(missing_ok=True)
            elif home in storages:
                return f"{entry['address']}/run/{storages.index(home)}/{quote(run.name, safe='')}"
        except (OSError, ValueError, KeyError, TypeError):
            continue  # it is being written, or ends
    return None
