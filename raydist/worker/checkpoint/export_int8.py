"""A checkpoint as a folder with int8 linear layers, if the held-out loss allows it.

Runs in: the user's shell (`raydist checkpoint export --quantize int8`). Torch, never ray. The evaluations hold the whole model in
memory, in fp32; the files are written one at a time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raydist.checkpoint import manifest
from raydist.data.dataset import TokenDataset
from raydist.errors import QuantizationRefused
from raydist.redact import beside
from raydist.run.directory import RunDir
from raydist.spec import read_stored
from raydist.worker import int8
from raydist.worker.checkpoint.export import check_new, export, scratch_of
from raydist.worker.evaluate import Evaluation, batches_of, evaluate
from raydist.worker.exported import open_folder
from raydist.worker.loss import build as build_loss


@dataclass(frozen=True, slots=True)
class Measured:
    """The weights before and after: bytes in files, held-out loss, speed."""

    bytes_before: int
    bytes_after: int
    before: Evaluation
    after: Evaluation

    @property
    def increase(self) -> float:
        """Of the held-out loss, in nats."""
        return self.after.loss - self.before.loss

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "increase": self.increase}

    def lines(self) -> list[str]:
        """For a user."""
        a, b = self.before, self.after
        return [
            f"size       {self.bytes_before / 2**20:,.1f} MiB -> {self.bytes_after / 2**20:,.1f} MiB "
            f"({self.bytes_after / self.bytes_before:.2f})",
            f"eval loss  {a.loss:.4f} -> {b.loss:.4f} nats ({self.increase:+.4f}), over {a.tokens:,} tokens",
            f"tokens/s   {a.tokens_per_second:,.0f} -> {b.tokens_per_second:,.0f} "
            f"({b.tokens_per_second / a.tokens_per_second:.2f})",
        ]


def export_int8(
    run: RunDir, step: int | None, out: Path, dataset: str | None = None, max_increase: float = 0.05, **options: Any
) -> Measured:
    """Writes the checkpoint to the new folder `out`, whole or not at all. `options`: see `export`.

    Raises QuantizationRefused if the held-out loss rises by more than `max_increase` nats, or is not finite; and what `export`
    raises.
    """
    check_new(out)
    with scratch_of(out) as scratch:
        plain, made = scratch / "plain", scratch / "int8"
        export(run, step, plain, "huggingface", dataset, **options)
        job = read_stored(run.storage)
        exported = open_folder(plain, job.model.context)
        found = manifest.read(run, exported.step())
        held_out = TokenDataset(dataset or beside(str(found.plain["dataset"]), run.full_uri))
        batches, loss = batches_of(job, held_out), build_loss(job)
        size, tensors = exported.nbytes, int8.linear_tensors(exported.model, exported.format)
        before = evaluate(exported.model, batches, loss)
        del exported  # two models would need twice the memory
        int8.write(plain, made, tensors)
        exported = open_folder(made, job.model.context)
        measured = Measured(size, exported.nbytes, before, evaluate(exported.model, batches, loss))
        if not measured.increase <= max_increase:  # NaN is refused, too
            raise QuantizationRefused(
                f"int8 raises the held-out loss by {measured.increase:.2g} nats, more than {max_increase:g} "
                f"({before.loss:.4f} -> {measured.after.loss:.4f})",
                "export without --quantize, train longer, or set --max-loss-increase",
            )
        made.rename(out)
    return measured
