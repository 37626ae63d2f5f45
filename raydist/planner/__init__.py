"""Will a job fit, what should it be trained with, and how fast: measured on tensors without values, added up. See docs/plan.md.

Runs in: the user's shell (`raydist plan`). Only measure.py, live.py and target.py import torch.

    facts.py      what a plan knows and says: model, machine, one measured pass, an estimate
    estimate.py   bytes held and sent by a rank, by strategy
    speed.py      seconds of a step on a GPU that is known, reckoned
    advice.py     all strategies side by side, and which to take
    measure.py    a model's parameters, and a forward and backward pass of one micro-batch
    live.py       the bytes that live while it runs
    target.py     what a GPU does otherwise than a CPU
"""
