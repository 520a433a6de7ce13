"""Least-loaded expert parallelism without chunks and with saved activations: what PipelinedLLEP is measured against.

The same plan, transport, products and ledger, in one chunk. The order of operations, and what is alive when, follow the
public implementation of LLEP (arXiv 2601.17111) under plain autograd: the routing weight multiplies the expert's output
on the expert's rank, so that output is kept; so are the sorted rows, gate and up, what autograd keeps of the
activation, the activation, and the guests' weights. With an ``imbalance_threshold`` that no routing reaches it is plain
expert parallelism with saved activations.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_longmoe.config import ExpertLayout, PipelinedLLEP
from lightning_longmoe.dispatch.exchange import ChunkBound, Needs, plan_layer
from lightning_longmoe.dispatch.experts import ExpertStack
from lightning_longmoe.dispatch.region import (
    ACCUMULATORS,
    GRADIENTS,
    PARAMETERS,
    Chunk,
    Flight,
    Region,
    RegionInputs,
)
from lightning_longmoe.dispatch.region_backward import RegionGradients
from lightning_longmoe.dispatch.transport import AllToAll, GroupTransport, PointToPoint, SoloTransport, Steps, Wait
from lightning_longmoe.kernels.expert_mlp import expert_activation
from lightning_longmoe.runtime.ledger import Arena, Ledger

SAVED = "saved for the backward"
HOME_ONLY = sys.float_info.max
"""An imbalance threshold that no routing reaches."""


def unchunked(config: PipelinedLLEP) -> PipelinedLLEP:
    """``config`` with all tokens in one chunk."""
    return dataclasses.replace(config, max_chunks=1, tokens_per_chunk=2**31 - 1, depth=1)


@dataclass(eq=False)
class SavedActivations:
    """What the forward keeps on one rank; gone when the backward is done with it.

    Attributes:
        chunk: the orders of the rows.
        guests: copies of the guests' weights.
        rows: [R, H] sorted by hosted expert.
        leaves, acts: [., G] and [., F] of each stack, with autograd's graph between them.
        outputs: [R, H] the experts' outputs in the order of arrival.
        weights: [R] wide, routing weights in the order of arrival.
    """

    chunk: Chunk
    guests: ExpertStack | None
    rows: Tensor | None
    leaves: list[Tensor]
    acts: list[Tensor]
    outputs: Tensor | None
    weights: Tensor


class _UnchunkedRegion(Region):
    def rows_in_memory(self, name: str, rows: int) -> Tensor:
        return self.arena.take(name, (rows, self.hidden), self.dtype)

    def permuted(self, name: str, rows: Tensor, order: Tensor) -> Tensor:
        out = self.rows_in_memory(name, order.size(0))
        torch.index_select(rows, 0, order, out=out)
        return out

    def unsorted(self, name: str, chunk: Chunk, parts: list[Tensor]) -> Tensor:
        """The stacks' rows in the order of arrival."""
        out = self.rows_in_memory(name, chunk.unpack.size(0))
        for places, part in zip(chunk.unpack.split([g.rows for g in chunk.groups]), parts, strict=True):
            out.index_copy_(0, places, part)
        return out

    def exchange(self, send: Tensor, receive: Tensor, sent: list[int], received: list[int]) -> Steps[Tensor]:
        handle = yield AllToAll(receive, send, received, sent)
        return (yield from self.arrive(Flight(handle, send, receive)))

    def to_hosts(self, chunk: Chunk, send: Tensor) -> Steps[Tensor]:
        """Rows [C, ...] to the hosts; frees them. -> [R, ...]"""
        receive = self.arena.take("rows received", (chunk.unpack.size(0), *send.shape[1:]), send.dtype)
        return (yield from self.exchange(send, receive, chunk.sent, chunk.received))

    def to_homes(self, chunk: Chunk, send: Tensor) -> Steps[Tensor]:
        """Rows [R, ...] back to their tokens; frees them. -> [C, ...]"""
        receive = self.arena.take("rows received", (chunk.tokens.size(0), *send.shape[1:]), send.dtype)
        return (yield from self.exchange(send, receive, chunk.received, chunk.sent))


class UnchunkedForward(_UnchunkedRegion):
    """x to y, and what the backward needs."""

    def run(self) -> Steps[tuple[Tensor, SavedActivations]]:
        self.open()
        arena, inputs, math = self.arena, self.inputs, self.math
        y = arena.take("y", tuple(inputs.x.shape), self.dtype)
        guests, handle = yield from self.fetch_guests()
        yield Wait(handle)
        chunk = self.open_chunk(0)
        received = yield from self.to_hosts(chunk, self.permuted("rows to send", inputs.x, chunk.tokens))
        weights = inputs.expert_weights.reshape(-1).index_select(0, chunk.routes).to(self.wide)
        weights = yield from self.to_hosts(chunk, arena.adopt("routing weights", weights))
        rows = self.permuted(SAVED, received, chunk.unpack)
        arena.release(received)
        del received
        leaves = self.gate_up(rows, chunk, self._stacks(guests))
        acts = [arena.adopt("activation", self._activation(leaf)) for leaf in leaves]
        triples = zip(acts, self._stacks(guests), chunk.groups, strict=True)
        parts = [math.down(act.detach(), stack, group) for act, stack, group in triples]
        outputs = self.unsorted(SAVED, chunk, parts)
        arena.release(*parts)
        del parts
        weighted = self.rows_in_memory("weighted rows", outputs.size(0))
        torch.mul(outputs, weights.to(self.dtype).unsqueeze(1), out=weighted)
        back = self.arena.take("rows received", (chunk.tokens.size(0), self.hidden), self.dtype)
        yield Wait((yield AllToAll(back, weighted, chunk.sent, chunk.received)))
        restored = self.permuted("rows of tokens", back, chunk.place)
        torch.sum(restored.view(-1, self.top_k, self.hidden), 1, out=y)
        return y, SavedActivations(chunk, guests, rows, leaves, acts, outputs, weights)

    def _stacks(self, guests: ExpertStack | None) -> list[ExpertStack]:
        return [self.inputs.weights] if guests is None else [self.inputs.weights, guests]

    def _activation(self, leaf: Tensor) -> Tensor:
        """The activation with autograd's graph, whose saved tensors are booked."""
        self.arena.ledger.add(SAVED, saved_by_autograd(leaf, self.layout))
        with torch.enable_grad():
            return expert_activation(leaf.requires_grad_(), self.layout)


def saved_by_autograd(gate_up: Tensor, layout: ExpertLayout) -> int:
    """Bytes that autograd keeps of `expert_activation` besides its input and result."""
    half = gate_up.nbytes // (2 if layout.gated else 1)
    clamps = 0 if layout.clamp is None else (2 if layout.gated else 1)
    if layout.activation == "gpt_oss":
        return half * (3 + clamps)  # sigmoid, gate · sigmoid, up + 1
    return half * (clamps + (1 if layout.gated and layout.activation != "identity" else 0))


class UnchunkedBackward(_UnchunkedRegion):
    """The gradient of y to all others, from what the forward kept."""

    def run(self, grad: Tensor, saved: SavedActivations) -> Steps[RegionGradients]:
        """``grad`` [N, H]. Empties ``saved``."""
        self._hold(saved)
        self.open()
        self.arena.hold("y gradient", grad)
        chunk, needs = saved.chunk, self.plan.needs
        arriving: list[Tensor] = []  # a box: whoever takes the tensor out can free it
        grad_routes = yield from self._weighting_backward(grad, saved, arriving)
        self.grads = self._empty_gradients()
        parts = self._experts_backward(saved, arriving)
        grad_x = None
        if needs.x:
            send = self.unsorted("rows to send", chunk, parts)
            self.arena.release(*parts)
            parts.clear()
            back = yield from self.to_homes(chunk, send)
            del send
            restored = self.permuted("rows of tokens", back, chunk.place)
            self.arena.release(back)
            grad_x = self.arena.take("x gradient", tuple(self.inputs.x.shape), self.dtype)
            torch.sum(restored.view(-1, self.top_k, self.hidden), 1, out=grad_x)
            self.arena.release(restored)
            del back, restored
        yield from self._bring_guest_gradients_home()
        return RegionGradients(grad_x, grad_routes if needs.expert_weights else None, self.grads[0])

    def _hold(self, saved: SavedActivations) -> None:
        guests = [] if saved.guests is None else saved.guests.tensors()
        self.arena.hold(SAVED, saved.rows, saved.outputs, *saved.leaves, *saved.acts, *guests)
        self.arena.hold("routing weights", saved.weights)
        self.arena.hold("routes", saved.chunk.routes, saved.chunk.tokens, saved.chunk.place, saved.chunk.unpack)
        self.graph_bytes = sum(saved_by_autograd(leaf, self.layout) for leaf in saved.leaves)
        self.arena.ledger.add(SAVED, self.graph_bytes)

    def _weighting_backward(self, grad: Tensor, saved: SavedActivations, arriving: list[Tensor]) -> Steps[Tensor]:
        """Through the sum over K and the routing weights: [N, K] wide, and into ``arriving`` [R, H]."""
        arena, chunk = self.arena, saved.chunk
        expanded = self.rows_in_memory("rows of tokens", chunk.tokens.size(0))
        expanded.view(-1, self.top_k, self.hidden).copy_(grad.unsqueeze(1).expand(-1, self.top_k, -1))
        send = self.permuted("rows to send", expanded, chunk.routes)
        arena.release(expanded)
        del expanded
        received = yield from self.to_hosts(chunk, send)
        del send
        outputs, saved.outputs = saved.outputs, None
        assert outputs is not None
        rows = self.rows_in_memory("row gradient", received.size(0))
        torch.mul(received, saved.weights.to(self.dtype).unsqueeze(1), out=rows)
        product = self.rows_in_memory("weighted rows", received.size(0))
        torch.mul(received, outputs, out=product)
        grad_weights = arena.adopt("routing weights", product.sum(1, dtype=self.wide))
        arena.release(product, received, outputs)
        del product, received, outputs
        arriving.append(rows)
        del rows
        back = yield from self.to_homes(chunk, grad_weights)
        return back.index_select(0, chunk.place).view(-1, self.top_k)

    def _empty_gradients(self) -> list[ExpertStack]:
        sizes = [self.tables.home_experts, self.tables.guests]
        return [
            ExpertStack(
                **{
                    "gate_up_proj": None,
                    "down_proj": None,
                    **{
                        name: self.arena.zeros(GRADIENTS, (size, *tensor.shape[1:]), self.dtype)
                        for name, tensor in self.inputs.weights.items()
                        if getattr(self.plan.needs, name)
                    },
                }
            )
            for size in sizes[: 1 + (sizes[1] > 0)]
        ]

    def _experts_backward(self, saved: SavedActivations, arriving: list[Tensor]) -> list[Tensor]:
        """[R, H] of the outputs -> [., H] of the rows, one tensor a stack; adds to the gradients."""
        math, chunk = self.math, saved.chunk
        grads = self.permuted("rows of experts", arriving[0], chunk.unpack)
        self.arena.release(arriving.pop())
        stacks = [self.inputs.weights] if saved.guests is None else [self.inputs.weights, saved.guests]
        sizes = [group.rows for group in chunk.groups]
        between = []
        for stack, group, total, part, act, leaf in zip(
            stacks, chunk.groups, self.grads, grads.split(sizes), saved.acts, saved.leaves, strict=True
        ):
            hidden = math.down_backward(part, stack, group)
            _product_gradient(total.down_proj, act.detach(), part, group.counts, self.layout)
            math.add_bias(total.down_bias, part, None, group)
            between.append(self.arena.adopt("gate and up", torch.autograd.grad(act, leaf, hidden)[0]))
            self.arena.release(hidden)
        self.arena.release(grads, *saved.acts, *saved.leaves)
        self.arena.ledger.remove(SAVED, self.graph_bytes)
        saved.acts, saved.leaves = [], []
        del grads, part, act, leaf, hidden
        rows, saved.rows = saved.rows, None
        assert rows is not None
        for total, part, own, group in zip(self.grads, rows.split(sizes), between, chunk.groups, strict=True):
            _product_gradient(total.gate_up_proj, part, own, group.counts, self.layout)
            math.add_bias(total.gate_up_bias, own, None, group)
        self.arena.release(rows)
        del part, own, rows
        if not self.plan.needs.x:
            self.arena.release(*between)
            return []
        pairs = zip(stacks, chunk.groups, strict=True)
        return [math.gate_up_backward(between.pop(0), *pair) for pair in pairs]

    def _bring_guest_gradients_home(self) -> Steps[None]:
        share, place = self.plan.plan.experts_per_rank, 0
        for expert, host in self.plan.plan.guests:
            slots: list[tuple[Tensor, Tensor]] = []
            step = PointToPoint([], [])
            if self.is_home(expert):
                totals = [total[expert % share] for total in self.grads[0].tensors()]
                slots = [(t, self.arena.take("guest gradient", tuple(t.shape), self.dtype)) for t in totals]
                step = PointToPoint([], [(slot, host) for _, slot in slots])
            elif host == self.rank:
                step = PointToPoint([(total[place], expert // share) for total in self.grads[1].tensors()], [])
                place += 1
            yield Wait((yield step))
            for total, slot in slots:
                total += slot
                self.arena.release(slot)


def _product_gradient(
    total: Tensor | None, inputs: Tensor, grads: Tensor, counts: list[int], layout: ExpertLayout
) -> None:
    """total[e] = the weight gradient of one product, in the dtype of the weights."""
    if total is None or total.is_meta:
        return
    left, right = (inputs, grads) if layout.transposed else (grads, inputs)
    for block, a, b in zip(total.unbind(0), left.split(counts), right.split(counts), strict=True):
        if a.size(0):
            torch.mm(a.t(), b, out=block)


class UnchunkedDispatch:
    """Unchunked LLEP as a dispatch, called as `lightning_longmoe.dispatch.plain.PlainDispatch` is.

    Args:
        group: the expert-parallel ranks. None: this process holds all experts.
        config: capacity, smallest piece and threshold are read.

    Attributes:
        ledger: bytes of the dispatch by name. What is kept from forward to backward is booked while either runs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, config: PipelinedLLEP = PipelinedLLEP()) -> None:
        self.config = unchunked(config)
        self.transport: GroupTransport | SoloTransport = SoloTransport() if group is None else GroupTransport(group)
        self.ledger = Ledger(aside=(PARAMETERS, GRADIENTS, ACCUMULATORS))

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
        """As `lightning_longmoe.dispatch.pipelined.pipelined_llep`."""
        return _Unchunked.apply(
            self, layout, expert_ids, x, expert_weights, gate_up_proj, down_proj, gate_up_bias, down_bias
        )


class _Unchunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, dispatch: UnchunkedDispatch, layout: ExpertLayout, ids: Tensor, x: Tensor, *others: Tensor | None
    ) -> Tensor:
        weights, transport = ExpertStack(*others[1:]), dispatch.transport
        arena, gate_up = Arena(x.device, dispatch.ledger), weights.gate_up_proj
        assert gate_up is not None
        assert others[0] is not None
        steps = plan_layer(
            arena,
            transport.rank,
            transport.size,
            ids,
            gate_up.size(0) * transport.size,
            Needs(*ctx.needs_input_grad[3:]),
            config=dispatch.config,
            bound=ChunkBound(),
        )
        plan = transport.run(steps)
        inputs = RegionInputs(x, others[0], weights)
        region = UnchunkedForward(inputs, plan, transport.rank, arena, layout, 1)
        y, saved = transport.run(region.run())
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(x, *others)
            ctx.dispatch, ctx.layout, ctx.plan, ctx.saved = dispatch, layout, plan, saved
        _close(arena, saved, layout)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weights, *others = ctx.saved_tensors
        arena, transport = Arena(x.device, ctx.dispatch.ledger), ctx.dispatch.transport
        inputs = RegionInputs(x, weights, ExpertStack(*others))
        region = UnchunkedBackward(inputs, ctx.plan, transport.rank, arena, ctx.layout, 1)
        saved, ctx.saved = ctx.saved, None
        grads = transport.run(region.run(grad, saved))
        arena.close()
        stack = grads.weights
        routes = None if grads.expert_weights is None else grads.expert_weights.to(weights.dtype)
        own = (grads.x, routes, stack.gate_up_proj, stack.down_proj, stack.gate_up_bias, stack.down_bias)
        wanted = ctx.needs_input_grad[3:]
        return None, None, None, *(part if want else None for part, want in zip(own, wanted, strict=True))


def _close(arena: Arena, saved: SavedActivations, layout: ExpertLayout) -> None:
    arena.close()
    arena.ledger.remove(SAVED, sum(saved_by_autograd(leaf, layout) for leaf in saved.leaves))
