"""Exported adapters compute the same in peft and, merged, in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
import yaml
from tokenizers import Tokenizer

from raydist.data.chat_template import chat_format
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import prepare
from raydist.errors import CheckpointError, UsageError, UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import load, read_stored, stored
from raydist.worker.attempt import Job
from raydist.worker.checkpoint import restore
from raydist.worker.checkpoint.export import byte_tokenizer, export
from raydist.worker.checkpoint.restored_model import restored_model
from raydist.worker.loop import train
from tests.training import alone
from tests.worker.model.families import theirs

EVERY: dict[str, list[str] | None] = {
    "qwen3": None, "qwen2": ["attention.q", "mlp.*"], "qwen3_moe": ["attention.*"], "deepseek_v3": ["attention.*"],
}  # fmt: skip
"""Family -> the layers that get adapters."""


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Conversations, tokenized to bytes by a tokenizer.json whose end of a turn is a token of its own."""
    folder = tmp_path_factory.mktemp("data")
    inner = Tokenizer.from_str(byte_tokenizer().decode())
    inner.add_special_tokens(["<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    rows = [
        {"messages": [{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": f"{i} again"}]}
        for i in range(20)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = str(folder / "tokenizer.json")
    chat = chat_format("chatml", tokenizer, "completions")
    prepare([str(folder / "rows.jsonl")], str(folder / "tokens"), tokenizer, chat=chat, eval_fraction=0.0)
    return str(folder / "tokens")


def trained(folder: Path, name: str, tokens: str, store: Any = None, **lora: Any) -> RunDir:
    """Adapters on a model of `transformers`, after three steps. `store`: an object store for the model and the run."""
    theirs(name, vocab_size=260, num_hidden_layers=2).save_pretrained(folder / "base", max_shard_size="20KB")
    hf, home = str(folder / "base"), str(folder / "run")
    if store is not None:
        hf, home = store.uploaded(folder / "base", "lora/base"), store.uri("lora/run")
    tree = {
        "model": {"hf": hf, "context": 24, "lora": {"rank": 3, "alpha": 5.0, **lora}},
        "data": {"path": tokens, "pack": True},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 4},
        "optim": {"lr": 0.05, "schedule": "constant"},
        "eval": {"every": None},
        "checkpoint": {"asynchronous": False},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    spec, run = load(folder / "job.yaml"), RunDir(home)
    run.storage.write(SPEC, stored(spec).encode())
    train(Job(spec, run, tokens, 1, None), alone(), None)
    return run


def logits(run: RunDir, tokens: str, ids_BT: torch.Tensor) -> torch.Tensor:
    """Of the checkpoint's model here."""
    found = restore.choose(run)
    assert found is not None
    spec = read_stored(run.storage)
    made: torch.Tensor = restored_model(run, found, spec, TokenDataset(tokens).vocab_size)(ids_BT)
    return made


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks transformers
@pytest.mark.parametrize("name", EVERY)
def test_the_same_logits_in_peft_and_transformers(tmp_path: Path, tokens: str, name: str, s3: Any) -> None:
    """Within 1e-5, by the folder of peft on the base, and by the merged folder; both differ from the base alone.

    The base and the run of qwen2 are on an object store, whose secret is in no file.
    """
    run = trained(tmp_path, name, tokens, s3 if name == "qwen2" else None, targets=EVERY[name])
    ids_BT = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(0))
    adapters = export(run, None, tmp_path / "adapters", "peft")
    assert not list(adapters.glob("model*"))
    written = [run.storage.read(file) for file in run.storage.files(recursive=True)]
    assert not any(b"key:secret" in content for content in (*written, (adapters / "adapter_config.json").read_bytes()))
    merged = export(run, None, tmp_path / "merged", "huggingface", file_bytes=20_000)
    assert len(list(merged.glob("*.safetensors"))) > 2
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    whole, loading = transformers.AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True)
    assert not any(loading.values()), loading
    with torch.no_grad():
        right = logits(run, tokens, ids_BT)
        assert (base(ids_BT).logits - right).abs().max() > 0.01
        wrapped: Any = peft.PeftModel.from_pretrained(base, str(adapters))
        torch.testing.assert_close(wrapped(ids_BT).logits, right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole(ids_BT).logits, right, rtol=1e-5, atol=1e-5)


def test_the_tokenizer_has_the_template(tmp_path: Path, tokens: str) -> None:
    """The exported tokenizer writes conversations as the training data has them; generation stops where a turn ends."""
    out = export(trained(tmp_path, "qwen2", tokens), None, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    talk = [{"role": "user", "content": "7"}, {"role": "assistant", "content": "7 again"}]
    split = TokenDataset(tokens).split("train")
    ids = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    assert [*ids, split.end] == split.read(*split.document(7)).tolist()
    assert tokenizer.eos_token == "<|im_end|>"
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [257, 256]


def test_what_cannot_be_exported(tmp_path: Path, tokens: str) -> None:
    """A base that has changed, adapters in another format, and those that peft would take for others."""
    (tmp_path / "moe").mkdir()
    with pytest.raises(
        UserError, match=r"blocks.1.mlp.\w+: peft takes an adapter of such a layer for one of the experts"
    ):
        export(trained(tmp_path / "moe", "qwen3_moe", tokens), None, tmp_path / "d", "peft")
    run = trained(tmp_path, "qwen2", tokens)
    with pytest.raises(UsageError, match="--dtype bf16: adapters are written as they are saved"):
        export(run, None, tmp_path / "a", "peft", dtype="bf16")
    file = max((tmp_path / "base").glob("*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    with pytest.raises(CheckpointError, match="has other weights than the adapters were trained on"):
        export(run, None, tmp_path / "b")
    tree = yaml.safe_load((tmp_path / "job.yaml").read_text())
    tree["model"]["lora"] = None
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(tree))
    run.storage.write(SPEC, stored(load(tmp_path / "job.yaml")).encode())
    with pytest.raises(UsageError, match="--format peft: the run has no adapters"):
        export(run, None, tmp_path / "c", "peft")
