"""`Batches`: what a strategy does to loaders and batches, in the order in which Lightning asks for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from lightning_longmoe._compat import (
    evaluation_loaders,
    fetch_again,
    predictions,
    restore_loaders_again,
    weigh_nothing,
)
from lightning_longmoe.batches.evaluation import EvaluationLoader, deal_without_repeats, rows_of, without_rows
from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.labels import Labels
from lightning_longmoe.batches.loader import seed_workers
from lightning_longmoe.batches.resume import Resume, batch_samples
from lightning_longmoe.batches.split import SequenceSplit
from lightning_longmoe.batches.structure import LABELS
from lightning_longmoe.batches.training import Pass, StatefulWindowedLoader, WindowedLoader
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.runtime.reduction import WindowScale
from lightning_longmoe.runtime.rng import rng_state

if TYPE_CHECKING:
    import lightning.pytorch as pl

THREE_WAYS_OUT = (
    "Either (1) train from one dataloader whose batches hold token `labels`, or (2) give the LightningModule a"
    " method `count_valid_targets(batch) -> int`, or (3) set BatchConfig(normalize='microbatch'), Lightning's mean of"
    " the micro-batches' means, or accumulate_grad_batches=1."
)


class Batches:
    """Loaders and batches of one ``fit``, ``validate``, ``test`` or ``predict``.

    Args:
        config: what the user set.
        trainer: the Trainer that runs, with its module.
        head: whether the module holds a `CausalLMHead`: only then labels are shifted and windows counted.
        ignore_index: the label that is no target.
        data_rank: which part of the data this rank reads.
        data_size: in how many parts the data is dealt.
        ranks: all ranks. None: this process alone.
        split: makes a context rank's part of each batch; None: sequences stay whole.
    """

    def __init__(
        self,
        config: BatchConfig,
        trainer: pl.Trainer,
        *,
        head: bool,
        ignore_index: int = -100,
        data_rank: int = 0,
        data_size: int = 1,
        ranks: HostGroup | None = None,
        split: SequenceSplit | None = None,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.head = head
        self.data_rank = data_rank
        self.data_size = data_size
        self.ranks = ranks or HostGroup()
        self.split = split
        self.module = trainer.lightning_module
        hook = getattr(self.module, "count_valid_targets", None)
        self.labels = Labels(config, active=head, ignore_index=ignore_index, count_hook=hook)
        self.resume = Resume(trainer, data_size)
        self.padding = False
        self._checked: set[tuple[str, ...]] = set()
        self._checked_targets: set[tuple[str, ...]] = set()
        self._in_step = False
        self._window: tuple[Pass, int, WindowScale] | None = None
        self._told_empty = False
        self._evaluated: dict[int, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Batches:
        return self  # heads and embeddings of a copied module belong to the same run

    # ------------------------------------------------------------------------------------------------------- loaders
    def wrap(self, dataloader: Any) -> Any:
        """For ``process_dataloader``. A collective."""
        seed_workers(dataloader, self.data_rank)
        if self.trainer.state.stage != RunningStage.TRAINING:
            deal_without_repeats(dataloader, self.data_rank, self.data_size, self.trainer.predicting)
            return EvaluationLoader(dataloader, labels=self.labels, ranks=self.ranks)
        stateful = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
        return (StatefulWindowedLoader if stateful else WindowedLoader)(
            dataloader,
            labels=self.labels,
            ranks=self.ranks,
            resume=self.resume,
            position=self._position,
            count=self._counts_windows,
        )

    def sampler_kwargs(self) -> dict[str, Any]:
        """For ``distributed_sampler_kwargs``: how Lightning deals the samples.

        For predict its sampler refuses fewer samples than ranks, so it deals to one rank, and `wrap` deals further.
        """
        if self.trainer.predicting:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    @property
    def _counts_windows(self) -> bool:
        return self.head and self.config.normalize == "window"

    def _training_loaders(self) -> list[WindowedLoader]:
        loaders = self.trainer.train_dataloader
        if loaders is None:
            return []
        flat = CombinedLoader(loaders, "max_size").flattened
        return [loader for loader in flat if isinstance(loader, WindowedLoader)]

    def _position(self, loader: WindowedLoader) -> int:
        return next((i for i, other in enumerate(self._training_loaders()) if other is loader), 0)

    # ------------------------------------------------------------------------------------------------------- batches
    def prepare(self, batch: Any, dataloader_idx: int = 0) -> Any:
        """For ``batch_to_device``, after the transfer: the batch with its labels shifted.

        Raises:
            ValueError: the first batch of a stage shows that ``labels_shifted`` is set wrongly.
        """
        stage = self._stage
        self.padding = False
        if stage != RunningStage.TRAINING:
            index = self._evaluated.get(dataloader_idx, 0)
            self._evaluated[dataloader_idx] = index + 1
            self.padding = self._is_padding(dataloader_idx, index)
        prepared = self.labels.prepare(batch)
        if self._kind not in self._checked and not self.padding:
            self._checked.add(self._kind)
            self.labels.check(batch, stage)
        return prepared if self.split is None else self._split(prepared, stage)

    def _split(self, batch: Any, stage: str) -> Any:
        assert self.split is not None
        part = self.split.split(batch, stage)
        self.labels.targets.begin([replace(one, targets=part[LABELS]) for one in self.labels.targets.prepared])
        return part

    def check_targets(self, targets: Tensor | None) -> None:
        """For a head's ``check_targets``: looks at the losses of each stage until one has told whether it is right.

        Raises:
            ValueError: the targets were shifted twice, or not at all.
        """
        if not self._in_step:
            return
        self.labels.targets.note_call(targets)
        if targets is not None and self._kind not in self._checked_targets and self.labels.check_targets(targets):
            self._checked_targets.add(self._kind)

    def note_look_up(self, embedding: Any, arguments: tuple[Any, ...]) -> None:
        """The forward pre-hook of the embeddings: what the model sees, to compare targets with."""
        if self._in_step and arguments:
            self.labels.targets.note_look_up(arguments[0])

    def begin_step(self) -> None:
        """Before each of the four steps. What the module logs of a padding batch weighs nothing in a mean."""
        self._in_step = True
        if self.padding and not self.trainer.predicting:
            weigh_nothing(self.trainer)

    def end_step(self, output: Any) -> None:
        """After each of the four steps.

        Raises:
            ValueError: a loss may have been taken of labels that were shifted twice.
        """
        self._in_step = False
        training = self.trainer.state.stage == RunningStage.TRAINING
        skipped = training and output is None and self.module.automatic_optimization
        if not skipped and not self.trainer.predicting:
            self.labels.targets.require_taken(f"the {self._stage} step", only_with_logits=not training)
        self.labels.targets.begin([])

    @property
    def _kind(self) -> tuple[str, ...]:
        """The stage, and where the batch in work holds labels."""
        return (self._stage, *(one.found.path for one in self.labels.targets.prepared))

    @property
    def _stage(self) -> str:
        stage = self.trainer.state.stage
        return "unknown" if stage is None else str(stage.value)

    # ------------------------------------------------------------------------------------------------------- windows
    def next_window(self, batch_idx: int) -> WindowScale | None:
        """For ``on_train_batch_start``: the window of the training batch ``batch_idx``; None where none is counted.

        A window is the A = ``accumulate_grad_batches`` micro-batches of one optimizer step, fewer at the end of an
        epoch or after a resume within one. A collective at the first batch of each window.

        Raises:
            ValueError: valid targets cannot be counted ahead.
        """
        self.resume.finish()
        loaders = self._training_loaders()
        for loader in loaders:
            if loader.current is not None:
                loader.current.start_training(batch_idx)
        accumulate = self.trainer.accumulate_grad_batches
        if accumulate == 1 or not self._counts_windows:
            return None
        self._require_one_loader(loaders, accumulate)
        current = loaders[0].current
        assert current is not None
        if self._window is None or self._window[0] is not current or batch_idx >= self._window[1]:
            end = min(batch_idx - batch_idx % accumulate + accumulate, self.trainer.num_training_batches)
            valid = self._count(current, int(end) - batch_idx, accumulate)
            self._window = (current, int(end), WindowScale(accumulate, valid))
        return self._window[2]

    def _count(self, current: Pass, count: int, accumulate: int) -> int:
        local = current.valid_targets(count)
        unknown = sum(valid is None for valid in local)
        total, unknown = self.ranks.sum([sum(valid or 0 for valid in local), unknown])
        if unknown:
            raise ValueError(
                f"accumulate_grad_batches={accumulate} with BatchConfig(normalize='window') needs the valid targets of"
                f" a window ahead, and the training batches show no labels to count. {THREE_WAYS_OUT}"
            )
        if total == 0 and not self._told_empty:
            self._told_empty = True
            rank_zero_warn("An accumulation window holds no valid label on any rank: its loss and gradients are 0.")
        return total * self.data_size // self.ranks.size  # ranks that share data counted the same labels

    def _require_one_loader(self, loaders: list[WindowedLoader], accumulate: int) -> None:
        step = self.module.training_step
        by_iterator = is_param_in_hook_signature(step, "dataloader_iter", explicit=True)
        if len(loaders) != 1 or by_iterator:
            what = "training_step takes a dataloader_iter" if by_iterator else f"there are {len(loaders)} of them"
            raise ValueError(
                f"accumulate_grad_batches={accumulate} with BatchConfig(normalize='window') counts the valid targets of"
                f" a window ahead in the one training dataloader, and {what}. {THREE_WAYS_OUT}"
            )

    # ---------------------------------------------------------------------------------------------------- evaluation
    def on_evaluation_start(self) -> None:
        """For ``on_validation_start``, ``on_test_start`` and ``on_predict_start``."""
        self._evaluated.clear()
        self.padding = False

    def prediction(self, output: Any, batch: Any) -> Any:
        """For ``predict_step``: the output, or of a padding batch's output no row."""
        if self.padding:
            return without_rows(output, rows_of(batch) or 0)
        return output if self.split is None else self.split.join(output)

    def on_predict_end(self) -> None:
        """Take what padding batches left out of the predictions that ``trainer.predict`` returns."""
        loaders, _ = evaluation_loaders(self.trainer)
        for loader, made in zip(loaders, predictions(self.trainer), strict=False):
            if isinstance(loader, EvaluationLoader) and loader.real_batches is not None:
                del made[loader.real_batches :]

    def _is_padding(self, dataloader_idx: int, index: int) -> bool:
        loaders, one_after_the_other = evaluation_loaders(self.trainer)
        if one_after_the_other:
            loaders = loaders[dataloader_idx : dataloader_idx + 1]
        return bool(loaders) and all(isinstance(x, EvaluationLoader) and x.is_padding(index) for x in loaders)

    # ------------------------------------------------------------------------------------------------------- resuming
    def on_train_start(self) -> None:
        """For ``on_train_start``: go to position and random state of the checkpoint, where there is one."""
        self.resume.start()
        if not self.resume.loaded:
            return
        loaders = self._training_loaders()
        if loaders:
            self.resume.redeal(loaders[0].loader)
        # Whoever asked for `trainer.estimated_stepping_batches` made Lightning set the loaders up before it had read
        # the checkpoint, and of data without a length it has fetched a batch, even: do both again.
        restore_loaders_again(self.trainer)
        self.resume.restore_rng()
        if any(loader.length is None for loader in loaders):
            fetch_again(self.trainer)

    def resume_state(self) -> dict[str, Any]:
        """For ``save_checkpoint``: this rank's position and random states, plain values and tensors only."""
        loaders = self._training_loaders()
        return {
            "data_size": self.data_size,
            "samples": batch_samples(loaders[0].loader, self.data_size) if loaders else None,
            "rng": rng_state(),
            "loaders": [loader.checkpoint() for loader in loaders],
        }

    def load_resume_state(self, state: dict[str, Any]) -> None:
        """For ``load_checkpoint`` of a fit: continue where ``state``, of this rank, was taken.

        With another number of data ranks than before give the state of any rank.
        """
        self.resume.load(state)
