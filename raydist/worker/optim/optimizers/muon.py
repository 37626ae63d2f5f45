"""Muon on the matrices of the blocks; AdamW on embeddings, head, norms and biases.

Runs in: each train worker. Torch, never ray.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import AdamW, Muon, Optimizer

from raydist.errors import UserError
from raydist.extension_plans import OptimizerPlan
from raydist.worker.optim.optimizers import Group, Named, decay_groups, kernel, one_group, run_closure

if TYPE_CHECKING:
    from raydist.spec import OptimSpec


def _by_muon(name: str, dimensions: int) -> bool:
    """Whether Muon trains the parameter: a matrix in `blocks`."""
    return dimensions == 2 and "blocks" in name.split(".")


def _state_bytes(name: str, shape: tuple[int, ...], spec: OptimSpec) -> int:
    """One moment under Muon; two and a count of the steps under AdamW. In fp32."""
    return 4 * math.prod(shape) if _by_muon(name, len(shape)) else 8 * math.prod(shape) + 4


PLAN = OptimizerPlan(_state_bytes, whole_matrices=True)


def build(parameters: Named, spec: OptimSpec, device: torch.device) -> Optimizer:
    """See the contract in `__init__`. Raises UserError for a model without matrices in `blocks`."""
    hidden = [(n, p) for n, p in parameters if _by_muon(n, p.ndim)]
    if not hidden:
        raise UserError("optim.name: muon trains the matrices of model.blocks, and this model has none", "use adamw")
    ids = {id(p) for _, p in hidden}
    rest = [(n, p) for n, p in parameters if id(p) not in ids]
    return MuonWithAdamW(one_group("muon", hidden, spec.weight_decay), decay_groups(rest, spec), spec, device)


class MuonWithAdamW(Optimizer):
    """Muon on the matrices of the blocks; AdamW on embeddings, head, norms and biases. One optimizer to its caller.

    torch's own two do the work, on this one's groups and state. Muon's update is scaled to AdamW's root mean square
    (Moonlight, arXiv 2502.16982), so that one lr and one weight decay serve both.
    """

    def __init__(self, muon: list[Group], adamw: list[Group], spec: OptimSpec, device: torch.device) -> None:
        self._muon = Muon(muon, lr=spec.lr, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw")
        self._adamw: Optimizer | None = None
        groups = self._muon.param_groups
        if adamw:
            self._adamw = AdamW(adamw, lr=spec.lr, betas=spec.betas, eps=spec.eps, **kernel(spec, device, fused=True))
            groups = groups + self._adamw.param_groups
        # Optimizer's own constructor wants (name, parameter) pairs, or none: names are restored after it.
        names = [g.pop("param_names") for g in groups]
        super().__init__(groups, {"lr": spec.lr})
        for group, group_names in zip(self.param_groups, names, strict=True):
            group["param_names"] = group_names
        self._share()

    def _share(self) -> None:
        """Both parts work on these very groups and this very state."""
        first = len(self._muon.param_groups)
        self._muon.param_groups[:] = self.param_groups[:first]
        self._muon.state = self.state
        if self._adamw is not None:
            self._adamw.param_groups[:] = self.param_groups[first:]
            self._adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """`load_state_dict` ends here, with new groups and a new state: the parts get them too."""
        super().__setstate__(state)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = run_closure(closure)
        self._muon.step()  # type: ignore[no-untyped-call]
        if self._adamw is not None:
            self._adamw.step()
        return loss
