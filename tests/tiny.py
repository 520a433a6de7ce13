"""A tiny MoE language model, fixed batches with unequal valid tokens, and training over ranks or in one process.

The reference (`train_alone`) uses neither the strategy nor a Trainer: a plain loop over the joined batch.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_longmoe import CausalLMHead, LongMoEStrategy, MoELayer
from lightning_longmoe.models.auxiliary import take_aux_loss

VOCAB = 37
SEQUENCE = 12


class TinyBlock(nn.Module):
    """Norm, a causal mean over earlier positions, MoE; every part in the dtype of the module."""

    def __init__(self, hidden: int, experts: int, moe: dict[str, Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.mix = nn.Linear(hidden, hidden)
        self.moe = MoELayer(hidden, 2 * hidden, experts, 2, **moe)

    def forward(self, hidden: Tensor) -> Tensor:
        steps = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype).view(1, -1, 1)
        hidden = hidden + self.mix(self.norm(hidden).cumsum(1) / steps)
        return hidden + self.moe(hidden)


class TinyLM(pl.LightningModule):
    """Two blocks. Records the loss, the gradients before each step and the clipped norm."""

    def __init__(
        self,
        experts: int = 4,
        layers: int = 2,
        hidden: int = 16,
        tied: bool = False,
        optimizer: str = "sgd",
        lr: float = 0.5,
        **moe: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, hidden)
        self.blocks = nn.ModuleList([TinyBlock(hidden, experts, moe) for _ in range(layers)])
        self.head = CausalLMHead(hidden, VOCAB, tied_to=self.embedding if tied else None)
        self.optimizer, self.lr = optimizer, lr
        self.losses: list[float] = []
        self.gradients: list[dict[str, Tensor]] = []

    def hidden(self, input_ids: Tensor) -> Tensor:
        hidden = self.embedding(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.head(self.hidden(batch["input_ids"]), batch["labels"])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.head(self.hidden(batch["input_ids"]), batch["labels"]), sync_dist=True)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.head(self.hidden(batch["input_ids"]), batch["labels"]), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.head(self.hidden(batch["input_ids"])).argmax(-1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gathered({n: p.grad for n, p in self.named_parameters()}))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.lr)
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def gathered(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Full CPU copies; collective where a value is a DTensor."""
    out = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            out[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()
    return out


def make_batches(rows: int, steps: int, seed: int = 0, ignore: float = 0.3) -> list[dict[str, Tensor]]:
    """Global batches of ``rows`` sequences; each row has another share of ignored labels (unshifted labels)."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=generator)
        labels = ids.clone()
        share = torch.rand(rows, 1, generator=generator) * 2 * ignore
        labels[torch.rand(rows, SEQUENCE, generator=generator) < share] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def fit(
    batches: list[dict[str, Tensor]],
    strategy: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    split: list[int] | None = None,
    double: bool = True,
    prepare: Any = None,
) -> dict[str, Any]:
    """Train under `LongMoEStrategy` on this rank's rows of each global batch; runs in a worker of the pool.

    Args:
        batches: global batches; each rank takes its rows.
        strategy: arguments of the strategy.
        model: arguments of `TinyLM`.
        trainer: arguments of the Trainer.
        split: rows of each data rank (unequal shares); None: equal ones.
        double: compute in float64.
        prepare: called with the module before the fit.

    Returns:
        losses (of this rank), gradients of each step and final weights, gathered; the last gradient norm.
    """
    import torch.distributed as dist

    world, rank = dist.get_world_size(), dist.get_rank()
    pl.seed_everything(11, verbose=False)
    module = TinyLM(**(model or {}))
    module = module.double() if double else module
    if prepare is not None:
        prepare(module)
    running = LongMoEStrategy(**(strategy or {}))
    rows = split or [len(batches[0]["input_ids"]) // world] * world
    start = sum(rows[:rank])
    mine = [{k: v[start : start + rows[rank]] for k, v in batch.items()} for batch in batches]
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": world,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        **(trainer or {}),
    }
    engine = pl.Trainer(strategy=running, **settings)
    engine.fit(module, torch.utils.data.DataLoader(mine, batch_size=None))
    norm = running.last_grad_norm
    return {
        "losses": module.losses,
        "gradients": module.gradients,
        "weights": gathered(dict(module.named_parameters())),
        "norm": None if norm is None else float(norm),
    }


def train_alone(
    batches: list[dict[str, Tensor]],
    model: dict[str, Any] | None = None,
    accumulate: int = 1,
    clip: float | None = None,
    clip_value: float | None = None,
    double: bool = True,
    prepare: Any = None,
) -> dict[str, Any]:
    """The same training in one plain process: every optimizer step on the joined batch of its window."""
    pl.seed_everything(11, verbose=False)
    module = TinyLM(**(model or {}))
    module = module.double() if double else module
    if prepare is not None:
        prepare(module)
    optimizer = module.configure_optimizers()
    losses, gradients, norm = [], [], None
    for start in range(0, len(batches), accumulate):
        window = batches[start : start + accumulate]
        ids = torch.cat([b["input_ids"] for b in window])
        labels = torch.cat([b["labels"] for b in window])
        hidden = module.hidden(ids)
        targets = F.pad(labels[:, 1:], (0, 1), value=-100)
        per_token = F.cross_entropy(module.head(hidden).flatten(0, 1), targets.flatten(), reduction="none")
        valid = targets.flatten() != -100
        loss = per_token[valid].sum() / valid.sum().clamp(min=1)
        for i, batch in enumerate(window):  # the value that each micro-batch logs
            rows = len(batch["input_ids"]) * SEQUENCE
            part = slice(i * rows, (i + 1) * rows)
            count = valid[part].sum().clamp(min=1)
            losses.append(float((per_token[part] * valid[part]).sum() / count))
        optimizer.zero_grad()
        (loss + take_aux_loss()).backward()
        gradients.append(gathered({n: p.grad for n, p in module.named_parameters()}))
        if clip is not None:
            norm = float(nn.utils.clip_grad_norm_(module.parameters(), clip))
        if clip_value is not None:
            nn.utils.clip_grad_value_(module.parameters(), clip_value)
        optimizer.step()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": gathered(dict(module.named_parameters())),
        "norm": norm,
    }


def assert_same_training(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-12) -> None:
    """Losses, every gradient of every step, clipped norm and weights: relative to the largest value of the tensor."""
    torch.testing.assert_close(
        torch.tensor(actual["losses"]), torch.tensor(expected["losses"]), rtol=tolerance, atol=tolerance
    )
    assert len(actual["gradients"]) == len(expected["gradients"])
    for step, (ours, theirs) in enumerate(zip(actual["gradients"], expected["gradients"], strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            _assert_close(ours[name], theirs[name], tolerance, f"gradient of {name} in step {step}")
    for name in expected["weights"]:
        _assert_close(actual["weights"][name], expected["weights"][name], tolerance, f"weight {name}")
    if expected["norm"] is not None:
        assert abs(actual["norm"] - expected["norm"]) <= tolerance * expected["norm"] * 10


def _assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    scale = max(float(expected.abs().max()), 1e-3)
    worst = float((actual - expected).abs().max()) / scale
    assert worst <= tolerance, f"{what}: relative difference {worst:.3g} > {tolerance:.3g}"
