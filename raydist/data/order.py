"""The order of an epoch's samples: a keyed permutation that is computed, not stored.

Runs anywhere: numpy and xxhash only. 10^11 samples cost as much as 10: the state is (n, key).

Above 4096 samples it is a Feistel network over the smallest power of two that is at least n, with cycle walking: a
number outside [0, n) goes through the network again, fewer than two passes on average. A network with few bits could
not produce most of the permutations, so for smaller n the order sorts a keyed hash of each sample (a table of at most 32 KiB).
All arithmetic is raydist's own, on 64-bit integers with overflow: the same on every platform and in every version of numpy.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

IntArray = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]

LARGEST = 1 << 62
"""Maximum number of samples in an order."""

_TABLE = 4096
_ROUNDS = 8
_U = np.uint64


def _mix(x: _Words) -> _Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection on 64 bits in which every input bit
    changes every output bit with probability one half."""
    x = (x ^ (x >> _U(30))) * _U(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U(27))) * _U(0x94D049BB133111EB)
    return x ^ (x >> _U(31))


def _round_keys(key: int, count: int) -> _Words:
    packed = key.to_bytes(16, "little")
    words = [xxhash.xxh3_64_intdigest(packed, seed=i) for i in range(count)]
    return np.array(words, dtype=np.uint64)


class Permutation:
    """A bijection on [0, n), chosen by `key` (an integer of at most 128 bits). `n` is 1 to 2**62."""

    def __init__(self, n: int, key: int) -> None:
        assert 1 <= n <= LARGEST, n
        self.n = n
        self.key = key
        self._table: IntArray | None = None
        self._keys = _round_keys(key, _ROUNDS)
        bits = max((n - 1).bit_length(), 2)
        self._low_bits = _U(bits // 2)
        self._masks = (_U((1 << (bits // 2)) - 1), _U((1 << (bits - bits // 2)) - 1))
        if n <= _TABLE:
            hashes = _mix(_mix(np.arange(n, dtype=np.uint64) + self._keys[0]) ^ self._keys[1])
            self._table = np.argsort(hashes, kind="stable").astype(np.int64)

    def __call__(self, positions: npt.ArrayLike) -> IntArray:
        """Positions in the order -> sample ids; int64, any shape. Raises IndexError outside [0, n)."""
        x = np.asarray(positions, dtype=np.int64)
        if x.size == 0:
            return x
        if int(x.min()) < 0 or int(x.max()) >= self.n:
            raise IndexError(f"[{x.min()}, {x.max()}] is not within [0, {self.n})")
        return self._table[x] if self._table is not None else self._walk(x)

    def _walk(self, values: IntArray) -> IntArray:
        x = self._network(values.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(x >= _U(self.n))
        while outside.size:
            x[outside] = self._network(x[outside])
            outside = outside[x[outside] >= _U(self.n)]
        return x.astype(np.int64).reshape(values.shape)

    def _network(self, x: _Words) -> _Words:
        """One pass: alternating rounds, each of which changes one half by a keyed hash of the other half."""
        halves = [x & self._masks[0], x >> self._low_bits]
        for i in range(_ROUNDS):
            changed = i % 2
            halves[changed] = halves[changed] ^ (_mix(halves[1 - changed] + self._keys[i]) & self._masks[changed])
        return halves[0] | (halves[1] << self._low_bits)


def epoch_order(seed: int, epoch: int, fingerprint: str, n: int) -> Permutation:
    """The order of one epoch of `n` samples: a pure function of its arguments.

    `fingerprint` is the dataset's; another dataset of the same size has another order.
    """
    return Permutation(n, xxhash.xxh3_128_intdigest(f"raydist-order-1|{seed}|{epoch}|{fingerprint}".encode()))
