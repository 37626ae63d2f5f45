"""The coordinates of a rank: which part of the model it has, and which part of the global batch it reads; and the groups of ranks
along each axis.

Runs in: each train worker. Torch, never ray. Coordinates are computed alike on all ranks; only `connect` and `data_mesh` send.

    ranks are numbered by (pipeline, data, context, tensor), tensor innermost:   4 ranks, tensor 2   0 1 | 2 3
                                                                                 data coordinate    0 0 | 1 1

Ranks that differ only in `tensor`, `context` or `pipeline` together hold one replica of the model and read the same samples.
Code that divides samples among ranks uses `data_rank` and `data_size`, never the world's.
Strategies split the state along `data` alone. `tensor` is the work of worker/parallel/_tensor.py, `pipeline` of _pipeline.py there.
`expert` is no axis of its own: consecutive ranks of a stage share the experts (_expert.py).

Ranks along `context` have the same weights, and parts of each sequence (_context.py). To a strategy they are replicas, whose
gradients are parts of one sum: it gets the mesh `of_state`, in which `context` is folded into `data`.

Replicas that train apart (worker/comm/outer) each have a mesh of their own, `apart`: its `data` axis has the ranks of one of them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from raydist.errors import UserError
from raydist.spec import JobSpec
from raydist.worker.comm import collectives, gloo_p2p, groups
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank


@dataclass(slots=True)
class Mesh:
    """All ranks as an array of shape (pipeline, data, context, tensor), and the place of `rank` in it.

    Raises UserError if a replica's ranks do not divide the world size.
    """

    rank: Rank
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    copies: int = 1
    """Meshes like this one, side by side along the data axis of the whole. This rank is in one of them."""
    note: str | None = field(default=None, init=False, compare=False)
    """Which axes send between nodes; None where there is one node, or one axis."""
    _experts: Mesh | None = field(default=None, init=False, repr=False, compare=False)
    _of_state: Mesh | None = field(default=None, init=False, repr=False, compare=False)
    _devices: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.rank.world_size % self.replica_size:
            raise UserError(
                f"{self.rank.world_size} workers: one replica of the model takes {self.replica_size} (pipeline {self.pipeline} x "
                f"context {self.context} x tensor {self.tensor}), which does not divide them",
                f"set cluster.workers to a multiple of {self.replica_size}",
            )
        if (self.rank.world_size // self.pipeline) % self.expert:
            raise UserError(
                f"{self.rank.world_size} workers: parallel.expert: {self.expert} does not divide the "
                f"{self.rank.world_size // self.pipeline} of a pipeline stage",
                f"set cluster.workers to a multiple of {self.pipeline * self.expert}",
            )

    @classmethod
    def of(cls, spec: JobSpec, rank: Rank) -> Mesh:
        """The mesh of a job, connected. A collective if a replica has several ranks. Raises UserError if a tensor group is on
        several nodes and must not be."""
        parallel = spec.parallel
        made = cls(
            rank,
            pipeline=parallel.pipeline,
            context=parallel.context,
            tensor=parallel.tensor,
            expert=parallel.expert,
        )
        nodes = gather_json(rank.node_ip, rank.control) if made.replica_size * made.expert > 1 else []
        if spec.parallel.together > 1:
            made.refuse_split_nodes(nodes)
        made.connect(nodes)
        made.note = made.links(nodes)
        return made

    def links(self, nodes: Sequence[str]) -> str | None:
        """See `note`. `nodes`: of all ranks."""
        if len(set(nodes)) < 2:
            return None
        shapes = {axis: (tuple(self.sizes.values()), n) for n, axis in enumerate(self.sizes) if self.sizes[axis] > 1}
        if self.expert > 1:  # consecutive ranks of a stage
            shapes["expert"] = (-1, self.expert), 1
        at = {axis: np.moveaxis(np.array(nodes).reshape(shape), n, 0) for axis, (shape, n) in shapes.items()}
        across = [axis for axis, of in at.items() if (of != of[0]).any()]
        within = [axis for axis in at if axis not in across]
        text = f"mesh on {len(set(nodes))} nodes: {' and '.join(across)} between nodes"
        return f"{text}; {' and '.join(within)} within a node" if within else text

    def refuse_split_nodes(self, nodes: Sequence[str]) -> None:
        """Raises UserError, on every rank, if the ranks of a tensor group are on several nodes. `nodes`: of all ranks."""
        for first in range(0, len(nodes), self.tensor):
            on = sorted(set(nodes[first : first + self.tensor]))
            if len(on) > 1:
                raise UserError(
                    f"parallel.tensor: {self.tensor}: ranks {first} to {first + self.tensor - 1} share layers, and are on nodes "
                    f"{' and '.join(on)}",
                    f"give each node a multiple of {self.tensor} workers, or set parallel.tensor_across_nodes: true",
                )

    def connect(self, nodes: Sequence[str] = ()) -> None:
        """Creates the groups along the axes. A collective; nothing is done where one rank holds a whole replica. `nodes`: of all
        ranks, if they are known."""
        if self.replica_size > 1 or self.copies > 1:
            sizes = self.sizes
            sizes = {"pipeline": sizes.pop("pipeline"), "copy": self.copies, **sizes}
            axes = {name: size for name, size in sizes.items() if size > 1}
            self._devices = groups.device_mesh(self.rank.device.type, (*axes.values(),), (*axes,))
        for axis in ("tensor", "context") if nodes else ():  # their ranks wait for each other in each layer
            if (group := self.group(axis)) and len({nodes[rank] for rank in self.peers(axis)}) == 1:
                gloo_p2p.within_node(group)
        if self.context > 1:
            self._of_state = Mesh(self.rank, pipeline=self.pipeline, tensor=self.tensor, expert=self.expert)
            self._of_state.connect(nodes)
        elif self.expert > 1:
            self._experts = Mesh(self.rank, pipeline=self.pipeline, tensor=self.expert)
            self._experts.connect(nodes)

    @property
    def experts(self) -> Mesh:
        """The mesh of the experts: along its axis `tensor` are the ranks that share them, along `data` those with the same ones."""
        experts = self.of_state._experts
        assert experts is not None, "connect() comes first, and expert is above 1"
        return experts

    @property
    def of_state(self) -> Mesh:
        """The mesh along whose `data` axis a strategy splits the state: this one, with `context` folded into `data`."""
        if self.context == 1:
            return self
        assert self._of_state is not None, "connect() comes first"
        return self._of_state

    def apart(self, copies: int) -> Mesh:
        """The mesh of this rank's replica, of so many that train apart. A collective."""
        assert self.copies == self.context == self.expert == 1
        made = Mesh(self.rank, pipeline=self.pipeline, tensor=self.tensor, copies=copies)
        made.connect()
        return made

    def within_nodes(self) -> int:
        """The largest number of replicas that are on one node, whichever: the greatest common divisor of those of all nodes.

        A collective. All ranks get the same number. Nodes may differ in size, and ranks that built different meshes would wait for
        each other.
        """
        world = self.rank.world_size
        local = torch.tensor([int(os.environ.get("LOCAL_WORLD_SIZE", world))])
        sizes = torch.empty(world, dtype=local.dtype)
        collectives.all_gather(sizes, local, group=self.rank.control)
        shared = math.gcd(*sizes.tolist()) // (self.tensor * self.context)  # stages are on ranks far apart
        # With one replica on several nodes there are none within one.
        return math.gcd(max(shared, 1), self.data_size)

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one in `axis` only; None if it is the only one."""
        if self.sizes[axis] == 1:
            return None
        if self._devices is None:
            assert self.replica_size == self.copies == 1, "connect() comes first"
            return dist.group.WORLD
        return self._devices.get_group(axis)

    def peers(self, axis: str) -> list[int]:
        """The world ranks that differ from this one in `axis` only, in its order; this one among them."""
        at = [*self.sizes].index(axis)
        mine = self.coordinate(self.rank.rank)
        same = mine[:at] + mine[at + 1 :]
        every = (self.coordinate(rank) for rank in self.members)
        return [r for r, (*place,) in zip(self.members, every, strict=True) if (*place[:at], *place[at + 1 :]) == same]

    def copy(self, rank: int) -> int:
        """Which of the `copies` world rank `rank` is in."""
        return rank // (self.tensor * self.context) // self.data_size % self.copies

    @property
    def members(self) -> list[int]:
        """The world ranks of this mesh."""
        own = self.copy(self.rank.rank)
        return [rank for rank in range(self.rank.world_size) if self.copy(rank) == own]

    @property
    def others(self) -> list[int]:
        """The world ranks that have the same place as this one in their copy, in the order of the copies; this one among them."""
        apart = self.tensor * self.context * self.data_size
        own = self.copy(self.rank.rank)
        return [self.rank.rank + (copy - own) * apart for copy in range(self.copies)]

    def data_mesh(self, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
        """The ranks of this rank's `data` axis as an array of these sizes, whose product is `data_size`. A collective."""
        if self.replica_size == self.copies == 1:
            return groups.device_mesh(self.rank.device.type, sizes, names)
        assert self._devices is not None, "connect() comes first"
        if len(sizes) == 1:
            return self._devices["data"]
        shape = {
            "pipeline": self.pipeline,
            "copy": self.copies,
            **dict(zip(names, sizes, strict=True)),
            "context": self.context,
            "tensor": self.tensor,
        }
        devices = groups.device_mesh(self.rank.device.type, (*shape.values(),), (*shape,))
        return devices[(*names,)]

    @property
    def replica_size(self) -> int:
        """Ranks that together hold one replica of the model."""
        return self.pipeline * self.context * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis, in the order of the mesh."""
        return {"pipeline": self.pipeline, "data": self.data_size, "context": self.context, "tensor": self.tensor}

    @property
    def data_size(self) -> int:
        """Replicas of the model: the parts into which a global batch is divided."""
        return self.rank.world_size // self.replica_size // self.copies

    @property
    def data_rank(self) -> int:
        """Which of these parts this rank reads."""
        return self.coordinate(self.rank.rank)[1]

    @property
    def context_rank(self) -> int:
        """Which part of each sequence this rank has."""
        return self.coordinate(self.rank.rank)[2]

    @property
    def pipeline_rank(self) -> int:
        """The first of this rank's stages."""
        return self.coordinate(self.rank.rank)[0]

    @property
    def tensor_rank(self) -> int:
        """Which part of each tensor this rank holds, of those that are split along `tensor`."""
        return self.coordinate(self.rank.rank)[3]

    @property
    def part(self) -> str:
        """Which part of each tensor that is, in words; "" where tensors are whole."""
        return f"tensor-{self.tensor_rank}-of-{self.tensor}" if self.tensor > 1 else ""

    @property
    def counts(self) -> bool:
        """Whether this rank adds its loss and tokens to the step's sums: of the ranks that compute the same loss, one does. Those
        along `context` compute parts of it, of their own tokens."""
        pipeline, _, _, tensor = self.coordinate(self.rank.rank)
        return tensor == 0 and pipeline == self.pipeline - 1

    def coordinate(self, rank: int) -> tuple[int, int, int, int]:
        """Of world rank `rank`: its index along (pipeline, data, context, tensor)."""
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        rank, data = divmod(rank, self.data_size)
        return rank // self.copies, data, context, tensor
