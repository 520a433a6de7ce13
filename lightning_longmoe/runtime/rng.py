"""The random state of this process as plain values that ``torch.load(weights_only=True)`` accepts."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

RngState = dict[str, Any]


def host_rng_state() -> RngState:
    """Random state of Python, NumPy and torch on the CPU: what loading data may draw from."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()  # type: ignore[misc]
    words = torch.from_numpy(np.array(internal, dtype=np.int64))
    return {
        "python": {"version": version, "internal": words, "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }


def rng_state() -> RngState:
    """`host_rng_state`, and that of the current CUDA device where CUDA is in use."""
    state = host_rng_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    """Continue from a state that `rng_state` or `host_rng_state` returned; what it does not hold stays as it is."""
    python, numpy = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["internal"].tolist()), python["gauss"]))
    keys = numpy["keys"].numpy().astype(np.uint32)
    np.random.set_state((numpy["name"], keys, numpy["position"], numpy["has_gauss"], numpy["cached"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
