"""Which positions of a sequence each context rank holds, and how ranks are arranged.

A context group of ``size`` ranks is R rings positions times U Ulysses positions (size = R·U, rank = ring·U + lane). The
sequence is cut into 2R chunks; ring position i holds chunks i and 2R - 1 - i, so that causal work is the same on all:

    R = 4   chunk     0  1  2  3  4  5  6  7
            holder    0  1  2  3  3  2  1  0          (*zigzag*, as of Llama 3, arXiv 2407.21783, Section 3.3.2)

and its U lanes cut what it holds into equal, contiguous parts. Ulysses alone is R = 1: plain contiguous parts. A ring
alone is U = 1.

Glossary: *part* - the positions of one rank; *ring part* - those of the U ranks of a ring position; *chunk* - a
contiguous half of a ring part.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["ulysses", "ring", "hybrid"]


class Arrangement(NamedTuple):
    """``ring`` times ``lanes`` ranks."""

    ring: int
    lanes: int

    @property
    def size(self) -> int:
        return self.ring * self.lanes


def arrange(size: int, kind: Kind, ulysses_size: int | None = None) -> Arrangement:
    """The arrangement of a context group.

    Args:
        size: ranks.
        kind: "ulysses", "ring" or "hybrid".
        ulysses_size: U of a hybrid; None: the divisor of ``size`` nearest to its root, from above.

    Raises:
        ValueError: an unknown kind, or sizes that do not divide.
    """
    if kind not in ("ulysses", "ring", "hybrid"):
        raise ValueError(f"kind={kind!r} is not allowed: choose 'ulysses', 'ring' or 'hybrid'.")
    if kind != "hybrid":
        lanes = size if kind == "ulysses" else 1
        if ulysses_size is not None and ulysses_size != lanes:
            raise ValueError(f"ulysses_size={ulysses_size} is not allowed with kind={kind!r}: only a hybrid has one.")
        return Arrangement(size // lanes, lanes)
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    lanes = ulysses_size if ulysses_size is not None else next(n for n in divisors if n * n >= size)
    if lanes not in divisors:
        raise ValueError(f"ulysses_size={lanes} does not fit: it must divide the {size} context ranks ({divisors}).")
    return Arrangement(size // lanes, lanes)


def required_multiple(arrangement: Arrangement) -> int:
    """What the sequence length must be a multiple of."""
    return math.lcm(arrangement.size, 2 * arrangement.ring if arrangement.ring > 1 else 1)


def context_order(sequence_length: int, size: int, kind: Kind, ulysses_size: int | None = None) -> Tensor:
    """The positions of all ranks, one rank after the other.

    Args:
        sequence_length: S.
        size: context ranks.
        kind, ulysses_size: see `arrange`.

    Returns:
        [S] int64; rank r passes positions ``context_order(...).view(size, -1)[r]``, in this order.

    Raises:
        ValueError: S is not a multiple of what the arrangement needs.
    """
    arrangement = arrange(size, kind, ulysses_size)
    multiple = required_multiple(arrangement)
    if sequence_length < 1 or sequence_length % multiple:
        raise ValueError(
            f"A sequence of {sequence_length} tokens cannot be cut for {size} context ranks ({kind}): its length must"
            f" be a multiple of {multiple}. Nearest: {max(1, sequence_length // multiple) * multiple}"
            f" and {(sequence_length // multiple + 1) * multiple}."
        )
    if arrangement.ring == 1:
        return torch.arange(sequence_length)
    chunks = torch.arange(sequence_length).view(2 * arrangement.ring, -1)
    return torch.cat([chunks[[i, 2 * arrangement.ring - 1 - i]].flatten() for i in range(arrangement.ring)])
