"""Routing profiles: the row counts that a router of a given skew would give, for dry runs, benchmarks and tests.

A profile ``p / m`` sends p percent of the routes to the first m experts and the rest evenly to the others, as the
tables of arXiv 2609.14306 name theirs. The hot experts are neighbours: with few of them all live on the first rank,
which is the worst place.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Profile:
    """``share`` of the routes go to the first ``hot`` experts."""

    share: float
    hot: int

    def probabilities(self, experts: int) -> NDArray[np.float64]:
        """[E] chance of each expert; uniform where no expert is hot."""
        if self.hot == 0:
            return np.full(experts, 1 / experts)
        chances = np.full(experts, (1 - self.share) / (experts - self.hot))
        chances[: self.hot] = self.share / self.hot
        return chances


PROFILES = {
    "balanced": Profile(0, 0),
    "30%/16": Profile(0.3, 16),
    "50%/16": Profile(0.5, 16),
    "80%/16": Profile(0.8, 16),
    "95%/16": Profile(0.95, 16),
    "50%/4": Profile(0.5, 4),
    "80%/4": Profile(0.8, 4),
}
"""The seven profiles of the balance figures."""


def draw_counts(
    profile: Profile, *, ranks: int, chunks: int, experts: int, tokens: int, top_k: int, seed: int = 0
) -> NDArray[np.int64]:
    """[Ep, chunks, E] rows: each rank routes ``tokens`` tokens, strided over the chunks, ``top_k`` times by chance.

    Routes are drawn one by one, so that an expert may be drawn twice for a token; only the counts matter here.
    """
    generator = np.random.default_rng(seed)
    chances = profile.probabilities(experts)
    rows = [len(range(chunk, tokens, chunks)) * top_k for chunk in range(chunks)]
    return np.stack([[generator.multinomial(count, chances) for count in rows] for _ in range(ranks)]).astype(np.int64)
