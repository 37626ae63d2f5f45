"""Replicas that train apart for `comm.every` steps, and outer steps that bring them together: local SGD and DiLoCo.

Runs in: each train worker. Torch, never ray.

    schedule.py   at which steps a fragment's outer step starts and arrives: a function of the step's number
    fragment.py   one outer step of one fragment: sum of outer gradients, update by rows, gather
    hook.py       what happens at a step; the figures of its record
    state.py      what is saved of it: outer weights and momentum by rows, each replica's own state, a sum on its way

A replica is a rank, or with hsdp, tensor or pipeline parallelism a group of them: `Mesh.apart`. Sources: DiLoCo, arXiv 2311.08105;
Streaming DiLoCo, arXiv 2501.18512.
"""
