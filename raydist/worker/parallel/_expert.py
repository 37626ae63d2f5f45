"""Expert parallel: the experts of each layer are on several ranks, for the tokens of all of them.

Runs in: each train worker. Torch, never ray.

    8 ranks, dp 4 x tensor 2, expert 4:    0 1 | 2 3 | 4 5 | 6 7     replicas of all but the experts
                                           0 1   2 3   0 1   2 3     the quarter of the experts that a rank has

Consecutive ranks of a pipeline stage share the experts, whether they are replicas or tensor parallel ranks: each sends its own
tokens, by an exchange (raydist/worker/exchange). The ranks with the same experts are replicas of these. So the experts have a
strategy of their own, of the same name, whose data axis is `mesh.experts`'s; neither knows of the other. The gradient of an expert
is complete on its replicas: it has the tokens of all ranks.

Averages: a strategy that averages gradients divides by its number of replicas, and the loss was multiplied by that of the dense
one. The layers put that right in backward (`gradient_factor`), so gradients are right wherever they are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from raydist.errors import UserError
from raydist.extension_plans import strategy_plan
from raydist.spec import JobSpec
from raydist.worker import exchange
from raydist.worker.mesh import Mesh
from raydist.worker.model._moe import MixtureOfExperts, layers_of
from raydist.worker.parallel import Example, ParallelStrategy, ParamShard
from raydist.worker.parallel._cut import Cut, Cuts
from raydist.worker.parallel._model_graph import initialise, plain_name
from raydist.worker.parts import Parts


def split_experts(model: nn.Module, mesh: Mesh, name: str) -> Cuts | None:
    """Leaves this rank its part of the experts, and lets the layers exchange rows by the exchange `name`. Sends nothing.

    None with `expert` 1. Raises UserError for a model without experts, or with a number of them that the ranks cannot share.
    """
    layers = dict(layers_of(model))
    for layer in layers.values():
        groups = (mesh.group("tensor"), mesh.group("context"))
        layer.sequence_groups = tuple(group for group in groups if group is not None)
    if mesh.expert == 1:
        return None
    if not layers:
        raise UserError(
            f"parallel.expert: {mesh.expert}: {type(model).__name__} has no layers with experts",
            "set parallel.expert: 1",
        )
    group = mesh.experts.group("tensor")
    assert group is not None, "a group of several ranks"
    cuts, way = Cuts(mesh.experts, "expert"), exchange.build(name, group)
    for prefix, layer in layers.items():
        if layer.shape.count % mesh.expert:
            raise UserError(
                f"{prefix}: parallel.expert: {mesh.expert} does not divide its {layer.shape.count} experts",
                "take a divisor",
            )
        layer.exchange = way
        for key, p in layer.experts.named_parameters():
            cuts.add(plain_name(f"{prefix}.experts.{key}"), Cut(0, p.shape))
    cuts.apply(model)
    return cuts


class ExpertParallel(ParallelStrategy):
    """The strategy of a model with experts on several ranks: one for the experts, one for all else. See `ParallelStrategy`."""

    module: nn.Module
    takes_meta = True

    def __init__(self, spec: JobSpec, mesh: Mesh, make: Callable[[JobSpec, Mesh], ParallelStrategy]) -> None:
        self._mesh = mesh
        plan = strategy_plan(spec.parallel.strategy)
        name = plan.experts if plan is not None and plan.experts else spec.parallel.strategy
        self._dense = make(spec, mesh)
        self._experts = make(spec.with_fields({"parallel.strategy": name}), mesh.experts)
        self._both = (self._dense, self._experts)
        self.loss_factor = self._dense.loss_factor

    def wrap(self, model: nn.Module, example: Example) -> nn.Module:
        """See `ParallelStrategy.wrap`. Passes call the model itself, which has the hooks of both strategies."""
        if any(p.is_meta for p in model.parameters()):
            for _ in initialise(model):
                pass
        names = [plain_name(n) for n, p in model.named_parameters() if p.requires_grad]
        layers = dict(layers_of(model))
        for layer in layers.values():
            layer.gradient_factor = self._experts.loss_factor / self._dense.loss_factor
        experts = _ExpertsAlone({f"{name}.experts": layer.experts for name, layer in layers.items()}, model)
        experts.to(self._mesh.rank.device)
        with _hidden(layers.values()):
            self._dense.wrap(model, example)
        with self._dense.accumulate(last=True):  # hsdp would keep the sums of others for the first step
            self._experts.wrap(experts, example)
        self.finish_grads()
        self.zero_grad()
        shards = {**self._dense.shards(), **self._experts.shards()}
        self._shards = {name: shards[name] for name in names}
        self.module = model
        return model

    @property
    def parts(self) -> Parts | None:
        """See `ParallelStrategy`: those of the dense strategy."""
        return self._dense.parts

    @parts.setter
    def parts(self, parts: Parts | None) -> None:
        """Sets them for both strategies. The ranks with the same experts have the rows of several replicas, or of a part of one."""
        axis = self._mesh.experts
        self._dense.parts, together = parts, self._experts.reduces_together()
        self._experts.parts = parts and parts.for_experts(axis.data_rank, axis.data_size, together)

    def reduces_together(self) -> int:
        """See `ParallelStrategy`."""
        return self._dense.reduces_together()

    def shards(self) -> Mapping[str, ParamShard]:
        """See `ParallelStrategy.shards`."""
        return self._shards

    @property
    def on_final(self) -> Callable[[Sequence[Tensor]], None] | None:
        """See `ParallelStrategy.on_final`."""
        return self._dense.on_final

    @on_final.setter
    def on_final(self, callback: Callable[[Sequence[Tensor]], None] | None) -> None:
        """Sets it for both strategies."""
        for strategy in self._both:
            strategy.on_final = callback

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        """See `ParallelStrategy.accumulate`."""
        with ExitStack() as stack:
            for strategy in self._both:
                stack.enter_context(strategy.accumulate(last))
            yield

    def finish_grads(self) -> None:
        """See `ParallelStrategy.finish_grads`."""
        for strategy in self._both:
            strategy.finish_grads()

    def scale_grads(self, factor: float) -> None:
        """See `ParallelStrategy.scale_grads`."""
        for strategy in self._both:
            strategy.scale_grads(factor)

    def zero_grad(self) -> None:
        """See `ParallelStrategy.zero_grad`."""
        for strategy in self._both:
            strategy.zero_grad()

    def updated(self) -> None:
        """See `ParallelStrategy.updated`."""
        for strategy in self._both:
            strategy.updated()

    def messages(self) -> list[tuple[str, int, str]]:
        """For traces: those of both strategies."""
        return [message for strategy in self._both for message in strategy.messages()]


class _ExpertsAlone(nn.Module):
    """The experts of a model, by their names in it. It has no other parameters, and calls the model, which calls them.

    No ModuleList, since torch 2.11's `fully_shard` refuses each of them; `lists` says that its children are blocks all the same.
    """

    lists = nn.ModuleList

    def __init__(self, experts: Mapping[str, nn.Module], model: nn.Module) -> None:
        super().__init__()
        self._modules.update(experts)
        self.__dict__["_model"] = model  # not as a child

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["_model"](*args, **kwargs)

    @property
    def gives_loss(self) -> bool:
        """The model's."""
        return bool(getattr(self.__dict__["_model"], "gives_loss", False))


@contextmanager
def _hidden(layers: Iterable[MixtureOfExperts]) -> Iterator[None]:
    """Within the block the experts belong to no module, although their layers call them: a strategy does not see them."""
    kept = [(layer, layer._modules) for layer in layers]
    try:
        for layer, modules in kept:
            layer._modules = {name: m for name, m in modules.items() if name != "experts"}
            layer.__dict__["experts"] = modules["experts"]
        yield
    finally:
        for layer, modules in kept:
            layer._modules = modules
            layer.__dict__.pop("experts", None)
