"""Errors on all ranks alike: what fails on one rank raises an ordinary exception on every rank, in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from lightning_longmoe import _compat

T = TypeVar("T")

COMPLETE = "complete"

ControlGroup = dist.ProcessGroup | None
"""All ranks, over gloo; None: this process is the only rank."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read.

    Attributes:
        failures: what went wrong on each rank that failed.
    """

    def __init__(self, message: str, failures: dict[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


def size_and_rank(group: ControlGroup) -> tuple[int, int]:
    """Number of ranks and this rank.

    Raises:
        ValueError: no group is given although there are several ranks.
    """
    if group is not None:
        return dist.get_world_size(group), dist.get_rank(group)
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"control_group=None stands for one process, but there are {dist.get_world_size()} ranks:"
            " give a gloo group of all of them."
        )
    return 1, 0


def require_all_ranks(group: ControlGroup, timeout_s: float, what: str = "save_checkpoint") -> None:
    """Return when every rank has called this; the ranks that did not come are known on all ranks that did.

    It counts arrivals in the key-value store of the process groups, so that a missing rank leaves no half-done
    collective behind, and a missing rank 0 is noticed as well. One atomic verdict per turn: "complete", or who is
    missing, from the first rank whose patience ends.

    Args:
        group: all ranks.
        timeout_s: how long to wait for them.
        what: the call to name in the error.

    Raises:
        CheckpointError: ranks are missing.
    """
    size, rank = size_and_rank(group)
    if size == 1 or group is None:
        return
    store, prefix = _compat.default_store(), f"longmoe/{what}/{group.group_name}"
    turn = store.add(f"{prefix}/rank{rank}", 1)
    verdict = f"{prefix}/verdict{turn}"
    if store.add(f"{prefix}/arrived{turn}", 1) == size:
        found = store.compare_set(verdict, "", COMPLETE).decode()
        store.delete_key(f"{prefix}/verdict{turn - 1}")  # everybody has read it, or would not be here
        store.delete_key(f"{prefix}/arrived{turn}")
    else:
        found = _wait_for_verdict(store, verdict, turn, timeout_s, prefix, size, rank)
    if found == COMPLETE:
        return
    missing = json.loads(found)["missing"]
    if rank in missing:  # it came when the verdict was being made, and has been counted twice
        store.add(f"{prefix}/rank{rank}", -1)
    raise CheckpointError(
        f"{what}: ranks {missing} did not call it within {timeout_s:g} s of the others. Saving is done by all ranks"
        " together: call trainer.save_checkpoint on every rank, not under `if trainer.is_global_zero`, and let every"
        " rank decide alike whether to save (log the monitored metric with sync_dist=True).",
        {other: "did not call" for other in missing},
    )


def _wait_for_verdict(
    store: dist.Store, verdict: str, turn: int, timeout_s: float, prefix: str, size: int, rank: int
) -> str:
    """The verdict of this turn, which this rank makes when it does not come in time."""
    try:
        store.wait([verdict], timedelta(seconds=timeout_s))
        return store.get(verdict).decode()
    except RuntimeError:  # of several types, by the kind of store
        missing = [other for other in range(size) if store.add(f"{prefix}/rank{other}", 0) < turn]
        mine = json.dumps({"by": rank, "missing": missing})
        found = store.compare_set(verdict, "", mine).decode()
        if found == mine:
            for other in missing:  # their next call shall meet our next one
                store.add(f"{prefix}/rank{other}", 1)
        return found


def gather_per_rank(value: T, group: ControlGroup, *, timeout_s: float | None = None) -> list[T]:
    """The value of every rank, in rank order, on every rank. Collective.

    Args:
        value: anything that pickles; host values.
        group: all ranks.
        timeout_s: check first that every rank comes, as `require_all_ranks` does.

    Raises:
        CheckpointError: ranks are missing, or one went away meanwhile.
    """
    size, _ = size_and_rank(group)
    if group is None:
        return [value]
    if timeout_s is not None:
        require_all_ranks(group, timeout_s)
    values: list[Any] = [None] * size
    try:
        dist.all_gather_object(values, value, group=group)
    except RuntimeError as error:
        raise _lost_rank("gathering values of all ranks", error) from error
    return values


def broadcast_from_zero(value: T, group: ControlGroup) -> T:
    """Rank 0's value on every rank. Collective."""
    if group is None:
        return value
    values = [value]
    try:
        dist.broadcast_object_list(values, group_src=0, group=group)
    except RuntimeError as error:
        raise _lost_rank("taking rank 0's value", error) from error
    return values[0]


def on_all_ranks(step: str, function: Callable[[], T], group: ControlGroup) -> T:
    """Call ``function`` on every rank; where it fails on one, every rank raises. Collective.

    Args:
        step: what is being done, for the message.
        function: runs on this rank; it must not communicate.
        group: all ranks.

    Raises:
        CheckpointError: it failed somewhere; the message names the ranks and their errors.
    """
    result, error = None, None
    try:
        result = function()
    except Exception as caught:
        error = caught
    raise_on_all_ranks(step, error, group)
    return result  # type: ignore[return-value]


def raise_on_all_ranks(step: str, error: Exception | None, group: ControlGroup) -> None:
    """Raise on every rank where any rank has an error. Collective.

    Raises:
        CheckpointError: a rank has one.
    """
    mine = None if error is None else describe(error)
    failures = {rank: text for rank, text in enumerate(gather_per_rank(mine, group)) if text is not None}
    if not failures:
        return
    if isinstance(error, CheckpointError) and set(failures.values()) == {mine}:
        raise error  # the same finding wherever there is one: say it once
    raise CheckpointError(failure_text(step, failures), failures) from error


def failure_text(step: str, failures: dict[int, str]) -> str:
    """One message from the errors of the ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, text in failures.items():
        ranks.setdefault(text, []).append(rank)
    return f"{step} failed on " + "; ".join(
        f"rank{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}: {text}" for text, found in ranks.items()
    )


def describe(error: BaseException) -> str:
    """An exception as one line; ours already say what they are."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def _lost_rank(step: str, error: RuntimeError) -> CheckpointError:
    return CheckpointError(f"Lost contact with a rank while {step}: it ended or hangs. ({error})")
