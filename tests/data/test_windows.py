"""A stream reads across documents, windows do not overlap, and one order serves any number of data ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from lightning_longmoe.data import Document, GlobalOrderSampler, TokenStream, WindowDataset
from lightning_longmoe.data.windows import split_documents, unigram_entropy


def document(name: str, *tokens: int) -> Document:
    return Document(name, np.array(tokens, dtype=np.uint8))


def documents(*sizes: int) -> list[Document]:
    starts = np.cumsum([0, *sizes])
    return [document(f"{i}", *range(starts[i], starts[i + 1])) for i in range(len(sizes))]


def test_a_stream_is_the_documents_one_after_the_other() -> None:
    stream = TokenStream(documents(3, 1, 5, 2))
    assert len(stream) == 11
    for start in range(11):
        for stop in range(start, 12):
            assert stream.read(start, stop).tolist() == list(range(start, stop))
    assert stream.read(2, 8).dtype == np.int64
    assert len(TokenStream([])) == 0


def test_windows_do_not_overlap_and_labels_are_not_shifted() -> None:
    windows = WindowDataset(TokenStream(documents(3, 1, 5, 2)), 4)
    assert len(windows) == 2
    assert [windows[i]["input_ids"].tolist() for i in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    sample = windows[1]
    assert torch.equal(sample["labels"], sample["input_ids"])
    assert sample["labels"].dtype == torch.int64
    sample["labels"][0] = -100  # masking labels must not touch the inputs
    assert sample["input_ids"][0] == 4
    with pytest.raises(IndexError):
        windows[2]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
@pytest.mark.parametrize("epoch", [0, 1])
def test_global_sample_i_goes_to_rank_i_modulo_ranks(replicas: int, epoch: int) -> None:
    data = range(26)
    alone = GlobalOrderSampler(data, 1, 0, seed=4)  # type: ignore[arg-type]
    alone.set_epoch(epoch)
    order = list(alone)
    assert sorted(order) == list(data)
    ranks = [GlobalOrderSampler(data, replicas, r, batch_size=2, seed=4) for r in range(replicas)]  # type: ignore[arg-type]
    for sampler in ranks:
        sampler.set_epoch(epoch)
    dealt = [list(sampler) for sampler in ranks]
    assert {len(part) for part in dealt} == {26 // (2 * replicas) * 2} == {len(ranks[0])}
    joined = [number for together in zip(*dealt, strict=True) for number in together]
    assert joined == order[: len(joined)]


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = GlobalOrderSampler(range(50), 1, 0, seed=seed)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        torch.manual_seed(epoch)
        return list(sampler)

    assert order(1, 2) == order(1, 2)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    assert list(GlobalOrderSampler(range(5), 1, 0, shuffle=False)) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]


def test_whole_documents_validate_where_they_fit() -> None:
    given = documents(*[10] * 20)
    training, validation = split_documents(given, 0.1, seed=0)
    assert len(validation) == 2
    assert sorted(d.name for d in training + validation) == sorted(d.name for d in given)
    assert [d.name for d in training] == [d.name for d in given if d in training]  # the order stays
    assert split_documents(list(reversed(given)), 0.1, seed=0)[1] == list(reversed(validation))
    assert {d.name for d in split_documents(given, 0.1, seed=1)[1]} != {d.name for d in validation}


def test_the_end_of_the_largest_document_validates_where_none_fits() -> None:
    given = documents(20, 60, 20)
    training, validation = split_documents(given, 0.1, seed=0)
    assert [d.tokens.size for d in training] == [20, 50, 20]
    assert validation[0].tokens.tolist() == list(range(70, 80))


def test_no_fraction_no_validation() -> None:
    given = documents(20, 60)
    assert split_documents(given, 0.0, seed=0) == (given, [])


def test_unigram_entropy_is_that_of_the_token_shares() -> None:
    text = [document("a", 1, 1, 1, 2), document("b", 2, 3, 3, 3)]
    expected = -(2 * 3 / 8 * math.log(3 / 8) + 2 / 8 * math.log(2 / 8))
    assert unigram_entropy(text, 256) == pytest.approx(expected, rel=1e-14)
    assert unigram_entropy([document("a", *range(16))], 256) == pytest.approx(math.log(16), rel=1e-14)
