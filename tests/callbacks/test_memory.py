"""`TrackedBytes` and `PeakMemoryMonitor` against tensors of known size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from lightning_longmoe.callbacks import PeakMemoryMonitor
from lightning_longmoe.callbacks.tracked_bytes import TrackedBytes
from tests.callbacks.small import Small, loader, trainer
from tests.callbacks.test_throughput import Recorder
from tests.pool import run_on_ranks

MIB = 2**20


def mib(count: int) -> torch.Tensor:
    return torch.zeros(count * MIB, dtype=torch.uint8)


def test_the_peak_is_the_most_that_was_alive_at_once() -> None:
    with TrackedBytes() as tracked:
        first = mib(3)
        second = mib(2)
        del first
        third = mib(1)
    assert tracked.peak == 5 * MIB
    assert tracked.current == 3 * MIB
    del second, third
    assert tracked.current == 0


def test_views_and_tensors_made_before_count_once() -> None:
    before = mib(2)
    with TrackedBytes() as tracked:
        tracked.add([before, before[10:], None, "text"])
        view = before.view(2, -1)[0]
        again = before.detach()
    assert tracked.peak == tracked.current == 2 * MIB
    del before, view
    assert tracked.current == 2 * MIB
    del again
    assert tracked.current == 0


def test_a_resized_storage_counts_what_it_holds_and_torch_is_left_as_it_was() -> None:
    resize = torch.UntypedStorage.resize_
    with TrackedBytes() as tracked:
        tensor = mib(4)
        tensor.untyped_storage().resize_(0)
        assert tracked.current == 0
        tensor.untyped_storage().resize_(6 * MIB)
        assert tracked.current == 6 * MIB
    assert torch.UntypedStorage.resize_ is resize


def peak_of_chain(recompute: bool, blocks: int = 8) -> int:
    def block(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).sin().sin().sin()

    x = torch.zeros(MIB // 4, requires_grad=True)  # 1 MiB
    with TrackedBytes() as tracked:
        tracked.add([x])
        hidden = x
        for _ in range(blocks):
            hidden = checkpoint(block, hidden, use_reentrant=False) if recompute else block(hidden)
        hidden.sum().backward()
    return tracked.peak


def test_recomputation_shows_as_a_lower_peak() -> None:
    # Kept: what 3 sines of each block save, and the end of the chain. Recomputed: one boundary for each block, and one
    # block at a time.
    assert peak_of_chain(recompute=False) >= (8 * 3 + 1) * MIB
    assert peak_of_chain(recompute=True) <= (8 + 8) * MIB


def hold_in_training(count: int) -> Any:
    return lambda stage: mib(count) if stage == "train" else None


def test_the_peak_of_a_step_is_logged(tmp_path: Path) -> None:
    recorder = Recorder()
    fitting = trainer(tmp_path, callbacks=[PeakMemoryMonitor(), recorder])
    fitting.fit(Small(hold_in_training(5)), loader(2))
    last = recorder.rows[-1]
    assert last["longmoe/peak_tracked_gib"] * 1024 == pytest.approx(5, abs=0.01)
    assert last["longmoe/peak_tracked_rank0_gib"] == last["longmoe/peak_tracked_gib"]


def test_a_failed_step_leaves_no_tracking_behind(tmp_path: Path) -> None:
    def fail(stage: str) -> None:
        raise RuntimeError("step")

    resize = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError, match="step"):
        trainer(tmp_path, callbacks=[PeakMemoryMonitor()]).fit(Small(fail), loader(2))
    assert torch.UntypedStorage.resize_ is resize
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def fit_with_unequal_memory(folder: str) -> dict[str, float]:
    rank = torch.distributed.get_rank()
    recorder = Recorder()
    fitting = trainer(folder, devices=2, strategy="longmoe", callbacks=[PeakMemoryMonitor(), recorder])
    fitting.fit(Small(hold_in_training(3 + 4 * rank)), loader(2))
    return recorder.rows[-1]


def test_the_largest_over_ranks_and_rank_0s_own_are_logged_on_every_rank(tmp_path: Path) -> None:
    for row in run_on_ranks(2, fit_with_unequal_memory, str(tmp_path)):
        assert row["longmoe/peak_tracked_gib"] * 1024 == pytest.approx(7, abs=0.01)
        assert row["longmoe/peak_tracked_rank0_gib"] * 1024 == pytest.approx(3, abs=0.01)


@pytest.mark.gpu
def test_on_cuda_the_allocators_peaks_are_logged(tmp_path: Path) -> None:
    recorder = Recorder()
    fitting = trainer(tmp_path, accelerator="gpu", callbacks=[PeakMemoryMonitor(), recorder])
    fitting.fit(Small(lambda stage: torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")), loader(2))
    last = recorder.rows[-1]
    assert last["longmoe/peak_memory_gib"] * 1024 == pytest.approx(64, abs=2)
    assert last["longmoe/peak_reserved_gib"] >= last["longmoe/peak_memory_gib"]
