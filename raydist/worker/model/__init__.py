"""The models: one file each, found by name. This docstring is their contract.

Runs in: each train worker, and wherever weights are exported. May not import ray.

A model is a file here (`model.name: gpt`) or anyone's `package.module:attribute`, and has

    build(spec: ModelSpec, vocab_size: int) -> nn.Module

- `module(tokens_BT) -> logits_BTV`: token ids (int64) in, unnormalised log-probabilities of the next token out.
  Causal: the logits at t depend on tokens 0..t only.
- With `data.pack` the loop calls `module(tokens_BT, documents=documents_BT)`. `documents` numbers the document
  that each token belongs to; a change of number starts a new one. Tokens attend within their document only, and
  positions restart with it. A model that cannot do so leaves the argument out, and packing is refused.
- `build` makes the parameters on the CPU from torch's default generator, which the caller has seeded: the same
  seed gives the same bits on every rank and for every device. Importing the file does nothing else.
- Every parameter takes part in every forward pass, and `state_dict` names are stable: checkpoints hold them.

Optional, used where present:

- `blocks`: an nn.ModuleList of the repeated layers; the unit of sharding and of compilation, and what muon trains.
- `init_module(name, module)`: draws the weights that one module of `named_modules` holds itself, from torch's default
  generator. `build` must then make no weights where torch's default device is meta, and otherwise call it in that
  order (worker/graph.py, `initialise`): so zero3 and hsdp make and split one block after the other, and no rank ever
  holds the whole model.
- `gives_loss`: where it is true, `module(tokens_BT, targets=targets_BT)` (with `documents` where they are packed) gives the cross
  entropy in nats, summed over the targets that are not MASKED, a scalar in fp32, and need not make all logits at once
  (worker/headloss.py). Its `head` is then compiled by `train.compile: blocks` too. A subclass whose `forward` takes no targets
  sets it to False.
- `flops_per_token(context) -> float`: else 6 a parameter that is no embedding (worker/flops.py).
- `generate(tokens_BT, max_new, ...) -> tokens_BS`: else `raydist train` prints no sample of text.

tests/contracts/test_models.py holds every file here to this.
"""
