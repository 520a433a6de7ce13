"""From documents to training samples: a stream of tokens, cut into windows of one length."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_longmoe.data.sources import Document

COUNT_AT_ONCE_TOKENS = 2**24


class TokenStream:
    """Documents one after the other, as one array that is never built.

    Args:
        documents: in order.
    """

    def __init__(self, documents: list[Document]) -> None:
        self._pieces = [document.tokens for document in documents]
        self._ends = list(accumulate(piece.size for piece in self._pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` (left out), int64, a copy."""
        out = np.empty(stop - start, dtype=np.int64)
        filled, index = 0, bisect_right(self._ends, start)
        while filled < out.size:
            piece = self._pieces[index]
            offset = start + filled - (self._ends[index] - piece.size)
            part = piece[offset : offset + out.size - filled]
            out[filled : filled + part.size] = part
            filled, index = filled + part.size, index + 1
        return out


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Non-overlapping windows of a stream; a last, shorter one is left out.

    A sample is ``{"input_ids": [S], "labels": [S]}``, int64, both the same tokens: labels are not shifted.

    Args:
        stream: the tokens.
        sequence_length: S.
    """

    def __init__(self, stream: TokenStream, sequence_length: int) -> None:
        self.stream = stream
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return len(self.stream) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        tokens = torch.from_numpy(self.stream.read(start, start + self.sequence_length))
        return {"input_ids": tokens, "labels": tokens.clone()}


class GlobalOrderSampler(DistributedSampler[int]):
    """One shuffled order for each (seed, epoch), of which data rank r of R reads samples r, r + R, ...

    So one process, and any number of data ranks, train the same samples in the same order. Samples at the end that do
    not make a whole batch on every rank are left out of the epoch.

    Args:
        dataset: anything with a length.
        num_replicas: the number of data ranks R.
        rank: the data rank r.
        batch_size: of each rank.
        seed: of the order.
        shuffle: False: the order of the dataset.
    """

    same_order_for_any_size = True

    def __init__(
        self,
        dataset: Dataset[dict[str, Tensor]],
        num_replicas: int,
        rank: int,
        *,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle=shuffle, seed=seed)
        batches = len(dataset) // (num_replicas * batch_size)  # type: ignore[arg-type]
        self.num_samples = batches * batch_size
        self.total_size = self.num_samples * num_replicas

    def __iter__(self) -> Iterator[int]:
        count = len(self.dataset)  # type: ignore[arg-type]
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(_seed_of(self.seed, self.epoch)))
        return iter(order[self.rank : self.total_size : self.num_replicas].tolist())


def _seed_of(seed: int, epoch: int) -> int:
    """Another seed for each pair; a sum would give (seed 1, epoch 0) and (seed 0, epoch 1) the same order."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest(), "big")


def split_documents(documents: list[Document], fraction: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Documents for training and for validation.

    Whole documents, in an order that depends on seed and name only, go to validation as long as they fit into
    ``fraction`` of all tokens; where none fits, the end of the largest document does.
    """
    target = int(fraction * sum(document.tokens.size for document in documents))
    if target == 0:
        return documents, []
    chosen: set[str] = set()
    taken = 0
    for document in sorted(documents, key=lambda d: hashlib.blake2b(f"{seed} {d.name}".encode()).digest()):
        if taken + document.tokens.size <= target:
            chosen.add(document.name)
            taken += document.tokens.size
    if chosen:
        return [d for d in documents if d.name not in chosen], [d for d in documents if d.name in chosen]
    largest = max(documents, key=lambda document: document.tokens.size)
    cut = largest.tokens.size - min(target, largest.tokens.size)
    head, tail = Document(largest.name, largest.tokens[:cut]), Document(largest.name, largest.tokens[cut:])
    return [head if document is largest else document for document in documents], [tail]


def unigram_entropy(documents: list[Document], vocab_size: int) -> float:
    """Entropy, in nats, of the token frequencies of all documents together."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        for start in range(0, document.tokens.size, COUNT_AT_ONCE_TOKENS):
            part = document.tokens[start : start + COUNT_AT_ONCE_TOKENS]
            counts += np.bincount(part, minlength=vocab_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
