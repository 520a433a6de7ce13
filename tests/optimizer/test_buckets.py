"""Every element of every parameter is in exactly one piece, cut where no bit changes."""

from __future__ import annotations

import pytest
import torch

from lightning_longmoe.optimizer.buckets import ALIGNMENT, cut


@pytest.mark.parametrize("bucket_numel", [1, 15, 16, 17, 100, 1000, 10**9])
def test_pieces_cover_all_elements_once_and_buckets_all_of_the_slab(bucket_numel: int) -> None:
    generator = torch.Generator().manual_seed(bucket_numel)
    for _ in range(50):
        numels = torch.randint(0, 300, (12,), generator=generator).tolist()
        buckets = cut(numels, bucket_numel)
        pieces = [piece for bucket in buckets for piece in bucket.pieces]
        for index, numel in enumerate(numels):
            mine = [piece for piece in pieces if piece.index == index]
            assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine)][: len(mine)]
            assert sum(piece.numel for piece in mine) == numel
        assert all(piece.start % ALIGNMENT == piece.offset % ALIGNMENT == 0 for piece in pieces)
        assert all(bucket.numel <= max(bucket_numel, ALIGNMENT) for bucket in buckets)
        assert all(a.stop == b.start for a, b in zip(buckets, buckets[1:], strict=False))
        starts = [piece.offset - piece.start for piece in pieces if piece.start == 0]
        assert starts == sorted(set(starts))


def test_a_parameter_that_fits_into_a_bucket_is_not_cut() -> None:
    buckets = cut([60, 60, 200, 10], 100)
    assert [[(piece.index, piece.numel) for piece in bucket.pieces] for bucket in buckets] == [
        [(0, 60)],
        [(1, 60), (2, 32)],
        [(2, 96)],
        [(2, 72), (3, 10)],
    ]


def test_nothing_to_update_needs_no_bucket() -> None:
    assert cut([], 10) == []
    assert cut([0, 0], 10) == []
