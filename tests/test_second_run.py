"""What was kept from before sharding, and what comes into a module between two runs."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_longmoe import CausalLMHead, LongMoEStrategy
from tests.pool import RemoteError, run_on_ranks
from tests.test_buffers import _trainer
from tests.tiny import VOCAB, TinyBlock, TinyLM, make_batches


class Penalised(TinyLM):
    """An L2 penalty over parameters that were collected in ``__init__``, in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__(lr=0.1)
        self.way = way
        chosen = list(self.blocks[0].mix.parameters())
        if way == "list":
            self.decayed: Any = chosen
        elif way == "nested":
            self.decayed = {"groups": [{"params": tuple(chosen)}]}
        elif way == "closure":
            self.decayed = lambda: chosen

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        chosen = self.decayed
        if self.way == "nested":
            chosen = chosen["groups"][0]["params"]
        elif self.way == "closure":
            chosen = chosen()
        elif self.way == "fresh":
            chosen = list(self.blocks[0].mix.parameters())
        penalty = sum((p.to_local() ** 2).sum() if hasattr(p, "to_local") else (p**2).sum() for p in chosen)
        return super().training_step(batch, batch_idx) + 0.1 * penalty


def _penalised(way: str) -> list[float]:
    pl.seed_everything(1, verbose=False)
    module = Penalised(way)
    if way == "fresh":
        module.decayed = None
    _trainer(LongMoEStrategy()).fit(module, DataLoader(make_batches(2, 3), batch_size=None))
    return [float(g["blocks.0.mix.weight"].double().norm()) for g in module.gradients]


def test_lists_of_parameters_kept_in_attributes_hold_the_live_ones() -> None:
    expected = run_on_ranks(2, _penalised, "fresh")[0]
    assert run_on_ranks(2, _penalised, "list")[0] == expected
    assert run_on_ranks(2, _penalised, "nested")[0] == expected


def test_a_parameter_that_a_closure_kept_says_that_it_has_no_values() -> None:
    with pytest.raises(RemoteError, match="was kept from before the model was sharded"):
        run_on_ranks(2, _penalised, "closure")


class Asking(TinyLM):
    """Asks an early parameter that a closure kept for something else than its values."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        chosen = self.blocks[0].mix.weight
        self.kept = lambda: chosen

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.what == "freeze":
            self.kept().requires_grad = False
        else:
            getattr(self.kept(), self.what)
        return super().training_step(batch, batch_idx)


def _ask(what: str) -> None:
    _trainer(LongMoEStrategy()).fit(Asking(what), DataLoader(make_batches(2, 1), batch_size=None))


@pytest.mark.parametrize("what", ["data", "grad", "shape", "T", "freeze"])
def test_an_early_parameter_does_not_pass_for_an_empty_one(what: str) -> None:
    with pytest.raises(RemoteError, match="was kept from before the model was sharded"):
        run_on_ranks(2, _ask, what)


def _two_modules() -> tuple[int, int]:
    trainer = _trainer(LongMoEStrategy())
    first, second = Asking("requires_grad"), Asking("requires_grad")
    trainer.fit(first, DataLoader(make_batches(2, 1), batch_size=None))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(second, DataLoader(make_batches(2, 1), batch_size=None))
    return len(first.losses), len(second.losses)


def test_a_trainer_fits_another_module_after_the_first() -> None:
    assert run_on_ranks(2, _two_modules) == [(1, 1), (1, 1)]


class Rebuilt(TinyLM):
    """``configure_model`` that does not ask what is there already."""

    def __init__(self, what: str) -> None:
        super().__init__(tied=True)
        self.what = what

    def configure_model(self) -> None:
        if self.what == "blocks":
            self.blocks = nn.ModuleList([TinyBlock(16, 4, {}) for _ in range(2)])
        elif self.what == "tied head":
            self.head = CausalLMHead(16, VOCAB, tied_to=self.embedding)


def _fit_then_validate(what: str) -> None:
    loader = DataLoader(make_batches(2, 2), batch_size=None)
    module = Rebuilt(what)
    trainer = _trainer(LongMoEStrategy(vocabulary=None))
    trainer.fit(module, loader)
    trainer.validate(module, loader, verbose=False)


@pytest.mark.parametrize(
    ("what", "message"),
    [("blocks", "`configure_model` return where they are"), ("tied head", r"\['head'\] came into the module")],
)
def test_a_configure_model_that_builds_anew_does_not_score_an_untrained_model(what: str, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        run_on_ranks(2, _fit_then_validate, what)
    run_on_ranks(2, _fit_then_validate, "nothing")


def _replaced(what: str) -> None:
    loader = DataLoader(make_batches(2, 2), batch_size=None)
    module = TinyLM()
    trainer = _trainer(LongMoEStrategy())
    trainer.fit(module, loader)
    if what == "experts":
        module.blocks[1].moe = TinyBlock(16, 4, {}).moe
    elif what == "layer":
        module.extra = nn.Linear(3, 3)
    trainer.fit(module, loader)


@pytest.mark.parametrize(("what", "message"), [("experts", "blocks.1.moe.experts"), ("layer", "extra.weight")])
def test_parts_that_are_replaced_or_added_between_runs_are_refused_by_name(what: str, message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        run_on_ranks(2, _replaced, what)
