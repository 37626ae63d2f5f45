"""`raydist convert deepspeed` and `--deepspeed`, as a user calls them: stdout, stderr, files and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.api import submitting
from raydist.cli import main as cli
from raydist.spec import load
from tests.stderr import without_stages

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8},
    "bf16": {"enabled": True},
}
WARNING = "raydist: ds.json: no counterpart here, left out: zero_optimization.reduce_bucket_size\n"
ALONE = "raydist: ds.json: cluster.workers is not in the spec: train.global_batch 8 is that of 1 worker\n"


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a DeepSpeed file and a matching job."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text(json.dumps(CONFIG))
    job = {"name": "j", "data": {"source": "x"}, "train": {"steps": 9}, "cluster": {"workers": 3}, "precision": "fp32"}
    Path("job.yaml").write_text(yaml.safe_dump(job))


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    code = caught.value.code
    out, err = capsys.readouterr()
    return (0 if code is None else int(code)), out, err


def test_the_command_by_itself() -> None:
    """In its own process: YAML on stdout, each warning once, as a comment, exit code 0; for a bad file one line and exit code
    2."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-m", "raydist", "convert", "deepspeed", *arguments]
        return subprocess.run(words, capture_output=True, text=True, timeout=240)

    done = run("ds.json")
    assert (done.returncode, done.stderr) == (0, "")
    told = " ".join(line.removeprefix("#").strip() for line in done.stdout.splitlines() if line.startswith("#"))
    for warning in (WARNING, ALONE):
        assert told.count(warning.removeprefix("raydist: ds.json: ").strip()) == 1
    assert yaml.safe_load(done.stdout) == {
        "train": {"global_batch": 8, "micro_batch": 4},
        "parallel": {"strategy": "zero2"},
        "precision": {"params": "bf16"},
        "optim": {"clip": 0.5},
    }
    done = run("dss.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'raydist: dss.json: no such file; did you mean "ds.json"?\n'


def test_for_a_job_it_makes_one_that_extends_it(capsys: pytest.CaptureFixture[str]) -> None:
    """--spec fits the batch to the job's workers; the file of -o, in any folder, loads as the job does with --deepspeed."""
    Path("made").mkdir()
    code, out, err = command(capsys, "convert", "deepspeed", "ds.json", "--spec", "job.yaml", "-o", "made/new.yaml")
    assert (code, out, err) == (0, "", WARNING)
    assert "extends: ../job.yaml\n" in Path("made/new.yaml").read_text()
    made = load("made/new.yaml")
    assert made.train.global_batch == 24
    assert made == load("job.yaml", (), "ds.json", lambda line: None)
    _, out, _ = command(capsys, "convert", "deepspeed", "ds.json", "--spec", "job.yaml")
    Path("new.yaml").write_text(out)
    assert load("new.yaml") == made


def test_a_job_whose_name_is_not_plain_yaml(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is quoted in `extends`."""
    Path("job #2.yaml").write_text(Path("job.yaml").read_text())
    code, *_ = command(capsys, "convert", "deepspeed", "ds.json", "--spec", "job #2.yaml", "-o", "new.yaml")
    assert code == 0
    assert load("new.yaml") == load("job.yaml", (), "ds.json", lambda line: None)


@pytest.mark.parametrize("output", ["ds.json", "job.yaml", "../{here}/job.yaml", "base.yaml"])
def test_no_file_of_the_user_is_overwritten(capsys: pytest.CaptureFixture[str], output: str) -> None:
    """-o with a file that was read: the DeepSpeed file, the job, or one that it extends."""
    Path("base.yaml").write_text("train: {global_batch: 24}\n")
    Path("job.yaml").write_text("extends: base.yaml\n" + Path("job.yaml").read_text())
    before = {path.name: path.read_text() for path in Path().iterdir()}
    output = output.format(here=Path.cwd().name)
    code, _, err = command(capsys, "convert", "deepspeed", "ds.json", "--spec", "job.yaml", "-o", output)
    assert code == 2
    assert err.startswith(f"raydist: -o {output}: is one of the files that are converted\n")
    assert {path.name: path.read_text() for path in Path().iterdir()} == before


def test_a_job_with_a_deepspeed_file_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The converted file replaces the job's own DeepSpeed file."""
    Path("old.json").write_text('{"optimizer": {"type": "SGD"}}')
    Path("job.yaml").write_text(Path("job.yaml").read_text() + "deepspeed: old.json\n")
    _, out, _ = command(capsys, "convert", "deepspeed", "ds.json", "--spec", "job.yaml")
    Path("new.yaml").write_text(out)
    assert load("new.yaml").optim.name == "adamw"
    assert load("new.yaml") == load("job.yaml", (), "ds.json", lambda line: None)


@pytest.mark.parametrize(
    ("change", "arguments", "expected"),
    [
        ({"zero_optimization": {"stage": 7}}, [], "ds.json: zero_optimization.stage: 7 is not a whole number from 0 to 3"),
        ({"optimizer": {"type": "Lion"}}, [], "ds.json: optimizer.type: 'Lion' has no counterpart here"),
        ({"train_batch_size": 30}, ["--spec", "job.yaml"],
         "ds.json: train_batch_size: 30 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x "
         "cluster.workers 3"),
        ({"gradient_clipping": -1}, ["--spec", "job.yaml"], "ds.json (gradient_clipping): optim.clip: -1"),
        ({}, ["--spec", "jbo.yaml"], 'jbo.yaml: no such file; did you mean "job.yaml"?'),
        ({}, ["-o", "nowhere/x.yaml"], "nowhere/x.yaml: cannot be written"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted(
    capsys: pytest.CaptureFixture[str], change: dict[str, Any], arguments: list[str], expected: str
) -> None:
    """One clear message, nothing on stdout, exit code 2."""
    Path("ds.json").write_text(json.dumps(CONFIG | change))
    code, out, err = command(capsys, "convert", "deepspeed", "ds.json", *arguments)
    assert (code, out) == (2, "")
    assert f"raydist: {expected}" in err
    assert "Traceback" not in err


def test_train_takes_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    """--deepspeed overrides the job's own fields, and --set overrides it; warnings come before the start."""
    resume = ["--resume", "--storage", "runs"]  # ends after the job is loaded, as there is no run
    code, _, err = command(capsys, "train", "job.yaml", "--deepspeed", "ds.json", *resume)
    assert code == 2
    assert without_stages(err).startswith(f"{WARNING}raydist: nothing to resume")
    offloaded = CONFIG | {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Path("ds.json").write_text(json.dumps(offloaded))
    code, _, err = command(capsys, "train", "job.yaml", "--deepspeed", "ds.json", *resume)
    assert code == 2
    assert "ds.json (zero_optimization.offload_param.device): offload.parameters: 'cpu' needs sharded parameters" in err
    code, _, err = command(
        capsys, "train", "job.yaml", "--deepspeed", "ds.json", "--set", "parallel.strategy=zero3", *resume
    )
    assert "nothing to resume" in err


def test_submit_sends_the_file_along(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The job on the cluster gets --deepspeed with the path relative to the working directory; a file outside it is refused."""
    sent: list[str] = []
    Path("x").write_text("the job's data")
    monkeypatch.setattr(submitting, "_submit", lambda address, words, *_, **options: sent.append(" ".join(words)))
    words = ["submit", "job.yaml", "--address", "http://h:8265", "--deepspeed"]
    code, _, err = command(capsys, *words, str(Path("ds.json").resolve()))
    assert (code, sent) == (0, ["python -m raydist train job.yaml --deepspeed ds.json"]), err
    assert "left out: zero_optimization.reduce_bucket_size" in err
    outside = Path.cwd().parent / "outside.json"
    outside.write_text(json.dumps(CONFIG))
    code, _, err = command(capsys, *words, str(outside))
    assert code == 2
    assert "is not under the working directory" in err
