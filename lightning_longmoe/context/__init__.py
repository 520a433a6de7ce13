"""Context parallelism: attention over sequences that are split over ranks.

Reading order: ``order.py`` (who holds which positions), ``tiles.py`` and ``runs.py`` (the arithmetic), ``ring.py``,
``ulysses.py``, ``attention.py``; ``takeover.py`` (which modules of a user get it).
"""

from lightning_longmoe.context.attention import context_attention
from lightning_longmoe.context.order import arrange, context_order
from lightning_longmoe.context.reference import reference_attention
from lightning_longmoe.context.wire import Wire

__all__ = ["Wire", "arrange", "context_attention", "context_order", "reference_attention"]
