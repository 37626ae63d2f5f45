"""The views of `raydist watch`, from a run's folder alone: steps, and each rank's memory and shares of time.

Runs anywhere. Must not import torch or ray. docs/reference/observe.md has the fields.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from raydist.parsing import parse_yaml
from raydist.records import Event, Finding
from raydist.report import text, time_breakdown
from raydist.report.doctor import slow_ranks
from raydist.report.summary import expert_loads
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import plain, read_events
from raydist.run.status import read_state
from raydist.run.telemetry_log import read_samples

WINDOW_S = 30.0
"""The time that shares and rates cover."""
_BAR = 10
_EXPERTS, _LAYERS = 64, 8
"""At most so many bars of experts in a line, and lines of layers."""


_GPU = (
    "node",
    "host",
    "gpu",
    "at",
    "gpu_name",
    "gpu_util",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_power_watts",
    "gpu_temperature_celsius",
    "gpu_throttle",
)
"""Of the newest reading of each GPU of the run's nodes."""


def view(run: RunDir) -> dict[str, Any]:
    """The run's current state: plain data for strict JSON. Unknown values are None. Raises StorageError."""
    state = read_state(run)
    now = time.time()
    rows = read_samples(run, since=now - WINDOW_S).to_pylist() if state["status"] == "running" else []
    attempt = state.get("attempt")
    ranks = time_breakdown.by_subject((r for r in rows if r["kind"] == "rank" and r["attempt"] == attempt), "rank")
    nodes = time_breakdown.by_subject((r for r in rows if r["kind"] == "node"), "node")
    gpus = time_breakdown.by_subject((r for r in rows if r["kind"] == "gpu"), "node", "gpu")
    total, pace = _total(run), state.get("tokens_per_second")
    spent = {rank: time_breakdown.spent(own) for (rank,), own in ranks.items()}
    events = read_events(run)
    slow = {one["rank"] for one in slow_ranks(events) if one["until"] is None}
    found = {
        "at": now,
        "run": run.name,
        "path": run.uri,
        "status": state["status"],
        "attempt": attempt,
        "world_size": state.get("world_size"),
        "step": state.get("step") or 0,
        "steps": total,
        "loss": state.get("loss"),
        "eval_loss": state.get("eval_loss"),
        "tokens_per_second": pace,
        "expert_imbalance": state.get("expert_imbalance"),
        "exchanged_bytes": state.get("exchanged_bytes"),
        "expert_loads": expert_loads(run, events) if state.get("expert_imbalance") is not None else None,
        "sync_bytes": state.get("sync_bytes"),
        "sync_seconds": state.get("sync_seconds"),
        "ranks": [
            _rank(rank, own[-1], spent[rank], nodes, gpus) | {"slow": rank in slow}
            for (rank,), own in sorted(ranks.items())
        ],
        "nodes": [_node(own) for _, own in sorted(nodes.items())],
        "gpus": [{name: own[-1][name] for name in _GPU} for _, own in sorted(gpus.items())],
        "findings": _findings(events) if state["status"] == "running" else [],
    }
    return dict(plain(found))


def panel(seen: dict[str, Any]) -> RenderableType:
    """A view for a terminal."""
    head = Text(line(seen), style="bold")
    if not seen["ranks"]:
        return Group(head, Text("no readings of ranks yet" if seen["status"] == "running" else ""))
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("rank", "host", "step", "memory", "", "compute", "exposed", "data", "GPU", "net in/s", "net out/s"):
        table.add_column(name, justify="left" if name in ("host", "") else "right", no_wrap=True)
    nodes = {node["node"]: node for node in seen["nodes"]}
    for row in seen["ranks"]:
        node = nodes.get(row["node"], {})
        used = row["memory_used"]
        table.add_row(
            f"{row['rank']}",
            f"{row['host']}",
            f"{row['step']}",
            text.size(row["memory_bytes"]),
            "" if used is None else "█" * round(used * _BAR) + "░" * (_BAR - round(used * _BAR)),
            *(text.percent(row[name]) for name in ("compute", "exposed", "data", "gpu_util")),
            *(text.size(node.get(name)) for name in ("nic_in_bytes_per_second", "nic_out_bytes_per_second")),
            style="yellow" if row["slow"] else "",
        )
    tail = [
        Text(f"{one['what']}: {one['remedy']}", "red" if one["severity"] == "critical" else "yellow")
        for one in seen["findings"]
    ]
    return Group(head, table, *tail, *_bars(seen["expert_loads"]))


def line(seen: dict[str, Any]) -> str:
    """A view in one line, for output that is not a terminal."""
    parts = [f"{seen['run']} {seen['status']}", text.progress(seen["step"], seen["steps"])]
    parts += [f"loss {text.loss(seen['loss'])}", f"tokens/s {text.rate(seen['tokens_per_second'])}"]
    if seen["expert_imbalance"] is not None:
        parts.append(f"experts' imbalance {seen['expert_imbalance']:.2f}")
    if seen["exchanged_bytes"]:
        parts.append(f"exchanged {text.size(seen['exchanged_bytes'])}/step")
    if seen["sync_bytes"] is not None:
        parts.append(f"last sync {text.size(seen['sync_bytes'])} in {text.span(seen['sync_seconds'])}")
    known = [row for row in seen["ranks"] if row["compute"] is not None]
    for name in ("exposed", "data"):
        if known:
            worst = max(known, key=lambda row: row[name])
            parts.append(f"{name} {text.percent(worst[name])} (rank {worst['rank']})")
    parts += [one["what"] for one in seen["findings"]]
    return "  ".join(parts)


def _findings(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Those of the newest attempt that are not over: rule, rank, severity, what, remedy."""
    found: dict[Any, dict[str, Any]] = {}
    for event in events:
        if event.kind == "attempt_started":
            found.clear()
        elif event.kind == "finding":
            finding = Finding.from_dict(event.data)
            found.pop(finding.key, None)
            if finding.state != "over":
                names = ("rule", "rank", "severity", "what", "remedy")
                found[finding.key] = {name: getattr(finding, name) for name in names}
    return list(found.values())


def _bars(loads: Mapping[str, Any] | None) -> list[Text]:
    """A line for each layer: a bar for each expert, as high as its share of the fullest one's load, and a dot for an idle one. Of
    more than _EXPERTS experts a bar is the fullest of several."""
    if loads is None:
        return []
    lines = [Text(f"tokens of each expert in step {loads['step']}", "dim")]
    for name, layer in [*loads["layers"].items()][:_LAYERS]:
        each = -(-len(layer) // _EXPERTS)
        most = [max(layer[i : i + each]) for i in range(0, len(layer), each)]
        bars = "".join("·" if n == 0 else "▁▂▃▄▅▆▇█"[min(8 * n // max(layer), 7)] for n in most)
        ratio = max(layer) * len(layer) / max(sum(layer), 1)
        idle = f", {layer.count(0)} idle" if 0 in layer else ""
        lines.append(Text(f"{name}  {bars}  fullest {ratio:.2f} of the mean{idle}"))
    if len(loads["layers"]) > _LAYERS:
        lines.append(Text(f"and {len(loads['layers']) - _LAYERS} more layers", "dim"))
    return lines


def _rank(
    rank: int, row: Mapping[str, Any], spent: dict[str, float] | None, nodes: dict[Any, Any], gpus: dict[Any, Any]
) -> dict[str, Any]:
    """Memory: of its GPU if it has one, else of its process, as a share of its node's."""
    gpu = gpus.get((row["node"], row["gpu"]), [None])[-1] if row["gpu"] is not None else None
    node = nodes.get((row["node"],), [None])[-1]
    if gpu is not None:
        memory, most = gpu["gpu_memory_used_bytes"], gpu["gpu_memory_total_bytes"]
    else:
        memory, most = row["rss_bytes"], node["memory_total_bytes"] if node else None
    return {
        "rank": rank,
        "host": row["host"],
        "node": row["node"],
        "gpu": row["gpu"],
        "at": row["at"],
        "step": row["step"],
        "memory_bytes": memory,
        "memory_used": memory / most if memory is not None and most else None,
        "gpu_util": gpu["gpu_util"] if gpu else None,
        **(spent or dict.fromkeys(("compute", "exposed", "data", "eval", "save"))),
    }


def _node(rows: list[Any]) -> dict[str, Any]:
    newest = rows[-1]
    return {
        **{
            name: newest[name]
            for name in ("node", "host", "at", "cpu_util", "memory_used_bytes", "memory_total_bytes", "nic")
        },
        "nic_in_bytes_per_second": time_breakdown.rate(rows, "nic_in_bytes"),
        "nic_out_bytes_per_second": time_breakdown.rate(rows, "nic_out_bytes"),
    }


def _total(run: RunDir) -> int | None:
    try:
        steps = parse_yaml(run.storage.read(SPEC))["train"]["steps"]  # of any version of raydist
        return None if steps is None else int(steps)
    except (FileNotFoundError, KeyError, TypeError, ValueError, yaml.YAMLError):
        return None
