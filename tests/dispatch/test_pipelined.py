"""PipelinedLLEP in float64 against the dense reference on the joined batch: outputs and every gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.pipelined import PipelinedDispatch, pipelined_llep
from lightning_longmoe.dispatch.unchunked import HOME_ONLY, UnchunkedDispatch
from lightning_longmoe.dispatch.virtual import UnchunkedVirtualRanks
from tests.dispatch.cases import (
    CASES,
    SMALL,
    Case,
    forward_backward,
    joined,
    largest_error,
    on_group,
    on_virtual_ranks,
    reference,
    with_integers,
)
from tests.pool import run_on_ranks


@pytest.mark.parametrize("name", CASES)
def test_virtual_ranks_equal_the_dense_reference(name: str) -> None:
    case, expected = CASES[name], reference(CASES[name])
    for depth in (1, 2):
        # data that moves late, into buffers full of NaN: nothing is read before it was waited for, nothing unwritten
        _, ours = on_virtual_ranks(case, replace(SMALL, depth=depth), late=True, fill=float("nan"))
        assert largest_error(ours, expected) <= 1e-12


@pytest.mark.parametrize("name", ["80% to three", "gpt-oss", "ungated", "ranks without tokens", "W4 ragged sources"])
def test_the_unchunked_baseline_equals_the_dense_reference(name: str) -> None:
    for config in (SMALL, replace(SMALL, imbalance_threshold=HOME_ONLY)):
        _, ours = on_virtual_ranks(CASES[name], config, UnchunkedVirtualRanks, late=True, fill=float("nan"))
        assert largest_error(ours, reference(CASES[name])) <= 1e-12


def all_on_group(names: list[str], config: PipelinedLLEP) -> list[dict[str, Tensor]]:
    return [on_group(CASES[name], config) for name in names]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2])
def test_process_groups_equal_the_dense_reference(ranks: int, depth: int) -> None:
    names = [name for name, case in CASES.items() if len(case.tokens) == ranks]
    results = run_on_ranks(ranks, all_on_group, names, replace(SMALL, depth=depth))
    for name, *parts in zip(names, *results, strict=True):
        assert largest_error(joined(parts), reference(CASES[name])) <= 1e-12, name


def unchunked_on_group(case: Case) -> dict[str, Tensor]:
    dispatch = UnchunkedDispatch(dist.group.WORLD, SMALL)
    return forward_backward(dispatch, case.slice_for(dist.get_rank()), case.layout)


def test_the_unchunked_baseline_runs_over_a_process_group() -> None:
    case = CASES["two ranks"]
    assert largest_error(joined(run_on_ranks(2, unchunked_on_group, case)), reference(case)) <= 1e-12


@pytest.mark.parametrize("name", ["80% to three", "W6 a hot spot that moves", "W4 ragged sources", "all to one"])
def test_small_integers_are_bitwise_equal_across_chunks_plans_and_depths(name: str) -> None:
    case = with_integers(CASES[name])
    expected = reference(case)
    for tokens_per_chunk in (3, 8, 1000):
        for threshold, smallest in ((1.0, 1), (1.0, 10), (HOME_ONLY, 1)):
            for depth in (1, 2) if smallest == 1 else (2,):
                config = PipelinedLLEP(
                    tokens_per_chunk=tokens_per_chunk,
                    max_chunks=None,
                    imbalance_threshold=threshold,
                    min_tokens_per_gemm=smallest,
                    depth=depth,
                )
                _, ours = on_virtual_ranks(case, config)
                assert all(torch.equal(ours[key], value) for key, value in expected.items())


def integers_on_group(case: Case) -> list[dict[str, Tensor]]:
    return [on_group(case, replace(SMALL, depth=depth, tokens_per_chunk=size)) for depth, size in ((1, 2), (2, 5))]


def test_small_integers_over_a_process_group_are_bitwise_equal_to_the_reference() -> None:
    case = with_integers(CASES["W1 hot experts"])
    for parts in zip(*run_on_ranks(4, integers_on_group, case), strict=True):
        assert all(torch.equal(value, reference(case)[key]) for key, value in joined(list(parts)).items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_depths_and_runs_are_bitwise_equal(dtype: torch.dtype) -> None:
    case = replace(CASES["W4 ragged sources"], dtype=dtype)
    results = [on_virtual_ranks(case, replace(SMALL, depth=depth))[1] for depth in (1, 2, 2)]
    for other in results[1:]:
        assert all(torch.equal(other[key], value) for key, value in results[0].items())


def test_a_process_group_is_bitwise_equal_to_virtual_ranks() -> None:
    case = CASES["W2 hot rank"]
    _, virtual = on_virtual_ranks(case, SMALL)
    ours = joined(run_on_ranks(4, on_group, case, SMALL))
    assert all(torch.equal(ours[key], value) for key, value in virtual.items())


def test_float32_is_within_1e_5_of_float64() -> None:
    case = replace(CASES["80% to three"], hidden=64, ffn=32)
    _, ours = on_virtual_ranks(replace(case, dtype=torch.float32), SMALL)
    # the float64 run starts from the values that float32 can hold
    exact = {n: t.to(torch.float32).double() if t.is_floating_point() else t for n, t in case.make().items()}
    expected = forward_backward(_reference, exact, case.layout)
    assert largest_error(ours, expected) <= 1e-5


def _reference(*args: Tensor, **kwargs: object) -> Tensor:
    from lightning_longmoe.dispatch.reference import reference_dispatch

    return reference_dispatch(*args, **kwargs)  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [ExpertLayout(), ExpertLayout(transposed=True, interleaved=True)])
def test_bfloat16_with_float32_routing_weights_accumulates_in_float32(layout: ExpertLayout) -> None:
    case = Case((300, 300), "hot 0.8 2", hidden=32, ffn=16, layout=layout, dtype=torch.bfloat16)
    _, ours = on_virtual_ranks(case, PipelinedLLEP(tokens_per_chunk=20, max_chunks=None, min_tokens_per_gemm=1))
    exact = {n: t.double() if t.is_floating_point() else t for n, t in case.make().items()}
    expected = forward_backward(_reference, exact, layout)
    plain = forward_backward(_reference, case.make(), layout)  # one large product, rounded once
    for key, value in expected.items():
        assert ours[key].dtype == (torch.float32 if key == "expert_weights" else torch.bfloat16)
        scale = value.abs().max()
        error, theirs = ((t[key].double() - value).abs().max() / scale for t in (ours, plain))
        assert error <= max(3 * theirs, 2**-8), key


def test_group_none_is_one_process_that_holds_all_experts() -> None:
    case = CASES["one rank"]

    def alone(**tensors: Tensor) -> Tensor:
        return pipelined_llep(**tensors, group=None, config=SMALL)  # type: ignore[arg-type]

    assert largest_error(forward_backward(alone, case.make(), case.layout), reference(case)) <= 1e-12


def group_none_among_several(case: Case) -> str:
    tensors = case.slice_for(dist.get_rank())
    tensors.pop("upstream")
    with pytest.raises(ValueError, match="2 are running") as error:
        pipelined_llep(**tensors, group=None, config=SMALL)  # type: ignore[arg-type]
    return str(error.value)


def test_group_none_is_refused_where_several_processes_run() -> None:
    assert "torch.distributed.group.WORLD" in run_on_ranks(2, group_none_among_several, CASES["two ranks"])[0]


@pytest.mark.parametrize("frozen", ["experts", "x", "router", "gate_up_proj", "everything but x"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen: str) -> None:
    case = CASES["one rank"]
    names = {
        "experts": ("gate_up_proj", "down_proj"),
        "everything but x": ("gate_up_proj", "down_proj", "expert_weights"),
        "router": ("expert_weights",),
    }.get(frozen, (frozen,))
    tensors = {n: t.clone().requires_grad_(t.is_floating_point() and n not in names) for n, t in case.make().items()}
    upstream = tensors.pop("upstream").detach()
    dispatch = PipelinedDispatch(None, SMALL)
    dispatch(**tensors).backward(upstream)
    expected = reference(case)
    for name, tensor in tensors.items():
        if name in names:
            assert tensor.grad is None
        elif tensor.requires_grad:
            assert largest_error({name: tensor.grad}, {name: expected[name]}) <= 1e-12  # type: ignore[dict-item]
    if frozen == "experts":
        assert "weight-gradient accumulators" not in dispatch.ledger.largest
    if frozen == "x":
        assert "row gradient" not in dispatch.ledger.largest


def lora_gradients(case: Case) -> list[Tensor]:
    """Weights that are merged on the fly; gradients of both adapters and of the base."""
    tensors = case.slice_for(dist.get_rank())
    upstream = tensors.pop("upstream")
    base = tensors["gate_up_proj"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    a = torch.randn(base.size(0), base.size(1), 2, dtype=base.dtype, generator=generator).requires_grad_()
    b = torch.randn(base.size(0), 2, base.size(2), dtype=base.dtype, generator=generator).requires_grad_()
    gradients = []
    for dispatch in (PipelinedDispatch(dist.group.WORLD, SMALL), UnchunkedDispatch(dist.group.WORLD, SMALL)):
        dispatch(**{**tensors, "gate_up_proj": base + a @ b}).backward(upstream)
        gradients += [a.grad, b.grad]
        a.grad = b.grad = None
    return gradients


def test_gradients_reach_what_the_weights_were_made_of() -> None:
    for a, b, expected_a, expected_b in run_on_ranks(4, lora_gradients, CASES["80% to three"]):
        assert expected_a.abs().max() > 0
        torch.testing.assert_close(a, expected_a, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(b, expected_b, rtol=1e-12, atol=1e-12)


def test_an_idle_expert_gets_a_gradient_of_zeros() -> None:
    case = CASES["one rank"]
    tensors = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.make().items()}
    upstream = tensors.pop("upstream").detach()
    tensors["expert_ids"] = torch.full_like(tensors["expert_ids"], 3)
    dispatch = PipelinedDispatch(None, SMALL)
    dispatch.fill = float("nan")
    dispatch(**tensors).backward(upstream)
    for name in ("gate_up_proj", "down_proj"):
        used = tensors[name].grad.flatten(1).abs().sum(1)  # type: ignore[union-attr]
        assert used.nonzero().flatten().tolist() == [3]


def test_evaluation_keeps_no_graph_and_gives_the_same_output() -> None:
    case = CASES["one rank"]
    tensors = {n: t for n, t in case.make().items() if n != "upstream"}
    dispatch = PipelinedDispatch(None, SMALL)
    trained = dispatch(**{n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()})
    with torch.no_grad():
        y = dispatch(**{n: t.clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()})
    with torch.inference_mode():
        inferred = dispatch(**tensors)
    assert trained.requires_grad
    assert y.grad_fn is None
    assert torch.equal(y, trained)
    assert torch.equal(inferred, trained)
    assert dispatch.ledger.current_bytes == 0


def test_autocast_computes_in_its_dtype_and_returns_that_of_x() -> None:
    case = replace(CASES["one rank"], dtype=torch.float32, hidden=16)
    tensors = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.make().items()}
    upstream = tensors.pop("upstream").detach()
    with torch.autocast("cpu", torch.bfloat16):
        y = PipelinedDispatch(None, SMALL)(**tensors)
    y.backward(upstream)
    expected = reference(case)
    assert y.dtype == torch.float32
    assert 1e-6 < largest_error({"y": y.detach()}, {"y": expected["y"]}) < 3e-2
    assert tensors["gate_up_proj"].grad.dtype == torch.float32  # type: ignore[union-attr]
    assert largest_error({"g": tensors["gate_up_proj"].grad}, {"g": expected["gate_up_proj"]}) < 3e-2  # type: ignore[dict-item]


def test_a_second_backward_of_a_retained_graph_gives_the_same_gradients() -> None:
    case = CASES["one rank"]
    tensors = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.make().items()}
    upstream = tensors.pop("upstream").detach()
    y = PipelinedDispatch(None, SMALL)(**tensors)
    wanted = [tensors[name] for name in ("x", "expert_weights", "gate_up_proj", "down_proj")]
    first = torch.autograd.grad(y, wanted, upstream, retain_graph=True)
    second = torch.autograd.grad(y, wanted, upstream)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_an_expanded_output_gradient_is_taken() -> None:
    case = CASES["one rank"]
    tensors = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.make().items() if n != "upstream"}
    PipelinedDispatch(None, SMALL)(**tensors).sum().backward()
    dense = {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in tensors.items()}
    _reference(**dense).sum().backward()  # type: ignore[call-arg]
    assert largest_error({"x": tensors["x"].grad}, {"x": dense["x"].grad}) <= 1e-12  # type: ignore[dict-item]


def test_routing_weights_that_change_before_the_backward_are_noticed() -> None:
    case = CASES["one rank"]
    tensors = {n: t.clone() for n, t in case.make().items() if n != "upstream"}
    tensors["x"].requires_grad_()
    y = PipelinedDispatch(None, SMALL)(**tensors)
    tensors["expert_weights"].mul_(2)
    with pytest.raises(RuntimeError, match="in place"):
        y.sum().backward()


def test_a_compiled_block_runs_around_the_region() -> None:
    case = CASES["one rank"]
    tensors = {n: t.clone() for n, t in case.make().items() if n != "upstream"}
    dispatch = PipelinedDispatch(None, SMALL)

    def block(x: Tensor) -> Tensor:
        return dispatch(x.tanh(), **{n: t for n, t in tensors.items() if n != "x"}).sin()

    compiled = torch.compile(block, backend="eager")
    for tokens in (23, 17, 9, 4):
        tensors = {n: t[:tokens] if n in ("x", "expert_ids", "expert_weights") else t for n, t in tensors.items()}
        assert torch.equal(compiled(tensors["x"]), block(tensors["x"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 9)}, "do not fit"),
        ({"expert_weights": torch.zeros(23, 2)}, "shape of expert_ids"),
        ({"down_proj": torch.zeros(8, 4, 4, dtype=torch.float64)}, "do not fit"),
        ({"gate_up_proj": torch.zeros(8, 8, 8)}, "dtype of x"),
        ({"down_bias": torch.zeros(8, 3, dtype=torch.float64)}, "down_bias"),
        ({"expert_ids": torch.full((23, 3), 8)}, "outside 0 to 7"),
        ({"expert_ids": torch.full((23, 3), -1)}, "outside 0 to 7"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    tensors = {n: t for n, t in CASES["one rank"].make().items() if n != "upstream"}
    with pytest.raises(ValueError, match=message):
        PipelinedDispatch(None, SMALL)(**{**tensors, **change})


def wrong_id_on_one_rank(case: Case) -> str:
    tensors = case.slice_for(dist.get_rank())
    tensors.pop("upstream")
    if dist.get_rank() == 1:
        tensors["expert_ids"][0, 0] = 99
    with pytest.raises(ValueError) as error:
        PipelinedDispatch(dist.group.WORLD, SMALL)(**tensors)
    return str(error.value)


def test_a_wrong_id_on_one_rank_raises_on_every_rank() -> None:
    for message in run_on_ranks(2, wrong_id_on_one_rank, CASES["two ranks"]):
        assert "Ranks [1]" in message


def gradients_on_one_rank_only(case: Case) -> str:
    tensors = case.slice_for(dist.get_rank())
    tensors.pop("upstream")
    if dist.get_rank() == 0:
        tensors["x"].requires_grad_()
    with pytest.raises(RuntimeError, match="would hang") as error:
        PipelinedDispatch(dist.group.WORLD, SMALL)(**tensors)
    return str(error.value)


def test_ranks_that_disagree_on_gradients_are_told_instead_of_hanging() -> None:
    for message in run_on_ranks(2, gradients_on_one_rank_only, CASES["two ranks"]):
        assert "Ranks [0]" in message
