"""PipelinedLLEP: expert dispatch whose peak is bounded for any router (arXiv 2609.14306).

The routed region (`lightning_longmoe.dispatch.region`) under autograd. It is two Functions, *anchor* and *run*: the
anchor hands x through, saves x and the weights, and does the whole backward; the run computes the output and saves
nothing. Inside a non-reentrant activation checkpoint a recomputation ends with the last tensor that is saved again: at
the anchor, if nothing after the region in the same checkpoint saves one. Then the forward dispatch is not run again.

Where something does (a norm or dropout after the experts) the run is replayed, with the plan and the expert ids that
the first forward left on the checkpoint's tape (`lightning_longmoe.runtime.replay`): no counts are exchanged. A
checkpoint without a tape (torch's own ``checkpoint`` called without our ``context_fn``) exchanges them again. Plan, ids
and routing weights of the first forward serve the backward in any case; a router that flips by a rounding changes
nothing there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.balance import BalanceLog
from lightning_longmoe.dispatch.exchange import (
    ChunkBound,
    LayerPlan,
    Needs,
    plan_layer,
    say_when_the_ceiling_binds,
    tell_refusal,
)
from lightning_longmoe.dispatch.experts import ExpertStack
from lightning_longmoe.dispatch.plain import _check_routes, require_member
from lightning_longmoe.dispatch.region import ACCUMULATORS, GRADIENTS, PARAMETERS, RegionForward, RegionInputs
from lightning_longmoe.dispatch.region_backward import RegionBackward, RegionGradients
from lightning_longmoe.dispatch.transport import GroupTransport, SoloTransport
from lightning_longmoe.runtime.ledger import Arena, Ledger
from lightning_longmoe.runtime.once import only_once
from lightning_longmoe.runtime.ranges import ranged
from lightning_longmoe.runtime.replay import remember, replaying


def pipelined_llep(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    *,
    group: dist.ProcessGroup | None,
    config: PipelinedLLEP = PipelinedLLEP(),
    layout: ExpertLayout = ExpertLayout(),
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum of each token's experts, which live on the ranks of a group. All its ranks call it together.

    Args:
        x: [N, H] this rank's tokens; N may differ between ranks and be 0.
        expert_ids: [N, K] int64, global ids; an id may repeat in a row.
        expert_weights: [N, K] floating point, any dtype.
        gate_up_proj: [E/Ep, 2F, H] = [gate; up] of this rank's experts, dtype of x; other forms as ``layout`` says.
        down_proj: [E/Ep, H, F].
        group: the expert-parallel ranks; the order of ranks is the order of home experts. None: this one process.
        config: chunks, capacity, depth; the same on all ranks.
        layout: of the weights.
        gate_up_bias: [E/Ep, 2F] or None.
        down_bias: [E/Ep, H] or None.

    Returns:
        [N, H] in the dtype of x. In the backward each rank's expert gradients are the sum over all ranks' tokens.

    Raises:
        ValueError: shapes or dtypes do not fit, an id is out of range, or ``group`` is None among several processes.
    """
    if group is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"pipelined_llep(group=None) is for one process, and {dist.get_world_size()} are running. Give the process"
            " group of the ranks that share the experts (torch.distributed.group.WORLD for all)."
        )
    dispatch = PipelinedDispatch(group, config)
    dispatch._bound = ChunkBound.of(group)
    return dispatch(
        x,
        expert_ids,
        expert_weights,
        gate_up_proj,
        down_proj,
        layout=layout,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
    )


class PipelinedDispatch:
    """`pipelined_llep` as the ``dispatch`` of `lightning_longmoe.models.experts.Experts`: one object a layer.

    Args:
        group: the expert-parallel ranks. None: this process holds all experts.
        config: of the operator.

    Attributes:
        ledger: bytes of the dispatch by name; its peaks cover all calls since ``ledger.reset_peak()``.
        balance: figures of the last forwards, made without waiting for the device.
        counts: how often each of "forward", "replay", "exchange" and "backward" ran.
        log: set to a list to record every transport step.
        fill: set to a number to fill every new buffer with it (a test's NaN).
    """

    def __init__(self, group: dist.ProcessGroup | None = None, config: PipelinedLLEP = PipelinedLLEP()) -> None:
        self.group, self.config = group, config
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        require_member(group)
        if not isinstance(config, PipelinedLLEP):
            raise ValueError(f"config={config!r} is not allowed: give a PipelinedLLEP(...).")
        self.ledger = Ledger(aside=(PARAMETERS, GRADIENTS, ACCUMULATORS))
        self.balance = BalanceLog()
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] | None = None
        self.fill: float | None = None
        self._bound = ChunkBound()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelinedDispatch:
        return PipelinedDispatch(self.group, self.config)  # a process group cannot be copied

    def transport(self) -> GroupTransport | SoloTransport:
        return SoloTransport(self.log) if self.group is None else GroupTransport(self.group, self.log)

    def arena(self, device: torch.device) -> Arena:
        return Arena(device, self.ledger, self.fill)

    @torch.compiler.disable
    def __call__(
        self,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        *,
        layout: ExpertLayout = ExpertLayout(),
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> Tensor:
        """As `pipelined_llep`."""
        weights = ExpertStack(gate_up_proj, down_proj, gate_up_bias, down_bias)
        dtype = _autocast_dtype(x)
        if dtype is not None:
            narrow = ExpertStack(**{name: tensor.to(dtype) for name, tensor in weights.items()})  # type: ignore[arg-type]
            return self._call(x.to(dtype), expert_ids, expert_weights, narrow, layout).to(x.dtype)
        return self._call(x, expert_ids, expert_weights, weights, layout)

    def _call(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertStack, layout: ExpertLayout
    ) -> Tensor:
        settings = self._agreed_settings(x, expert_ids, expert_weights, weights, layout)
        inputs = (x, expert_weights, weights.gate_up_proj, weights.down_proj, weights.gate_up_bias, weights.down_bias)
        wanted = [torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs]
        call = _Call(self, expert_ids.detach(), expert_weights.detach(), layout, Needs(*wanted), settings)
        if not any(wanted):
            return call.forward(x.detach(), _detached(weights))
        return _Run.apply(_Anchor.apply(call, *inputs), call, _detached(weights))


    def _agreed_settings(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, weights: ExpertStack, layout: ExpertLayout
    ) -> str:
        """What must be the same on all ranks, in words. A rank that refuses its arguments tells the others first."""
        try:
            _check_routes(x, expert_ids, expert_weights)
            _check_weights(x, weights, layout)
        except (ValueError, AttributeError, AssertionError):
            if self.size > 1 and not replaying():
                arena = self.arena(weights.gate_up_proj.device)  # type: ignore[union-attr]
                self.transport().run(tell_refusal(arena, self.size))
            raise
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in weights.items())
        return f"{self.config}, {layout}, {x.dtype}, H {x.size(1)}, {sizes}"


@dataclass(eq=False)
class _Call:
    """One call of the layer, from its forward to its backward.

    Attributes:
        expert_ids, expert_weights: of the forward that this object was made in.
        settings: what must be the same on all ranks, in words.
        plan: set by the forward.
    """

    dispatch: PipelinedDispatch
    expert_ids: Tensor
    expert_weights: Tensor
    layout: ExpertLayout
    needs: Needs
    settings: str = ""
    plan: LayerPlan | None = None

    def __post_init__(self) -> None:
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [0 if t.is_inference() else t._version for t in (self.expert_ids, self.expert_weights)]

    @ranged("longmoe/dispatch/forward")
    def forward(self, x: Tensor, weights: ExpertStack) -> Tensor:
        dispatch, replay = self.dispatch, replaying()
        arena, transport = dispatch.arena(x.device), dispatch.transport()
        dispatch.counts["replay" if replay else "forward"] += 1
        try:
            self.plan = remember("dispatch plan", lambda: self._make_plan(arena, weights))
            if not replay:
                dispatch.balance.add(self.plan, weights, x)
                say_when_the_ceiling_binds(self.plan, dispatch.config, x.size(1) * x.element_size())
            inputs = RegionInputs(x, self.expert_weights, weights)
            region = RegionForward(inputs, self.plan, transport.rank, arena, self.layout, dispatch.config.depth)
            return transport.run(region.run())
        finally:
            arena.close()

    @ranged("longmoe/dispatch/plan")
    def _make_plan(self, arena: Arena, weights: ExpertStack) -> LayerPlan:
        dispatch, transport = self.dispatch, self.dispatch.transport()
        dispatch.counts["exchange"] += 1
        assert weights.gate_up_proj is not None
        experts = weights.gate_up_proj.size(0) * dispatch.size
        steps = plan_layer(
            arena,
            transport.rank,
            transport.size,
            self.expert_ids,
            experts,
            self.needs,
            config=dispatch.config,
            bound=dispatch._bound,
            settings=self.settings,
        )
        return transport.run(steps)

    @ranged("longmoe/dispatch/backward")
    def backward(self, x: Tensor, weights: ExpertStack, grad: Tensor) -> RegionGradients:
        if self._versions != self._current_versions():
            raise RuntimeError("expert_ids or expert_weights were changed in place between forward and backward.")
        dispatch, transport = self.dispatch, self.dispatch.transport()
        assert self.plan is not None
        dispatch.counts["backward"] += 1
        arena = dispatch.arena(x.device)
        try:
            inputs = RegionInputs(x, self.expert_weights, weights)
            region = RegionBackward(inputs, self.plan, transport.rank, arena, self.layout, dispatch.config.depth)
            return transport.run(region.run(grad))
        finally:
            arena.close()


class _Anchor(torch.autograd.Function):
    """x, handed through. Saves what the backward needs and is the backward; never communicates in its forward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, expert_weights: Tensor, *weights: Tensor | None) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, *weights)
        ctx.call, ctx.weights_dtype = call, expert_weights.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, *weights = ctx.saved_tensors
        with torch.no_grad():
            grads = ctx.call.backward(x, ExpertStack(*weights), grad)
        stack = grads.weights
        parts = (grads.x, grads.expert_weights, *(getattr(stack, name) for name in _WEIGHT_NAMES))
        wanted = ctx.needs_input_grad[1:]
        own = [part if want else None for part, want in zip(parts, wanted, strict=True)]
        if own[1] is not None:
            own[1] = own[1].to(ctx.weights_dtype)
        return None, *only_once(own, (x, *weights, grad), "pipelined_llep")


_WEIGHT_NAMES = ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias")


class _Run(torch.autograd.Function):
    """The output of the region. Saves nothing; its backward hands the gradient on to the anchor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Call, weights: ExpertStack) -> Tensor:  # type: ignore[override]
        return call.forward(x, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


def _detached(weights: ExpertStack) -> ExpertStack:
    return ExpertStack(**{"gate_up_proj": None, "down_proj": None, **{n: t.detach() for n, t in weights.items()}})


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast would compute in; None where it is off or leaves x alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def _check_weights(x: Tensor, weights: ExpertStack, layout: ExpertLayout) -> None:
    first, second = weights.gate_up_proj, weights.down_proj
    assert first is not None
    assert second is not None
    for name, tensor in weights.items():
        if tensor.dtype != x.dtype:
            raise ValueError(f"{name} ({tensor.dtype}) must have the dtype of x ({x.dtype}).")
    if first.dim() != 3 or second.dim() != 3:
        raise ValueError(f"gate_up_proj {list(first.shape)} and down_proj {list(second.shape)} need three dimensions.")
    hidden, width = (first.size(1), first.size(2)) if layout.transposed else (first.size(2), first.size(1))
    ffn = width // 2 if layout.gated else width
    second_shape = [first.size(0), *((ffn, hidden) if layout.transposed else (hidden, ffn))]
    if list(second.shape) != second_shape or hidden != x.size(1) or (layout.gated and width % 2):
        raise ValueError(
            f"x {list(x.shape)}, gate_up_proj {list(first.shape)} and down_proj {list(second.shape)} do not fit"
            f" {layout}: x [N, H], gate_up_proj [E, 2F, H] (F where ungated), down_proj [E, H, F]; transposed swaps the"
            " last two of each."
        )
    biases = (("gate_up_bias", weights.gate_up_bias, width), ("down_bias", weights.down_bias, hidden))
    for name, bias, size in biases:
        if bias is not None and list(bias.shape) != [first.size(0), size]:
            raise ValueError(f"{name} {list(bias.shape)} must be {[first.size(0), size]}.")
