"""Advice on errors of torch that a sharded module brings about, as a note under the error."""

from __future__ import annotations

MESHES = (
    "LongMoEStrategy keeps experts and vocabulary rows on device meshes of their own, which torch does not mix. Clip"
    " with `self.clip_gradients(...)` or `lightning_longmoe.clipping.clip_grad_norm_`; take norms with `total_norm` or"
    " `grad_norms` of the same file; for a penalty on weights use the optimizer's weight_decay; instead of"
    " BaseFinetuning set `requires_grad` before the fit, or add a parameter group yourself."
)
VALUES = (
    "A sharded tensor was turned into plain values one by one. Norms of gradients:"
    " `lightning_longmoe.clipping.grad_norms(module)`; a whole tensor: `tensor.full_tensor()`, on all ranks."
)
MIXED = (
    "A part of the module was called where its parameters are sharded. Call it in training_step, validation_step,"
    " test_step, predict_step or an epoch-end hook, through the module that holds it; a block that refers to a module"
    " outside of it must be given that module's output instead."
)
ADVICE = {
    "cross-mesh operation": MESHES,
    "must have the same mesh": MESHES,
    "with different meshes": MESHES,
    "its data is not allocated yet": VALUES,
    "got mixed torch.Tensor and DTensor": MIXED,
}
"""By a phrase of torch's message."""


def add_advice(exception: BaseException) -> None:
    """Add a note to an exception that we know the way out of. Repeating is harmless."""
    for phrase, advice in ADVICE.items():
        if phrase in str(exception) and advice not in getattr(exception, "__notes__", ()):
            exception.add_note(advice)
