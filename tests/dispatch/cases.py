"""Routing scenarios for 1 to 4 ranks, and three ways to run one: process group, virtual ranks, dense reference.

Everything about a case is a function of its fields, so that every rank and the reference make the same tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.exchange import Needs
from lightning_longmoe.dispatch.experts import ExpertStack
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.reference import reference_dispatch
from lightning_longmoe.dispatch.region import RegionInputs
from lightning_longmoe.dispatch.virtual import VirtualRanks

PER_TOKEN = ("x", "expert_ids", "expert_weights", "upstream")
WEIGHTS = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")
GPT_OSS = ExpertLayout(transposed=True, interleaved=True, activation="gpt_oss", clamp=1.0)


@dataclass(frozen=True)
class Case:
    """One joined batch: ``tokens`` of each rank, routed as ``routing`` says."""

    tokens: tuple[int, ...]
    routing: str = "uniform"
    top_k: int = 3
    experts: int = 8
    hidden: int = 8
    ffn: int = 4
    layout: ExpertLayout = ExpertLayout()
    bias: bool = False
    integers: bool = False
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def expert_ids(self, g: torch.Generator) -> Tensor:
        """[N, K] of all ranks joined."""
        n, k, e = sum(self.tokens), self.top_k, self.experts
        uniform = torch.randint(0, e, (n, k), generator=g)
        kind, _, rest = self.routing.partition(" ")
        if kind == "one":
            return torch.full((n, k), 5 % e)
        if kind == "hot":  # "hot 0.8 3": a share of the routes to the first few experts
            share, few = rest.split()
            hot = torch.randint(0, int(few), (n, k), generator=g)
            return torch.where(torch.rand(n, k, generator=g) < float(share), hot, uniform)
        if kind == "spread":  # one hot expert on every rank
            step = e // len(self.tokens)
            hot = torch.randint(0, len(self.tokens), (n, k), generator=g) * step
            return torch.where(torch.rand(n, k, generator=g) < 0.8, hot, uniform)
        if kind == "idle":  # the first rank's experts get nothing
            return torch.randint(e // len(self.tokens), e, (n, k), generator=g)
        if kind == "rotating":  # the hot spot moves along the sequence
            return (torch.arange(n).unsqueeze(1) * e // max(n, 1)).expand(n, k).contiguous()
        if kind == "burst":  # a stretch of tokens goes to one expert
            uniform[n // 4 : n // 2] = 2
            return uniform
        if kind == "repeated":
            return uniform[:, :1].expand(-1, k).contiguous()
        assert kind == "uniform", kind
        return uniform

    def make(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        n, width = sum(self.tokens), (2 if self.layout.gated else 1) * self.ffn
        first, second = (width, self.hidden), (self.hidden, self.ffn)
        if self.layout.transposed:
            first, second = first[::-1], second[::-1]

        def normal(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=g, dtype=torch.float64)
            return (values.mul(2).round() if self.integers else values).to(self.dtype)

        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        made = {
            "x": normal(n, self.hidden),
            "expert_ids": self.expert_ids(g),
            "expert_weights": normal(n, self.top_k).to(wide),
            "gate_up_proj": normal(self.experts, *first),
            "down_proj": normal(self.experts, *second),
            "upstream": normal(n, self.hidden),
        }
        if self.bias:
            made |= {"gate_up_bias": normal(self.experts, width), "down_bias": normal(self.experts, self.hidden)}
        return made

    def slice_for(self, rank: int) -> dict[str, Tensor]:
        """This rank's tokens and this rank's experts."""
        start, share = sum(self.tokens[:rank]), self.experts // len(self.tokens)
        return {
            name: value[start : start + self.tokens[rank]]
            if name in PER_TOKEN
            else value[rank * share : (rank + 1) * share]
            for name, value in self.make().items()
        }


SMALL = PipelinedLLEP(tokens_per_chunk=4, min_tokens_per_gemm=1, imbalance_threshold=1.0)
"""Chunks of a few tokens, and every imbalance is acted upon."""

CASES = {
    "uniform": Case((9, 12, 7, 11)),
    "30% to three": Case((20, 20, 20, 20), "hot 0.3 3"),
    "50% to three": Case((20, 20, 20, 20), "hot 0.5 3"),
    "80% to three": Case((20, 20, 20, 20), "hot 0.8 3"),
    "95% to three": Case((20, 20, 20, 20), "hot 0.95 3"),
    "95% to one": Case((20, 20, 20, 20), "hot 0.95 1"),
    "all to one": Case((12, 9, 0, 14), "one"),
    "a rank without tokens": Case((0, 9, 13, 5), "hot 0.8 2"),
    "ranks without tokens": Case((0, 17, 0, 0), "hot 0.5 2"),
    "no tokens at all": Case((0, 0, 0, 0)),
    "a rank that receives nothing": Case((9, 9, 9, 9), "idle"),
    "repeated ids": Case((9, 12), "repeated"),
    "top 1": Case((9, 12), "hot 0.9 1", top_k=1),
    "W0 balanced": Case((16, 16, 16, 16)),
    "W1 hot experts": Case((16, 16, 16, 16), "hot 0.8 2"),
    "W2 hot rank": Case((16, 16, 16, 16), "hot 0.9 2", seed=3),
    "W3 spread hot": Case((16, 16, 16, 16), "spread"),
    "W4 ragged sources": Case((31, 2, 17, 1), "hot 0.6 3"),
    "W5 a rank without tokens": Case((16, 0, 16, 16), "hot 0.8 2"),
    "W6 a hot spot that moves": Case((16, 16, 16, 16), "rotating"),
    "W7 burst": Case((16, 16, 16, 16), "burst"),
    "two ranks": Case((20, 3), "hot 0.8 2"),
    "one rank": Case((23,), "hot 0.8 2"),
    "transposed": Case((9, 12), "hot 0.8 2", layout=ExpertLayout(transposed=True), bias=True),
    "interleaved": Case((9, 12), "hot 0.8 2", layout=ExpertLayout(interleaved=True)),
    "gpt-oss": Case((9, 12), "hot 0.8 2", layout=GPT_OSS, bias=True),
    "clamped": Case((9, 12), "hot 0.8 2", layout=ExpertLayout(clamp=0.7), bias=True),
    "ungated": Case((9, 12), "hot 0.8 2", layout=ExpertLayout(gated=False, activation="gelu"), bias=True),
    "ungated identity": Case((9, 12), layout=ExpertLayout(gated=False, activation="identity")),
    "gelu": Case((9, 12), layout=ExpertLayout(activation="gelu")),
}


def forward_backward(dispatch: Any, tensors: dict[str, Tensor], layout: ExpertLayout) -> dict[str, Tensor]:
    """Output and gradients of a dispatch that runs under autograd."""
    tensors = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    upstream = tensors.pop("upstream").detach()
    y = dispatch(**tensors, layout=layout)
    y.backward(upstream)
    return {"y": y.detach(), **{n: t.grad for n, t in tensors.items() if t.requires_grad}}  # type: ignore[misc]


def reference(case: Case) -> dict[str, Tensor]:
    return forward_backward(reference_dispatch, case.make(), case.layout)


def on_group(case: Case, config: PipelinedLLEP) -> dict[str, Tensor]:
    """This rank's output and gradients over the default process group; run it on as many ranks as the case has."""
    dispatch = PipelinedDispatch(dist.group.WORLD, config)
    return forward_backward(dispatch, case.slice_for(dist.get_rank()), case.layout)


def virtual_ranks(
    case: Case, config: PipelinedLLEP, kind: type[VirtualRanks] = VirtualRanks, **how: Any
) -> VirtualRanks:
    slices = [case.slice_for(rank) for rank in range(len(case.tokens))]
    inputs = [
        RegionInputs(s["x"], s["expert_weights"], ExpertStack(*(s.get(name) for name in WEIGHTS))) for s in slices
    ]
    needs = Needs(True, True, True, True, case.bias, case.bias)
    return kind(inputs, [s["expert_ids"] for s in slices], config, case.layout, needs=needs, **how)


def on_virtual_ranks(
    case: Case, config: PipelinedLLEP, kind: type[VirtualRanks] = VirtualRanks, **how: Any
) -> tuple[VirtualRanks, dict[str, Tensor]]:
    """The ranks after a forward and backward, and their joined results."""
    ranks = virtual_ranks(case, config, kind, **how)
    y = ranks.forward()
    grads = ranks.backward([case.slice_for(rank)["upstream"] for rank in range(len(case.tokens))])
    results = {"y": y, "x": [g.x for g in grads], "expert_weights": [g.expert_weights for g in grads]}
    names = WEIGHTS if case.bias else WEIGHTS[:2]
    results |= {name: [getattr(g.weights, name) for g in grads] for name in names}
    return ranks, {name: torch.cat(parts) for name, parts in results.items()}


def joined(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


def largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all tensors, the largest absolute difference relative to the tensor's largest value."""
    assert ours.keys() == theirs.keys()
    errors = [0.0]
    for name, value in theirs.items():
        assert ours[name].shape == value.shape, name
        assert ours[name].isfinite().all(), name
        if value.numel():
            scale = value.abs().max().clamp(min=1e-300)
            errors.append(float((ours[name].to(value.dtype) - value).abs().max() / scale))
    return max(errors)


def with_integers(case: Case) -> Case:
    """Small whole numbers and no nonlinearity: every sum is exact in float64, in any order."""
    return replace(case, integers=True, layout=ExpertLayout(activation="identity"))
