"""Who owns which vocabulary rows, and how an axis is cut into pieces and tiles. Pure arithmetic on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_longmoe.config import RingDTP

Mode = Literal["weights", "activations"]


class Span(NamedTuple):
    """Rows ``start`` to ``stop - 1`` of an axis."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class VocabularySplit:
    """V rows over P ranks: rank r owns rows [r·Vp, ...) with Vp = ceil(V / P); the last shards may be short or empty.

    It is how ``torch.chunk``, and so a DTensor with ``Shard(0)``, cuts V rows over P ranks.
    """

    vocab_size: int
    ranks: int

    @property
    def padded_rows(self) -> int:
        """Vp, the rows of a full shard."""
        return -(-self.vocab_size // self.ranks)

    def start(self, rank: int) -> int:
        """The first vocabulary id of a rank's shard; V where it is empty."""
        return min(rank * self.padded_rows, self.vocab_size)

    def rows(self, rank: int) -> int:
        """Rows of the vocabulary that a rank owns, without padding."""
        return min(self.padded_rows, self.vocab_size - self.start(rank))


@dataclass(frozen=True)
class Pieces:
    """What each rank owns of a travelling axis, cut into equally many pieces on every rank.

    Attributes:
        sizes: [P] rows that each rank owns; pieces of a rank differ by rounding only, and the last ones may be empty.
        count: pieces of each rank.
    """

    sizes: tuple[int, ...]
    count: int

    def span(self, owner: int, piece: int) -> Span:
        """Where a piece lies in what its owner holds."""
        size = self.sizes[owner]
        step = -(-size // self.count)
        return Span(min(piece * step, size), min((piece + 1) * step, size))

    @property
    def longest(self) -> int:
        return -(-max(self.sizes) // self.count)

    @staticmethod
    def of(sizes: tuple[int, ...], tile: int, *, even: bool) -> Pieces:
        """As few pieces as keep each within ``tile`` rows; an even number of them where two are to travel in turns."""
        count = max(1, -(-max(sizes) // tile))
        return Pieces(sizes, count + count % 2 if even else count)


def tiles(size: int, tile: int) -> list[Span]:
    """``size`` rows in as few equal spans as keep each within ``tile`` rows; none where there are no rows."""
    pieces = Pieces.of((size,), tile, even=False)
    return [span for piece in range(pieces.count) if (span := pieces.span(0, piece)).length]


def choose_mode(config: RingDTP, most_tokens: int, split: VocabularySplit) -> Mode:
    """What travels. "auto": tokens where N_max <= V / P, else shards; both move as many bytes at N_max = V / P.

    Args:
        config: its mode, if not "auto", wins.
        most_tokens: N_max, the largest number of tokens of a rank of the group, which all ranks have agreed on.
        split: V and P.
    """
    if config.mode != "auto":
        return config.mode
    return "activations" if most_tokens * split.ranks <= split.vocab_size else "weights"
