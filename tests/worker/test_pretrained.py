"""Training starts from a folder in Hugging Face's format: every rank of every mesh reads its own part of the weights alone.

Over a minute: on each mesh ranks load the weights of a model that is large enough for its memory to be measured.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
import random
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file

from raydist import registry
from raydist.checkpoint.huggingface import INDEX, check, format_for, overlap, part_shape, tensors_of
from raydist.cluster import preflight
from raydist.data.batches import Batches
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.prepare import prepare
from raydist.errors import SpecError, StorageError, UserError
from raydist.run.directory import RunDir
from raydist.spec import JobSpec, load
from raydist.spec.huggingface import Piece
from raydist.storage import Storage
from raydist.worker import pretrained, weight_files
from raydist.worker.attempt import Job, MonitorChannel
from raydist.worker.build import build_model, build_strategy
from raydist.worker.distributed import Rank
from raydist.worker.loop import train
from raydist.worker.mesh import Mesh
from raydist.worker.parallel._split import split_layers
from tests.peaks import peak_of
from tests.s3_proxy import Counting
from tests.training import GROUPED, SHARDS_PARAMETERS, VARIANTS, Trainer, run
from tests.worker.checkpoint.test_object_store import Failing
from tests.worker.model.families import renamed, theirs, weights

IDS = 257


def saved(folder: Path, name: str, *, shard: str = "5GB", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model of `transformers`, written by it."""
    model = theirs(name, vocab_size=IDS, **changes).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    return model


def job(folder: Path, **sections: Any) -> JobSpec:
    """A job that starts from the folder, as `raydist train` reads it."""
    tree = {
        "model": {"hf": str(folder), "context": 8},
        "data": {"source": "any"},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2},
        "eval": {"every": None},
        **sections,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return load(folder / "job.yaml")


def rss(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM the most since `/proc/self/clear_refs` was written."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what))
    return int(line.split()[1]) * 1024


def memory(rank: Rank, spec: JobSpec) -> dict[str, int]:
    """Bytes: the most that this rank had more than before while it built and split the model, and allocated besides the mapped
    file while it loaded; read from the file; of its shards; and of the largest tensor."""
    mesh = Mesh.of(spec, rank)
    strategy = build_strategy(spec, mesh)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # so that memory of earlier tests is not used again
    Path("/proc/self/clear_refs").write_text("5")
    before, seen = rss("VmRSS"), dict[str, int]()
    model = build_model(spec, IDS, strategy.takes_meta)
    split = split_layers(model, mesh)

    def example(module: torch.nn.Module, samples: int = 1, part: bool = False) -> torch.Tensor:
        seen.setdefault("built", rss("VmHWM") - before)
        return module(torch.zeros(1, 8 // mesh.tensor, dtype=torch.long)).float().sum()

    strategy.wrap(model, example)
    shards = split.shards(strategy.shards()) if split is not None else strategy.shards()
    read, allocated = peak_of(lambda: pretrained.load(spec.model, model, shards, IDS))
    return {
        **seen,
        "allocated": allocated - (Path(str(spec.model.hf)) / "model.safetensors").stat().st_size,
        "read": read,
        "share": sum(shard.local.nbytes for shard in shards.values()),
        "tensor": max(math.prod(shard.shape) * 4 for shard in shards.values()),
        "whole": sum(math.prod(shard.shape) * 4 for shard in shards.values()),
    }


WIDE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_key_value_heads": 4}


@pytest.mark.parametrize("parallel", [{"strategy": "zero3"}, {"strategy": "ddp", "tensor": 2}], ids=str)
def test_memory_of_a_rank(ranks: Any, tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Until it trains, a rank has at most its share and one tensor; it reads its share, and allocates nothing while it reads."""
    saved(tmp_path / "small", "llama")
    saved(tmp_path / "wide", "llama", **WIDE)
    small, spec = (job(tmp_path / name, parallel=parallel, cluster={"workers": 2}) for name in ("small", "wide"))
    run(ranks, memory, 2, small)  # imports modules
    for found in run(ranks, memory, 2, spec):
        assert found["read"] == found["share"] < 0.51 * found["whole"]
        assert found["built"] <= found["share"] + found["tensor"] + NOISE
        assert found["share"] + found["tensor"] + NOISE < found["share"] + found["whole"] / 6  # less than a block more
        assert found["allocated"] < 2**20


NOISE = 4 << 20
"""Objects of Python and gloo's buffers."""


def loaded(rank: Rank, spec: JobSpec) -> tuple[dict[str, torch.Tensor], int, int]:
    """All parameters after `load`, the bytes that this rank read, and those of its shards."""
    meta = spec.parallel.strategy in {VARIANTS[v]["strategy"] for v in SHARDS_PARAMETERS}
    trainer = Trainer(rank, spec, full=64, model=build_model(spec, IDS, meta))
    read = pretrained.load(spec.model, trainer.model, trainer.shards, IDS, trainer.mesh)
    trainer.strategy.updated()
    trainer.step.optimizer_hooks.close()
    return trainer.whole(), read, sum(shard.local.nbytes for shard in trainer.shards.values())


MESHES: list[tuple[int, dict[str, Any]]] = [
    *[(2, VARIANTS[name]) for name in registry.names("parallel") if name not in GROUPED],
    *[(4, VARIANTS[variant]) for variant in GROUPED.values()],
    (2, {"strategy": "ddp", "tensor": 2}),
    (2, {"strategy": "ddp", "pipeline": 2}),
    (4, {"strategy": "zero3", "tensor": 2}),
    (4, {"strategy": "zero3", "pipeline": 2}),
]


@pytest.mark.parametrize(("world", "parallel"), MESHES, ids=str)
def test_each_rank_reads_its_part(ranks: Any, tmp_path: Path, world: int, parallel: dict[str, Any]) -> None:
    """Bit for bit the file's weights; each rank reads as many bytes as it updates, those of other ranks not at all."""
    peer = saved(tmp_path, "llama, biases, one key head", num_key_value_heads=2, shard="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    spec = job(tmp_path, parallel=parallel, cluster={"workers": world})
    found = run(ranks, loaded, world, spec)
    right = renamed(weights(peer), build_model(spec, IDS))
    for values, read, own in found:
        assert read == own
        assert values.keys() == right.keys()
        assert [name for name, value in right.items() if not torch.equal(values[name], value)] == []


@pytest.mark.parametrize("parallel", [{"strategy": "zero3"}, {"strategy": "ddp", "expert": 2}], ids=str)
def test_experts(ranks: Any, tmp_path: Path, parallel: dict[str, Any]) -> None:
    """Files have a tensor for each expert: they make the stacked parameters of a layer, of which a rank has some experts."""
    peer = saved(tmp_path, "qwen2_moe", shard="20KB")
    spec = job(tmp_path, parallel=parallel, cluster={"workers": 2})
    right = renamed(weights(peer), build_model(spec, IDS))
    for values, read, own in run(ranks, loaded, 2, spec):
        assert read == own
        assert [name for name, value in right.items() if not torch.equal(values[name], value)] == []


def all_loaded(
    rank: Rank, specs: list[list[JobSpec]], read_bytes: int
) -> list[tuple[dict[str, torch.Tensor], int, int]]:
    """`loaded` for each job, of which each rank has one; in rounds of so many bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "READ_BYTES", read_bytes)
        return [loaded(rank, of_ranks[rank.rank]) for of_ranks in specs]


def test_an_object_store(ranks: Any, tmp_path: Path, s3: Any) -> None:
    """Bit for bit the weights of the files there, in each format. A rank requests the index, the headers and the bytes of its
    shards, and no byte more: also where each rank has a part of each row."""
    cases = [
        (torch.float16, {"strategy": "ddp"}),
        (torch.bfloat16, {"strategy": "zero3"}),
        (torch.bfloat16, {"strategy": "ddp", "tensor": 2}),
    ]
    specs, right, headers, stores = [], [], [], []
    for i, (dtype, parallel) in enumerate(cases):
        folder = tmp_path / str(i)
        peer = saved(folder, "llama, biases, one key head", num_key_value_heads=2, shard="20KB", dtype=dtype)
        uri = s3.uploaded(folder, f"hf/{i}")
        server = uri.partition("endpoint_override=")[2].partition("&")[0]
        stores.append([Counting(server) for _ in range(2)])
        specs.append(
            [
                job(
                    tmp_path,
                    model={"hf": uri.replace(server, store.place), "context": 8},
                    parallel=parallel,
                    cluster={"workers": 2},
                )
                for store in stores[-1]
            ]
        )
        preflight.check_early(specs[-1][0], local=True)
        right.append(renamed(weights(peer), build_model(specs[-1][0], IDS)))
        each = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("*.safetensors")]
        headers.append(sum(each) + (folder / INDEX).stat().st_size)
    before = [[requested(store) for store in of_ranks] for of_ranks in stores]
    found = run(ranks, all_loaded, 2, specs, 1000)
    for number, on_rank in enumerate(found):
        for i, (values, read, own) in enumerate(on_rank):
            assert values.keys() == right[i].keys()
            assert [name for name, value in right[i].items() if not torch.equal(values[name], value)] == []
            assert read == own / 2
            assert requested(stores[i][number]) - before[i][number] == read + headers[i]
    assert all(own < 0.51 * found[0][0][2] for on_rank in found for _, _, own in on_rank[1:])
    for store in (store for of_ranks in stores for store in of_ranks):
        store.close()


def requested(store: Counting) -> int:
    """Bytes."""
    return sum(last + 1 - first for first, last in store.ranges)


def test_bad_objects(tmp_path: Path, s3: Any) -> None:
    """One error with exit code 2, without the secret of the URI, for each file that is damaged or missing, a bucket,
    and credentials that are refused."""
    saved(tmp_path, "llama")
    uri = s3.uploaded(tmp_path, "bad")
    spec = job(tmp_path, model={"hf": uri, "context": 8})
    there, name = Storage(uri), "model.safetensors"
    with pytest.raises(UserError) as caught:
        spec.model.rows(IDS + 1)
    assert "s3://bucket/bad/tokenizer.json?endpoint_override=" in caught.value.hint
    raw = there.read(name)
    begin = 8 + int.from_bytes(raw[:8], "little")
    for damaged, says in (
        (raw[:-9], "are not all in the file"),
        (raw[:5], "its header has "),
        (b"\xff" * 8 + raw[8:], "its header has 18446744073709551615 bytes"),
        (raw[:8] + raw[8:begin].replace(b'"F32"', b'"F16"') + raw[begin:], "bytes are no F16 of the shape"),
        (raw[:8] + b"[" + raw[9:], "model.safetensors: cannot be read"),
        (raw[:8] + b"[]".ljust(begin - 8) + raw[begin:], "its header is damaged"),
        (None, "has neither model.safetensors nor"),
    ):
        there.delete(name) if damaged is None else there.write(name, damaged)
        with pytest.raises(UserError) as caught:
            preflight.check_early(spec, local=True)
        assert says in caught.value.message
        assert "secret" not in str(caught.value)
    runs = str(tmp_path / "runs")
    assert preflight.look_around(runs, None, [], weights=uri)["problems"] == []
    there.delete("config.json")
    assert "were not found" in preflight.look_around(runs, None, [], weights=uri)["problems"][0]
    for place in (uri, uri.replace("//key:secret@bucket/", "//key:secret@nobucket/")):
        with pytest.raises(
            SpecError, match=r"config\.json: cannot be read: No such file.*; check the bucket's name"
        ) as caught:
            job(tmp_path, model={"hf": place, "context": 8})
        assert "secret" not in str(caught.value)
    server = uri.partition("endpoint_override=")[2].partition("&")[0]
    with closing(Failing(server)) as proxy:
        proxy.mode = "expired"
        refused = uri.replace(server, proxy.place)
        with pytest.raises(SpecError, match="ACCESS_DENIED.*; check .* the credentials") as caught:
            job(tmp_path, model={"hf": refused, "context": 8})
        assert "secret" not in str(caught.value)
        with pytest.raises(StorageError, match="ACCESS_DENIED"):  # on a rank: another attempt may succeed
            tensors_of(Storage(refused))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_formats_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    """Their values are kept, in fp32; a head that a tied model stores is left out."""
    peer = saved(tmp_path, "qwen3", dtype=dtype)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    spec = job(tmp_path)
    (values, read, own), *_ = run(None, loaded, 1, spec)
    assert read == own / 2
    for name, value in renamed(weights(peer), build_model(spec, IDS)).items():
        assert values[name].dtype is torch.float32
        assert torch.equal(values[name], value)


def trained(rank: Rank, spec: JobSpec, root: str, until: int) -> list[float]:
    """The losses of an attempt."""
    losses: list[float] = []

    def push(new: list[dict[str, Any]], told: list[dict[str, Any]]) -> None:
        losses.extend(record["loss"] for record in new)

    runs = RunDir(f"{root}/run")
    job = Job(spec, runs, str(spec.data.path), until, until)
    train(job, rank, MonitorChannel(push, lambda: None) if rank.first else None)
    return losses


def test_layers_for_further_tokens(tmp_path: Path) -> None:
    """They are read if the job wants them; others in the files are left out."""
    saved(tmp_path, "deepseek_v3")
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "model.layers.3.enorm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    plain = job(tmp_path).model
    format = format_for(plain)
    check(Storage(tmp_path), plain, format, format.shapes(plain, IDS))
    fields = {"hf": str(tmp_path), "context": 8, "options": {"num_nextn_predict_layers": 1}}
    wanted = job(tmp_path, model=fields).model
    with pytest.raises(UserError, match=r"model\.layers\.3\.input_layernorm\.weight: is missing"):
        check(Storage(tmp_path), wanted, format, format.shapes(wanted, IDS))


@pytest.mark.parametrize("name", ["qwen2", "deepseek_v3"])
def test_training_starts_from_the_weights(ranks: Any, tmp_path: Path, name: str) -> None:
    """The first loss is that of transformers on the same samples, and a later attempt goes on from its checkpoint."""
    choose = random.Random(3)
    (tmp_path / "a.txt").write_text("".join(choose.choices("abcdefgh ", k=2000)))
    prepare([str(tmp_path / "a.txt")], str(tmp_path / "tokens"), eval_fraction=0.2)
    peer = saved(tmp_path / "hf", name)
    spec = job(tmp_path / "hf", data={"path": str(tmp_path / "tokens")}, parallel={"strategy": "zero3"},
               cluster={"workers": 2}, checkpoint={"every": 2, "asynchronous": False})  # fmt: skip
    dataset = TokenDataset(str(tmp_path / "tokens"))
    windows = Windows(dataset.split("train"), spec.model.context)
    batches = Batches(len(windows), spec.train.global_batch, spec.train.seed, dataset.fingerprint)
    tokens, targets, _ = windows.batch(batches.ids(batches.at_step(0)))
    with torch.no_grad():
        right = F.cross_entropy(
            peer(torch.as_tensor(tokens)).logits.flatten(0, 1), torch.as_tensor(targets).flatten()
        ).item()
    first, second = (run(ranks, trained, 2, spec, str(tmp_path), until)[0] for until in (2, 3))
    assert len(first) == 2
    assert first[0] == pytest.approx(right, rel=1e-5)
    assert len(second) == 1


PIECES = [Piece("a", (0,)), Piece("b", (1, slice(0, 2))), Piece("c", (1, slice(2, 5)))]


def test_pieces_fill_any_part_of_a_parameter() -> None:
    """A parameter [2, 5, 3] of three tensors: every part of it gets the values at its place."""
    whole = torch.arange(30).view(2, 5, 3)
    files = {piece.name: whole[piece.at] for piece in PIECES}
    assert {p.name: part_shape(p, (2, 5, 3)) for p in PIECES} == {n: tuple(t.shape) for n, t in files.items()}
    for offset, size in [
        ((0, 0, 0), (2, 5, 3)),
        ((1, 1, 1), (1, 3, 2)),
        ((0, 4, 0), (2, 1, 3)),
        ((0, 0, 2), (1, 5, 1)),
    ]:
        part = torch.full(size, -1)
        for piece in PIECES:
            common = overlap(piece, (2, 5, 3), offset, size)
            if common is not None:
                part[common[1]] = files[piece.name][common[0]]
        assert torch.equal(part, whole[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))])


def rewritten(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


Q = "model.layers.0.self_attn.q_proj.weight"
BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda f: rewritten(f, lambda t: t.pop(Q)), f"{Q}: is missing"),
    "surplus": (lambda f: rewritten(f, lambda t: t.update(extra=torch.ones(2))), "extra: the model has no such tensor"),
    "shape": (lambda f: rewritten(f, lambda t: t.update({Q: torch.ones(4, 32)})), f"{Q}: [4, 32] in model.safetensors, [32, 32]"),
    "format": (lambda f: rewritten(f, lambda t: t.update({Q: t[Q].to(torch.int8)})), f"{Q}: I8 in model.safetensors, not one of"),
    "config": (lambda f: configured(f, intermediate_size=40), "mlp.gate_proj.weight: [48, 32] in model.safetensors, [40, 32] by"),
    "cut": (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "cannot be read"),
    "none": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "pytorch_model.bin is pickle"),
    "index": (lambda f: (f / INDEX).write_text('{"weight_map": ["a.safetensors"]}'), "has no weight_map"),
    "file": (lambda f: (f / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'), "names the file b.safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_bad_folders_are_refused_before_anything_starts(tmp_path: Path, case: str) -> None:
    """One error with exit code 2, which names the file or the tensor."""
    saved(tmp_path, "llama")
    change, says = BROKEN[case]
    change(tmp_path)
    spec = job(tmp_path)
    with pytest.raises(UserError) as caught:
        preflight.check_early(spec, local=True)
    assert caught.value.exit_code == 2
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "model", "says"),
    [
        ({"model_type": "gptj"}, {}, "config.json: model_type 'gptj': no model here reads it; there are: "),
        ({"hidden_size": None}, {}, "config.json: hidden_size: is missing"),
        ({}, {"name": "gpt"}, "model.name: gpt: "),
        ({"num_attention_heads": 5}, {}, "config.json: model.kv_heads: 2 does not divide heads 5"),
        ({}, {"hf": "nowhere"}, "nowhere/config.json: cannot be read: No such file or directory"),
        ({}, {"hf": "https://a.b/model"}, "download it first, and give the file"),
        ({}, {"options": {"sliding_windw": 4}}, 'did you mean "sliding_window"?'),
    ],
)
def test_configs_that_cannot_be_read(tmp_path: Path, changes: dict[str, Any], model: dict[str, Any], says: str) -> None:
    """An error of the job file, which names config.json or the field."""
    saved(tmp_path, "llama")
    configured(tmp_path, **changes)
    with pytest.raises(SpecError) as caught:
        job(tmp_path, model={"hf": str(tmp_path), "context": 8, **model})
    assert says in caught.value.message


def test_a_tokenizer_that_is_too_large(tmp_path: Path) -> None:
    """The embedding has a row for each id of the data, or more. Known before the data is prepared."""
    saved(tmp_path, "llama")
    spec = job(tmp_path)
    assert spec.model.rows(200) == IDS
    larger = job(tmp_path, data={"source": "any", "tokenizer": "bpe:300"})
    with pytest.raises(UserError, match="257: the tokenizer of the data has 300 ids"):
        preflight.check_early(larger, local=True)
