"""`raydist data`: its output and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import raydist
from raydist.cli import data
from raydist.data.batches import Cursor, samples_hash
from raydist.data.dataset import TokenDataset
from raydist.data.samples import batches_of, training_samples
from raydist.errors import DataError, UsageError
from raydist.printable import printable
from raydist.spec import load

runner = CliRunner()


def test_prepare_show_verify(corpus: Path, tmp_path: Path) -> None:
    """prepare, show and verify work on one dataset; --json prints one object on stdout with the documented names, which is what
    `raydist.prepare_data` returns."""
    out = str(tmp_path / "out")
    made = runner.invoke(data.app, ["prepare", str(corpus), "--out", out, "--eval-fraction", "0.2", "--json"])
    assert made.exit_code == 0, made.output
    facts = json.loads(made.stdout)
    assert made.stderr.endswith("the data is prepared: 46,011 tokens, 12 documents\n")
    index = TokenDataset(out).index
    assert facts["fingerprint"] == index.fingerprint
    assert facts["train"] == {
        "tokens": index.train.tokens,
        "documents": index.train.documents,
        "bytes": index.train.bytes,
        "shards": 1,
    }
    shown = runner.invoke(data.app, ["show", out, "--json"])
    assert json.loads(shown.stdout) == facts == raydist.prepare_data(corpus, out, eval_fraction=0.2)
    assert index.fingerprint in runner.invoke(data.app, ["show", out]).stdout
    assert runner.invoke(data.app, ["verify", out]).exit_code == 0


def test_show_has_the_batch_of_a_step(corpus: Path, tmp_path: Path) -> None:
    """`show --job --step`: the samples that a run trains in that step, with their files, and how each begins."""
    out, job = str(tmp_path / "out"), tmp_path / "job.yaml"
    runner.invoke(data.app, ["prepare", str(corpus), "--out", out, "--eval-fraction", "0.2"])
    dataset = TokenDataset(out)
    for batching in ("", "batching: {max_tokens: 4096, global_tokens: 8192}"):
        job.write_text(f"data: {{path: x, {batching}}}\nmodel: {{context: 512}}\ntrain: {{steps: 9}}\n")
        spec = load(job)
        samples = training_samples(spec, dataset)
        batches = batches_of(spec, samples, dataset.fingerprint)
        ids = batches.ids(batches.after(Cursor()))
        shown = runner.invoke(data.app, ["show", out, "--job", str(job), "--step", "2", "--json"])
        assert shown.exit_code == 0, shown.output
        batch = json.loads(shown.stdout)["batch"]
        assert (batch["step"], batch["samples_hash"]) == (2, samples_hash(ids))
        assert [one["id"] for one in batch["samples"]] == ids.tolist()
        assert batch["files"] == [f"{out}/{shard.file}" for shard in dataset.index.train.shards]
        first = dataset.tokenizer.decode(samples.batch(ids[:1])[0][0][:40])
        assert batch["samples"][0]["begins"] == printable(first)
        assert batch["samples_hash"] in runner.invoke(data.app, ["show", out, "--job", str(job), "--step", "2"]).stdout
    refused = runner.invoke(data.app, ["show", out, "--step", "2"]).exception
    assert isinstance(refused, UsageError)
    assert "give --job" in str(refused)


def test_show_counts_the_padding_of_a_job(corpus: Path, tmp_path: Path) -> None:
    """`show --job` counts padding by length, tokens of an epoch in all, and repeats the notes of a run; a job without batching has
    none to count."""
    out, job = str(tmp_path / "out"), tmp_path / "job.yaml"
    runner.invoke(data.app, ["prepare", str(corpus), "--out", out, "--eval-fraction", "0.2"])
    lines = "data: {path: x, batching: {max_tokens: 4096, lengths: 2, global_tokens: 8192}}\nmodel: {context: 512}\n"
    job.write_text(lines + "train: {steps: 1}\n")
    shown = runner.invoke(data.app, ["show", out, "--job", str(job), "--json"])
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout)
    index = TokenDataset(out).index.train
    counted = facts["padding"]["by_length"]
    assert sum(part["tokens"] for part in counted.values()) == index.tokens - index.documents
    assert 0 < facts["padding"]["share"] < 0.5
    assert len(counted) <= 2
    assert (
        "longer than 512 tokens, and are split into" in runner.invoke(data.app, ["show", out, "--job", str(job)]).stdout
    )
    job.write_text("data: {path: x}\ntrain: {steps: 1}\n")
    refused = runner.invoke(data.app, ["show", out, "--job", str(job)])
    assert "has no data.batching" in str(refused.exception)


def test_verify_names_the_file_and_exits_3(corpus: Path, tmp_path: Path) -> None:
    """After a flipped byte verify names the file on stderr, and with --json on stdout too."""
    out = tmp_path / "out"
    runner.invoke(data.app, ["prepare", str(corpus), "--out", str(out)])
    (shard,) = out.glob("train-*.arrow")
    raw = bytearray(shard.read_bytes())
    raw[1_000] ^= 1
    shard.write_bytes(raw)
    result = runner.invoke(data.app, ["verify", str(out), "--json"])
    assert result.exit_code == 3
    assert [d["file"] for d in json.loads(result.stdout)["damaged"]] == [shard.name]
    assert f"{out}/{shard.name}: its hash is" in result.stderr


@pytest.mark.parametrize("command", [["show"], ["verify"], ["prepare", "--out", "out"]])
def test_what_is_not_there_is_the_users_error(tmp_path: Path, command: list[str]) -> None:
    """A missing folder raises a DataError, which `raydist` turns into exit code 2."""
    result = runner.invoke(data.app, [*command, str(tmp_path / "nothing")])
    assert isinstance(result.exception, DataError)
    assert result.exception.exit_code == 2


def test_the_module_is_light() -> None:
    """Importing the commands loads neither numpy, pyarrow, ray nor torch, so `raydist --help` is fast."""
    script = (
        "import sys, raydist.cli.data; print([m for m in ('numpy', 'pyarrow', 'ray', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"


def test_the_whole_of_data_needs_neither_torch_nor_ray() -> None:
    """Every module of raydist/data imports without ray, torch, pandas and tokenizers."""
    script = (
        "import sys, pkgutil, importlib, raydist.data as d\n"
        "for m in pkgutil.iter_modules(d.__path__): importlib.import_module('raydist.data.' + m.name)\n"
        "print([m for m in ('ray', 'torch', 'pandas', 'tokenizers') if m in sys.modules])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"
