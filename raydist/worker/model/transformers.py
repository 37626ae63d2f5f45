"""Any causal language model of the library `transformers`, as the library wrote it.

Runs in: each train worker. May not import ray. `transformers` is imported when the model is built.

The library's parameters are under `inner`. `options.config` is the architecture: of the section `model` only `context` and
`vocab_size` count. Shape suffixes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import safetensors.torch
import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from raydist.checkpoint.huggingface import weight_files
from raydist.errors import UserError
from raydist.parsing import DAMAGED, JOB_BYTES, parse_json, read_file
from raydist.paths import local_path
from raydist.spec import transformers_source
from raydist.spec.huggingface import reading
from raydist.spec.parts import Part, problem
from raydist.storage import Storage
from raydist.worker.model._decoder import append, draw
from raydist.worker.model._rotary import packed_mask, packed_positions

if TYPE_CHECKING:
    from raydist.spec import JobSpec, ModelSpec

VARIANTS = {
    # The library is asked for a tiny model where the name alone is tested.
    "": {"options": {"config": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}}},
    "neox": {"options": {"config": {"model_type": "gpt_neox", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
                                    "num_attention_heads": 2, "max_position_embeddings": 16}}},
}  # fmt: skip
FILES = ("config", "weights")
"""Options that name files: raydist/checkpoint/hub.py makes their paths absolute."""
BY_LAYERS = False
"""`model.layers` does not set the number of blocks."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
_PROBED = 8
"""Tokens with which packing is tried."""
_SHOWN = 8
"""Names in an error."""


class Options(Part):
    """The options of `model.name: transformers`."""

    config: dict[str, Any] | str | None = Field(
        None,
        description="The values of a config.json, `model_type` among them; or the path of one, or of its folder; or the URI of a "
        "folder.",
    )
    weights: str | None = Field(
        None,
        description="A folder with config.json and safetensors to start from, a URI of one, or hf://OWNER/NAME. Each rank reads "
        "all of them.",
    )


def check_spec(spec: ModelSpec) -> None:
    """Raises SpecValueError for a config that cannot be read, and for an architecture that the library does not have."""
    known = transformers_source.models()
    if known is None:
        raise problem("name", "transformers", "needs the package transformers",
                      "pip install 'raydist[transformers]', on all nodes")  # fmt: skip
    config = values(spec)
    if config is None:  # raydist/checkpoint/hub.py reads it
        return
    kind = config.get("model_type")
    if kind not in known:
        near = difflib.get_close_matches(str(kind), known, n=1)
        hint = f'did you mean "{near[0]}"?' if near else f"there are: {', '.join(sorted(known))}"
        raise problem("options.config.model_type", kind, "is no causal language model of transformers", hint)
    for key in _LENGTHS:
        if isinstance(longest := config.get(key), int) and spec.context > longest:
            raise problem("context", spec.context, f"is more than {key} of the config", f"set it to {longest} or less")


def values(spec: ModelSpec) -> dict[str, Any] | None:
    """The values of config.json; None if they are at a hub or on an object store. Raises SpecValueError."""
    options = Options(**spec.options)
    config = options.weights if options.config is None else options.config
    if config is None:
        raise problem("options.config", None, "is missing, and options.weights, too",
                      "give the values of a config.json, its path, or a folder with weights")  # fmt: skip
    if isinstance(config, dict):
        return config
    field = "options.weights" if options.config is None else "options.config"
    if "://" in config:
        return None
    path = local_path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        data = read_file(path, JOB_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise problem(field, config, f"{path} cannot be read: {reason}", "check the path") from None
    try:
        read = parse_json(data)
    except ValueError as error:
        raise problem(field, config, f"{path} is not JSON: {error}", "download it again") from None
    if not isinstance(read, dict):
        raise problem(field, config, f"{path} is not the config of a model", "download it again")
    return read


def vocabulary(spec: ModelSpec) -> int | None:
    """Rows of the embedding, if the config has them."""
    size = (values(spec) or {}).get("vocab_size")
    return size if isinstance(size, int) else None


def check_job(job: JobSpec) -> None:
    """Raises SpecValueError for meshes that the library's code cannot run on, and for packed documents where its source shows that
    they are not kept apart; else that is found out when the model is built."""
    config = values(job.model) if job.data.pack else None
    if config is not None and (why := transformers_source.known_not_to_pack(config)):
        raise problem("data.pack", True, f"needs a model that keeps documents apart: {config['model_type']} of transformers does "
                      f"not, {why}", "set false, or take a built-in model")  # fmt: skip
    axes = {axis: getattr(job.parallel, axis) for axis in ("tensor", "pipeline", "context", "expert")}
    if split := {axis: size for axis, size in axes.items() if size > 1}:
        first, *others = split
        also = f" (and parallel.{', parallel.'.join(others)})" if others else ""
        raise problem(f"parallel.{first}", split[first],
                      f"cannot be used{also} with model.name: transformers, which does not support meshes",
                      "set 1 and a parallel.strategy (ddp, zero1, zero2, zero3, hsdp), or take a built-in model")  # fmt: skip


def exported(spec: ModelSpec, vocab_size: int) -> tuple[dict[str, Any], Callable[[str], str]]:
    """See the contract in __init__.py. The config is complete: it has the library's own values for what the job leaves out."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    config = _config(AutoConfig, spec, vocab_size)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    return config.to_diff_dict(), lambda name: name.removeprefix("inner.")


def build(spec: ModelSpec, vocab_size: int) -> Transformers:
    """See the contract in __init__.py."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
    except ImportError as error:
        raise UserError(
            f"model.name: transformers: cannot be imported: {error}",
            "pip install 'raydist[transformers]', on all nodes",
        ) from None
    options, missing = Options(**spec.options), list[str]()
    tensors = _tensors(options.weights) if options.weights is not None and "://" in options.weights else None
    try:
        if options.weights is None:
            inner = AutoModelForCausalLM.from_config(_config(AutoConfig, spec, vocab_size), dtype=torch.float32)
        else:
            given: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
            if tensors is not None:
                config = AutoConfig.for_model(**(values(spec) or {}))
                kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
                inner, loading = kind.from_pretrained(None, config=config, state_dict=tensors, **given)
            else:
                if options.config is not None:
                    given["config"] = _config(AutoConfig, spec, vocab_size)
                inner, loading = AutoModelForCausalLM.from_pretrained(
                    options.weights, use_safetensors=True, local_files_only=True, **given
                )
            missing = sorted(loading["missing_keys"])
    except (*DAMAGED, OSError) as error:  # what the library raises for a bad config
        text = " ".join(str(error).split())[:300]
        raise UserError(
            f"model.options: transformers cannot build this model: {type(error).__name__}: {text}",
            "check options.config and options.weights",
        ) from error
    if missing:
        raise UserError(
            f"model.options.weights: {options.weights}: {len(missing)} tensors are missing: {', '.join(missing[:_SHOWN])}",
            "take config.json and tensors of one model",
        )
    return Transformers(inner, spec, vocab_size)


def _tensors(uri: str) -> dict[str, Tensor]:
    """All tensors of a folder on an object store, a file at a time. Raises UserError, StorageError."""
    folder, found = Storage(uri), dict[str, Tensor]()
    for name in weight_files(folder):
        with reading(folder, name, "download the file again"), folder.open(name) as stream:
            found |= safetensors.torch.load(stream.read())
    return found


build.exported = exported  # type: ignore[attr-defined]


def _config(auto: Any, spec: ModelSpec, vocab_size: int) -> Any:
    config = values(spec)
    assert config is not None, "hub.local has read it"
    return auto.for_model(**{**config, "vocab_size": vocab_size})


class Transformers(nn.Module):
    """`inner`, a causal model of the library, with raydist's interface of models.

    `cannot_pack`: why it cannot keep packed documents apart; "": it can.
    """

    def __init__(self, inner: Any, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        rows = inner.get_input_embeddings().weight.shape[0]
        if rows < vocab_size:
            raise UserError(
                f"model.options: the model has {rows} ids, and the tokenizer of the data {vocab_size}",
                "take the model's own tokenizer.json as data.tokenizer",
            )
        self.inner, self.spec = inner, spec
        self.cannot_pack = self._why_not_packed()

    def forward(self, tokens_BT: Tensor, documents: Tensor | None = None) -> Tensor:
        """tokens_BT (int64) -> logits_BTV. `documents` (int, B x T): see the contract in __init__.py."""
        if documents is not None and self.cannot_pack:
            raise UserError(
                f"data.pack: {type(self.inner).__name__} of transformers cannot keep documents apart: {self.cannot_pack}",
                "set data.pack: false, or take a built-in model",
            )
        return self._logits(tokens_BT, documents)

    def _logits(self, tokens_BT: Tensor, documents: Tensor | None) -> Tensor:
        more: dict[str, Tensor] = {}
        if documents is not None:
            positions_BT, run_BT = packed_positions(documents)
            mask = packed_mask(run_BT, None)
            if self.inner.config._attn_implementation != "sdpa":  # the library's own code adds the mask to the products
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, torch.finfo(torch.float32).min)
            more = {"attention_mask": mask, "position_ids": positions_BT}
        out: Tensor = self.inner(input_ids=tokens_BT, use_cache=False, **more).logits
        return out

    @torch.no_grad()
    def _why_not_packed(self) -> str:
        """Why packed documents cannot be kept apart, "" if they are: tried on the CPU with two documents of a few tokens."""
        config = self.inner.config.get_text_config()
        takes = inspect.signature(self.inner.forward).parameters
        if why := transformers_source.cannot_pack(takes, lambda key: getattr(config, key, None)):
            return why
        if isinstance(next(self.inner.parameters()), FakeTensor):  # of a plan, which has no values
            return ""
        was_training, half = self.inner.training, min(_PROBED, self.spec.context) // 2
        if not half:
            return "model.context: 1 leaves no room for two"
        self.inner.eval()
        try:
            tokens_BT = torch.arange(2 * half)[None] % config.vocab_size
            packed_BTV = self._logits(tokens_BT, (torch.arange(2 * half) >= half).long()[None])
            alone_BTV = self._logits(tokens_BT[:, half:], None)
            # Rounding in fp32; a token of another document changes logits by thousands of times as much.
            apart = torch.allclose(packed_BTV[:, half:], alone_BTV, rtol=1e-4, atol=1e-5)
        except (ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            return f"it refuses a mask of documents: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        finally:
            self.inner.train(was_training)
        return "" if apart else "tokens of one document change the logits of the next"

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
        """tokens_BT -> tokens_BS: see `Decoder.generate`. Without a cache: each token is a pass over the last `context` ones."""
        training, prompt = self.training, tokens_BT.shape[1]
        self.eval()
        try:
            for _ in range(max_new):
                logits_BTV = self(tokens_BT[:, -self.spec.context :])
                next_B1 = draw(logits_BTV[:, -1].float(), temperature, top_k, generator)
                tokens_BT, ended = append(tokens_BT, next_B1, prompt, end)
                if ended:
                    break
            return tokens_BT
        finally:
            self.train(training)
