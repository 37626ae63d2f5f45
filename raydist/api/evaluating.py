"""What `raydist evaluate` does.

Runs in: the process of the command, or one of its own. Imports torch inside the function; never ray.
"""

from __future__ import annotations

from pathlib import Path

from raydist.api.call import check_numbers, separate
from raydist.errors import UsageError


@separate
def evaluate(
    folder: str | Path, data: str | Path, *, context: int | None = None, batches: int = 8, sequences: int = 8,
    trust: bool = False,
) -> dict[str, float]:  # fmt: skip
    """The held-out loss of weights that `Run.export` wrote, in nats per token, on a dataset of `prepare_data`, and the speed:
    {"loss", "tokens", "tokens_per_second"}. `context`: tokens of a sequence; `trust`: whether code that the dataset names may run,
    such as its tokenizer. Imports torch. Raises UserErrors."""
    check_numbers(context=(context, 1), batches=(batches, 1), sequences=(sequences, 1))
    from raydist import registry
    from raydist.data.dataset import TokenDataset
    from raydist.worker import exported
    from raydist.worker.evaluate import evaluate_folder

    if not exported.is_exported(str(folder)):
        raise UsageError(f"{folder}: has no config.json", "give a folder of `raydist checkpoint export`")
    registry.trust(trust)
    dataset = TokenDataset(str(data))
    found = evaluate_folder(exported.open_folder(Path(folder), context), dataset, batches, sequences)
    return {"loss": found.loss, "tokens": found.tokens, "tokens_per_second": found.tokens_per_second}
