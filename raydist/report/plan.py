"""A plan as a table on stdout, with what to take and why.

Runs in: the user's shell. Must not import torch or ray.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

_COLUMNS = {
    "params": ("parameters", "buffers"),
    "grads": ("gradients",),
    "optim": ("optimizer",),
    "gathered": ("gathered",),
    "in flight": ("in_flight",),
    "activations": ("activations",),
    "loss": ("loss",),
    "total": ("total",),
    "sent": ("sent",),
    "host/node": ("host_per_node",),
    "disk/node": ("disk_per_node",),
    "copies/node": ("copies_per_node",),
}
"""Heading -> what is added up under it."""
_OPTIONAL = ("host/node", "disk/node", "copies/node")
_FITS = {True: ("yes", "green"), False: ("no", "red"), None: ("-", "")}


def show(told: dict[str, Any], out: Console | None = None) -> None:
    """The object of `raydist plan --json`."""
    out = out or Console(highlight=False)
    for line in _head(told):
        out.print(line, soft_wrap=True, markup=False)
    rows = [row for row in told["strategies"] if row["refused"] is None]
    _table(rows, told["pick"], out)
    for row in told["strategies"]:
        if row["refused"] is not None:
            out.print(f"{row['strategy']} cannot train this job: {row['refused']}", soft_wrap=True, markup=False)
    if told["pick"]:
        _pick(told, out)
    for text in told["suggestions"]:
        out.print(f"- {text}", soft_wrap=True, markup=False)
    out.print(_speed(told), soft_wrap=True, markup=False)


def _table(rows: list[dict[str, Any]], pick: dict[str, Any] | None, out: Console) -> None:
    """Lines of their own, not rich's table: that one cuts figures off where the terminal, or a pipe, is narrow."""
    unit, scale = ("GiB", 2**30) if max((row["total"] for row in rows), default=0) >= 2**30 else ("MiB", 2**20)
    columns = {
        name: keys for name, keys in _COLUMNS.items() if name not in _OPTIONAL or any(row[keys[0]] for row in rows)
    }
    reckoned = ("step, s", "tokens/s") if any(row["speed"] for row in rows) else ()
    widths = [max(len(name), 7) + 2 for name in (*columns, *reckoned)]
    form = "{:<8}" + "".join(f"{{:>{width}}}" for width in widths) + "  {:<8}  "
    out.print(form.format(unit, *columns, *reckoned, "peak in") + "fits", style="bold", soft_wrap=True)
    for row in rows:
        amounts = (f"{sum(row[key] for key in keys) / scale:,.2f}" for keys in columns.values())
        pace = row["speed"]
        speed = (f"{pace['seconds']:.3g}", f"{pace['tokens_per_second']:,.0f}") if pace else ()
        line = Text(form.format(row["strategy"], *amounts, *speed, row["phase"]))
        line.append(*_FITS[row["fits"]])
        if pick and pick["strategy"] == row["strategy"] and row["fits"]:
            line.stylize("bold", 0, len(row["strategy"]))
        out.print(line, soft_wrap=True)


def _head(told: dict[str, Any]) -> list[str]:
    model, machine, batch = told["model"], told["machine"], told["batch"]
    device = {"cuda": "GPU", "cpu": "CPU worker"}[machine["device"]]
    nodes = f", {machine['per_node']} a node" if machine["nodes"] > 1 else ""
    memory = ""
    if machine["memory"] is not None:
        memory = f"; {machine['memory'] / 2**30:.1f} GiB each, {machine['usable'] / 2**30:.1f} usable"
    frozen = model["parameters"] - model["trained"]
    settings = (
        f"{_plural(batch['accumulation'], 'micro-batch')} of {batch['micro']} x {batch['context']} tokens a step and rank",
        told["precision"],
        f"checkpoint_activations: {told['checkpoint_activations']}",
        f"offload: {told['offload']['optimizer']}",
        f"attention: {told['attention']}",
    )
    return [
        f"{told['spec']}: {model['name']}, {_count(model['parameters'])} parameters"
        f"{f' ({_count(frozen)} frozen)' if frozen else ''}, {_plural(model['blocks'], 'block')}",
        f"{_plural(machine['ranks'], device)}{nodes}{memory} ({machine['because']})",
        "; ".join(settings),
    ]


def _pick(told: dict[str, Any], out: Console) -> None:
    pick = told["pick"]
    room = f"{pick['total'] / 2**30:.1f} of {told['machine']['usable'] / 2**30:.1f} GiB"
    out.print(
        Text.assemble((f"take {pick['strategy']}", "bold green"), f" ({room}): {pick['because']}"), soft_wrap=True
    )
    if pick["set"]:
        out.print("  " + " ".join(f"--set {k}={v}" for k, v in pick["set"].items()), soft_wrap=True, markup=False)


def _speed(told: dict[str, Any]) -> str:
    """What the estimate rests on, or why there is none."""
    by = told["speed"]
    if by["device"] is None:
        return f"speed: no estimate: {by['because']}"
    words = [
        f"{by['peak_flops'] / 1e12:,.4g} TFLOP/s in {told['precision']}, {by['efficiency']:.0%} of it reached (--efficiency)"
    ]
    if told["machine"]["ranks"] > 1:
        words.append(f"{by['node_bytes_per_second'] / 1e9:g} GB/s in a node")
    if told["machine"]["nodes"] > 1:
        words.append(f"{by['network_bytes_per_second'] / 1e9:g} GB/s a GPU between nodes")
    if told["offload"]["optimizer"] != "none":
        words.append(f"{by['host_bytes_per_second'] / 1e9:g} GB/s to the host")
    if told["checkpoint_activations"] == "full":
        words.append("blocks computed twice")
    return (
        f"step and tokens/s are an estimate for {by['device']}: {', '.join(words)}; what overlaps left out, loading data not "
        "counted (docs/plan.md)"
    )


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def _count(n: int) -> str:
    """Parameters: 6.91 B, 124 M, 33 k."""
    for scale, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= scale:
            return f"{n / scale:.3g} {letter}"
    return str(n)
