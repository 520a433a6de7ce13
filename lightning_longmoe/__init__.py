"""Mixture-of-experts language models at long context in PyTorch Lightning, with every memory peak bounded.

Importing the package registers the strategy by name: ``Trainer(strategy="longmoe")``.
"""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_longmoe.boundaries import BoundaryOffloader
from lightning_longmoe.config import (
    BatchConfig,
    BoundaryOffload,
    ContextConfig,
    ExpertLayout,
    FSDPConfig,
    OptimizerOffload,
    ParallelConfig,
    PipelinedLLEP,
    RecomputeConfig,
    RingDTP,
    SaveConfig,
)
from lightning_longmoe.context import context_attention, context_order
from lightning_longmoe.data import LongTextDataModule
from lightning_longmoe.dispatch import pipelined_llep, plan_dispatch
from lightning_longmoe.models import CausalLMHead, CausalLMModule, MoELayer
from lightning_longmoe.optimizer import OffloadStreamAdamW
from lightning_longmoe.strategy import LongMoEStrategy
from lightning_longmoe.vocabulary import ring_cross_entropy, ring_log_probs

__version__ = "0.1.0"

__all__ = [
    "BatchConfig",
    "BoundaryOffload",
    "BoundaryOffloader",
    "CausalLMHead",
    "CausalLMModule",
    "ContextConfig",
    "ExpertLayout",
    "FSDPConfig",
    "LongMoEStrategy",
    "LongTextDataModule",
    "MoELayer",
    "OffloadStreamAdamW",
    "OptimizerOffload",
    "ParallelConfig",
    "PipelinedLLEP",
    "RecomputeConfig",
    "RingDTP",
    "SaveConfig",
    "context_attention",
    "context_order",
    "pipelined_llep",
    "plan_dispatch",
    "ring_cross_entropy",
    "ring_log_probs",
]

LongMoEStrategy.register_strategies(StrategyRegistry)
