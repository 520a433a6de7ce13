"""Optimizers under sharding: AdamW with its state in host memory, and optimizers that were built too early.

Start with ``streamed.py``; ``swap.py`` turns a user's AdamW into it; ``remap.py`` is about early optimizers.
"""

from lightning_longmoe.optimizer.reference import ReferenceAdamW
from lightning_longmoe.optimizer.streamed import OffloadStreamAdamW

__all__ = ["OffloadStreamAdamW", "ReferenceAdamW"]
