"""Files are whole or absent, a failed operation is one clear error, and a run is found by path, URI or name."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import threading
from pathlib import Path

import pytest

from raydist import registry
from raydist.checkpoint import retention
from raydist.errors import ExtensionNotFound, RunNotFound, StorageError, UsageError, UserError
from raydist.run import directory
from raydist.run.directory import RunDir
from raydist.storage import Storage, append_whole


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_files_come_and_go(tmp_path: Path, prefix: str) -> None:
    """Write, read, sizes, listings and deletion, by path and by URI; the storage crosses processes."""
    storage = pickle.loads(pickle.dumps(Storage(f"{prefix}{tmp_path}"))).at("a")
    storage.write("b/c.txt", b"hello")
    assert storage.read("b/c.txt") == b"hello"
    assert (storage.size("b/c.txt"), storage.size("b/d.txt"), storage.exists("b")) == (5, None, True)
    assert storage.files("", recursive=True) == {"b/c.txt": 5}
    assert storage.folders() == ["b"]
    with storage.open("b/c.txt") as file:
        file.seek(1)
        assert file.read(3) == b"ell"
    packed = gzip.compress(b"hello")
    storage.write("b/c.gz", packed)
    assert storage.read("b/c.gz") == packed, "a name changes nothing about the bytes"
    storage.delete("b")
    storage.delete("b")
    assert storage.files("", recursive=True) == {}
    with pytest.raises(FileNotFoundError):
        storage.read("b/c.txt")


def test_a_folder_that_comes_and_goes_while_it_is_listed(tmp_path: Path) -> None:
    """It is empty or absent: no error, though pyarrow raises one for a folder that appears just after its check."""
    storage, done = Storage(tmp_path), threading.Event()

    def toggle() -> None:
        while not done.is_set():
            (tmp_path / "a").mkdir()
            (tmp_path / "a").rmdir()

    thread = threading.Thread(target=toggle)
    thread.start()
    try:
        for _ in range(2000):
            assert storage.files("a") == {}
    finally:
        done.set()
        thread.join()


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    """An exception in the middle of a write keeps the old content, and leaves no temporary file."""
    storage = Storage(tmp_path)
    storage.write("x", b"old")
    with pytest.raises(ValueError, match="stop"), storage.create("x") as sink:
        sink.write(b"ne")
        raise ValueError("stop")
    assert storage.read("x") == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_link_whose_answer_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An NFS client asks again, and is told that the name exists: it is this writer's. For the next one it is another's."""
    link = os.link

    def lost(path: Path, to: Path) -> None:
        link(path, to)
        raise FileExistsError

    monkeypatch.setattr(os, "link", lost)
    assert Storage(tmp_path).write_new("x", b"mine")
    monkeypatch.undo()
    assert not Storage(tmp_path).write_new("x", b"other")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"mine")]


def test_storage_that_refuses_says_where_and_why(tmp_path: Path) -> None:
    """A file in the place of a folder, and a URI of an unknown kind."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*/file/x/y: Not a directory"):
        Storage(tmp_path / "file" / "x").write("y", b"")
    with pytest.raises(UserError, match="give a folder, or a URI"):
        Storage("nosuchscheme://x/y")


def test_a_deleted_file_that_is_still_read_on_nfs(tmp_path: Path) -> None:
    """NFS renames it, and refuses to delete it again: it is not listed, and pruning leaves it and its folder."""
    run = RunDir(tmp_path)
    folder = directory.step_folder(3)
    run.storage.write(f"{folder}/shard-0000-of-0001-0001.arrow", b"")
    held = tmp_path / folder / f".nfs{0x1234:016x}{7:08x}"
    held.write_bytes(b"x")
    assert list(run.storage.files(folder, unfinished=True)) == [f"{folder}/shard-0000-of-0001-0001.arrow"]
    for _ in range(2):
        assert retention.prune(run, 1, orphans=True) == []
        assert [path.name for path in held.parent.iterdir()] == [held.name]
    held.unlink()
    retention.prune(run, 1, orphans=True)
    assert not held.parent.exists()


def test_a_checkpoint_exists_once_its_manifest_does(tmp_path: Path) -> None:
    """Folders without a manifest, and files that are not checkpoints, are not listed."""
    run = RunDir(tmp_path)
    for step in (20, 3, 100):
        run.storage.write(f"{directory.step_folder(step)}/shard", b"x")
    for step in (100, 3):
        run.storage.write(f"{directory.step_folder(step)}/MANIFEST-0001.json", b"{}")
    run.storage.write("checkpoints/step-x/MANIFEST-0001.json", b"{}")
    assert run.committed() == [3, 100]


def test_a_run_by_path_uri_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The three ways to name a run give the same folder; for one that does not exist the error lists where it looked and what
    exists."""
    Storage(tmp_path).at("one").write("spec.yaml", b"")
    for run, storage in ((str(tmp_path / "one"), None), (f"file://{tmp_path}/one", None), ("one", str(tmp_path))):
        assert directory.resolve(run, storage).uri == str(tmp_path / "one")
    monkeypatch.setenv("RAYDIST_STORAGE", str(tmp_path))
    assert directory.resolve("one").name == "one"
    with pytest.raises(RunNotFound, match="two") as caught:
        directory.resolve("two")
    assert "one" in caught.value.hint


@pytest.mark.parametrize("name", ["", "a/b", "-x", ".x", "a b", "x" * 101])
def test_names_that_no_folder_may_have(name: str) -> None:
    """A run's name is one plain path component."""
    with pytest.raises(UsageError, match="run name"):
        directory.check_name(name)


def test_extensions_are_found_without_importing_them() -> None:
    """Built-ins are found by their files, the user's own by module and attribute; a similar name is suggested."""
    assert {"gpt", "mlp"} <= set(registry.names("model"))
    assert "ddp" in registry.names("parallel")
    registry.check("model", "json:loads")
    assert registry.load("model", "json:loads")("[1]") == [1]
    with pytest.raises(ExtensionNotFound, match='unknown model "gtp"') as caught:
        registry.check("model", "gtp")
    assert 'did you mean "gpt"?' in caught.value.hint
    for name in ("no_such_module:build", "json:", "json:no_such_thing"):
        with pytest.raises(ExtensionNotFound):
            registry.load("model", name)


@pytest.mark.parametrize("name", ["../outside", "a/../../outside", "/etc/outside", "a\0b"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    """Whatever a file says: it can be neither read, written, listed nor deleted there, locally or at a URI."""
    (tmp_path / "outside").write_text("secret")
    remote = Storage(tmp_path / "in")
    remote.local = None
    for storage in (Storage(tmp_path / "in"), remote):
        for call in (
            storage.read, storage.open, storage.size, storage.delete, storage.files, storage.at, storage.delete_empty,
            lambda name, storage=storage: storage.write(name, b""),
            lambda name, storage=storage: storage.write_new(name, b""),
        ):  # fmt: skip
            with pytest.raises(StorageError, match="leads out of its folder"):
                call(name)
    assert [p.name for p in tmp_path.iterdir()] == ["outside"]
    assert (tmp_path / "outside").read_text() == "secret"


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """A question mark begins the parameters of a URI, but not of a path: a run's folder, its parent and its home are found."""
    run = RunDir(Storage(tmp_path / "what?x=1").at("a run?"))
    run.storage.write("spec.yaml", b"")
    assert (tmp_path / "what?x=1" / "a run?" / "spec.yaml").exists()
    assert run.home.uri == str(tmp_path / "what?x=1")
    assert directory.resolve(run.uri).uri == run.uri


def test_files_of_a_run_are_for_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders 0700 and files 0600, until the user shares the run's folder: new ones then have its permissions. Others as always.
    They have them from the start: of a folder that is changed after another rank has put a file in it, the file would not be."""
    monkeypatch.delattr(Path, "chmod")

    def modes(folder: Path) -> set[int]:
        return {path.stat().st_mode & 0o777 for path in [folder, *folder.rglob("*")]}

    def fill(storage: Storage, part: str) -> Path:
        storage.write(f"{part}/deep/state.json", b"{}")
        assert storage.write_new(f"{part}/new", b"")
        append_whole(storage.appendable(f"{part}/events.jsonl"), b"{}")
        return storage.local / part if storage.local else Path()

    before = os.umask(0o002)
    try:
        run = RunDir(tmp_path / "runs" / "run")
        assert modes(fill(run.storage, "a")) == {0o700, 0o600}
        os.chmod(run.uri, 0o750)
        assert modes(fill(run.storage, "b")) == {0o750, 0o640}
        assert modes(fill(RunDir(run.uri).storage, "c")) == {0o750, 0o640}
        assert modes(fill(Storage(tmp_path / "data"), "a")) == {0o775, 0o664}
        assert modes(tmp_path / "runs" / "run" / "a") == {0o700, 0o600}, "what is there stays"
    finally:
        os.umask(before)


def test_a_run_is_not_written_below_a_mount_point(tmp_path: Path) -> None:
    """A run's folder that was there and is gone is not created again: its file system was unmounted. Other storage is."""
    run = RunDir(tmp_path / "mount" / "run")
    run.storage.write("state.json", b"{}")
    shutil.move(tmp_path / "mount", tmp_path / "elsewhere")
    (tmp_path / "mount").mkdir()
    for call in (
        lambda: run.storage.write("state.json", b"{}"),
        lambda: run.storage.write_new("attempts/0002.json", b"{}"),
        lambda: run.storage.appendable("events.jsonl"),
    ):
        with pytest.raises(OSError, match="its run's folder is gone; is its file system mounted"):
            call()
    assert list((tmp_path / "mount").iterdir()) == []
    shutil.rmtree(tmp_path / "mount")
    shutil.move(tmp_path / "elsewhere", tmp_path / "mount")
    run.storage.write("state.json", b"{}")
