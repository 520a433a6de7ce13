"""The reference mixture-of-experts transformer: pre-norm, rotary positions, grouped-query attention, MoE layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.models.layers import Embedding, Linear, RMSNorm
from lightning_longmoe.models.moe import MoELayer


def rotary_angles(position_ids: Tensor, head_size: int, theta: float, dtype: torch.dtype) -> Tensor:
    """exp(i · position · frequency) for every position and pair of channels.

    Complex on purpose: FSDP2's mixed precision casts floating point inputs of a block, and cosines in bfloat16 would
    blur positions; it leaves complex ones alone. Angles are computed in float64, since a position of a million times a
    frequency of one leaves float32 four bits of fraction.

    Args:
        position_ids: [S] or [B, S] int64.
        dtype: of the hidden states; float64 gives complex128, else complex64.

    Returns:
        [..., S, head_size / 2] complex.
    """
    pairs = torch.arange(0, head_size, 2, device=position_ids.device, dtype=torch.float64)
    angles = position_ids.double().unsqueeze(-1) * theta ** (-pairs / head_size)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.complex(angles.cos().to(real), angles.sin().to(real))


def apply_rotary(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the channel pairs (i, i + D/2) of x [B, heads, S, D] by ``rotary`` [S, D/2] or [B, S, D/2]."""
    if rotary.dim() == 3:
        rotary = rotary.unsqueeze(1)
    cos, sin = rotary.real.contiguous(), rotary.imag.contiguous()  # as views their steps of two slow every product
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, document_ids: Tensor | None = None) -> Tensor:
    """Causal attention of one process's sequences.

    Args:
        query: [B, Hq, S, D].
        key: [B, Hkv, S, D], Hkv divides Hq.
        value: [B, Hkv, S, D].
        document_ids: [B, S] int64: positions see only their own document. None: one document a sequence.

    Returns:
        [B, Hq, S, D].
    """
    grouped = query.size(1) != key.size(1)
    if document_ids is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
    length = query.size(2)
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    mask = (document_ids.unsqueeze(2) == document_ids.unsqueeze(1)) & causal
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask.unsqueeze(1), enable_gqa=grouped)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions and normalised queries and keys.

    Attributes:
        context_attention: attention over the ranks that share a sequence, in the place of `causal_attention`; a
            strategy sets it.
    """

    context_attention: Callable[..., Tensor] | None = None

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size = hidden_size // num_heads
        self.q_proj = Linear(hidden_size, num_heads * self.head_size)
        self.k_proj = Linear(hidden_size, num_kv_heads * self.head_size)
        self.v_proj = Linear(hidden_size, num_kv_heads * self.head_size)
        self.o_proj = Linear(num_heads * self.head_size, hidden_size)
        self.q_norm = RMSNorm(self.head_size)
        self.k_norm = RMSNorm(self.head_size)

    def forward(self, hidden: Tensor, rotary: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """hidden [B, S, H], rotary [S, D/2] or [B, S, D/2], document_ids [B, S] or None -> [B, S, H]."""
        batch, length, _ = hidden.shape
        heads = (batch, length, -1, self.head_size)
        query = self.q_norm(self.q_proj(hidden).view(heads)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden).view(heads)).transpose(1, 2)
        value = self.v_proj(hidden).view(heads).transpose(1, 2)
        attend = causal_attention if self.context_attention is None else self.context_attention
        out = attend(apply_rotary(query, rotary), apply_rotary(key, rotary), value, document_ids)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    """One decoder block: hidden + attention(norm(hidden)), then + MoE(norm(hidden)).

    The hidden states come first and by position: they are what an activation checkpoint of the block keeps. The two
    halves are methods of their own, so that each can be checkpointed by itself.
    """

    recompute_parts = ("attend", "feed")

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, moe: MoELayer) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads, num_kv_heads)
        self.moe_norm = RMSNorm(hidden_size)
        self.moe = moe

    def forward(self, hidden: Tensor, rotary: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        return self.feed(self.attend(hidden, rotary, document_ids))

    def attend(self, hidden: Tensor, rotary: Tensor, document_ids: Tensor | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H]: the first half."""
        return hidden + self.attention(self.attention_norm(hidden), rotary, document_ids)

    def feed(self, hidden: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]: the second half."""
        return hidden + self.moe(self.moe_norm(hidden))


class MoETransformer(nn.Module):
    """Embedding, decoder blocks and a last norm; the head is a module of its own (`CausalLMHead`).

    Args:
        vocab_size: V.
        hidden_size: H; a multiple of ``num_heads``, and H / num_heads even.
        num_layers: decoder blocks.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides ``num_heads``. None: as many.
        ffn_size: F of one expert.
        num_experts: E of each block.
        top_k: K experts of a token.
        rope_theta: base of the rotary frequencies.
        router, renormalize, scaling, aux_loss_coef, bias_update_rate, shared_ffn_size: see `MoELayer`.

    Raises:
        ValueError: sizes that do not divide.
    """

    _no_split_modules = ["Block"]

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        ffn_size: int,
        num_experts: int,
        top_k: int,
        rope_theta: float = 10_000.0,
        router: Literal["softmax", "sigmoid"] = "softmax",
        renormalize: bool = True,
        scaling: float = 1.0,
        aux_loss_coef: float = 0.0,
        bias_update_rate: float = 0.0,
        shared_ffn_size: int = 0,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        _check_heads(hidden_size, num_heads, num_kv_heads)
        self.hidden_size, self.head_size, self.rope_theta = hidden_size, hidden_size // num_heads, rope_theta
        self.embedding = Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList()
        for _ in range(num_layers):
            moe = MoELayer(
                hidden_size,
                ffn_size,
                num_experts,
                top_k,
                router=router,
                renormalize=renormalize,
                scaling=scaling,
                aux_loss_coef=aux_loss_coef,
                bias_update_rate=bias_update_rate,
                shared_ffn_size=shared_ffn_size,
            )
            self.layers.append(Block(hidden_size, num_heads, num_kv_heads, moe))
        self.norm = RMSNorm(hidden_size)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """Hidden states of every position.

        Args:
            input_ids: [B, S] int64.
            position_ids: [S] or [B, S] int64. None: 0 to S - 1.
            document_ids: [B, S] int64: positions attend within their document alone. None: one document a sequence.

        Returns:
            [B, S, H], for a `CausalLMHead`.
        """
        hidden = self.embedding(input_ids) * self.hidden_size**0.5  # unit variance, also where a head shares the weight
        if position_ids is None:
            position_ids = torch.arange(input_ids.size(1), device=input_ids.device)
        rotary = rotary_angles(position_ids, self.head_size, self.rope_theta, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, rotary, document_ids)
        return self.norm(hidden)


def _check_heads(hidden_size: int, num_heads: int, num_kv_heads: int) -> None:
    if hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(
            f"hidden_size={hidden_size} with num_heads={num_heads} is not allowed: hidden_size must be a multiple of"
            f" 2 · num_heads = {2 * num_heads} (rotary positions turn pairs of channels)."
        )
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads={num_kv_heads} is not allowed: it must divide num_heads={num_heads}.")
