"""A program: saves a checkpoint in child processes that die at the n-th storage operation, for every n.

Arguments: a folder, and `kill` (SIGKILL: written data stays in the page cache) or `power` (everything that was not flushed is
lost: contents, renames and new folders; deletions are kept). Prints the state found after each death as JSON.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from raydist import storage
from raydist.checkpoint import manifest
from raydist.run.directory import RunDir, begin_attempt, resume_attempt
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.save import Saver


def state(step: int) -> dict[str, torch.Tensor]:
    return {"model/a": torch.arange(30_000.0) + step, "model/b": torch.full((3, 5), step)}


def save(root: Path, step: int) -> bool:
    """Attempt `step` resumes from the step before, and keeps one checkpoint: the commit of the second prunes the first."""
    run = RunDir(root)
    begin_attempt(run, step)
    resume_attempt(run, step, max(run.committed(), default=0))
    saver = Saver(
        run, rank=0, world_size=1, group=None, asynchronous=False, keep=1, attempt=step, spec_hash="",
        numbers={}, on_event=lambda event: None,
    )  # fmt: skip
    saver.start(step, state(step), {}, {"step": step})
    done = bool(saver.wait())
    saver.close()
    return done


class Fate:
    """Wraps the operating system's functions: counts operations on files, and ends the process at the n-th."""

    def __init__(self, n: int, power: bool) -> None:
        self.n, self.power, self.done = n, power, 0
        self.log: list[str] = []
        self.unflushed: set[Path] = set()
        self.unsettled: list[tuple[Path, Any]] = []  # (folder that must be flushed, how to undo)
        self.fds: dict[int, Path] = {}

    def op(self, name: str) -> None:
        self.done += 1
        self.log.append(name)
        if self.done == self.n:
            self.end()

    def end(self) -> None:
        if self.power:
            for _, undo in reversed(self.unsettled):
                undo()
            for path in self.unflushed:
                if path.exists():
                    os.truncate(path, 0)
        os.kill(os.getpid(), signal.SIGKILL)

    def install(self) -> None:
        fate = self
        fsync, replace, mkdir, unlink, os_open = os.fsync, os.replace, os.mkdir, os.unlink, os.open
        link, rmdir = os.link, os.rmdir

        class File(io.FileIO):
            def __init__(self, path: Path, mode: str, buffering: int, opener: Any) -> None:
                fate.op(f"create {kind(path)}")
                super().__init__(path, mode, opener=opener)
                fate.fds[self.fileno()] = Path(path)
                fate.unflushed.add(Path(path))

            def write(self, data: Any) -> int:
                fate.op(f"write {kind(fate.fds[self.fileno()])}")
                fate.unflushed.add(fate.fds[self.fileno()])
                half = len(data) // 2 // 4096 * 4096
                if half:  # a short write, and a death in the middle of one
                    n = super().write(data[:half])
                    fate.op("write, the rest")
                    return n
                return super().write(data)

        def flush(fd: int) -> None:
            path = fate.fds[fd]
            fate.op(f"fsync {kind(path)}")
            fsync(fd)
            fate.unflushed.discard(path)
            fate.unsettled = [u for u in fate.unsettled if u[0] != path]

        def rename(source: Path, target: Path) -> None:
            fate.op(f"rename {kind(target)}")
            old = Path(target).read_bytes() if Path(target).exists() else None
            replace(source, target)

            def undo() -> None:
                replace(target, source)
                if old is not None:
                    Path(target).write_bytes(old)

            fate.unsettled.append((Path(target).parent, undo))

        def link_(source: Path, target: Path) -> None:
            fate.op(f"link {kind(target)}")
            link(source, target)
            fate.unsettled.append((Path(target).parent, lambda: unlink(target)))

        def remove_folder(path: Any, **rest: Any) -> None:
            fate.op("rmdir")
            rmdir(path, **rest)

        def make(path: Any, *rest: Any) -> None:
            fate.op("mkdir")
            mkdir(path, *rest)
            fate.unsettled.append((Path(path).parent, lambda: shutil.rmtree(path)))

        def open_(path: Any, *rest: Any, **options: Any) -> int:
            fd = os_open(path, *rest, **options)
            fate.fds[fd] = Path(path)
            return fd

        def remove(path: Any, **rest: Any) -> None:
            fate.op("unlink")
            unlink(path, **rest)

        class Files:
            """pyarrow's filesystem, deleting file by file."""

            def __init__(self, fs: Any) -> None:
                self._fs = fs

            def __getattr__(self, name: str) -> Any:
                return getattr(self._fs, name)

            def delete_file(self, path: str) -> None:
                fate.op(f"delete {kind(Path(path))}")
                self._fs.delete_file(path)

            def delete_dir(self, path: str) -> None:
                raise AssertionError("a save deletes file by file")

        def init(self: storage.Storage, uri: Any) -> None:
            original(self, uri)
            self.fs = Files(self.fs)  # type: ignore[assignment]

        original = storage.Storage.__init__
        storage.Storage.__init__ = init  # type: ignore[method-assign]
        storage.open = File  # type: ignore[attr-defined]
        os.fsync, os.replace, os.mkdir, os.unlink, os.open = flush, rename, make, remove, open_  # type: ignore[assignment]
        os.link, os.rmdir = link_, remove_folder  # type: ignore[assignment]


def kind(path: Path) -> str:
    """The kind of a file: its name without the variable parts."""
    if path.parent.name == "attempts":
        return "note" if "-from-" in path.name else "number"
    return next((k for k in ("shard", "MANIFEST", "PRUNING") if k in path.name), "folder")


def child(root: Path, n: int, power: bool, log: Path | None = None) -> int:
    """The exit code of a child that dies at its n-th operation."""
    pid = os.fork()
    if pid == 0:
        fate = Fate(n, power)
        fate.install()
        ok = save(root, 2)
        if log is not None:
            with open(log, "w") as file:
                json.dump(fate.log, file)
        os._exit(0 if ok else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def look(root: Path) -> dict[str, Any]:
    """The checkpoints that a new process finds there, and whether it can resume and save."""
    run = RunDir(root)
    committed = run.committed()
    problems = [p for step in committed for p in manifest.verify(run, step)]
    found = restore.choose(run)
    assert found is not None, "no checkpoint is left"
    tensors = {n: torch.zeros_like(t) for n, t in state(0).items()}
    restore.load(run, found, tensors, {})
    whole = all(torch.equal(t, state(found.step)[n]) for n, t in tensors.items())
    save(root, 3)
    left = {str(p.relative_to(root / "checkpoints").parts[0]) for p in (root / "checkpoints").rglob("*")}
    return {
        "committed": committed, "problems": problems, "step": found.step, "whole": whole, "left": sorted(left),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    root, power = Path(sys.argv[1]), sys.argv[2] == "power"
    base = root / "base"
    assert save(base, 1)
    shutil.copytree(base, root / "all")
    assert child(root / "all", 0, power, root / "log.json") == 0
    log = json.loads((root / "log.json").read_text())
    rows = []
    for n, name in enumerate(log, start=1):
        place = root / str(n)
        shutil.copytree(base, place)
        ended = child(place, n, power)
        rows.append({"op": name, "ended": ended, **look(place)})
        shutil.rmtree(place)
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
