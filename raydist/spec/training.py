"""The sections of a job file that say what is computed: model, data, batches, optimizer, number formats, evaluation.

Runs anywhere. Each field's help is written here once; see raydist/spec/models.py.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from raydist.spec.parts import Part, near_divisors, problem


class ModelSpec(Part):
    """What is trained: a built-in model, or the user's own."""

    name: str = Field("gpt", description="A built-in model (gpt, mlp), or package.module:attribute of your own.")
    layers: int = Field(4, ge=1, description="Number of blocks.")
    width: int = Field(128, ge=1, description="Size of the residual stream.")
    heads: int = Field(4, ge=1, description="Attention heads; must divide width.")
    kv_heads: int | None = Field(
        None, ge=1, description="Key and value heads (grouped-query attention); default: heads."
    )
    context: int = Field(128, ge=1, description="Tokens of a sample: the longest sequence the model sees.")
    hidden: int | None = Field(
        None, ge=1, description="Width of the feed-forward layer; default: the model's own choice."
    )
    qk_norm: bool = Field(False, description="Normalise queries and keys of each head.")
    tie_embeddings: bool = Field(True, description="Use one matrix for the token embedding and the output head.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Probability of dropping an activation while training.")
    rope_base: float = Field(10_000.0, gt=0, description="Base of the rotary position frequencies.")
    options: dict[str, Any] = Field(default_factory=dict, description="Anything your own model wants to be told.")

    @model_validator(mode="after")
    def _fits(self) -> ModelSpec:
        if self.name == "gpt":
            if self.width % self.heads:
                raise problem(
                    "heads", self.heads, f"does not divide width {self.width}", near_divisors(self.width, self.heads)
                )
            if (self.width // self.heads) % 2:
                raise problem("heads", self.heads, f"makes heads of odd size {self.width // self.heads}",
                              "rotary positions need an even width / heads")  # fmt: skip
            if self.kv_heads and self.heads % self.kv_heads:
                raise problem("kv_heads", self.kv_heads, f"does not divide heads {self.heads}",
                              near_divisors(self.heads, self.kv_heads))  # fmt: skip
        return self


class DataSpec(Part):
    """What it is trained on: `source` is prepared on the way, `path` was prepared before."""

    source: str | None = Field(
        None,
        description="Text to prepare before the run: python-stdlib, a file, folder, glob or URI, or package.module:attribute "
        "that gives documents.",
    )
    path: str | None = Field(None, description="A dataset that `raydist data prepare` made: a folder or a URI.")
    tokenizer: str = Field("bytes", description="For `source`: bytes, bpe:VOCAB, or the path of a tokenizer.json.")
    column: str = Field(
        "text", description="For `source`: the field of JSON lines or the column of Parquet that holds the text."
    )
    eval_fraction: float = Field(
        0.01, gt=0, lt=1, description="For `source`: share of documents held out for evaluation."
    )
    pack: bool = Field(
        False, description="Keep documents in one sample apart: block-diagonal attention, positions that start anew."
    )
    prefetch: int = Field(2, ge=1, le=1000, description="Batches made ahead by the loader's thread.")

    @model_validator(mode="after")
    def _one(self) -> DataSpec:
        if (self.source is None) == (self.path is None):
            raise problem(
                "source", self.source, "and data.path: exactly one of them is needed", "set data.source or data.path"
            )
        return self


class TrainSpec(Part):
    """How long, in which batches."""

    steps: int | None = Field(None, ge=1, description="Optimizer steps in all; or give `epochs`.")
    epochs: float | None = Field(None, gt=0, description="Passes over the training data; or give `steps`.")
    global_batch: int = Field(
        32, ge=1, description="Sequences of one optimizer step, over all workers; never changes with their number."
    )
    micro_batch: int = Field(8, ge=1, description="Sequences of one forward and backward pass of one worker.")
    seed: int = Field(
        0, ge=0, lt=2**63, description="Everything random comes from it: initial weights, data order, dropout."
    )
    deterministic: bool = Field(False, description="Use torch's deterministic algorithms; slower on GPU.")
    compile: bool | Literal["blocks"] = Field(
        False, description="torch.compile the whole model, or each block by itself: slower start, faster steps on GPU."
    )
    checkpoint_activations: Literal["none", "full", "selective"] = Field(
        "none",
        description="Compute each block's activations again in backward instead of keeping them: all of them, or all but "
        "those of matrix products and attention.",
    )
    check_replicas: int | None = Field(
        None,
        ge=1,
        description="Steps between two looks at whether ranks that are to hold the same weights do, by hash; also before each "
        "checkpoint. 1: odd weights reach no update; null: never.",
    )
    check_gradients: int | None = Field(
        None,
        ge=1,
        description="Steps between two looks at each parameter's gradient, after the sync: does it differ between replicas, is it "
        "missing, all zero, or not finite; told, and nothing else is done; null: never.",
    )

    @model_validator(mode="after")
    def _fits(self) -> TrainSpec:
        if self.global_batch % self.micro_batch:
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
        return self

    def total(self, steps_per_epoch: int) -> int:
        """Optimizer steps of the whole run."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, math.ceil(self.epochs * steps_per_epoch))


def _short_schedule(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class ScheduleSpec(Part):
    """The learning rate over the steps, after a linear warm-up."""

    name: Literal["constant", "linear", "cosine", "wsd", "inverse-sqrt"] = Field(
        "cosine", description="wsd: warm-up, stable, then linear decay over the last `decay` of the steps."
    )
    warmup: float = Field(
        0.1, ge=0, description="Steps of linear warm-up: below 1 a fraction of all steps, else a number of steps."
    )
    floor: float = Field(0.1, ge=0, le=1, description="Last learning rate over the peak (linear, cosine, wsd).")
    decay: float = Field(0.2, gt=0, le=1, description="wsd: the fraction of all steps that decays.")

    @model_validator(mode="after")
    def _fits(self) -> ScheduleSpec:
        if self.warmup >= 1 and self.warmup != int(self.warmup):
            raise problem("warmup", self.warmup, "is neither a fraction below 1 nor a whole number of steps",
                          f"write {self.warmup / 100:g} for {self.warmup:g} percent, or {math.ceil(self.warmup)} for steps"
                          )  # fmt: skip
        return self


class OptimSpec(Part):
    """The optimizer and its learning rate."""

    name: Literal["adamw", "sgd", "adafactor", "muon"] = Field(
        "adamw", description="The optimizer, as torch.optim has it."
    )
    lr: float = Field(1e-3, gt=0, description="Peak learning rate, at `base_batch` if `scale_lr` is set.")
    weight_decay: float = Field(
        0.1, ge=0, description="Decoupled weight decay; on matrices only, not on norms and biases."
    )
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="AdamW's decay rates of the first and second moment."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD's momentum.")
    clip: float = Field(1.0, ge=0, description="Global gradient norm is cut to this; 0: never.")
    fused: bool | Literal["auto"] = Field(
        "auto", description="One kernel for the whole update, where the device has it."
    )
    scale_lr: Literal["none", "linear", "sqrt"] = Field(
        "none", description="Scale lr by global_batch / base_batch, or by its square root."
    )
    base_batch: int | None = Field(None, ge=1, description="The global batch that `lr` was tuned for.")
    schedule: Annotated[ScheduleSpec, BeforeValidator(_short_schedule)] = Field(
        default_factory=lambda: ScheduleSpec(), description="The learning rate over the steps."
    )

    @model_validator(mode="after")
    def _fits(self) -> OptimSpec:
        if self.scale_lr != "none" and self.base_batch is None:
            raise problem(
                "base_batch",
                None,
                f"is needed by scale_lr: {self.scale_lr}",
                "set the global batch that lr was tuned for",
            )
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
    """In which number format the model computes; master weights and the update are fp32."""

    params: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format of forward and backward: fp32, bf16, fp16."
    )
    reduce: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="Format in which gradients are summed over the ranks: fp32, bf16, fp16."
    )
    loss_scale: LossScaleSpec = Field(default_factory=lambda: LossScaleSpec(), description="fp16's dynamic loss scale.")


class EvalSpec(Part):
    """When the held-out loss is measured."""

    every: int | None = Field(50, ge=1, description="Steps between evaluations, and at the end; null: never.")
    batches: int = Field(8, ge=1, description="Global batches of held-out samples, the same each time.")
