"""int8 exports: the arithmetic, the files, and the commands that write and run them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from raydist import registry
from raydist.cli.main import main
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.prepare import prepare
from raydist.errors import UserError
from raydist.run.directory import SPEC, RunDir
from raydist.spec import JobSpec, dump
from raydist.worker import int8, saved_model
from raydist.worker.checkpoint.export import export
from raydist.worker.checkpoint.save import Saver

MODEL = {"name": "qwen", "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "context": 16, "tie_embeddings": False}


def filled(linear: nn.Linear) -> int8.Int8Linear:
    made = int8.Int8Linear(linear)
    made.weight[:], made.scale[:] = int8.quantize(linear.weight.detach())
    return made


@torch.no_grad()
def test_whole_numbers_are_exact() -> None:
    """Weights and activations that int8 has give the product's own bits, with the bias; a row of zeros stays zero."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(40, 24)
    linear.weight.copy_(torch.randint(-127, 128, (24, 40), generator=generator)).index_fill_(
        1, torch.tensor([0]), 127.0
    )
    linear.weight[5] = 0
    x_BTF = torch.randint(-127, 128, (2, 3, 40), generator=generator).float()
    x_BTF[..., 0] = 127
    assert torch.equal(filled(linear)(x_BTF), linear(x_BTF))
    x_BTF[0, 0] = 0
    assert torch.equal(filled(linear)(x_BTF)[0, 0], linear.bias)


@torch.no_grad()
def test_others_are_near() -> None:
    """Each weight is off by half a scale at most; the output of random ones by about a hundredth."""
    torch.manual_seed(0)
    linear, x_NF = nn.Linear(256, 64, bias=False), torch.randn(7, 256)
    made = filled(linear)
    assert ((made.weight * made.scale - linear.weight).abs() <= made.scale * 0.5001).all()
    error = (made(x_NF) - linear(x_NF)).norm() / linear(x_NF).norm()
    assert 0 < error < 0.015


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDir, TokenDataset]:
    """A run that has learned a little, with a checkpoint, and its data."""
    tmp_path = tmp_path_factory.mktemp("run")
    for i in range(9):
        (tmp_path / f"{i}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * (i + 9))
    prepare([str(tmp_path / "*.txt")], str(tmp_path / "tokens"), eval_fraction=0.4)
    data = TokenDataset(tmp_path / "tokens")
    fields = {
        "model": MODEL,
        "data": {"path": data.uri},
        "train": {"steps": 9, "global_batch": 8},
        "eval": {"batches": 2},
    }
    job, made = JobSpec.model_validate(fields), RunDir(tmp_path / "run")
    made.storage.write(SPEC, dump(job).encode())
    torch.manual_seed(1)
    model = registry.load("model", "qwen")(job.model, data.vocab_size)
    for name, p in model.named_parameters():
        if p.ndim == 1:
            nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.1)
    optimizer, windows = torch.optim.AdamW(model.parameters(), lr=3e-3), Windows(data.split("train"), 16)
    for step in range(60):
        tokens, targets, _ = windows.batch((np.arange(8) + 8 * step) % len(windows))
        (model(torch.from_numpy(tokens), targets=torch.from_numpy(targets)) / targets.size).backward()
        optimizer.step()
        optimizer.zero_grad()
    saver = Saver(
        made, rank=0, world_size=1, group=None, asynchronous=False, keep=9, attempt=1, spec_hash="", numbers={},
        on_event=lambda event: None, before_commit=None,
    )  # fmt: skip
    saver.start(3, {f"model/{n}": t for n, t in model.state_dict().items()}, {}, {"dataset": data.uri})
    assert saver.wait()
    saver.close()
    return made, data


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*words])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_commands(run: tuple[RunDir, TokenDataset], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Export prints size, loss and speed before and after; `eval` of the folder and of the run give these losses again; `sample`
    generates from both. In the files linear layers are int8 with scales, all else is fp32."""
    made, data = run
    out = tmp_path / "int8"
    code, _, err = call(capsys, "checkpoint", "export", made.uri, "--out", str(out), "--quantize", "int8")
    assert code == 0, err
    assert "weights " in err
    assert "tokens/s on this CPU" in err
    tensors = load_file(out / "model.safetensors")
    whole = {n: t for n, t in tensors.items() if t.dtype == torch.float32 and not n.endswith("_scale")}
    small = {n for n, t in tensors.items() if t.dtype == torch.int8}
    assert len(small) == 2 * 7
    assert {n.removesuffix("_scale") for n in tensors if n.endswith("_scale")} == small
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"} <= whole.keys()
    assert (out / "model.safetensors").stat().st_size < 0.5 * sum(
        file.stat().st_size for file in Path(made.uri, "checkpoints/step-00000003").glob("shard-*")
    )
    found: list[dict[str, Any]] = []
    for words in (
        [made.uri],
        [str(out), "--dataset", data.uri, "--batches", "2", "--global-batch", "8"],
    ):
        code, text, err = call(capsys, "eval", *words, "--json")
        assert code == 0, err
        found.append(json.loads(text))
    before, after = found
    assert f"{before['loss']:.4f} -> {after['loss']:.4f}" in " ".join(
        call(capsys, "checkpoint", "export", made.uri, "--out", str(tmp_path / "again"), "--quantize", "int8")[
            2
        ].split()
    )
    assert before["loss"] != after["loss"]
    assert after["loss"] == pytest.approx(before["loss"], abs=0.02)
    assert before["tokens"] == after["tokens"]
    assert after["bytes"] < 0.5 * before["bytes"]
    for what in (made.uri, str(out)):
        code, text, err = call(capsys, "sample", what, "--tokens", "5", "--prompt", "the ")
        assert code == 0, err
        assert text.startswith("the ")


def test_a_loss_that_rises_too_much(
    run: tuple[RunDir, TokenDataset], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused with the figures, and nothing is left behind."""
    made, _ = run
    before = sorted(p.name for p in tmp_path.iterdir())
    coarse = int8.quantize
    monkeypatch.setattr(int8, "quantize", lambda x: (torch.sign(coarse(x)[0]) * 127, coarse(x)[1]))
    with pytest.raises(
        UserError, match=r"the eval loss rises by \d\.\d+ nats per token, more than 0\.02: nothing was written"
    ):
        export(made, None, tmp_path / "out", quantize="int8")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_folders_that_cannot_be_run(run: tuple[RunDir, TokenDataset], tmp_path: Path) -> None:
    """Another quantization, none in config.json, a tokenizer that is too large or missing, an unknown model: one error each."""
    made, _ = run
    out = export(made, None, tmp_path / "out", quantize="int8", say=print)
    saved_model.of_folder(out)
    config = json.loads((out / "config.json").read_text())

    def with_config(**changes: Any) -> None:
        (out / "config.json").write_text(json.dumps({**config, **changes}))

    with_config(quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="quantization_config: 'gptq' is not computed here"):
        saved_model.of_folder(out)
    with_config(quantization_config=None)
    with pytest.raises(UserError, match="q_proj.weight: I8 in model.safetensors, not one of F32"):
        saved_model.of_folder(out)
    with_config(vocab_size=256)
    with pytest.raises(UserError, match="256: the tokenizer of the data has 257 ids"):
        saved_model.of_folder(out)
    with_config(model_type="gptj")
    with pytest.raises(UserError, match="model_type 'gptj': no model here reads it"):
        saved_model.of_folder(out)
    with_config()
    (out / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json: is missing"):
        saved_model.of_folder(out)
