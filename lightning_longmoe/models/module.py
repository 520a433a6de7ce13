"""The shipped LightningModule: a byte or token language model with mixture-of-experts layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_longmoe.models.head import CausalLMHead
from lightning_longmoe.models.metrics import MeanTokenLoss
from lightning_longmoe.models.moe import update_router_biases
from lightning_longmoe.models.shift import shift_labels
from lightning_longmoe.models.transformer import MoETransformer

Batch = dict[str, Tensor]


class CausalLMModule(LightningModule):
    """A `MoETransformer` with a `CausalLMHead`, trained with AdamW, warm-up and cosine decay.

    Batches are dicts with ``input_ids`` and ``labels`` [B, S] int64, where ``labels[i]`` is the token at position i
    (or -100) and the module shifts, unless a strategy already did; optionally ``position_ids``, ``document_ids`` and
    ``attention_mask`` (1 for tokens, 0 for padding).

    Args:
        vocab_size: size of the vocabulary; 256 for bytes.
        hidden_size: width of the hidden states.
        num_layers: number of decoder blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads. None: as many as query heads.
        ffn_size: inner width of one expert.
        num_experts: experts of each block.
        top_k: experts that a token visits.
        router: "softmax" or "sigmoid".
        renormalize: divide a token's expert weights by their sum.
        scaling: factor on the expert weights.
        aux_loss_coef: strength of the load-balancing loss (softmax router).
        bias_update_rate: step of the correction bias (sigmoid router).
        shared_ffn_size: inner width of the shared expert; 0: none.
        tie_embeddings: use one matrix for embedding and head.
        rope_theta: base of the rotary frequencies.
        logit_softcap: bound on the logits; None: none.
        z_loss: weight of the squared log-sum-exp in the loss.
        label_smoothing: share of the uniform distribution in the targets.
        learning_rate: the peak, after warm-up.
        weight_decay: for matrices; norms and biases have none.
        betas: AdamW's decay rates.
        warmup_steps: optimizer steps of linear warm-up.
        total_steps: optimizer steps until the cosine ends. None: as many as the trainer will run; constant after
            warm-up where that is not known.
        min_lr_fraction: the learning rate at the end of the cosine, as a share of the peak.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        hidden_size: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        ffn_size: int = 256,
        num_experts: int = 8,
        top_k: int = 2,
        router: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
        shared_ffn_size: int = 0,
        tie_embeddings: bool = False,
        rope_theta: float = 10_000.0,
        logit_softcap: float | None = None,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 0,
        total_steps: int | None = None,
        min_lr_fraction: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model: MoETransformer | None = None
        self.head: CausalLMHead | None = None
        self.val_metric = MeanTokenLoss()
        self.test_metric = MeanTokenLoss()

    def configure_model(self) -> None:
        """Build the model, once; a strategy may call this under a meta device."""
        if self.model is not None:
            return
        hp: Any = self.hparams
        self.model = MoETransformer(
            hp.vocab_size,
            hp.hidden_size,
            hp.num_layers,
            hp.num_heads,
            hp.num_kv_heads,
            ffn_size=hp.ffn_size,
            num_experts=hp.num_experts,
            top_k=hp.top_k,
            rope_theta=hp.rope_theta,
            router=hp.router,
            renormalize=hp.renormalize,
            scaling=hp.scaling,
            aux_loss_coef=hp.aux_loss_coef,
            bias_update_rate=hp.bias_update_rate,
            shared_ffn_size=hp.shared_ffn_size,
        )
        self.head = CausalLMHead(
            hp.hidden_size,
            hp.vocab_size,
            tied_to=self.model.embedding if hp.tie_embeddings else None,
            logit_softcap=hp.logit_softcap,
            z_loss=hp.z_loss,
            label_smoothing=hp.label_smoothing,
        )

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Logits [B, S, V] of input_ids [B, S]."""
        hidden = self._built(self.model)(input_ids, position_ids, document_ids)
        return self._built(self.head)(hidden)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The mean cross-entropy over the valid targets."""
        loss = self._built(self.head)(self._hidden(batch), self._targets(batch))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.val_metric.update(*self._evaluate(batch))

    def on_validation_epoch_end(self) -> None:
        self._log_metric("val", self.val_metric)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.test_metric.update(*self._evaluate(batch))

    def on_test_epoch_end(self) -> None:
        self._log_metric("test", self.test_metric)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """[B, S] int64: the most likely next token after each position."""
        return self._built(self.head)(self._hidden(batch)).argmax(-1)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        update_router_biases(self)

    def configure_optimizers(self) -> Any:
        """AdamW without weight decay on norms and biases, and a learning rate for each step."""
        hp: Any = self.hparams
        decayed, undecayed = _split_by_decay(self.named_parameters())
        groups = [
            {"params": decayed, "weight_decay": hp.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        optimizer = AdamW([group for group in groups if group["params"]], lr=hp.learning_rate, betas=tuple(hp.betas))
        total = self.trainer.estimated_stepping_batches if hp.total_steps is None else hp.total_steps
        schedule = WarmupCosine(hp.warmup_steps, total, hp.min_lr_fraction)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, schedule), "interval": "step"},
        }

    def _hidden(self, batch: Batch) -> Tensor:
        documents = batch.get("document_ids")
        if documents is None:
            documents = batch.get("attention_mask")  # padding is a document of its own, which no token sees
        return self._built(self.model)(batch["input_ids"], batch.get("position_ids"), documents)

    def _targets(self, batch: Batch) -> Tensor:
        return shift_labels(batch["labels"], self._built(self.head).options.ignore_index)

    def _evaluate(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._built(self.head).loss_sum_and_count(self._hidden(batch), self._targets(batch))

    def _log_metric(self, stage: str, metric: MeanTokenLoss) -> None:
        """Log what all ranks saw together; the metric itself sums over them."""
        loss = metric.compute()
        metric.reset()
        self.log(f"{stage}_loss", loss, prog_bar=True, sync_dist=True)
        self.log(f"{stage}_perplexity", loss.exp(), sync_dist=True)

    def _built(self, module: Any) -> Any:
        if module is None:
            raise RuntimeError("CausalLMModule is not built yet: call configure_model(), or give it to a Trainer.")
        return module


class WarmupCosine:
    """The learning rate of a step as a share of the peak: linear up, then cosine down to ``floor``."""

    def __init__(self, warmup_steps: int, total_steps: int | float, floor: float) -> None:
        self.warmup_steps, self.total_steps, self.floor = warmup_steps, total_steps, floor

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not math.isfinite(self.total_steps) or self.total_steps <= 0:
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))


def _split_by_decay(named: Iterator[tuple[str, nn.Parameter]]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        vector = parameter.ndim < 2 or name.endswith("bias")
        (undecayed if vector else decayed).append(parameter)
    return decayed, undecayed
