"""`SequenceSplit`: each context rank's part of a batch of whole sequences, and whole sequences from all parts.

All ranks of a context group read the same batch. Labels are shifted before the split, so that a target across the
border of two parts is not lost. A length that the split cannot use is padded at the end, with tokens that are nobody's
target.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.structure import LABELS, with_part
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.context.order import Kind, arrange, context_order, required_multiple
from lightning_longmoe.models.shift import mark_shifted

POSITIONS = "position_ids"
DOCUMENTS = "document_ids"


class SequenceSplit:
    """Splits batches for one context rank.

    Args:
        config: which tensors run along the sequence, and along which dimension.
        kind, ulysses_size: of the attention.
        group: the context ranks, on the batches' device.
        ranks: all ranks, for a comparison of the first batch.
        groups: the context groups of all ranks.
        ignore_index: the label of padding.
        hook: the module's ``split_batch(batch, positions) -> batch``, where it has one: ``positions`` are those of this
            rank, -1 for padding.
    """

    def __init__(
        self,
        config: BatchConfig,
        kind: Kind,
        ulysses_size: int | None,
        *,
        group: dist.ProcessGroup,
        ranks: HostGroup,
        groups: Sequence[Sequence[int]],
        ignore_index: int = -100,
        hook: Callable[[Any, Tensor], Any] | None = None,
    ) -> None:
        self.config, self.kind, self.ulysses_size = config, kind, ulysses_size
        self.group, self.ranks, self.groups = group, ranks, groups
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.ignore_index = ignore_index
        self.hook = hook
        self._length = self._padded = 0
        self._compared: set[str] = set()

    def split(self, batch: Any, stage: str) -> Any:
        """This rank's part of a batch. A collective for the first batch of each stage.

        Raises:
            ValueError: ranks of a context group read different batches; a tensor runs along the sequence and is not
                named; the batch is no mapping.
        """
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"context_parallel_size={self.size} splits batches by the keys in BatchConfig.sequence_keys, and this"
                f" one is a {type(batch).__name__}. Return a dict from the collate function."
            )
        named = self._named(batch)
        if stage not in self._compared:
            self._compared.add(stage)
            self._require_same(named, stage)
        self._length = self._length_of(named)
        multiple = required_multiple(arrange(self.size, self.kind, self.ulysses_size))
        self._padded = -(-self._length // multiple) * multiple
        self._refuse_unnamed(batch, named)
        order = context_order(self._padded, self.size, self.kind, self.ulysses_size).view(self.size, -1)[self.rank]
        if self.hook is not None:
            return self.hook(batch, torch.where(order < self._length, order, -1))
        return self._split(batch, named, order)

    def _named(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        dim = self.config.sequence_dim
        values = {key: batch[key] for key in self.config.sequence_keys if key in batch}
        return {key: value for key, value in values.items() if isinstance(value, Tensor) and value.ndim > dim}

    def _length_of(self, named: Mapping[str, Tensor]) -> int:
        lengths = {key: value.size(self.config.sequence_dim) for key, value in named.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(
                f"The tensors along the sequence must have one length in dimension {self.config.sequence_dim}, and have"
                f" {lengths or 'none'}. BatchConfig(sequence_keys=...) names them, sequence_dim the dimension."
            )
        return next(iter(lengths.values()))

    def _refuse_unnamed(self, batch: Mapping[str, Any], named: Mapping[str, Tensor]) -> None:
        for key, value in batch.items():
            if key not in named and isinstance(value, Tensor) and self._length > 1 and self._length in value.shape[1:]:
                raise ValueError(
                    f"batch[{key!r}] {list(value.shape)} has a dimension of the sequence's length {self._length} and is"
                    f" not named in BatchConfig.sequence_keys {list(self.config.sequence_keys)}, so that it would stay"
                    " whole beside sequences that are split. Name it, or give the module a method"
                    " `split_batch(batch, positions)`."
                )

    def _split(self, batch: Mapping[str, Any], named: Mapping[str, Tensor], order: Tensor) -> Any:
        dim = self.config.sequence_dim
        changed: Any = batch
        for key, value in named.items():
            part = self._pad(key, value).index_select(dim, order.to(value.device))
            if getattr(value, "labels_shifted", False):
                part = mark_shifted(part)
            changed = with_part(changed, key, part)
        if POSITIONS not in named:
            like = next(iter(named.values()))
            shape = [1] * dim + [-1]
            positions = order.to(like.device).view(shape).expand(*like.shape[:dim], -1).contiguous()
            changed = {**changed, POSITIONS: positions} if type(changed) is dict else _with_new(changed, positions)
        return changed

    def _pad(self, key: str, value: Tensor) -> Tensor:
        missing = self._padded - self._length
        if missing == 0:
            return value
        fill = {LABELS: self.ignore_index, DOCUMENTS: -1}.get(key, 0)
        shape = list(value.shape)
        shape[self.config.sequence_dim] = missing
        return torch.cat([value, value.new_full(shape, fill)], dim=self.config.sequence_dim)

    def _require_same(self, named: Mapping[str, Tensor], stage: str) -> None:
        fingerprint = 0
        for key, tensor in sorted(named.items()):
            data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            fingerprint = zlib.crc32(f"{key}{list(tensor.shape)}".encode() + data, fingerprint)
        prints = self.ranks.every(fingerprint)
        for group in self.groups:
            if len({prints[rank] for rank in group}) > 1:
                raise ValueError(
                    f"The ranks {list(group)} share each sequence, and read different first {stage} batches. Deal the"
                    " data by `trainer.strategy.data_rank` of `data_size` instead of by rank of world size, and draw no"
                    " random numbers that differ between them while loading."
                )

    def join(self, output: Any) -> Any:
        """Whole sequences in their own order, of tensors that hold one entry for each position of this rank's part."""
        dim, part = self.config.sequence_dim, self._padded // self.size

        def whole(tensor: Tensor) -> Tensor:
            if tensor.ndim <= dim or tensor.size(dim) != part:
                return tensor
            parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
            dist.all_gather(parts, tensor.contiguous(), group=self.group)
            order = context_order(self._padded, self.size, self.kind, self.ulysses_size).argsort()
            joined = torch.cat(parts, dim=dim).index_select(dim, order.to(tensor.device))
            return joined.narrow(dim, 0, self._length)

        return apply_to_collection(output, Tensor, whole)


def _with_new(batch: Any, positions: Tensor) -> Any:
    try:
        return type(batch)({**batch, POSITIONS: positions})
    except TypeError:
        raise ValueError(
            f"A batch of type {type(batch).__name__} cannot be given {POSITIONS!r}, which parts of a sequence need."
            f" Return a dict from the collate function, or put {POSITIONS!r} into the batch."
        ) from None
