"""What the ring holds and sends: counted, measured by torch, and predicted without allocating."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_longmoe.config import RingDTP
from lightning_longmoe.vocabulary import recording, ring_cross_entropy
from lightning_longmoe.vocabulary.dry import ProjectionShape, dry_ring, dry_standard
from lightning_longmoe.vocabulary.spans import Pieces, VocabularySplit, choose_mode, tiles
from tests.pool import run_on_ranks
from tests.vocabulary.cases import Case, run_call

GIB = 2**30
MODES = ("weights", "activations")


# ---------------------------------------------------------------------------------------------------------------------
# Bytes on the wire
# ---------------------------------------------------------------------------------------------------------------------
def count_bytes(case: Case) -> dict[str, Any]:
    """What the record says, and what really went through ``batch_isend_irecv``."""
    real, batches = dist.batch_isend_irecv, []

    def counting(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append(sum(op.tensor.nbytes for op in operations if op.op is dist.isend))
        return real(operations)

    dist.batch_isend_irecv = counting
    try:
        with recording() as record:
            loss, _ = run_call(case)
            forward_bytes = sum(batches)
            if loss.requires_grad:
                loss.backward(torch.ones_like(loss))
    finally:
        dist.batch_isend_irecv = real
    return {
        "real": (forward_bytes, sum(batches) - forward_bytes),
        "record": (record.forward.sent_bytes, record.backward.sent_bytes),
        "hops": (record.forward.hops, record.backward.hops),
        "batches": len(batches),
    }


def weights_formula(case: Case) -> tuple[int, int]:
    rows, size = -(-case.vocab // case.ranks), case.dtype.itemsize
    columns = case.hidden + case.bias
    wide = max(4, size) * (0 if "weight" in case.frozen else columns)
    return tuple((case.ranks - 1) * rows * n for n in (columns * size, columns * size + wide))  # type: ignore[return-value]


def activations_formula(case: Case) -> tuple[int, int]:
    """For equal token counts."""
    size, smoothing = case.dtype.itemsize, "label_smoothing" in case.options
    wide = max(4, size)
    forward = case.hidden * size + 8 + (3 + smoothing) * wide
    backward = case.hidden * (size + (0 if "x" in case.frozen else wide)) + 8 + (3 + smoothing) * wide
    return tuple((case.ranks - 1) * case.tokens[0] * n for n in (forward, backward))  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_send_shards_forward_and_shards_with_accumulators_backward(ranks: int) -> None:
    base = Case((7,) * ranks, vocab=36, dtype=torch.float32)
    cases = [base, base.but(vocab=37), base.but(vocab=2), base.but(bias=True), base.but(dtype=torch.bfloat16)]
    cases += [base.but(frozen=("weight",)), base.but(tokens=(0,) * (ranks - 1) + (30,)), base.but(dtype=torch.float64)]
    for case in cases:
        for result in run_on_ranks(ranks, count_bytes, case):
            assert result["record"] == result["real"] == weights_formula(case), case


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_activations_send_tokens_states_and_their_gradients(ranks: int) -> None:
    base = Case((7,) * ranks, mode="activations", dtype=torch.float32)
    cases = [base, base.but(vocab=2), base.but(dtype=torch.bfloat16), base.but(frozen=("x",)), base.but(bias=True)]
    cases += [base.but(options={"label_smoothing": 0.1})]
    for case in cases:
        for result in run_on_ranks(ranks, count_bytes, case):
            assert result["record"] == result["real"] == activations_formula(case), case


@pytest.mark.parametrize("mode", MODES)
def test_number_of_hops_is_the_same_on_all_ranks(mode: str) -> None:
    for tokens in ((0, 0, 0, 9), (4, 4, 4, 4), (1, 30, 2, 0)):
        results = run_on_ranks(4, count_bytes, Case(tokens, mode=mode))
        assert len({result["hops"] for result in results}) == 1


def test_a_frozen_head_in_evaluation_has_no_backward() -> None:
    for result in run_on_ranks(2, count_bytes, Case((5, 5), frozen=("x", "weight"))):
        assert result["real"][1] == 0


# ---------------------------------------------------------------------------------------------------------------------
# Temporaries and peaks of real runs
# ---------------------------------------------------------------------------------------------------------------------
class Allocations(TorchDispatchMode):
    """Sizes of all storages that operations make while it is entered."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.seen = {t.untyped_storage().data_ptr() for t in known}
        self.alive: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.seen:
                self.seen.add(leaf.untyped_storage().data_ptr())
                self.alive.append(leaf)
                self.sizes.append(leaf.untyped_storage().nbytes())
        return result


LARGE = {
    "tokens": (96, 96),
    "vocab": 512,
    "hidden": 24,
    "tile": (16, 32),
    "bias": True,
    "options": {"logit_softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.1},
}


def allocations(case: Case) -> tuple[list[int], int]:
    group = dist.group.WORLD
    joined = case.joined()
    x = joined["x"][case.rows(dist.get_rank())].clone().requires_grad_()
    weight = case.shard_of(joined["weight"], dist.get_rank()).requires_grad_()
    bias = case.shard_of(joined["bias"], dist.get_rank()).requires_grad_()
    targets = joined["targets"][case.rows(dist.get_rank())].clone()
    with recording() as record, Allocations([x, weight, bias, targets]) as seen:
        loss = ring_cross_entropy(
            x, weight, targets, group=group, vocab_size=case.vocab, config=case.config, bias_shard=bias, **case.options
        )
        torch.autograd.grad(loss, (x, weight, bias))
    return sorted(seen.sizes), record.largest_temporary_bytes


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_temporary_is_larger_than_a_tile_or_a_piece(mode: str, dtype: torch.dtype) -> None:
    """Never [N, V], [N, V/P], [V, H] or [V/P, H], but for the two gradients that are returned."""
    case = Case(mode=mode, dtype=dtype, **LARGE)
    tokens, vocab, hidden = case.tokens[0], case.vocab, case.hidden
    shard = vocab // case.ranks * hidden
    for sizes, largest in run_on_ranks(2, allocations, case):
        limit = 4 * max(16 * 32, 16 * hidden, 32 * hidden)  # a tile, or a piece with its accumulator
        assert largest <= limit < 4 * min(tokens * vocab // case.ranks, tokens * hidden, shard)
        above = [size for size in sizes if size > limit]
        gradients = sorted([4 * tokens * hidden, 4 * shard])
        if dtype == torch.bfloat16:  # accumulated in float32, returned in bfloat16
            gradients = sorted([*gradients, *(s // 2 for s in gradients if s // 2 > limit)])
        assert above == gradients


def measured(mode: str, ranks_tokens: int, vocab: int, hidden: int) -> tuple[int, int, dict[str, int]]:
    """Peak by torch's MemTracker and by the ledger, inputs included; and the ledger's largest by name."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = VocabularySplit(vocab, ranks).rows(rank)
    x = torch.randn(ranks_tokens, hidden, requires_grad=True)
    weight = torch.randn(rows, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (ranks_tokens,))
    config = RingDTP(mode=mode, token_tile=64, vocab_tile=256)  # type: ignore[arg-type]
    tracker = MemTracker()
    tracker.track_external(x, weight, targets)
    with tracker, recording() as record:
        loss = ring_cross_entropy(x, weight, targets, group=dist.group.WORLD, vocab_size=vocab, config=config)
        loss.backward()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return int(peak), record.ledger.peak_bytes, dict(record.ledger.largest)


def measured_standard(tokens: int, vocab: int, hidden: int) -> int:
    x = torch.randn(tokens, hidden, requires_grad=True)
    weight = torch.randn(vocab, hidden, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    tracker = MemTracker()
    tracker.track_external(x, weight, targets)
    with tracker:
        F.cross_entropy(F.linear(x, weight), targets).backward()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


@pytest.mark.parametrize("mode", MODES)
def test_torchs_memory_tracker_sees_the_peak_that_the_ledger_books(mode: str) -> None:
    """The paper's proportions at a scale of 1 : 64 in N and V, on four ranks."""
    tokens, vocab, hidden = 256, 3125, 112
    standard = measured_standard(tokens, vocab, hidden)
    booked_standard = dry_standard(ProjectionShape(tokens=tokens, hidden=hidden, vocab_size=vocab)).peak_bytes
    assert abs(standard - booked_standard) <= 0.01 * standard
    shape = ProjectionShape(tokens=tokens, hidden=hidden, vocab_size=vocab, ranks=4)
    config = RingDTP(mode=mode, token_tile=64, vocab_tile=256)  # type: ignore[arg-type]
    for rank, (peak, booked, largest) in enumerate(run_on_ranks(4, measured, mode, tokens, vocab, hidden)):
        assert abs(peak - booked) <= 0.03 * peak
        dry = dry_ring(shape, config, rank).ledger
        assert (booked, largest) == (dry.peak_bytes, dry.largest)
        assert peak <= 0.26 * standard


@pytest.mark.parametrize("mode", MODES)
def test_a_dry_run_books_what_a_run_books_to_the_byte(mode: str) -> None:
    config = {"token_tile": 5, "vocab_tile": 7}
    for options, extra in (({}, {}), ({"logit_softcap": 2.0, "label_smoothing": 0.1}, {"bias": True})):
        case = Case((13, 13, 13), vocab=41, mode=mode, dtype=torch.float32, tile=(5, 7), options=options, **extra)
        shape = ProjectionShape(
            tokens=13,
            hidden=case.hidden,
            vocab_size=41,
            ranks=3,
            softcap=options.get("logit_softcap"),
            label_smoothing=bool(options),
            **extra,
        )
        for rank, (booked, largest, sent) in enumerate(run_on_ranks(3, booked_by, case)):
            dry = dry_ring(shape, RingDTP(mode=mode, **config), rank)  # type: ignore[arg-type]
            assert (booked, largest) == (dry.ledger.peak_bytes, dry.ledger.largest)
            assert sent == (dry.forward_bytes, dry.backward_bytes)


def booked_by(case: Case) -> tuple[int, dict[str, int], tuple[int, int]]:
    with recording() as record:
        loss, _ = run_call(case)
        loss.backward()
    return (
        record.ledger.peak_bytes,
        dict(record.ledger.largest),
        (record.forward.sent_bytes, record.backward.sent_bytes),
    )


def test_a_frozen_head_holds_no_gradient_of_it() -> None:
    shape = {"tokens": 1024, "hidden": 256, "vocab_size": 4096, "ranks": 4}
    trained, frozen = (dry_ring(ProjectionShape(**shape, frozen=f)) for f in (False, True))
    assert trained.ledger.largest["gradients"] - frozen.ledger.largest["gradients"] == 1024 * 256 * 4
    assert frozen.backward_bytes < trained.backward_bytes or trained.mode == "activations"


# ---------------------------------------------------------------------------------------------------------------------
# The paper's sizes, dry
# ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("ranks", "tokens", "mode", "standard_gib", "saved"),
    [
        (8, 16384, "activations", 42.462, 0.91),
        (8, 32768, "weights", 79.521, 0.93),
        (4, 16384, "activations", 42.462, 0.87),
    ],
)
def test_peaks_at_the_papers_sizes(ranks: int, tokens: int, mode: str, standard_gib: float, saved: float) -> None:
    """arXiv 2609.14306, Tables 2 and 10: 82.8 %, 86.6 % and 72.9 % saved there."""
    shape = ProjectionShape(tokens=tokens, hidden=7168, vocab_size=200_000, ranks=ranks)
    standard = dry_standard(shape).peak_bytes
    assert abs(standard / GIB - standard_gib) <= 0.1
    ring = dry_ring(shape)
    assert ring.mode == mode
    assert 1 - ring.ledger.peak_bytes / standard >= saved
    peaks = {dry_ring(shape, rank=rank).ledger.peak_bytes for rank in range(ranks)}
    assert max(peaks) - min(peaks) <= 0.001 * max(peaks)


@pytest.mark.parametrize(
    ("ranks", "tokens", "gib"), [(8, 16384, 7.322), (8, 32768, 10.622), (4, 16384, 11.5194)], ids=str
)
def test_peaks_are_less_than_half_of_the_papers(ranks: int, tokens: int, gib: float) -> None:
    """A ring that moves whole shards or batches and holds strips [N, V/P] peaks at ``gib`` (the same tables)."""
    shape = ProjectionShape(tokens=tokens, hidden=7168, vocab_size=200_000, ranks=ranks)
    assert dry_ring(shape).ledger.peak_bytes <= 0.5 * gib * GIB


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic of the cuts
# ---------------------------------------------------------------------------------------------------------------------
def test_shards_are_those_of_torch_chunk() -> None:
    for vocab in range(1, 40):
        for ranks in range(1, 6):
            split, chunks = VocabularySplit(vocab, ranks), torch.arange(vocab).chunk(ranks)
            sizes = [len(c) for c in chunks] + [0] * (ranks - len(chunks))
            assert [split.rows(rank) for rank in range(ranks)] == sizes
            assert [split.start(rank) for rank in range(len(chunks))] == [int(c[0]) for c in chunks]


def test_pieces_and_tiles_cover_every_row_once() -> None:
    for sizes in ((0, 0), (1, 0), (7, 3), (16, 16), (100, 1)):
        for tile in (1, 3, 8, 1000):
            pieces = Pieces.of(sizes, tile, even=True)
            assert pieces.count % 2 == 0
            for owner, size in enumerate(sizes):
                spans = [pieces.span(owner, piece) for piece in range(pieces.count)]
                assert [i for span in spans for i in range(*span)] == list(range(size))
                assert all(span.length <= min(tile, pieces.longest) for span in spans)
            assert [i for span in tiles(sizes[0], tile) for i in range(*span)] == list(range(sizes[0]))


def test_an_explicit_mode_wins_over_the_rule() -> None:
    split = VocabularySplit(100, 4)
    assert [choose_mode(RingDTP(), n, split) for n in (0, 25, 26)] == ["activations", "activations", "weights"]
    assert choose_mode(RingDTP(mode="weights"), 0, split) == "weights"
    assert choose_mode(RingDTP(mode="activations"), 99, split) == "activations"
