"""Verify finds damage anywhere, and names the file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raydist.data.dataset import TokenDataset
from raydist.data.verify import verify
from raydist.errors import DataError


@pytest.fixture
def copy(dataset: TokenDataset, tmp_path: Path) -> Path:
    """A copy of the dataset that a test may damage."""
    return Path(shutil.copytree(dataset.uri, tmp_path / "copy"))


def test_a_sound_dataset(copy: Path) -> None:
    """An undamaged dataset gives no damage, and every byte of the shards was read."""
    seen: list[tuple[int, int]] = []
    assert verify(str(copy), lambda done, total: seen.append((done, total))) == []
    assert seen[-1] == (sum(p.stat().st_size for p in copy.glob("*-*")),) * 2


def test_a_flipped_byte_is_found_in_every_file(copy: Path) -> None:
    """A flipped bit at the start, in the middle or at the end of any file is found, and only that file is named."""
    for path in sorted(copy.iterdir()):
        sound = path.read_bytes()
        for at in (0, len(sound) // 2, len(sound) - 1):
            damaged = bytearray(sound)
            damaged[at] ^= 4
            path.write_bytes(damaged)
            assert [d.file for d in verify(str(copy))] == [path.name], (path, at)
        path.write_bytes(sound)
    assert verify(str(copy)) == []


def test_any_changed_byte_of_the_index_is_found(copy: Path) -> None:
    """A changed byte of the index is found, also if the JSON stays valid and the fingerprint the same."""
    sound = (copy / "index.json").read_bytes()
    for at in range(0, len(sound), 7):
        damaged = bytearray(sound)
        damaged[at] ^= 1
        (copy / "index.json").write_bytes(damaged)
        assert "index.json" in [d.file for d in verify(str(copy))], sound[at - 5 : at + 5]


def test_missing_and_short_files(copy: Path) -> None:
    """Missing and truncated files are named with what is wrong."""
    first, second = sorted(copy.glob("train-*"))[:2]
    first.unlink()
    second.write_bytes(second.read_bytes()[:-8])
    assert {d.file: d.reason.split(",")[0] for d in verify(str(copy))} == {
        first.name: "missing",
        second.name: f"{second.stat().st_size} bytes",
    }


def test_no_dataset_at_all(tmp_path: Path) -> None:
    """A folder without an index is an error, not damage."""
    with pytest.raises(DataError, match="not a prepared dataset"):
        verify(str(tmp_path))


def test_reading_refuses_what_is_visibly_damaged(copy: Path) -> None:
    """A truncated shard, or one that is no Arrow file, raises DataError when it is opened."""
    first, second = sorted(copy.glob("train-*"))[:2]
    first.write_bytes(first.read_bytes()[:-8])
    second.write_bytes(bytes(second.stat().st_size))
    split = TokenDataset(copy).split("train")
    with pytest.raises(DataError, match=f"{first.name}: .* bytes, not"):
        split.read(0, 5)
    with pytest.raises(DataError, match=f"{second.name} cannot be read"):
        split.read(split.shards[0].tokens, split.shards[0].tokens + 5)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json is missing or damaged"):
        TokenDataset(copy)
