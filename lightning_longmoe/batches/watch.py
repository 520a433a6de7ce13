"""What ties heads and embeddings to the batches of a run: targets and look-ups are compared with the labels."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_longmoe.batches.batches import Batches
from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.models.head import CausalLMHead


def batches_for(
    module: nn.Module, config: BatchConfig, trainer: Any, *, data_rank: int, data_size: int, ranks: HostGroup
) -> tuple[Batches, Watch]:
    """The batches of a run, and what watches the module for them."""
    heads = [child for child in module.modules() if isinstance(child, CausalLMHead)]
    batches = Batches(
        config,
        trainer,
        head=bool(heads),
        ignore_index=heads[0].options.ignore_index if heads else -100,
        data_rank=data_rank,
        data_size=data_size,
        ranks=ranks,
    )
    return batches, Watch(module, heads, batches)


class Watch:
    """Shows targets of heads, and the tokens that embeddings of their vocabularies look up, to the batches."""

    def __init__(self, module: nn.Module, heads: list[CausalLMHead], batches: Batches) -> None:
        sizes = {head.vocab_size for head in heads}
        for head in heads:
            head.check_targets = batches.check_targets
        self._hooks = [
            child.register_forward_pre_hook(batches.note_look_up)
            for child in module.modules()
            if isinstance(child, nn.Embedding) and child.num_embeddings in sizes
        ]

    def end(self) -> None:
        """Leave the embeddings as they were. Repeating is harmless."""
        while self._hooks:
            self._hooks.pop().remove()
