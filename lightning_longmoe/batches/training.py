"""`WindowedLoader`: the training data, read some batches ahead, equally many on all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.labels import Labels
from lightning_longmoe.batches.loader import WrappedLoader, common_lengths, may_end_early
from lightning_longmoe.batches.resume import Resume, is_plain, open_at
from lightning_longmoe.runtime.rng import RngState, host_rng_state, rng_state, set_rng_state


@dataclass
class Loaded:
    """A batch that the loader gave.

    Attributes:
        batch: itself, until it is handed on.
        valid: its valid targets on this rank; None where they are not counted.
        rng: the random state before it was loaded.
        after: the loader's own state after it, for a loader that has one.
    """

    batch: Any
    valid: int | None
    rng: RngState
    after: Any = None


class WindowedLoader(WrappedLoader):
    """The training loader as Lightning gets it: all ranks see equally many batches, and windows can be counted ahead.

    A loader with a length has the shortest rank's. Without one, the ranks vote before each batch whether all of them
    have another. What the others have left is dropped for the epoch, with one warning.

    Args:
        loader: the loader to wrap. Making this wrapper is a collective.
        labels: counts valid targets.
        ranks: all ranks.
        resume: where an interrupted epoch continues.
        position: which of the training loaders this one is, asked when a pass is opened.
        count: whether valid targets are counted at all.
    """

    def __init__(
        self,
        loader: Any,
        *,
        labels: Labels,
        ranks: HostGroup,
        resume: Resume,
        position: Callable[[Any], int] = lambda _: 0,
        count: bool = True,
    ) -> None:
        super().__init__(loader)
        self.labels = labels
        self.ranks = ranks
        self.resume = resume
        self.position = position
        self.count = count
        self.length = self._agree_on_length()
        self.current: Pass | None = None
        self.given_state: Any = None
        self._told = False

    def _agree_on_length(self) -> int | None:
        lengths = common_lengths(self.loader, self.ranks)
        if lengths is None:
            return None
        if min(lengths) == 0 and max(lengths) > 0:
            empty = [rank for rank, length in enumerate(lengths) if length == 0]
            raise ValueError(
                f"The training dataloader has no batch on rank(s) {empty} (batches of each rank: {lengths}). Give every"
                " rank at least one: use fewer ranks, a smaller batch_size, or drop_last=False."
            )
        if min(lengths) < max(lengths):
            surplus = sum(lengths) - min(lengths) * len(lengths)
            rank_zero_warn(
                f"Ranks have between {min(lengths)} and {max(lengths)} training batches. Every rank trains"
                f" {min(lengths)} of them each epoch; {surplus} batches over all ranks are not used."
            )
        return min(lengths)

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"The {type(self.loader).__name__} has no length.")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return Pass(self)

    def release(self) -> None:
        self.current = None

    def warn_of_dropped_batches(self, having: int) -> None:
        """Tell, once, that an epoch ended because some ranks ran out of data."""
        if not self._told:
            rank_zero_warn(
                f"The epoch ends here because {self.ranks.size - having} of {self.ranks.size} ranks have no further"
                " training batch; what the others have left is not used in this epoch."
            )
        self._told = True

    # --------------------------------------------------------------------------------------- an inner loader's state
    @property
    def stateful(self) -> bool:
        """Whether the inner loader saves and restores its own position."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def inner_state(self) -> Any:
        """The inner loader's state after the last batch that was trained, not after the last that was loaded."""
        return self.loader.state_dict() if self.current is None else self.current.inner_state()

    def checkpoint(self) -> dict[str, Any] | None:
        """Position and random states of the pass in progress, as plain values; None when none was opened."""
        if self.current is None:
            return None
        state = self.current.checkpoint()
        if self.stateful:
            inner = {"next": self.current.inner_state(), "again": self.current.inner_state(again=True)}
            if is_plain(inner):
                state["inner"] = inner
        return state


class StatefulWindowedLoader(WindowedLoader):
    """A `WindowedLoader` over a loader with its own state, which Lightning saves (rank 0's) and restores."""

    def state_dict(self) -> Any:
        return self.inner_state()

    def load_state_dict(self, state: Any) -> None:
        self.given_state = state


class Pass(Iterator[Any]):
    """One pass over the training data. Nothing is opened before the first batch is asked for: by then Lightning has
    told the samplers the epoch and knows the batch that it continues at."""

    def __init__(self, owner: WindowedLoader) -> None:
        self._owner = owner
        self._source: Iterator[Any] | None = None
        self._loaded: deque[Loaded] = deque()
        self._base = 0  # index in the epoch of self._loaded[0]: the batch in training, or the next one
        self._handed = 0  # index of the next batch to hand on
        self._next = 0  # index of the next batch to train
        self._ended = False
        self._opening_rng: RngState | None = None
        self._training_rng: RngState | None = None
        self._state_before: Any = None  # the inner loader's own state before batch self._base

    def __next__(self) -> Any:
        self._owner.current = self
        if self._source is None:
            self._open()
        if self._handed == self._base + len(self._loaded):
            self._load(1)
        if self._handed == self._base + len(self._loaded):
            raise StopIteration
        entry = self._loaded[self._handed - self._base]
        self._handed += 1
        batch, entry.batch = entry.batch, None
        return batch

    # ------------------------------------------------------------------------------------------------------- opening
    def _open(self) -> None:
        owner, resume = self._owner, self._owner.resume
        first = resume.first_batch()
        self._base = self._handed = self._next = first
        state = resume.loader_state(owner.position(owner), first)
        again = state is not None and state["next"] > first
        if state is not None:
            set_rng_state(state["opening_rng"])
        self._opening_rng = rng_state()
        if self._load_inner_state(state, again):
            first = 0  # the loader knows its position
        self._source = open_at(owner.loader, first, resume.skip_samples)
        resume.skip_samples = 0
        if owner.stateful:
            self._state_before = owner.loader.state_dict()
        if state is not None:
            loaded = state["loaded_rng"][self._base - state["loaded_from"] :]
            self._load(len(loaded), loaded)
        if self._base > 0 or state is not None:
            resume.restore_rng(state["training_rng"] if state is not None and again else None)

    def _load_inner_state(self, state: dict[str, Any] | None, again: bool) -> bool:
        """Put a loader with its own state back: to this rank's, else to the one that Lightning kept of rank 0."""
        owner = self._owner
        if not owner.stateful:
            return False
        inner = owner.given_state
        if state is not None and "inner" in state:
            inner = state["inner"]["again" if again else "next"]
        if inner is None:
            return False
        owner.loader.load_state_dict(inner)
        owner.given_state = None
        return True

    # ------------------------------------------------------------------------------------------------------- loading
    def _load(self, count: int, states: list[RngState] | None = None) -> None:
        """Load up to ``count`` more batches, the same number on all ranks."""
        owner = self._owner
        if owner.length is not None:
            count = min(count, owner.length - self._base - len(self._loaded))
        if count <= 0 or self._ended:
            return
        got: list[Loaded] = []
        for position in range(count):
            if states is not None:
                set_rng_state(states[position])
            entry = self._load_one()
            if entry is None:
                break
            got.append(entry)
        if owner.length is None or may_end_early(owner.loader):
            got = self._agree_on_end(got, count)
        self._loaded.extend(got)

    def _load_one(self) -> Loaded | None:
        assert self._source is not None
        rng = host_rng_state()
        try:
            batch = next(self._source)
        except StopIteration:
            return None
        owner = self._owner
        valid = owner.labels.count_valid(batch) if owner.count else None
        return Loaded(batch, valid, rng, owner.loader.state_dict() if owner.stateful else None)

    def _agree_on_end(self, got: list[Loaded], count: int) -> list[Loaded]:
        """Keep the batches that every rank has a counterpart of."""
        having = self._owner.ranks.sum([int(i < len(got)) for i in range(count)])
        everywhere = sum(ranks == self._owner.ranks.size for ranks in having)
        if everywhere < count:
            self._ended = True
            if having[everywhere]:
                self._owner.warn_of_dropped_batches(having[everywhere])
        return got[:everywhere]

    # ------------------------------------------------------------------------------------------------------ training
    def start_training(self, index: int) -> None:
        """Batch ``index`` of the epoch is trained now: forget those before it."""
        index = min(index, self._handed - 1)  # a loader that is cycled beside a longer one has its own count
        self._training_rng = rng_state()
        self._next = index + 1
        while self._base < index and self._loaded:
            self._state_before = self._loaded.popleft().after
            self._base += 1

    def valid_targets(self, count: int) -> list[int | None]:
        """Valid targets, on this rank, of the batch in training and those after it: ``count``, or as many as come."""
        self._load(count - len(self._loaded))
        return [entry.valid for entry in list(self._loaded)[:count]]

    def inner_state(self, again: bool = False) -> Any:
        """The inner loader's state after the batch in training; ``again``: before it."""
        if again or self._next == self._base or not self._loaded:
            return self._state_before
        return self._loaded[0].after

    def checkpoint(self) -> dict[str, Any]:
        """What `Resume` needs to continue this pass."""
        return {
            "next": self._next,
            "opening_rng": self._opening_rng,
            "loaded_from": self._base,
            "loaded_rng": [entry.rng for entry in self._loaded],
            "training_rng": self._training_rng,
        }
