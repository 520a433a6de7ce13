"""Dispatch: rows of tokens to the ranks where their experts are, and back.

Read first: `pipelined` (the operator and its autograd), `plan` (who computes what), `region` and `region_backward`
(the chunks), `transport` (who moves the data). `plain`, `unchunked` and `reference` are what it is measured against;
`dry` and `virtual` run it without other ranks; `balance` tells how well it balanced.

Glossary
    route         the pair (token, slot): one of a token's K choices
    row           what serves a route: H numbers on their way to an expert, or back
    home rank     owner of an expert's weights: expert e lives on rank e // (E / Ep)
    host          a rank that computes rows of an expert: its home, or a rank that the expert visits
    guest         an expert away from home, with a copy of its weights
    piece         the rows of one expert that one host computes
    plan          all pieces of one layer and forward, and from them every send and receive
    chunk         the tokens t of a rank with t mod n = j, that travel together with all their rows
    cell          one source's rows of one expert in one chunk
    dispatch      rows to their hosts; *combine*: results back to their tokens
    flight        rows that were sent and not yet waited for
    region        one rank's part of a forward or backward, as a generator of transport steps
    stack         the weights of the home experts, or of the guests
    anchor, run   the two autograd Functions around the region: the first is the backward, the second the forward
    wide          float64 for float64, else float32: what sums are kept in
    virtual rank  one of W regions that take turns in one process
"""

from lightning_longmoe.dispatch.pipelined import PipelinedDispatch, pipelined_llep
from lightning_longmoe.dispatch.plain import PlainDispatch
from lightning_longmoe.dispatch.plan import DispatchPlan, plan_dispatch

__all__ = ["DispatchPlan", "PipelinedDispatch", "PlainDispatch", "pipelined_llep", "plan_dispatch"]
