"""Loaders and batches between Lightning and the module.

Glossary. *window*: the A = ``accumulate_grad_batches`` micro-batches of one optimizer step. *valid target*: a label,
after the shift by one, that is not ``ignore_index``. *pass*: one iteration over a loader. *look-ahead*: batches that
are loaded before they are trained. *data rank*: which part of the data a rank reads; ranks that share data have the
same. *padding batch*: a batch that a rank runs only so that the others need not wait; it counts for nothing.
"""

from lightning_longmoe.batches.batches import Batches
from lightning_longmoe.batches.evaluation import EvaluationLoader
from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.labels import Labels
from lightning_longmoe.batches.loader import seed_workers
from lightning_longmoe.batches.training import WindowedLoader

__all__ = ["Batches", "EvaluationLoader", "HostGroup", "Labels", "WindowedLoader", "seed_workers"]
