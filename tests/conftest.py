"""What all tests share: the ``gpu`` marker, and a clean end of the pytest process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

_session: list[pytest.Session] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped without one")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_sessionstart(session: pytest.Session) -> None:
    _session[:] = [session]


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers, and leave at once: gloo's threads may abort an orderly interpreter exit.

    Only where pytest is the program: whoever calls ``pytest.main`` goes on.
    """
    pool = sys.modules.get("tests.pool")
    if pool is not None:
        pool.close_pool()
    program = Path(sys.argv[0])
    is_program = program.name in ("pytest", "py.test") or program.parts[-2:] == ("pytest", "__main__.py")
    if not is_program or not _session or hasattr(config, "workerinput"):
        return
    config.get_terminal_writer().flush()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(int(_session[0].exitstatus))
