"""`ThroughputMonitor`: global tokens per second, seconds per step, tokens so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_longmoe.strategy import LongMoEStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import Strategy


class ThroughputMonitor(Callback):
    """Shows tokens/s in the progress bar and logs ``longmoe/tokens_per_s``, ``longmoe/step_s`` and ``longmoe/tokens``.

    Tokens are global and counted after the strategy has split the batch, so ranks that share one sequence count it
    once. Time is wall time from the end of one optimizer step to the end of the next: waiting for data and writing
    checkpoints count, validation does not. Ranks exchange their figures only at the steps that Lightning logs
    (``log_every_n_steps``), in one small all-reduce; ``longmoe/tokens`` goes into checkpoints and continues on resume.

    Args:
        window: how many of the last optimizer steps the rates are averaged over.
        tokens: given a batch as this rank's ``training_step`` gets it, its number of tokens. None: the elements of
            ``batch["input_ids"]``.

    Raises:
        ValueError: ``window`` is below 1, or a batch has no ``input_ids`` and no ``tokens`` was given.
    """

    def __init__(self, window: int = 20, tokens: Callable[[Any], int] | None = None) -> None:
        if window < 1:
            raise ValueError(f"ThroughputMonitor(window={window}) is not allowed: average over at least 1 step.")
        self.window = window
        self._count = tokens or count_input_ids
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._global_tokens = 0  # of all ranks, up to the last exchange
        self._unshared_tokens = 0  # of this rank, since then
        self._step_tokens = 0
        self._mark_s: float | None = None
        self._paused_at_s: float | None = None
        self._last_step = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._steps.clear()
        self._step_tokens = 0
        self._last_step = trainer.global_step
        self._mark_s = time.perf_counter()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._paused_at_s = time.perf_counter()

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._mark_s is not None and self._paused_at_s is not None:
            self._mark_s += time.perf_counter() - self._paused_at_s

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        tokens = self._count(batch)
        self._step_tokens += tokens
        self._unshared_tokens += tokens
        step = trainer.global_step
        if step == self._last_step:  # a micro-batch inside an accumulation window
            return
        assert self._mark_s is not None
        now_s = time.perf_counter()
        self._steps.append((now_s - self._mark_s, self._step_tokens))
        self._mark_s, self._step_tokens = now_s, 0
        every = trainer.log_every_n_steps or self.window  # type: ignore[attr-defined]
        if len(self._steps) == 1 or step // every != self._last_step // every:
            self._log(trainer, pl_module)
        self._last_step = step

    def _log(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Exchange figures over the ranks and log them: all ranks come here at the same step, and log the same."""
        seconds, tokens = (sum(column) for column in zip(*self._steps, strict=True))
        ours = torch.tensor([seconds, tokens, self._unshared_tokens], dtype=torch.float64)
        total = trainer.strategy.reduce(ours.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        repeated = times_counted(trainer.strategy)
        self._global_tokens += round(total[2] / repeated)
        self._unshared_tokens = 0
        window_s = total[0] / trainer.world_size
        tokens_per_s = total[1] / repeated / window_s
        figures = {
            "longmoe/tokens_per_s": tokens_per_s,
            "longmoe/step_s": window_s / len(self._steps),
            "longmoe/tokens": float(self._global_tokens),
        }
        for key, value in figures.items():
            # float64: a float32 cannot count past 2^24 tokens.
            module.log(key, torch.tensor(value, dtype=torch.float64), on_step=True, on_epoch=False, batch_size=1)
        module.log("tokens/s", round(tokens_per_s), prog_bar=True, logger=False, on_step=True, batch_size=1)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Tokens since the last exchange are known of this rank only, and a save is no place for another collective.
        return {"tokens": self._global_tokens, "unshared_tokens": self._unshared_tokens}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._global_tokens = state_dict["tokens"]
        self._unshared_tokens = state_dict["unshared_tokens"]


def count_input_ids(batch: Any) -> int:
    """Elements of ``batch["input_ids"]``.

    Raises:
        ValueError: the batch is no mapping with that key.
    """
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        found = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"ThroughputMonitor counts the elements of batch['input_ids'], and this batch is {found}. Give"
            " ThroughputMonitor(tokens=function), a function of the batch that returns its number of tokens."
        )
    return batch["input_ids"].numel()


def times_counted(strategy: Strategy) -> int:
    """How many ranks of the world count the same token: those that a stock strategy hands the same batch."""
    if isinstance(strategy, LongMoEStrategy):
        return 1  # ranks that share a sequence hold different parts of it
    kwargs = getattr(strategy, "distributed_sampler_kwargs", None)
    return getattr(strategy, "world_size", 1) // kwargs["num_replicas"] if kwargs else 1
