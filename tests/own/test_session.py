"""A user's own loop: real ranks over gloo that find each other by Open MPI's variables, and one of them is really killed.

Over a minute: eight processes that import torch, which takes seconds of processor time each.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import raydist.own as rd
from raydist.errors import SpecChanged, UsageError, UserError
from raydist.own.launcher import translate

SCRIPT = Path(__file__).with_name("loop_of_a_user.py")


def run(storage: Path, killed_at: int = 0, leaves_at: int = 0, world: int = 2) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in range(world):
        launcher = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(world)}
        env = {**os.environ, **launcher, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(SCRIPT), str(storage), str(killed_at), str(leaves_at)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [(rank.returncode, *text) for rank, text in zip(ranks, told, strict=True)]


def outcomes(storage: Path) -> list[dict[str, Any]]:
    """What each rank of a run that ends well has printed."""
    ended = run(storage)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(out) for _, out, _ in ended]


def test_a_killed_rank_changes_no_bit(tmp_path: Path) -> None:
    """Each sample is trained once in an epoch; after a SIGKILL the script, run again, ends with the bits of an undisturbed one."""
    whole = outcomes(tmp_path / "whole")
    assert sorted(whole[0]["ids"] + whole[1]["ids"]) == list(range(103))
    assert len(whole[0]["losses"]) == 11
    assert whole[0]["losses"] == whole[1]["losses"]
    assert whole[0]["weights"] == whole[1]["weights"]
    killed = run(tmp_path / "killed", killed_at=7)
    assert killed[1][0] == -signal.SIGKILL
    assert killed[0][0] > 0, killed
    again = outcomes(tmp_path / "killed")
    made = again[0]["losses"]
    assert made == whole[0]["losses"][4:]  # it went on from the checkpoint of step 4
    assert [rank["weights"] for rank in again] == [rank["weights"] for rank in whole]


def test_a_rank_that_leaves_its_loop_is_named(tmp_path: Path) -> None:
    """On every rank, and none waits for the others."""
    ended = run(tmp_path, leaves_at=3)
    for code, _, errors in ended:
        assert code == 1
        assert "step 3: rank 1 left its loop, and the others did not" in errors


def small(storage: Path, dataset: object = tuple(range(8)), batch: int = 4, **more: Any) -> rd.Session:
    """A session of one rank."""
    model = torch.nn.Linear(1, 1)
    return rd.session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, steps=2, batch=batch, storage=str(storage), **more
    )


def test_wrong_use_is_one_clear_error(tmp_path: Path) -> None:
    """Of the dataset, the optimizer, the loss, the calls' order, and a second session."""
    with pytest.raises(UserError, match="dataset: generator has no length"):
        small(tmp_path, (i for i in range(8)))
    with pytest.raises(UserError, match="micro_batch: 0"):
        small(tmp_path, micro_batch=0)
    with pytest.raises(UserError, match="optimizer: it does not have bias"):
        model = torch.nn.Linear(1, 1)
        rd.session(model, torch.optim.SGD([model.weight], lr=0.1), [1], steps=1, batch=1, storage=str(tmp_path))
    with small(tmp_path / "a") as s:
        with pytest.raises(UsageError, match="a session is open"), small(tmp_path / "b"):
            pass
        assert len(next(iter(s))) == 4
        with pytest.raises(UserError, match=r"the loss is not a scalar: \[4\]"):
            s.backward(torch.zeros(4))
        with pytest.raises(UsageError, match="without a backward"):
            s.step()
    with small(tmp_path / "d") as s:
        for _ in s:
            s.backward(s.model(torch.ones(1)).sum())
            s.step()
    with (
        pytest.raises(
            SpecChanged,
            match=r"train.global_batch: was 4, is 2\s*give the session the arguments of before, or another name",
        ),
        small(tmp_path / "d", batch=2),
    ):
        pass
    with pytest.raises(UsageError, match="rank 0 has not called backward"), small(tmp_path / "c") as s:
        for _ in s:
            pass


def test_launchers_variables() -> None:
    """srun's become torchrun's; several ranks without a place to meet are refused."""
    found = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.2",
    }
    found["MASTER_PORT"] = "29500"
    translate(found)
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("3", "4", "1")
    assert found["MASTER_ADDR"] == "10.0.0.2"
    with pytest.raises(UsageError, match="MASTER_PORT: not set, and there are 2 ranks"):
        translate({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.2"})
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    translate(alone)
    assert "RANK" not in alone
