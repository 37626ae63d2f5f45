"""The models: one file each, found by name. This docstring is their contract.

Runs in: each train worker, and in exports of weights. May not import ray.

A model is a file here (`model.name: gpt`) or a `package.module:attribute` of your own, and has

    build(spec: ModelSpec, vocab_size: int) -> nn.Module

- `module(tokens_BT) -> logits_BTV`: token ids (int64) in, unnormalised log-probabilities of the next token out.
  Causal: the logits at t depend on tokens 0..t only.
- With `data.pack` the loop calls `module(tokens_BT, documents=documents_BT)`. `documents` has the number of the document of each
  token; where the number changes, a new document starts. Tokens attend within their document only, and positions restart with it.
  A model that does not support this leaves the argument out, and packing is refused.
- `build` creates the parameters on the CPU from torch's default generator, which the caller has seeded, or loads them: every
  rank gets the same bits, for every device. This is checked before training; nothing is copied from rank to rank.
  Importing the file has no side effects.
- Every parameter takes part in every forward pass, and `state_dict` names are stable, because checkpoints contain them.

Optional:

- `blocks`: an nn.ModuleList of the repeated layers; the unit of sharding and of compilation, and the weights that muon trains.
- `build.takes_meta = True`, on the function (or the class) itself, with `init_module(name, module)` on the model: training then
  calls `build` under torch's meta device, where it creates no weights, and `init_module` for each module of `named_modules`, in
  that order, which draws the module's own weights (not its children's) from torch's default generator
  (worker/parallel/_model_graph.py, `initialise`). So zero3 and hsdp create and split one block after the other, and no rank ever
  holds the whole model. Buffers are always created on the CPU. Without `takes_meta` no `build` is called under the meta device.
- `gives_loss`: if it is true, `module(tokens_BT, targets=targets_BT)` (with `documents` if they are packed) returns the cross
  entropy in nats, summed over the targets that are not MASKED, a scalar in fp32, and need not compute all logits at once
  (worker/model/_chunked_cross_entropy.py). `train.compile: blocks` then also compiles its `head`. A subclass whose `forward` takes
  no targets sets it to False.
- `tensor_rules`: a mapping from module names (with `*`, as in fnmatch) to "gather", "column", "row" or "vocabulary": how
  `parallel.tensor` splits the model (worker/parallel/_tensor.py; docs/reference/models.md has an example). A rank runs the same
  `forward`: between split layers x has this rank's tokens of each sequence [B, T / ranks, D], and in a "gather" module all tokens
  and this rank's heads or columns. So code between layers may not look across positions, and code in them takes the number of heads
  from the tensors. Dropout is by nn.Dropout, and outside of "gather" modules. Without rules, `parallel.tensor` is refused.
- `stage(first, last) -> nn.Module`: how `parallel.pipeline` cuts the model: the part with blocks `first` to `last` - 1 of its
  nn.ModuleList; with what comes before the blocks if `first` is 0, and what comes after them if `last` is their number. It has the
  same parameters under the same names (`part_of` makes it). Its `forward` takes the arguments of the model's, and without the first
  block also `hidden`, the output of the part before: one tensor [B, ...]. A weight of the first and the last part (tied) has its
  first name in both. An nn.Sequential needs no `stage`. Without, `parallel.pipeline` is refused.
- `build.exported(spec, vocab_size) -> (config, name_of)`: how an export writes a model that is one of `transformers`: the values of
  its config.json with `architectures`, and our name of a parameter -> its name there. For built-in models: an export runs no code
  of the user's. Any other model has HUGGINGFACE (raydist/spec/huggingface.py), or is not exported.
- `flops_per_token(context) -> float`: default: 6 per parameter outside of embeddings (worker/metrics/flops.py).
- `generate(tokens_BT, max_new, ...) -> tokens_BS`: without it `raydist train` prints no sample text.

Optional, at the top level of the file, without torch (raydist/registry.py, `described`):

- `Options`: a pydantic model that checks `model.options`.
- `check_spec(spec: ModelSpec)`: raises `raydist.spec.parts.problem(...)` for values that cannot be combined.
- `experts(spec: ModelSpec) -> int`: how many experts each layer with experts has (raydist/worker/model/_moe.py). A model with such
  layers must have it for `parallel.expert`.
- `check_context(spec: ModelSpec, tensor: int, context: int)`: raises the same if `context` ranks, each of `tensor` tensor parallel
  ones, cannot share sequences. A model must have it for `parallel.context`, be built from Decoder and SelfAttention (_decoder.py,
  _layers.py), and look across positions in attention alone.
- `check_job(job: JobSpec)`: raises the same for a job that the model cannot run, such as one with a mesh.
- `vocabulary(spec: ModelSpec) -> int | None`: rows of the embedding, if `options` decide that.
- `FILES`: names of options that name files or folders; the driver makes their paths absolute, and downloads hf://OWNER/NAME. Of
  `config` and `weights` on an object store it reads config.json: `config` then has its values.
- `BY_LAYERS = False`: `model.layers` does not set the number of blocks.
- `check_tensor(spec: ModelSpec, ranks: int)`: raises the same if `ranks` tensor parallel ranks cannot share the model. A model with
  `tensor_rules` must have it.

tests/contracts/test_models.py tests every file here for this contract.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from torch import nn

M = TypeVar("M", bound=nn.Module)


def part_of(
    model: M, first: int, last: int, *, blocks: str = "", before: Sequence[str] = (), after: Sequence[str] = ()
) -> M:
    """For `stage`: a copy of the outermost module that shares its parameters, with blocks `first` to `last` - 1 alone.

    `blocks`: the name of its list of blocks; "" if it is the list itself, an nn.Sequential. `before`, `after`: children that are
    None without the first block, and without the last one.
    """
    held = model.get_submodule(blocks)
    part: M = object.__new__(type(model))
    part.__dict__.update(
        {key: copy.copy(value) for key, value in model.__dict__.items() if isinstance(value, dict | set)}
    )
    part.__dict__.update({key: value for key, value in model.__dict__.items() if key not in part.__dict__})
    kept = dict([*held._modules.items()][first:last])
    if blocks:
        listed = nn.ModuleList()
        listed._modules.update(kept)  # type: ignore[arg-type]  # under the numbers that they have in the whole model
        part._modules[blocks] = listed
    else:
        part._modules = kept
    for name in (*(before if first > 0 else ()), *(after if last < len(held._modules) else ())):
        part._modules[name] = None
    return part
