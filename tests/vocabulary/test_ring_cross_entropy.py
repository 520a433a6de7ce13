"""Loss and gradients of the ring equal those of one process, whatever the layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.vocabulary import recording, ring_cross_entropy
from tests.pool import RemoteError, run_on_ranks
from tests.vocabulary.cases import EVERYTHING, UNEVEN, Case, assert_close, assert_equal, expected, run_all, run_call

MODES = ("weights", "activations")
RANKS = (1, 2, 3, 4)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "softcap": {"options": {"logit_softcap": 5.0}},
    "scale": {"options": {"logit_scale": 0.5}},
    "z_loss": {"options": {"z_loss": 0.3}},
    "smoothing": {"options": {"label_smoothing": 0.2}},
    "ignore_index": {"options": {"ignore_index": 0}},
    "everything": {"bias": True, "options": EVERYTHING},
}


def check(cases: list[Case], tolerance: float = 1e-12) -> None:
    """Run all of them in one task of the pool; they have the same number of ranks."""
    results = run_on_ranks(cases[0].ranks, run_all, cases)
    for index, case in enumerate(cases):
        assert_equal(case, [result[index] for result in results], tolerance)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_are_exact_with_every_option_and_reduction(ranks: int, mode: str) -> None:
    base = Case(UNEVEN[ranks], mode=mode)
    cases = [base.but(**options) for options in OPTIONS.values()]
    cases += [case.but(options={**case.options, "reduction": r}) for case in cases for r in ("sum", "none")]
    check(cases)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_float32_is_within_1e_5(ranks: int, mode: str) -> None:
    base = Case(UNEVEN[ranks], mode=mode, dtype=torch.float32, hidden=64, vocab=150, tile=(8, 16))
    check([base.but(**options) for options in OPTIONS.values()], tolerance=1e-5)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_any_vocabulary_size_in_short_or_padded_shards(ranks: int, mode: str) -> None:
    """V = 1 over 4 ranks leaves three empty shards; 37 and 38 leave short ones. Padding rows hold NaN."""
    base = Case(UNEVEN[ranks], mode=mode, bias=True, options=EVERYTHING)
    check([base.but(vocab=v, shard=shard) for v in (1, 2, 5, 37, 38) for shard in ("short", "padded")])


@pytest.mark.parametrize("mode", MODES)
def test_any_tiles_and_any_token_counts(mode: str) -> None:
    base = Case((1, 0, 0, 17), mode=mode, bias=True, options=EVERYTHING)
    check([base.but(tile=tile) for tile in ((1, 1), (3, 2), (100, 1), (1, 100), (2048, 8192))])
    check([base.but(tokens=tokens) for tokens in ((0, 0, 0, 0), (0, 0, 0, 1), (40, 40, 40, 40))])


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_without_valid_targets_give_zeros_and_not_nan(ranks: int, mode: str) -> None:
    base = Case((6,) * ranks, mode=mode, bias=True, options=EVERYTHING)
    silent, nowhere = base.but(silent=(0,)), base.but(silent=tuple(range(ranks)))
    check([silent, nowhere])
    for result in run_on_ranks(ranks, run_all, [nowhere]):
        assert all(torch.equal(t, torch.zeros_like(t)) for t in result[0].values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("bias",), ("weight", "bias"), ("x", "weight", "bias")])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(mode: str, frozen: tuple[str, ...]) -> None:
    check([Case(UNEVEN[3], mode=mode, bias=True, options=EVERYTHING, frozen=frozen)])


def idle_rank(mode: str) -> dict[str, Any]:
    """Rank 1 has no tokens and nothing that wants a gradient, yet runs the backward."""
    case = Case((5, 0), mode=mode)
    own = case.but(frozen=("x", "weight")) if dist.get_rank() == 1 else case
    loss, tensors = run_call(own)
    loss.backward(torch.tensor(3.0))
    return {"loss": loss.detach(), "x": tensors["x"].grad, "weight": tensors["weight"].grad}


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_with_nothing_to_differentiate_takes_part_in_the_backward(mode: str) -> None:
    first, second = run_on_ranks(2, idle_rank, mode)
    wanted = expected(Case((5, 0), mode=mode))
    assert second["x"] is None
    assert second["weight"] is None
    assert_close(first["x"], wanted["x"], 1e-12, "gradient of x")
    assert_close(first["weight"], wanted["weight"][:19], 1e-12, "gradient of the weight")


def twice(mode: str) -> list[Tensor]:
    """Gradients of two backwards through one graph, and of a second run."""
    case = Case(UNEVEN[2], mode=mode, options=EVERYTHING, dtype=torch.float32)
    loss, own = run_call(case)
    first = torch.autograd.grad(loss, (own["x"], own["weight"]), retain_graph=True)
    second = torch.autograd.grad(loss, (own["x"], own["weight"]))
    again, own = run_call(case)
    third = torch.autograd.grad(again, (own["x"], own["weight"]))
    return [*first, *second, *third]


@pytest.mark.parametrize("mode", MODES)
def test_runs_and_repeated_backwards_are_bitwise_equal(mode: str) -> None:
    for gradients in run_on_ranks(2, twice, mode):
        for i in (0, 1):
            assert torch.equal(gradients[i], gradients[i + 2])
            assert torch.equal(gradients[i], gradients[i + 4])


def differentiate_again(through_penalty: bool) -> str:
    loss, own = run_call(Case(UNEVEN[2]))
    (grad,) = torch.autograd.grad(loss, own["x"], create_graph=True)
    with pytest.raises(RuntimeError) as error:
        (loss + grad.square().sum() if through_penalty else grad.sum()).backward()
    return str(error.value)


@pytest.mark.parametrize("through_penalty", [False, True])
def test_double_backward_is_refused_with_a_message(through_penalty: bool) -> None:
    for message in run_on_ranks(2, differentiate_again, through_penalty):
        assert "cannot be differentiated again" in message


def modes_taken(tokens: tuple[int, ...], vocab: int) -> list[str]:
    with recording() as record:
        run_call(Case(tokens, vocab=vocab, mode="auto"))
    return record.modes


@pytest.mark.parametrize(
    ("tokens", "vocab", "mode"),
    [((9, 9), 18, "activations"), ((9, 10), 18, "weights"), ((1, 10), 19, "weights"), ((0, 9), 19, "activations")],
)
def test_auto_moves_tokens_where_no_rank_has_more_than_v_over_p(tokens: tuple[int, int], vocab: int, mode: str) -> None:
    assert run_on_ranks(2, modes_taken, tokens, vocab) == [[mode], [mode]]


def half_precision(mode: str) -> dict[str, float]:
    """Largest relative errors of the ring and of plain torch, in bfloat16, against float64."""
    case = Case((24,), vocab=61, hidden=32, mode=mode, dtype=torch.bfloat16, bias=True, options={"z_loss": 1e-3})
    loss, own = run_call(case)
    loss.backward(torch.tensor(3.0))
    exact = expected(case)
    plain = {name: own[name].detach().clone().requires_grad_() for name in ("x", "weight", "bias")}
    y = torch.nn.functional.linear(plain["x"], plain["weight"], plain["bias"]).float()
    valid = own["targets"] != -100
    z = (1e-3 * torch.logsumexp(y, 1).square() * valid).sum() / valid.sum()
    (3 * (torch.nn.functional.cross_entropy(y, own["targets"]) + z)).backward()
    assert own["weight"].grad.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    return {
        f"{kind} {name}": float((t.grad.double() - exact[name]).abs().max() / exact[name].abs().max())
        for kind, tensors in (("ring", own), ("plain", plain))
        for name, t in tensors.items()
        if name in plain
    }


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_is_as_accurate_as_plain_torch(mode: str) -> None:
    errors = half_precision(mode)
    for name in ("x", "weight", "bias"):
        assert errors[f"ring {name}"] <= 2 * errors[f"plain {name}"] + 2**-9


def test_a_wider_shard_gets_a_gradient_that_was_never_rounded() -> None:
    """Under mixed precision a float32 weight outside of FSDP2 meets bfloat16 tokens."""
    case = Case((24,), vocab=61, hidden=32, dtype=torch.bfloat16)
    own = {name: t.detach() for name, t in run_call(case)[1].items()}
    wide = own["weight"].float().requires_grad_()
    ring_cross_entropy(own["x"], wide, own["targets"], group=None, vocab_size=61).backward()
    assert wide.grad.dtype == torch.float32
    exact = expected(case)["weight"] / 3
    assert_close(wide.grad, exact, 1e-5, "gradient of the weight")


def test_masked_vocabulary_entries_and_huge_logits_stay_finite() -> None:
    x = torch.full((3, 4), 100.0, dtype=torch.float64, requires_grad=True)
    weight = torch.eye(4, dtype=torch.float64).mul(50).repeat(2, 1).requires_grad_()
    bias = torch.full((8,), -torch.inf, dtype=torch.float64)
    bias[5] = 0.0
    bias[6] = 1.0
    targets = torch.tensor([5, 6, -100])
    config = RingDTP(token_tile=2, vocab_tile=2)  # whole tiles of -inf
    keywords = {"group": None, "vocab_size": 8, "config": config, "bias_shard": bias}
    loss = ring_cross_entropy(x, weight, targets, **keywords)
    grads = torch.autograd.grad(loss, (x, weight))
    plain = torch.nn.functional.cross_entropy(x @ weight.T + bias, targets)
    torch.testing.assert_close(loss, plain, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, torch.autograd.grad(plain, (x, weight)), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------------
def without_group() -> None:
    run_call(Case((3, 3)), group=None)


def test_no_group_means_one_process_and_nothing_else() -> None:
    with pytest.raises(RemoteError, match="2 processes are running. Give the process group"):
        run_on_ranks(2, without_group)


def refuse_on_rank_1(changes: dict[str, Any], own: dict[str, Any]) -> str:
    """Only rank 1 is called wrongly; the error of this rank."""
    case = Case((3, 3)).but(**changes)
    with pytest.raises(ValueError) as error:
        run_call(case, **(own if dist.get_rank() == 1 else {}))
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "own", "here", "elsewhere"),
    [
        ({}, {"z_loss": -1.0}, "z_loss=-1.0", "ranks \\[1\\] of the group refused"),
        ({}, {"vocab_size": 99}, "does not fit hidden", "ranks \\[1\\] of the group refused"),
        ({}, {"logit_scale": 2.0}, "ranks \\[0\\].*other settings", "ranks \\[1\\].*other settings"),
        ({}, {"ignore_index": 99}, "by rank of the group: {1: ", "by rank of the group: {1: "),
    ],
    ids=["option", "shape", "settings", "targets"],
)
def test_what_one_rank_refuses_all_ranks_refuse(
    changes: dict[str, Any], own: dict[str, Any], here: str, elsewhere: str
) -> None:
    first, second = run_on_ranks(2, refuse_on_rank_1, {"ignored": 1.0, **changes}, own)
    import re

    assert re.search(elsewhere, first)
    assert re.search(here, second)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, "floating-point hidden states \\[N, H\\]"),
        ({"targets": torch.zeros(2)}, "one int64 id for each token"),
        ({"targets": torch.tensor([0, 7])}, "1 targets are outside the vocabulary"),
        ({"weight": torch.zeros(6, 4)}, "owns 7 rows"),
        ({"bias_shard": torch.zeros(6)}, "bias_shard \\[6\\]"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0"),
        ({"logit_scale": float("nan")}, "logit_scale=nan"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0"),
        ({"reduction": "average"}, "reduction='average'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    tensors = {"hidden": torch.zeros(2, 4), "weight": torch.zeros(7, 4), "targets": torch.tensor([0, 6])}
    positional = [changes.pop(name, tensor) for name, tensor in tensors.items()]
    with pytest.raises(ValueError, match=message):
        ring_cross_entropy(*positional, **{"group": None, "vocab_size": 7, **changes})


@pytest.mark.parametrize("settings", [{"mode": "both"}, {"token_tile": 0}, {"vocab_tile": 1.5}, {"token_tile": True}])
def test_the_config_refuses_what_is_not_allowed(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="RingDTP\\("):
        RingDTP(**settings)


def _without_gradients_on_one_rank() -> None:
    hidden = torch.randn(3, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    with torch.set_grad_enabled(dist.get_rank() == 0):
        ring_cross_entropy(hidden, weight, torch.zeros(3, dtype=torch.int64), group=dist.group.WORLD, vocab_size=10)


def test_gradients_on_one_rank_alone_are_refused_before_a_backward_would_hang() -> None:
    with pytest.raises(RemoteError, match="called with other settings") as caught:
        run_on_ranks(2, _without_gradients_on_one_rank, timeout_s=30)
    assert set(caught.value.failures) == {0, 1}
