"""Callbacks that observe, and two that install operators under other strategies. Ours needs none and adds none.

Every figure goes to whatever loggers the Trainer has, under keys that do not change: ``longmoe/...``. Suffixes name the
unit: ``_s`` seconds, ``_gib`` 2^30 bytes, ``_per_s``. Words: *step* = one optimizer step, with all its micro-batches;
*global* = summed over all ranks that read different tokens.
"""

from lightning_longmoe.callbacks.baseline import UnigramBaseline
from lightning_longmoe.callbacks.boundaries import BoundaryOffloadCallback
from lightning_longmoe.callbacks.load import ExpertLoadMonitor
from lightning_longmoe.callbacks.memory import PeakMemoryMonitor
from lightning_longmoe.callbacks.optimizer import OptimizerOffloadCallback
from lightning_longmoe.callbacks.throughput import ThroughputMonitor

__all__ = [
    "BoundaryOffloadCallback",
    "ExpertLoadMonitor",
    "OptimizerOffloadCallback",
    "PeakMemoryMonitor",
    "ThroughputMonitor",
    "UnigramBaseline",
]
