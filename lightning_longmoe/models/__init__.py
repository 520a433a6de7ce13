"""Layers and a reference model that work with and without the strategy.

Glossary: *hidden*, activations [B, S, H]; *targets*, labels already shifted, so that ``targets[i]`` follows position i;
*reduction*, who shares the loss (None: this process alone); *pending*, auxiliary losses that no loss has taken yet.

Letters: B sequences - S positions of this rank - N = B·S tokens - H hidden size - E experts - K experts a token -
F expert FFN size - V vocabulary - W ranks that share the loss.
"""

from lightning_longmoe.models.auxiliary import take_aux_loss
from lightning_longmoe.models.experts import Experts
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.models.metrics import MeanTokenLoss, TokenPerplexity
from lightning_longmoe.models.module import CausalLMModule
from lightning_longmoe.models.moe import MoELayer, Router, update_router_biases
from lightning_longmoe.models.shift import mark_shifted, shift_labels
from lightning_longmoe.models.transformer import MoETransformer

__all__ = [
    "CausalLMHead",
    "CausalLMModule",
    "Experts",
    "MeanTokenLoss",
    "MoELayer",
    "MoETransformer",
    "Router",
    "TokenPerplexity",
    "mark_shifted",
    "shift_labels",
    "take_aux_loss",
    "update_router_biases",
]
