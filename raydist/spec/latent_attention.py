"""The sizes of multi-head latent attention. The layer itself is raydist/worker/model/_latent_attention.py.

Runs anywhere. Imports no torch, see raydist/spec/decoder.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentShape:
    """`nope`, `rope`: the parts of a head's queries and keys without position and with it; `value`: a head's values; `latent`: of
    keys and values; `query_latent`: of queries, None without one. `interleaved`: pairs of neighbours are rotated, else the halves
    against each other.
    """

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    query_latent: int | None
    interleaved: bool = True

    def shapes(self, width: int) -> dict[str, tuple[int, ...]]:
        """The parameters of the layer, by name, in a stream of this width."""
        queries = self.heads * (self.nope + self.rope)
        made: dict[str, tuple[int, ...]] = {
            "kv_a.weight": (self.latent + self.rope, width),
            "kv_norm.weight": (self.latent,),
            "kv_b.weight": (self.heads * (self.nope + self.value), self.latent),
            "out.weight": (width, self.heads * self.value),
        }
        if self.query_latent is None:
            return made | {"q.weight": (queries, width)}
        return made | {
            "q_a.weight": (self.query_latent, width),
            "q_norm.weight": (self.query_latent,),
            "q_b.weight": (queries, self.query_latent),
        }
