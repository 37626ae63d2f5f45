"""Any causal model of the package `transformers`, as it is: for architectures that no file here has.

Runs in: each train worker. May not import ray. Needs `transformers`, an optional package (`raydist[transformers]`).

The model is built whole on every rank, so it runs under ddp, zero1 to zero3 and hsdp. Shape suffixes: B sequences, T tokens, V
vocabulary.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from raydist.errors import UserError
from raydist.spec.parts import Part, problem
from raydist.worker.model._decoder import draw
from raydist.worker.model._rotary import packed_positions

if TYPE_CHECKING:
    from raydist.spec import JobSpec, ModelSpec


class Options(Part):
    """The options of transformers."""

    config: dict[str, Any] | str = Field(
        description="The values of a config.json, with model_type; or the absolute path of one, or of its folder."
    )
    weights: bool = Field(False, description="Start from the weights in the folder `config`; else from random ones.")


VARIANTS = {
    "": {"options": {"config": {"model_type": "gpt2", "n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64,
                                "vocab_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}}},
    "gpt_neox": {"options": {"config": {"model_type": "gpt_neox", "hidden_size": 16, "num_attention_heads": 2,
                                        "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}}},
}  # fmt: skip
"""Fields of `model` that the contract's tests run; "" in place of the defaults."""

NOT_SPLIT = ("tensor", "pipeline", "context", "expert")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """The values of config.json. Raises SpecValueError where it cannot be read."""
    config = Options(**spec.options).config
    if isinstance(config, dict):
        return config
    path = Path(config).expanduser()
    if not path.is_absolute():
        raise problem("options.config", config, "is a relative path", "give an absolute one that all nodes can read")
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise problem(
            "options.config", config, f"cannot be read: {error}", "give a config.json or its folder"
        ) from None
    if not isinstance(values, dict):
        raise problem("options.config", config, f"holds {type(values).__name__}", "give the config.json of a model")
    return values


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for a missing package, and for a config that does not fit the job."""
    if importlib.util.find_spec("transformers") is None:
        raise problem("name", spec.name, "needs the package transformers", "pip install 'raydist[transformers]'")
    config = config_of(spec)
    if not isinstance(config.get("model_type"), str):
        raise problem("options.config", "without model_type", "names no architecture", "add model_type")
    if config.get("quantization_config") is not None:
        raise problem(
            "options.config", "quantization_config", "cannot be trained", "take the weights before quantization"
        )
    longest = next((config[key] for key in _LENGTHS if isinstance(config.get(key), int)), None)
    if longest is not None and spec.context > longest:
        raise problem(
            "context", spec.context, f"is longer than the {longest} positions of options.config", "set it lower"
        )
    if Options(**spec.options).weights and isinstance(Options(**spec.options).config, dict):
        raise problem(
            "options.weights", True, "needs the folder of a model in options.config", "give the folder, or leave it out"
        )


def check_job(job: JobSpec) -> None:
    """Raises SpecValueError for ways to split the model that this file does not have."""
    for axis in NOT_SPLIT:
        size = getattr(job.parallel, axis)
        if size > 1:
            raise problem(f"parallel.{axis}", size, f"{', '.join(NOT_SPLIT)} cannot split a model of transformers",
                          "set 1, and split its state with parallel.strategy: zero1, zero2, zero3 or hsdp")  # fmt: skip


def vocab_size(spec: ModelSpec) -> int | None:
    """Ids that the model has room for; None where config.json leaves it to the tokenizer."""
    size = config_of(spec).get("vocab_size")
    return size if isinstance(size, int) else None


class Transformers(nn.Module):
    """A model of `transformers` with the calls of models here.

    `packs`: whether packed documents do not see each other, as tried out with a few tokens.
    """

    def __init__(self, inner: Any, context: int) -> None:
        super().__init__()
        self.inner, self.context = inner, context
        self.packs = _packs(self)

    def forward(self, tokens_BT: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens_BT (int64) -> logits_BTV. `documents`: see the contract in __init__.py."""
        if documents is None:
            return self.inner(input_ids=tokens_BT, use_cache=False).logits
        if not self.packs:
            raise UserError(
                f"data.pack: {type(self.inner).__name__} does not keep packed documents apart", "set data.pack: false"
            )
        return self._packed(tokens_BT, documents)

    def _packed(self, tokens_BT: Tensor, documents_BT: Tensor) -> Tensor:
        # transformers makes a dense block-diagonal mask where positions start again, with the windows of layers that have one.
        positions_BT, _ = packed_positions(documents_BT)
        return self.inner(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False).logits

    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        max_new: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        end: int | None = None,
    ) -> Tensor:
        """tokens_BT -> tokens_BS: see `Decoder.generate`. All tokens are computed again for each new one."""
        training, prompt = self.training, tokens_BT.shape[1]
        self.eval()
        try:
            for _ in range(max_new):
                next_B1 = draw(self(tokens_BT[:, -self.context :])[:, -1].float(), temperature, top_k, generator)
                if end is not None:
                    done_B1 = (tokens_BT[:, -1:] == end) & (tokens_BT.shape[1] > prompt)
                    next_B1 = torch.where(done_B1, end, next_B1)
                tokens_BT = torch.cat((tokens_BT, next_B1), dim=1)
                if end is not None and bool((next_B1 == end).all()):
                    break
            return tokens_BT
        finally:
            self.train(training)


@torch.no_grad()
def _packs(model: Transformers) -> bool:
    """Whether the second of two packed documents has the logits that it has alone.

    Documents would mix without an error: an architecture may ignore positions, or look back by other means than attention.
    """
    training = model.training
    model.eval()
    tokens_BT = torch.arange(1, 8)[None]
    try:
        alone = model(tokens_BT[:, 3:])
        together = model(tokens_BT)[:, 3:]
        packed = model._packed(tokens_BT, (torch.arange(7) >= 3).long()[None])[:, 3:]
    except (TypeError, ValueError, RuntimeError, IndexError):  # it takes no position_ids, or not these
        return False
    finally:
        model.train(training)
    seen, left = (together - alone).abs().max(), (packed - alone).abs().max()
    return bool(left <= 1e-3 * seen)


def build(spec: ModelSpec, vocab_size: int) -> Transformers:
    """See the contract in __init__.py. Raises UserError for an architecture that `transformers` does not have."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError as error:
        raise UserError(
            f"model.name: {spec.name}: transformers cannot be imported on this worker: {error}",
            "pip install 'raydist[transformers]' on all nodes",
        ) from error
    options, values = Options(**spec.options), dict(config_of(spec))
    values.setdefault("vocab_size", vocab_size)
    kind = values.pop("model_type")
    if kind not in CAUSAL:
        near = difflib.get_close_matches(str(kind), list(CAUSAL), n=3, cutoff=0.6)
        raise UserError(
            f"model.options.config: model_type {kind!r}: this version of transformers has no such causal model",
            f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(CAUSAL))}",
        )
    try:
        config = AutoConfig.for_model(kind, **values)
        if options.weights:
            inner = AutoModelForCausalLM.from_pretrained(
                Path(str(options.config)).expanduser(),
                config=config,
                dtype=torch.float32,
                local_files_only=True,
                use_safetensors=True,
            )
        else:
            inner = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise UserError(
            f"model.options.config: transformers refuses it: {error}", "correct the config, or the folder"
        ) from error
    return Transformers(inner, spec.context).train()
