"""The routed region of one layer on one rank: rows out to the experts' hosts and back, chunk by chunk.

Letters: N tokens of this rank - K experts a token - n chunks - C rows sent and R rows received in a chunk - H hidden
size - F expert FFN size - G = 2F where gated, else F.

`RegionForward` and `RegionBackward` are generators over transport steps (`lightning_longmoe.dispatch.transport`); what
both need is here: chunks, flights of rows, guests.

The order of steps is the same on every rank, whatever the routing. With ``depth`` 2 a chunk's rows travel while another
is computed; the arithmetic and its order are the same at both depths:

    forward   send D(0) | wait D(j), send D(j+1), compute j, finish C(j-1), send C(j) | finish C(n-1)
    backward  send X(0) | wait X(j), send G(j), gate and up of j, finish C(j-1),
                          wait G(j), send X(j+1), the rest of j, send C(j) | finish C(n-1)

where D and X bring rows of x to the hosts, G rows of the output's gradient, and C results home. The backward computes
gate and up again, not the experts' outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_longmoe.config import ExpertLayout
from lightning_longmoe.dispatch.exchange import LayerPlan
from lightning_longmoe.dispatch.experts import ExpertMath, ExpertStack, Group, ProductPaths
from lightning_longmoe.dispatch.tables import group_ends
from lightning_longmoe.dispatch.transport import AllToAll, PointToPoint, Steps, Wait
from lightning_longmoe.kernels.expert_grad import wide_dtype
from lightning_longmoe.runtime.ledger import Arena
from lightning_longmoe.runtime.ranges import ranged

PARAMETERS, GRADIENTS, ACCUMULATORS = "parameters", "parameter gradients", "weight-gradient accumulators"
_TILE_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class RegionInputs:
    """What one rank brings; nothing here takes part in autograd.

    Attributes:
        x: [N, H].
        expert_weights: [N, K].
        weights: this rank's home experts, dtype of x.
    """

    x: Tensor
    expert_weights: Tensor
    weights: ExpertStack


@dataclass(eq=False)
class Flight:
    """Rows on their way: both buffers stay alive until the handle was waited for."""

    handle: Any
    send: Tensor | None
    receive: Tensor | None


@dataclass(frozen=True, eq=False)
class Chunk:
    """One chunk of this rank, with the orders of its rows.

    Attributes:
        index: j.
        routes: [C] which of the N·K routes each row serves, in the order of sending.
        tokens: [C] its token.
        place: [C] where the row of each route, in (token, slot) order, stands in the order of sending.
        unpack: [R] where each row, in the order of the products, stands in the order of arrival.
        sent, received: [Ep] rows to and from each rank.
        groups: of the home experts, and of the guests where there are some.
    """

    index: int
    routes: Tensor
    tokens: Tensor
    place: Tensor
    unpack: Tensor
    sent: list[int]
    received: list[int]
    groups: list[Group]


class Region:
    """What forward and backward share.

    Args:
        inputs: of this rank.
        plan: of this layer and forward.
        rank: of this process in the group.
        arena: for every buffer.
        layout: of the weights.
        depth: 1 or 2 chunks in flight.
        paths: which code multiplies; None: what the device allows.
    """

    def __init__(
        self,
        inputs: RegionInputs,
        plan: LayerPlan,
        rank: int,
        arena: Arena,
        layout: ExpertLayout,
        depth: int,
        paths: ProductPaths | None = None,
    ) -> None:
        self.inputs, self.plan, self.tables, self.rank = inputs, plan, plan.tables, rank
        self.arena, self.layout, self.depth = arena, layout, depth
        self.hidden, self.top_k = inputs.x.size(1), inputs.expert_weights.size(1)
        self.dtype, self.wide = inputs.x.dtype, wide_dtype(inputs.x.dtype)
        self.math = ExpertMath(arena, layout, paths or ProductPaths.on(arena.device, inputs.weights))

    def open(self) -> None:
        """Book what the caller holds, sort the routes, and bring the tables to the device."""
        arena, inputs = self.arena, self.inputs
        arena.hold("x", inputs.x)
        arena.hold("routes", inputs.expert_weights, self.plan.expert_ids)
        arena.hold(PARAMETERS, *inputs.weights.tensors())
        self.pack = arena.upload("routes", self.tables.pack)
        self.unpack = arena.upload("routes", self.tables.unpack)
        self.ends = arena.upload("routes", group_ends(self.tables))
        self.order = self._sort_routes()

    def _sort_routes(self) -> Tensor:
        """[N·K] routes by (chunk, expert, token, slot)."""
        ids, experts = self.plan.expert_ids, self.plan.plan.experts
        with self.arena.transient("routes", 4 * ids.numel() * 8):
            tokens = torch.arange(ids.size(0), device=self.arena.device)
            keys = tokens.remainder(self.tables.chunks).unsqueeze(1) * experts + ids
            return self.arena.adopt("routes", torch.argsort(keys.reshape(-1), stable=True))

    def open_chunk(self, index: int) -> Chunk:
        """The orders of chunk ``index``, from a few numbers that are on the device already."""
        tables, adopt = self.tables, self.arena.adopt
        start, rows = sum(tables.rows[:index]), tables.rows[index]
        with self.arena.transient("routes", 5 * max(rows, sum(tables.received[index])) * 8):
            moved = _run_index(self.pack[:, index], rows)
            routes = adopt("routes", self.order[start : start + rows].index_select(0, moved))
            tokens = adopt("routes", routes // self.top_k)
            local = tokens // tables.chunks * self.top_k + routes % self.top_k
            place = adopt("routes", torch.empty_like(routes))
            place.scatter_(0, local, torch.arange(rows, device=routes.device))
            unpack = adopt("routes", _run_index(self.unpack[:, index], sum(tables.received[index])))
        return Chunk(
            index, routes, tokens, place, unpack, tables.sent[index], tables.received[index], self._groups(index)
        )

    def close_chunk(self, chunk: Chunk) -> None:
        self.arena.release(chunk.routes, chunk.tokens, chunk.place, chunk.unpack)

    def _groups(self, index: int) -> list[Group]:
        home, counts, ends = self.tables.home_experts, self.tables.groups[index], self.ends[index]
        groups = [Group(counts[:home], ends[:home])]
        return groups if not self.tables.guests else [*groups, Group(counts[home:], ends[home:])]

    def block(self, name: str, rows: int) -> Tensor:
        """[rows, H]; all blocks have room for the largest send or receive, so that one takes the memory of another."""
        return self.arena.take(name, (rows, self.hidden), self.dtype, capacity=self.tables.block_rows)

    def dispatch(self, chunk: Chunk, source: Tensor) -> Steps[Flight]:
        """Send the rows [C, H] of a chunk's routes out of ``source`` [N, H] to the hosts."""
        send = self.block("rows to send", chunk.tokens.size(0))
        torch.index_select(source, 0, chunk.tokens, out=send)
        receive = self.block("rows received", chunk.unpack.size(0))
        handle = yield AllToAll(receive, send, chunk.received, chunk.sent)
        return Flight(handle, send, receive)

    def land(self, flight: Flight, chunk: Chunk) -> Steps[Tensor]:
        """Wait for rows of a chunk and sort them: [R, H] by (hosted expert, source, token, slot)."""
        received = yield from self.arrive(flight)
        rows = self.block("rows of experts", received.size(0))
        torch.index_select(received, 0, chunk.unpack, out=rows)
        self.arena.release(received)
        return rows

    def gate_up(self, rows: Tensor, chunk: Chunk, stacks: list[ExpertStack]) -> list[Tensor]:
        """The first products: rows [R, H] -> [., G] for each stack."""
        parts = rows.split([group.rows for group in chunk.groups])
        return [self.math.gate_up(*args) for args in zip(parts, stacks, chunk.groups, strict=True)]

    def return_rows(self, chunk: Chunk, parts: list[Tensor]) -> Steps[Flight]:
        """Send the results [R, H] of each stack home. Releases ``parts`` and empties the list."""
        send = self.block("rows to send", chunk.unpack.size(0))
        for places in chunk.unpack.split([group.rows for group in chunk.groups]):
            send.index_copy_(0, places, parts[0])
            self.arena.release(parts.pop(0))
        receive = self.block("rows received", chunk.tokens.size(0))
        handle = yield AllToAll(receive, send, chunk.sent, chunk.received)
        return Flight(handle, send, receive)

    def arrive(self, flight: Flight) -> Steps[Tensor]:
        """Wait for a flight, free what was sent, and hand over what was received."""
        yield Wait(flight.handle)
        self.arena.release(flight.send)
        receive, flight.send, flight.receive = flight.receive, None, None
        assert receive is not None
        return receive

    def tiles(self, chunk: Chunk, wide_copy: bool) -> list[tuple[slice, Tensor]]:
        """Tokens of the chunk, a few at a time, each slice with the places [tokens · K] of its rows; none when dry."""
        if self.arena.dry:
            return []
        size = self.tile_tokens(wide_copy)
        tokens = chunk.place.size(0) // self.top_k
        return [
            (slice(start, min(start + size, tokens)), chunk.place[start * self.top_k : (start + size) * self.top_k])
            for start in range(0, tokens, size)
        ]

    def tile_tokens(self, wide_copy: bool) -> int:
        item = self.wide.itemsize if wide_copy else self.dtype.itemsize
        return max(1, _TILE_BYTES // (self.top_k * self.hidden * item))

    def tile_bytes(self, chunk: Chunk, wide_copy: bool) -> int:
        """What summing one tile allocates, at most: its rows, a wide copy, and the sums."""
        tokens = min(self.tile_tokens(wide_copy), chunk.place.size(0) // self.top_k)
        copies = 0 if not wide_copy or self.dtype == self.wide else self.wide.itemsize
        return tokens * self.hidden * (self.top_k * (self.dtype.itemsize + copies) + self.wide.itemsize)

    def is_home(self, expert: int) -> bool:
        return expert // self.plan.plan.experts_per_rank == self.rank

    def fetch_guests(self) -> Steps[tuple[ExpertStack | None, Any]]:
        """Ask for the weights of this rank's guests; they are there once the handle was waited for."""
        share, sends, receives = self.plan.plan.experts_per_rank, [], []
        guests = self.guest_stack("guest weights", self.dtype) if self.tables.guests else None
        place = 0
        for expert, host in self.plan.plan.guests:
            if self.is_home(expert):
                sends += [(tensor[expert % share].contiguous(), host) for tensor in self.inputs.weights.tensors()]
            elif host == self.rank and guests is not None:
                receives += [(tensor[place], expert // share) for tensor in guests.tensors()]
                place += 1
        handle = yield PointToPoint(sends, receives)
        return guests, handle

    def guest_stack(self, name: str, dtype: torch.dtype) -> ExpertStack:
        return ExpertStack(
            **{
                key: self.arena.take(name, (self.tables.guests, *tensor.shape[1:]), dtype)
                for key, tensor in self.inputs.weights.items()
            }  # type: ignore[arg-type]
        )


def _run_index(runs: Tensor, total: int) -> Tensor:
    """[total] the index of a move (`lightning_longmoe.dispatch.tables`) out of its shifts and lengths [2, runs]."""
    shift, length = runs
    return torch.repeat_interleave(shift, length, output_size=total) + torch.arange(total, device=runs.device)


class RegionForward(Region):
    """x to y."""

    def run(self) -> Steps[Tensor]:
        """[N, H] in the dtype of x."""
        self.open()
        y = self.arena.take("y", tuple(self.inputs.x.shape), self.dtype)
        guests, guest_handle = yield from self.fetch_guests()
        stacks = [self.inputs.weights] if guests is None else [self.inputs.weights, guests]
        ahead = yield from self._start(0)
        behind: tuple[Chunk, Flight] | None = None
        for index in range(self.tables.chunks):
            chunk, flight = ahead
            rows = yield from self.land(flight, chunk)
            if index == 0:
                yield Wait(guest_handle)
            if self.depth == 2 and index + 1 < self.tables.chunks:
                ahead = yield from self._start(index + 1)
            gate_up = self.gate_up(rows, chunk, stacks)
            self.arena.release(rows)
            del rows
            parts = self._outputs(gate_up, chunk, stacks)
            if behind is not None:
                yield from self._finish(*behind, y)
            behind = chunk, (yield from self.return_rows(chunk, parts))
            if self.depth == 1:
                yield from self._finish(*behind, y)
                behind = None
                if index + 1 < self.tables.chunks:
                    ahead = yield from self._start(index + 1)
        if behind is not None:
            yield from self._finish(*behind, y)
        return y

    def _start(self, index: int) -> Steps[tuple[Chunk, Flight]]:
        chunk = self.open_chunk(index)
        return chunk, (yield from self.dispatch(chunk, self.inputs.x))

    @ranged("longmoe/dispatch/chunk")
    def _outputs(self, gate_up: list[Tensor], chunk: Chunk, stacks: list[ExpertStack]) -> list[Tensor]:
        """[., G] -> the experts' outputs [., H] of each stack. Releases ``gate_up`` and empties the list."""
        outputs = []
        for stack, group in zip(stacks, chunk.groups, strict=True):
            act = self.math.activation(gate_up.pop(0))
            outputs.append(self.math.down(act, stack, group))
            self.arena.release(act)
            del act
        return outputs

    def _finish(self, chunk: Chunk, flight: Flight, y: Tensor) -> Steps[None]:
        """y of a chunk's tokens: the weighted sum of their K rows, in slot order."""
        rows = yield from self.arrive(flight)
        step, j = self.tables.chunks, chunk.index
        target, weights = y[j::step], self.inputs.expert_weights[j::step].to(self.wide).unsqueeze(2)
        with self.arena.transient("sums of tokens", self.tile_bytes(chunk, True) + weights.nbytes):
            for tokens, places in self.tiles(chunk, True):
                tile = rows.index_select(0, places).view(-1, self.top_k, self.hidden)
                target[tokens] = tile.to(self.wide).mul_(weights[tokens]).sum(1)
                del tile
        self.arena.release(rows)
        self.close_chunk(chunk)
