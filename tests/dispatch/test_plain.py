"""The plain dispatch over 1, 2 and 4 ranks against the dense reference on the joined batch, in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.dispatch.plain import PlainDispatch
from lightning_longmoe.dispatch.reference import reference_dispatch
from lightning_longmoe.runtime.replay import checkpoint_contexts
from tests.pool import run_on_ranks

EXPERTS, HIDDEN, FFN = 8, 6, 5
COLLECTIVES = ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "all_gather", "reduce_scatter_tensor")


@dataclass(frozen=True)
class Case:
    """One joined batch; equal on all ranks, since it is a function of the seed."""

    tokens: tuple[int, ...]
    routing: str = "uniform"
    top_k: int = 3
    layout: ExpertLayout = ExpertLayout()
    bias: bool = False
    seed: int = 0

    def ids(self, tokens: int, generator: torch.Generator) -> Tensor:
        if self.routing == "one expert":
            return torch.full((tokens, self.top_k), 5)
        if self.routing == "one rank idle":  # no token for the experts of the first rank
            return torch.randint(EXPERTS // 2, EXPERTS, (tokens, self.top_k), generator=generator)
        if self.routing == "repeated":
            return torch.randint(0, EXPERTS, (tokens, 1), generator=generator).expand(-1, self.top_k).contiguous()
        if self.routing == "skewed":
            hot = torch.randint(0, 2, (tokens, self.top_k), generator=generator)
            return torch.where(torch.rand(tokens, self.top_k, generator=generator) < 0.8, hot, EXPERTS - 1)
        return torch.randint(0, EXPERTS, (tokens, self.top_k), generator=generator)

    def make(self) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(self.seed)
        n, width = sum(self.tokens), 2 * FFN if self.layout.gated else FFN
        first, second = (width, HIDDEN), (HIDDEN, FFN)
        if self.layout.transposed:
            first, second = first[::-1], second[::-1]

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        made = {
            "x": normal(n, HIDDEN),
            "expert_ids": self.ids(n, g),
            "expert_weights": normal(n, self.top_k),
            "gate_up_proj": normal(EXPERTS, *first),
            "down_proj": normal(EXPERTS, *second),
            "upstream": normal(n, HIDDEN),
        }
        if self.bias:
            made |= {"gate_up_bias": normal(EXPERTS, width), "down_bias": normal(EXPERTS, HIDDEN)}
        return made

    def slice_for(self, rank: int) -> dict[str, Tensor]:
        """This rank's tokens and this rank's experts."""
        start = sum(self.tokens[:rank])
        share = EXPERTS // len(self.tokens)
        per_token = ("x", "expert_ids", "expert_weights", "upstream")
        return {
            name: value[start : start + self.tokens[rank]]
            if name in per_token
            else value[rank * share : (rank + 1) * share]
            for name, value in self.make().items()
        }


def forward_backward(dispatch: Any, tensors: dict[str, Tensor], layout: ExpertLayout) -> dict[str, Tensor]:
    tensors = {n: t.clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    upstream = tensors.pop("upstream").detach()
    y = dispatch(**tensors, layout=layout)
    y.backward(upstream)
    return {"y": y.detach(), **{n: t.grad for n, t in tensors.items() if t.requires_grad}}  # type: ignore[misc]


def run_case(case: Case) -> dict[str, Tensor]:
    dispatch = PlainDispatch(dist.group.WORLD)
    return forward_backward(dispatch, case.slice_for(dist.get_rank()), case.layout)


def joined(results: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([result[name] for result in results]) for name in results[0]}


CASES = {
    "one rank": Case((13,)),
    "two ranks": Case((9, 4)),
    "four ranks, ragged": Case((7, 1, 12, 3)),
    "a rank without tokens": Case((0, 6)),
    "ranks without tokens": Case((0, 9, 0, 0)),
    "no tokens at all": Case((0, 0)),
    "all to one expert": Case((5, 8), "one expert"),
    "all to one expert, four ranks": Case((5, 8, 0, 2), "one expert"),
    "a rank that receives nothing": Case((5, 8), "one rank idle"),
    "repeated ids": Case((5, 8), "repeated"),
    "skewed": Case((20, 3, 4, 9), "skewed"),
    "top 1": Case((6, 7), top_k=1),
    "gpt-oss layout": Case(
        (6, 7),
        layout=ExpertLayout(transposed=True, interleaved=True, activation="gpt_oss", clamp=1.0),
        bias=True,
    ),
    "ungated": Case((6, 7), layout=ExpertLayout(gated=False, activation="gelu"), bias=True),
}


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_equal_the_dense_reference(name: str) -> None:
    case = CASES[name]
    ours = joined(run_on_ranks(len(case.tokens), run_case, case))
    reference = forward_backward(reference_dispatch, case.make(), case.layout)
    assert ours.keys() == reference.keys()
    for key, value in reference.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")


def test_without_a_group_one_process_holds_all_experts() -> None:
    case = Case((13,), "skewed", bias=True)
    ours = forward_backward(PlainDispatch(), case.make(), case.layout)
    reference = forward_backward(reference_dispatch, case.make(), case.layout)
    for key, value in reference.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-12, atol=1e-12)


def integer_result(case: Case) -> list[Tensor]:
    tensors = {k: t.mul(3).round() if t.is_floating_point() else t for k, t in case.slice_for(dist.get_rank()).items()}
    return list(forward_backward(PlainDispatch(dist.group.WORLD), tensors, case.layout).values())


def test_small_integers_are_bitwise_equal_to_the_reference() -> None:
    case = Case((7, 1, 12, 3), "skewed", layout=ExpertLayout(activation="identity"))
    results = run_on_ranks(4, integer_result, case)
    tensors = {k: t.mul(3).round() if t.is_floating_point() else t for k, t in case.make().items()}
    reference = forward_backward(reference_dispatch, tensors, case.layout)
    for index, value in enumerate(reference.values()):
        assert torch.equal(torch.cat([result[index] for result in results]), value)


def run_twice(case: Case) -> bool:
    first, second = run_case(case), run_case(case)
    return all(torch.equal(first[key], second[key]) for key in first)


def test_two_runs_are_bitwise_equal() -> None:
    assert all(run_on_ranks(2, run_twice, Case((20, 17), "skewed")))


class CollectiveLog:
    """Records the name of every collective while it is open."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> CollectiveLog:
        self.kept = {name: getattr(dist, name) for name in COLLECTIVES}
        for name, function in self.kept.items():
            setattr(dist, name, self._recorded(name, function))
        return self

    def _recorded(self, name: str, function: Any) -> Any:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            return function(*args, **kwargs)

        return recorded

    def __exit__(self, *exception: object) -> None:
        for name, function in self.kept.items():
            setattr(dist, name, function)


def log_collectives(cases: list[Case]) -> list[list[str]]:
    logs = []
    for case in cases:
        with CollectiveLog() as log:
            run_case(case)
        logs.append(log.names)
    return logs


def test_collectives_do_not_depend_on_the_routing() -> None:
    cases = [Case((5, 8), routing) for routing in ("uniform", "one expert", "one rank idle")]
    cases += [Case((0, 6)), Case((0, 0)), Case((3, 0), "one expert")]
    for rank_log in run_on_ranks(2, log_collectives, cases):
        assert rank_log == [["all_to_all_single"] * 5] * len(cases)  # counts, dispatch, combine, and two back


def checkpointed(case: Case) -> tuple[list[str], bool]:
    """The backward's collectives, with ids that another router would choose in the recomputation."""
    tensors = {
        n: t.clone().requires_grad_() if t.is_floating_point() else t
        for n, t in case.slice_for(dist.get_rank()).items()
    }
    upstream = tensors.pop("upstream").detach()
    plain = {n: t.detach().clone().requires_grad_() if t.is_floating_point() else t for n, t in tensors.items()}
    dispatch, runs = PlainDispatch(dist.group.WORLD), []

    def block(x: Tensor) -> Tensor:
        runs.append(None)
        ids = tensors["expert_ids"] if len(runs) == 1 else tensors["expert_ids"].flip(0)
        others = {n: t for n, t in tensors.items() if n not in ("x", "expert_ids")}
        return dispatch(x.tanh(), ids, **others).sin()

    y = checkpoint(block, tensors["x"], use_reentrant=False, context_fn=checkpoint_contexts)
    with CollectiveLog() as log:
        y.backward(upstream)
    inputs = {n: t for n, t in plain.items() if n != "x"}
    dispatch(plain["x"].tanh(), **inputs).sin().backward(upstream)
    equal = all(torch.equal(tensors[n].grad, plain[n].grad) for n in tensors if tensors[n].requires_grad)
    return log.names, equal and len(runs) == 2


def test_a_recomputation_reuses_ids_and_counts_and_exchanges_none() -> None:
    for names, equal in run_on_ranks(2, checkpointed, Case((7, 4))):
        assert names == ["all_to_all_single"] * 4  # dispatch and combine again, and two back
        assert equal


def test_bfloat16_is_close_to_float32() -> None:
    case = Case((13,))
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in case.make().items()}
    low = forward_backward(PlainDispatch(), tensors, case.layout)
    high = forward_backward(
        PlainDispatch(), {n: t.float() if t.is_floating_point() else t for n, t in tensors.items()}, case.layout
    )
    for key, value in high.items():
        assert low[key].dtype == torch.bfloat16
        assert (low[key].float() - value).abs().max() <= 3e-2 * value.abs().max()


def test_a_copied_model_keeps_the_group() -> None:
    dispatch = PlainDispatch()
    assert copy.deepcopy({"d": dispatch})["d"] is dispatch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, HIDDEN)}, "do not fit"),
        ({"expert_weights": torch.zeros(2, 1)}, "must have the shape of expert_ids"),
        ({"expert_ids": torch.zeros(2, 2, dtype=torch.int32)}, "must be int64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    tensors = {
        "x": torch.zeros(2, HIDDEN),
        "expert_ids": torch.zeros(2, 2, dtype=torch.int64),
        "expert_weights": torch.zeros(2, 2),
        "gate_up_proj": torch.zeros(EXPERTS, 2 * FFN, HIDDEN),
        "down_proj": torch.zeros(EXPERTS, HIDDEN, FFN),
    }
    with pytest.raises(ValueError, match=message):
        PlainDispatch()(**(tensors | change))
