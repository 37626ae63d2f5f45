"""The files of a run where all users of a host may write, and what docs/explanation/security.md says of them.

As a command, on a host that has shared memory and a temporary folder of its own: prints `unexpected` of all that is there, except
what Ray's own node has, and of the run whose folder is given, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from stat import S_IFDIR, S_IFREG

import psutil

from raydist.checkpoint.memory_layout import SHM
from tests.sockets import DOCS

# As another user: makes what cleaning must not open, follow or delete. Arguments: shared memory, the temporary folder, the prefix
# of names in shared memory, and a folder of the run's user.
PLANT = """
import os, sys
shm, tmp, prefix, private = sys.argv[1:]
os.setgid(65534); os.setuid(65534)
os.umask(0)
token = f"{os.getpid():016x}"
made = []
def path(folder, name):
    made.append(os.path.join(folder, name))
    return made[-1]
os.mkfifo(path(shm, f"{prefix}journal-a{token}.jsonl"))
os.symlink(f"{private}/journal", path(shm, f"{prefix}journal-b{token}.jsonl"))
with open(path(shm, f"{prefix}journal-c{token}.jsonl"), "w") as file:
    file.write('{"driver": {}}\\n')
for folder, start in ((shm, prefix + "0"), (shm, f"{prefix}board-"), (tmp, "raydist-")):
    os.mkdir(path(folder, f"{start}{token[1:]}"))
    os.mkfifo(path(made[-1], "lock"))
    os.symlink(private, path(folder, f"{start}{token[1:]}-link"))
    with open(path(folder, f"{start}{token[1:]}-file"), "w") as file:
        file.write("mine")
print(*made, sep="\\n")
"""


@contextlib.contextmanager
def planted(tmp: Path, private: Path) -> Iterator[list[Path]]:
    """What another user has put where a run's start looks for files to delete, in `tmp` and in shared memory; deleted at the end.

    `private`: the folder of this user that links lead to.
    """
    private.mkdir()
    (private / "lock").touch()
    (private / "journal").write_text('{"driver": {}}\n')
    names = [str(SHM), str(tmp), f"raydist-{os.getuid()}-", str(private)]
    done = subprocess.run([sys.executable, "-c", PLANT, *names], capture_output=True, text=True, check=True)
    made = [Path(line) for line in done.stdout.splitlines()]
    try:
        yield made
    finally:
        for path in reversed(made):
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def facts(paths: Iterable[Path]) -> dict[Path, tuple[int, ...]]:
    """What changes if somebody writes to one of them, replaces it or changes its mode."""
    found = {path: path.lstat() for path in paths}
    return {path: (f.st_ino, f.st_mode, f.st_uid, f.st_size, f.st_mtime_ns) for path, f in found.items()}


def in_shared_memory(processes: Iterable[psutil.Process]) -> set[Path]:
    """The entries of shared memory that these processes have open or mapped, and that have a name."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):
            held = [os.readlink(each) for each in Path(f"/proc/{process.pid}/fd").iterdir()]
            held += re.findall(rf"{SHM}/.*", Path(f"/proc/{process.pid}/maps").read_text())
            found |= {SHM / Path(name).relative_to(SHM).parts[0] for name in held if name.startswith(f"{SHM}/")}
    return {path for path in found if os.path.lexists(path)}


def unexpected(paths: Iterable[Path], run: Path | None = None) -> list[str]:
    """Which of these are not as the page says: entries of shared memory, and of a temporary folder, which is /tmp on the page; and
    of all that is in the run's folder.
    """
    section = DOCS.read_text().split("| file or folder | mode | contents |\n|---|---|---|\n")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines()]
    modes = {name.replace("UID", str(os.getuid())): mode for name, mode, _ in rows}
    named = [(path, str(path) if path.parent == SHM else f"/tmp/{path.name}") for path in paths]
    if run is not None:
        named += [(path, "the run's folder, and all in it") for path in (run, *run.rglob("*"))]
    found = []
    for path, name in named:
        # The row that says most: a name may match two.
        matching = [row for row in modes if re.fullmatch(re.escape(row).replace(r"\*", "[^/]*"), name)]
        if not matching:
            found.append(f"{path} is not in {DOCS.name}")
            continue
        allowed = {
            S_IFREG | 0o600 if "06" in text else S_IFDIR | 0o700 for text in modes[max(matching, key=len)].split(",")
        }
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            there = path.lstat()
            if there.st_mode not in allowed or there.st_uid != os.getuid():
                found.append(f"{path} has mode {there.st_mode:o} and user {there.st_uid}: not as in {DOCS.name}")
    return found


if __name__ == "__main__":
    temporary = Path(tempfile.gettempdir())
    print(json.dumps(unexpected([*SHM.iterdir(), *temporary.glob("raydist-*")], Path(sys.argv[1]))))
