"""Data preparation through Ray Data, on a private Ray."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from raydist.cluster.data_prepare import RayMap
from raydist.data.prepare import prepare
from raydist.errors import DataError, StorageError

SETTINGS: dict[str, Any] = {"eval_fraction": 0.2, "block_bytes": 40_000, "shard_tokens": 9_000}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 400 KB of text in several files."""
    folder = tmp_path_factory.mktemp("corpus")
    choose = random.Random(3)
    for i in range(10):
        lines = [" ".join(choose.choices(["rank", "shard", "λoss", "the", "of"], k=9)) for _ in range(900)]
        (folder / f"{i}.txt").write_text("\n".join(lines))
    return folder


def test_ray_makes_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """A dataset equal to the serial one, file for file. A bad file, or storage that cannot be written, raises raydist's own
    error, not wrapped by Ray, and leaves no dataset."""
    serial = prepare([str(corpus)], str(tmp_path / "serial"), "bpe:300", **SETTINGS)
    assert len(serial.train.shards) > 5
    bad = tmp_path / "bad"
    bad.mkdir()
    for path in corpus.iterdir():
        (bad / path.name).write_bytes(path.read_bytes())
    (bad / "5.txt").write_bytes(b"\xff\n" * 20_000)
    with RayMap("local") as map_files:
        parallel = prepare([str(corpus)], str(tmp_path / "ray"), "bpe:300", map_files=map_files, **SETTINGS)
        assert parallel == serial
        assert contents(tmp_path / "ray") == contents(tmp_path / "serial")
        with pytest.raises(DataError, match=r"5\.txt: bad UTF-8: byte 0xff at offset 0 "):
            prepare([str(bad)], str(tmp_path / "none"), map_files=map_files, **SETTINGS)
        assert not (tmp_path / "none" / "index.json").exists()
        # A folder is at the path where a task must put its shard.
        (tmp_path / "taken" / "train-000001-000.arrow").mkdir(parents=True)
        with pytest.raises(StorageError, match=r"cannot write .*train-000001-000\.arrow: Is a directory"):
            prepare([str(corpus)], str(tmp_path / "taken"), map_files=map_files, **SETTINGS)


def test_one_block_needs_no_ray(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small corpus is prepared in this process, unless an address is given."""
    monkeypatch.setattr("raydist.cluster.data_prepare.open_session", None)
    with RayMap() as map_files:
        index = prepare([str(corpus)], str(tmp_path / "out"), map_files=map_files, eval_fraction=0.2)
    assert index.train.documents > 10
    with RayMap("local") as map_files, pytest.raises(TypeError):
        prepare([str(corpus)], str(tmp_path / "other"), map_files=map_files)
