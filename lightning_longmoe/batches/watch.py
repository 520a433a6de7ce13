"""What ties heads and embeddings to the batches of a run: targets and look-ups are compared with the labels."""

from __future__ import annotations

from typing import Any

from torch import nn

from lightning_longmoe.batches.batches import Batches
from lightning_longmoe.batches.host_group import HostGroup
from lightning_longmoe.batches.split import SequenceSplit
from lightning_longmoe.config import BatchConfig
from lightning_longmoe.context.takeover import ContextChoice
from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.runtime.meshes import Meshes


def batches_for(
    module: nn.Module,
    config: BatchConfig,
    trainer: Any,
    meshes: Meshes,
    context: ContextChoice | None,
    rank: int,
) -> tuple[Batches, Watch]:
    """The batches of a run, and what watches the module for them.

    Args:
        module, config, trainer: of the run.
        meshes: the groups.
        context: how sequences are split.
        rank: in the world.
    """
    heads = [child for child in module.modules() if isinstance(child, CausalLMHead)]
    ignore_index = heads[0].options.ignore_index if heads else -100
    layout, ranks = meshes.layout, HostGroup(meshes.control)
    split = None
    if context is not None:
        assert meshes.context is not None
        split = SequenceSplit(
            config,
            context.kind,
            context.ulysses_size,
            group=meshes.context.get_group(),
            ranks=ranks,
            groups=layout.groups("context"),
            ignore_index=ignore_index,
            hook=getattr(module, "split_batch", None),
        )
    batches = Batches(
        config,
        trainer,
        head=bool(heads),
        ignore_index=ignore_index,
        data_rank=layout.coordinates(rank).data,
        data_size=layout.data_size,
        ranks=ranks,
        split=split,
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
