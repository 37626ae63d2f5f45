"""`model.name: transformers` trains a model of the library as the library computes it, under every strategy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from pydantic import ValidationError

from raydist.checkpoint import hub
from raydist.cluster import preflight
from raydist.data.batches import MASKED
from raydist.errors import SpecError, UserError
from raydist.planner.facts import Pass
from raydist.planner.measure import Planner
from raydist.spec import JobSpec, ModelSpec, load, transformers_source
from raydist.worker.distributed import Rank
from raydist.worker.model.transformers import build
from tests.ownmodels import save_pretrained
from tests.training import CONTEXT, VARIANTS, VOCAB, Trainer, alone, counted, job, mine, run, samples, world_of

FALCON = {"model_type": "falcon", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": False,
          "new_decoder_architecture": True, "num_kv_heads": 1}  # fmt: skip
"""Attention and feed-forward in parallel: no model here computes it."""
N = 5
"""Samples of the global batch: ranks have unequal parts."""


def of(config: dict[str, Any], strategy: str = "ddp", **sections: Any) -> JobSpec:
    return job(strategy, {"name": "transformers", "context": CONTEXT, "options": {"config": config}}, **sections)


def two_steps(rank: Rank, spec: JobSpec) -> dict[str, torch.Tensor]:
    """The losses of two steps, the first gradients, and the weights after the steps."""
    torch.manual_seed(1)
    trainer = Trainer(rank, spec, N * CONTEXT, build(spec.model, VOCAB))
    found: dict[str, torch.Tensor] = {}
    batches = mine(rank, *samples(N), 2)
    for step in (1, 2):
        if step == 1:
            trainer.before_update = lambda: found.update({f"grad {n}": g for n, g in trainer.whole(grad=True).items()})
        else:
            trainer.before_update = lambda: None
        report = trainer.step(step, batches, counted(batches), 1e-2, want_stop=False)
        found[f"loss {step}"] = torch.tensor(report.loss)
    return found | trainer.whole()


def test_every_strategy_trains_it_as_one_process(ranks: Any) -> None:
    """The first loss and gradients are those of the library alone; each strategy has the same losses, gradients and weights."""
    expected = two_steps(alone(), of(FALCON))
    torch.manual_seed(1)
    theirs = build(of(FALCON).model, VOCAB).inner
    tokens, targets = samples(N)
    logits = theirs(tokens).logits.flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=MASKED)
    loss.backward()
    torch.testing.assert_close(expected["loss 1"], loss.detach(), rtol=1e-6, atol=0)
    clip = min(1.0, 0.5 / float(torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])))  # type: ignore[misc]
    for name, p in theirs.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(expected[f"grad inner.{name}"], p.grad * clip, rtol=1e-4, atol=1e-6)
    for variant in VARIANTS:
        for got in run(ranks, two_steps, world_of(variant, 2), of(FALCON, variant)):
            # Sums of ranks in another order.
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-6, msg=lambda text, v=variant: f"{v}: {text}")


BLOOM = {"model_type": "bloom", "hidden_size": 16, "n_layer": 1, "n_head": 2}
WINDOW = {"model_type": "mistral", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
          "num_key_value_heads": 1, "sliding_window": 4}  # fmt: skip
MAMBA = {"model_type": "mamba", "hidden_size": 16, "state_size": 4, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BLOOM, "BloomForCausalLM of transformers cannot keep documents apart: it takes no position_ids"),
        (WINDOW, "its config has sliding_window, which a mask of documents replaces"),
        (MAMBA, "MambaForCausalLM of transformers cannot keep documents apart: it takes no position_ids"),
    ],
)
def test_what_cannot_keep_documents_apart_says_so(config: dict[str, Any], why: str) -> None:
    """Packing is refused with the reason; without it the model runs."""
    model = build(of(config).model, VOCAB)
    tokens = samples(1)[0]
    assert model(tokens).shape == (1, CONTEXT, VOCAB)
    with pytest.raises(UserError, match=f"data.pack: .*{why}"):
        model(tokens, documents=torch.zeros_like(tokens))


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (BLOOM, "it takes no position_ids"),
        (MAMBA, "it takes no position_ids"),
        ({"model_type": "xlstm"}, "it takes no attention_mask and no position_ids"),
        (WINDOW, "its config has sliding_window, which a mask of documents replaces"),
        ({"model_type": "mistral"}, "its config has sliding_window, which a mask of documents replaces"),
        ({"model_type": "gemma3_text"}, "its config has sliding_window, which a mask of documents replaces"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            "its config has sliding_window, which a mask of documents replaces",
        ),
        ({"model_type": "mistral", "sliding_window": None}, ""),
        ({"model_type": "qwen2"}, ""),
        ({"model_type": "gpt-sw3"}, ""),
        (FALCON, ""),
    ],
)
def test_what_the_source_shows_is_refused_with_the_spec(config: dict[str, Any], why: str) -> None:
    """Before any worker starts, from the library's source: arguments, and windows of the config or of its class's defaults."""
    if not why:
        assert of(config, data={"source": "any", "pack": True}).data.pack
        return
    with pytest.raises(ValidationError, match=f"{config['model_type']} of transformers does not, {why}"):
        of(config, data={"source": "any", "pack": True})
    assert not of(config).data.pack


def test_a_config_of_a_hub_is_checked_once_it_is_here(tmp_path: Path) -> None:
    """It was not there when the job was read."""
    of_hub = tmp_path / "runs" / hub.CACHE / "models--me--tiny"
    for name, text in (("refs/main", "abc"), ("snapshots/abc/config.json", json.dumps(BLOOM))):
        (of_hub / name).parent.mkdir(parents=True)
        (of_hub / name).write_text(text)
    for pack in (False, True):
        model = {"options": {"config": "hf://me/tiny"}}
        spec = written(tmp_path, model=model, data={"source": "any", "pack": pack})
        if not pack:
            found = hub.local(spec, str(tmp_path / "runs"), present=True).model.options["config"]
            assert found == str(of_hub / "snapshots/abc")
            continue
        with pytest.raises(SpecError, match="data.pack: .* bloom of transformers does not"):
            hub.local(spec, str(tmp_path / "runs"), present=True)


def test_weights_on_an_object_store(tmp_path: Path, s3: Any) -> None:
    """They are those of the same folder on a disk; the config's values go with the job. A tensor that is missing is named, and so
    is a config of another kind, before anything starts."""
    theirs = build(of({**FALCON, "vocab_size": VOCAB}).model, VOCAB).inner.to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="5KB")
    uri = s3.uploaded(tmp_path / "hf", "transformers")
    spec = hub.local(written(tmp_path, model={"options": {"weights": uri}}), str(tmp_path))
    assert (spec.model.options["weights"], spec.model.options["config"]["model_type"]) == (uri, "falcon")
    assert spec.model.rows(5) == VOCAB
    preflight.check_early(spec, local=True)
    local = written(tmp_path, model={"options": {"weights": str(tmp_path / "hf")}})
    torch.testing.assert_close(
        build(spec.model, VOCAB).state_dict(), build(local.model, VOCAB).state_dict(), rtol=0, atol=0
    )
    index = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text())
    lost = sorted(index["weight_map"])[0]
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != index["weight_map"][lost]}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    s3.uploaded(tmp_path / "hf", "transformers")
    for each in (spec, local):
        with pytest.raises(UserError, match=rf"model\.options\.weights: .* missing: .*{re.escape(lost)}"):
            build(each.model, VOCAB)
    (tmp_path / "hf/config.json").write_text(json.dumps({"model_type": "gtp2"}))
    s3.uploaded(tmp_path / "hf", "transformers")
    with pytest.raises(SpecError, match="config.model_type: 'gtp2' is no causal language model"):
        hub.local(written(tmp_path, model={"options": {"weights": uri}}), str(tmp_path))


def test_a_model_that_mixes_documents_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a mask and positions, and ignores them: two documents in a few tokens show it."""
    from transformers import GPT2LMHeadModel

    forward = GPT2LMHeadModel.forward

    def ignores(self: Any, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        return forward(self, input_ids, **more)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", ignores)
    assert build(of(GPT2).model, VOCAB).cannot_pack == "tokens of one document change the logits of the next"


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}


def written(folder: Path, **sections: Any) -> JobSpec:
    """The job of a file with these sections."""
    model = {"name": "transformers", "context": 8, **sections.pop("model")}
    tree = {"model": model, "data": {"source": "any"}, "train": {"steps": 1}, **sections}
    (folder / "job.yaml").write_text(yaml.safe_dump(tree))
    return load(folder / "job.yaml")


@pytest.mark.parametrize(
    ("model", "parallel", "says"),
    [
        ({"options": {"config": {"model_type": "gtp2"}}}, {}, "config.model_type: 'gtp2' is no causal language model of tr"),
        ({"options": {"config": {"model_type": "gtp2"}}}, {}, 'did you mean "gpt2"?'),
        ({}, {}, "model.options.config: is missing, and options.weights, too"),
        ({"options": {"config": "nowhere"}}, {}, "nowhere cannot be read: No such file or directory"),
        ({"options": {"config": GPT2}, "context": 17}, {}, "model.context: 17 is more than n_positions of the config"),
        ({"options": {"confg": GPT2}}, {}, 'did you mean "config"?'),
        ({"options": {"config": GPT2}}, {"tensor": 2}, "parallel.tensor: 2 cannot be used with model.name: transformers"),
        ({"options": {"config": GPT2}}, {"pipeline": 2, "context": 2},
         "parallel.pipeline: 2 cannot be used (and parallel.context) with model.name: transformers"),
    ],
)  # fmt: skip
def test_one_error_before_anything_starts(
    tmp_path: Path, model: dict[str, Any], parallel: dict[str, int], says: str
) -> None:
    """Of the job file, with the field and the remedy."""
    with pytest.raises(SpecError) as caught:
        written(tmp_path, model=model, parallel=parallel, cluster={"workers": 4})
    assert says in caught.value.message
    assert len(caught.value.message.splitlines()) == 1


def test_a_plan_has_the_blocks_of_the_config() -> None:
    """Its passes run all blocks of the config, whatever `model.layers` is."""
    peaks = []
    for blocks in (4, 5):
        planner = Planner(of({**GPT2, "n_layer": blocks}), VOCAB, "cpu")
        assert planner.model().blocks == blocks
        peaks.append(max(peak.total for peak in planner.measure(Pass(1, "none", cast=False, hold=False)).peaks))
    assert peaks[1] > peaks[0]


def test_a_config_that_the_library_refuses() -> None:
    """One error that names the option and the library's reason."""
    with pytest.raises(UserError, match="transformers cannot build this model: ValueError: .*divisible"):
        build(of({**GPT2, "n_head": 3}).model, VOCAB)


def test_the_package_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the job is refused, with the command that installs it."""
    monkeypatch.setattr(transformers_source, "find_spec", lambda name: None)
    with pytest.raises(SpecError, match=r"needs the package transformers; pip install 'raydist\[transformers\]'"):
        written(tmp_path, model={"options": {"config": GPT2}})


def test_weights_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the library's, in fp32; the tokenizer may not have more ids; a relative folder gets its path on the driver."""
    save_pretrained(str(tmp_path / "hf"), 20)
    monkeypatch.chdir(tmp_path)
    spec = written(tmp_path, model={"options": {"weights": "hf"}})
    placed = hub.local(spec, "runs")
    there = placed.model
    assert there.options["weights"] == str(tmp_path / "hf")
    model = build(there, there.rows(VOCAB))
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert {n.removeprefix("inner."): t for n, t in model.state_dict().items()}.keys() == theirs.keys()
    assert all(torch.equal(model.inner.state_dict()[n], t) for n, t in theirs.items())
    preflight.check_early(placed, local=True)
    file = tmp_path / "hf/model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        preflight.check_early(placed, local=True)
    with pytest.raises(UserError, match=r"vocab_size of the config: 20: the tokenizer of the data has 21 ids"):
        there.rows(21)


@torch.no_grad()
def test_text_is_generated() -> None:
    """The most probable tokens, each from the ones before; drawing ends where asked."""
    model = build(ModelSpec(name="transformers", context=8, options={"config": GPT2}), VOCAB)
    tokens = samples(1)[0]
    found = model.generate(tokens, 3, temperature=0)
    for at in range(CONTEXT, CONTEXT + 3):
        assert found[0, at] == model.eval()(found[:, at - 8 : at])[0, -1].argmax()
    model.train()
    assert model.generate(tokens, 3, temperature=0, end=int(found[0, CONTEXT])).shape[1] == CONTEXT + 1
