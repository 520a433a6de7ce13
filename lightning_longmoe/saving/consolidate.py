"""From a folder to one file that plain torch and any Lightning project load, in one process and without a GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from lightning_longmoe.runtime.pieces import Piece
from lightning_longmoe.saving.agreement import CheckpointError
from lightning_longmoe.saving.commit import staged
from lightning_longmoe.saving.contents import ordinary_checkpoint
from lightning_longmoe.saving.sources import FolderSource, open_source
from lightning_longmoe.saving.writing import write_file

NOT_WEIGHTS = ("optimizer_states", "lr_schedulers", "callbacks")


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    out_file: str | os.PathLike[str],
    *,
    save_weights_only: bool = False,
    weights_only: bool = True,
) -> Path:
    """Write the content of a checkpoint folder to one file in Lightning's ordinary format.

    ``torch.load(out_file, weights_only=True)`` opens it without this package, ``load_from_checkpoint`` of the
    LightningModule takes it, and `lightning_longmoe.saving.load` resumes from it. Needs host memory for what it writes.

    Args:
        checkpoint_folder: written by `save_sharded`, or by Lightning's ModelParallelStrategy.
        out_file: must not exist.
        save_weights_only: leave out optimizers, schedulers and callbacks.
        weights_only: False reads a folder that holds Python objects of its own; then the file does, too.

    Returns:
        the path of the file.

    Raises:
        CheckpointError: the folder is not complete, or the file exists.
    """
    folder, out = Path(checkpoint_folder).absolute(), Path(out_file).absolute()
    if os.path.lexists(out):
        raise CheckpointError(f"{out} exists already: give another name, or delete it.")
    source = open_source(folder, weights_only)
    if not isinstance(source, FolderSource):
        raise CheckpointError(f"{folder} is one file already: any Lightning project can load it as it is.")
    wanted = [s for path, s in source.tensors.items() if path[0] == "state_dict" or not save_weights_only]
    full = {saved.path: torch.empty(saved.shape, dtype=saved.dtype) for saved in wanted}
    source.read((saved, Piece(saved.shape, (0,) * len(saved.shape), full[saved.path])) for saved in wanted)
    checkpoint = ordinary_checkpoint(source.meta, full)
    if save_weights_only:
        checkpoint = {key: value for key, value in checkpoint.items() if key not in NOT_WEIGHTS}
    with staged(out) as new:
        write_file(new, checkpoint)
    return out


def consolidate_command(arguments: Sequence[str] | None = None) -> None:
    """``longmoe consolidate CKPT OUT``."""
    parser = argparse.ArgumentParser(
        prog="longmoe consolidate",
        description="Turn a checkpoint folder into one file that torch.load and load_from_checkpoint open.",
    )
    parser.add_argument("checkpoint", help="checkpoint folder")
    parser.add_argument("out", help="file to write; it must not exist")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument(
        "--trust-objects",
        action="store_true",
        help="read a checkpoint that holds Python objects other than tensors and plain containers",
    )
    given = parser.parse_args(arguments)
    try:
        out = consolidate(
            given.checkpoint,
            given.out,
            save_weights_only=given.weights_only,
            weights_only=not given.trust_objects,
        )
    except CheckpointError as error:
        parser.exit(1, f"longmoe consolidate: {error}\n")
    print(f"Wrote {out} ({out.stat().st_size:,} bytes).")
