"""The backward of the routed region: rows and output gradients travel again, nothing was kept but x and the plan.

Letters as in `lightning_longmoe.dispatch.region`. *Wide*: float64 for float64, else float32.

For a row with routing weight w, upstream gradient d, u = [gate; up] and a = activation(u):

    q = d · down_proj           gradient of a, without w
    dw = <q, a>                 the router's gradient, without the expert's output
    d down_proj += dᵀ (w a)     d u = activation'(u) (w q)
    d gate_up_proj += (d u)ᵀ x  d x = (d u) · gate_up_proj
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_longmoe.dispatch.experts import ExpertStack
from lightning_longmoe.dispatch.region import ACCUMULATORS, GRADIENTS, Chunk, Flight, Region
from lightning_longmoe.dispatch.transport import AllToAll, PointToPoint, Steps, Wait
from lightning_longmoe.runtime.ranges import ranged


@dataclass(frozen=True, eq=False)
class RegionGradients:
    """Gradients on one rank; None where nobody in the group wants them.

    Attributes:
        x: [N, H] in the dtype of x.
        expert_weights: [N, K] wide.
        weights: of the home experts, summed over all ranks' tokens, in the dtype of the weights.
    """

    x: Tensor | None
    expert_weights: Tensor | None
    weights: ExpertStack


@dataclass(eq=False)
class _Ahead:
    """A chunk whose rows of x are on their way."""

    chunk: Chunk
    flight: Flight


@dataclass(eq=False)
class _Behind:
    """A chunk whose gradients are on their way home."""

    chunk: Chunk
    rows: Flight | None
    weights: Flight | None


class RegionBackward(Region):
    """The gradient of y to all others."""

    def run(self, grad: Tensor) -> Steps[RegionGradients]:
        """``grad`` [N, H], of y, any strides."""
        self.open()
        self._open_gradients(grad)
        yield from self._run_chunks(grad)
        yield from self._bring_guest_gradients_home()
        return RegionGradients(self.grad_x, self.grad_weights, self._finished_totals())

    def _run_chunks(self, grad: Tensor) -> Steps[None]:
        guests, guest_handle = yield from self.fetch_guests()
        stacks = [self.inputs.weights] if guests is None else [self.inputs.weights, guests]
        ahead = yield from self._start(0)
        behind: _Behind | None = None
        for index in range(self.tables.chunks):
            chunk, last = ahead.chunk, index + 1 == self.tables.chunks
            rows = yield from self.land(ahead.flight, chunk)
            flights = yield from self._send_gradients(chunk, grad)
            if index == 0:
                yield Wait(guest_handle)
            if self.depth == 1:
                landed = yield from self._land_gradients(*flights, chunk)
            gate_up = self.gate_up(rows, chunk, stacks)
            if behind is not None:
                yield from self._finish(behind)
            if self.depth == 2:
                landed = yield from self._land_gradients(*flights, chunk)
                if not last:
                    ahead = yield from self._start(index + 1)
            weights = self._add_to_totals(chunk, stacks, gate_up, rows, *landed)
            self.arena.release(rows, *landed)
            del rows, landed
            parts = self._row_gradients(gate_up, chunk, stacks)
            behind = yield from self._return_gradients(chunk, parts, weights)
            if self.depth == 1:
                yield from self._finish(behind)
                behind = None
                if not last:
                    ahead = yield from self._start(index + 1)
        if behind is not None:
            yield from self._finish(behind)
        if guests is not None:
            self.arena.release(*guests.tensors())

    def _open_gradients(self, grad: Tensor) -> None:
        arena, needs, inputs = self.arena, self.plan.needs, self.inputs
        arena.hold("y gradient", grad)
        self.grad_x = arena.take("x gradient", tuple(inputs.x.shape), self.dtype) if needs.x else None
        shape = tuple(inputs.expert_weights.shape)
        self.grad_weights = arena.take("routes", shape, self.wide) if needs.expert_weights else None
        self.totals = [self._zero_totals(self.tables.home_experts)]
        if self.tables.guests:
            self.totals.append(self._zero_totals(self.tables.guests))

    def _zero_totals(self, experts: int) -> ExpertStack:
        wanted = {name: t for name, t in self.inputs.weights.items() if getattr(self.plan.needs, name)}
        zeros = {n: self.arena.zeros(ACCUMULATORS, (experts, *t.shape[1:]), self.wide) for n, t in wanted.items()}
        return ExpertStack(**{"gate_up_proj": None, "down_proj": None, **zeros})

    def _start(self, index: int) -> Steps[_Ahead]:
        chunk = self.open_chunk(index)
        return _Ahead(chunk, (yield from self.dispatch(chunk, self.inputs.x)))

    def _send_gradients(self, chunk: Chunk, grad: Tensor) -> Steps[tuple[Flight, Flight]]:
        """The output's gradient and the routing weight of every row, to the hosts."""
        flight = yield from self.dispatch(chunk, grad)
        send = self.arena.take("routing weights", (chunk.routes.size(0),), self.wide)
        with self.arena.transient("routing weights", send.nbytes):
            send.copy_(self.inputs.expert_weights.reshape(-1).index_select(0, chunk.routes))
        receive = self.arena.take("routing weights", (chunk.unpack.size(0),), self.wide)
        handle = yield AllToAll(receive, send, chunk.received, chunk.sent)
        return flight, Flight(handle, send, receive)

    def _land_gradients(self, rows: Flight, weights: Flight, chunk: Chunk) -> Steps[tuple[Tensor, Tensor]]:
        """[R, H] and [R] wide in the order of the products."""
        grads = yield from self.land(rows, chunk)
        received = yield from self.arrive(weights)
        sorted_weights = self.arena.adopt("routing weights", received.index_select(0, chunk.unpack))
        self.arena.release(received)
        return grads, sorted_weights

    def _add_to_totals(
        self,
        chunk: Chunk,
        stacks: list[ExpertStack],
        gate_up: list[Tensor],
        rows: Tensor,
        grads: Tensor,
        weights: Tensor,
    ) -> list[Tensor]:
        """Add the weight gradients of a chunk to the totals; each of ``gate_up`` becomes its own gradient.

        Args:
            gate_up: [., G] of each stack.
            rows, grads, weights: [R, H], [R, H] and [R] wide, of all stacks.

        Returns:
            [.] wide of each stack, the gradients of the weights.
        """
        math, grad_weights = self.math, []
        parts = zip(*(t.split([g.rows for g in chunk.groups]) for t in (rows, grads, weights)), strict=True)
        for (row, grad, weight), group, stack, total, own in zip(
            parts, chunk.groups, stacks, self.totals, gate_up, strict=True
        ):
            hidden = math.down_backward(grad, stack, group)
            grad_weights.append(math.activation_backward_(own, hidden, weight))
            math.add_bias_dot(grad_weights[-1], grad, stack.down_bias, group)
            math.add_projection(total.down_proj, hidden, grad, group)
            math.add_bias(total.down_bias, grad, weight, group)
            self.arena.release(hidden)
            del hidden
            math.add_projection(total.gate_up_proj, row, own, group)
            math.add_bias(total.gate_up_bias, own, None, group)
        return grad_weights

    @ranged("longmoe/dispatch/chunk")
    def _row_gradients(self, gate_up: list[Tensor], chunk: Chunk, stacks: list[ExpertStack]) -> list[Tensor]:
        """Gradients [., G] -> [., H] of each stack, or nothing where nobody wants them. Empties ``gate_up``."""
        if not self.plan.needs.x:
            self.arena.release(*gate_up)
            gate_up.clear()
            return []
        pairs = zip(stacks, chunk.groups, strict=True)
        return [self.math.gate_up_backward(gate_up.pop(0), *pair) for pair in pairs]

    def _return_gradients(self, chunk: Chunk, parts: list[Tensor], weights: list[Tensor]) -> Steps[_Behind]:
        flight = (yield from self.return_rows(chunk, parts)) if self.plan.needs.x else None
        if not self.plan.needs.expert_weights:
            self.arena.release(*weights)
            return _Behind(chunk, flight, None)
        send = self.arena.take("routing weights", (chunk.unpack.size(0),), self.wide)
        for places in chunk.unpack.split([group.rows for group in chunk.groups]):
            send.index_copy_(0, places, weights[0])
            self.arena.release(weights.pop(0))
        receive = self.arena.take("routing weights", (chunk.routes.size(0),), self.wide)
        handle = yield AllToAll(receive, send, chunk.sent, chunk.received)
        return _Behind(chunk, flight, Flight(handle, send, receive))

    def _finish(self, behind: _Behind) -> Steps[None]:
        """Sum the K rows of each token, in slot order, and put weights back where they came from."""
        chunk, step = behind.chunk, self.tables.chunks
        if behind.rows is not None and self.grad_x is not None:
            rows = yield from self.arrive(behind.rows)
            target = self.grad_x[chunk.index :: step]
            with self.arena.transient("sums of tokens", self.tile_bytes(chunk, False)):
                for tokens, places in self.tiles(chunk, False):
                    target[tokens] = rows.index_select(0, places).view(-1, self.top_k, self.hidden).sum(1)
            self.arena.release(rows)
            del rows
        if behind.weights is not None and self.grad_weights is not None:
            received = yield from self.arrive(behind.weights)
            with self.arena.transient("routing weights", received.nbytes):
                in_order = received.index_select(0, chunk.place).view(-1, self.top_k)
                self.grad_weights[chunk.index :: step] = in_order
            self.arena.release(received)
        self.close_chunk(chunk)

    def _bring_guest_gradients_home(self) -> Steps[None]:
        """One guest at a time, in the same order on every rank; a home adds its guests' sums in that order."""
        share, place = self.plan.plan.experts_per_rank, 0
        for expert, host in self.plan.plan.guests:
            home_slots: list[tuple[Tensor, Tensor]] = []
            step = PointToPoint([], [])
            if self.is_home(expert):
                totals = [total[expert % share] for total in self.totals[0].tensors()]
                home_slots = [(t, self.arena.take("guest gradient", tuple(t.shape), self.wide)) for t in totals]
                step = PointToPoint([], [(slot, host) for _, slot in home_slots])
            elif host == self.rank:
                step = PointToPoint([(total[place], expert // share) for total in self.totals[1].tensors()], [])
                place += 1
            handle: Any = yield step
            yield Wait(handle)
            for total, slot in home_slots:
                total += slot
                self.arena.release(slot)
        if len(self.totals) > 1:
            self.arena.release(*self.totals.pop().tensors())

    def _finished_totals(self) -> ExpertStack:
        """The home experts' gradients in the dtype of the weights; each total is freed once it was converted."""
        stack = self.totals.pop()
        totals, finished = dict(stack.items()), {}
        del stack
        for name in sorted(totals, key=lambda key: totals[key].numel()):  # the smaller first: they coexist
            total = totals.pop(name)
            self.arena.release(total)
            if total.dtype == self.dtype:
                self.arena.hold(GRADIENTS, total)
                finished[name] = total
            else:
                with self.arena.transient(ACCUMULATORS, total.nbytes):
                    finished[name] = self.arena.adopt(GRADIENTS, total.to(self.dtype))
            del total
        return ExpertStack(**{"gate_up_proj": None, "down_proj": None, **finished})
