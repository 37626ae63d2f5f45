"""What a cluster's links can do: collectives, pairs of nodes, and what follows for a model's gradients. `raydist bench comm`.

Runs in: ranks, over a torch.distributed process group of any backend; never ray. raydist/cluster/bench.py starts them on Ray, and
`torchrun -m raydist.bench.comm` without.
"""
