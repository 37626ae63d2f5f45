"""int8 export: the arithmetic, what is quantised, the bound of the loss, and the commands that read the folder."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import raydist
from raydist.cli.main import app
from raydist.data.dataset import TokenDataset
from raydist.errors import DataError, QuantizationRefused, UsageError, UserError
from raydist.run.directory import RunDir
from raydist.worker.checkpoint.export import export
from raydist.worker.checkpoint.export_int8 import export_int8
from raydist.worker.evaluate import batches_of, evaluate, evaluate_folder
from raydist.worker.exported import open_folder
from raydist.worker.int8 import Int8Linear, quantize
from raydist.worker.loss import build as build_loss
from tests.worker.checkpoint.test_export import datasets, job, trained

__all__ = ["datasets"]  # a fixture
GPT = {"kv_heads": 2, "qk_norm": True}
MOE = {"name": "qwen_moe", "tie_embeddings": False, "options": {"num_experts": 4, "decoder_sparse_step": 2}}


def test_a_matrix_keeps_its_values_within_half_a_step() -> None:
    """Rows have scales of their own; the largest value of a row is 127 steps; a row of zeros stays zero."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0
    values, scales = quantize(x)
    assert (values.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (6, 1))
    assert values.abs().amax(1).tolist() == [127, 127, 0, 127, 127, 127]
    assert ((values * scales - x).abs() <= scales * (0.5 + 1e-5)).all()


@pytest.mark.parametrize(("inputs", "outputs", "bias"), [(40, 24, True), (13, 5, False)])
def test_the_product_is_that_of_integers(inputs: int, outputs: int, bias: bool) -> None:
    """The layer gives the exact integer sums times both scales, whatever the sizes, for one token and for many."""
    g = torch.Generator().manual_seed(1)
    weight, b = torch.randn(outputs, inputs, generator=g), torch.randn(outputs, generator=g) if bias else None
    layer = Int8Linear(*quantize(weight), b)
    for shape in ((2, 3), (1, 1)):
        x = torch.randn(*shape, inputs, generator=g)
        rows, scales = quantize(x.flatten(0, 1))
        own, own_scales = quantize(weight)
        right = (rows.long() @ own.long().T).double() * scales.double() * own_scales.double().T
        right = (right if b is None else right + b.double()).view(*shape, outputs)
        torch.testing.assert_close(layer(x).double(), right, rtol=1e-6, atol=1e-6)
        assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("model", [GPT, MOE], ids=["gpt", "qwen_moe"])
def test_linear_layers_become_int8(tmp_path: Path, datasets: dict[str, TokenDataset], model: dict[str, Any]) -> None:
    """Each is the quantised tensor of the export without; embeddings, head, norms, routers, gates and experts are unchanged.

    The loss before is that of the checkpoint, the loss after that of the folder.
    """
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    spec = job(dataset, **model)
    (ours,) = trained(run, spec, dataset)
    plain, out = export(run, None, tmp_path / "plain"), tmp_path / "out"
    measured = export_int8(run, None, out, max_increase=10.0)
    before, after = load_file(plain / "model.safetensors"), load_file(out / "model.safetensors")
    small = {name for name, tensor in after.items() if tensor.dtype == torch.int8}
    assert after.keys() == before.keys() | {f"{name}_scale" for name in small}
    for name, tensor in before.items():
        if name in small:
            values, scales = quantize(tensor)
            assert torch.equal(after[name], values)
            assert torch.equal(after[f"{name}_scale"], scales)
        else:
            assert torch.equal(after[name], tensor)
    left = {re.sub(r"model\.(layers\.\d+\.)?", "", n) for n, t in before.items() if n not in small and t.ndim > 1}
    others = {"lm_head.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight"} if model is MOE else set()
    assert {n for n in left if ".experts." not in n} == {"embed_tokens.weight"} | others
    assert len(small) == (7 * 2 if model is GPT else 4 * 2 + 3 + 3)
    config = json.loads((out / "config.json").read_text())
    ignored = config.pop("quantization_config")["ignore"]
    assert config == json.loads((plain / "config.json").read_text())
    matrices = {n for n, t in before.items() if t.ndim > 1}
    assert {f"{module}.weight" for module in ignored} == matrices - small | {"lm_head.weight"}
    assert (measured.bytes_before, measured.bytes_after) == tuple(
        (f / "model.safetensors").stat().st_size for f in (plain, out)
    )
    batches, loss = batches_of(spec, dataset), build_loss(spec)
    assert measured.before.loss == pytest.approx(evaluate(ours, batches, loss).loss, rel=1e-6)
    opened = open_folder(out)
    assert measured.after.loss == evaluate(opened.model, batches, loss).loss
    assert 0 < abs(measured.increase) < 0.5
    assert measured.before.tokens == sum(int((b.targets >= 0).sum()) for b in batches)


def test_sharded_files_stay_sharded(tmp_path: Path) -> None:
    """Each file is written by itself, and the index names the scales."""
    import transformers

    from raydist.worker import int8
    from tests.worker.test_pretrained import saved

    saved(tmp_path / "hf", "llama", shard="20KB")
    opened = open_folder(tmp_path / "hf")
    names = int8.linear_tensors(opened.model, opened.format)
    int8.write(tmp_path / "hf", tmp_path / "int8", names)
    files = sorted(p.name for p in (tmp_path / "int8").glob("*.safetensors"))
    assert files == sorted(p.name for p in (tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 2
    there = open_folder(tmp_path / "int8").model
    assert sum(isinstance(m, Int8Linear) for m in there.modules()) == len(names)
    index = json.loads((tmp_path / "int8/model.safetensors.index.json").read_text())
    inside = {name: file for file in files for name in load_file(tmp_path / "int8" / file)}
    assert index["weight_map"] == inside
    with torch.no_grad():
        tokens = torch.arange(8)[None]
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(tokens).logits
        assert torch.equal(opened.model(tokens).argmax(-1), theirs.argmax(-1))
        assert (there(tokens) - theirs).norm() < 0.03 * theirs.norm()


def test_a_loss_that_rises_too_far_is_refused(tmp_path: Path, datasets: dict[str, TokenDataset]) -> None:
    """The error has both losses and the bound; nothing is left behind. NaN is refused at any bound."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset, **GPT), dataset)
    with pytest.raises(QuantizationRefused, match=r"by .* nats, more than -10 \(.* -> .*\)") as caught:
        export_int8(run, None, tmp_path / "out", max_increase=-10.0)
    assert caught.value.exit_code == 3
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    with pytest.raises(UsageError, match="run exists"):
        export_int8(run, None, tmp_path / "run")


def test_a_loss_that_is_nan_is_refused(
    tmp_path: Path, datasets: dict[str, TokenDataset], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any bound."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset, **GPT), dataset)
    monkeypatch.setattr(
        Int8Linear, "forward", lambda self, x: x.new_full((*x.shape[:-1], self.out_features), torch.nan)
    )
    with pytest.raises(QuantizationRefused, match="by nan nats"):
        export_int8(run, None, tmp_path / "out", max_increase=1e9)
    assert not (tmp_path / "out").exists()


def called(*words: str) -> Any:
    from typer.testing import CliRunner

    done = CliRunner().invoke(app, words)
    assert done.exception is None, done.output
    return done.output


def test_the_commands(tmp_path: Path, datasets: dict[str, TokenDataset]) -> None:
    """export prints what changed; sample and evaluate, also from Python, read the folder; its files have the permissions of
    others."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset, **GPT), dataset)
    out = str(tmp_path / "int8")
    mask = os.umask(0o027)
    try:
        words = ["--quantize", "int8", "--max-loss-increase", "9"]
        printed = called("checkpoint", "export", str(tmp_path / "run"), "--out", out, *words)
    finally:
        os.umask(mask)
    assert [line.split()[0] for line in printed.splitlines()] == ["size", "eval", "tokens/s", out]
    assert {stat.S_IMODE(p.stat().st_mode) for p in Path(out).iterdir()} == {0o640}
    again = called("evaluate", out, "--data", dataset.uri, "--json", "--batches", "2", "--sequences", "3")
    found = json.loads(again)
    assert raydist.evaluate(out, dataset.uri, batches=2, sequences=3)["loss"] == pytest.approx(found["loss"], rel=1e-6)
    right = evaluate_folder(open_folder(Path(out)), dataset, 2, 3)
    assert (found["loss"], found["tokens"]) == (pytest.approx(right.loss, rel=1e-6), right.tokens)
    text = called("sample", out, "--prompt", "number", "--tokens", "5", "--temperature", "0")
    assert text.startswith("number")
    tokens = torch.tensor([list(b"number")])
    drawn = open_folder(Path(out)).model.generate(tokens, 5, temperature=0)  # type: ignore[operator]
    assert text.strip("\n") == dataset.tokenizer.decode(drawn[0].tolist()).strip("\n")
    with pytest.raises(DataError, match="was prepared with another tokenizer"):
        evaluate_folder(open_folder(Path(out)), datasets["bpe:300"], 1, 1)


def changed(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configured(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


Q = "model.layers.0.self_attn.q_proj.weight"


def test_folders_that_cannot_be_read(tmp_path: Path, datasets: dict[str, TokenDataset]) -> None:
    """One error each: an unknown architecture, another quantisation, missing or wrong scales, a file that is cut."""
    run, dataset = RunDir(tmp_path / "run"), datasets["bytes"]
    trained(run, job(dataset, **GPT), dataset)
    good = tmp_path / "good"
    export_int8(run, None, good, max_increase=9.0)
    cases: list[tuple[Any, str]] = [
        (lambda f: configured(f, model_type="gptj"), "model_type 'gptj': no model here reads it; there are|there are: deepseek"),
        (lambda f: configured(f, quantization_config={"quant_method": "gptq"}), "quantization_config: 'gptq' with these settings"),
        (lambda f: configured(f, quantization_config=None), f"{Q}: I8 in model.safetensors, not one of"),
        (lambda f: changed(f, lambda t: t.pop(f"{Q}_scale")), f"{Q}: I8 in model.safetensors, not one of"),
        (lambda f: changed(f, lambda t: t.update({f"{Q}_scale": torch.ones(3, 1)})), rf"{Q}_scale: \[3, 1\] in"),
        (lambda f: changed(f, lambda t: t.update(extra=torch.ones(2))), "extra: the model has no such tensor"),
        (lambda f: configured(f, num_hidden_layers="many"), "num_hidden_layers: 'many' is not a whole number"),
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]), "cannot be read"),
    ]  # fmt: skip
    for number, (change, says) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for file in good.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        change(folder)
        with pytest.raises(UserError, match=says):
            open_folder(folder)
