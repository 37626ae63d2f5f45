"""A storage URI with secrets, `s3://KEY:SECRET@bucket`: every command works with it, and none prints or stores the secret.

Over a minute: every command, on a storage with secrets.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from raydist.cli.main import app
from raydist.run.directory import RunDir
from raydist.run.sweep_directory import SweepDir
from raydist.storage import Storage

KEY, SECRET = "AK1DXXEXAMPLE", "wJalrXUtnFEMI+K7MDENG"


def test_nothing_tells_the_secret(project: Any, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With runs, data and replicas on S3, neither the output of any command nor a file of a run has the key or the secret."""
    uri = s3.uri("secret").replace("key:secret@", f"{KEY}:{SECRET}@")
    job = {
        "extends": str(project.root / "job.yaml"),
        "model": {"name": "gpt", "options": {}},
        "data": {"source": str(project.root / "text")},
        "checkpoint": {"replicas": [uri.replace("/secret", "/copies")]},
        "train": {"steps": 4, "check_replicas": None},
        "cluster": {"workers": 1},
        "eval": {"every": 2, "batches": 1},
        "observe": {"exporters": [{"name": "jsonl", "options": {"path": str(tmp_path / "export.jsonl")}}]},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(job))
    grid = {"base": "base.yaml", "array": {"parameters": [{"learning_rate": [1e-3]}]}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    # First an invalid URI, which pyarrow includes in its error message.
    bad = project.raydist("runs", "--storage", f"s3://{KEY}:{SECRET}@bucket/x?nothing=1")
    done = project.raydist("sweep", str(tmp_path / "grid.yaml"), "--storage", uri, "--json")
    again = project.raydist("sweep", str(tmp_path / "grid.yaml"), "--storage", uri, "--json")
    said = [bad.stdout, bad.stderr, done.stdout, done.stderr, again.stdout, again.stderr]
    assert (bad.returncode, done.returncode, again.returncode) == (2, 0, 0), said

    folder = SweepDir(Storage(uri).at("grid"))
    (cell,) = folder.cells()
    run = folder.run(cell.id)
    data = folder.storage.at("data").full_uri
    assert run.committed() == [3, 4]
    monkeypatch.setenv("RAYDIST_STORAGE", uri)
    for arguments in [
        ["runs"], ["runs", "--json"], ["show", run.full_uri], ["show", run.full_uri, "--json"], ["show", "none"],
        ["report", run.full_uri], ["report", run.full_uri, "--json"], ["sample", run.full_uri, "--tokens", "2"],
        ["checkpoint", "list", run.full_uri], ["checkpoint", "verify", run.full_uri],
        ["checkpoint", "prune", run.full_uri, "--keep", "1"],
        ["checkpoint", "export", run.full_uri, "--out", str(tmp_path / "exported")], ["trace", run.full_uri],
        ["profile", run.full_uri],
        ["sweep", "results", "grid"], ["sweep", "results", "grid", "--json"], ["sweep", "best", "grid"],
        ["sweep", "report", "grid"], ["sweep", "results", "none"],
        ["data", "prepare", str(project.root / "text"), "--out", data], ["data", "show", data], ["data", "verify", data],
        ["data", "show", run.full_uri],
        ["submit", str(tmp_path / "base.yaml"), "--address", "http://127.0.0.1:9", "--storage", uri,
         "--working-dir", str(tmp_path)],
        ["train", str(tmp_path / "base.yaml"), "--resume", "--name", "none"],
        ["sweep", str(tmp_path / "grid.yaml"), "--dry-run"],
        ["sweep", str(tmp_path / "grid.yaml"), "--set", "train.seed=9"],
    ]:  # fmt: skip
        result = CliRunner().invoke(app, arguments)
        said += [result.output, str(result.exception or "")]
        fails = "none" in arguments or arguments[0] in ("trace", "profile", "submit") or arguments[-1] == "train.seed=9"
        fails |= arguments == ["data", "show", run.full_uri]
        assert (result.exit_code != 0) == fails, (arguments, result.output, result.exception)

    store = Storage(uri.replace("/secret", ""))
    files = {name: store.read(name) for name in store.files(recursive=True)}
    assert len(files) > 40, files.keys()
    kept = [data if not name.endswith(".gz") else gzip.decompress(data) for name, data in files.items()]
    kept += [json.dumps(pq.read_table(store.fs.open_input_file(store.path(n))).to_pylist(), default=str).encode()
             for n in files if n.endswith(".parquet")]  # fmt: skip
    kept += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.name != "base.yaml"]
    for word in (KEY, SECRET):
        assert [text for text in said if word in text] == []
        assert [name for name, data in zip(files, kept, strict=False) if word.encode() in data] == []
        assert not any(word.encode() in data for data in kept)
    assert RunDir(folder.storage.at(f"runs/{cell.id}")).committed() == [4]
