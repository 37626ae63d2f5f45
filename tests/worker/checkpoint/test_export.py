"""An exported checkpoint is loaded by `transformers` and computes the same."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from raydist import registry
from raydist.checkpoint.huggingface import INDEX
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import prepare
from raydist.data.tokenizers import Bytes
from raydist.errors import CheckpointCorrupt, CheckpointNotFound, DataError, UsageError, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, dump
from raydist.spec.huggingface import dense_pieces, format_of
from raydist.worker.build import build_model
from raydist.worker.checkpoint import export as exporting
from raydist.worker.checkpoint.export import byte_tokenizer, export
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.state_dict import TrainState
from raydist.worker.distributed import Rank
from tests.peaks import peak_of
from tests.training import Trainer
from tests.training import run as ranks_run

TEXT = "Žluťoučký kůň — 你好, <|endoftext|>\n\tdef f(x):  return x\x00\n"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TokenDataset]:
    """One small corpus, by tokenizer."""
    folder = tmp_path_factory.mktemp("data")
    for i in range(8):
        (folder / f"{i}.txt").write_text(f"number {i}: the quick brown fox jumps over the lazy dog\n" * (i + 3))
    made = {}
    for tokenizer in ("bytes", "bpe:300"):
        out = folder / tokenizer.replace(":", "-")
        prepare([str(folder / "*.txt")], str(out), tokenizer, eval_fraction=0.3)
        made[tokenizer] = TokenDataset(out)
    return made


def job(dataset: TokenDataset, **model: object) -> JobSpec:
    fields = {"layers": 2, "width": 32, "heads": 4, "context": 16, **model}
    return JobSpec.model_validate({"model": fields, "data": {"path": dataset.uri}, "train": {"steps": 9}})


def trained(run: RunDir, spec: JobSpec, dataset: TokenDataset, steps: tuple[int, ...] = (3,)) -> list[nn.Module]:
    """Saves a run with different weights at each of `steps`; returns the models as saved."""
    run.storage.write(SPEC, dump(spec).encode())
    models = []
    saver = Saver(
        run, rank=0, world_size=1, group=None, asynchronous=False, keep=9, attempt=1, spec_hash="", numbers={},
        on_event=lambda event: None, before_commit=None,
    )  # fmt: skip
    for step in steps:
        torch.manual_seed(step)
        model = registry.load("model", spec.model.name)(spec.model, spec.model.rows(dataset.vocab_size)).eval()
        for p in model.parameters():
            nn.init.normal_(p, mean=1.0 if p.ndim == 1 else 0.0, std=0.2)
        tensors = {f"model/{n}": t for n, t in model.state_dict().items()}
        saver.start(step, {**tensors, "optim/norm.weight/exp_avg": torch.ones(32)}, {}, {"dataset": dataset.uri})
        saver.wait()
        assert run.committed()[-1] == step
        models.append(model)
    saver.close()
    return models


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("LlamaForCausalLM", {}),
        ("LlamaForCausalLM", {"kv_heads": 2, "tie_embeddings": False, "rope_base": 77.0, "hidden": 40}),
        ("Qwen3ForCausalLM", {"qk_norm": True, "kv_heads": 1}),
        ("LlamaForCausalLM", {"name": "llama", "vocab_size": 300, "options": {"attention_bias": True, "head_dim": 12}}),
        ("MistralForCausalLM", {"name": "llama", "options": {"sliding_window": 5}}),
        ("Qwen2ForCausalLM", {"name": "qwen", "tie_embeddings": False}),
        ("MixtralForCausalLM", {"name": "mixtral", "options": {"num_local_experts": 4}}),
        ("Qwen2MoeForCausalLM", {"name": "qwen_moe", "options": {"decoder_sparse_step": 2}}),
        ("Qwen3MoeForCausalLM", {"name": "qwen_moe", "qk_norm": True, "options": {"norm_topk_prob": True}}),
        ("DeepseekV3ForCausalLM", {"name": "deepseek", "options": {"num_nextn_predict_layers": 1, "n_group": 2}}),
        ("DeepseekV2ForCausalLM", {"name": "deepseek", "options": {"topk_method": "greedy", "q_lora_rank": 12}}),
    ],
)
@torch.no_grad()
def test_transformers_computes_the_same_logits(tmp_path, datasets, kind, model):
    """Loaded from the folder alone, under the architecture in its config: every weight is found, logits agree to 1e-5."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    (ours,) = trained(run, job(dataset, **model), dataset)
    out = export(run, None, tmp_path / "deep" / "out")
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs).__name__ == kind
    assert theirs.dtype is torch.float32
    # The layers that predict further tokens are left out there, and reported.
    loading["unexpected_keys"] = {n for n in loading["unexpected_keys"] if not n.startswith("model.layers.2.")}
    assert not any(loading.values()), loading
    tokens_BT = torch.randint(0, dataset.vocab_size, (3, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens_BT).logits, ours(tokens_BT), rtol=1e-5, atol=1e-5)
    generated = theirs.generate(tokens_BT[:1, :4], max_new_tokens=8, do_sample=False, eos_token_id=-1)
    assert torch.equal(generated, ours.generate(tokens_BT[:1, :4], 8, temperature=0))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_tokenizer_goes_along(tmp_path, datasets, tokenizer):
    """AutoTokenizer of the folder gives the ids of the training data, and decodes them to the text; its end token is the
    config's."""
    run, dataset = RunDir(tmp_path / "run"), datasets[tokenizer]
    trained(run, job(dataset), dataset)
    out = export(run, None, tmp_path / "out")
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = TEXT.replace("<|endoftext|>", "end")  # which transformers would read as the end token
    ids = theirs(text)["input_ids"]
    assert ids == dataset.tokenizer.encode([text])[0].tolist()
    assert theirs.decode(ids) == text
    assert theirs.eos_token_id == dataset.end
    config, generation = (json.loads((out / f"{n}.json").read_text()) for n in ("config", "generation_config"))
    assert config["vocab_size"] == dataset.vocab_size
    assert config["eos_token_id"] == generation["eos_token_id"] == dataset.end


def saved_on(rank: Rank, spec: JobSpec, folder: str, vocabulary: int, dataset: str) -> dict[str, torch.Tensor]:
    """Saves a model from a mesh; returns its weights."""
    model = build_model(spec, vocabulary, meta=False)
    trainer = Trainer(rank, spec, full=64, model=model)
    state = TrainState(trainer.model, trainer.optimizer, trainer.shards)
    saver = Saver(
        RunDir(folder), rank=rank.rank, world_size=rank.world_size, group=rank.control, asynchronous=False, keep=1, attempt=1,
        spec_hash="", numbers={}, on_event=lambda event: None, mesh=trainer.mesh.sizes, parameters=trainer.parameters,
    )  # fmt: skip
    tensors, rank_tensors, plain = state.capture()
    saver.start(3, tensors, rank_tensors, {**plain, "dataset": dataset})
    assert saver.wait()
    saver.close()
    trainer.step.optimizer_hooks.close()
    return trainer.whole()


MOE = {"name": "qwen_moe", "layers": 2, "width": 32, "heads": 4, "context": 16, "tie_embeddings": False,
       "options": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    "mesh", [{"strategy": "zero3", "tensor": 2}, {"strategy": "zero1", "pipeline": 2, "expert": 2}]
)
def test_from_any_mesh_one_tensor_at_a_time(ranks, tmp_path, datasets, mesh):
    """Shards of 4 ranks (zero3 over tensor parallel ranks; stages whose ranks share experts) become files of the given size with an
    index, with the saved bits; no more than one tensor and its buffer are in memory, and of stacked experts no more than one."""
    dataset = datasets["bytes"]
    fields = {"model": MOE, "data": {"path": dataset.uri}, "train": {"steps": 9},
              "parallel": mesh, "cluster": {"workers": 4}}  # fmt: skip
    spec, moe = JobSpec.model_validate(fields), RunDir(tmp_path / "run")
    moe.storage.write(SPEC, dump(spec).encode())
    right = ranks_run(ranks, saved_on, 4, spec, moe.uri, dataset.vocab_size, dataset.uri)[0]
    largest = max(t[0].nbytes if ".experts." in n else t.nbytes for n, t in right.items())
    out, peak = peak_of(lambda: export(moe, None, tmp_path / "out", file_bytes=60_000))
    assert peak <= 2 * largest
    assert peak < sum(t.nbytes for t in right.values()) / 4
    files = sorted(file.name for file in out.glob("*.safetensors"))
    index = json.loads((out / INDEX).read_text())
    assert len(files) > 4
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert sorted(set(index["weight_map"].values())) == files
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = load_file(out / file)
        assert sum(t.nbytes for t in tensors.values()) <= 60_000
        assert {name for name, where in index["weight_map"].items() if where == file} == tensors.keys()
        found |= tensors
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
    format = format_of("qwen_moe")
    wanted = {p.name: w[p.at] for name, w in right.items() for p in format.pieces(name, tuple(w.shape))}
    assert found.keys() == wanted.keys()
    assert [name for name, t in wanted.items() if not torch.equal(found[name], t)] == []
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values()), loading
    ours = build_model(spec, dataset.vocab_size)
    ours.load_state_dict(right, strict=False)
    tokens_BT = torch.randint(0, dataset.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(theirs(tokens_BT).logits, ours(tokens_BT), rtol=1e-5, atol=1e-5)


OF_LIBRARY = {
    "GPT2LMHeadModel": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16},  # tied
    "FalconForCausalLM": {"model_type": "falcon", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, 
                          "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 1},
    "GPTNeoXForCausalLM": {"model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "max_position_embeddings": 16, "vocab_size": 300},
    "MixtralForCausalLM": {"model_type": "mixtral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                           "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4},
}  # fmt: skip
"""Class of the library -> its config."""


@pytest.mark.parametrize("kind", OF_LIBRARY)
@torch.no_grad()
def test_a_model_of_the_library_goes_back_to_it(ranks, tmp_path, datasets, kind):
    """`model.name: transformers`, saved by two ranks of zero3: the folder is loaded as that class with every weight, and has the
    same logits to the bit; in files of the given size, with no more than one tensor in memory."""
    dataset, run = datasets["bytes"], RunDir(tmp_path / "run")
    fields = {"model": {"name": "transformers", "context": 16, "options": {"config": OF_LIBRARY[kind]}},
              "data": {"path": dataset.uri}, "train": {"steps": 9}, "parallel": {"strategy": "zero3"},
              "cluster": {"workers": 2}}  # fmt: skip
    spec = JobSpec.model_validate(fields)
    run.storage.write(SPEC, dump(spec).encode())
    right = ranks_run(ranks, saved_on, 2, spec, run.uri, dataset.vocab_size, dataset.uri)[0]
    largest = max(t.nbytes for t in right.values())
    out, peak = peak_of(lambda: export(run, None, tmp_path / "out", file_bytes=largest))
    assert peak <= 2 * largest
    assert len([*out.glob("*.safetensors")]) > 1
    theirs, loading = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert type(theirs).__name__ == kind
    assert not any(loading.values()), loading
    ours = build_model(spec, dataset.vocab_size).eval()
    ours.load_state_dict(right, strict=False)
    tokens_BT = torch.randint(0, dataset.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(theirs(tokens_BT).logits, ours(tokens_BT))
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == theirs.config.eos_token_id == dataset.end


@pytest.mark.parametrize(
    ("dtype", "kept"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_another_format(tmp_path, datasets, dtype, kept):
    """Weights are rounded once, and config.json says so."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    (ours,) = trained(run, job(dataset), dataset)
    out = export(run, None, tmp_path / "out", dtype=dtype)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype is kept
    assert torch.equal(theirs.model.layers[1].mlp.up_proj.weight, ours.blocks[1].mlp.up.weight.to(kept))


def test_values_that_a_format_does_not_have(tmp_path, datasets):
    """A weight beyond the range of fp16 is named, and nothing is left behind; so is another format."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    spec = job(dataset)
    run.storage.write(SPEC, dump(spec).encode())
    model = registry.load("model", "gpt")(spec.model, dataset.vocab_size)
    model.blocks[0].mlp.up.weight.data[3, 3] = 7e4
    save_state(run, model, dataset)
    with pytest.raises(UserError, match=r"fp16: model\.layers\.0\.mlp\.up_proj\.weight has values up to 7e\+04"):
        export(run, None, tmp_path / "out", dtype="fp16")
    with pytest.raises(UsageError, match="--dtype int4"):
        export(run, None, tmp_path / "out", dtype="int4")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def save_state(run: RunDir, model: nn.Module, dataset: TokenDataset) -> None:
    saver = Saver(
        run, rank=0, world_size=1, group=None, asynchronous=False, keep=9, attempt=1, spec_hash="", numbers={},
        on_event=lambda event: None, before_commit=None,
    )  # fmt: skip
    tensors = {f"model/{n}": t for n, t in model.state_dict().items()}
    saver.start(3, tensors, {}, {"dataset": dataset.uri})
    assert saver.wait()
    saver.close()


def test_byte_tokenizer_has_every_byte():
    """id = byte for all 256, for any text; 256 is the end token."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(byte_tokenizer().decode())
    text = "".join(map(chr, range(0x800))) + TEXT.replace("<|endoftext|>", "") + "🎈"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|endoftext|>").ids == [ord("a"), Bytes.end]
    assert tokenizer.get_vocab_size() == Bytes.vocab_size


def test_the_step_that_was_asked_for(tmp_path, datasets):
    """A given step, else the newest; for a step that does not exist the error names those that do."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    spec = job(dataset)
    first, last = trained(run, spec, dataset, steps=(3, 6))
    for step, model, name in ((3, first, "a"), (None, last, "b")):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(export(run, step, tmp_path / name))
        assert torch.equal(theirs.model.norm.weight, model.norm.weight)
    with pytest.raises(CheckpointNotFound, match="4") as caught:
        export(run, 4, tmp_path / "c")
    assert "3, 6" in caught.value.hint
    assert not (tmp_path / "c").exists()


def test_no_checkpoint_yet(tmp_path, datasets):
    """A run without a committed checkpoint cannot be exported."""
    run = RunDir(tmp_path / "run")
    run.storage.write(SPEC, dump(job(datasets["bytes"])).encode())
    with pytest.raises(CheckpointNotFound, match="no checkpoint"):
        export(run, None, tmp_path / "out")


def test_a_flipped_byte_is_not_exported(tmp_path, datasets):
    """The only checkpoint is corrupt: the error names the file, and nothing is written."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset), dataset)
    (shard,) = [p for p in (tmp_path / "run/checkpoints/step-00000003").iterdir() if p.name != "MANIFEST-0001.json"]
    content = bytearray(shard.read_bytes())
    content[1000] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CheckpointCorrupt, match=shard.name):
        export(run, 3, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported(tmp_path, datasets):
    """Another format, an existing folder, another model: each is refused with a remedy, before anything is read."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    run.storage.write(SPEC, dump(job(dataset, name="mlp")).encode())
    with pytest.raises(UsageError, match="--format gguf") as caught:
        export(run, None, tmp_path / "out", "gguf")
    assert "safetensors" in caught.value.hint
    with pytest.raises(UsageError, match="run exists"):
        export(run, None, tmp_path / "run")
    with pytest.raises(UserError, match="mlp: has no counterpart"):
        export(run, None, tmp_path / "out")


def test_a_dataset_that_moved(tmp_path, datasets):
    """Its tokenizer is needed: the error says where it is missing, and `dataset` gives the new location."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset), dataset)
    with pytest.raises(DataError, match="gone") as caught:
        export(run, None, tmp_path / "out", dataset=str(tmp_path / "gone"))
    assert "where the dataset is now" in caught.value.hint
    moved = tmp_path / "moved"
    moved.mkdir()
    for file in Path(dataset.uri).glob("*.json"):
        (moved / file.name).write_bytes(file.read_bytes())
    assert (export(run, None, tmp_path / "out", dataset=str(moved)) / "tokenizer.json").exists()


def test_others_may_read_what_the_umask_lets_them(tmp_path, datasets):
    """Each exported file has the permissions of any new file, the weights too."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset), dataset)
    before = os.umask(0o027)
    try:
        out = export(run, None, tmp_path / "out")
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in out.iterdir()}
    assert modes == dict.fromkeys(modes, 0o640)
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_a_failed_write_leaves_nothing(tmp_path, datasets, monkeypatch):
    """The folder appears with its last file or not at all, and no temporary files remain. Where no folder can be, that is said."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset), dataset)
    for place in (Path("/proc/x"), Path(dataset.uri) / "index.json" / "x"):
        with pytest.raises(UsageError, match="no folder can be made there"):
            export(run, None, place)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "write_files", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_names_of_other_models_are_refused():
    """A parameter that gpt does not have is an error, and is not silently dropped."""
    assert dense_pieces("blocks.11.attention.k_norm.weight")[0].name == "model.layers.11.self_attn.k_norm.weight"
    for name in ("blocks.0.router.weight", "decoder.weight"):
        with pytest.raises(KeyError):
            dense_pieces(name)
