"""The arguments of one call: what they must look like, and what the ranks agree on before any of them travels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longmoe.config import RingDTP
from lightning_longmoe.vocabulary.agreement import agree, ring_of
from lightning_longmoe.vocabulary.passes import Problem, Wanted
from lightning_longmoe.vocabulary.record import Record, current_record
from lightning_longmoe.vocabulary.ring import Ring
from lightning_longmoe.vocabulary.spans import VocabularySplit, choose_mode
from lightning_longmoe.vocabulary.tiles import Logits


@dataclass(frozen=True, eq=False)
class Arguments:
    """What this rank was called with.

    Attributes:
        hidden: [N, H].
        weight: its rows of the vocabulary [Vp, H], padded, short or empty.
        bias: [Vp] likewise, or None.
        targets: [N] int64.
        ignore_index: of targets.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    ignore_index: int


@dataclass(frozen=True, eq=False)
class Call:
    """A call that the ranks have agreed on.

    Attributes:
        problem: sizes and options, the same on all ranks.
        ring: the ranks.
        wanted: gradients that some rank wants.
        valid_tokens: of all ranks.
        record: what counts it.
    """

    problem: Problem
    ring: Ring
    wanted: Wanted
    valid_tokens: int
    record: Record


def prepare(
    name: str,
    group: dist.ProcessGroup | None,
    arguments: Arguments,
    logits: Logits,
    config: RingDTP,
    loss_options: dict[str, Any],
) -> Call:
    """Check a call of the operator ``name`` on this rank, and agree on it with the others.

    Raises:
        ValueError: see `agree`; nobody is left waiting.
    """
    ring = ring_of(group, name)
    refusal = _refused_options(name, logits, loss_options) or _refused_tensors(name, ring, arguments, logits)
    hidden, targets = arguments.hidden, arguments.targets
    valid = strangers = torch.zeros(1, dtype=torch.bool, device=hidden.device)
    if refusal is None:
        valid = targets != arguments.ignore_index
        strangers = ((targets < 0) | (targets >= logits.vocab_size)) & valid
    differentiable = (hidden, arguments.weight, arguments.bias)
    mode = "gradients" if torch.is_grad_enabled() else "no_grad"
    agreement = agree(
        ring,
        what=f"{name}: targets",
        tokens=hidden.size(0) if hidden.dim() else 0,
        strangers=strangers.sum(),
        numbers=valid.sum().reshape(1),
        wanted=[torch.is_grad_enabled() and t is not None and t.requires_grad for t in differentiable],
        settings=(
            *(name, *hidden.shape[1:], hidden.dtype, arguments.bias is not None),
            *(config, logits, loss_options, mode),
        ),
        refusal=refusal,
    )
    split = VocabularySplit(logits.vocab_size, ring.size)
    travels = choose_mode(config, max(agreement.tokens), split)
    problem = Problem(split=split, tokens=agreement.tokens, mode=travels, config=config, logits=logits)
    valid_tokens = sum(numbers[0] for numbers in agreement.numbers)
    return Call(problem, ring, Wanted(*agreement.wanted), valid_tokens, current_record())


def _refused_options(name: str, logits: Logits, loss_options: dict[str, Any]) -> ValueError | None:
    """What is wrong with the options; None if nothing is."""
    vocab_size, softcap = logits.vocab_size, logits.softcap
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        return ValueError(f"{name}(vocab_size={vocab_size!r}) is not allowed: give a whole number of at least 1.")
    if softcap is not None and not 0 < softcap < float("inf"):
        return ValueError(f"{name}(logit_softcap={softcap}) is not allowed: give a finite number above 0, or None.")
    if not abs(logits.scale) < float("inf"):
        return ValueError(f"{name}(logit_scale={logits.scale}) is not allowed: give a finite number.")
    z_loss, smoothing = loss_options.get("z_loss", 0.0), loss_options.get("label_smoothing", 0.0)
    for option, value in (("z_loss", z_loss), ("label_smoothing", smoothing)):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return ValueError(f"{name}({option}={value!r}) is not allowed: give a number.")
    if not 0 <= z_loss < float("inf"):
        return ValueError(f"{name}(z_loss={z_loss}) is not allowed: give a finite number of at least 0.")
    if not 0 <= smoothing < 1:
        return ValueError(f"{name}(label_smoothing={smoothing}) is not allowed: give 0 <= label_smoothing < 1.")
    reduction = loss_options.get("reduction", "none")
    if reduction not in ("mean", "sum", "none"):
        return ValueError(f"{name}(reduction={reduction!r}) is not allowed. Choose 'mean', 'sum' or 'none'.")
    return None


def _refused_tensors(name: str, ring: Ring, arguments: Arguments, logits: Logits) -> ValueError | None:
    """What is wrong with the tensors; None if nothing is."""
    hidden, weight, bias, targets = arguments.hidden, arguments.weight, arguments.bias, arguments.targets
    given = {"hidden": hidden, "weight_shard": weight, "bias_shard": bias, "targets": targets}
    spread = [key for key, tensor in given.items() if isinstance(tensor, DTensor)]
    if spread:
        return ValueError(f"{name}: {', '.join(spread)} is a DTensor: give this rank's part, `.to_local()`.")
    if hidden.dim() != 2 or not hidden.is_floating_point():
        return ValueError(
            f"{name}: hidden is {list(hidden.shape)} {hidden.dtype}; give floating-point hidden states [N, H]."
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        return ValueError(
            f"{name}: targets {list(targets.shape)} {targets.dtype} do not fit hidden {list(hidden.shape)}: give one"
            " int64 id for each token, [N]."
        )
    if not weight.is_floating_point() or (bias is not None and not bias.is_floating_point()):
        return ValueError(f"{name}: weight_shard is {weight.dtype}: give a floating-point weight and bias.")
    split = VocabularySplit(logits.vocab_size, ring.size)
    least, most, start = split.rows(ring.rank), split.padded_rows, split.start(ring.rank)
    if weight.dim() != 2 or weight.size(1) != hidden.size(1) or not least <= weight.size(0) <= most:
        return ValueError(
            f"{name}: weight_shard {list(weight.shape)} does not fit hidden {list(hidden.shape)} and"
            f" vocab_size={split.vocab_size} over {ring.size} ranks. Rank {ring.rank} owns {least} rows, from {start}:"
            f" give [{least}, {hidden.size(1)}], or up to {most} rows with padding."
        )
    if bias is not None and (bias.dim() != 1 or not least <= bias.size(0) <= most):
        return ValueError(
            f"{name}: bias_shard {list(bias.shape)} does not fit: give [{least}], or up to {most} with padding."
        )
    return None
