"""Measures a cluster's links: collectives, pairs of nodes, and the all-reduce of a model's gradients. `raydist bench comm`.

Runs in: ranks, over a torch.distributed process group of any backend; never ray. raydist/cluster/bench.py starts them on
Ray, and `torchrun -m raydist.bench.comm` without Ray.
"""
