"""Peaks of one rank at any size, without allocating: the very passes run on the meta device.

What a dry run of the ring books equals what a run of that shape books, to the byte (the tests compare them). The
standard projection, which everything is compared with, is torch's own: its tensors are booked as autograd makes them.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_longmoe.config import RingDTP
from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.runtime.ledger import Arena, Ledger
from lightning_longmoe.vocabulary.autograd import Saved, run_backward, run_forward
from lightning_longmoe.vocabulary.passes import INPUTS, SHARD, Inputs, Problem, Wanted
from lightning_longmoe.vocabulary.ring import Ring
from lightning_longmoe.vocabulary.spans import Mode, VocabularySplit, choose_mode
from lightning_longmoe.vocabulary.tiles import Logits

STANDARD = "logits and gradients"
_META = torch.device("meta")


@dataclass(frozen=True, kw_only=True)
class ProjectionShape:
    """A projection and loss.

    Attributes:
        tokens: N of every rank.
        hidden: H.
        vocab_size: V.
        ranks: P.
        dtype: of x and the weight; a narrow one is multiplied as a GPU does.
        bias: whether there is one.
        softcap: of the logits.
        label_smoothing: whether there is some.
        entropy: whether it is asked for.
        frozen: whether the weight and bias want no gradient.
    """

    tokens: int
    hidden: int
    vocab_size: int
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False
    softcap: float | None = None
    label_smoothing: bool = False
    entropy: bool = False
    frozen: bool = False


PAPER_SHAPES = {
    f"P {ranks}, N {tokens}": ProjectionShape(tokens=tokens, hidden=7168, vocab_size=200_000, ranks=ranks)
    for ranks, tokens in ((8, 16_384), (8, 32_768), (4, 16_384))
}
"""Tables 2 and 10 of arXiv 2609.14306, in float32."""


@dataclass(frozen=True)
class DryRing:
    """What one forward and backward book and send.

    Attributes:
        mode: what travels.
        ledger: inputs, gradients and everything else, by name.
        forward_bytes, backward_bytes: sent by the rank.
    """

    mode: Mode
    ledger: Ledger
    forward_bytes: int
    backward_bytes: int


def dry_ring(shape: ProjectionShape, config: RingDTP = RingDTP(), rank: int = 0) -> DryRing:
    """Forward and backward of one rank of the ring."""
    split = VocabularySplit(shape.vocab_size, shape.ranks)
    logits = Logits(
        vocab_size=shape.vocab_size, softcap=shape.softcap, mean=shape.label_smoothing, entropy=shape.entropy
    )
    mode = choose_mode(config, shape.tokens, split)
    problem = Problem(split=split, tokens=(shape.tokens,) * shape.ranks, mode=mode, config=config, logits=logits)
    inputs = Inputs(
        _meta(shape.dtype, shape.tokens, shape.hidden),
        _meta(shape.dtype, split.rows(rank), shape.hidden),
        _meta(shape.dtype, split.rows(rank)) if shape.bias else None,
        _meta(torch.int64, shape.tokens),
    )
    ledger, forward, backward = Ledger(), Ring(None, shape.ranks, rank), Ring(None, shape.ranks, rank)
    (lse, _, mean, entropy), ybar = run_forward(problem, inputs, forward, Arena(_META, ledger))
    incoming = (
        *(_meta(wide_dtype(shape.dtype), shape.tokens) for _ in range(2)),
        None if mean is None else torch.empty_like(mean),
        None if entropy is None else torch.empty_like(entropy),
    )
    wanted = Wanted(x=True, weight=not shape.frozen, bias=shape.bias and not shape.frozen)
    run_backward(problem, Saved(inputs, lse, ybar), backward, Arena(_META, ledger), incoming, wanted)
    return DryRing(mode, ledger, forward.traffic.sent_bytes, backward.traffic.sent_bytes)


def dry_standard(shape: ProjectionShape) -> Ledger:
    """``F.cross_entropy(F.linear(x, weight), targets)`` and its backward, all logits at once, whole weight."""
    x = _meta(shape.dtype, shape.tokens, shape.hidden).requires_grad_()
    weight = _meta(shape.dtype, shape.vocab_size, shape.hidden).requires_grad_()
    bias = _meta(shape.dtype, shape.vocab_size).requires_grad_() if shape.bias else None
    targets = _meta(torch.int64, shape.tokens)
    ledger = Ledger()
    arena = Arena(_META, ledger)
    arena.hold(INPUTS, x, targets)
    arena.hold(SHARD, weight, bias)
    with _BookedStorages(ledger, [x, weight, targets]):
        F.cross_entropy(F.linear(x, weight, bias).to(wide_dtype(shape.dtype)), targets).backward()
    return ledger


def _meta(dtype: torch.dtype, *size: int) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


class _BookedStorages(TorchDispatchMode):
    """Books every new storage in a ledger, until it is freed.

    Args:
        ledger: where.
        known: tensors that are booked already.
    """

    def __init__(self, ledger: Ledger, known: list[Tensor]) -> None:
        super().__init__()
        self.ledger = ledger
        self.live = {id(tensor.untyped_storage()) for tensor in known}
        self.known = known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._book(leaf.untyped_storage())
        return result

    def _book(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key not in self.live:
            self.live.add(key)
            self.ledger.add(STANDARD, size)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.live.discard(key)
        self.ledger.remove(STANDARD, size)
