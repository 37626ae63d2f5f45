"""Models by the name of a hub: a small local server in the hub's place, real huggingface_hub in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "llama", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 24}  # fmt: skip
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "model.safetensors": bytes(200_000),
    "pytorch_model.bin": b"pickle",
}


class Hub(ThreadingHTTPServer):
    """A hub with one model, own/tiny. `got`: how often each file was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.got: Counter[str] = Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api/models/own/tiny", "/api/models/own/tiny/revision/main"):
            siblings = [{"rfilename": name} for name in FILES]
            return self.answer(json.dumps({"id": "own/tiny", "sha": COMMIT, "siblings": siblings}).encode())
        if path.startswith("/api/models/own/tiny/tree/"):
            tree = [
                {"type": "file", "path": n, "size": len(b), "oid": hashlib.sha1(b).hexdigest()}
                for n, b in FILES.items()
            ]
            return self.answer(json.dumps(tree).encode())
        name = path.rpartition("/")[2]
        if path.startswith("/own/tiny/resolve/") and name in FILES:
            if self.command == "GET":
                self.server.got[name] += 1
            return self.answer(FILES[name], ETag=f'"{hashlib.sha256(FILES[name]).hexdigest()}"')
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in {"X-Repo-Commit": COMMIT, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


SCRIPT = """
import sys
from raydist.checkpoint.huggingface import fetched
from raydist.errors import UserError
from raydist.spec import load
try:
    job = load(sys.argv[1])
    print(job.model.hf, job.model.width, fetched(job, sys.argv[2]).model.hf, "torch" in sys.modules)
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def start(url: str, name: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """A process that reads a job with `model.hf` and fetches the weights."""
    job = folder / f"{name.rpartition('/')[2]}.yaml"
    job.write_text(f"model: {{hf: '{name}'}}\ndata: {{source: any}}\ntrain: {{steps: 1}}\n")
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("HF_", "HUGGINGFACE"))}
    variables = {**kept, "HF_ENDPOINT": url, "HOME": str(folder), "HF_HUB_DISABLE_XET": "1", "no_proxy": "*", **env}
    words = [sys.executable, "-c", SCRIPT, str(job), str(folder / "runs")]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=variables)


def test_a_model_is_downloaded_once(hub: Hub, tmp_path: Path) -> None:
    """Two runs at a time send for each file once, config.json to read the job and all in the folder of the runs; the pickle is not
    sent for. Later the hub may be away; HF_HOME is another place."""
    for process in [start(hub.url, "hf://own/tiny", tmp_path) for _ in range(2)]:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, out + err
        name, width, folder, torch = out.split()
        assert (name, width, torch) == ("hf://own/tiny", "32", "False")
        assert Path(folder).is_relative_to(tmp_path / "runs/.models")
        assert (Path(folder) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert hub.got == {"config.json": 2, "model.safetensors": 1}
    away = start("http://127.0.0.1:9", "hf://own/tiny", tmp_path)
    out, err = away.communicate(timeout=240)
    assert out.split()[2] == folder, out + err
    home = start(hub.url, f"hf://own/tiny@{COMMIT}", tmp_path, HF_HOME=str(tmp_path / "home"))
    out, err = home.communicate(timeout=240)
    assert Path(out.split()[2]).is_relative_to(tmp_path / "home"), out + err


def test_a_model_that_cannot_be_downloaded(hub: Hub, tmp_path: Path) -> None:
    """A name that the hub does not have, and a hub that does not answer: one error with the name, and exit code 2."""
    wrong = start(hub.url, "hf://own/nothing", tmp_path)
    away = start("http://127.0.0.1:9", "hf://own/tiny", tmp_path)  # the port of `discard`: nothing listens there
    for process, name in ((wrong, "hf://own/nothing"), (away, "hf://own/tiny")):
        out, err = process.communicate(timeout=240)
        assert process.returncode == 2, out + err
        assert f"model.hf: {name}: cannot be downloaded: " in out
        assert "check the name and the network" in out
        assert "Traceback" not in err
