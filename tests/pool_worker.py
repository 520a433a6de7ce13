"""A worker process of the pool: it plays one rank, serves task after task and forgets each of them."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import io
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy
import torch
import torch.distributed as dist


def to_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(connection: Connection, log: str) -> None:
    """Answer tasks until the parent closes the connection."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends us
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    for name in ("lightning.pytorch", "torch.distributed.tensor", "torch.distributed.fsdp"):
        importlib.import_module(name)
    with contextlib.suppress(ImportError):  # the first test that needs it tells why
        importlib.import_module("lightning_longmoe")
    environment, folder = dict(os.environ), os.getcwd()
    _reset(environment, folder)
    gc.freeze()  # what is imported stays: each reset's collection need not look at it again
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            answer = _answer(connection.recv_bytes())
            _reset(environment, folder)
            connection.send_bytes(answer)
    os._exit(0)  # gloo's threads may abort an orderly interpreter exit


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _answer(data: bytes) -> bytes:
    try:
        return to_bytes({"result": _perform(from_bytes(data))})
    except BaseException as error:  # noqa: BLE001  torch's CheckpointException is no Exception
        text = f"{type(error).__name__}: {error}"
        return to_bytes({"error": text, "traceback": traceback.format_exc(), "time": time.monotonic()})


def _perform(task: dict[str, Any]) -> Any:
    rank, world_size = task["rank"], task["world_size"]
    # With every task anew: a Trainer that ends sets all signals back to what Python knows of, and that is not this one.
    faulthandler.unregister(signal.SIGUSR1)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    _set_environment(rank, world_size, task["port"])
    function = importlib.import_module(task["module"])
    for name in task["qualname"].split("."):
        function = getattr(function, name)
    if task["init_group"]:
        timeout = timedelta(seconds=task["group_timeout_s"])
        # Not a TCPStore: it asks the name server who 127.0.0.1 is, and waits 5 s for each answer that gets lost.
        store = dist.FileStore(task["store"], world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        dist.barrier()  # a rank that fails at once would leave the others to retry their connections for seconds
    return function(*task["args"], **task["kwargs"])


def _set_environment(rank: int, world_size: int, port: int) -> None:
    """What torchrun sets on one node."""
    ranks = {name: rank for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")}
    sizes = {name: world_size for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")}
    rest = {
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "pool",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
    }
    os.environ.update({name: str(value) for name, value in {**ranks, **sizes, **rest}.items()})


def _reset(environment: dict[str, str], folder: str) -> None:
    """Bring everything global back to its first state, so that tasks do not see each other."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    # Equal meshes of two tasks hash alike, so cached specs would lead into the groups of the task before.
    from torch.distributed.device_mesh import _mesh_resources
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _mesh_resources.mesh_stack.clear()
    _clear_sharding_prop_cache()
    auxiliary = sys.modules.get("lightning_longmoe.models.auxiliary")
    if auxiliary is not None:
        auxiliary.discard_aux_losses()
    meshes = sys.modules.get("lightning_longmoe.runtime.meshes")
    if meshes is not None:
        meshes._kept.clear()
        meshes._kept_user.clear()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    gc.collect()
