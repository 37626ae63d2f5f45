"""Whole runs without Ray: `python -m raydist.launch.standalone` on the GPU."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from raydist.checkpoint import manifest
from raydist.data.batches import MicroBatch
from raydist.report.summary import steps
from raydist.report.trace import load, merge
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.run.log import read_events
from raydist.worker.dataloader import _tensors, to_device
from tests.gpu.device import CUDA, DEVICE, cuda_only

MODEL = {"layers": 2, "width": 64, "heads": 2, "context": 64}
LIMIT = """
import sys, torch
from raydist.launch import standalone
torch.cuda.set_per_process_memory_fraction(float(sys.argv.pop(1)))
sys.exit(standalone.main())
"""


class Project:
    """A folder with a corpus and its runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        source = Path(subprocess.__file__).read_text() + Path(json.__file__).read_text()
        (root / "text.txt").write_text(source)

    def start(self, name: str, *options: str, program: tuple[str, ...] = (), **sections: Any) -> Any:
        """The finished process of run `name`; `sections` override those of a small job."""
        train = {"steps": 8, "global_batch": 8, "micro_batch": 4, "deterministic": True, **sections.pop("train", {})}
        spec = {
            "name": name,
            "model": {**MODEL, **sections.pop("model", {})},
            "data": {"source": str(self.root / "text.txt")},
            "train": train,
            "checkpoint": {"every": 4},
            "eval": {"every": None},
            "cluster": {"workers": 1, "gpus_per_worker": 1 if CUDA else 0},
            **sections,
        }
        path = self.root / f"{name}.yaml"
        path.write_text(yaml.safe_dump(spec))
        command = program or ("-m", "raydist.launch.standalone")
        arguments = [sys.executable, *command, str(path), "--storage", str(self.root / "runs"), "--json", *options]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment, check=False)

    def train(self, name: str, *options: str, **sections: Any) -> dict[str, Any]:
        """The run's outcome."""
        done = self.start(name, *options, **sections)
        assert done.returncode == 0, done.stderr
        outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return outcome

    def run(self, name: str) -> RunDir:
        return RunDir(str(self.root / "runs" / name))

    def exact(self, name: str) -> list[list[Any]]:
        """The values that a restart must not change."""
        names = ("step", "loss", "lr", "grad_norm", "tokens", "samples_hash")
        return [[row[n] for n in names] for row in steps(self.run(name))]

    def weights(self, name: str, step: int) -> dict[str, list[str]]:
        """The bytes of every tensor of a checkpoint, including optimizer state."""
        run = self.run(name)
        found = manifest.read(run, step)
        made = {}
        for tensor, entry in found.tensors.items():
            if tensor.startswith(("model/", "optim/")):
                parts = []
                for chunk in sorted(entry.chunks, key=lambda c: c.offsets):
                    with run.storage.open(manifest.path(step, chunk.file)) as source:
                        source.seek(chunk.start)
                        parts.append(source.read(chunk.length).hex())
                made[tensor] = parts
        return made


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Shared by all tests of this file."""
    return Project(tmp_path_factory.mktemp("project"))


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("fp32", {}),
        ("bf16", {"precision": "bf16", "train": {"compile": "blocks"}}),
        ("fp16", {"precision": {"params": "fp16", "loss_scale": {"window": 2}}}),
        ("offload", {"precision": "bf16", "offload": {"optimizer": "cpu"}}),
    ],
)
def test_a_resumed_run_has_the_same_bits(project: Project, name: str, sections: dict[str, Any]) -> None:
    """Checkpoints are copied from the GPU and written in the background: losses, gradient norms, weights and moments equal those
    of an uninterrupted run. The run reports which device it uses, and why."""
    if name == "fp16" and not CUDA:
        pytest.skip("raydist refuses fp16 on a CPU")
    whole = project.train(name, **json.loads(json.dumps(sections)))
    assert whole["status"] == "finished"
    first = project.train(f"{name}-resumed", "--until", "4", **json.loads(json.dumps(sections)))
    assert first["status"] == "paused"
    project.train(f"{name}-resumed", **json.loads(json.dumps(sections)))
    assert len(project.exact(name)) == 8
    assert project.exact(f"{name}-resumed") == project.exact(name)
    assert project.weights(f"{name}-resumed", 8) == project.weights(name, 8)
    notes = [e.data["text"] for e in read_events(project.run(name)) if e.kind == "note"]
    expected = f"device cuda:0: CUDA device 0 of {torch.cuda.device_count()}" if CUDA else "device cpu: "
    assert any(expected in note for note in notes)


@cuda_only
def test_running_out_of_memory_is_named(project: Project) -> None:
    """A micro-batch that cannot fit: the process fails with torch's own error, and the run's log has the rank, the path of the
    allocator's snapshot, and the option that adds to it."""
    wide = {"layers": 8, "width": 1024, "heads": 8, "context": 1024}
    total = torch.cuda.get_device_properties(0).total_memory
    done = project.start("oom", program=("-c", LIMIT, str(3e9 / total)), model=wide,
                         train={"global_batch": 64, "micro_batch": 64, "steps": 1, "deterministic": False})  # fmt: skip
    assert done.returncode != 0
    assert "OutOfMemoryError" in done.stderr
    run = project.run("oom")
    (note,) = [e.data["text"] for e in read_events(run) if e.kind == "note" and "out of memory" in e.data["text"]]
    assert note.startswith("rank 0 ran out of memory; a snapshot of the allocator's blocks is in ")
    assert "observe.memory_history" in note
    assert list(Path(project.root / "runs" / "oom").rglob("rank-00000.memory-1.pickle"))


def test_a_trace_has_kernels_and_ranges_and_is_merged(project: Project) -> None:
    """Requested before the run begins, taken in its first steps: kineto's part has the GPU's kernels and the phases' ranges, and
    report.trace computes the shares of a step from it."""
    run = project.run("traced")
    request = requests.ask_trace(run, 2, 600)
    project.train("traced", train={"steps": 1000 if CUDA else 200, "deterministic": False}, checkpoint={"every": None})
    names, missing = requests.parts(run, request.number)
    assert (len(names), missing) == (1, [])
    merged, told = merge(run, names)
    events = json.loads(gzip.decompress(merged))["traceEvents"]
    ranges = {e["name"] for e in events if e.get("ph") == "X"}
    assert {"forward", "backward", "optimizer"} <= ranges
    if CUDA:
        part = load(run, names[0])["traceEvents"]
        kinds = {e.get("cat") for e in part}
        assert {"kernel", "gpu_memcpy", "gpu_user_annotation"} <= kinds
    assert told["ranks"]


@cuda_only
def test_the_loader_pins_what_it_makes() -> None:
    """Batches are in pinned memory, and their copies to the device run in stream order without blocking the host."""
    arrays = MicroBatch(np.arange(64).reshape(4, 16), np.arange(64).reshape(4, 16))
    pinned = _tensors(arrays, pin=True)
    assert pinned.tokens.is_pinned()
    assert pinned.targets.is_pinned()
    to_device(pinned, DEVICE)  # loads CUDA's modules
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)  # two seconds
    there = to_device(pinned, DEVICE)
    copied = torch.cuda.current_stream().record_event()
    assert not copied.query()  # the host did not wait
    assert there.tokens.device == DEVICE
    assert torch.equal(there.tokens.cpu(), pinned.tokens)
