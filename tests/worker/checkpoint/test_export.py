"""An exported checkpoint is loaded by `transformers` and computes the same."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn

from raydist import registry
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import prepare
from raydist.data.tokenizers import Bytes
from raydist.errors import CheckpointCorrupt, CheckpointNotFound, DataError, UsageError, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, dump
from raydist.spec.huggingface import dense_pieces
from raydist.worker.checkpoint import export as exporting
from raydist.worker.checkpoint.export import byte_tokenizer, export
from raydist.worker.checkpoint.save import Saver

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
    """The folder appears with its last file or not at all, and no temporary files remain."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset), dataset)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export(run, None, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_names_of_other_models_are_refused():
    """A parameter that gpt does not have is an error, and is not silently dropped."""
    assert dense_pieces("blocks.11.attention.k_norm.weight")[0].name == "model.layers.11.self_attn.k_norm.weight"
    for name in ("blocks.0.router.weight", "decoder.weight"):
        with pytest.raises(KeyError):
            dense_pieces(name)
