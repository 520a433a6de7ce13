"""`EvaluationLoader`: every sample once, and equally many batches on all ranks.

Forward passes are collectives under sharding, so a rank with fewer batches would leave the others waiting. Lightning
repeats samples to even out validation and test, and deals unevenly for predict. Here no real sample repeats; a rank
that has run out gets *padding batches*: copies of its last real batch in which no label is valid. What a step logs of
one weighs nothing in a mean, and its predictions have no rows. A module that feeds a metric of its own with something
else than labels asks ``self.trainer.strategy.batches.padding`` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.labels import Labels
from lightning_longmoe.batches.loader import WrappedLoader, common_lengths
from lightning_longmoe.runtime.rng import RngState, host_rng_state, set_rng_state

REPEATING = (DistributedSampler, DistributedSamplerWrapper, UnrepeatedDistributedSamplerWrapper)


class NoIndices(list[int]):
    """The sample indices of a padding batch, for Lightning's prediction writers."""


class EvaluationLoader(WrappedLoader):
    """A validation, test or predict loader as Lightning gets it.

    Loading draws random numbers of its own, so that training goes on as if no evaluation had happened.

    Args:
        loader: the loader to wrap. Making this wrapper is a collective.
        labels: empties the labels of padding batches.
        ranks: all ranks.
    """

    def __init__(self, loader: Any, *, labels: Labels, ranks: HostGroup) -> None:
        super().__init__(loader)
        self.labels = labels
        self.ranks = ranks
        lengths = common_lengths(loader, ranks)
        self.length = None if lengths is None else max(lengths)
        self.some_rank_is_empty = lengths is not None and min(lengths) == 0
        self.real_batches: int | None = None if lengths is None else lengths[ranks.rank]

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"The {type(self.loader).__name__} has no length.")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        return EvaluationPass(self)

    def is_padding(self, index: int) -> bool:
        """Whether batch ``index`` of a pass, once handed out, is a padding batch on this rank."""
        return self.real_batches is not None and index >= self.real_batches


class EvaluationPass(Iterator[Any]):
    """One pass over the evaluation data."""

    def __init__(self, owner: EvaluationLoader) -> None:
        self._owner = owner
        self._source: Iterator[Any] | None = None
        self._rng: RngState | None = None
        self._handed = 0
        self._last: Any = None

    def __next__(self) -> Any:
        owner = self._owner
        if owner.length is not None and self._handed >= owner.length:
            raise StopIteration
        batch = self._load()
        if self._handed == 0:
            batch = self._begin(batch)
        elif owner.length is None and owner.ranks.sum([int(batch is not None)]) == [0]:
            raise StopIteration
        self._handed += 1
        if batch is None:
            return self._pad()
        self._last = batch
        return batch

    def _begin(self, batch: Any) -> Any:
        """The first batch; a rank that has none gets another rank's, to make padding batches of."""
        owner = self._owner
        having = 0 if owner.some_rank_is_empty or owner.length is None else owner.ranks.size
        if having == 0:
            having = owner.ranks.sum([int(batch is not None)])[0]
        if having == 0:
            raise StopIteration
        if having < owner.ranks.size:
            shared = owner.ranks.first_of(batch)
            self._last = shared if batch is None else batch
        return batch

    def _load(self) -> Any:
        """The next real batch, or None."""
        with self._own_random_numbers():
            if self._source is None:
                self._source = iter(self._owner.loader)
                if self._owner.length is None:
                    self._owner.real_batches = None
            try:
                return next(self._source)
            except StopIteration:
                if self._owner.real_batches is None or self._handed < self._owner.real_batches:
                    self._owner.real_batches = self._handed
                return None

    @contextmanager
    def _own_random_numbers(self) -> Iterator[None]:
        outside = host_rng_state()
        if self._rng is not None:
            set_rng_state(self._rng)
        try:
            yield
        finally:
            self._rng = host_rng_state()
            set_rng_state(outside)

    def _pad(self) -> Any:
        seen = getattr(getattr(self._owner.loader, "batch_sampler", None), "seen_batch_indices", None)
        if isinstance(seen, list):  # Lightning looks a batch's indices up by its number
            seen.append(NoIndices())
        return self._owner.labels.without_targets(self._last)


def deal_without_repeats(loader: Any, data_rank: int, data_size: int, predicting: bool = False) -> None:
    """Let the distributed sampler of ``loader`` give rank r of R the samples r, r + R, ... and none twice.

    Torch's and Lightning's own samplers, which append samples of the beginning until all ranks have equally many, and
    for predict are made for one rank (see `Batches.sampler_kwargs`).
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates: list[Any] = [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]
    for sampler in candidates:
        if type(sampler) not in REPEATING or sampler.drop_last:
            continue
        if predicting and sampler.num_replicas == 1:
            sampler.rank, sampler.num_replicas = data_rank, data_size
        sampler.total_size = len(sampler.dataset)
        sampler.num_samples = len(range(sampler.rank, sampler.total_size, sampler.num_replicas))


def without_rows(output: Any, rows: int) -> Any:
    """What a step made of a padding batch: tensors with ``rows`` rows get none, everything else becomes None.

    Args:
        output: tensors, also in dicts, lists, tuples and named tuples.
        rows: sequences in the padding batch.
    """
    if isinstance(output, Tensor):
        return output[:0] if output.ndim > 0 and output.size(0) == rows else None
    if isinstance(output, dict):
        return type(output)({key: without_rows(value, rows) for key, value in output.items()})
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(*(without_rows(value, rows) for value in output))
    if isinstance(output, (list, tuple)):
        if len(output) == rows and not any(isinstance(value, Tensor) and value.ndim > 0 for value in output):
            return type(output)()  # one entry a sequence
        return type(output)(without_rows(value, rows) for value in output)
    return None


def rows_of(batch: Any) -> int | None:
    """Length of the first dimension of the first tensor in ``batch``; None without one."""
    values = batch.values() if hasattr(batch, "values") and not isinstance(batch, Tensor) else batch
    if isinstance(values, Tensor):
        return values.size(0) if values.ndim > 0 else None
    if isinstance(batch, str) or not hasattr(values, "__iter__"):
        return None
    return next((rows for value in values if (rows := rows_of(value)) is not None), None)


