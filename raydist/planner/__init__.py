"""Estimates whether a job fits, with which strategy, and its speed, from passes on fake tensors. See docs/how-to/plan.md.

Runs in: the user's shell (`raydist plan`). Only measure.py, fake_module.py, live.py, tensor.py and target.py
import torch.

    facts.py      plain values: model, machine, one measured pass, an estimate
    estimate.py   bytes that a rank holds and sends, by strategy
    pipeline.py   several passes in flight on a rank of a pipeline
    speed.py      calculated seconds of a step on a known GPU
    advice.py     compares all strategies and recommends one
    measure.py    a model's parameters, and a forward and backward pass of one micro-batch
    live.py       the bytes of live tensors during a pass
    tensor.py     a tensor group of one process, which sends nothing
    target.py     the GPU of this machine; differences between GPU and CPU
"""
