"""Tools of torch and Lightning that do not know several meshes: they work, or their error names the way out."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longmoe import LongMoEStrategy
from lightning_longmoe.clipping import grad_norms
from tests.pool import run_on_ranks
from tests.test_buffers import _trainer
from tests.tiny import TinyLM, make_batches


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.embedding)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.embedding, optimizer)


class Using(TinyLM):
    def __init__(self, tool: str) -> None:
        super().__init__()
        self.tool = tool

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.tool == "penalty":
            loss = loss + sum((p**2).sum() for p in self.parameters())
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        if self.tool == "grad_norm":
            self.log_dict(grad_norm(self, 2))
        if self.tool == "grad_norms":
            self.norms = grad_norms(self)
            self.log_dict(self.norms)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        if self.tool == "clip_grad_norm_":
            nn.utils.clip_grad_norm_(self.parameters(), 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _use(tool: str) -> list[str]:
    module = Using(tool)
    callbacks = [Unfreeze()] if tool == "BaseFinetuning" else []
    trainer = _trainer(LongMoEStrategy(), callbacks=callbacks, max_epochs=2, gradient_clip_val=1.0)
    try:
        trainer.fit(module, DataLoader(make_batches(2, 2), batch_size=None))
    except RuntimeError as error:
        return list(error.__notes__)
    return ["it worked"]


@pytest.mark.parametrize(
    ("tool", "advice"),
    [
        ("clip_grad_norm_", "self.clip_gradients(...)"),
        ("penalty", "weight_decay"),
        ("BaseFinetuning", "instead of BaseFinetuning"),
        ("grad_norm", "grad_norms(module)"),
    ],
)
def test_an_error_over_several_meshes_names_the_way_out(tool: str, advice: str) -> None:
    for notes in run_on_ranks(2, _use, tool):
        assert any(advice in note for note in notes)


def _norms(double: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
    module = Using("grad_norms")
    _trainer(LongMoEStrategy()).fit(module.double(), DataLoader(make_batches(2, 1), batch_size=None))
    return module.norms, module.gradients[-1]


def test_grad_norms_are_those_of_the_gathered_gradients() -> None:
    for norms, gradients in run_on_ranks(2, _norms, True):
        for name, gradient in gradients.items():
            assert norms[f"grad_2.0_norm/{name}"] == pytest.approx(float(gradient.norm()), rel=1e-12)
        total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        assert norms["grad_2.0_norm_total"] == pytest.approx(float(total), rel=1e-12)


def _anomalous() -> list[float]:
    module = TinyLM()
    _trainer(LongMoEStrategy(), detect_anomaly=True).fit(module, DataLoader(make_batches(2, 2), batch_size=None))
    return module.losses


def test_anomaly_detection_works_with_experts_and_vocabulary_spread() -> None:
    assert all(len(losses) == 2 for losses in run_on_ranks(2, _anomalous))


class Compiled(TinyLM):
    """Its blocks go through torch's graph capture and its split into forward and backward, without code generation."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__(lr=0.1)
        if wrapped:
            self.blocks = nn.ModuleList([torch.compile(block, backend="aot_eager") for block in self.blocks])
        else:
            for block in self.blocks:
                block.compile(backend="aot_eager")


def _losses_compiled_and_not(wrapped: bool, dispatch: Any) -> tuple[list[float], list[float]]:
    torch._dynamo.reset()
    losses = []
    for module in (Compiled(wrapped), TinyLM(lr=0.1)):
        pl.seed_everything(4, verbose=False)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        trainer = _trainer(LongMoEStrategy(dispatch=dispatch))
        trainer.fit(module, DataLoader(make_batches(2, 12), batch_size=None))
        losses.append(module.losses)
    return losses[0], losses[1]


@pytest.mark.parametrize("dispatch", ["auto", None])
@pytest.mark.parametrize("wrapped", [True, False], ids=["wrapped", "in_place"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_compiled_blocks_train_with_recomputation_whatever_the_routing(
    ranks: int, wrapped: bool, dispatch: str | None
) -> None:
    for compiled, plain in run_on_ranks(ranks, _losses_compiled_and_not, wrapped, dispatch):
        assert len(compiled) == 12
        torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"timeout_s": "60"}, r"timeout_s='60'\) is not allowed: give seconds"),
        ({"saving": {"all_ranks_timeout_s": 0}}, "all_ranks_timeout_s=0"),
        ({"fsdp": {"blocks": [3]}}, r"FSDPConfig\(blocks=\[3\]\) is not allowed: give class names"),
        ({"recompute": {"blocks": 3}}, "RecomputeConfig"),
    ],
)
def test_settings_of_the_wrong_type_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongMoEStrategy(**settings)


def test_one_class_name_is_a_list_of_one() -> None:
    strategy = LongMoEStrategy(fsdp={"blocks": "TinyBlock"}, recompute={"blocks": "TinyBlock"})  # type: ignore[arg-type]
    assert strategy.fsdp.blocks == strategy.recompute.blocks == ["TinyBlock"]
