"""Selective checkpoint offload: the boundaries of activation checkpointing in host memory, and nothing else.

Start with ``offloader.py``; ``plan.py`` tells the bytes before a launch, ``reference.py`` is plain checkpointing.
"""

from lightning_longmoe.boundaries.offloader import BoundaryOffloader
from lightning_longmoe.boundaries.plan import BoundaryPlan, plan_boundaries
from lightning_longmoe.boundaries.reference import reference_checkpoint

__all__ = ["BoundaryOffloader", "BoundaryPlan", "plan_boundaries", "reference_checkpoint"]
