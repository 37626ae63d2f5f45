"""Weights by the name of a model of a hub, from a hub on loopback; and folders of weights that `raydist submit` ships."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from raydist.api import submitting
from raydist.checkpoint import hub
from raydist.errors import UserError
from raydist.spec import JobSpec, load
from raydist.storage import Storage
from tests.training import job

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 2, "max_position_embeddings": 8}  # fmt: skip


class Hub(BaseHTTPRequestHandler):
    """What huggingface_hub asks of a hub: the revision, the list of files, and each file. `asked`: how often for each path."""

    files: dict[str, bytes]
    asked: Counter[str]

    def do_GET(self) -> None:
        self.asked[self.path.partition("?")[0]] += 1
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition(f"/resolve/{COMMIT}/")[2]
        if path.startswith("/api/models/me/tiny/revision/"):
            self._send(json.dumps({"id": "me/tiny", "sha": COMMIT, "siblings": []}).encode(), body)
        elif path.startswith("/api/models/me/tiny/tree/"):
            listed = [
                {"type": "file", "path": n, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
                for n, raw in self.files.items()
            ]
            self._send(json.dumps(listed).encode(), body)
        elif name in self.files and path.startswith("/me/tiny/"):
            etag = hashlib.sha1(self.files[name]).hexdigest()
            self._send(self.files[name], body, ETag=f'"{etag}"', **{"X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def _send(self, raw: bytes, body: bool, **headers: str) -> None:
        self.send_response(200)
        for key, value in {"Content-Type": "application/json", "Content-Length": str(len(raw)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(raw)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[str]:
    """The address of a hub with the model me/tiny; it also has files that no run needs."""
    save_file({"weight": torch.ones(4)}, tmp_path / "weights")
    config, weights = json.dumps(CONFIG).encode(), (tmp_path / "weights").read_bytes()
    Hub.files = {"config.json": config, "model.safetensors": weights, "pytorch_model.bin": b"pickle", "README.md": b"#"}
    Hub.asked = Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


FETCH = """
import sys
from raydist.checkpoint import hub
from raydist.spec import load
model = hub.local(load("job.yaml"), sys.argv[1]).model
print(model.hf or model.options["weights"])
"""


def environment(folder: Path, address: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING")) and "proxy" not in k.lower()}
    return {**kept, "HF_ENDPOINT": address, "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_XET": "1"}


def written(folder: Path, name: str, field: str = "hf") -> None:
    options = {"name": "transformers", "context": 8, "options": {"weights": name}}
    tree = {
        "model": {"hf": name} if field == "hf" else options,
        "data": {"source": "python-stdlib"},
        "train": {"steps": 1},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))


def fetched(folder: Path, address: str, storage: str, runs: int = 1) -> list[str]:
    """`model.hf` of so many runs that start together."""
    command, pipe, env = [sys.executable, "-c", FETCH, storage], subprocess.PIPE, environment(folder, address)
    started = [subprocess.Popen(command, cwd=folder, env=env, text=True, stdout=pipe, stderr=pipe) for _ in range(runs)]
    ends = [(*process.communicate(timeout=120), process.returncode) for process in started]
    assert [code for _, _, code in ends] == [0] * runs, ends
    return [out.strip() for out, _, _ in ends]


NOWHERE = "http://127.0.0.1:9"


def test_two_runs_download_a_model_once(tmp_path: Path, endpoint: str) -> None:
    """Both get the same folder in the storage of the runs, of the revision that the name means now; it stays usable without
    the hub. Other files than weights and config are left out."""
    written(tmp_path, "hf://me/tiny")
    folder = tmp_path / f"runs/.hub/models--me--tiny/snapshots/{COMMIT}"
    assert fetched(tmp_path, endpoint, "runs", 2) == [str(folder)] * 2
    assert {p.name for p in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == Hub.files["model.safetensors"]
    assert Hub.asked[f"/me/tiny/resolve/{COMMIT}/model.safetensors"] == 1
    assert fetched(tmp_path, NOWHERE, "runs") == [str(folder)]


def test_runs_on_an_object_store_copy_a_model_once(tmp_path: Path, endpoint: str, s3: Any) -> None:
    """Two that start together use the same copy, and no other is left; a later one needs neither hub nor download, whichever field
    names the model. A copy that was cut off is not used."""
    written(tmp_path, "hf://me/tiny")
    model = Storage(s3.uri(f"hubs/.hub/models--me--tiny/{COMMIT}"))
    model.write("cut/config.json", b"{")
    one, other = fetched(tmp_path, endpoint, s3.uri("hubs"), 2)
    assert one == other == model.at(model.read(hub.COPY).decode()).full_uri
    assert sorted(model.folders()) == sorted(["cut", model.read(hub.COPY).decode()])
    assert {name: Storage(one).read(name) for name in Storage(one).files()} == {
        name: Hub.files[name] for name in ("config.json", "model.safetensors")
    }
    shutil.rmtree(next((tmp_path / "home").rglob("models--me--tiny/blobs")))  # of its cache
    (tmp_path / "home/hub/models--me--tiny/snapshots" / COMMIT / "config.json").unlink()
    (tmp_path / "home/hub/models--me--tiny/snapshots" / COMMIT / "config.json").write_bytes(Hub.files["config.json"])
    assert fetched(tmp_path, NOWHERE, s3.uri("hubs")) == [one]
    written(tmp_path, "hf://me/tiny", "options.weights")
    assert fetched(tmp_path, NOWHERE, s3.uri("hubs")) == [one]


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    """One error of the job file with exit code 2, which names the model and what to set."""
    written(tmp_path, "hf://me/tiny")
    done = subprocess.run(
        [sys.executable, "-m", "raydist", "train", "job.yaml", "--storage", "runs"],
        cwd=tmp_path, env=environment(tmp_path, NOWHERE), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "job.yaml: model.hf: hf://me/tiny: cannot be downloaded" in done.stderr
    assert "HF_ENDPOINT" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs/run").exists()


def test_the_job_keeps_the_name_and_the_driver_gets_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative folder stays relative in the job, so that it can be submitted; training gets its absolute path."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text(json.dumps(CONFIG))
    written(tmp_path, "tiny")
    monkeypatch.chdir(tmp_path)
    found = load("job.yaml")
    assert (found.model.hf, found.model.name, found.model.context) == ("tiny", "llama", 8)
    assert hub.local(found, "runs").model.hf == str(tmp_path / "tiny")
    assert hub.local(job("ddp"), "runs") == job("ddp")


def starting(name: str) -> JobSpec:
    plain = job("ddp", data={"source": "python-stdlib"})
    return plain.model_copy(update={"model": plain.model.model_copy(update={"hf": name})})


def test_submit_ships_a_relative_folder(tmp_path: Path) -> None:
    """A folder of weights in the working directory is shipped; one outside of it cannot be; names and absolute paths are not."""
    (tmp_path / "models/tiny").mkdir(parents=True)
    assert submitting._named_by([starting("models/tiny")], tmp_path) == [Path("models/tiny")]
    for elsewhere in ("hf://me/tiny", "s3://bucket/tiny", "/shared/tiny"):
        assert submitting._named_by([starting(elsewhere)], tmp_path) == []
    with pytest.raises(UserError, match=r"model\.hf: \.\./tiny is not under .*\n.*shared storage"):
        submitting._named_by([starting("../tiny")], tmp_path)
