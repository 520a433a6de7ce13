"""Sequences that are split over ranks train as whole ones do."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_longmoe import CausalLMModule, ContextConfig, LongMoEStrategy
from lightning_longmoe.config import ParallelConfig
from lightning_longmoe.context.order import arrange, required_multiple
from tests.pool import RemoteError, run_on_ranks
from tests.test_buffers import _trainer
from tests.tiny import VOCAB, TinyLM, gathered

MODEL = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 16}


class Recorded(CausalLMModule):
    """Records losses, and learns with SGD, so that the size of a gradient counts."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**MODEL, num_experts=4, top_k=2, **settings)
        self.losses: list[float] = []
        self.seen: list[dict[str, Tensor]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        self.seen.append(batch)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Sequences(Dataset):
    """Random tokens, some labels ignored; with documents where asked for."""

    def __init__(self, length: int, documents: bool, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, VOCAB, (count, length), generator=generator)
        self.labels = self.ids.masked_fill(torch.rand(count, length, generator=generator) < 0.2, -100)
        self.documents = torch.arange(length) // 7 if documents else None

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        item = {"input_ids": self.ids[index], "labels": self.labels[index]}
        return item if self.documents is None else {**item, "document_ids": self.documents}


def _fit(
    parallel: dict[str, Any], context: dict[str, Any], length: int, documents: bool, settings: dict[str, Any]
) -> dict[str, Any]:
    pl.seed_everything(3, verbose=False)
    module = Recorded()
    module.configure_model()
    module = module.double()
    parallel = ParallelConfig(**parallel)
    strategy = LongMoEStrategy(parallel=parallel, context=ContextConfig(**context), **settings.pop("strategy", {}))
    batch = 4 // (dist.get_world_size() // parallel.context_parallel_size)
    trainer = _trainer(strategy, use_distributed_sampler=True, gradient_clip_val=0.5, **settings)
    loader = DataLoader(Sequences(length, documents), batch_size=batch)
    trainer.fit(module, loader, loader)
    return {
        "losses": torch.tensor(module.losses, dtype=torch.float64),
        "weights": gathered(dict(module.named_parameters())),
        "val": float(trainer.callback_metrics["val_loss"]),
        "kind": strategy.takeover.decisions["context"],
        "row": [row for row in strategy.takeover.rows if row[0] == "context"],
        "length": module.seen[0]["input_ids"].size(1),
    }


def _assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["losses"], expected["losses"], rtol=1e-11, atol=1e-11)
    assert actual["val"] == pytest.approx(expected["val"], rel=1e-10)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], value, rtol=1e-9, atol=1e-11)


WHOLE: dict[str, Any] = {}
KINDS = [
    (2, {"context_parallel_size": 2}, {"kind": "ring"}),
    (2, {"context_parallel_size": 2}, {"kind": "ulysses"}),
    (4, {"context_parallel_size": 4}, {"kind": "hybrid"}),
    (4, {"context_parallel_size": 4, "expert_parallel_size": 4}, {"kind": "ring"}),
    (4, {"context_parallel_size": 2, "expert_parallel_size": 2}, {"kind": "auto"}),
    (4, {"context_parallel_size": 4, "replicate_size": 2}, {"kind": "ring"}),
]


@pytest.mark.parametrize(("length", "documents"), [(24, False), (27, True)], ids=["fits", "padded, documents"])
@pytest.mark.parametrize(("ranks", "parallel", "context"), KINDS)
def test_losses_weights_and_validation_are_those_of_one_process(
    ranks: int, parallel: dict[str, Any], context: dict[str, Any], length: int, documents: bool
) -> None:
    key = f"{length} {documents}"
    if key not in WHOLE:
        WHOLE[key] = run_on_ranks(1, _fit, {}, {}, length, documents, {})[0]
    for result in run_on_ranks(ranks, _fit, parallel, context, length, documents, {}):
        if parallel["context_parallel_size"] == ranks:
            _assert_same(result, WHOLE[key])
        else:  # two groups read other sequences, and their own parts of the loss are the global one all the same
            assert result["val"] == pytest.approx(WHOLE[key]["val"], rel=1e-10)
        size = parallel["context_parallel_size"]
        multiple = required_multiple(arrange(size, result["kind"]))
        assert result["length"] == -(-length // multiple) * multiple // size


def test_offloads_accumulation_and_recomputation_of_two_parts_with_split_sequences() -> None:
    strategy = {
        "boundaries": {"keep_last": 0},
        "recompute": {"boundaries_per_layer": 2},
        "dispatch": {"tokens_per_chunk": 3, "min_tokens_per_gemm": 1, "imbalance_threshold": 1.0},
    }
    settings = {"accumulate_grad_batches": 2}
    whole = run_on_ranks(1, _fit, {}, {}, 24, False, {**settings})[0]
    split = run_on_ranks(
        4, _fit, {"context_parallel_size": 4}, {"kind": "ring"}, 24, False, {**settings, "strategy": strategy}
    )[0]
    _assert_same(split, whole)


@pytest.mark.parametrize(
    ("size", "heads", "kv", "node", "kind", "lanes"),
    [(4, 4, 4, 4, "ulysses", None), (4, 4, 2, 4, "hybrid", 2), (4, 3, 1, 4, "ring", None), (8, 8, 8, 2, "hybrid", 2)],
)
def test_auto_chooses_by_heads_and_node_and_says_why(
    size: int, heads: int, kv: int, node: int, kind: str, lanes: int | None
) -> None:
    from lightning_longmoe.context.takeover import choose_context
    from lightning_longmoe.layout import plan_layout
    from lightning_longmoe.models.transformer import Attention

    layout = plan_layout(ParallelConfig(context_parallel_size=size), world_size=8, ranks_per_node=node)
    choice = choose_context(Attention(heads * 2, heads, kv), ContextConfig(), layout)
    assert choice is not None
    assert (choice.kind, choice.ulysses_size) == (kind, lanes)
    assert choice.why.startswith("auto: ")


def _predict(ranks: int) -> list[Tensor]:
    pl.seed_everything(3, verbose=False)
    module = Recorded()
    trainer = _trainer(LongMoEStrategy(parallel=ParallelConfig(context_parallel_size=ranks)))
    return trainer.predict(module, DataLoader(Sequences(27, True, 3), batch_size=1))


def test_predictions_come_back_whole_and_in_order() -> None:
    expected = run_on_ranks(1, _predict, 1)[0]
    for ranks in (2, 4):
        for predictions in run_on_ranks(ranks, _predict, ranks):
            assert [p.shape for p in predictions] == [(1, 27)] * 3
            assert all(torch.equal(a, b) for a, b in zip(predictions, expected, strict=True))


class OwnData(Recorded):
    """Reads other data on each rank, whatever it is told."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(dist.get_rank())
        ids = torch.randint(0, VOCAB, (2, 16), generator=generator)
        return DataLoader([{"input_ids": ids, "labels": ids}], batch_size=None)


def _wrong(kind: str) -> None:
    strategy = LongMoEStrategy(parallel=ParallelConfig(context_parallel_size=2), vocabulary=None)
    batch: Any = {"input_ids": torch.zeros(2, 16, dtype=torch.int64), "labels": torch.zeros(2, 16, dtype=torch.int64)}
    module: Any = Recorded()
    if kind == "other data":
        _trainer(strategy).fit(OwnData())
        return
    if kind == "unnamed":
        batch["weights"] = torch.ones(2, 16)
    elif kind == "lengths":
        batch["labels"] = batch["labels"][:, :12]
    elif kind == "no mapping":
        batch = (batch["input_ids"], batch["labels"])
    elif kind == "no attention":
        module = TinyLM()
    _trainer(strategy).fit(module, DataLoader([batch], batch_size=None))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("other data", r"The ranks \[0, 1\] share each sequence, and read different first train batches"),
        ("unnamed", r"batch\['weights'\] \[2, 16\] has a dimension of the sequence's length 16 and is not named"),
        ("lengths", "must have one length in dimension 1"),
        ("no mapping", "this one is a list"),
        ("no attention", "the module has no attention that sees over ranks"),
    ],
)
def test_what_would_train_wrongly_is_refused_on_every_rank(kind: str, message: str) -> None:
    with pytest.raises(RemoteError, match=message) as caught:
        run_on_ranks(2, _wrong, kind)
    assert set(caught.value.failures) == {0, 1}


class Hooked(Recorded):
    def split_batch(self, batch: dict[str, Tensor], positions: Tensor) -> dict[str, Tensor]:
        self.positions = positions
        part = {name: value[:, positions.clamp(min=0)] for name, value in batch.items()}
        part["labels"] = part["labels"].masked_fill(positions < 0, -100)
        part["labels"].labels_shifted = True  # type: ignore[attr-defined]
        return {**part, "position_ids": positions.clamp(min=0).expand_as(part["labels"])}


def _hooked() -> tuple[list[float], list[float]]:
    losses = []
    for kind in (Hooked, Recorded):
        pl.seed_everything(3, verbose=False)
        module = kind()
        strategy = LongMoEStrategy(parallel=ParallelConfig(context_parallel_size=2))
        _trainer(strategy).fit(module, DataLoader(Sequences(24, False, 4), batch_size=2))
        losses.append(module.losses)
    return losses[0], losses[1]


def test_a_module_may_split_batches_itself() -> None:
    own, ours = run_on_ranks(2, _hooked)[0]
    assert own == ours


def test_a_users_attention_takes_part_by_its_slot() -> None:
    class Theirs(nn.Module):
        context_attention = None
        num_heads = num_kv_heads = 2

    from lightning_longmoe.context.takeover import attentions

    assert list(attentions(nn.ModuleDict({"a": Theirs(), "b": nn.Linear(1, 1)}))) == ["a"]
