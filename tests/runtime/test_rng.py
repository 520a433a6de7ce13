"""The random state of a process survives ``torch.save`` and a weights-only load."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_longmoe.runtime.rng import host_rng_state, rng_state, set_rng_state


def draw() -> list[float]:
    normal = [random.gauss(0, 1), float(np.random.randn()), float(torch.randn(()))]
    return [*normal, random.random(), float(np.random.rand()), float(torch.rand(()))]


@pytest.mark.parametrize("capture", [rng_state, host_rng_state])
def test_draws_go_on_from_a_state_that_was_saved_and_loaded(capture: Any) -> None:
    draw()  # leaves half a pair of normal numbers behind in Python's and NumPy's generators
    buffer = io.BytesIO()
    torch.save(capture(), buffer)
    expected = draw()
    buffer.seek(0)
    set_rng_state(torch.load(buffer, weights_only=True))
    assert draw() == expected


@pytest.mark.gpu
def test_draws_on_the_gpu_go_on_too() -> None:
    torch.rand(3, device="cuda")
    state = rng_state()
    expected = torch.rand(3, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert "cuda" not in host_rng_state()
