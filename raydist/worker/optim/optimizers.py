"""Optimizers by name.

Runs in: each train worker. Torch, never ray.

Weight decay acts on matrices (two or more dimensions), embeddings among them: a tied one is the output head too, and
a row that no token asks for should fade. Norms and biases are left alone: decay would pull a gain of 1 towards 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon, Optimizer

from raydist.errors import UserError

if TYPE_CHECKING:
    from raydist.spec import OptimSpec
    from raydist.worker.parallel import ParamShard

NAMES = ("adamw", "sgd", "adafactor", "muon")
WHOLE_MATRICES = ("adafactor", "muon")
FUSED_DEVICES = ("cuda", "cpu", "mps", "xpu")
"""Device types on which torch has fused AdamW and SGD."""

Group = dict[str, Any]
Named = list[tuple[str, nn.Parameter]]


def build(shards: Mapping[str, ParamShard], spec: OptimSpec, device: torch.device) -> Optimizer:
    """The optimizer over what this rank updates of each parameter; `device` is where that is.

    Groups carry `name` and `param_names`, in the order of `shards`. Their lr is `spec.lr` until the loop sets it.
    Raises UserError: `fused: true` where there is no such kernel; muon without `blocks`; muon and adafactor over rows of
    matrices, for they need them whole.
    """
    named = [(name, shard.local) for name, shard in shards.items()]
    if spec.name in WHOLE_MATRICES and any(shard.like is not None for shard in shards.values()):
        raise UserError(
            f"optim.name: {spec.name} works on whole matrices, and the strategy gives each rank some rows of them",
            "use adamw or sgd, or parallel.strategy: ddp",
        )
    match spec.name:
        case "adamw":
            return AdamW(
                decay_groups(named, spec),
                lr=spec.lr,
                betas=spec.betas,
                eps=spec.eps,
                **_kernel(spec, device, fused=True),
            )
        case "sgd":
            return SGD(
                decay_groups(named, spec), lr=spec.lr, momentum=spec.momentum, **_kernel(spec, device, fused=True)
            )
        case "adafactor":
            # Its own eps are for factored moments; the spec's, for Adam's root, would be wrong by orders of magnitude.
            kernel = _kernel(spec, device, fused=False)
            return Adafactor(decay_groups(named, spec), lr=spec.lr, foreach=kernel["foreach"])
        case "muon":
            return _muon(named, spec, device)
    raise UserError(f'optim.name: unknown "{spec.name}"', f"there are: {', '.join(NAMES)}")


def _group(name: str, named: Named, weight_decay: float) -> list[Group]:
    """One group in a list, or none if it would be empty."""
    return [{"name": name, "params": named, "weight_decay": weight_decay}] if named else []


def decay_groups(named: Named, spec: OptimSpec) -> list[Group]:
    """Two groups, `decay` and `no_decay`, matrices and the rest; one that would be empty is left out."""
    matrices = [(n, p) for n, p in named if p.ndim >= 2]
    rest = [(n, p) for n, p in named if p.ndim < 2]
    return _group("decay", matrices, spec.weight_decay) + _group("no_decay", rest, 0.0)


def _kernel(spec: OptimSpec, device: torch.device, *, fused: bool) -> dict[str, bool]:
    """torch's `fused` and `foreach`: the first that the optimizer has on this device, unless the spec forbids."""
    can_fuse = fused and device.type in FUSED_DEVICES
    if spec.fused is True and not can_fuse:
        raise UserError(
            f"optim.fused: true, but {spec.name} has no fused kernel on {device.type}", "set optim.fused: auto"
        )
    use = can_fuse and spec.fused is not False
    # `foreach` on CPU loops over the tensors all the same, and takes memory for it.
    return {"fused": use, "foreach": not use and device.type != "cpu"}


def _muon(named: Named, spec: OptimSpec, device: torch.device) -> Optimizer:
    hidden = [(n, p) for n, p in named if p.ndim == 2 and "blocks" in n.split(".")]
    if not hidden:
        raise UserError("optim.name: muon trains the matrices of model.blocks, and this model has none", "use adamw")
    ids = {id(p) for _, p in hidden}
    rest = [(n, p) for n, p in named if id(p) not in ids]
    return MuonWithAdamW(_group("muon", hidden, spec.weight_decay), decay_groups(rest, spec), spec, device)


def run_closure(closure: Callable[[], float] | None) -> float | None:
    """What torch promises who gives `Optimizer.step` a closure: it runs first, with autograd on, and its value is returned."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


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
            self._adamw = AdamW(adamw, lr=spec.lr, betas=spec.betas, eps=spec.eps, **_kernel(spec, device, fused=True))
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
