"""Values of a first forward that its recomputation reuses.

Activation checkpointing runs a block twice. Some values must not be computed again: a router's choice (a rounding
difference would flip an expert), the row counts of a dispatch (exchanging them again deadlocks). Each checkpointed call
owns a `Tape`; code inside says ``remember(key, compute)``.

Glossary: *first forward*, *replay* (its recomputation in the backward), *tape* (what the first leaves to the second).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from lightning_longmoe._compat import inside_backward

T = TypeVar("T")


class Tape:
    """The remembered values of one checkpointed call, in the order in which its first forward asked for them."""

    def __init__(self) -> None:
        self._values: list[tuple[Hashable, object]] = []
        self._position = 0

    def record(self, key: Hashable, value: T) -> T:
        self._values.append((key, value))
        return value

    def rewind(self) -> None:
        self._position = 0

    def replay(self, key: Hashable) -> object:
        """The next value. A replay that asks for something else than the first forward did is a fault of the block."""
        if self._position >= len(self._values) or self._values[self._position][0] != key:
            raise RuntimeError(
                f"The recomputation of a block asked for {key!r}, which its first forward did not compute here."
                " A checkpointed block must run the same modules in both; take data-dependent branches out of it."
            )
        value = self._values[self._position][1]
        self._position += 1
        return value


class _Active(threading.local):
    """The tape of this thread: autograd recomputes in threads of its own. The one global state of this room."""

    def __init__(self) -> None:
        self.stack: list[tuple[Tape, bool]] = []


_active = _Active()


@contextmanager
def _using(tape: Tape, replaying: bool) -> Iterator[None]:
    if replaying:
        tape.rewind()  # with retain_graph one first forward may be replayed several times
    _active.stack.append((tape, replaying))
    try:
        yield
    finally:
        _active.stack.pop()


def checkpoint_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The pair that ``torch.utils.checkpoint.checkpoint(context_fn=...)`` wants: first forward, recomputation.

    A checkpoint inside a checkpoint runs anew in the outer one's replay: it then gets its own tape back, and replays.
    """
    tape = remember("nested checkpoint", Tape)
    inside_replay = bool(_active.stack) and _active.stack[-1][1]
    return _Reusable(tape, inside_replay), _Reusable(tape, True)


class _Reusable(AbstractContextManager[None]):
    """A context manager that may be entered more than once (each replay under ``retain_graph`` enters it)."""

    def __init__(self, tape: Tape, replaying: bool) -> None:
        self._tape, self._replaying = tape, replaying
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        context = _using(self._tape, self._replaying)
        context.__enter__()
        self._entered.append(context)

    def __exit__(self, *exception: object) -> None:
        self._entered.pop().__exit__(*exception)  # type: ignore[arg-type]


def remember(key: Hashable, compute: Callable[[], T]) -> T:
    """``compute()`` in a first forward or outside any tape; what the first forward computed, in its replay.

    Args:
        key: names the value, to catch a block whose replay takes another path.
        compute: makes the value. Tensors must be without gradient: they are handed back as they were.
    """
    if not _active.stack:
        return compute()
    tape, replaying = _active.stack[-1]
    return tape.replay(key) if replaying else tape.record(key, compute())  # type: ignore[return-value]


def replaying() -> bool:
    """Whether this forward is a recomputation, by our own checkpointing or by anyone's (it runs inside a backward)."""
    return (bool(_active.stack) and _active.stack[-1][1]) or inside_backward()
