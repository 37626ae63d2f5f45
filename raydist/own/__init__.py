"""Your own training loop with raydist's ranks, samples, checkpoints and records: see `session`.

    import raydist.own as rd
    with rd.session(model, optimizer, dataset, steps=1000, batch=64) as s:
        for batch in s:
            s.backward(loss(s.model, batch), weight=len(batch))
            s.step()

Runs in: the user's script, as plain python or as each rank of torchrun, mpirun or srun. Imports torch, never ray.
"""

from __future__ import annotations

from raydist.own.session import Session, session

__all__ = ["Session", "session"]
