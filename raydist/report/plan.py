"""A plan as a table on stdout, with the suggested strategy and the reason.

Runs in: the user's shell. Must not import torch or ray.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from raydist.report import text
from raydist.report.tables import columns

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
    "sent in group": ("tensor_sent",),
    "to stages": ("pipeline_sent",),
    "to experts": ("exchanged",),
    "over network": ("sent_over_network",),
    "host/node": ("host_per_node",),
    "disk/node": ("disk_per_node",),
    "copies/node": ("copies_per_node",),
}
"""Heading -> keys whose values are summed under it."""
_OPTIONAL = ("sent in group", "to stages", "to experts", "over network", "host/node", "disk/node", "copies/node")
_AXES = ("tensor", "context", "pipeline", "chunks", "expert")
_FITS = {True: ("yes", "green"), False: ("no", "red"), None: ("-", "")}


def show(plan: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist plan --json`."""
    out = out or Console(highlight=False)
    for line in _head(plan):
        out.print(line, soft_wrap=True, markup=False)
    rows = [row for row in plan["strategies"] if row["refused"] is None]
    _table(rows, plan["pick"], out)
    if any("ranks" in row for row in rows):
        named = plan["pick"]["strategy"] if plan["pick"] and not plan["pick"]["set"] else None
        _ranks(plan, next((row for row in rows if row["strategy"] == named), rows[0]), out)
    for row in plan["strategies"]:
        if row["refused"] is not None:
            out.print(f"{row['strategy']} cannot train this job: {row['refused']}", soft_wrap=True, markup=False)
    if plan["pick"]:
        _pick(plan, out)
    for line in (*(f"- {each}" for each in plan["suggestions"]), *_intervals(plan["intervals"], plan["machine"])):
        out.print(line, soft_wrap=True, markup=False)
    out.print(_speed(plan), soft_wrap=True, markup=False)


def show_search(found: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist plan --search --json`."""
    out = out or Console(highlight=False)
    model, machine = found["model"], found["machine"]
    out.print(
        f"{found['spec']}: {model['name']}, {_count(model['parameters'])} parameters, {_plural(model['blocks'], 'block')}; "
        f"{_plural(machine['ranks'], 'GPU')}, {machine['per_node']} per node; {machine['usable'] / 2**30:.1f} GiB usable of each",
        soft_wrap=True,
        markup=False,
    )
    looked = sum(found["too_large"].values()) + len(found["best"])
    out.print(
        f"{found['combinations']:,} combinations in {found['seconds']:.0f} s: {found['slower']:,} cannot be faster than these by "
        f"their limit; of the fastest {looked} others, "
        f"{looked - len(found['best'])} do not fit{_reasons(found['too_large'])}",
        soft_wrap=True,
    )
    form = "{:>3}{:>8}{:>9}{:>10}{:>8}{:>8}  {:<8}{:>6}{:>8}{:>12}{:>8}{:>8}{:>10}{:>10}{:>11}{:>12}{:>14}"
    head = ("", *_AXES, "strategy", "micro", "GiB", "tokens/s", "of peak", "bubble", "GiB sent")
    out.print(form.format(*head, "in group", "to stages", "to experts", "over network"), style="bold", soft_wrap=True)
    for number, one in enumerate(found["best"], 1):
        mesh, speed, total = one["mesh"], one["speed"], one["total"] / 2**30
        sent = [one.get(key, 0) for key in ("sent", "tensor_sent", "pipeline_sent", "exchanged")]
        out.print(
            form.format(
                number, *(mesh[axis] for axis in _AXES), one["strategy"], mesh["micro_batch"], f"{total:.1f}",
                f"{speed['tokens_per_second']:,.0f}", f"{one['share_of_peak']:.0%}", f"{speed['bubble']:.0%}",
                *(f"{size / 2**30:,.1f}" for size in (*sent, one["sent_over_network"])),
            ),
            soft_wrap=True,
        )  # fmt: skip
    for number, one in enumerate(found["best"], 1):
        out.print(f"{number}: {one['because']}", soft_wrap=True, markup=False)
        if one["set"]:
            out.print("   " + " ".join(f"--set {k}={v}" for k, v in one["set"].items()), soft_wrap=True, markup=False)
    if not found["best"]:
        out.print(
            "nothing fits: use more GPUs, or see the plan without --search for what shrinks the job", soft_wrap=True
        )
    for why, count in found["refused"].items():
        out.print(f"- {count} refused: {why}", soft_wrap=True, markup=False)
    by = found["speed"]
    out.print(
        f"a forecast for {by['device']} at {by['efficiency']:.0%} of its peak, whatever the mesh (docs/how-to/plan.md)",
        soft_wrap=True,
    )


def show_scaling(found: dict[str, Any], out: Console | None = None) -> None:
    """Prints the object of `raydist plan --scaling --json`."""
    from raydist.report.html.scaling import HEADS, rows

    out = out or Console(highlight=False)
    how = "grows with the GPUs" if found["weak"] else "stays as it is"
    out.print(f"{found['strategy']} on {found['speed']['device']}, the global batch {how}", style="bold", markup=False)
    table = columns(*(f"{head}>" for head in HEADS))
    for row in rows(found):
        table.add_row(*row)
    out.print(table)
    for gpus, reason in found["refused"].items():
        out.print(f"{gpus} GPUs: {reason}", soft_wrap=True, markup=False)


def _reasons(counts: dict[str, int]) -> str:
    return ": mostly " + ", ".join(f"{what} ({n})" for what, n in counts.items()) if counts else ""


def _table(rows: list[dict[str, Any]], pick: dict[str, Any] | None, out: Console) -> None:
    """Plain lines instead of rich's table, which truncates figures if the terminal or a pipe is narrow."""
    unit, scale, columns = _columns(rows)
    speeds = ("step, s", "tokens/s") if any(row["speed"] for row in rows) else ()
    widths = [max(len(name), 7) + 2 for name in (*columns, *speeds)]
    form = "{:<8}" + "".join(f"{{:>{width}}}" for width in widths) + "  {:<8}  "
    out.print(form.format(unit, *columns, *speeds, "peak in") + "fits", style="bold", soft_wrap=True)
    for row in rows:
        amounts = (f"{sum(row[key] for key in keys) / scale:,.2f}" for keys in columns.values())
        speed = row["speed"]
        rates = (f"{speed['seconds']:.3g}", f"{speed['tokens_per_second']:,.0f}") if speed else ()
        line = Text(form.format(row["strategy"], *amounts, *rates, row["phase"]))
        line.append(*_FITS[row["fits"]])
        if pick and pick["strategy"] == row["strategy"] and row["fits"]:
            line.stylize("bold", 0, len(row["strategy"]))
        out.print(line, soft_wrap=True)


def _columns(rows: list[dict[str, Any]]) -> tuple[str, int, dict[str, tuple[str, ...]]]:
    """(unit, its bytes, the columns that say something)."""
    unit, scale = ("GiB", 2**30) if max((row["total"] for row in rows), default=0) >= 2**30 else ("MiB", 2**20)
    shown = (
        (name, keys)
        for name, keys in _COLUMNS.items()
        if name not in _OPTIONAL or any(row.get(keys[0]) for row in rows)
    )
    return unit, scale, dict(shown)


def _ranks(plan: dict[str, Any], row: dict[str, Any], out: Console) -> None:
    """Each rank of the pipeline under one strategy."""
    unit, scale, columns = _columns(row["ranks"])
    columns = {name: keys for name, keys in columns.items() if not name.endswith("/node")}
    blocks, shares = plan["machine"]["pipeline"]["blocks"], plan["machine"]["pipeline"]["shares"]
    form = "{:<8}{:>12}{:>9}" + "".join(f"{{:>{max(len(name), 7) + 2}}}" for name in columns)
    out.print(f"each rank of a pipeline with {row['strategy']}, in {unit}", style="bold", soft_wrap=True)
    out.print(form.format("rank", "blocks", "FLOPs", *columns), style="bold", soft_wrap=True)
    ranks = len(row["ranks"])
    for number, one in enumerate(row["ranks"]):
        own = " + ".join(map(str, blocks[number::ranks]))
        amounts = (f"{sum(one[key] for key in keys) / scale:,.2f}" for keys in columns.values())
        out.print(form.format(number, own, f"{sum(shares[number::ranks]):.1%}", *amounts), soft_wrap=True)


def _head(plan: dict[str, Any]) -> list[str]:
    model, machine, batch = plan["model"], plan["machine"], plan["batch"]
    device = {"cuda": "GPU", "cpu": "CPU worker"}[machine["device"]]
    nodes = f", {machine['per_node']} per node" if machine["nodes"] > 1 else ""
    tensor, context, pipeline = machine.get("tensor", 1), machine.get("context", 1), machine.get("pipeline")
    groups = f" in {_plural(machine['ranks'] // tensor, 'tensor group')} of {tensor}" if tensor > 1 else ""
    if context > 1:
        groups += f", {context} to a sequence"
    if (expert := machine.get("expert", 1)) > 1:
        groups += f", {expert} to the experts of a layer"
    if pipeline:
        stages = pipeline["ranks"] * pipeline["chunks"]
        groups += (
            f", {_plural(machine['ranks'] // tensor // context // pipeline['ranks'], 'pipeline')} of {stages} stages"
        )
    memory = ""
    if machine["memory"] is not None:
        memory = f"; {machine['memory'] / 2**30:.1f} GiB each, {machine['usable'] / 2**30:.1f} usable"
    frozen = model["parameters"] - model["trained"]
    each = "pipeline" if pipeline else "rank" if tensor == context == 1 else "group"
    shape = f"{'at most ' if 'max_tokens' in batch else ''}{batch['micro']} x {batch['context']}"
    settings = (
        f"{_plural(batch['accumulation'], 'micro-batch')} of {shape} tokens per step and {each}",
        plan["precision"],
        f"checkpoint_activations: {plan['checkpoint_activations']}",
        f"offload: {plan['offload']['optimizer']}",
        f"attention: {plan['attention']}",
    )
    return [
        f"{plan['spec']}: {model['name']}, {_count(model['parameters'])} parameters"
        f"{f' ({_count(frozen)} frozen)' if frozen else ''}, {_plural(model['blocks'], 'block')}",
        f"{_plural(machine['ranks'], device)}{groups}{nodes}{memory} ({machine['because']})",
        "; ".join(settings),
    ]


def _pick(plan: dict[str, Any], out: Console) -> None:
    pick = plan["pick"]
    room = f"{pick['total'] / 2**30:.1f} of {plan['machine']['usable'] / 2**30:.1f} GiB"
    out.print(
        Text.assemble((f"take {pick['strategy']}", "bold green"), f" ({room}): {pick['because']}"), soft_wrap=True
    )
    if pick["set"]:
        out.print("  " + " ".join(f"--set {k}={v}" for k, v in pick["set"].items()), soft_wrap=True, markup=False)


def _intervals(found: dict[str, Any] | None, machine: dict[str, Any]) -> list[str]:
    """How far apart checkpoints and copies in memory are with `auto`, and why."""
    if found is None:
        return []
    by = f", as in run {found['run']}" if found["run"] is not None else ""
    written = f" and is written in {text.span(found['write_s'])}" if found["write_s"] else ""
    ranks = _plural(machine["ranks"], "rank")
    return [
        f"checkpoint.every: auto: about {_plural(found['checkpoint_steps'], 'step')} ({text.span(found['checkpoint_s'])}), which "
        f"lose least: a checkpoint stops training for {text.span(found['stall_s'])}{written}{by}, {ranks} fail every "
        f"{text.span(found['mtbf_s'])}",
        f"recovery.snapshot_every: auto: about {_plural(found['copy_steps'], 'step')} ({text.span(found['copy_s'])}): copies in "
        f"memory take up to {found['copy_share']:.0%} of the time at {text.span(found['copy_cost_s'])} each, so that a failure "
        f"repeats little; {text.span(found['copy_loses_least_s'])} would lose least on average",
    ]


def _speed(plan: dict[str, Any]) -> str:
    """The basis of the estimate, or why there is none."""
    by = plan["speed"]
    if by["device"] is None:
        return f"speed: no estimate: {by['because']}"
    words = [
        f"{by['peak_flops'] / 1e12:,.4g} TFLOP/s in {plan['precision']}, {by['efficiency']:.0%} of it reached (--efficiency)"
    ]
    if plan["machine"]["ranks"] > 1:
        words.append(f"{by['node_bytes_per_second'] / 1e9:g} GB/s in a node")
    if plan["machine"]["nodes"] > 1:
        words.append(f"{by['network_bytes_per_second'] / 1e9:g} GB/s per GPU between nodes")
    if plan["offload"]["optimizer"] != "none":
        words.append(f"{by['host_bytes_per_second'] / 1e9:g} GB/s to the host")
    if plan["checkpoint_activations"] == "full":
        words.append("blocks computed twice")
    bubbles = [row["speed"]["bubble"] for row in plan["strategies"] if (row.get("speed") or {}).get("bubble")]
    if bubbles:
        words.append(f"ranks wait {bubbles[0]:.0%} of the passes' time for other stages")
    return (
        f"step and tokens/s are an estimate for {by['device']}: {', '.join(words)}; overlapped time and data loading not "
        "counted (docs/how-to/plan.md)"
    )


def _plural(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 'es' if what.endswith('ch') else 's'}"


def _count(n: int) -> str:
    """Parameters: 6.91 B, 124 M, 33 k."""
    for scale, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if n >= scale:
            return f"{n / scale:.3g} {letter}"
    return str(n)
