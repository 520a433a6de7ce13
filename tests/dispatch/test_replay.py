"""What a recomputation repeats: with the region last in its checkpoint nothing, elsewhere the run but no exchange."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.dispatch.pipelined import PipelinedDispatch
from lightning_longmoe.dispatch.reference import reference_dispatch
from lightning_longmoe.models.experts import Experts
from lightning_longmoe.models.moe import MoELayer
from lightning_longmoe.runtime.replay import checkpoint_contexts
from tests.dispatch.cases import SMALL
from tests.pool import run_on_ranks

HIDDEN, EXPERTS = 8, 4


class Block(nn.Module):
    """A projection, then an MoE layer whose experts live on the group, then whatever ``after`` is."""

    def __init__(self, after: str, group: Any = None) -> None:
        super().__init__()
        self.after = after
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.moe = MoELayer(
            HIDDEN, 2 * HIDDEN, EXPERTS, 2, shared_ffn_size=8 if after == "shared experts before" else 0
        )
        self.extra = {"a norm": nn.LayerNorm(HIDDEN), "shared experts after": nn.Linear(HIDDEN, HIDDEN)}.get(after)
        self.noise_in_replay = 0.0
        self.forwards = 0
        size = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        for name, parameter in list(self.moe.experts.named_parameters()):
            own = parameter.detach().chunk(size)[rank].clone()
            setattr(self.moe.experts, name, nn.Parameter(own))
        self.dispatch = self.moe.experts.dispatch = PipelinedDispatch(group, SMALL)
        self.register_buffer("flip", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        inner = torch.tanh(self.mix(x))
        if self.noise_in_replay and self.forwards > 1:  # near-tied scores would now fall the other way
            inner = inner + self.noise_in_replay * torch.randn_like(inner)
        out = self.moe(inner)
        if self.after == "dropout":
            return x + torch.dropout(out, 0.5, train=True)
        if self.after == "shared experts after":
            return x + out + torch.relu(self.extra(inner))
        return x + out if self.extra is None else x + self.extra(out)


def step(block: Block, x: Tensor, run: Callable[..., Tensor]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    block.zero_grad()
    block.forwards = 0
    block.dispatch.counts.clear()
    x = x.clone().requires_grad_()
    y = run(block, x)
    (y * torch.arange(y.numel()).view_as(y)).sum().backward()
    grads = {n: p.grad.clone() for n, p in block.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **grads}  # type: ignore[dict-item]


def plain(block: Block, x: Tensor) -> Tensor:
    return block(x)


def recomputed(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=checkpoint_contexts)


def stock(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: Block, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def make(after: str, group: Any = None, tokens: int = 11) -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    block = Block(after, group).double()
    rank = 0 if group is None else dist.get_rank(group)
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    return block, x


def counts_of(after: str, how: Callable[..., Tensor], tokens: tuple[int, ...]) -> dict[str, int]:
    block, x = make(after, dist.group.WORLD, tokens[dist.get_rank()])
    expected = step(block, x, plain)
    ours = step(block, x, how)
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name
    return dict(block.dispatch.counts)


@pytest.mark.parametrize("how", [recomputed, stock])
@pytest.mark.parametrize("after", ["nothing", "shared experts before"])
def test_a_region_that_ends_its_checkpoint_is_never_replayed(after: str, how: Callable[..., Tensor]) -> None:
    for counts in run_on_ranks(2, counts_of, after, how, (11, 6)):
        assert counts == {"forward": 1, "exchange": 1, "backward": 1}


@pytest.mark.parametrize("after", ["a norm", "dropout", "shared experts after"])
def test_a_replay_that_cannot_be_avoided_uses_the_stored_plan(after: str) -> None:
    for counts in run_on_ranks(2, counts_of, after, recomputed, (11, 6)):
        assert counts == {"forward": 1, "exchange": 1, "backward": 1, "replay": 1}


def test_checkpoints_that_leave_no_tape_stay_exact() -> None:
    for counts in run_on_ranks(2, counts_of, "a norm", stock, (11, 0)):
        assert counts == {"forward": 1, "replay": 1, "exchange": 2, "backward": 1}
    for counts in run_on_ranks(2, counts_of, "nothing", reentrant, (11, 6)):
        assert counts["backward"] == 1


def noisy(after: str) -> dict[str, int]:
    """R5: the router's input differs in the recomputation. The first forward's routing must stand."""
    block, x = make(after, dist.group.WORLD)
    block.noise_in_replay = 1.0
    torch.manual_seed(1)
    x = x.requires_grad_()
    y = recomputed(block, x)
    y.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.moe.experts.parameters())
    assert block.forwards == 2
    return dict(block.dispatch.counts)


@pytest.mark.parametrize("after", ["nothing", "a norm"])
def test_a_router_that_flips_in_the_recomputation_changes_no_plan(after: str) -> None:
    for counts in run_on_ranks(2, noisy, after):
        assert counts["exchange"] == counts["forward"] == counts["backward"] == 1


def test_the_gradient_uses_the_ids_of_the_first_forward() -> None:
    ids = [torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.tensor([[3, 2], [1, 0], [0, 2]])]
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, HIDDEN, generator=g, dtype=torch.float64).requires_grad_()
    weights = torch.rand(3, 2, generator=g, dtype=torch.float64).requires_grad_()
    first = torch.randn(EXPERTS, 12, HIDDEN, generator=g, dtype=torch.float64).requires_grad_()
    second = torch.randn(EXPERTS, HIDDEN, 6, generator=g, dtype=torch.float64).requires_grad_()
    dispatch, asked = PipelinedDispatch(None, SMALL), iter(ids)
    leaves = (x, weights, first, second)

    def block(x: Tensor) -> Tensor:
        return dispatch(x * 1, next(asked), weights * 1, first, second)

    ours = torch.autograd.grad(checkpoint(block, x, use_reentrant=False).sum(), leaves)
    expected = torch.autograd.grad(reference_dispatch(x, ids[0], weights, first, second).sum(), leaves)
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_several_layers_in_one_checkpoint_replay_all_but_the_last() -> None:
    blocks = [make("nothing")[0] for _ in range(3)]
    x = make("nothing")[1].requires_grad_()

    def stack(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return x

    checkpoint(stack, x, use_reentrant=False, context_fn=checkpoint_contexts).sum().backward()
    assert [b.dispatch.counts["replay"] for b in blocks] == [1, 1, 0]
    assert [b.dispatch.counts["exchange"] for b in blocks] == [1, 1, 1]


def sharded() -> list[float]:
    """2 expert ranks x 2 FSDP ranks, under a checkpoint: the experts' gradients are the mean over the FSDP ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
    rank, expert_rank = dist.get_rank(), mesh.get_local_rank("expert")
    generator = torch.Generator().manual_seed(0)
    whole = Experts(EXPERTS, HIDDEN, 4).double()
    whole.reset_parameters(generator)
    experts = Experts(EXPERTS // 2, HIDDEN, 4).double()
    with torch.no_grad():
        for own, full in zip(experts.parameters(), whole.parameters(), strict=True):
            own.copy_(full.chunk(2)[expert_rank])
    fully_shard(experts, mesh=mesh["shard"])
    dispatch = PipelinedDispatch(mesh.get_group("expert"), SMALL)
    object.__setattr__(experts, "dispatch", dispatch)
    batches = [_batch(r) for r in range(4)]
    x, ids, weights = batches[rank]
    x = x.clone().requires_grad_()
    checkpoint(
        experts, x * 1, ids, weights, use_reentrant=False, context_fn=checkpoint_contexts
    ).square().sum().backward()
    assert dispatch.counts == {"forward": 1, "exchange": 1, "backward": 1}
    sum(whole(*batch).square().sum() for batch in batches).backward()  # type: ignore[union-attr]
    errors = []
    for own, full in zip(experts.parameters(), whole.parameters(), strict=True):
        expected = full.grad.chunk(2)[expert_rank] / 2  # type: ignore[union-attr]
        errors.append(float((own.grad.full_tensor() - expected).abs().max() / expected.abs().max()))  # type: ignore[union-attr]
    return errors


def _batch(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(10 + rank)
    tokens = (9, 5, 0, 12)[rank]
    x, weights = (torch.randn(tokens, n, generator=g, dtype=torch.float64) for n in (HIDDEN, 2))
    return x, torch.randint(0, 3, (tokens, 2), generator=g), weights


def test_experts_that_fsdp_shards_further_are_gathered_once_and_averaged() -> None:
    for errors in run_on_ranks(4, sharded):
        assert max(errors) <= 1e-12
