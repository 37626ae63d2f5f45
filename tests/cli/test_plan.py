"""`raydist plan`: its output on stdout, the source of the vocabulary, and a 7B job checked against a calculation by hand."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import raydist
from raydist.api import planning, speed
from raydist.checkpoint.interval import apart
from raydist.cli import plan
from raydist.data import open_or_prepare
from raydist.errors import DataError, SpecError, UsageError
from raydist.planner.vocabulary import vocabulary
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, load
from raydist.worker.pipeline_schedule import timeline
from tests.report import story

ROOT = Path(__file__).parents[2]
DEEPSEEK = ROOT / "jobs/deepseek_7b_zero3.yaml"
GIB = 2**30
SMALL = """\
name: small
model: {layers: 2, width: 32, heads: 2, context: 16}
data: {source: corpus/*.txt}
train: {steps: 1, global_batch: 8, micro_batch: 2}
cluster: {workers: 2}
"""


def call(*arguments: str | Path) -> str:
    """Stdout of the command; its exceptions are not caught."""
    app = typer.Typer()
    app.command()(plan.plan)
    done = CliRunner(env={"COLUMNS": "60"}).invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def told(*arguments: str | Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(call(*arguments, "--json"))
    return made


def row(made: dict[str, Any], strategy: str) -> dict[str, Any]:
    found: dict[str, Any] = next(r for r in made["strategies"] if r["strategy"] == strategy)
    return found


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A job of a small model, without its data."""
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def deepseek() -> dict[str, Any]:
    """The plan of the 7B job on 32 H100s."""
    return told(DEEPSEEK, "--memory", "80GiB", "--device", "h100")


BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
APART = 2 * 102400 * 4096 + 4096  # embedding, head, last norm
P = 30 * BLOCK + APART


def test_the_7b_job_is_what_it_says(deepseek: dict[str, Any]) -> None:
    """DeepSeek-LLM-7B's shape: 6.91 B parameters; 32 GPUs x micro-batch 8 x accumulation 4; fp16, ZeRO-3, optimizer on the
    host."""
    assert deepseek["model"] == {"name": "gpt", "parameters": P, "trained": P, "blocks": 30}
    assert P == 6_910_365_696
    assert deepseek["batch"] == {"global": 1024, "micro": 8, "accumulation": 4, "context": 4096}
    machine = deepseek["machine"]
    assert (machine["device"], machine["ranks"], machine["nodes"]) == ("cuda", 32, 4)
    assert (machine["memory"], machine["usable"]) == (80 * GIB, 80 * GIB - GIB - 4 * GIB)
    assert (deepseek["precision"], deepseek["offload"]["optimizer"], deepseek["attention"]) == ("fp16", "cpu", "flash")
    assert load(DEEPSEEK).parallel.strategy == "zero3"


def test_the_7b_job_by_hand(deepseek: dict[str, Any]) -> None:
    """State and traffic are exact; logits and kept activations are within 5% of a calculation on paper. The job fits in 80
    GiB."""
    zero3 = row(deepseek, "zero3")
    # All sizes divide by 32: a rank has 1/32 of everything; its optimizer is on the host, with weights and gradients.
    assert zero3["parameters"] == zero3["gradients"] == 4 * P // 32
    assert zero3["optimizer"] == 0
    tensors = 30 * 9 + 3  # each has a step counter of 4 bytes
    assert zero3["host_per_node"] == 8 * (16 * P // 32 + 4 * tensors)
    # Two copies of a node's 8 ranks, 12 bytes per parameter, and two of the previous node's ranks.
    assert zero3["copies_per_node"] == pytest.approx(4 * 8 * 12 * P // 32, rel=1e-4)  # and the model's buffers
    # The peak is at the loss: in fp16 the root is gathered, and the last block, which is kept for backward.
    assert zero3["phase"] == "loss"
    assert zero3["gathered"] == pytest.approx(2 * (APART + BLOCK), rel=1e-4)  # and a norm's gain in fp32
    # Log-probabilities, their gradient and the gradient of the logits, in fp32.
    tokens = 8 * 4096
    assert zero3["loss"] == pytest.approx(3 * tokens * 102400 * 4, rel=0.05)
    # Each block's input in fp32, and the last block's output.
    assert zero3["activations"] == pytest.approx(31 * tokens * 4096 * 4, rel=0.05)
    # In each of 4 micro-batches: gathers in fp16, twice for all blocks but the last, and gradients in fp32.
    assert zero3["sent"] == 4 * 31 * ((APART + 59 * BLOCK) // 32 * 2 + P // 32 * 4)
    assert (
        row(deepseek, "hsdp")["sent"] == 4 * 7 * ((APART + 59 * BLOCK) // 8 * 2 + P // 8 * 4) + 2 * 3 * P // 4 // 8 * 4
    )
    assert [r["strategy"] for r in deepseek["strategies"] if r["fits"]] == ["hsdp", "zero3"]
    assert row(deepseek, "ddp")["parameters"] == 4 * P
    assert row(deepseek, "ddp")["sent"] == round(2 * 31 / 32 * P * 4)


def test_the_7b_job_s_pick(deepseek: dict[str, Any]) -> None:
    """Of the two strategies that fit, the one that sends less is recommended, with the reason; the job's own is said to fit
    too."""
    pick = deepseek["pick"]
    assert (pick["strategy"], pick["micro_batch"]) == ("hsdp", 8)
    assert pick["set"] == {"parallel.strategy": "hsdp"}
    assert pick["because"].startswith("ddp, zero1 and zero2 do not fit, and of those that do it sends least")
    assert "zero3, which the job names, fits too." in deepseek["suggestions"]
    assert any(text.startswith("Each node needs 103.0 GiB of free host memory") for text in deepseek["suggestions"])


def test_the_7b_job_s_speed(deepseek: dict[str, Any]) -> None:
    """FLOPs of the shape, the blocks' forward twice, at 0.4 of the peak; compute hides all communication of zero3 and hsdp but the
    first gather and the last sum, which are those of the embedding, the head and the last norm."""
    flops = 6 * (P - 102400 * 4096) + 6 * 30 * 32 * 2 * 128 * 4096
    assert deepseek["speed"]["flops_per_token"] == flops
    zero3, hsdp = (row(deepseek, name)["speed"] for name in ("zero3", "hsdp"))
    compute = 4 / 3 * 4 * 8 * 4096 * flops / (0.4 * 989e12)
    assert zero3["compute_seconds"] == pytest.approx(compute)
    assert zero3["communication_seconds"] == pytest.approx(row(deepseek, "zero3")["sent"] / 400e9)
    across = 2 * 3 * P // 4 // 8 * 4  # each rank with its peers on three other nodes, over the network between nodes
    assert hsdp["communication_seconds"] == pytest.approx(
        (row(deepseek, "hsdp")["sent"] - across) / 450e9 + across / 50e9
    )
    alone = (2 * 102400 + 1) * 4096 / P / 4  # of 4 micro-batches one
    assert zero3["exposed_seconds"] == pytest.approx(alone * zero3["communication_seconds"])
    assert hsdp["exposed_seconds"] == pytest.approx(alone * (hsdp["communication_seconds"] - across / 50e9))
    # Weights, gradients and moments of 1/32 pass through host memory; no compute hides that.
    assert zero3["offload_seconds"] == pytest.approx(28 * P / 32 / 25e9)
    assert zero3["seconds"] == pytest.approx(compute + zero3["exposed_seconds"] + zero3["offload_seconds"])
    assert zero3["tokens_per_second"] == pytest.approx(1024 * 4096 / zero3["seconds"])


def test_where_the_gpu_is_known_there_is_a_speed(small: Path) -> None:
    """Two more columns, and the assumptions as given; otherwise one line with the reason why there are none."""
    asked = ("--device", "h100", "--gpus", "4", "--gpus-per-node", "2")
    out = call(small, *asked, "--efficiency", "0.5", "--in-node", "100", "--between-nodes", "25").splitlines()
    assert "  step, s  tokens/s  peak in" in out[3]
    estimate = "step and tokens/s are an estimate for H100: 67 TFLOP/s in fp32, 50% of it reached (--efficiency), 100 GB/s in a"
    assert out[-1].startswith(estimate)
    assert float(out[4].split()[-4]) == pytest.approx(3e-3)
    for arguments, why in (
        (("--set", "cluster.gpus_per_worker=0"), "it trains on CPUs"),
        (("--gpus", "2"), "the GPU model is not known: see --device"),
        (
            ("--device", "l4", "--gpus", "4", "--gpus-per-node", "2"),
            "the network between nodes with L4 is not known: give --between-nodes GB/s",
        ),
    ):
        made = told(small, *arguments)
        assert made["speed"] == {"device": None, "because": why}
        assert [r["speed"] for r in made["strategies"]] == [None] * 5
        shown = call(small, *arguments).splitlines()
        assert shown[-1] == f"speed: no estimate: {why}"
        assert "tokens/s" not in shown[3]
    with pytest.raises(UsageError, match='--device h10: .*\n.*did you mean "h100"') as caught:
        call(small, "--device", "h10")
    assert caught.value.exit_code == 2


def test_the_table_shows_all_of_it(small: Path) -> None:
    """One row per strategy, complete even on a narrow terminal; the recommended strategy, and the options that set it."""
    out = call(small, "--gpus", "4", "--memory", "2GiB", "--set", "parallel.strategy=zero3").splitlines()
    assert out[0].endswith("small.yaml: gpt, 35 k parameters, 2 blocks")
    assert out[1] == "4 GPUs; 2.0 GiB each, 0.9 usable (an option sets GPUs)"
    assert out[2].startswith("1 micro-batch of 2 x 16 tokens per step and rank; fp32; checkpoint_activations: none")
    assert out[3].split()[0] == "MiB"
    rows = [line.split() for line in out[4:9]]
    assert [r[0] for r in rows] == ["ddp", "zero1", "zero2", "hsdp", "zero3"]
    for line in rows:
        *amounts, total, _ = map(float, line[1:10])
        assert sum(amounts) == pytest.approx(total, abs=0.04)
        assert line[-1] == "yes"
    assert out[9].startswith("take ddp (0.0 of 0.9 GiB): of all that fit it sends least")
    assert out[10] == "  --set parallel.strategy=ddp"


def test_without_memory_sizes_only(small: Path) -> None:
    """If the device's memory is unknown, there is no verdict on the fit, and no recommendation."""
    made = told(small, "--set", "cluster.gpus_per_worker=0")
    assert made["machine"]["device"] == "cpu"
    assert made["machine"]["usable"] is None
    assert [r["fits"] for r in made["strategies"]] == [None] * 5
    assert made["pick"] is None


def test_a_gpu_brings_its_memory(small: Path) -> None:
    """--device alone sets the memory per GPU, and so which strategies fit; --memory overrides it."""
    made = told(small, "--device", "a100-40")
    assert made["machine"]["device"] == "cuda"
    assert made["machine"]["memory"] == int(39.4 * GIB)
    assert [r["fits"] for r in made["strategies"]] == [True] * 5
    assert told(small, "--device", "a100-40", "--memory", "2GiB")["machine"]["memory"] == 2 * GIB


def test_it_says_what_it_measures(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass is reported when it starts, and not on stdout."""
    said: list[str] = []
    monkeypatch.setattr(planning, "progress", lambda: nullcontext(said.append))
    out = call(small)
    assert said[:2] == ["importing torch", "building the model"]
    assert "micro-batch 2 in 2 blocks, nothing computed again" in said
    assert "in 2 blocks" not in out


def test_gpus_stand_for_workers(small: Path) -> None:
    """--gpus replaces cluster.workers, with the same checks; --gpus-per-node gives the nodes and hsdp's groups. `raydist.plan`
    returns the same."""
    made = told(small, "--gpus", "8", "--gpus-per-node", "2")
    assert (made["machine"]["ranks"], made["machine"]["nodes"], row(made, "hsdp")["shard"]) == (8, 4, 2)
    assert (made["batch"]["micro"], made["batch"]["accumulation"]) == (1, 1)
    assert raydist.plan(small, gpus=8, gpus_per_node=2) == made
    too_many = pytest.raises(SpecError, match="cluster.workers: 9 is more than the 8 sequences")
    with too_many:
        call(small, "--gpus", "9")
    with too_many:
        raydist.plan(small, gpus=9)


def test_a_tensor_group(small: Path) -> None:
    """Groups instead of ranks share the batch; a column, and keys that the page names, say what a rank sends to its group, which
    takes part of the step. The estimate of a sweep is the same. A group that the spec refuses is one line."""
    asked = ("--gpus", "4", "--gpus-per-node", "2", "--device", "h100")
    alone, shared = told(small, *asked), told(small, *asked, "--set", "parallel.tensor=2")
    assert shared["model"] == alone["model"]
    assert (shared["batch"]["micro"], shared["batch"]["accumulation"]) == (2, 2)
    assert alone["batch"]["accumulation"] == 1
    assert shared["machine"]["tensor"] == 2
    assert "tensor" not in alone["machine"]
    section = (ROOT / "docs/how-to/plan.md").read_text().split("\n## JSON\n")[1]
    assert {"tensor", "tensor_sent"} <= set(re.findall(r"`(\w+)`", section))
    ddp = row(shared, "ddp")
    assert row(alone, "ddp").keys() == ddp.keys() - {"tensor_sent"}
    assert ddp["sent"] == ddp["gradients"]  # an all-reduce of two replicas
    assert row(alone, "ddp")["gradients"] / 2 < ddp["gradients"] < row(alone, "ddp")["gradients"]
    seconds = (ddp["sent"] / 50e9, ddp["tensor_sent"] / 450e9)
    assert ddp["speed"]["communication_seconds"] == pytest.approx(sum(seconds))
    assert ddp["speed"]["exposed_seconds"] == pytest.approx(sum(seconds))  # so small a model is one bucket
    out = call(small, *asked, "--set", "parallel.tensor=2").splitlines()
    assert out[1].startswith("4 GPUs in 2 tensor groups of 2, 2 per node; ")
    assert out[2].startswith("2 micro-batches of 2 x 16 tokens per step and group; ")
    assert " sent in group " in out[3]
    assert " sent in group " not in call(small, *asked)
    job = load(small, ["cluster.workers=4", "parallel.tensor=2"])
    device = speed.named("h100")
    pace = speed.SpeedEstimator(device)(job)
    assert not isinstance(pace, str)
    eight = told(small, "--gpus", "4", "--device", "h100", "--set", "parallel.tensor=2")
    assert pace.tokens_per_second == pytest.approx(row(eight, "ddp")["speed"]["tokens_per_second"])
    with pytest.raises(SpecError, match=r"parallel.tensor: 2 does not divide the 3 workers; try 1 or 3$"):
        call(small, "--gpus", "3", "--set", "parallel.tensor=2")


def test_a_pipeline(small: Path) -> None:
    """Each rank has figures of its own, of which the strategy's row has the largest; the table shows them, and the transfers. The
    step waits for the bubble. The estimate of a sweep is the same."""
    asked = ("--gpus", "2", "--device", "h100", "--set", "model.layers=6", "--set", "model.tie_embeddings=false")
    two = ("--set", "parallel.pipeline=2", "--set", "parallel.pipeline_cut=[4,2]")
    alone, made = told(small, *asked), told(small, *asked, *two)
    assert made["model"] == alone["model"]
    assert "pipeline" not in alone["machine"]
    ddp = row(made, "ddp")
    assert made["machine"]["pipeline"]["blocks"] == [4, 2]
    assert [one["parameters"] for one in ddp["ranks"]] != [ddp["parameters"]] * 2
    assert ddp["total"] == max(one["total"] for one in ddp["ranks"])
    assert sum(one["parameters"] for one in ddp["ranks"]) == 4 * alone["model"]["parameters"]
    # An activation of 2 x 16 tokens, 32 wide, for each of 4 micro-batches, forward; and as much back.
    assert [one["pipeline_sent"] for one in ddp["ranks"]] == [4 * 2 * 16 * 32 * 4] * 2
    found = ddp["speed"]
    # Four micro-batches; so small a stage takes 1 ms for each block and 1 for the rest, a third of it forward.
    assert found["bubble"] == pytest.approx(timeline([5 / 3, 1], [10 / 3, 2], 2, 4).bubble, rel=1e-3)
    assert found["seconds"] == pytest.approx(found["compute_seconds"] + found["waits_seconds"])
    section = (ROOT / "docs/how-to/plan.md").read_text().split("\n## JSON\n")[1]
    assert {"pipeline", "ranks", "pipeline_sent", "waits_seconds", "bubble", "shares"} <= set(
        re.findall(r"`(\w+)`", section)
    )
    out = call(small, *asked, *two).splitlines()
    assert out[1].startswith("2 GPUs, 1 pipeline of 2 stages; ")
    assert " to stages " in out[3]
    at = next(i for i, line in enumerate(out) if line.startswith("each rank of a pipeline with ddp"))
    assert [line.split()[:2] for line in out[at + 2 : at + 4]] == [["0", "4"], ["1", "2"]]
    assert "ranks wait" in out[-1]
    job = load(small, ["cluster.workers=2", "model.layers=6", "model.tie_embeddings=false", *two[1::2]])
    pace = speed.SpeedEstimator(speed.named("h100"))(job)
    assert not isinstance(pace, str)
    assert pace.tokens_per_second == pytest.approx(found["tokens_per_second"])


def test_refused_strategies_are_named(small: Path) -> None:
    """A strategy that cannot train the job has no figures, but the reason."""
    made = told(small, "--set", "optim.name=muon")
    assert row(made, "zero1") == {"strategy": "zero1", "refused": "muon works on whole matrices", "fits": None}
    assert "zero1 cannot train this job: muon works on whole matrices" in call(small, "--set", "optim.name=muon")


def job(**data: Any) -> JobSpec:
    return JobSpec.model_validate({"data": data, "train": {"steps": 1}})


def test_the_vocabulary_comes_from_the_job(tmp_path: Path) -> None:
    """bytes: 257; bpe:N: N; a prepared dataset: its own; --vocab overrides all; a missing file is an error that names --vocab."""
    assert vocabulary(job(source="x").data) == 257
    assert vocabulary(job(source="x", tokenizer="bpe:1000").data) == 1000
    (tmp_path / "text.txt").write_text("so it goes. " * 500)
    source = job(source=str(tmp_path / "text.txt"), tokenizer="bpe:300").data
    prepared = open_or_prepare(source, str(tmp_path))
    own = vocabulary(job(path=prepared).data)
    assert 257 <= own <= 300
    (tmp_path / "tokenizer.json").write_bytes(Path(prepared, "tokenizer.json").read_bytes())
    assert vocabulary(job(source="x", tokenizer=str(tmp_path / "tokenizer.json")).data) == own
    for data in ({"path": str(tmp_path / "nothing")}, {"source": "x", "tokenizer": "nothing.json"}):
        with pytest.raises(DataError, match="--vocab"):
            vocabulary(job(**data).data)


def test_vocab_is_a_word_of_its_own(small: Path) -> None:
    """--vocab needs no tokenizer: the embedding, tied to the head, has that many rows."""
    small.write_text(SMALL.replace("corpus/*.txt", "corpus/*.txt, tokenizer: nothing.json"))
    few, many = (told(small, "--vocab", n)["model"]["parameters"] for n in ("100", "150"))
    assert many - few == 50 * 32


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * GIB),
        ("80G", 80 * GIB),
        ("80GB", 80 * 10**9),
        ("1.5TiB", 1536 * GIB),
        ("512 MiB", GIB // 2),
        ("1e9", 10**9),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """GiB and G are powers of two, GB a power of ten; no unit is bytes."""
    assert planning.parse_size(text) == size


@pytest.mark.parametrize("text", ["", "big", "-1GiB", "0", "1.2.3G", "80 XB", "nan", "1e999", "80", "1e5"])
def test_no_sizes(text: str) -> None:
    """Text that is not a positive size is refused, with an example."""
    with pytest.raises(UsageError, match="--memory .*\n.*80GiB"):
        planning.parse_size(text)


@pytest.mark.parametrize(
    ("sections", "asked", "here", "device"),
    [
        ({}, False, False, "cpu"),
        ({}, True, False, "cuda"),
        ({}, False, True, "cuda"),
        ({"precision": "fp16"}, False, False, "cuda"),
        ({"cluster": {"gpus_per_worker": 0}}, True, True, "cpu"),
        ({"cluster": {"gpus_per_worker": 1}}, False, False, "cuda"),
    ],
)
def test_what_is_planned_for(sections: dict[str, Any], asked: bool, here: bool, device: str) -> None:
    """The job's own setting decides first; then an option for GPUs or their memory, then fp16, then this machine's GPU."""
    spec = JobSpec.model_validate({"data": {"source": "x"}, "train": {"steps": 1}, **sections})
    assert planning.target(spec, asked=asked, here=here)[0] == device


def test_json_is_documented(deepseek: dict[str, Any]) -> None:
    """Every key of the object and of its parts is in docs/how-to/plan.md."""
    section = (ROOT / "docs/how-to/plan.md").read_text().split("\n## JSON\n")[1]
    keys = set(deepseek) | {k for r in deepseek["strategies"] for k in r}
    for name in ("model", "machine", "batch", "offload", "pick", "speed", "intervals"):
        keys |= set(deepseek[name])
    keys |= set(row(deepseek, "ddp")["speed"])
    named = set(re.findall(r"`(\w+)`", section))
    assert keys <= named, f"not in docs/how-to/plan.md: {keys - named}"
    assert all(
        f"`--{o}" in (ROOT / "docs/how-to/plan.md").read_text()
        for o in ("gpus ", "gpus-per-node", "memory", "vocab", "device", "efficiency", "in-node", "between-nodes")
    )


def test_the_intervals_are_those_of_auto(tmp_path: Path, small: Path) -> None:
    """From the forecast: a rank's state over the link to the host, and the job's own `mtbf_h`. From a run on as many ranks: what it
    measured, also without a GPU; `--scaling` scales its checkpoints and takes its jitter's default without telemetry."""
    options = ("--vocab", "256", "--device", "h100", "--gpus", "8")
    made = told(small, *options, "--set", "checkpoint.mtbf_h=1000")["intervals"]
    stall = (
        12 * told(small, *options)["model"]["parameters"] / 8 / 64e9
    )  # of ddp: the ranks divide the state for a checkpoint
    assert (made["run"], made["stall_s"], made["mtbf_s"]) == (None, pytest.approx(stall), 1000 * 3600 / 8)
    assert made["checkpoint_s"] == pytest.approx(apart(stall, 0.0, 450_000.0))
    assert made["checkpoint_steps"] == math.ceil(made["checkpoint_s"] / made["step_s"])
    assert told(small, *options, "--mtbf", "1000")["intervals"] == made
    assert told(small, "--vocab", "256")["intervals"] is None
    run = RunDir(tmp_path / "of-two")
    saved = story.event(5, "checkpoint_saved", step=2, bytes=1, seconds=4.0, stall_seconds=0.5)
    copied = story.event(6, "note", text="a copy in memory", copy_seconds=0.02)
    story.write(run, [story.begun(0, 1), saved, copied], [(1, 0, story.steps(1, 9, 1, seconds=2.0))])
    made = told(small, "--vocab", "256", "--from", run.uri)["intervals"]
    assert (made["run"], made["step_s"], made["stall_s"], made["write_s"]) == ("of-two", 2.0, 0.5, 4.0)
    assert (made["copy_cost_s"], made["copy_steps"]) == (0.02, 2)  # 0.02 s of 0.8% of the time
    text = call(small, "--vocab", "256", "--from", run.uri)
    assert (
        "checkpoint.every: auto: about 4744 steps (2:38:06), which lose least: a checkpoint stops training for 0.5 s"
        in text
    )
    assert "and is written in 4 s, as in run of-two, 2 ranks fail every 1041d 16:00:00" in text
    assert "recovery.snapshot_every: auto: about 2 steps (4 s): copies in memory take up to 1% of the time" in text
    scaled = told(small, *options, "--scaling", "--weak", "--from", run.uri)
    assert (scaled["measured"]["save"]["stall_s"], scaled["assumed"]["jitter"]) == (0.5, 0.01)
    with pytest.raises(UsageError, match="--from has no part in it"):
        call(small, *options, "--search", "--from", run.uri)


def test_scaling(tmp_path: Path, small: Path) -> None:
    """On 8 to 1,024 H100s: the point of the job's own GPUs is its forecast with the losses; a slow network shows as
    communication, and the page has every number of GPUs."""
    page, options = tmp_path / "page.html", ("--vocab", "256", "--device", "h100", "--gpus", "8")
    made = told(small, *options, "--scaling", "--weak", "--jitter", "0", "-o", page)
    assert [point["gpus"] for point in made["points"]] == [2**n for n in range(3, 11)]
    (own,) = [point for point in made["points"] if point["gpus"] == 8]
    alone = row(told(small, *options), "ddp")["speed"]
    lost = own["shares"]["checkpoints"] + own["shares"]["failures"]
    assert own["tokens_per_second"] == pytest.approx(alone["tokens_per_second"] * (1 - lost))
    slow = told(small, *options, "--scaling", "--weak", "--between-nodes", "0.5")["points"][-1]
    assert slow["shares"]["communication"] > made["points"][-1]["shares"]["communication"]
    text = page.read_text()
    figures = [json.loads(one) for one in re.findall(r'<script type="application/json">(.*?)</script>', text)]
    assert [one["x"]["ticks"] for one in figures] == [[2**n for n in range(3, 11)]] * 3, "a tick of each chart"
    with pytest.raises(UsageError, match="go with --scaling"):
        call(small, *options, "--weak")
