"""One tile of logits, forward and backward, written in place into scratch that is allocated once for a whole pass.

Letters: c tokens and v vocabulary rows of a tile - H hidden size - V vocabulary. *Wide*: float64 for float64 inputs,
else float32; the dtype of logits, states and accumulators.

A tile of y, with u = logit_scale · (x·Wᵀ + bias) and y = cap·tanh(u / cap), or y = u without a cap, is folded into each
token's *state* (arXiv 2609.14306, Eq. 2-3, with two more columns where they are asked for):

    m' = max(m, max y)        z' = z·exp(m - m') + Σ exp(y - m')        t' = t + y[target], where the tile holds it
    s' = s + Σ y              e' = e·exp(m - m') + Σ y·exp(y - m')

After the last tile  lse = m + log z,  mean(y) = s / V,  ybar = Σ p·y = e / z  and  entropy = lse - ybar.

Everything that a loss may want of the logits is one of lse, t, mean(y) and entropy; with their incoming gradients,
*slopes* from here on, the backward of a tile is

    d u = [p·(g_lse + g_entropy·(ybar - y)) + g_t·1[target] + g_mean / V] · (1 - (y / cap)²)          p = exp(y - lse)

For the loss (1-ε)(lse - t) + ε(lse - mean(y)) + λ·lse² it is the familiar
g·[p(1 + 2λ·lse) - (1-ε)·1[target] - ε/V]·(1 - (y / cap)²).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.runtime.ledger import Arena

M, Z, TARGET = range(3)
"""Columns of a state."""
LSE, G_LSE, G_TARGET = range(3)
"""Columns of the slopes."""
TILES, PRODUCTS = "tiles", "widened tiles and products"
_FAR = 1e30
"""How far below the mean a logit of -inf is taken to lie: its p is 0, and 0 · inf would be no number."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """How logits come from the product, and what is wanted of them.

    Attributes:
        vocab_size: V.
        softcap: y = cap·tanh(u / cap); None: y = u.
        scale: u = scale·(x·Wᵀ + bias).
        mean: mean(y) is wanted.
        entropy: the entropy of p is wanted.
    """

    vocab_size: int
    softcap: float | None = None
    scale: float = 1.0
    mean: bool = False
    entropy: bool = False

    @property
    def state_columns(self) -> int:
        """m, z, t, and s, and e."""
        return 3 + self.mean + self.entropy

    @property
    def slope_columns(self) -> int:
        """lse, g_lse, g_t, and g_mean / V, and g_entropy and ybar."""
        return 3 + self.mean + 2 * self.entropy

    @property
    def entropy_column(self) -> int:
        """Of e in a state, and of g_entropy in the slopes; ybar follows that."""
        return 3 + self.mean


@dataclass(eq=False)
class TokenBlock:
    """Tokens of a tile.

    Attributes:
        x: [c, H].
        targets: [c] int64, global ids; others than those of the tile match nothing.
        table: [c, k] wide: their states in a forward, their slopes in a backward.
        grad: [c, H] wide, to add to; None where it is not wanted, and in a forward.
    """

    x: Tensor
    targets: Tensor
    table: Tensor
    grad: Tensor | None = None


@dataclass(eq=False)
class VocabularyBlock:
    """Vocabulary rows of a tile.

    Attributes:
        start: the id of the first row.
        weight: [v, H].
        bias: [v] or None.
        grad: [v, H] wide, to add to; None where it is not wanted, and in a forward.
        bias_grad: [v] wide, likewise.
    """

    start: int
    weight: Tensor
    bias: Tensor | None = None
    grad: Tensor | None = None
    bias_grad: Tensor | None = None


class TileMath:
    """The arithmetic of a pass over tiles, and its scratch.

    Where inputs are narrower than *wide*, a GPU multiplies them as they are and accumulates wide; elsewhere both are
    widened first, since products would be rounded to the narrow dtype before they are added.

    Args:
        arena: takes the scratch.
        logits: their options.
        tokens, rows: largest c and v.
        hidden: H.
        dtype: of x and the weight.
        backward: whether `backward` will be called, and not `forward`.
    """

    def __init__(
        self, arena: Arena, logits: Logits, tokens: int, rows: int, hidden: int, dtype: torch.dtype, *, backward: bool
    ) -> None:
        self.logits, self.arena = logits, arena
        self.dtype, self.wide = dtype, wide_dtype(dtype)
        self.narrow_products = dtype != self.wide and arena.device.type != "cpu"
        capped = logits.softcap is not None
        self._taken: list[Tensor] = []
        self._y = self._take(TILES, tokens * rows, self.wide)
        self._copy = self._take(TILES, tokens * rows, self.wide) if logits.entropy else None
        self._slope = self._take(TILES, tokens * rows, self.wide) if backward and capped else None
        self._narrow = self._take(TILES, tokens * rows, dtype) if backward and self.narrow_products else None
        self._product = self._widened_x = self._widened_weight = None
        if self.narrow_products and backward:
            self._product = self._take(PRODUCTS, max(tokens, rows) * hidden, self.wide)
        elif dtype != self.wide and not self.narrow_products:
            self._widened_x = self._take(PRODUCTS, tokens * hidden, self.wide)
            self._widened_weight = self._take(PRODUCTS, rows * hidden, self.wide)

    def _take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        self._taken.append(self.arena.take(name, (numel,), dtype))
        return self._taken[-1]

    def close(self) -> None:
        """Give the scratch back."""
        self.arena.release(*self._taken)
        self._taken.clear()

    def forward(self, tokens: TokenBlock, rows: VocabularyBlock) -> None:
        """Fold a tile into the states of its tokens."""
        if self.arena.dry:
            return  # all scratch is there already
        y = self._logits(self._factor(tokens.x, self._widened_x), self._factor(rows.weight, self._widened_weight), rows)
        state = tokens.table
        column, hit = _place_of_targets(tokens.targets, rows)
        state[:, TARGET] += y.gather(1, column).masked_fill_(~hit, 0).squeeze(1)
        if self.logits.mean:
            state[:, TARGET + 1] += y.sum(1)
        top = torch.maximum(state[:, M], y.amax(1))
        finite = top.masked_fill(top == -torch.inf, 0)  # a tile of nothing but -inf: exp(-inf - 0), not of a NaN
        decay = (state[:, M] - finite).exp_()
        y.sub_(finite.unsqueeze(1))
        if self.logits.entropy:
            assert self._copy is not None
            shifted = _like(self._copy, y).copy_(y)
            total = y.exp_().sum(1)
            weighted = shifted.mul_(y).nan_to_num_(nan=0.0).sum(1)  # 0 · -inf
            column_e = state[:, self.logits.entropy_column]
            column_e.mul_(decay).add_(weighted).addcmul_(total, finite)
        else:
            total = y.exp_().sum(1)
        state[:, Z].mul_(decay).add_(total)
        state[:, M] = top

    def backward(self, tokens: TokenBlock, rows: VocabularyBlock) -> None:
        """Compute a tile of logits again and add its share to the gradients of its tokens and rows."""
        if self.arena.dry:
            return
        x, weight = self._factor(tokens.x, self._widened_x), self._factor(rows.weight, self._widened_weight)
        d = self._gradient_of_product(self._logits(x, weight, rows), tokens, rows)
        if rows.bias_grad is not None:
            rows.bias_grad.add_(d.sum(0))
        if self._narrow is not None:
            d = _like(self._narrow, d).copy_(d)
        if tokens.grad is not None:
            self._add_product(tokens.grad, d, weight)
        if rows.grad is not None:
            self._add_product(rows.grad, d.t(), x)

    def _factor(self, tensor: Tensor, widened: Tensor | None) -> Tensor:
        """A factor of the products, in the dtype in which they are computed."""
        return tensor if widened is None else _like(widened, tensor).copy_(tensor)

    def _logits(self, x: Tensor, weight: Tensor, rows: VocabularyBlock) -> Tensor:
        """[c, v] y."""
        y = self._y[: x.size(0) * weight.size(0)].view(x.size(0), weight.size(0))
        if self.narrow_products:
            torch.mm(x, weight.t(), out_dtype=self.wide, out=y)
        else:
            torch.mm(x, weight.t(), out=y)
        if rows.bias is not None:
            y.add_(rows.bias)
        if self.logits.scale != 1.0:
            y.mul_(self.logits.scale)
        if self.logits.softcap is not None:
            y.div_(self.logits.softcap).tanh_().mul_(self.logits.softcap)
        return y

    def _gradient_of_product(self, y: Tensor, tokens: TokenBlock, rows: VocabularyBlock) -> Tensor:
        """y [c, v] becomes the gradient of x·Wᵀ + bias, in place; the slopes hold the factor logit_scale already."""
        table = tokens.table
        slope = None
        if self._slope is not None:
            assert self.logits.softcap is not None
            slope = torch.mul(y, y, out=_like(self._slope, y)).mul_(-(self.logits.softcap**-2)).add_(1)
        if self.logits.entropy:
            assert self._copy is not None
            place = self.logits.entropy_column
            g_entropy, ybar = table[:, place : place + 1], table[:, place + 1 : place + 2]
            factor = torch.sub(ybar, y, out=_like(self._copy, y)).clamp_(max=_FAR)
            factor.mul_(g_entropy).add_(table[:, G_LSE : G_LSE + 1])
            d = y.sub_(table[:, LSE : LSE + 1]).exp_().mul_(factor)
        else:
            d = y.sub_(table[:, LSE : LSE + 1]).exp_().mul_(table[:, G_LSE : G_LSE + 1])
        if self.logits.mean:
            d.add_(table[:, G_TARGET + 1 : G_TARGET + 2])
        column, hit = _place_of_targets(tokens.targets, rows)
        # one column a row: no two additions meet, so the order of a GPU's threads does not matter
        d.scatter_add_(1, column, table[:, G_TARGET : G_TARGET + 1].masked_fill(~hit, 0))
        return d if slope is None else d.mul_(slope)

    def _add_product(self, total: Tensor, a: Tensor, b: Tensor) -> None:
        """total += a @ b."""
        if self._product is None:
            total.addmm_(a, b)
        else:
            total.add_(torch.mm(a, b, out_dtype=self.wide, out=_like(self._product, total)))


def _like(scratch: Tensor, tensor: Tensor) -> Tensor:
    """The beginning of ``scratch`` in the shape of ``tensor``."""
    return scratch[: tensor.numel()].view(tensor.shape)


def _place_of_targets(targets: Tensor, rows: VocabularyBlock) -> tuple[Tensor, Tensor]:
    """[c, 1] int64 and bool: the column of each target in a tile, and whether the tile holds it."""
    column = (targets - rows.start).unsqueeze(1)
    last = rows.weight.size(0) - 1
    return column.clamp(0, last), (column >= 0) & (column <= last)
