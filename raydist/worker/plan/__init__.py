"""Will a job fit, and what should it be trained with: measured on tensors without values, and added up. See docs/plan.md.

Runs in: the user's shell (`raydist plan`). Only measure.py, live.py and target.py import torch.

    facts.py      what a plan knows and says: model, machine, one measured pass, an estimate
    estimate.py   bytes held and sent by a rank, by strategy
    advice.py     all strategies side by side, and which to take
    measure.py    a model's parameters, and a forward and backward pass of one micro-batch
    live.py       the bytes that live while it runs
    target.py     what a GPU does otherwise than a CPU
"""
