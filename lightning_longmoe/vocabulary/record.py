"""What calls of this room sent and held, for whoever asks: tests, the benchmark, a monitor.

``with recording() as record: ring_cross_entropy(...).backward()`` leaves the bytes sent in ``record.forward`` and
``record.backward``, buffers by name in ``record.ledger``, and the largest of them in ``largest_temporary_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from lightning_longmoe.runtime.ledger import Ledger
from lightning_longmoe.vocabulary.ring import CARRIED, TRAVELLING, Traffic
from lightning_longmoe.vocabulary.spans import Mode
from lightning_longmoe.vocabulary.tiles import PRODUCTS, TILES

TEMPORARIES = (TILES, PRODUCTS, TRAVELLING, CARRIED)


@dataclass
class Record:
    """Sums over all calls of one `recording`, on this rank.

    Attributes:
        ledger: every buffer by name, inputs and gradients included.
        forward, backward: what was sent by ring passes.
        lookup: what embedding lookups sent, in both directions.
        modes: what travelled, for each ring forward.
    """

    ledger: Ledger = field(default_factory=Ledger)
    forward: Traffic = field(default_factory=Traffic)
    backward: Traffic = field(default_factory=Traffic)
    lookup: Traffic = field(default_factory=Traffic)
    modes: list[Mode] = field(default_factory=list)

    @property
    def largest_temporary_bytes(self) -> int:
        """The largest single buffer that is neither an input nor a gradient nor a state of the tokens."""
        return max((self.ledger.largest_buffer.get(name, 0) for name in TEMPORARIES), default=0)


_current: ContextVar[Record | None] = ContextVar("lightning_longmoe.vocabulary.record", default=None)
"""The one global state of this room. A backward writes to the record of its forward, whichever thread it runs in."""


@contextmanager
def recording() -> Iterator[Record]:
    """Collect what the calls inside, and their backwards, send and hold."""
    record = Record()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)


def current_record() -> Record:
    """The record of the surrounding `recording`; one that nobody reads where there is none."""
    record = _current.get()
    return Record() if record is None else record
