"""One pool of worker processes for all distributed tests of a pytest run.

Importing torch and Lightning costs seconds, so the processes that play the ranks are started once, when the first test
needs them, and serve one task after another: ``run_on_ranks(2, function, ...)`` runs ``function`` on ranks 0 and 1.

Glossary. *worker*: a process that always plays the same rank. *task*: one call of a function on all its ranks.
*answer*: what one rank sends back, a result or an error. Workers are spawned, not forked, so that each has its own hash
seed as real ranks have. A worker that gives no answer is killed, and a new one is started when a test next needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.pool_worker import from_bytes, serve, to_bytes

MAX_RANKS = 4
START_TIMEOUT_S = 180.0
"""How long a worker may take to import torch and Lightning on a busy machine."""
GRACE_S = 2.0
"""How long the other ranks may still answer after one has failed."""
STACKS_TIMEOUT_S = 5.0
"""How long ranks that gave no answer may take to print where they stand."""
OUTPUT_TAIL_CHARACTERS = 6000


class RemoteError(Exception):
    """A rank raised, or its process died. ``rank`` failed first; ``failures`` holds one line for every failed rank."""

    def __init__(self, message: str, rank: int, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.failures = failures


def run_on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    init_group: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on every rank of a fresh world and return one result per rank.

    Args:
        world_size: 1 to 4 ranks.
        function: a module-level function; the workers import it by name.
        args, kwargs: sent by value, as are the results.
        timeout_s: how long the slowest rank may take.
        init_group: whether the default gloo process group exists when ``function`` starts. Without it,
            ``init_process_group("gloo")`` works: the environment is that of torchrun.

    Raises:
        RemoteError: a rank raised or died; the text holds type, message, traceback and output of the first one.
        TimeoutError: ranks gave no answer in time; the text names them and shows where they stood.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"world_size={world_size} is not allowed: the pool has 1 to {MAX_RANKS} ranks.")
    if "<" in function.__qualname__:
        raise ValueError(f"{function.__qualname__} is not importable by name: give a function of a module's top level.")
    workers = _start_workers(world_size)
    store, port = _folder[0] / f"store-{time.monotonic_ns()}", _free_port()
    for worker in workers:
        worker.send(
            {
                "module": function.__module__,
                "qualname": function.__qualname__,
                "args": args,
                "kwargs": kwargs,
                "rank": worker.rank,
                "world_size": world_size,
                "store": str(store),
                "port": port,
                "init_group": init_group,
                "group_timeout_s": timeout_s + 30.0,  # ours must strike first: it knows who is missing
            }
        )
    answers = _collect(workers, timeout_s)
    _raise_first_error(answers, workers)
    return [answers[worker.rank]["result"] for worker in workers]


class _Worker:
    """The parent's handle of the process that plays ``rank``."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.log = folder / f"rank{rank}-{time.monotonic_ns()}.log"
        self.log.touch()
        self.log_start = 0
        self.connection, child_connection = context.Pipe()
        # Not a daemon: those may not have children, and tests use data loader workers.
        self.process = context.Process(target=serve, args=(child_connection, str(self.log)), name=f"rank{rank}")
        self.process.start()
        child_connection.close()

    def wait_until_ready(self) -> None:
        if not self.connection.poll(START_TIMEOUT_S) or not self.process.is_alive():
            self.kill()
            raise RuntimeError(f"The worker of rank {self.rank} did not start.\n{self.output()}")
        self.connection.recv_bytes()

    def send(self, task: dict[str, Any]) -> None:
        self.log_start = self.log.stat().st_size
        self.connection.send_bytes(to_bytes(task))

    def output(self) -> str:
        """The end of what the process printed since its current task was sent."""
        with self.log.open(errors="replace") as file:
            file.seek(self.log_start)
            return f"--- output of rank {self.rank} ---\n{file.read()[-OUTPUT_TAIL_CHARACTERS:]}"

    def print_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)

    def has_printed_stacks(self) -> bool:
        """Whether the stack of the main thread, which comes last, is in the output to its end."""
        text = self.output()
        return "most recent call first" in text and text.rstrip().endswith("in <module>")

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        _workers.pop(self.rank, None)


_workers: dict[int, _Worker] = {}
_folder: list[Path] = []


def _start_workers(world_size: int) -> list[_Worker]:
    """The workers of ranks 0 .. world_size - 1; those that are missing start side by side."""
    if not _folder:
        _folder.append(Path(tempfile.mkdtemp(prefix="longmoe-test-pool-")))
        atexit.register(close_pool)
    for rank in [rank for rank, worker in _workers.items() if not worker.process.is_alive()]:
        _workers[rank].kill()
    # Two start in the time of one on the smallest machines, so that odd sizes bring their neighbour along.
    missing = [rank for rank in range(world_size + world_size % 2) if rank not in _workers]
    for rank in missing:
        _workers[rank] = _Worker(rank, _folder[0])
    for rank in missing:
        _workers[rank].wait_until_ready()
    return [_workers[rank] for rank in range(world_size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def close_pool() -> None:
    """End all workers. The next ``run_on_ranks`` would start new ones."""
    for worker in list(_workers.values()):
        worker.kill()
    while _folder:
        shutil.rmtree(_folder.pop(), ignore_errors=True)


def _collect(workers: list[_Worker], timeout_s: float) -> dict[int, dict[str, Any]]:
    """One answer per rank. Ranks without one are killed, whatever ends the waiting."""
    answers: dict[int, dict[str, Any]] = {}
    waiting = {worker.rank: worker for worker in workers}
    deadline = time.monotonic() + timeout_s
    try:
        while waiting and time.monotonic() < deadline:
            handles = [h for worker in waiting.values() for h in (worker.connection, worker.process.sentinel)]
            wait(handles, timeout=max(0.0, deadline - time.monotonic()))
            for worker in list(waiting.values()):
                answer = _answer_of(worker)
                if answer is not None:
                    answers[worker.rank] = answer
                    del waiting[worker.rank]
                    if "error" in answer:
                        deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting and not any("error" in answer for answer in answers.values()):
            raise TimeoutError(_describe_hang(list(waiting.values()), sorted(answers), timeout_s))
    finally:
        for worker in waiting.values():
            worker.kill()
    return answers


def _answer_of(worker: _Worker) -> dict[str, Any] | None:
    """The answer that has arrived, or the death of the process as an error, or None."""
    ended = not worker.process.is_alive()  # asked first: an answer may arrive just before the end
    try:
        if worker.connection.poll():
            return from_bytes(worker.connection.recv_bytes())
    except (EOFError, ConnectionError):
        worker.process.join(timeout=GRACE_S)
        ended = True
    if not ended:
        return None
    line = f"the process ended with exit code {worker.process.exitcode} before it answered"
    return {"error": line, "traceback": line, "time": time.monotonic()}


def _describe_hang(silent: list[_Worker], answered: list[int], timeout_s: float) -> str:
    for worker in silent:
        worker.print_stacks()
    deadline = time.monotonic() + STACKS_TIMEOUT_S
    while time.monotonic() < deadline and not all(worker.has_printed_stacks() for worker in silent):
        time.sleep(0.1)
    ranks = [worker.rank for worker in silent]
    outputs = "\n".join(worker.output() for worker in silent)
    return f"No answer from ranks {ranks} within {timeout_s} s (ranks {answered} answered).\n{outputs}"


def _raise_first_error(answers: dict[int, dict[str, Any]], workers: list[_Worker]) -> None:
    errors = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if not errors:
        return
    first = min(errors, key=lambda rank: errors[rank]["time"])
    failures = {rank: errors[rank]["error"] for rank in sorted(errors)}
    others = "".join(f"\nrank {rank}: {line}" for rank, line in failures.items() if rank != first)
    silent = [worker.rank for worker in workers if worker.rank not in answers]
    if silent:
        others += f"\nranks {silent} gave no answer within {GRACE_S} s of that and were killed"
    text = f"rank {first}: {failures[first]}{others}\n\n{errors[first]['traceback']}\n{workers[first].output()}"
    raise RemoteError(text, first, failures)
