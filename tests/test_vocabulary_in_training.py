"""RingDTP under the strategy: the same training as one process, in every layout, and checkpoints across layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_longmoe import CausalLMHead, LongMoEStrategy
from lightning_longmoe.config import FSDPConfig, ParallelConfig, RingDTP
from lightning_longmoe.saving import consolidate
from lightning_longmoe.vocabulary import recording
from tests.pool import RemoteError, run_on_ranks
from tests.test_resume import Plain, run
from tests.test_strategy import Dense
from tests.tiny import VOCAB, TinyLM, assert_same_training, fit, make_batches, train_alone

TILES = {"token_tile": 7, "vocab_tile": 5}
"""Several tiles and pieces on both axes of the tiny model."""
LAYOUTS = {
    "2": (2, {"vocabulary_parallel_size": 2}),
    "4": (4, {"vocabulary_parallel_size": 4}),
    "2_of_4": (4, {"vocabulary_parallel_size": 2}),
    "hsdp": (4, {"vocabulary_parallel_size": 2, "replicate_size": 2}),
    "with_experts": (4, {"vocabulary_parallel_size": 2, "expert_parallel_size": 4}),
}
each_layout = pytest.mark.parametrize("layout", list(LAYOUTS))
each_tying = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@each_layout
@each_tying
@pytest.mark.parametrize("mode", ["weights", "activations"])
def test_training_equals_one_process(layout: str, tied: bool, mode: str) -> None:
    """37 rows over 2 or 4 ranks: no even shard. Unequal rows, a window of two micro-batches, clipping."""
    world, parallel = LAYOUTS[layout]
    batches = make_batches(8, 4)
    strategy = {"parallel": ParallelConfig(**parallel), "vocabulary": {**TILES, "mode": mode}}
    trainer = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    split = [5, 1, 1, 1] if world == 4 else [7, 1]
    results = run_on_ranks(world, fit, batches, strategy, {"tied": tied}, trainer, split)
    expected = train_alone(batches, {"tied": tied}, accumulate=2, clip=0.05)
    for result in results:
        assert_same_training(result, expected)


@each_layout
@each_tying
def test_gradients_kept_local_until_the_window_ends_are_the_same(layout: str, tied: bool) -> None:
    world, parallel = LAYOUTS[layout]
    batches = make_batches(4, 4)
    strategy = {
        "parallel": ParallelConfig(**parallel),
        "vocabulary": TILES,
        "fsdp": FSDPConfig(sync_each_microbatch=False),
    }
    results = run_on_ranks(world, fit, batches, strategy, {"tied": tied}, {"accumulate_grad_batches": 2})
    for result in results:
        assert_same_training(result, train_alone(batches, {"tied": tied}, accumulate=2))


def freeze_head(module: TinyLM) -> None:
    module.head.requires_grad_(False)


@pytest.mark.parametrize("layout", ["2", "2_of_4"])
def test_a_frozen_head_trains_the_rest(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    batches = make_batches(4, 2)
    strategy = {"parallel": ParallelConfig(**parallel), "vocabulary": TILES}
    results = run_on_ranks(world, fit, batches, strategy, None, None, None, True, freeze_head)
    for result in results:
        assert "head.weight" not in result["gradients"][0]
        assert_same_training(result, train_alone(batches, prepare=freeze_head))


def with_bias_and_options(module: TinyLM) -> None:
    """A head with a bias and every option of the loss."""
    torch.manual_seed(3)
    dtype = module.embedding.weight.dtype
    module.head = CausalLMHead(
        16, VOCAB, bias=True, logit_softcap=3.0, logit_scale=0.7, z_loss=0.01, label_smoothing=0.1
    ).to(dtype)
    nn.init.normal_(module.head.bias)


def train_with_options(batches: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Gradients of one process, by the head's own chunked loss."""
    pl.seed_everything(11, verbose=False)
    module = TinyLM().double()
    with_bias_and_options(module)
    optimizer = module.configure_optimizers()
    gradients = []
    for batch in batches:
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        optimizer.zero_grad()
        module.head(module.hidden(batch["input_ids"]), targets).backward()
        gradients.append({name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients


@pytest.mark.parametrize("layout", ["4", "2_of_4", "hsdp"])
def test_bias_and_every_option_of_the_loss(layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    batches = make_batches(4, 2)
    strategy = {"parallel": ParallelConfig(**parallel), "vocabulary": TILES}
    results = run_on_ranks(world, fit, batches, strategy, None, None, None, True, with_bias_and_options)
    for step, expected in enumerate(train_with_options(batches)):
        for name, gradient in expected.items():
            actual = results[0]["gradients"][step][name]
            assert float((actual - gradient).abs().max()) <= 1e-12 * max(float(gradient.abs().max()), 1e-3), name


# ---------------------------------------------------------------------------------------------------------------------
# What is taken over, and what no rank ever holds
# ---------------------------------------------------------------------------------------------------------------------
def trainer_for(strategy: LongMoEStrategy, **settings: Any) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        **{"max_steps": 1, **settings},
    )


def fit_and_look(vocabulary: Any, parallel: dict[str, Any], tied: bool) -> dict[str, Any]:
    module = TinyLM(tied=tied)
    strategy = LongMoEStrategy(parallel=ParallelConfig(**parallel), vocabulary=vocabulary)
    with recording() as record:
        trainer_for(strategy).fit(module, DataLoader(make_batches(2, 1), batch_size=None))  # type: ignore[arg-type]
    weights = [module.head.weight, module.embedding.weight]
    return {
        "decision": strategy.takeover.decisions["vocabulary"],
        "why": [how for what, _, how in strategy.takeover.rows if what == "vocabulary"],
        "axes": [set(w.device_mesh.mesh_dim_names or ()) if isinstance(w, DTensor) else None for w in weights],
        "local": [tuple(w.to_local().shape) for w in weights],
        "same": weights[0] is weights[1],
        "ring_bytes": record.forward.sent_bytes,
        "lookup_bytes": record.lookup.sent_bytes,
    }


@each_tying
def test_auto_spreads_head_and_embedding_where_there_is_more_than_one_rank(tied: bool) -> None:
    for rank, result in enumerate(run_on_ranks(2, fit_and_look, "auto", {}, tied)):
        assert result["decision"] == "RingDTP"
        assert result["axes"] == [{"vocabulary"}] * 2  # neither is gathered by FSDP2
        assert result["local"] == [(19 if rank == 0 else 18, 16)] * 2
        assert result["same"] == tied
        assert result["ring_bytes"] > 0
        assert result["lookup_bytes"] > 0
    alone = run_on_ranks(1, fit_and_look, "auto", {}, tied)[0]
    assert alone["decision"] == "plain"
    assert "auto: one rank" in alone["why"][0]


def test_none_keeps_the_projection_whole() -> None:
    result = run_on_ranks(2, fit_and_look, None, {}, False)[0]
    assert (result["decision"], result["ring_bytes"], result["lookup_bytes"]) == ("plain", 0, 0)
    assert "vocabulary=None" in result["why"][0]


def test_the_rest_of_the_ranks_shards_an_untied_weight_and_copies_a_tied_one() -> None:
    parallel = {"vocabulary_parallel_size": 2}
    untied = run_on_ranks(4, fit_and_look, "auto", parallel, False)[0]
    assert untied["axes"] == [{"vocabulary_shard", "vocabulary"}] * 2
    assert untied["local"] == [(19, 8)] * 2  # 19 rows do not divide by 2, 16 columns do
    assert "sharded with FSDP2 over the other 2" in untied["why"][0]
    tied = run_on_ranks(4, fit_and_look, "auto", parallel, True)[0]
    assert tied["axes"] == [{"vocabulary"}] * 2
    assert "copied over the other 2" in tied["why"][0]


def test_an_explicit_config_applies_on_one_rank() -> None:
    result = run_on_ranks(1, fit_and_look, RingDTP(), {}, False)[0]
    assert result["decision"] == "RingDTP"
    batches = make_batches(4, 2)
    assert_same_training(run_on_ranks(1, fit, batches, {"vocabulary": TILES})[0], train_alone(batches))


class Scaled(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward(ids)


class WithOwnForward(TinyLM):
    """An embedding whose forward is not a plain lookup, tied or not, and one that is no vocabulary."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = Scaled(VOCAB, 16)
        self.head = CausalLMHead(16, VOCAB, tied_to=self.embedding if tied else None)
        self.positions = nn.Embedding(12, 16)

    def hidden(self, input_ids: Tensor) -> Tensor:
        return self.positions(torch.arange(input_ids.shape[1])) + super().hidden(input_ids)


def look_at_own_forward(vocabulary: Any, tied: bool) -> tuple[str, list[set[str] | None], list[str]]:
    module = WithOwnForward(tied)
    strategy = LongMoEStrategy(vocabulary=vocabulary)
    trainer_for(strategy).fit(module, DataLoader(make_batches(2, 1), batch_size=None))  # type: ignore[arg-type]
    weights = [module.head.weight, module.embedding.weight, module.positions.weight]
    axes = [set(w.device_mesh.mesh_dim_names or ()) if isinstance(w, DTensor) else None for w in weights]
    return strategy.takeover.decisions["vocabulary"], axes, [row[2] for row in strategy.takeover.rows]


def test_an_embedding_with_a_forward_of_its_own_keeps_it() -> None:
    decision, axes, _ = run_on_ranks(2, look_at_own_forward, "auto", False)[0]
    assert decision == "RingDTP"
    assert axes == [{"vocabulary"}, {"shard"}, {"shard"}]  # only the head is spread
    decision, axes, why = run_on_ranks(2, look_at_own_forward, "auto", True)[0]
    assert decision == "plain"
    assert axes == [{"shard"}] * 3
    assert any("'embedding' has a forward of its own" in line for line in why)


@pytest.mark.parametrize(
    ("vocabulary", "parallel", "message"),
    [
        (None, {"vocabulary_parallel_size": 2}, "cannot apply with vocabulary=None"),
        (RingDTP(), {"vocabulary_parallel_size": 1}, "no ring of one rank among several"),
        (RingDTP(), {"replicate_size": 2}, "no ring of one rank among several"),
    ],
)
def test_settings_that_contradict_each_other_raise(vocabulary: Any, parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(RemoteError, match=message):
        run_on_ranks(2, fit_and_look, vocabulary, parallel, False)


def test_an_explicit_config_that_cannot_apply_is_an_error() -> None:
    with pytest.raises(RemoteError, match="'head': 'embedding' has a forward of its own"):
        run_on_ranks(2, look_at_own_forward, RingDTP(), True)
    with pytest.raises(RemoteError, match="it has no CausalLMHead"):
        run_on_ranks(2, fit_dense, RingDTP())


def fit_dense(vocabulary: Any) -> None:
    strategy = LongMoEStrategy(vocabulary=vocabulary)
    trainer_for(strategy).fit(Dense(), DataLoader([]))


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation, precision, initial values
# ---------------------------------------------------------------------------------------------------------------------
def evaluate_and_predict(parallel: dict[str, Any], tied: bool) -> dict[str, Any]:
    pl.seed_everything(11, verbose=False)
    module = TinyLM(tied=tied).double()
    trainer = trainer_for(LongMoEStrategy(parallel=ParallelConfig(**parallel)), max_steps=2)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [{k: v.tensor_split(world)[rank] for k, v in batch.items()} for batch in make_batches(4, 2)]
    loader = DataLoader(mine, batch_size=None)  # type: ignore[arg-type]
    before = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    predicted = torch.cat(trainer.predict(module, loader))  # type: ignore[arg-type]
    trainer.fit(module, loader)
    return {"before": before, "predicted": predicted, "losses": module.losses}


@pytest.mark.parametrize("layout", ["2", "4", "2_of_4"])
@each_tying
def test_validation_prediction_and_training_take_turns(layout: str, tied: bool) -> None:
    """Predictions read true logits, for which the head is gathered in that call."""
    world, parallel = LAYOUTS[layout]
    results = run_on_ranks(world, evaluate_and_predict, parallel, tied)
    alone = run_on_ranks(1, evaluate_and_predict, {}, tied)[0]
    for result in results:
        assert result["before"] == pytest.approx(alone["before"], rel=1e-10)
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-10)
    by_batch = [torch.cat([r["predicted"].tensor_split(2)[i] for r in results]) for i in range(2)]
    assert torch.equal(torch.cat(by_batch), alone["predicted"])


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("layout", ["2", "2_of_4"])
def test_bfloat16_trains_close_to_float32(precision: str, layout: str) -> None:
    world, parallel = LAYOUTS[layout]
    batches = make_batches(4, 6)
    strategy = {"parallel": ParallelConfig(**parallel)}
    result = run_on_ranks(world, fit, batches, strategy, None, {"precision": precision}, None, False)[0]
    expected = train_alone(batches, double=False)
    assert result["losses"] == pytest.approx(expected["losses"], rel=0.02)


def fit_on_meta(parallel: dict[str, Any], vocabulary: Any) -> dict[str, Tensor]:
    from tests.tiny import gathered

    class Late(pl.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "inner"):
                self.inner = TinyLM(tied=True)

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.inner.head(self.inner.hidden(batch["input_ids"]), batch["labels"])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    pl.seed_everything(5, verbose=False)
    module = Late()
    strategy = LongMoEStrategy(
        parallel=ParallelConfig(**parallel), vocabulary=vocabulary, fsdp=FSDPConfig(meta_device=True)
    )
    trainer_for(strategy).fit(module, DataLoader(make_batches(2, 1), batch_size=None))  # type: ignore[arg-type]
    assert module.inner.head.weight is module.inner.embedding.weight
    return gathered(dict(module.named_parameters()))


def test_meta_initialisation_keeps_the_tie_and_the_values_in_every_layout() -> None:
    expected = run_on_ranks(1, fit_on_meta, {}, None)[0]
    for layout in ("2", "4", "2_of_4"):
        world, parallel = LAYOUTS[layout]
        actual = run_on_ranks(world, fit_on_meta, parallel, "auto")[0]
        assert actual.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(actual[name], value), name


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints
# ---------------------------------------------------------------------------------------------------------------------
def start(folder: Path, layout: str, tied: bool, checkpoint: Path | None, sharded: bool = True) -> dict[str, Any]:
    world, parallel = {**LAYOUTS, "1": (1, {})}[layout]
    model = {"tied": tied}
    where = None if checkpoint is None else str(checkpoint)
    saving = {"sharded": sharded}
    return run_on_ranks(world, run, str(folder), parallel, saving, where, model, None, None, 8 // world, Plain)[0]


@each_tying
@pytest.mark.parametrize(
    ("before", "after"),
    [("2", "2"), ("4", "2"), ("2", "4"), ("2_of_4", "4"), ("4", "2_of_4"), ("4", "1"), ("1", "2_of_4"), ("hsdp", "2")],
)
def test_a_run_goes_on_with_another_ring_size(tmp_path: Path, before: str, after: str, tied: bool) -> None:
    whole = start(tmp_path / "a", before, tied, None)
    resumed = start(tmp_path / "b", after, tied, tmp_path / "a" / "step=3.ckpt")
    assert resumed["step"] == whole["step"]
    rest = whole["losses"][-len(resumed["losses"]) :]
    tolerance = 1e-12 if before == after else 2e-5
    assert resumed["losses"] == pytest.approx(rest, rel=tolerance)


@each_tying
@pytest.mark.parametrize("sharded", [True, False], ids=["folder", "file"])
@pytest.mark.parametrize("layout", ["4", "2_of_4"])
def test_saved_weights_have_the_vocabularys_own_size_and_load_in_plain_torch(
    tmp_path: Path, layout: str, sharded: bool, tied: bool
) -> None:
    whole = start(tmp_path, layout, tied, None, sharded)
    file = tmp_path / "step=6.ckpt"
    if sharded:
        consolidate(file, tmp_path / "whole.ckpt")
        file = tmp_path / "whole.ckpt"
    state = torch.load(file, weights_only=True)["state_dict"]
    assert state["head.weight"].shape == state["embedding.weight"].shape == (VOCAB, 16)
    module = Plain(tied=tied)
    module.load_state_dict(state)
    assert torch.equal(module.head.weight, module.embedding.weight) == tied
    assert whole["weights"]["embedding.weight"].shape == (VOCAB, 16)
