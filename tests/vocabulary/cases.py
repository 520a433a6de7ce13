"""Problems for the ring on some ranks, and what one process that sees everything says of them.

The expected values come from ``F.cross_entropy`` on the joined data and share no code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.vocabulary import ring_cross_entropy

EVERYTHING: dict[str, Any] = {"logit_softcap": 1.5, "logit_scale": 0.7, "z_loss": 0.1, "label_smoothing": 0.2}
UNEVEN = {1: (9,), 2: (3, 7), 3: (5, 0, 8), 4: (5, 0, 9, 3)}
"""Tokens of each rank, by the number of ranks."""


@dataclass(frozen=True)
class Case:
    """One call on all ranks.

    Attributes:
        tokens: of each rank.
        vocab: V.
        hidden: H.
        mode: of the ring.
        options: of `ring_cross_entropy`.
        bias: whether the projection has one.
        dtype: of everything.
        shard: "short" shards end where the vocabulary does; "padded" ones are filled up with NaN.
        ignored: share of targets that are ignored; on ranks in ``silent`` all of them.
        silent: ranks without a valid target.
        frozen: which of x, weight, bias want no gradient.
        tile: of tokens and of vocabulary rows.
    """

    tokens: tuple[int, ...]
    vocab: int = 37
    hidden: int = 6
    mode: str = "weights"
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    dtype: torch.dtype = torch.float64
    shard: str = "short"
    ignored: float = 0.3
    silent: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    tile: tuple[int, int] = (4, 5)

    def but(self, **changes: Any) -> Case:
        return replace(self, **changes)

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def ignore_index(self) -> int:
        return self.options.get("ignore_index", -100)

    @property
    def config(self) -> RingDTP:
        return RingDTP(mode=self.mode, token_tile=self.tile[0], vocab_tile=self.tile[1])  # type: ignore[arg-type]

    def joined(self) -> dict[str, Tensor]:
        """x, weight, bias, targets of all ranks, and an incoming gradient for each token."""
        generator = torch.Generator().manual_seed(5)
        total = sum(self.tokens)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        targets = torch.randint(0, self.vocab, (total,), generator=generator)
        targets[: self.vocab] = torch.arange(self.vocab)[:total]  # the ids at the borders of shards, too
        targets[torch.rand(total, generator=generator) < self.ignored] = self.ignore_index
        for rank in self.silent:
            targets[self.rows(rank)] = self.ignore_index
        return {
            "x": normal(total, self.hidden),
            "weight": normal(self.vocab, self.hidden),
            "bias": normal(self.vocab),
            "targets": targets,
            "incoming": normal(total),
        }

    def rows(self, rank: int) -> slice:
        """Where a rank's tokens are in the joined ones."""
        start = sum(self.tokens[:rank])
        return slice(start, start + self.tokens[rank])

    def shard_of(self, tensor: Tensor, rank: int) -> Tensor:
        """This rank's rows of the weight or bias."""
        size = -(-self.vocab // self.ranks)
        rows = tensor[rank * size : (rank + 1) * size].clone()
        if self.shard == "padded" and len(rows) < size:
            rows = torch.cat([rows, torch.full((size - len(rows), *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)])
        return rows

    def unpadded(self, shards: list[Tensor | None]) -> Tensor | None:
        """Shards of all ranks as one tensor, without padding rows, which must be zeros."""
        if shards[0] is None:
            return None
        size = -(-self.vocab // self.ranks)
        parts = [shard[: max(0, min(size, self.vocab - rank * size))] for rank, shard in enumerate(shards)]
        rests = [shard[len(part) :] for shard, part in zip(shards, parts, strict=True)]
        assert all(torch.equal(rest, torch.zeros_like(rest)) for rest in rests)
        return torch.cat(parts)


def leaves(case: Case, rank: int) -> dict[str, Tensor]:
    """This rank's x, weight and bias as leaves, its targets and its incoming gradients."""
    joined = case.joined()
    own = {
        "x": joined["x"][case.rows(rank)].clone(),
        "weight": case.shard_of(joined["weight"], rank),
        "bias": case.shard_of(joined["bias"], rank),
        "targets": joined["targets"][case.rows(rank)].clone(),
        "incoming": joined["incoming"][case.rows(rank)].clone(),
    }
    for name in ("x", "weight", "bias"):
        own[name].requires_grad_(name not in case.frozen)
    return own


def run_call(case: Case, **changes: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of this rank, with its graph, and the leaves."""
    group = dist.group.WORLD if dist.is_initialized() and dist.get_world_size() > 1 else None
    own = leaves(case, dist.get_rank() if group is not None else 0)
    keywords = {**case.options, "group": group, "vocab_size": case.vocab, "config": case.config, **changes}
    if case.bias:
        keywords["bias_shard"] = own["bias"]
    return ring_cross_entropy(own["x"], own["weight"], own["targets"], **keywords), own


def run(case: Case) -> dict[str, Any]:
    """Loss and gradients of this rank; the incoming gradient is 3 for a scalar."""
    loss, own = run_call(case)
    if loss.requires_grad:
        loss.backward(own["incoming"] if loss.dim() else torch.full_like(loss, 3.0))
    return {"loss": loss.detach(), **{name: own[name].grad for name in ("x", "weight", "bias")}}


def run_all(cases: list[Case]) -> list[dict[str, Any]]:
    """`run` of several cases, one after the other."""
    return [run(case) for case in cases]


def expected(case: Case) -> dict[str, Any]:
    """Losses [of each rank], and gradients of the joined tensors."""
    joined = {name: t.double() if t.is_floating_point() else t for name, t in case.joined().items()}
    tensors = [joined[name].requires_grad_() for name in ("x", "weight", "bias")]
    x, weight, bias = tensors
    options, targets = case.options, joined["targets"]
    u = options.get("logit_scale", 1.0) * F.linear(x, weight, bias if case.bias else None)
    cap = options.get("logit_softcap")
    y = u if cap is None else cap * torch.tanh(u / cap)
    smoothing, z_loss = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    valid = targets != case.ignore_index
    loss = F.cross_entropy(y, targets, ignore_index=case.ignore_index, label_smoothing=smoothing, reduction="none")
    loss = loss + z_loss * torch.logsumexp(y, 1).square() * valid
    reduction = options.get("reduction", "mean")
    if reduction == "mean":
        total = loss.sum() / max(1, int(valid.sum()))
        losses, objective = [total] * case.ranks, 3 * total
    elif reduction == "sum":
        losses = [loss[case.rows(rank)].sum() for rank in range(case.ranks)]
        objective = 3 * loss.sum()
    else:
        losses = [loss[case.rows(rank)] for rank in range(case.ranks)]
        objective = (loss * joined["incoming"]).sum()
    grads = torch.autograd.grad(objective, tensors, allow_unused=True)
    return {"loss": [part.detach() for part in losses], **dict(zip(("x", "weight", "bias"), grads, strict=True))}


def assert_equal(case: Case, results: list[dict[str, Any]], tolerance: float = 1e-12) -> None:
    """What the ranks computed against one process, relative to the largest value of each tensor."""
    wanted = expected(case)
    for rank, result in enumerate(results):
        assert_close(result["loss"], wanted["loss"][rank], tolerance, f"loss of rank {rank} in {case}")
    gradients = {
        "x": None if "x" in case.frozen else torch.cat([result["x"] for result in results]),
        "weight": case.unpadded([result["weight"] for result in results]),
        "bias": case.unpadded([result["bias"] for result in results]),
    }
    for name, gradient in gradients.items():
        absent = name in case.frozen or (name == "bias" and not case.bias)
        assert (gradient is None) == absent, (name, case)
        if gradient is not None:
            assert_close(gradient, wanted[name], tolerance, f"gradient of {name} in {case}")


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape, what)
    if wanted.numel() == 0:
        return
    scale = max(float(wanted.abs().max()), 1e-6)
    worst = float((actual.double() - wanted).abs().max()) / scale
    assert worst <= tolerance, f"{what}: relative difference {worst:.3g} > {tolerance:.3g}"
