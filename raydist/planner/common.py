"""What the planners of a job on several meshes share: the whole model, what cuts it, and the process group of their measurements.

Runs in: the user's shell (`raydist plan`). Torch, never ray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from raydist import registry
from raydist.extension_plans import strategy_plan
from raydist.planner.facts import Model
from raydist.planner.fake_module import FakeModule
from raydist.planner.tensor import OneGroup
from raydist.worker.comm import compressors
from raydist.worker.parallel._model_graph import blocks_of
from raydist.worker.parallel._stages import Costs, costs_of, cut_model

if TYPE_CHECKING:
    from raydist.planner.measure import Planner
    from raydist.spec import JobSpec


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A model, or its stages, as one rank alone would have them. `blocks`: of each; `alike`: whether all are equal, of a built-in
    model whose number of blocks is `model.layers`; `shares`: of the FLOPs of a pass, in a pipeline."""

    parts: list[FakeModule]
    blocks: tuple[int, ...]
    alike: bool
    shares: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Sent:
    """Bytes that a pass of a model with two blocks sends, as `Activations` has them: in the first block and before it, in the
    second, and after it; `exchanged`: of each block; `handed_on`: of a block's output."""

    first: int
    further: int
    after: int
    exchanged: int
    handed_on: int | None


class Common:
    """Each is built once: `models` and `shorter` (planners of the model with fewer blocks) by mesh."""

    def __init__(self) -> None:
        # Constants in the user's module are real tensors.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.group = OneGroup()
        self.models: dict[tuple[Any, ...], Model] = {}
        self.shorter: dict[tuple[int, ...], Planner] = {}
        self._whole: dict[int, tuple[nn.Module, bool]] = {}
        self._costs: dict[int, Costs] = {}
        self._unsplit: dict[tuple[int, ...], Unsplit] = {}

    def whole(self, spec: JobSpec, build: Callable[[], nn.Module]) -> tuple[nn.Module, bool]:
        """The model, and whether its blocks are alike."""
        layers, name = spec.model.layers, spec.model.name
        if layers not in self._whole:
            module = build()
            by_layers = name in registry.names("model") and registry.described("model", name, "BY_LAYERS") is not False
            self._whole[layers] = module, by_layers and _alike(module)
        return self._whole[layers]

    def unsplit(self, spec: JobSpec, build: Callable[[], nn.Module]) -> Unsplit:
        """The model, cut as the job says. Raises UserError if it cannot be cut, and what `build` and `stage` of the model raise."""
        key = cut_key(spec)
        if key not in self._unsplit:
            module, alike = self.whole(spec, build)
            cuts, parts = None, [module]
            if spec.parallel.pipeline > 1:
                if spec.model.layers not in self._costs:
                    self._costs[spec.model.layers] = costs_of(module, spec.model.context)
                cuts = cut_model(module, spec, self._costs[spec.model.layers])
                parts = cuts.parts(module)
            whole = {name: p.shape for name, p in module.named_parameters()}
            made = [FakeModule(part, whole, {}) for part in parts]
            blocks = tuple(part.blocks for part in made)
            self._unsplit[key] = Unsplit(made, blocks, alike, cuts.shares if cuts is not None else None)
        return self._unsplit[key]


def cut_key(spec: JobSpec) -> tuple[int, ...]:
    """Jobs with the same have the same stages."""
    return spec.model.layers, spec.parallel.stages, *(spec.parallel.pipeline_cut or ())


def refuse_compression(spec: JobSpec, model: Model) -> None:
    """Raises UserError as a rank does, if the compressor can compress none of these parameters."""
    comm, replicas = spec.comm, spec.cluster.most // spec.parallel.replica
    if not comm.checks_shapes or replicas == 1:
        return
    plan, shard = strategy_plan(spec.parallel.strategy), spec.parallel.shard
    # Copies of shards send the rows of one rank each. Without a fixed number of ranks a copy, they are known on the nodes alone.
    rows = shard if shard is not None and plan is not None and plan.group is not None and replicas > shard else 1
    compressors.refuse(
        compressors.build(comm.compress, comm.options), {p.name: p.rows(rows) for p in model.params if p.trained}
    )


def _alike(module: nn.Module) -> bool:
    """Whether all blocks have the same layers and shapes."""
    return len({(repr(b), *((n, p.shape) for n, p in b.named_parameters())) for _, b in blocks_of(module)}) == 1
