"""A user's own loop: real ranks over gloo that find each other by Open MPI's variables, and one of them is really killed.

All that needs no kill is in one pair of processes that a launcher starts; those that are killed are forked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import raydist
import raydist.own as rd
from raydist.diagnosis import examine
from raydist.errors import DataError, GraphMismatch, NonFinite, SpecChanged, UsageError, UserError
from raydist.ipc import RENDEZVOUS_SECRET
from raydist.own import launcher
from raydist.own.launcher import translate
from raydist.own.loader import to_device
from raydist.own.state import from_json, to_json
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from raydist.worker.distributed import Rank
from tests.own import loops_of_a_user as user
from tests.ports import free_ports

SECRET = "of these ranks"


def run(*args: object, world: int = 2) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank of loops_of_a_user.py."""
    port, ranks = str(free_ports(1)[0]), []
    for rank in range(world):
        variables = {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
        variables["OMPI_COMM_WORLD_SIZE"] = str(world)
        env = {**os.environ, **variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        env[RENDEZVOUS_SECRET] = SECRET
        command = [sys.executable, user.__file__, *map(str, args)]
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
    return [(rank.returncode, *text) for rank, text in zip(ranks, told, strict=True)]


def outcomes(*args: object) -> list[dict[str, Any]]:
    """What each rank of a run that ends well has printed."""
    ended = run(*args)
    assert [code for code, _, _ in ended] == [0, 0], ended
    return [json.loads(out) for _, out, _ in ended]


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """(storage, what each rank has printed) of all sessions."""
    storage = tmp_path_factory.mktemp("sessions")
    return storage, outcomes(storage)


def noisy(rank: Rank, storage: str, port: int, killed_at: int | None) -> dict[str, Any]:
    """A session of loops_of_a_user.py on this rank, as of torchrun."""
    dist.destroy_process_group()  # a session starts its own
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "_met", [])  # of another test's session
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": rank.world_size}
        for name, value in {"RANK": rank.rank, "LOCAL_RANK": rank.rank, **place}.items():
            patch.setenv(name, str(value))
        return user.noisy(storage, "killed", killed_at)


def test_a_killed_rank_changes_no_bit(sessions: tuple[Path, list[dict[str, Any]]], ranks: Any) -> None:
    """With dropout, random transforms, running statistics and split gradients: after a SIGKILL the script, run again, goes on from
    the newest checkpoint, and ends with the bits of an undisturbed run."""
    storage, every = sessions
    whole = every[0]["noisy"][0]
    assert len(whole["losses"]) == user.STEPS
    assert whole["losses"] == every[1]["noisy"][0]["losses"]
    first, second = ranks.run(noisy, 2, str(storage), free_ports(1)[0], 5)
    assert isinstance(second, ChildProcessError), second
    assert isinstance(first, Exception), first
    assert not isinstance(first, ChildProcessError), first
    again = ranks.run(noisy, 2, str(storage), free_ports(1)[0], None)
    assert again[0]["losses"] == whole["losses"][4:]
    assert [rank["weights"] for rank in again] == [whole["weights"]] * 2


def test_a_loaders_processes_change_no_bit(sessions: tuple[Path, list[dict[str, Any]]]) -> None:
    """They read ahead what the session itself would read between steps, random transforms and a rank without samples included."""
    for rank in sessions[1]:
        assert rank["noisy loader"] == rank["noisy"]


def test_the_ranks_of_each_session_prove_themselves(sessions: tuple[Path, list[dict[str, Any]]]) -> None:
    """With the secret of their environment, on both groups; also after the first session, which took it out of the environment."""
    for made in sessions[1]:
        assert made["sessions"] > 10
        assert made["proofs"] == [SECRET] * 2 * made["sessions"]


def losses(runs: list[dict[str, Any]]) -> list[float]:
    """Of the sessions of a run."""
    return [float.fromhex(loss) for session in runs for loss in session["losses"]]


def close(runs: list[dict[str, Any]]) -> Any:
    """For comparison: the same sums in another order, in fp32."""
    return pytest.approx(losses(runs), rel=1e-5)


def test_strategies_train_the_same_numbers(sessions: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """Of one process; to the bit after a pause; a checkpoint of one is continued under every other, and by one process. Every rank
    ends with the same whole weights, and the scheduler's rates. A rank without samples changes nothing."""
    storage, ranks = sessions
    alone = user.trained(str(tmp_path), "alone", "ddp")
    assert len(alone["losses"]) == user.STEPS
    assert sorted(alone["ids"])[:3] == [0, 0, 1], "an epoch ends within the run, with a batch of one sample"
    for strategy in user.STRATEGIES:
        whole, paused = ranks[0][strategy], ranks[0][f"{strategy} paused"]
        assert losses(whole) == close([alone])
        assert losses(paused) == losses(whole)
        assert paused[-1]["weights"] == whole[0]["weights"] == ranks[1][strategy][0]["weights"]
        assert paused[-1]["rate"] == whole[0]["rate"] == alone["rate"]
        run, model = raydist.open(f"{storage}/{strategy}"), user.Net()
        assert isinstance(run, raydist.Run)
        assert run.steps()["samples"].to_pylist() == [8, 8, 8, 1, 8, 8]
        model.load_state_dict(run.weights())
        saved = [value.double().sum().item().hex() for value in model.state_dict().values()]
        assert saved == (whole[0]["weights"] or saved)
        assert sorted(whole[0]["ids"] + ranks[1][strategy][0]["ids"]) == sorted(alone["ids"])
    after = user.trained(str(storage), "crossed", "zero3")
    assert len(after["losses"]) == 2
    assert losses([*ranks[0]["crossed"], after]) == close([alone])
    assert after["rate"] == alone["rate"]


def test_samples_of_a_stream(sessions: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    """One rank has each, once in an epoch; after a pause the next ones follow, also where ranks had read a batch that they did not
    train. A stream that is not the same on every rank is refused."""
    _, ranks = sessions
    alone = user.trained(str(tmp_path), "alone", "ddp", dataset=user.Stream(user.data()))
    assert alone["ids"] == [*range(25), *range(16)]
    for kind in ("stream", "stream paused"):
        trained = [i for rank in ranks for session in rank[kind] for i in session["ids"]]
        assert sorted(trained) == sorted(alone["ids"])
        assert losses(ranks[0][kind]) == losses(ranks[0]["stream"]) == close([alone])
    for rank in ranks:
        assert rank["apart"] == "dataset: its state on rank 1 is another than on rank 0"


def test_a_rank_that_leaves_its_loop_is_named(sessions: tuple[Path, list[dict[str, Any]]]) -> None:
    """On every rank, and none waits for the others: before a sum within backward, and before weights are gathered for forward."""
    for rank in sessions[1]:
        assert rank["left"] == ["step 3: rank 1 left its loop, and the others did not"] * 2


def test_ranks_without_raydist_run_answer_users_requests(
    sessions: tuple[Path, list[dict[str, Any]]],
) -> None:
    """On all ranks after the same step: a checkpoint of the step in which it was asked for, and at the end one of the last. A trace
    is refused at once."""
    storage, (first, second) = sessions
    asked, step = first["asked"], second["asked"]["step"]
    assert asked["step"] == step > asked["saved"][0]
    assert asked["checkpoints"] == [asked["saved"][0], step]
    assert asked["status"] == "interrupted"
    asks = [e.data["what"] for e in read_events(RunDir(storage / "asked")) if e.kind == "requested"]
    assert asks == ["trace", "checkpoint", "stop"]
    assert asked["untraced"] == ["rank 0 could not be traced: a script's own loop has no trace"]


def small(storage: Path, dataset: object = tuple(range(8)), batch: int | None = 4, **more: Any) -> rd.Session:
    """A session of one rank."""
    model = torch.nn.Linear(1, 1)
    return rd.session(
        model, torch.optim.SGD(model.parameters(), lr=0.1), dataset, steps=2, batch=batch, storage=str(storage), **more
    )


def test_wrong_use_is_one_clear_error(tmp_path: Path) -> None:
    """Of the dataset, the optimizer, the loss, the calls' order, and a second session."""
    with pytest.raises(UserError, match="dataset: generator has no length"):
        small(tmp_path, (i for i in range(8)))
    for strategy in ("zreo3", "hsdp"):  # unknown, and one whose PLAN does not have `without_example`
        with pytest.raises(UserError, match=f"strategy: '{strategy}' cannot be used in a session") as refused:
            small(tmp_path, strategy=strategy)
        assert refused.value.hint == "give one of ddp, zero1, zero2, zero3"
    with pytest.raises(UserError, match="optimizer: Adafactor does not update each element by itself"):
        model = torch.nn.Linear(1, 1)
        rd.session(model, torch.optim.Adafactor(model.parameters()), [1], steps=1, batch=1, strategy="zero1")
    with pytest.raises(UserError, match="model: it is compiled whole, and with strategy: zero3"):
        rd.session(
            torch.compile(model, backend="eager"),
            torch.optim.SGD(model.parameters()),
            [1],
            steps=1,
            batch=1,
            strategy="zero3",
        )
    with pytest.raises(UserError, match="optimizer: it has state of steps before the session"):
        used = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(1)).backward()
        used.step()
        rd.session(model, used, [1], steps=1, batch=1, strategy="zero2")
    with pytest.raises(UserError, match=r"trains parameters in float32, not weight \(float64\)"):
        double = torch.nn.Linear(1, 1).double()
        rd.session(double, torch.optim.SGD(double.parameters()), [1], steps=1, batch=1, strategy="zero1")
    with pytest.raises(UserError, match="scheduler: it is of another optimizer"):
        small(tmp_path, scheduler=torch.optim.lr_scheduler.StepLR(used, 1))
    with pytest.raises(UserError, match="micro_batch: 0"):
        small(tmp_path, micro_batch=0)
    with pytest.raises(UserError, match="optimizer: it does not have bias"):
        model = torch.nn.Linear(1, 1)
        rd.session(model, torch.optim.SGD([model.weight], lr=0.1), [1], steps=1, batch=1, storage=str(tmp_path))
    with pytest.raises(UserError, match="model: list is not an nn.Module"):
        rd.session([model, model], used, [1], steps=1, batch=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"optimizer: dict is not a torch\.optim\.Optimizer"):
        rd.session(model, {"of all": used}, [1], steps=1, batch=1)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="optimizer: LBFGS computes the loss several times in a step"):
        rd.session(model, torch.optim.LBFGS(model.parameters()), [1], steps=1, batch=1)
    with pytest.raises(DataError, match="dataset: list has no samples"):
        small(tmp_path, [])
    with small(tmp_path / "a") as s:
        with pytest.raises(UsageError, match="a session is open"), small(tmp_path / "b"):
            pass
        assert len(next(iter(s))) == 4
        with pytest.raises(UserError, match=r"the loss is not a scalar: \[4\]"):
            s.backward(torch.zeros(4))
        with pytest.raises(UsageError, match="without a backward"):
            s.step()
    with (
        pytest.raises(GraphMismatch, match="these parameters take no part in the loss: bias"),
        small(tmp_path / "f") as s,
    ):
        for _ in s:
            s.backward(s.model.weight.sum())
    with (
        pytest.raises(GraphMismatch, match="step 2: on rank 0 these parameters took no part in the loss: bias"),
        small(tmp_path / "g") as s,
    ):
        for _ in s:
            s.backward((s.model.bias if s.number == 1 else 0) + s.model.weight.sum())
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


def test_what_a_session_takes_of_a_loader(tmp_path: Path) -> None:
    """Its dataset, which the session shuffles, its batch size, which an argument replaces, and its collate_fn. A loader that
    would choose other samples or batches is refused: it would train other numbers, and nobody would see that."""
    loader, numbers = torch.utils.data.DataLoader, torch.arange(8.0)
    for given, sizes in (({}, [3, 3]), ({"batch": 4}, [4, 4])):
        model = torch.nn.Linear(1, 1)
        loads = loader(numbers, batch_size=3, shuffle=True, collate_fn=lambda items: torch.stack(items)[:, None])
        optimizer, got = torch.optim.SGD(model.parameters(), lr=0.1), []
        with rd.session(model, optimizer, loads, steps=2, name=f"of-{sizes[0]}", storage=str(tmp_path), **given) as s:
            for x in s:
                got.append(x)
                s.backward(s.model(x).mean(), weight=len(x))
                s.step()
        assert [len(x) for x in got] == sizes
        assert len(torch.cat(got).unique()) == sum(sizes)
    with pytest.raises(UserError, match=r"batch: is not given\s*give the samples of an update"):
        small(tmp_path, batch=None)
    drawn = torch.utils.data.WeightedRandomSampler([1.0] * 8, 8)
    for refused, why in (
        (loader(numbers, batch_size=2), "chooses samples by its SequentialSampler"),
        (loader(numbers, batch_size=2, sampler=drawn), "chooses samples by its WeightedRandomSampler"),
        (loader(numbers, batch_size=3, shuffle=True, drop_last=True), "has drop_last=True"),
        (loader(numbers, batch_sampler=[[1], [2]]), "has a batch_sampler"),
        (loader(user.Iterated(), batch_size=2), "gives batches of a stream"),
    ):
        with pytest.raises(UserError, match=f"dataset: this DataLoader {why}"):
            small(tmp_path, refused)


def test_a_batch_of_any_kind_is_on_the_ranks_device() -> None:
    """Its tensors, in containers, dataclasses and objects that have a `to`; the rest stays as it is, and so does what was given."""
    x = torch.zeros(2)
    given = user.Batch(x, 7, {"ids": [x, user.Encoding(mask=x)], "names": ("a", None)})
    made = to_device(given, torch.device("meta"))
    ids, encoding = made.rest["ids"]
    assert {one.device.type for one in (made.x, ids, encoding["mask"])} == {"meta"}
    assert (made.tokens, made.rest["names"], x.device.type) == (7, ("a", None), "cpu")
    assert given.x is x


def test_random_transforms_do_not_depend_on_the_division(tmp_path: Path) -> None:
    """A sample of a step is the same whatever the micro-batch it is in, and so on any number of ranks."""
    drawn: list[dict[int, list[float]]] = []
    for micro_batch in (1, 3, 4):
        session, found = small(tmp_path / str(micro_batch), user.Drawn(), micro_batch=micro_batch), {}
        with session as s:
            for index, x, _ in s:
                found |= dict(zip(index.tolist(), x.tolist(), strict=True))
                s.backward(s.model(x[:, :1]).mean(), weight=len(x))
                s.step()
        drawn.append(found)
    assert len(drawn[0]) == 8
    assert drawn[0] == drawn[1] == drawn[2]


def test_what_is_left_of_a_loop_that_was_changed_is_one_clear_error(tmp_path: Path) -> None:
    """optimizer.step() and zero_grad(), which would train other numbers, and a session without `with`, or
    used twice. After the session the optimizer is the script's own again."""
    closed = small(tmp_path)
    for use in (lambda: next(iter(closed)), lambda: closed.backward(torch.zeros(()))):
        with pytest.raises(UsageError, match=r"the session is not open\s*use it in a `with` statement"):
            use()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"steps": 2, "batch": 4, "micro_batch": 2, "storage": str(tmp_path)}
    s = rd.session(model, optimizer, [1.0, 2.0, 3.0, 4.0], **given)
    with pytest.raises(UsageError, match=r"step 1: optimizer.step\(\) was called, and the session's"), s:
        for x in s:
            s.backward(model(x.float()[:, None]).mean())
            optimizer.step()
    with pytest.raises(UsageError, match="the session has ended"), s:
        pass
    optimizer.step()
    s = rd.session(model, optimizer, [1.0, 2.0, 3.0, 4.0], **given)
    with pytest.raises(UsageError, match=r"step 1: the gradients of its first micro-batches were dropped"), s:
        for x in s:
            optimizer.zero_grad()
            s.backward(model(x.float()[:, None]).mean())
            s.step()


def test_the_doctor_judges_the_users_loop(tmp_path: Path) -> None:
    """The recorded norm is that before the script's clip_grad_norm_, which a note names. A learning rate that is too high is found
    in the steps and in the event of a loss that is not finite, with a remedy of the script's own."""

    def loop(name: str, lr: float, steps: int, clips: bool = False, data: Any = None) -> RunDir:
        model = torch.nn.Linear(1, 1)
        for p in model.parameters():
            torch.nn.init.ones_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        data = torch.arange(8.0) if data is None else data
        with rd.session(model, optimizer, data, steps=steps, batch=4, name=name, storage=str(tmp_path)) as s:
            for x in s:
                s.backward(model(x[:, None]).square().mean(), weight=len(x))
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
                s.step()
        return RunDir(tmp_path / name)

    plain, clipped = loop("plain", 0.0, 3), loop("clipped", 0.0, 3, clips=True)
    norms = [read_steps(run)["grad_norm"].to_pylist() for run in (plain, clipped)]
    assert norms[0] == norms[1]
    assert norms[0][0] > 1
    notes = [[e.data["text"] for e in read_events(run) if e.kind == "note"] for run in (plain, clipped)]
    assert [sum("clip_grad_norm_" in text for text in of_run) for of_run in notes] == [0, 1]
    with pytest.raises(NonFinite, match="the update was not applied"):
        loop("diverges", 0.09, 2000)
    with pytest.raises(NonFinite, match=r"step 1: loss nan, .* the update was not applied"):
        loop("poisoned", 0.0, 3, data=torch.full((8,), float("nan")))
    run = RunDir(tmp_path / "diverges")
    told = [e.data for one in (run, RunDir(tmp_path / "poisoned")) for e in read_events(one) if e.kind == "non_finite"]
    assert [(e["action"], len(e["ids"])) for e in told] == [("stop", 4)] * 2
    assert [one["rank"] for one in told[1]["ranks"]] == [0]
    found = [one.finding for one in examine(run).found]
    assert {one.rule for one in found} == {"lr_too_high"}
    assert all(one.remedy.startswith("lower the optimizer's lr to 0.03; continue from") for one in found)
    assert {one.culprit["setting"] for one in found} == {"the optimizer's lr"}


def test_a_compiled_model_has_the_names_of_the_plain_one(tmp_path: Path) -> None:
    """A checkpoint of either is continued by the other. The compiler of torch's eager mode: the wrapper is what counts."""
    made = []
    for compiled in (True, False):
        torch.manual_seed(1)
        model: Any = torch.nn.Linear(1, 1)
        model = torch.compile(model, backend="eager") if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with rd.session(model, optimizer, [1.0, 2.0, 3.0], steps=4, batch=2, storage=str(tmp_path)) as s:
            for x in s:
                if compiled and s.number == 3:
                    break
                s.backward(s.model(x.float()[:, None]).square().mean(), weight=len(x))
                s.step()
        made += s.losses
    assert len(made) == 4
    assert made[3] < made[0]


def test_states_are_json_and_come_back() -> None:
    """With the types that they have; what is not plain is named."""
    generator = torch.Generator().manual_seed(1)
    state = {
        "plain": [1, 0.1, True, None, "a", float("-inf")],
        3: (b"\x00\xff", (), {}),
        "milestones": Counter({2: 1}),
        "generator": generator.get_state(),
        "empty": torch.zeros(2, 0),
        "half": torch.tensor(1.5, dtype=torch.bfloat16),
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    for name in ("generator", "empty", "half"):
        wanted = state.pop(name)
        assert torch.equal(back[name], wanted)
        assert back.pop(name).dtype == wanted.dtype
    assert back == state
    assert type(back["milestones"]) is Counter
    with pytest.raises(TypeError, match=r"a torch\._C\.Generator"):
        to_json({"a": [generator]})
    for wrong in ({"tensor": ["load", [0], ""]}, {"pickle": ""}):
        with pytest.raises(ValueError, match="no "):
            from_json(wrong)


def test_launchers_variables() -> None:
    """srun's and MPICH's become torchrun's; several ranks without a place to meet are refused."""
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
    hydra = {
        "PMI_RANK": "1",
        "PMI_SIZE": "2",
        "MPI_LOCALRANKID": "1",
        "MASTER_ADDR": "10.0.0.2",
        "MASTER_PORT": "29500",
    }
    hydra |= {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
    translate(hydra)
    assert (hydra["RANK"], hydra["WORLD_SIZE"], hydra["LOCAL_RANK"]) == ("1", "2", "1")
    alone = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    translate(alone)
    assert "RANK" not in alone
