"""The reference transformer against small independent computations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_longmoe.models.layers import GatedMLP, RMSNorm
from lightning_longmoe.models.moe import MoELayer
from lightning_longmoe.models.transformer import (
    Attention,
    MoETransformer,
    apply_rotary,
    causal_attention,
    rotary_angles,
)


def make_model(**options) -> MoETransformer:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return MoETransformer(**(sizes | {"ffn_size": 8, "num_experts": 4, "top_k": 2} | options)).double()


def ids(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randint(0, 19, (batch, length), generator=torch.Generator().manual_seed(3))


def test_attention_equals_its_definition() -> None:
    """Heads and positions in loops; two query heads share one key and value head."""
    torch.manual_seed(0)
    attention = Attention(16, 4, 2).double()
    nn.init.normal_(attention.q_norm.weight)
    nn.init.normal_(attention.k_norm.weight)
    hidden = torch.randn(1, 5, 16, dtype=torch.float64)
    rotary = rotary_angles(torch.arange(5), 4, 10_000.0, torch.float64)

    def rotated(x: Tensor, position: int) -> Tensor:
        out = torch.empty_like(x)
        for pair in range(2):
            angle = position * 10_000.0 ** (-2 * pair / 4)
            a, b = x[pair], x[pair + 2]
            out[pair] = a * math.cos(angle) - b * math.sin(angle)
            out[pair + 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def normed(x: Tensor, norm: RMSNorm) -> Tensor:
        return x / torch.sqrt(x.square().mean() + 1e-6) * norm.weight

    q, k, v = (proj(hidden)[0] for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    rows = []
    for i in range(5):
        heads = []
        for h in range(4):
            own, shared = slice(4 * h, 4 * h + 4), slice(4 * (h // 2), 4 * (h // 2) + 4)
            query = rotated(normed(q[i, own], attention.q_norm), i)
            keys = torch.stack([rotated(normed(k[j, shared], attention.k_norm), j) for j in range(i + 1)])
            heads.append(torch.softmax(keys @ query / 2.0, 0) @ v[: i + 1, shared])
        rows.append(attention.o_proj(torch.cat(heads)))
    torch.testing.assert_close(attention(hidden, rotary)[0], torch.stack(rows), rtol=1e-12, atol=1e-12)


def test_a_block_adds_attention_and_then_experts_to_its_input() -> None:
    model = make_model()
    block, hidden = model.layers[0], torch.randn(1, 5, 16, dtype=torch.float64)
    rotary = rotary_angles(torch.arange(5), 4, 10_000.0, torch.float64)
    middle = hidden + block.attention(block.attention_norm(hidden), rotary)
    torch.testing.assert_close(block(hidden, rotary), middle + block.moe(block.moe_norm(middle)), rtol=0, atol=0)


def test_no_position_sees_a_later_one() -> None:
    model, tokens = make_model(), ids()
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 19
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], rtol=1e-12, atol=1e-12)
    assert (before[:, 4:] != after[:, 4:]).any(-1).all()


def test_explicit_positions_equal_the_default_and_only_differences_matter() -> None:
    model, tokens = make_model(), ids()
    default = model(tokens)
    for position_ids in (torch.arange(7), torch.arange(7).expand(2, 7), torch.tensor([[0], [50]]) + torch.arange(7)):
        torch.testing.assert_close(model(tokens, position_ids), default, rtol=1e-10, atol=1e-10)
    stretched = model(tokens, 3 * torch.arange(7))
    assert (stretched - default).abs().max() > 1e-3


def test_packed_documents_equal_separate_sequences() -> None:
    model, tokens = make_model(), ids(1, 7)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]])
    packed = model(tokens, positions, documents)
    apart = torch.cat([model(tokens[:, :3]), model(tokens[:, 3:])], dim=1)
    torch.testing.assert_close(packed, apart, rtol=1e-10, atol=1e-10)


def test_one_document_equals_none() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 8, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 6, 8, generator=generator, dtype=torch.float64)
    plain = causal_attention(query, key, value)
    torch.testing.assert_close(causal_attention(query, key, value, torch.zeros(2, 6, dtype=torch.int64)), plain)


def test_rotary_angles_are_exact_at_a_position_of_a_million() -> None:
    rotary = rotary_angles(torch.tensor([1_000_003]), 4, 10_000.0, torch.float32)
    expected = [complex(math.cos(1_000_003 * f), math.sin(1_000_003 * f)) for f in (1.0, 0.01)]
    torch.testing.assert_close(rotary[0], torch.tensor(expected, dtype=torch.complex64), rtol=0, atol=1e-7)


def test_rotation_is_computed_in_float32_for_bfloat16() -> None:
    x = torch.randn(1, 2, 3, 4).bfloat16()
    rotary = rotary_angles(torch.arange(3), 4, 10_000.0, x.dtype)
    assert rotary.dtype == torch.complex64
    torch.testing.assert_close(apply_rotary(x, rotary), apply_rotary(x.float(), rotary).bfloat16(), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_computes_in_float32_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    norm = RMSNorm(6).to(dtype)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 6).to(dtype)
    exact = x.double() / torch.sqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * norm.weight.double()
    assert norm(x).dtype == dtype
    torch.testing.assert_close(norm(x), exact.to(dtype))


def test_gated_mlp_equals_its_definition() -> None:
    mlp, x = GatedMLP(6, 4).double(), torch.randn(3, 6, dtype=torch.float64)
    gate, up = x @ mlp.gate_up_proj.weight[:4].T, x @ mlp.gate_up_proj.weight[4:].T
    torch.testing.assert_close(mlp(x), (F.silu(gate) * up) @ mlp.down_proj.weight.T, rtol=1e-12, atol=1e-14)


def test_every_parameter_gets_a_gradient_from_a_single_token() -> None:
    model = make_model(shared_ffn_size=4)
    model(ids(1, 1)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []


def test_every_owner_of_parameters_can_initialise_itself() -> None:
    """Built on the meta device, emptied onto the CPU and reset: finite, and like a model that was built directly."""
    with torch.device("meta"):
        model = make_model(router="sigmoid", shared_ffn_size=4)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    for module in model.modules():
        if module._parameters or module._buffers:
            module.reset_parameters()
    direct = make_model(router="sigmoid", shared_ffn_size=4)
    for (name, ours), theirs in zip(model.named_parameters(), direct.parameters(), strict=True):
        assert ours.isfinite().all(), name
        assert ours.std(unbiased=False).item() == pytest.approx(theirs.std(unbiased=False).item(), rel=0.4), name
    assert not any(buffer.any() for buffer in model.buffers())


def test_options_reach_every_moe_layer() -> None:
    model = make_model(router="sigmoid", bias_update_rate=0.1, scaling=2.5, renormalize=False, shared_ffn_size=4)
    layers = [m for m in model.modules() if isinstance(m, MoELayer)]
    assert len(layers) == 2
    for layer in layers:
        router = layer.router
        assert (router.kind, router.bias_update_rate) == ("sigmoid", 0.1)
        assert (router.scaling, router.renormalize) == (2.5, False)
        assert layer.shared is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 3}, "multiple of 2 · num_heads = 6"),
        ({"hidden_size": 12, "num_heads": 4}, "multiple of 2 · num_heads = 8"),
        ({"num_kv_heads": 3}, "must divide num_heads=4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**options)
