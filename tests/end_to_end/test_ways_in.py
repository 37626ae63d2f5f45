"""The same job under torchrun, without Ray; and the results of a finished run: text, weights, tables."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from raydist.cli.main import app

TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
GPT = ["--set", "model.name=gpt"]


@pytest.fixture(scope="module")
def on_ray(project: Any) -> dict[str, Any]:
    """A GPT on the user's own text, trained on two Ray workers."""
    return project.train("gpt", *GPT, own_model=False)  # type: ignore[no-any-return]


def test_torchrun_gives_the_same_bits_without_ray(project: Any, on_ray: dict[str, Any], tmp_path: Path) -> None:
    """With `torchrun -m raydist.launch.standalone`, where `import ray` raises, records and weights equal those on Ray."""
    (tmp_path / "ray.py").write_text("raise ImportError('there is no ray here')\n")
    env = project.environment() | {
        "PYTHONPATH": str(tmp_path),
        "TMPDIR": str(tmp_path),
    }  # torchrun leaves its logs there
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "raydist.launch.standalone", "job.yaml"]
    command = [*command, "--name", "by-torchrun", "--json", *GPT]
    done = subprocess.run(command, cwd=project.root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"
    names = ("step", "loss", "grad_norm", "samples_hash")
    both = [[[row[n] for n in names] for row in project.steps(run)] for run in ("gpt", "by-torchrun")]
    assert both[0] == both[1]
    assert project.weights("gpt", 12) == project.weights("by-torchrun", 12)
    shown = project.show("by-torchrun")
    assert (shown["status"], shown["eval_loss"]) == ("finished", on_ray["eval_loss"])


def test_show_has_the_promised_names(project: Any, on_ray: dict[str, Any]) -> None:
    """`raydist train --json` prints the object that `raydist show --json` prints, with the documented names."""
    shown = project.show("gpt")
    assert shown == on_ray
    assert list(shown) == [
        "run", "path", "status", "steps", "loss", "eval_loss", "tokens_per_second", "attempts", "checkpoints", "faults",
        "workers",
    ]  # fmt: skip
    (attempt,) = shown["attempts"]
    startup = attempt.pop("startup")
    assert attempt == {"number": 1, "world_size": 2, "first_step": 1, "last_step": 12, "cause": None}
    assert list(startup["stages"]) == ["schedule", "import", "rendezvous", "build", "load", "first_step"]
    assert startup["repeated_steps"] == 0
    assert [c["step"] for c in shown["checkpoints"]] == [3, 6, 9, 12]
    assert sum(c["best"] for c in shown["checkpoints"]) == 1
    assert shown["workers"] == []
    listed = json.loads(project.warm("runs", "--json").stdout)
    assert "gpt" in {r["run"] for r in listed}


def test_sample_and_export(project: Any, on_ray: dict[str, Any]) -> None:
    """`sample` prints the same text for the same seed; transformers loads the exported weights as a Llama."""

    def run(*command: str) -> str:
        """In this process, which has imported torch."""
        done = CliRunner().invoke(app, [*command, "--storage", str(project.runs)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    texts = [run("sample", "gpt", "--tokens", "20", "--prompt", "doc", "--seed", "1") for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0].startswith("doc")
    run("checkpoint", "export", "gpt", "--format", "safetensors", "--out", str(project.root / "exported"))
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(project.root / "exported")
    assert type(model).__name__ == "LlamaForCausalLM"


def test_a_user_s_mistake_has_no_traceback(project: Any) -> None:
    """An unknown run, a wrong field and a missing file give one clear error each, with exit code 2."""
    for command, expected in (
        (["show", "no-such-run"], "no run 'no-such-run'"),
        (["train", "job.yaml", "--set", "optim.lrr=1"], 'did you mean "lr"?'),
        (["train", "jop.yaml"], "no such file"),
        (["train", "job.yaml", "--name", "a/b"], "run name 'a/b'"),
        (["train", "job.yaml", "--resume", "--name", "never"], "nothing to resume"),
        (["train", "job.yaml", "--set", "data.path=nowhere"], "nowhere"),
    ):
        done = project.warm(*command)
        assert done.returncode == 2, (command, done.stderr)
        assert expected in done.stderr
        assert "Traceback" not in done.stderr
