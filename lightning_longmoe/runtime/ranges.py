"""Named ranges for profilers. They cost nothing while no profiler runs.

============================  =======================================================================================
``longmoe/dispatch/plan``     exchange of counts and plan of a layer, with its one wait for the device
``longmoe/dispatch/forward``  all chunks of a layer's forward; ``.../backward``: of its backward
``longmoe/dispatch/chunk``    the experts' products of one chunk
``longmoe/vocabulary/...``    ``forward`` and ``backward`` of the loss, and ``hop``: the start of one hop of the ring
``longmoe/boundaries/...``    ``to_host`` and ``to_device``: the start of a boundary's copy
``longmoe/optimizer/bucket``  the update of one bucket of streamed optimizer state
``longmoe/clip``              the norm over all meshes, and clipping
============================  =======================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

P = ParamSpec("P")
T = TypeVar("T")


def ranged(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: calls of the function are a range of that name in profiles."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            if not profiler._is_profiler_enabled:
                return function(*args, **kwargs)
            with profiler.record_function(name):
                return function(*args, **kwargs)

        return wrapper

    return decorate
