"""The scripts of examples/own: one rank each, in this process; and two, of which one is killed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import runpy
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import raydist.own as rd
from raydist.run.directory import RunDir
from raydist.worker.distributed import Rank

ROOT = Path(__file__).parents[2]
NAMES = {"resnet": "resnet", "finetune": "bert", "train_gpt": "gpt"}
"""Script -> its run."""


def losses(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[list[float], str]:
    """That a script prints, and its stderr."""
    capsys.readouterr()
    runpy.run_path(str(path), run_name="__main__")
    told = capsys.readouterr()
    return [float(line.split()[1]) for line in told.out.splitlines() if line.startswith("loss")], told.err


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_script_and_its_session(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both learn in as many steps. The session's run is complete: once more, it says so and trains nothing."""
    monkeypatch.setenv("RAYDIST_STORAGE", str(tmp_path))
    plain, _ = losses(ROOT / f"examples/own/{name}_plain.py", capsys)
    session, before = losses(ROOT / f"examples/own/{name}.py", capsys)
    assert len(session) == len(plain) > 10
    for made in (plain, session):
        assert sum(made[-4:]) < sum(made[:4])
    run = RunDir(tmp_path / NAMES[name])
    assert run.newest_step() == len(session)
    again, after = losses(ROOT / f"examples/own/{name}.py", capsys)
    told = f"run {run.name} is finished: {len(session)} steps, in {run.uri}\n"
    assert (again, told in before, told in after) == ([], False, True)


@pytest.mark.parametrize("name", NAMES)
def test_few_lines_change(name: str) -> None:
    """Five lines are new."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs/generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    new = [line for line in generate.changes(name) if line.startswith("+")]
    assert len(new) == 5


KILLED_AT, EVERY = 8, 3
"""The step in which rank 1 is killed; and steps between checkpoints, of which the newest is then that of step 6."""


def trained(
    rank: Rank, storage: str, port: int, names: list[str], killed: bool = False
) -> dict[str, tuple[list[str], str]]:
    """Script -> its session's losses, and a hash of the weights. The scripts run as ranks of torchrun; if `killed`, rank 1 dies."""
    dist.destroy_process_group()  # a session starts its own
    found = {}

    def session(*args: Any, **more: Any) -> rd.Session:
        made = made_by(*args, every=EVERY, **more)
        step = made.step

        def killing() -> bool:
            if killed and rank.rank == 1 and made.number == KILLED_AT:
                while RunDir(f"{storage}/{more['name']}").newest_step() != 2 * EVERY:  # it is saved in the background
                    time.sleep(0.02)
                os.kill(os.getpid(), signal.SIGKILL)
            return step()

        made.step = killing  # type: ignore[method-assign]
        return made

    with pytest.MonkeyPatch.context() as patch:
        made_by = rd.session
        patch.setattr(rd, "session", session)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RAYDIST_STORAGE": storage}
        for name, value in {"RANK": rank.rank, "LOCAL_RANK": rank.rank, "WORLD_SIZE": 2, **place}.items():
            patch.setenv(name, str(value))
        for name in names:
            with contextlib.redirect_stdout(io.StringIO()):
                s = runpy.run_path(str(ROOT / f"examples/own/{name}.py"), run_name="__main__")["s"]
            digest = hashlib.blake2b()
            for tensor in s.model.state_dict().values():
                digest.update(tensor.contiguous().numpy().tobytes())
            found[name] = [loss.hex() for loss in s.losses], digest.hexdigest()
    return found


def test_a_killed_rank_changes_no_bit_of_any_of_them(ranks: Any, tmp_path: Path) -> None:
    """Two ranks of each script: after a SIGKILL of one in a step, the script, run again, goes on from the newest checkpoint, with
    the losses and the weights of an undisturbed one."""

    def run(storage: str, names: list[str], killed: bool = False) -> list[Any]:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        made: list[Any] = ranks.run(trained, 2, str(tmp_path / storage), port, names, killed)
        return made

    names = sorted(
        NAMES
    )  # that of transformers, whose import takes seconds, first: the processes that have it are killed with it
    whole, other = run("whole", names)
    assert whole == other
    for name in names:
        first, second = run("killed", [name], killed=True)
        assert isinstance(second, ChildProcessError), second
        assert isinstance(first, Exception), first
    for again in run("killed", names):
        for name, (losses, weights) in whole.items():
            assert len(losses) > KILLED_AT
            assert again[name] == (losses[2 * EVERY :], weights)
