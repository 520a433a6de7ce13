"""`LongTextDataModule`: any text as long sequences of bytes."""

from __future__ import annotations

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longmoe.data.sources import Document, find_files, read_bytes
from lightning_longmoe.data.windows import (
    GlobalOrderSampler,
    TokenStream,
    WindowDataset,
    split_documents,
    unigram_entropy,
)

BYTES = 256

Loader = DataLoader[dict[str, Tensor]]


class LongTextDataModule(LightningDataModule):
    """Text, as sequences of byte tokens (vocabulary of 256), for training a causal language model.

    Batches are ``{"input_ids": [B, S], "labels": [B, S]}``, int64 and equal: labels are not shifted. Training samples
    come in one shuffled order for each (seed, epoch), which is the same for any number of data ranks: sample i goes to
    data rank i % R. Nothing is written to disk: each rank reads the files, or maps the large ones, in `setup`.

    Args:
        paths: files, folders or globs. None: the source of the running Python's standard library, about 30 MB of
            ``*.py`` with its tests and without installed packages.
        sequence_length: tokens of a sequence.
        batch_size: sequences of a batch, on each data rank.
        val_fraction: share of the text, by whole documents, that validates. 0: none.
        seed: of the order and of the split.
        num_workers: worker processes of each loader.
        limit_tokens: use only so many tokens of the text, from its beginning. None: all.

    Raises:
        ValueError: a size is not positive, no file matches, or the text is shorter than a sequence.
    """

    def __init__(
        self,
        paths: str | list[str] | None = None,
        sequence_length: int = 1024,
        batch_size: int = 4,
        val_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
        limit_tokens: int | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"LongTextDataModule({name}={value}) must be at least 1.")
        if not 0 <= val_fraction < 1:
            raise ValueError(f"LongTextDataModule(val_fraction={val_fraction}) must be at least 0 and below 1.")
        if limit_tokens is not None and limit_tokens < 1:
            raise ValueError(f"LongTextDataModule(limit_tokens={limit_tokens}) must be at least 1, or None for all.")
        self.save_hyperparameters(logger=False)  # a module with a `seed` of its own would clash
        self.paths = paths
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.seed = seed
        self.num_workers = num_workers
        self.limit_tokens = limit_tokens
        self._documents: list[Document] | None = None
        self._entropy: float | None = None
        self.train_windows: WindowDataset | None = None
        self.val_windows: WindowDataset | None = None

    @property
    def vocab_size(self) -> int:
        """Number of tokens that may occur."""
        return BYTES

    def setup(self, stage: str | None = None) -> None:
        """Read the text and split it, once, whatever the stage."""
        if self._documents is not None:
            return
        documents = read_bytes(find_files(self.paths), self.limit_tokens)
        training, validation = split_documents(documents, self.val_fraction, self.seed)
        self.train_windows = WindowDataset(TokenStream(training), self.sequence_length)
        self.val_windows = WindowDataset(TokenStream(validation), self.sequence_length)
        self._require_a_sequence("training", self.train_windows)
        if self.val_fraction > 0:
            self._require_a_sequence("validation", self.val_windows)
        self._documents = documents

    def _require_a_sequence(self, part: str, windows: WindowDataset) -> None:
        if len(windows) == 0:
            raise ValueError(
                f"The {part} text has {len(windows.stream)} tokens, less than one sequence of {self.sequence_length}."
                " Give more text (paths, limit_tokens), another val_fraction, or a shorter sequence_length."
            )

    # ------------------------------------------------------------------------------------------------------- loaders
    def train_dataloader(self) -> Loader:
        self.setup()
        windows = self.train_windows
        assert windows is not None
        kwargs = (self.trainer.distributed_sampler_kwargs if self.trainer is not None else None) or {}
        replicas, rank = kwargs.get("num_replicas", 1), kwargs.get("rank", 0)
        if len(windows) < replicas * self.batch_size:
            raise ValueError(
                f"The training text makes {len(windows)} sequences of {self.sequence_length} tokens, less than one"
                f" batch of {self.batch_size} on each of {replicas} data ranks. Give more text, a smaller batch_size,"
                " or a shorter sequence_length."
            )
        sampler = GlobalOrderSampler(windows, replicas, rank, batch_size=self.batch_size, seed=self.seed)
        return self._loader(windows, sampler)

    def val_dataloader(self) -> Loader | list[Loader]:
        self.setup()
        windows = self.val_windows
        assert windows is not None
        return self._loader(windows) if len(windows) > 0 else []

    def test_dataloader(self) -> Loader | list[Loader]:
        """The validation text."""
        return self.val_dataloader()

    def predict_dataloader(self) -> Loader | list[Loader]:
        """The validation text."""
        return self.val_dataloader()

    def _loader(self, windows: WindowDataset, sampler: GlobalOrderSampler | None = None) -> Loader:
        return DataLoader(windows, self.batch_size, sampler=sampler, num_workers=self.num_workers)

    # ------------------------------------------------------------------------------------------------------ the text
    def unigram_entropy(self) -> float:
        """Entropy of the byte frequencies of the whole text, in nats: the loss of the best model without context."""
        self.setup()
        if self._entropy is None:
            self._entropy = unigram_entropy(self._documents or [], self.vocab_size)
        return self._entropy

    def describe(self) -> str:
        """One line: size of the text, sequences, entropy."""
        self.setup()
        assert self._documents is not None
        assert self.train_windows is not None
        assert self.val_windows is not None
        tokens = sum(document.tokens.size for document in self._documents)
        return (
            f"{len(self._documents):,} documents, {tokens / 1e6:.1f} M byte tokens:"
            f" {len(self.train_windows):,} training and {len(self.val_windows):,} validation sequences of"
            f" {self.sequence_length:,}; unigram entropy {self.unigram_entropy():.3f} nats"
        )
