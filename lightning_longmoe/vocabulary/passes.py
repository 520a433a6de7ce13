"""Forward and backward of one rank: pieces of one axis circulate, and meet the tiles of the other, which stay.

Letters: N tokens of this rank - H hidden size - V vocabulary - P ranks - Vp = ceil(V / P) - b bytes of an element of x
and W, w of a wide one (4, or 8 for float64) - k columns of a state, 3 to 5 - j columns of the slopes, 3 to 6.

================  =======================================  =======================================================
mode              "weights"                                "activations"
================  =======================================  =======================================================
given             weight rows [, bias]                     x, targets [, slopes]
carried           in the backward their gradients          states; in the backward the gradient of x
stay              tokens, their states and gradients       weight rows and their gradients
sent, forward     (P-1)·Vp·H·b                             (P-1)·N·(H·b + 8 + k·w)
sent, backward    (P-1)·Vp·H·(b + w)                       (P-1)·N·(H·(b + w) + 8 + j·w)
================  =======================================  =======================================================

Bytes are those of one rank, for equal N; with a bias H + 1 stands for H where weight rows travel. What is frozen is
neither computed nor sent: w falls away where the gradient of what travels is not wanted.

Above the inputs and their gradients, which are wide until the pass ends, a rank holds a few pieces and tiles: in the
forward 2 pieces, or 3 where states travel with them; in the backward 3 pieces and their 3 accumulators. A piece is at
most ``vocab_tile`` rows or ``token_tile`` tokens, whatever N, V and P are. (The paper's ring moves whole shards or
batches, and holds strips [N, V / P] of logits.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.runtime.ledger import Arena
from lightning_longmoe.runtime.ranges import ranged
from lightning_longmoe.vocabulary.ring import Cargo, Ring, circulate
from lightning_longmoe.vocabulary.spans import Mode, Pieces, VocabularySplit, tiles
from lightning_longmoe.vocabulary.tiles import Logits, M, TileMath, TokenBlock, VocabularyBlock

INPUTS, SHARD, SHARD_COPY = "hidden", "weight shard", "converted weight shard"
STATES, GRADIENTS = "states", "gradients"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What all ranks of the group have agreed on.

    Attributes:
        split: V and P.
        tokens: [P] tokens of each rank.
        mode: what travels.
        config: tile sizes.
        logits: how logits are made, and what is wanted of them.
    """

    split: VocabularySplit
    tokens: tuple[int, ...]
    mode: Mode
    config: RingDTP
    logits: Logits


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one rank brings; nothing here takes part in autograd.

    Attributes:
        x: [N, H] contiguous.
        weight: this rank's rows of the vocabulary, [Vp, H] or without some or all padding rows; contiguous.
        bias: likewise, [Vp]; or None.
        targets: [N] int64.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor


class _Pass:
    """What forward and backward share: the cut of both axes, and the walk over tiles."""

    def __init__(self, problem: Problem, inputs: Inputs, ring: Ring, arena: Arena) -> None:
        self.problem, self.inputs, self.ring, self.arena = problem, inputs, ring, arena
        self.split, self.config = problem.split, problem.config
        self.wide = wide_dtype(inputs.x.dtype)
        self.start, self.rows = self.split.start(ring.rank), self.split.rows(ring.rank)
        self.weights_travel = problem.mode == "weights"

    def _pieces(self, carries: bool) -> Pieces:
        in_turns = carries and self.ring.size > 1
        if self.weights_travel:
            return Pieces.of((self.split.padded_rows,) * self.ring.size, self.config.vocab_tile, even=in_turns)
        return Pieces.of(self.problem.tokens, self.config.token_tile, even=in_turns)

    def _math(self, pieces: Pieces, *, backward: bool) -> TileMath:
        """Scratch for a tile of the longest piece and the longest tile of what stays."""
        staying = self.inputs.x.size(0) if self.weights_travel else self.rows
        tile = self.config.token_tile if self.weights_travel else self.config.vocab_tile
        longest = max((span.length for span in tiles(staying, tile)), default=0)
        tokens, rows = (longest, pieces.longest) if self.weights_travel else (pieces.longest, longest)
        x = self.inputs.x
        return TileMath(self.arena, self.problem.logits, tokens, rows, x.size(1), x.dtype, backward=backward)

    def _real_rows(self, owner: int, piece: int, pieces: Pieces) -> tuple[int, int]:
        """First id of a travelling piece of the vocabulary, and how many of its rows are not padding."""
        span = pieces.span(owner, piece)
        return self.split.start(owner) + span.start, max(0, min(span.stop, self.split.rows(owner)) - span.start)

    def _token_tiles(self, table: Tensor, grad: Tensor | None) -> Iterator[TokenBlock]:
        """This rank's tokens, with their rows of ``table`` and ``grad``."""
        for span in tiles(self.inputs.x.size(0), self.config.token_tile):
            part = slice(*span)
            part_of_grad = None if grad is None else grad[part]
            yield TokenBlock(self.inputs.x[part], self.inputs.targets[part], table[part], part_of_grad)

    def _vocabulary_tiles(self, grad: Tensor | None, bias_grad: Tensor | None) -> Iterator[VocabularyBlock]:
        """This rank's rows of the vocabulary without padding, with their rows of the gradients."""
        weight, bias = self.inputs.weight, self.inputs.bias
        for span in tiles(self.rows, self.config.vocab_tile):
            part = slice(*span)
            yield VocabularyBlock(
                self.start + span.start,
                weight[part],
                None if bias is None else bias[part],
                None if grad is None else grad[part],
                None if bias_grad is None else bias_grad[part],
            )

    def _weights(self) -> tuple[Tensor, ...]:
        return (self.inputs.weight,) if self.inputs.bias is None else (self.inputs.weight, self.inputs.bias)


class ForwardPass(_Pass):
    """States of this rank's tokens over the whole vocabulary."""

    @ranged("longmoe/vocabulary/forward")
    def run(self) -> Tensor:
        """Returns: [N, k] wide, booked as states."""
        shape = (self.inputs.x.size(0), self.problem.logits.state_columns)
        states = self.arena.take(STATES, shape, self.wide)
        _start_states((states,))
        if self.weights_travel:
            self._circulate_weights(states)
        else:
            self._circulate_tokens(states)
        return states

    def _circulate_weights(self, states: Tensor) -> None:
        pieces = self._pieces(carries=False)
        math = self._math(pieces, backward=False)
        for visit in circulate(self.ring, Cargo(pieces, self._weights()), self.arena):
            start, rows = self._real_rows(visit.owner, visit.piece, pieces)
            if rows == 0:
                continue
            block = VocabularyBlock(start, *(t[:rows] for t in visit.given))
            for tokens in self._token_tiles(states, None):
                math.forward(tokens, block)
        math.close()

    def _circulate_tokens(self, states: Tensor) -> None:
        pieces = self._pieces(carries=True)
        math = self._math(pieces, backward=False)
        cargo = Cargo(pieces, (self.inputs.x, self.inputs.targets), (states,), _start_states)
        for visit in circulate(self.ring, cargo, self.arena):
            if visit.given[0].size(0) == 0:
                continue
            for rows in self._vocabulary_tiles(None, None):
                math.forward(TokenBlock(*visit.given, *visit.carried), rows)
        math.close()


def _start_states(states: tuple[Tensor, ...]) -> None:
    """No logit seen: m = -inf, sums 0."""
    states[0].zero_()
    states[0][:, M] = -torch.inf


@dataclass(frozen=True)
class Wanted:
    """Gradients that some rank of the group wants; all of them compute and send alike."""

    x: bool
    weight: bool
    bias: bool


class BackwardPass(_Pass):
    """Gradients from the slopes of every token; see `lightning_longmoe.vocabulary.tiles` for what slopes are."""

    @ranged("longmoe/vocabulary/backward")
    def run(self, slopes: Tensor, wanted: Wanted) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute what is wanted.

        Args:
            slopes: [N, j] wide, contiguous.
            wanted: the same on every rank.

        Returns:
            wide gradients of x [N, H], of the weight [Vp, H] and of the bias [Vp], with zeros in padding rows; booked
            as gradients. The last two are sums over the tokens of all ranks.
        """
        hidden, padded = self.inputs.x.size(1), self.split.padded_rows
        grad_x = self._gradient((self.inputs.x.size(0), hidden)) if wanted.x else None
        grad_weight = self._gradient((padded, hidden)) if wanted.weight else None
        grad_bias = self._gradient((padded,)) if wanted.bias else None
        circulate_side = self._circulate_weights if self.weights_travel else self._circulate_tokens
        circulate_side(slopes, grad_x, grad_weight, grad_bias)
        return grad_x, grad_weight, grad_bias

    def _gradient(self, shape: tuple[int, ...]) -> Tensor:
        return self.arena.zeros(GRADIENTS, shape, self.wide)

    def _circulate_weights(
        self, slopes: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        carried = tuple(t for t in (grad_weight, grad_bias) if t is not None)
        pieces = self._pieces(carries=bool(carried))
        math = self._math(pieces, backward=True)
        for visit in circulate(self.ring, Cargo(pieces, self._weights(), carried), self.arena):
            start, rows = self._real_rows(visit.owner, visit.piece, pieces)
            if rows == 0:
                continue
            grads = iter([t[:rows] for t in visit.carried])
            block = VocabularyBlock(start, *(t[:rows] for t in visit.given))
            block.grad = None if grad_weight is None else next(grads)
            block.bias_grad = None if grad_bias is None else next(grads)
            for tokens in self._token_tiles(slopes, grad_x):
                math.backward(tokens, block)
        math.close()

    def _circulate_tokens(
        self, slopes: Tensor, grad_x: Tensor | None, grad_weight: Tensor | None, grad_bias: Tensor | None
    ) -> None:
        carried = () if grad_x is None else (grad_x,)
        pieces = self._pieces(carries=bool(carried))
        math = self._math(pieces, backward=True)
        cargo = Cargo(pieces, (self.inputs.x, self.inputs.targets, slopes), carried)
        for visit in circulate(self.ring, cargo, self.arena):
            if visit.given[0].size(0) == 0:
                continue
            for rows in self._vocabulary_tiles(grad_weight, grad_bias):
                math.backward(TokenBlock(*visit.given, *visit.carried), rows)
        math.close()
