"""The shipped LightningModule: it learns, evaluates exactly, and works without our strategy."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from jsonargparse import ArgumentParser
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_longmoe.models.module import CausalLMModule, WarmupCosine
from lightning_longmoe.models.shift import shift_labels
from tests.pool import run_on_ranks

SMALL: dict[str, Any] = {
    "vocab_size": 17,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_size": 16,
    "num_experts": 4,
    "top_k": 2,
}


def built(**options: Any) -> CausalLMModule:
    torch.manual_seed(0)
    module = CausalLMModule(**(SMALL | options))
    module.configure_model()
    return module


def batches(count: int, rows: int = 2, length: int = 9, ignored: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    out = []
    for index in range(count):
        ids = torch.randint(0, 17, (rows, length), generator=generator)
        labels = ids.clone()
        if ignored:
            labels[:, : 1 + 2 * index] = -100
        out.append({"input_ids": ids, "labels": labels})
    return out


def loader(items: list[Any]) -> DataLoader[Any]:
    return DataLoader(items, batch_size=None)


def trainer(tmp_path: Path | str, **options: Any) -> pl.Trainer:
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": False,
        "enable_checkpointing": False,
    }
    return pl.Trainer(accelerator="cpu", default_root_dir=str(tmp_path), **({"devices": 1} | quiet | options))


def test_it_learns_a_text_of_a_simple_rule(tmp_path: Path) -> None:
    """Each token is the one before plus three, modulo 17: predictable but for the first."""
    starts = torch.arange(17).unsqueeze(1)
    ids = (starts + 3 * torch.arange(12)) % 17
    data = [{"input_ids": ids, "labels": ids}] * 60
    module = built(learning_rate=1e-2, aux_loss_coef=0.01)
    run = trainer(tmp_path, max_epochs=1)
    before = run.validate(module, loader(data[:1]), verbose=False)[0]["val_loss"]
    run.fit(module, loader(data))
    assert before > 2.5
    assert run.callback_metrics["train_loss"].item() < 0.2
    predicted = run.predict(module, loader(data[:1]))[0]
    assert (predicted[:, 1:-1] == ids[:, 2:]).float().mean().item() > 0.95


def test_the_loss_is_that_of_the_next_labels(tmp_path: Path) -> None:
    module, batch = built(), batches(1, ignored=True)[0]
    logits = module(batch["input_ids"])
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    torch.testing.assert_close(module.training_step(batch, 0), expected)
    shifted = {**batch, "labels": shift_labels(batch["labels"])}
    torch.testing.assert_close(module.training_step(shifted, 0), expected)


def test_padding_on_either_side_changes_nothing(tmp_path: Path) -> None:
    module, batch = built().double(), batches(1, rows=1)[0]
    plain = module._evaluate(batch)
    for side in ("left", "right"):
        pads = torch.zeros(1, 3, dtype=torch.int64)

        def pad(tensor: Tensor, value: int, side: str = side, pads: Tensor = pads) -> Tensor:
            parts = [pads + value, tensor] if side == "left" else [tensor, pads + value]
            return torch.cat(parts, 1)

        padded = {
            "input_ids": pad(batch["input_ids"], 0),
            "labels": pad(batch["labels"], -100),
            "attention_mask": pad(torch.ones_like(batch["labels"]), 0),
        }
        padded["labels"][0, 3 if side == "left" else 0] = -100  # the first token has nothing before it to predict it
        total, count = module._evaluate(padded)
        assert count.item() == plain[1].item()
        torch.testing.assert_close(total, plain[0], rtol=1e-10, atol=0)


def expected_mean_loss(module: CausalLMModule, items: list[dict[str, Tensor]]) -> float:
    """Mean over tokens and not over batches."""
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in items:
            logp = module(batch["input_ids"]).log_softmax(-1)
            for row, labels in zip(logp, batch["labels"], strict=True):
                for position in range(labels.numel() - 1):
                    if labels[position + 1] != -100:
                        total -= row[position, labels[position + 1]].item()
                        count += 1
    return total / count


def test_validation_and_test_losses_weigh_every_token_alike(tmp_path: Path) -> None:
    module, items = built().double(), batches(4, ignored=True)
    expected = expected_mean_loss(module, items)
    for stage in ("validate", "test"):
        run = trainer(tmp_path)
        results = getattr(run, stage)(module, loader(items), verbose=False)[0]
        name = "val" if stage == "validate" else "test"
        assert results[f"{name}_loss"] == pytest.approx(expected, rel=1e-6)
        assert results[f"{name}_perplexity"] == pytest.approx(math.exp(expected), rel=1e-6)


def test_the_model_is_built_once() -> None:
    module = built()
    model, head = module.model, module.head
    module.configure_model()
    assert module.model is model
    assert module.head is head


def test_before_it_is_built_it_says_so() -> None:
    with pytest.raises(RuntimeError, match="configure_model"):
        CausalLMModule(**SMALL)(torch.zeros(1, 2, dtype=torch.int64))


def test_building_on_the_meta_device_makes_no_values() -> None:
    module = CausalLMModule(**SMALL)
    with torch.device("meta"):
        module.configure_model()
    assert all(p.is_meta for p in module.parameters())


def test_weight_decay_is_for_matrices_alone(tmp_path: Path) -> None:
    module = built(router="sigmoid", bias_update_rate=1e-3, total_steps=5, weight_decay=0.3)
    decayed, undecayed = module.configure_optimizers()["optimizer"].param_groups
    names = {id(p): n for n, p in module.named_parameters()}
    assert {decayed["weight_decay"], undecayed["weight_decay"]} == {0.3, 0.0}
    assert all(names[id(p)].endswith("norm.weight") for p in undecayed["params"])
    assert len(decayed["params"]) + len(undecayed["params"]) == len(names)
    assert not any("norm" in names[id(p)] for p in decayed["params"])


def test_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    schedule = WarmupCosine(4, 10, 0.1)
    assert [schedule(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule(4) == 1.0
    assert schedule(7) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule(10) == schedule(99) == pytest.approx(0.1)


@pytest.mark.parametrize("total", [float("inf"), -1])
def test_without_an_end_the_learning_rate_stays_at_its_peak(total: float) -> None:
    assert WarmupCosine(0, total, 0.1)(10_000) == 1.0


def test_the_schedule_ends_with_the_trainers_last_step(tmp_path: Path) -> None:
    module = built(learning_rate=1e-2, min_lr_fraction=0.25)
    run = trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2)
    run.fit(module, loader(batches(4)))
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.25e-2)


def test_router_biases_move_before_each_optimizer_step(tmp_path: Path) -> None:
    module = built(router="sigmoid", bias_update_rate=1e-3)
    trainer(tmp_path, max_steps=3).fit(module, loader(batches(3)))
    for name, buffer in module.named_buffers():
        assert name.endswith("expert_bias")
        steps = buffer / 1e-3
        torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-3)
        assert buffer.any()


def test_a_checkpoint_loads_with_the_same_hyperparameters_and_weights(tmp_path: Path) -> None:
    module = built(tie_embeddings=True, betas=(0.8, 0.9))
    run = trainer(tmp_path, max_steps=1)
    run.fit(module, loader(batches(1)))
    run.save_checkpoint(tmp_path / "last.ckpt")
    loaded = CausalLMModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert loaded.hparams == module.hparams
    assert loaded.head.weight is loaded.model.embedding.weight
    for (name, ours), theirs in zip(loaded.named_parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_every_argument_has_a_yaml_form_and_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    parser.add_class_arguments(CausalLMModule, "model")
    config = parser.parse_args(["--model.router=sigmoid", "--model.betas=[0.8,0.9]", "--model.num_kv_heads=2"])
    module = parser.instantiate_classes(config).model
    assert (module.hparams.router, tuple(module.hparams.betas), module.hparams.num_kv_heads) == (
        "sigmoid",
        (0.8, 0.9),
        2,
    )
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    out = capsys.readouterr().out
    assert "strength of the load-balancing loss" in out


# ------------------------------------------------------------------------------------------------------- DDP


def fit_ddp(folder: str, items: list[list[dict[str, Tensor]]]) -> tuple[dict[str, Tensor], float, float]:
    """One fit and one validation with plain DDP; rank r reads ``items[r]``."""
    module = built(aux_loss_coef=0.01, learning_rate=1e-2, total_steps=4)
    own = items[dist.get_rank()]
    run = trainer(folder, strategy="ddp", devices=2, max_steps=2, use_distributed_sampler=False)
    run.fit(module, loader(own))
    validation = run.validate(module, loader(own), verbose=False)[0]
    return {n: p.detach() for n, p in module.named_parameters()}, validation["val_loss"], validation["val_perplexity"]


def test_it_trains_and_validates_under_plain_ddp(tmp_path: Path) -> None:
    """One sequence of three tokens a rank: most experts are idle somewhere, and DDP finds no unused parameter."""
    items = [batches(2, rows=1, length=4)[:2], batches(4, rows=1, length=4)[2:]]
    (weights, loss, perplexity), (others, other_loss, _) = run_on_ranks(2, fit_ddp, str(tmp_path), items)
    for name in weights:
        assert torch.equal(weights[name], others[name]), name
    module = built(aux_loss_coef=0.01)
    assert any(not torch.equal(p, weights[n]) for n, p in module.named_parameters())
    module.load_state_dict(weights, strict=False)
    expected = expected_mean_loss(module, items[0] + items[1])
    assert loss == other_loss == pytest.approx(expected, rel=1e-5)
    assert perplexity == pytest.approx(math.exp(expected), rel=1e-5)
