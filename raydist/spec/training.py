"""The sections of a job file that decide the numbers: model, data, batches, loss, optimizer, number formats, evaluation.

Runs anywhere. Each field's description is written here once; see raydist/spec/models.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist import registry
from raydist.errors import UserError
from raydist.spec.parts import (
    Extension,
    Part,
    PartWithNewFields,
    Tokens,
    check_spec,
    near_divisors,
    problem,
    short_name,
)


class LoraSpec(Part):
    """Adapters of low rank, which are trained instead of the weights of the model."""

    rank: int = Field(8, ge=1, description="Rows of A and columns of B.")
    alpha: float = Field(16.0, gt=0, description="The adapter's product is multiplied by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="Probability of dropping an input of an adapter while training."
    )
    targets: list[str] | None = Field(
        None,
        min_length=1,
        description="Linear layers that get an adapter: the ends of their names (attention.q), with * for any text; default: all "
        "in the blocks.",
    )

    @property
    def scale(self) -> float:
        """The factor of an adapter's product."""
        return self.alpha / self.rank


class ModelSpec(PartWithNewFields):
    """The model: a built-in one, or your own."""

    new_fields: ClassVar[tuple[str, ...]] = ("hf", "vocab_size", "lora")

    name: Annotated[str, Extension("model")] = Field(
        "gpt", description="A built-in model, or package.module:attribute of your own."
    )
    hf: str | None = Field(
        None,
        description="Start from the weights of this folder in Hugging Face's format, a path or a URI (s3://bucket/folder), or of "
        "hf://OWNER/NAME; its config.json sets the fields of `model` that are not given; docs/how-to/pretrained.md.",
    )
    layers: int = Field(4, ge=1, le=4096, description="Number of blocks.")
    width: int = Field(128, ge=1, le=1 << 20, description="Size of the residual stream.")
    heads: int = Field(4, ge=1, le=1 << 16, description="Attention heads; must divide width.")
    kv_heads: int | None = Field(
        None, ge=1, le=1 << 16, description="Key and value heads (grouped-query attention); default: heads."
    )
    context: int = Field(128, ge=1, le=1 << 27, description="Tokens of a sample: the longest sequence the model sees.")
    hidden: int | None = Field(
        None, ge=1, le=1 << 24, description="Width of the feed-forward layer; default: the model's own choice."
    )
    qk_norm: bool = Field(False, description="Normalise queries and keys of each head.")
    tie_embeddings: bool = Field(True, description="Use one matrix for the token embedding and the output head.")
    vocab_size: int | None = Field(
        None,
        ge=1,
        le=1 << 27,
        description="Ids that embedding and head have room for; default: those of the tokenizer.",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability of dropping an activation while training.")
    rope_base: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    options: dict[str, Any] = Field(default_factory=dict, description="The options of that model; docs/extending.md.")
    lora: LoraSpec | None = Field(
        None,
        description="Train adapters alone, on the weights of `hf`, which stay as they are; docs/how-to/fine-tuning.md.",
    )

    @model_validator(mode="after")
    def _fits(self) -> ModelSpec:
        if self.lora is not None and self.hf is None:
            raise problem(
                "lora", None, "needs the weights that the adapters are for", "set model.hf, or leave lora out"
            )
        check_spec("model", self.name, self)
        return self

    def rows(self, tokenizer: int) -> int:
        """Rows of the embedding for a tokenizer of so many ids. Raises UserError if it has more than `vocab_size`, or than the
        config in the model's options has."""
        own = registry.described("model", self.name, "vocabulary")
        size = self.vocab_size or (own(self) if own is not None else None)
        if size is not None and tokenizer > size:
            field = "model.vocab_size" if self.vocab_size else "model.options: vocab_size of the config"
            remedy = "leave it out, or set it higher"
            if self.hf:
                folder, mark, options = self.hf.partition("?")
                file = f"{folder}/tokenizer.json{mark}{options}"
                remedy = f"set data.tokenizer to that of the weights, if it is not: {file}"
            raise UserError(f"{field}: {size}: the tokenizer of the data has {tokenizer} ids", remedy)
        return size or tokenizer


class BatchingSpec(Part):
    """Micro-batches of documents of like length, one in a row, up to a number of tokens. docs/how-to/batching.md."""

    max_tokens: Tokens = Field(le=1 << 31, description="Rows times padded length of a micro-batch, at most.")
    min: int = Field(
        1,
        ge=1,
        description="Sequences for which a full micro-batch always has room: none is longer than max_tokens / min tokens.",
    )
    max: int | None = Field(None, ge=1, description="Sequences of a micro-batch, at most; default: as many as fit.")
    longest: Tokens | None = Field(
        None, description="Tokens of the longest sequence; default: the smaller of model.context and max_tokens / min."
    )
    longer: Literal["split", "cut", "error"] = Field(
        "split",
        description="A document of more than `longest` tokens is split into several sequences, is cut off after so many tokens, "
        "or is an error before the run starts.",
    )
    global_tokens: Tokens | None = Field(
        None,
        le=1 << 40,
        description="Tokens of one optimizer step, on average, over all workers; default: train.global_batch sequences.",
    )
    multiple: int = Field(8, ge=1, le=1024, description="Sequences are padded to multiples of so many tokens.")
    lengths: int | None = Field(
        None,
        ge=1,
        le=64,
        description="Number of different padded lengths, for which micro-batches then have few shapes. They are chosen so that the "
        "corpus has the least padding. Default: 8 with train.compile, else any multiple.",
    )

    @model_validator(mode="after")
    def _fits(self) -> BatchingSpec:
        if self.max is not None and self.min > self.max:
            raise problem("min", self.min, f"is above max: {self.max}", "set min to at most max")
        if self.max_tokens < self.min:
            raise problem("max_tokens", self.max_tokens, f"has no room for min: {self.min} sequences of one token",
                          "raise max_tokens or lower min")  # fmt: skip
        if self.longest is not None and self.longest > self.max_tokens // self.min:
            most = self.max_tokens // self.min
            raise problem("longest", self.longest, f"is above the {most} tokens that max_tokens: {self.max_tokens} has for each of "
                          f"min: {self.min} sequences", f"set longest to at most {most}, or raise max_tokens")  # fmt: skip
        return self


class DataSpec(PartWithNewFields):
    """The training data: `source` is prepared before the first run, `path` is a dataset that exists."""

    new_fields: ClassVar[tuple[str, ...]] = ("batching", "format", "chat_template", "loss_on")

    source: str | None = Field(
        None,
        description="Text to prepare before the run: python-stdlib, a file, folder, glob or URI, or package.module:attribute "
        "that gives documents.",
    )
    path: str | None = Field(None, description="A dataset that `raydist data prepare` made: a folder or a URI.")
    tokenizer: str = Field(
        "bytes",
        description="For `source`: bytes, bpe:VOCAB, another built-in one, the path or URI of a tokenizer.json, or "
        "package.module:attribute of your own.",
    )
    column: str = Field(
        "text", description="For `source`: the field of JSON lines or the column of Parquet that holds the text."
    )
    format: Literal["text", "chat"] = Field(
        "text",
        description="For `source`: chat: rows of JSON lines or Parquet are conversations, with `messages`, or `prompt` and "
        "`completion`; docs/how-to/fine-tuning.md.",
    )
    chat_template: str | None = Field(
        None,
        description="For `format: chat`: chatml, llama3, plain, or the path of a template; default: the one beside the "
        "tokenizer.json.",
    )
    loss_on: Literal["completions", "all"] = Field(
        "completions",
        description="For `format: chat`: count the loss of what the assistant says alone, or of all tokens.",
    )
    eval_fraction: float = Field(
        0.01, gt=0, lt=1, description="For `source`: share of documents held out for evaluation."
    )
    pack: bool = Field(
        False,
        description="Separate the documents of a sample: block-diagonal attention, positions that start at 0 in each.",
    )
    prefetch: int = Field(2, ge=1, le=1000, description="Batches that the loader's thread makes in advance.")
    batching: BatchingSpec | None = Field(
        None,
        description="Micro-batches of documents of like length, up to a number of tokens; default: windows of model.context.",
    )

    @model_validator(mode="after")
    def _one(self) -> DataSpec:
        if (self.source is None) == (self.path is None):
            raise problem(
                "source", self.source, "and data.path: exactly one of them is needed", "set data.source or data.path"
            )
        for name in ("chat_template", "loss_on"):
            if self.format == "text" and getattr(self, name) != type(self).model_fields[name].default:
                raise problem(name, getattr(self, name), "has no effect on text", "set data.format: chat")
        return self


class LossSpec(Part):
    """The loss."""

    name: Annotated[str, Extension("loss")] = Field(
        "cross_entropy", description="A built-in loss, or package.module:attribute of your own."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The options of that loss; docs/extending.md.")


class TrainSpec(PartWithNewFields):
    """Length, batches, loss, and how the passes are computed."""

    new_fields = ("loss", "virtual_ranks")

    steps: int | None = Field(None, ge=1, le=10**12, description="Optimizer steps of the whole run; or give `epochs`.")
    epochs: float | None = Field(None, gt=0, le=10**6, description="Passes over the training data; or give `steps`.")
    global_batch: int = Field(
        32,
        ge=1,
        le=1 << 24,
        description="Sequences of one optimizer step, over all workers; it does not depend on their number.",
    )
    micro_batch: int = Field(
        8, ge=1, le=1 << 20, description="Sequences of one forward and backward pass of one worker."
    )
    virtual_ranks: int | None = Field(
        None,
        ge=1,
        le=1 << 17,
        description="Parts into which each global batch is divided, and in whose order everything is summed: the same bits on any "
        "number of workers up to this; docs/explanation/same-bits.md. null: the order depends on the number of workers.",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="The seed of everything random: initial weights, data order, dropout."
    )
    deterministic: bool = Field(
        False,
        description="Use torch's deterministic algorithms; slower on GPU. With `train.virtual_ranks` they are used on GPUs anyway.",
    )
    compile: bool | Literal["blocks"] = Field(
        False, description="torch.compile for the whole model, or for each block: slower start, faster steps on GPU."
    )
    checkpoint_activations: Literal["none", "full", "selective"] = Field(
        "none",
        description="Recompute each block's activations in backward instead of keeping them: all of them, or all but those "
        "of matrix products and attention.",
    )
    loss: Annotated[LossSpec, BeforeValidator(short_name)] = Field(
        default_factory=lambda: LossSpec(), description="The loss, in training and on held-out text."
    )
    check_replicas: int | None = Field(
        None,
        ge=1,
        description="Steps between two comparisons, by hash, of ranks that should hold the same weights; also before each "
        "checkpoint. 1: no update uses weights that differ; null: never.",
    )
    check_gradients: int | None = Field(
        None,
        ge=1,
        description="Steps between two checks of each parameter's gradient, after the sync: whether it differs between replicas, "
        "is missing, all zero, or not finite. It is reported, and nothing else is done; null: never.",
    )

    def check(self, *, by_tokens: bool) -> None:
        """Raises SpecValueError. `by_tokens`: data.batching makes the micro-batches, and `micro_batch` is not used."""
        if not by_tokens and self.global_batch % self.micro_batch:
            raise problem("global_batch", self.global_batch,
                          f"is not a whole number of micro-batches of {self.micro_batch}",
                          near_divisors(self.global_batch, self.micro_batch, "train.micro_batch"))  # fmt: skip
        if (self.steps is None) == (self.epochs is None):
            raise problem(
                "steps",
                self.steps,
                "and train.epochs: exactly one of them is needed",
                "set train.steps or train.epochs",
            )

    def total(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run. 0.07 epochs of 100 steps are 7, though 0.07 * 100 is above that."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(round(self.epochs * steps_per_epoch, 6)))


class ScheduleSpec(Part):
    """The learning rate over the steps, after a linear warm-up."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt"] = Field(
        "cosine", description="wsd: warm-up, stable, then linear decay over the last `decay` of the steps."
    )
    warmup: float = Field(
        0.1, ge=0, description="Steps of linear warm-up: below 1 a fraction of all steps, else a number of steps."
    )
    floor: float = Field(
        0.1, ge=0, le=1, description="The last learning rate, as a fraction of the peak (linear, cosine, wsd)."
    )
    decay: float = Field(0.2, gt=0, le=1, description="wsd: the fraction of all steps in which it decays.")

    @model_validator(mode="after")
    def _fits(self) -> ScheduleSpec:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise problem("warmup", self.warmup, "is neither a fraction below 1 nor a whole number of steps",
                          f"write {self.warmup / 100:g} for {self.warmup:g} percent, or {math.ceil(self.warmup)} for steps"
                          )  # fmt: skip
        return self


class OptimSpec(PartWithNewFields):
    """The optimizer and its learning rate."""

    new_fields = ("options",)

    name: Annotated[str, Extension("optimizer")] = Field(
        "adamw", description="A built-in optimizer, as torch.optim has it, or package.module:attribute of your own."
    )
    lr: float = Field(
        1e-3, gt=0, description="Peak learning rate; with `scale_lr`, that of a global batch of `base_batch`."
    )
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay; on matrices only, not on norms and biases."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the square root of the second moment.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    clip: float = Field(
        1.0, ge=0, description="The largest global gradient norm: a larger one is clipped to it; 0: never."
    )
    fused: bool | Literal["auto"] = Field(
        "auto", description="One fused kernel for the whole update; auto: where the device has it."
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="Scale lr by global_batch / base_batch, or by its square root."
    )
    base_batch: int | None = Field(None, ge=1, description="The global batch that `lr` was tuned for.")
    options: dict[str, Any] = Field(
        default_factory=dict, description="The options of that optimizer; docs/extending.md."
    )
    schedule: Annotated[ScheduleSpec, BeforeValidator(short_name)] = Field(
        default_factory=lambda: ScheduleSpec(), description="The learning rate over the steps."
    )

    @model_validator(mode="after")
    def _fits(self) -> OptimSpec:
        if self.scale_lr != "none" and self.base_batch is None:
            what = f"is needed by scale_lr: {self.scale_lr}"
            raise problem("base_batch", None, what, "set the global batch that lr was tuned for")
        check_spec("optimizer", self.name, self)
        return self


def short_precision(value: Any) -> Any:
    """`precision: bf16` for its section."""
    return {"params": value} if isinstance(value, str) else value


class LossScaleSpec(Part):
    """fp16's dynamic loss scale."""

    initial: float = Field(2.0**16, gt=0, description="The first scale.")
    window: int = Field(1000, ge=1, description="Steps without overflow after which the scale doubles.")
    floor: float = Field(1.0, gt=0, description="A scale that would fall below this stops the run.")


class PrecisionSpec(Part):
    """The number formats of the passes; master weights and the update are fp32."""

    params: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format of forward and backward: fp32, bf16, fp16."
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format in which gradients are summed over the ranks: fp32, bf16, fp16."
    )
    loss_scale: LossScaleSpec = Field(default_factory=lambda: LossScaleSpec(), description="fp16's dynamic loss scale.")


class EvalSpec(Part):
    """When the loss on held-out text is computed."""

    every: int | None = Field(
        50, ge=1, le=10**12, description="Steps between evaluations; there is one at the end too; null: never."
    )
    batches: int = Field(8, ge=1, le=10**6, description="Global batches of held-out samples, the same each time.")
