"""An ordinary Lightning project, and the three lines that give it to `LongMoEStrategy`.

Everything here is the project's own: its model, its data set and data loader, its optimizer. Three lines are not what
they were, beside the import; search for "was:".

    -    self.ffn = FeedForward(WIDTH, 4 * WIDTH)
    +    self.ffn = MoELayer(WIDTH, 2 * WIDTH, num_experts=8, top_k=2)

    -    self.head = LinearHead(WIDTH, VOCABULARY)        # a linear layer, then cross_entropy
    +    self.head = CausalLMHead(WIDTH, VOCABULARY)

    -    strategy="ddp",
    +    strategy=LongMoEStrategy(batch=BatchConfig(labels_shifted=True)),

The last one says that this project's labels are shifted already; without it the strategy shifts them by one.
`MoELayer` and `CausalLMHead` are plain modules: the project still runs on one device or under "ddp" with them, and a
project that has neither trains under `LongMoEStrategy` all the same, without expert parallelism.

    python examples/existing_project.py              # two CPU processes, about 20 seconds
    python examples/existing_project.py --devices 8 --accelerator gpu --precision bf16-true
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_longmoe import BatchConfig, CausalLMHead, LongMoEStrategy, MoELayer

WIDTH, HEADS, VOCABULARY = 64, 4, 256


class PythonSource(Dataset):
    """Pieces of one file, as bytes; the label of a byte is the next one."""

    def __init__(self, file: str = random.__file__, length: int = 128) -> None:
        text = torch.frombuffer(bytearray(Path(file).read_bytes()), dtype=torch.uint8).long()
        self.pieces = text.unfold(0, length + 1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.pieces[index][:-1], "labels": self.pieces[index][1:]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.ffn = MoELayer(WIDTH, 2 * WIDTH, num_experts=8, top_k=2)  # was: FeedForward(WIDTH, 4 * WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        qkv = self.qkv(self.norm1(hidden)).view(batch, length, 3, HEADS, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return hidden + self.ffn(self.norm2(hidden))


class LanguageModel(L.LightningModule):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = CausalLMHead(WIDTH, VOCABULARY)  # was: LinearHead(WIDTH, VOCABULARY)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden)
        loss = self.head(hidden, batch["labels"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="An ordinary Lightning project under LongMoEStrategy.")
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--max_steps", type=int, default=50)
    given = parser.parse_args()

    L.seed_everything(1)
    trainer = L.Trainer(
        accelerator=given.accelerator,
        devices=given.devices,
        precision=given.precision,
        strategy=LongMoEStrategy(batch=BatchConfig(labels_shifted=True)),  # was: strategy="ddp"
        max_steps=given.max_steps,
        max_epochs=100,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), DataLoader(PythonSource(), batch_size=8, shuffle=True))
    trainer.print(f"last loss {float(trainer.callback_metrics['loss']):.3f} nats per byte")


if __name__ == "__main__":
    main()
