"""Causal models of `transformers` as they are: the same numbers under each strategy, documents kept apart or packing refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from raydist import registry
from raydist.errors import SpecError, UserError
from raydist.spec import JobSpec, ModelSpec, parse
from raydist.worker.build import build_model
from tests.contracts.test_pipeline import near, train
from tests.training import GROUPED, MODELS, alone, mesh_job, run

SIZES = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
GPT2 = MODELS["transformers"]["options"]["config"]
PACKS: dict[str, dict[str, Any]] = {
    "gpt2": GPT2,
    "gpt_neox": {"model_type": "gpt_neox", **SIZES},
    "gemma2": {"model_type": "gemma2", **SIZES, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3},
    "phi": {"model_type": "phi", **SIZES},
}
REFUSES: dict[str, dict[str, Any]] = {
    "bloom": {"model_type": "bloom", "hidden_size": 16, "n_head": 2, "n_layer": 2, "vocab_size": 64},
    "mamba": {"model_type": "mamba", "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "vocab_size": 64},
}


def spec(config: Any, **options: Any) -> ModelSpec:
    return ModelSpec(name="transformers", context=16, options={"config": config, **options})


def made(config: Any, **options: Any) -> Any:
    torch.manual_seed(3)
    return registry.load("model", "transformers")(spec(config, **options), 64)


@pytest.mark.parametrize("name", PACKS)
@torch.no_grad()
def test_documents_are_kept_apart(name: str) -> None:
    """Each packed document has the logits that it has alone, single tokens and windows included; unpacked, transformers' bits."""
    model = made(PACKS[name]).eval()
    tokens_BT = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(0))
    documents_BT = torch.tensor([[0] * 5 + [1] + [2] * 6, [0] * 12])
    assert torch.equal(model(tokens_BT), model.inner(input_ids=tokens_BT).logits)
    packed = model(tokens_BT, documents=documents_BT)
    for row, (first, end) in ((0, (0, 5)), (0, (5, 6)), (0, (6, 12)), (1, (0, 12))):
        torch.testing.assert_close(
            packed[row, first:end], model(tokens_BT[row : row + 1, first:end])[0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("name", REFUSES)
@torch.no_grad()
def test_packing_is_refused_where_documents_would_mix(name: str) -> None:
    """Without an error the loss would be that of other text."""
    model = made(REFUSES[name]).eval()
    tokens_BT = torch.arange(12)[None]
    assert model(tokens_BT).shape == (1, 12, 64)
    with pytest.raises(UserError, match="data.pack: .* does not keep packed documents apart"):
        model(tokens_BT, documents=tokens_BT // 5)


@pytest.mark.parametrize("strategy", registry.names("parallel"))
def test_strategies(ranks: Any, strategy: str) -> None:
    """Losses, gradients and weights of two ranks (hsdp: four) are those of one process."""
    model = {**MODELS["transformers gpt_neox"], "context": 8}
    right = train(alone(), mesh_job("ddp", 1, model))
    variant, world = (GROUPED[strategy], 4) if strategy in GROUPED else (strategy, 2)
    for got in run(ranks, train, world, mesh_job(variant, 1, model)):
        near(got, right, 3e-6)


def test_weights_of_a_folder(tmp_path: Path) -> None:
    """With `weights`, those of the folder in fp32; without, random ones of its config."""
    peer = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**GPT2)).to(torch.bfloat16)
    peer.save_pretrained(tmp_path)
    model = made(str(tmp_path), weights=True)
    for name, p in peer.named_parameters():
        assert torch.equal(model.inner.get_parameter(name), p.float())
    assert not torch.equal(made(str(tmp_path)).inner.lm_head.weight, model.inner.lm_head.weight)


@torch.no_grad()
def test_generation() -> None:
    """The most likely tokens are those of transformers' own generate; the context is not exceeded."""
    model = made(GPT2).eval()
    tokens_BT = torch.tensor([[1, 2, 3]])
    right = model.inner.generate(tokens_BT, max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(model.generate(tokens_BT, 8, temperature=0), right)
    assert model.generate(tokens_BT, 20, generator=torch.Generator()).shape == (1, 23)


def job(config: Any, **sections: Any) -> JobSpec:
    model = {"name": "transformers", "context": 16, "options": {"config": config}}
    return parse(
        {"model": model, "data": {"source": "any"}, "train": {"steps": 1}, "cluster": {"workers": 2}, **sections}
    )


@pytest.mark.parametrize("axis", ["tensor", "pipeline", "context", "expert"])
def test_ways_to_split_that_do_not_exist(axis: str) -> None:
    """One error with what to do instead."""
    with pytest.raises(SpecError) as caught:
        job(GPT2, parallel={axis: 2})
    assert f"parallel.{axis}: 2 tensor, pipeline, context, expert cannot split a model of transformers; set 1" in str(
        caught.value
    )


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "model.options.config: .*names no architecture"),
        ("models/gpt2", "model.options.config: .models/gpt2. is a relative path"),
        ("/nowhere", "model.options.config: ./nowhere. cannot be read"),
        ({**GPT2, "n_positions": 8}, "model.context: 16 is longer than the 8 positions"),
        (7, "model.options.config"),
    ],
)
def test_configs_that_cannot_be_used(config: Any, says: str) -> None:
    """An error of the job file, before anything starts."""
    with pytest.raises(SpecError, match=says):
        job(config)


def test_what_only_a_worker_knows() -> None:
    """An architecture or a value that this transformers does not have: one error that names it."""
    for config, says in (
        ({**GPT2, "model_type": "gpt_2"}, "model_type 'gpt_2': this version .*\n.*did you mean gpt2"),
        ({**GPT2, "n_head": 3}, "transformers refuses it: "),
    ):
        with pytest.raises(UserError, match=says):
            build_model(job(config), 64)


def test_a_tokenizer_that_is_too_large() -> None:
    """config.json says how many ids there is room for."""
    assert job(GPT2).model.rows(50) == 64
    with pytest.raises(UserError, match="64: the tokenizer of the data has 65 ids"):
        job(GPT2).model.rows(65)


def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with the command that installs it, before anything starts."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else found(name, *more)
    )
    with pytest.raises(SpecError, match=r"needs the package transformers; pip install 'raydist\[transformers\]'"):
        job(json.loads(json.dumps({**GPT2})))
