"""Ledger peaks of one rank at any shape, without allocating: the very regions run on the meta device.

Routing is given as row counts; the other ranks do not exist. What a dry run books equals what a run of that routing
books, to the byte (the tests compare them).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.exchange import ChunkBound, Needs, plan_layer
from lightning_longmoe.dispatch.experts import ExpertStack, ProductPaths
from lightning_longmoe.dispatch.plan import Ints, count_chunks
from lightning_longmoe.dispatch.profiles import Profile, draw_counts
from lightning_longmoe.dispatch.region import ACCUMULATORS, GRADIENTS, PARAMETERS, RegionForward, RegionInputs
from lightning_longmoe.dispatch.region_backward import RegionBackward
from lightning_longmoe.dispatch.transport import DryTransport
from lightning_longmoe.dispatch.unchunked import UnchunkedBackward, UnchunkedForward, _close, unchunked
from lightning_longmoe.runtime.ledger import Arena, Ledger

GPU_PATHS = ProductPaths(grouped=True, upcast=False)
"""How a bf16 GPU multiplies; the default of a dry run."""


@dataclass(frozen=True, kw_only=True)
class DispatchShape:
    """One layer on one expert group.

    Attributes:
        tokens: N of each rank.
        top_k: K.
        hidden: H.
        ffn: F.
        experts: E of the group.
        ranks: Ep.
        dtype: of x and the weights.
        layout: of the weights.
        bias: whether the experts have biases.
    """

    tokens: int
    top_k: int
    hidden: int
    ffn: int
    experts: int
    ranks: int
    dtype: torch.dtype = torch.bfloat16
    layout: ExpertLayout = ExpertLayout()
    bias: bool = False

    def meta_inputs(self) -> tuple[RegionInputs, Tensor]:
        """One rank's inputs and expert ids on the meta device."""
        width, share = (2 if self.layout.gated else 1) * self.ffn, self.experts // self.ranks
        first, second = (width, self.hidden), (self.hidden, self.ffn)
        if self.layout.transposed:
            first, second = first[::-1], second[::-1]

        def make(*size: int, dtype: torch.dtype = self.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device="meta")

        biases = (make(share, width), make(share, self.hidden)) if self.bias else (None, None)
        weights = ExpertStack(make(share, *first), make(share, *second), *biases)
        routes = (self.tokens, self.top_k)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        inputs = RegionInputs(make(self.tokens, self.hidden), make(*routes, dtype=wide), weights)
        return inputs, make(*routes, dtype=torch.int64)

    def draw(self, profile: Profile, config: PipelinedLLEP, seed: int = 0) -> Ints:
        """[Ep, n, E] row counts of a routing profile."""
        return draw_counts(
            profile,
            ranks=self.ranks,
            chunks=count_chunks(self.tokens, config),
            experts=self.experts,
            tokens=self.tokens,
            top_k=self.top_k,
            seed=seed,
        )


PAPER_SHAPES = {
    "65K top-8": DispatchShape(tokens=65536, top_k=8, hidden=7168, ffn=2048, experts=384, ranks=8),
    "32K top-4": DispatchShape(tokens=32768, top_k=4, hidden=4096, ffn=2880, experts=128, ranks=8),
}
"""The two shapes of the paper's Tables 6 and 9. It does not state F of the second: 2880 is gpt-oss's."""


def dry_pipelined(
    shape: DispatchShape, counts: Ints, rank: int, config: PipelinedLLEP, paths: ProductPaths = GPU_PATHS
) -> Ledger:
    """Forward and backward of PipelinedLLEP on one rank.

    Args:
        counts: [Ep, n, E] rows of each rank; n as `count_chunks` gives it.
        paths: which code multiplies.

    Returns:
        the ledger, with its peaks over both passes.
    """
    inputs, plan_arguments, transport, ledger = _prepare(shape, counts, rank)
    arena = _arena(ledger)
    plan = transport.run(plan_layer(arena, *plan_arguments, config=config, bound=ChunkBound()))
    forward = RegionForward(inputs, plan, rank, arena, shape.layout, config.depth, paths)
    y = transport.run(forward.run())
    arena.close()
    backward = RegionBackward(inputs, plan, rank, arena, shape.layout, config.depth, paths)
    transport.run(backward.run(torch.empty_like(y)))
    arena.close()
    return ledger


def dry_unchunked(
    shape: DispatchShape, counts: Ints, rank: int, config: PipelinedLLEP, paths: ProductPaths = GPU_PATHS
) -> Ledger:
    """Forward and backward of unchunked LLEP with saved activations; arguments as `dry_pipelined`."""
    whole = unchunked(config)
    inputs, plan_arguments, transport, ledger = _prepare(shape, counts.sum(1, keepdims=True), rank)
    arena = _arena(ledger)
    plan = transport.run(plan_layer(arena, *plan_arguments, config=whole, bound=ChunkBound()))
    y, saved = transport.run(UnchunkedForward(inputs, plan, rank, arena, shape.layout, 1, paths).run())
    _close(arena, saved, shape.layout)
    backward = UnchunkedBackward(inputs, plan, rank, arena, shape.layout, 1, paths)
    transport.run(backward.run(torch.empty_like(y), saved))
    arena.close()
    return ledger


def _prepare(
    shape: DispatchShape, counts: Ints, rank: int
) -> tuple[RegionInputs, tuple[int, int, Tensor, int, Needs], DryTransport, Ledger]:
    inputs, ids = shape.meta_inputs()
    needs = Needs(True, True, True, True, shape.bias, shape.bias)
    tokens = counts.sum((1, 2)) // shape.top_k
    header = np.stack([tokens, np.full_like(tokens, shape.top_k), np.full_like(tokens, shape.experts)], axis=1)
    header = np.concatenate([header, np.full((shape.ranks, 1), needs.as_bits())], axis=1)

    def read(message: Tensor) -> NDArray[np.integer]:
        bound = (message.size(1) - header.shape[1]) // shape.experts
        padded = np.zeros((shape.ranks, bound, shape.experts), dtype=np.int64)
        padded[:, : counts.shape[1]] = counts
        return np.concatenate([header, padded.reshape(shape.ranks, -1)], axis=1)

    arguments = (rank, shape.ranks, ids, shape.experts, needs)
    return inputs, arguments, DryTransport(rank, shape.ranks, read), Ledger(aside=(PARAMETERS, GRADIENTS, ACCUMULATORS))


def _arena(ledger: Ledger) -> Arena:
    return Arena(torch.device("meta"), ledger)
