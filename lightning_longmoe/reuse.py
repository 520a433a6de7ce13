"""What a sharded module says when it comes into another run: to parts that are new, and to other strategies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    import lightning.pytorch as pl


def owners(module: nn.Module) -> WeakSet[nn.Module]:
    """The modules that hold parameters of their own. Weak: an id would be given again to what replaces a part."""
    return WeakSet(child for child in module.modules() if child._parameters)


def new_parts(module: nn.Module, known: WeakSet[nn.Module]) -> list[str]:
    """Names of modules with sharded parameters that are not among ``known``."""
    return [
        name
        for name, child in module.named_modules()
        if child not in known and any(isinstance(p, DTensor) for p in child.parameters(recurse=False))
    ]


def refuse_other_strategies(module: pl.LightningModule) -> None:
    """Let ``module`` raise ValueError when DDP, FSDP1 or DeepSpeed get it: their own errors do not tell why.

    Every run of a Trainer asks a module for its callbacks first, whatever the strategy.
    """
    own = module.configure_callbacks
    module.configure_callbacks = functools.partial(_configure_callbacks, module, own)  # type: ignore[method-assign]


def _configure_callbacks(module: pl.LightningModule, own: Callable[[], Any]) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy

    strategy = module.trainer.strategy
    if isinstance(strategy, ParallelStrategy) and not isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"This module was sharded by LongMoEStrategy and cannot run under {type(strategy).__name__}, which wants"
            " whole parameters. Save a checkpoint (`trainer.save_checkpoint(path)`), make one file of it (`longmoe"
            " consolidate path out`), and load that into a fresh module; or go on with LongMoEStrategy."
        )
    return own()
