"""`raydist submit` of a sweep and of a script: errors are found before the submission, and the cluster runs the command for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.api import submitting
from raydist.cluster import jobs
from raydist.errors import SpecError, UsageError, UserError


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that would be submitted; in a folder with a sweep, its base, and a script."""
    words: list[list[str]] = []

    def submitted(
        address: str, told: list[str], root: Path, needed: list[Path], storages: list[str], **more: Any
    ) -> None:
        words.append([*told, *more["last"]])

    monkeypatch.setattr(submitting, "_submit", submitted)
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    Path("job.yaml").write_text(yaml.safe_dump({"name": "j", "data": {"path": "d"}, "train": {"steps": 5}}))
    array = {"parameters": [{"learning_rate": [1e-3, 1e-2]}]}
    Path("grid.yaml").write_text(yaml.safe_dump({"base": "job.yaml", "array": array}))
    Path("loop.py").write_text("import raydist.own\n")
    return words


def submitted(path: str, **given: Any) -> None:
    """`raydist submit PATH --address http://head:8265`."""
    overrides = given.pop("overrides", None)
    submitting.submit.here(path, "http://head:8265", set=overrides, **given)


def test_a_sweep(sent: list[list[str]]) -> None:
    """A sweep's options are passed to the command; a job is still submitted as `raydist train`."""
    submitted("grid.yaml", overrides=["train.steps=7"], name="mine", storage="/runs", working_dir=Path())
    submitted("job.yaml", working_dir=Path())
    command = ["python", "-m", "raydist"]
    options = ["--set", "train.steps=7", "--name", "mine", "--storage", "/runs"]
    assert sent == [[*command, "sweep", "grid.yaml", *options], [*command, "train", "job.yaml"]]


def test_what_a_sweep_has_not(sent: list[list[str]]) -> None:
    """Options for a single run, and an invalid base, are refused before anything is sent; so are secrets."""
    with pytest.raises(UsageError, match="--until, --fresh: cannot be used with a sweep"):
        submitted("grid.yaml", until=3, fresh=True, working_dir=Path())
    with pytest.raises(SpecError, match=r"model\.widht"):
        submitted("grid.yaml", overrides=["model.widht=3"], working_dir=Path())
    Path("search.yaml").write_text(
        yaml.safe_dump({
            "base": "job.yaml",
            "array": {"type": "random", "samples": 3, "parameters": {"heads": {"choice": [3, 7]}}},
            "search": "optuna",
        })
    )  # fmt: skip
    with pytest.raises(SpecError, match=r"model\.heads: 3 does not divide"):
        submitted("search.yaml", working_dir=Path())
    with pytest.raises(UsageError, match=r"s3://b/x: contains secrets") as caught:
        submitted("job.yaml", storage="s3://K:S3CRET@b/x", working_dir=Path())
    assert "S3CRET" not in str(caught.value)
    assert sent == []


def test_a_script(sent: list[list[str]]) -> None:
    """The cluster runs `raydist run` with the same options and arguments, in that order; what is wrong is found here."""
    Path("kill.yaml").write_text("- {fault: kill, rank: 1, step: 2}\n")
    given: dict[str, Any] = {"faults": Path("kill.yaml"), "overrides": ["checkpoint.keep=5"], "working_dir": Path()}
    submitted("loop.py", workers=2, cpus=1.5, name="mine", arguments=["--lr", "3"], **given)
    options = "--set checkpoint.keep=5 --name mine --faults kill.yaml --workers 2 --cpus 1.5 -- --lr 3"
    assert [" ".join(words) for words in sent] == [f"python -m raydist run loop.py {options}"]
    with pytest.raises(SpecError, match="rank: 1: the job has rank 0 alone"):
        submitted("loop.py", **given)
    Path("bad.py").write_text("x = (\n")
    with pytest.raises(UserError, match=r"bad.py: line 1: '\(' was never closed"):
        submitted("bad.py", working_dir=Path())
    with pytest.raises(SpecError, match="--set train.steps: is not a field of a script's job"):
        submitted("loop.py", overrides=["train.steps=3"], working_dir=Path())
    with pytest.raises(UsageError, match="--until: cannot be used with a script"):
        submitted("loop.py", until=3, working_dir=Path())
    with pytest.raises(UsageError, match="--workers, arguments after --: cannot be used with a job\n.*cluster.workers"):
        submitted("job.yaml", workers=2, arguments=["7"], working_dir=Path())
    with pytest.raises(UsageError, match=r"s3://b/x: contains secrets"):
        submitted("loop.py", arguments=["s3://K:S3CRET@b/x"], working_dir=Path())
    assert len(sent) == 1


def test_files_that_would_not_be_shipped(sent: list[list[str]], tmp_path: Path) -> None:
    """A sweep's base, the files that it extends, and a DeepSpeed file must be in the uploaded folder, with relative names.
    Otherwise the error names all of them, and nothing is sent."""
    inner = tmp_path / "inner"
    (inner / "deep").mkdir(parents=True)
    (inner / "d").mkdir()
    (tmp_path / "ds.json").write_text("{}")
    (inner / "deep/ds.json").write_text("{}")
    job = {"name": "j", "data": {"path": "d"}, "train": {"steps": 5}}
    files = {
        "deep/plain.yaml": job,
        "child.yaml": {"extends": "deep/plain.yaml", "deepspeed": "deep/ds.json"},
        "good.yaml": {"base": "child.yaml"},
        "up.yaml": {"extends": "../job.yaml", "deepspeed": "../ds.json"},
        "far.yaml": {"base": "up.yaml"},
        "absolute.yaml": {"extends": str(inner / "deep/plain.yaml")},
        "out.yaml": {"base": "../job.yaml"},
    }
    for name, fields in files.items():
        array = {"array": {"parameters": [{"learning_rate": [1e-3, 1e-2]}]}} if "base" in fields else {}
        (inner / name).write_text(yaml.safe_dump({**fields, **array}))
    shipped = f"would not be found on the cluster: only {inner} is uploaded"
    for name, expected in {
        "far.yaml": [
            f"inner/up.yaml: extends: ../job.yaml {shipped}",
            f"inner/up.yaml: deepspeed: ../ds.json {shipped}",
        ],
        "absolute.yaml": [f"inner/absolute.yaml: extends: {inner}/deep/plain.yaml {shipped}"],
        "out.yaml": [f"inner/out.yaml: base: ../job.yaml {shipped}"],
    }.items():
        with pytest.raises(UserError) as caught:
            submitted(f"inner/{name}", working_dir=inner)
        assert (caught.value.message.splitlines(), caught.value.exit_code) == (expected, 2)
    with pytest.raises(UserError, match="--set deepspeed: deepspeed: inner/deep/ds.json would not"):
        submitted("inner/child.yaml", overrides=["deepspeed=inner/deep/ds.json"], working_dir=inner)
    assert sent == []
    submitted("inner/child.yaml", working_dir=inner)
    submitted("inner/good.yaml", working_dir=inner)
    submitted("inner/child.yaml", working_dir=tmp_path)
    submitted("inner/up.yaml", working_dir=tmp_path)
    (inner / "up.yaml").write_text(yaml.safe_dump({**job, "deepspeed": "../ds.json"}))
    submitted("inner/up.yaml", deepspeed=inner / "deep/ds.json", working_dir=inner)
    assert [words[4] for words in sent] == ["child.yaml", "good.yaml", "inner/child.yaml", "inner/up.yaml", "up.yaml"]


def test_ctrl_c_leaves_the_job_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the following of the job ends; the message has the commands to continue it and to end the job. The job is not
    submitted again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    started: list[str] = []
    monkeypatch.setattr(submitting, "_start", lambda url, words, package, **_: started.append(words) or "job-7")
    monkeypatch.setattr(jobs, "ended", interrupted)
    asked = "http://head:8265", ["raydist"], Path("p.zip")
    with pytest.raises(SystemExit) as caught:
        submitting._drive(*asked, once=[], last=[], wait=True, retries=3)
    assert caught.value.code == 130
    assert "ray job stop job-7 --address http://head:8265" in capsys.readouterr().err
    assert started == ["raydist"]


def test_arguments_stay_last_when_it_is_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first time after --fresh, then after the wait for the driver that has died."""
    started: list[str] = []
    ends = iter([("FAILED", None, "it died"), ("SUCCEEDED", 0, "")])
    monkeypatch.setattr(submitting, "_start", lambda url, words, package, **_: started.append(words) or "job-7")
    monkeypatch.setattr(jobs, "ended", lambda *_: next(ends))
    last = ["--", "--lr", "a b"]
    submitting._drive("http://head:8265", ["raydist"], Path("p.zip"), once=["--fresh"], last=last, wait=True, retries=1)
    first, again = started
    assert first == "raydist --fresh -- --lr 'a b'"
    assert again.startswith("raydist --wait-for-driver ")
    assert again.endswith(" -- --lr 'a b'")


def test_a_job_that_was_stopped_is_not_submitted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that a user has stopped is not retried, whatever `--retries` says."""
    started: list[str] = []
    monkeypatch.setattr(submitting, "_start", lambda url, words, package, **_: started.append(words) or "job-7")
    monkeypatch.setattr(jobs, "ended", lambda *_: ("STOPPED", None, "stopped"))
    asked = "http://head:8265", ["raydist"], Path("p.zip")
    with pytest.raises(SystemExit) as caught:
        submitting._drive(*asked, once=[], last=[], wait=True, retries=3)
    assert caught.value.code == 143
    assert len(started) == 1


def test_what_a_job_names_is_shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its file, the files that it extends, faults, data, tokenizer and modules are shipped, even if .gitignore names them.
    Installed modules and files on shared storage are not."""
    needed: list[set[str]] = []
    monkeypatch.setattr(
        submitting,
        "_submit",
        lambda address, told, root, named, storages, **_: needed.append({*map(str, named), *storages}),
    )
    monkeypatch.setenv("RAYDIST_STORAGE", "/runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "inner"))
    for name in (
        "inner/text/a.txt",
        "inner/text/b.txt",
        "inner/tok.json",
        "inner/chat.jinja",
        "inner/own_shipped/deep.py",
        "inner/rows.py",
    ):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("build = all = 1\n")
    base = {"name": "j", "train": {"steps": 5}, "model": {"name": "own_shipped.deep:build"}}
    Path("inner/base.yaml").write_text(yaml.safe_dump(base))
    Path("inner/faults.yaml").write_text("- {fault: kill, rank: 0, step: 2}\n")
    data = {"source": "text/*.txt", "tokenizer": "tok.json"}
    Path("inner/job.yaml").write_text(yaml.safe_dump({"extends": "base.yaml", "data": data}))
    given: dict[str, Any] = {"working_dir": tmp_path / "inner"}
    submitted("inner/job.yaml", faults=Path("inner/faults.yaml"), storage="s3://b/x", **given)
    submitted("inner/job.yaml", overrides=["data.source=rows:all", "data.tokenizer=bytes"], **given)
    submitted("inner/job.yaml", overrides=["data.path=/shared/d", "model.name=gpt"], **given)
    chat = ["data.source=/shared/c.jsonl", "data.format=chat", "model.name=gpt"]
    for template in ("chat.jinja", "chatml"):
        submitted("inner/job.yaml", overrides=[*chat, f"data.chat_template={template}"], **given)
    files = {"/runs", "base.yaml", "job.yaml"}
    assert needed == [
        files | {"own_shipped", "faults.yaml", "text/a.txt", "text/b.txt", "tok.json", "s3://b/x"},
        files | {"own_shipped", "rows.py"},
        files | {"tok.json"},
        files | {"tok.json", "chat.jinja"},
        files | {"tok.json"},
    ]
