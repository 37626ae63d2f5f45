"""The same on an object store: a real S3 server over HTTP (moto)."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.checkpoint import manifest, retention
from raydist.storage import Storage
from raydist.worker.checkpoint import restore


def test_save_verify_restore_and_prune(kit: Any, s3: Any) -> None:
    """Saved in the background, every byte verified; a replaced object is detected, the checkpoint before restored, old ones
    deleted."""
    one = kit.OneRank(s3.uri("runs/one"), asynchronous=True, keep=2)
    for step in (1, 2, 3):
        one.save(step)
        one.saver.before_update()
    one.saver.mark_eval(3, 1.5)
    assert one.saver.wait()
    one.saver.close()
    assert one.run.committed() == [2, 3]
    assert one.run.storage.folders("checkpoints") == ["step-00000002", "step-00000003"]
    assert [manifest.verify(one.run, step) for step in (2, 3)] == [[], []]
    assert manifest.best(one.run) == 3

    found = manifest.read(one.run, 3)
    (name,) = found.files
    data = bytearray(one.run.storage.read(manifest.path(3, name)))
    data[1000] ^= 1
    one.run.storage.write(manifest.path(3, name), bytes(data))
    (problem,) = manifest.verify(one.run, 3)
    assert name in problem
    chosen = restore.choose(one.run)
    assert chosen is not None
    assert chosen.step == 2
    assert retention.prune(one.run, 1) == [], "it is being read"
    into = kit.empty()
    restore.load(one.run, chosen, into, {})
    assert kit.same(into, kit.state(2))
    assert retention.prune(one.run, 1) == [2]
    assert one.run.storage.folders("checkpoints") == ["step-00000003"]


def test_an_upload_that_fails_leaves_no_object(s3: Any) -> None:
    """An exception in the middle of a write leaves no object of that name."""
    storage = Storage(s3.uri("half"))
    with pytest.raises(ValueError, match="in the middle"), storage.create("file") as sink:
        sink.write(b"half of it")
        raise ValueError("in the middle")
    assert not storage.exists("file")
    storage.write("file", b"all of it")
    assert storage.read("file") == b"all of it"
