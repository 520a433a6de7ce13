"""`context_attention` on 1, 2, 3 and 4 ranks is one process's attention, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe import _compat
from lightning_longmoe.context import Wire, context_attention, context_order, reference_attention
from lightning_longmoe.context import tiles as tiles_module
from tests.pool import RemoteError, run_on_ranks

B, S, D = 2, 24, 6
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "grouped": {"kv": 2},
    "one key head": {"kv": 1},
    "window": {"window": 5},
    "window of one": {"window": 1},
    "wide window": {"window": 100, "kv": 2},
    "sinks": {"sinks": True},
    "sinks, window, grouped": {"sinks": True, "window": 7, "kv": 2},
    "documents": {"documents": True},
    "documents, window, sinks": {"documents": True, "window": 6, "sinks": True, "kv": 2},
    "full documents": {"documents": True, "causal": False},
    "values of another size": {"value_size": 10, "kv": 2},
    "scale": {"scale": 0.3},
}


def _make(
    dtype: torch.dtype, heads: int = 4, **feature: Any
) -> tuple[dict[str, Tensor], Tensor | None, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    kv = feature.pop("kv", heads)
    sizes = {"query": (heads, D), "key": (kv, D), "value": (kv, feature.pop("value_size", D))}
    tensors = {n: torch.randn(B, h, S, d, generator=generator).to(dtype) for n, (h, d) in sizes.items()}
    if feature.pop("sinks", False):
        tensors["sinks"] = torch.randn(heads, generator=generator).to(dtype)
    documents = None
    if feature.pop("documents", False):
        borders = torch.tensor([[0, 5, 13], [0, 1, 22]])  # 5 + 8 + 11 and 1 + 21 + 2 tokens
        documents = (torch.arange(S) >= borders.unsqueeze(-1)).sum(1)
    return tensors, documents, feature


def _expected(dtype: torch.dtype, **feature: Any) -> dict[str, Tensor]:
    tensors, documents, options = _make(dtype, **feature)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    out = reference_attention(**leaves, document_ids=documents, **options)
    slopes = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(dtype)
    out.backward(slopes)
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _over_ranks(kind: str, ulysses_size: int | None, dtype: torch.dtype, feature: dict[str, Any]) -> dict[str, Tensor]:
    tensors, documents, options = _make(dtype, **feature)
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = context_order(S, size, kind, ulysses_size).view(size, -1)[rank]  # type: ignore[arg-type]
    leaves = {n: (t if n == "sinks" else t[:, :, mine]).clone().requires_grad_() for n, t in tensors.items()}
    out = context_attention(
        **leaves,
        group=dist.group.WORLD,
        kind=kind,  # type: ignore[arg-type]
        document_ids=None if documents is None else documents[:, mine],
        ulysses_size=ulysses_size,
        **options,
    )
    whole = torch.Size((B, out.size(1), S, out.size(-1)))
    slopes = torch.linspace(-1, 1, whole.numel(), dtype=torch.float64).view(whole).to(dtype)
    out.backward(slopes[:, :, mine])
    if "sinks" in leaves:
        dist.all_reduce(leaves["sinks"].grad)
    return {"positions": mine, "out": out.detach(), **{n: leaf.grad for n, leaf in leaves.items()}}


def _joined(results: list[dict[str, Tensor]], name: str) -> Tensor:
    if name == "sinks":
        return results[0][name]
    order = torch.cat([result["positions"] for result in results])
    return torch.cat([result[name] for result in results], dim=2)[:, :, order.argsort()]


WAYS = [("ring", None), ("ulysses", None), ("hybrid", None), ("hybrid", 1)]


@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("way", WAYS, ids=["ring", "ulysses", "hybrid", "hybrid of one lane"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_output_and_every_gradient_are_those_of_one_process(
    ranks: int, way: tuple[str, int | None], feature: str
) -> None:
    options = FEATURES[feature]
    expected = _expected(torch.float64, **options)
    results = run_on_ranks(ranks, _over_ranks, *way, torch.float64, options)
    for name, value in expected.items():
        actual = _joined(results, name)
        scale = max(float(value.abs().max()), 0.01)  # a window of one has keys without gradient
        assert float((actual - value).abs().max()) <= 1e-12 * scale, name


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_three_ranks_and_six_heads(kind: str) -> None:
    feature = {"heads": 6, "kv": 3, "window": 9}
    expected = _expected(torch.float64, **feature)
    results = run_on_ranks(3, _over_ranks, kind, None, torch.float64, feature)
    for name, value in expected.items():
        torch.testing.assert_close(_joined(results, name), value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ring", "ulysses", "hybrid"])
def test_lower_precision_is_as_close_as_one_process_is(kind: str, dtype: torch.dtype) -> None:
    feature = FEATURES["sinks, window, grouped"]
    exact = _expected(torch.float64, **feature)
    expected = _expected(dtype, **feature)
    results = run_on_ranks(4, _over_ranks, kind, None, dtype, feature)
    for name, value in exact.items():
        error = float((_joined(results, name).double() - value).abs().max())
        plain = float((expected[name].double() - value).abs().max())
        assert error <= 2 * plain + 1e-6, name


@pytest.mark.parametrize("feature", ["causal", "full", "grouped", "values of another size", "sinks", "wide window"])
def test_flash_kernels_and_tiles_agree(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    plain = _compat.flash_attention_forward
    monkeypatch.setattr(_compat, "flash_attention_forward", lambda *args: used.append(1) or plain(*args))
    tensors, documents, options = _make(torch.float64, **FEATURES[feature])
    results = []
    for fits in (True, False):
        monkeypatch.setattr(_compat, "flash_attention_fits", lambda query, fits=fits: fits)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out = context_attention(**leaves, group=None, kind="ring", document_ids=documents, **options)
        out.square().sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves.values())])
        assert bool(used)
    assert len(used) == 1
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_tiles_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _expected(torch.float64, **FEATURES["documents, window, sinks"])
    tensors, documents, options = _make(torch.float64, **FEATURES["documents, window, sinks"])
    for elements in (1, 16 * 16 * 8, 1 << 30):
        monkeypatch.setattr(tiles_module, "TILE_ELEMENTS", elements)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        out = context_attention(**leaves, group=None, kind="ring", document_ids=documents, **options)
        torch.testing.assert_close(out, expected["out"], rtol=1e-12, atol=1e-12)


def _perturbed(kind: str) -> list[Tensor]:
    """Outputs with and without a change of the first document, and a zero gradient to it from the others."""
    tensors, _, _ = _make(torch.float64)
    size, rank = dist.get_world_size(), dist.get_rank()
    documents = (torch.arange(16) >= torch.tensor([[0, 5, 8]] * B).unsqueeze(-1)).sum(1)  # 5 + 3 + 8
    mine = context_order(16, size, kind).view(size, -1)[rank]  # type: ignore[arg-type]
    outs = []
    for change in (0.0, 3.0):
        changed = {n: t[:, :, :16].clone() for n, t in tensors.items()}
        for tensor in changed.values():
            tensor[:, :, 2] += change
        outs.append(
            context_attention(
                **{n: t[:, :, mine] for n, t in changed.items()},
                group=dist.group.WORLD,
                kind=kind,  # type: ignore[arg-type]
                document_ids=documents[:, mine],
            )
        )
    return [mine, *outs]


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_change_in_one_document_does_not_reach_another_that_lies_across_a_border(kind: str) -> None:
    for positions, plain, changed in run_on_ranks(2, _perturbed, kind):
        assert torch.equal(plain[:, :, positions >= 5], changed[:, :, positions >= 5])
        if bool(((positions >= 2) & (positions < 5)).any()):
            assert not torch.equal(plain, changed)


def _traffic(kind: str, window: int | None, length: int) -> tuple[int, int]:
    size = dist.get_world_size()
    wire = Wire(dist.group.WORLD)
    query, key, value = (torch.randn(1, heads, length // size, 8, requires_grad=True) for heads in (4, 2, 2))
    out = context_attention(query, key, value, group=dist.group.WORLD, kind=kind, window=window, wire=wire)  # type: ignore[arg-type]
    forward = wire.sent_bytes
    out.sum().backward()
    return forward, wire.sent_bytes - forward


def _ring_tokens(length: int, size: int, window: int | None) -> int:
    """Tokens that all ranks send together: each chunk once to every rank that holds a query which sees some of it."""
    chunk = length // (2 * size)
    place = {c: min(c, 2 * size - 1 - c) for c in range(2 * size)}
    reach = 2 * size if window is None else (window - 2) // chunk + 1
    pairs = {(k, place[q]) for k in place for q in place if 0 <= q - k <= reach and place[q] != place[k]}
    return len(pairs) * chunk


@pytest.mark.parametrize("window", [None, 4, 9, 17])
def test_the_ring_sends_the_bytes_of_its_formula_and_no_chunk_that_nobody_sees(window: int | None) -> None:
    results = run_on_ranks(4, _traffic, "ring", window, 64)
    tokens = _ring_tokens(64, 4, window)
    assert sum(forward for forward, _ in results) == tokens * 2 * (8 + 8) * 4
    assert sum(backward for _, backward in results) == 2 * tokens * 2 * (8 + 8) * 4


def test_a_windows_traffic_does_not_grow_with_the_sequence() -> None:
    short, long = (sum(f for f, _ in run_on_ranks(4, _traffic, "ring", 8, length)) for length in (64, 512))
    assert long == 8 * short / (512 // 64) * 8 or long <= 8 * short


def test_ulysses_sends_the_bytes_of_its_formula() -> None:
    per_rank = 3 * 16 * (4 // 4 * 16 + 1 * 16) * 4
    for forward, backward in run_on_ranks(4, _traffic, "ulysses", None, 64):
        assert forward == backward == per_rank


@pytest.mark.parametrize("kind", ["ring", "ulysses", "hybrid"])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_position_is_held_once_and_causal_work_is_even(size: int, kind: str) -> None:
    order = context_order(64, size, kind)  # type: ignore[arg-type]
    assert order.sort().values.tolist() == list(range(64))
    if kind == "ring":
        work = order.view(size, -1).sum(1)
        assert work.unique().numel() == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((30, 4, "ring"), "must be a multiple of 8. Nearest: 24 and 32"),
        ((30, 4, "ulysses"), "must be a multiple of 4"),
        ((64, 4, "spiral"), "choose 'ulysses', 'ring' or 'hybrid'"),
        ((64, 4, "hybrid", 3), "it must divide the 4 context ranks"),
        ((64, 4, "ring", 2), "only a hybrid has one"),
    ],
)
def test_lengths_and_sizes_that_do_not_fit_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        context_order(*arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(2, 4, 8, 6)}, "B and tokens must be equal"),
        ({"query": torch.zeros(2, 24, 6)}, r"takes \[B, heads, tokens, size\]"),
        ({"value": torch.zeros(2, 4, 24, 6, dtype=torch.float64)}, "give one floating type"),
        ({"key": torch.zeros(2, 3, 24, 6), "value": torch.zeros(2, 3, 24, 6)}, "cannot share 3 key/value heads"),
        ({"sinks": torch.zeros(3)}, "one logit for each of the 4 heads"),
        ({"document_ids": torch.zeros(2, 12)}, r"document_ids must be this rank's \[2, 24\]"),
        ({"window": 0}, "window=0 is not allowed"),
        ({"kind": "tree"}, "kind='tree'"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_sent(change: dict[str, Any], message: str) -> None:
    arguments = {"query": torch.zeros(2, 4, 24, 6), "key": torch.zeros(2, 4, 24, 6), "value": torch.zeros(2, 4, 24, 6)}
    with pytest.raises(ValueError, match=message):
        context_attention(**{**arguments, "group": None, "kind": "ring", **change})


def _too_many_lanes() -> None:
    tensors = (torch.zeros(1, 2, 8, 4) for _ in range(3))
    context_attention(*tensors, group=dist.group.WORLD, kind="ulysses")


def _no_group() -> None:
    context_attention(*(torch.zeros(1, 4, 8, 4) for _ in range(3)), group=None, kind="ring")


def test_heads_that_cannot_be_dealt_and_a_missing_group_are_refused() -> None:
    with pytest.raises(RemoteError, match="cannot deal out 2 query heads"):
        run_on_ranks(4, _too_many_lanes)
    with pytest.raises(RemoteError, match="means one process, and there are several"):
        run_on_ranks(2, _no_group)


def test_a_second_derivative_is_refused() -> None:
    query, key, value = (torch.randn(1, 2, 8, 4, requires_grad=True) for _ in range(3))
    out = context_attention(query, key, value, group=None, kind="ring")
    (slope,) = torch.autograd.grad(out.sum(), query, create_graph=True)  # a constant comes in
    with pytest.raises(RuntimeError, match="context_attention cannot be differentiated again"):
        slope.sum().backward()
