"""The models: one file each, found by name. This docstring is their contract.

Runs in: each train worker, and wherever weights are exported. May not import ray.

A model is a file here (`model.name: gpt`) or anyone's `package.module:attribute`, and has

    build(spec: ModelSpec, vocab_size: int) -> nn.Module

- `module(tokens_BT) -> logits_BTV`: token ids (int64) in, unnormalised log-probabilities of the next token out.
  Causal: the logits at t depend on tokens 0..t only.
- With `data.pack` the loop calls `module(tokens_BT, documents=documents_BT)`. `documents` numbers the document
  that each token belongs to; a change of number starts a new one. Tokens attend within their document only, and
  positions restart with it. A model that cannot do so leaves the argument out, and packing is refused.
- `build` makes the parameters on the CPU from torch's default generator, which the caller has seeded, or loads them: every
  rank gets the same bits, for every device. That is checked before training; nothing is copied from rank to rank.
  Importing the file does nothing else.
- Every parameter takes part in every forward pass, and `state_dict` names are stable: checkpoints hold them.

Optional, used where present:

- `blocks`: an nn.ModuleList of the repeated layers; the unit of sharding and of compilation, and what muon trains.
- `build.takes_meta = True`, on the function (or the class) itself, with `init_module(name, module)` on the model: training then
  calls `build` under torch's meta device, where it makes no weights, and `init_module` for each module of `named_modules`, in
  that order, to draw the weights that this one holds itself from torch's default generator (worker/parallel/_model_graph.py,
  `initialise`). So zero3 and hsdp make and split one block after the other, and no rank ever holds the whole model. Buffers are
  made on the CPU all the same. Without `takes_meta` no `build` is called under the meta device.
- `gives_loss`: where it is true, `module(tokens_BT, targets=targets_BT)` (with `documents` where they are packed) gives the cross
  entropy in nats, summed over the targets that are not MASKED, a scalar in fp32, and need not make all logits at once
  (worker/model/_chunked_cross_entropy.py). Its `head` is then compiled by `train.compile: blocks` too. A subclass whose `forward`
  takes no targets sets it to False.
- `flops_per_token(context) -> float`: else 6 a parameter that is no embedding (worker/metrics/flops.py).
- `generate(tokens_BT, max_new, ...) -> tokens_BS`: else `raydist train` prints no sample of text.

tests/contracts/test_models.py holds every file here to this.
"""
