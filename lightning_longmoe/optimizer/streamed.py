"""`OffloadStreamAdamW`: AdamW whose state lives in host memory and is updated on the device, bucket by bucket.

Source: arXiv 2609.14306, Eq. 5 and Algorithm 4. Reading order: `buckets` (where state lies), `store` (the slabs),
`update` (the arithmetic), `pipeline` (how buckets travel), this file (the optimizer around them).

Where parameters are on the CPU, their state is where it is updated: nothing travels, the rest is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import AdamW
from typing_extensions import override

from lightning_longmoe._compat import local_tensor
from lightning_longmoe.optimizer.pipeline import Pipeline
from lightning_longmoe.optimizer.store import MASTER, MOMENTS, Store, dense_flat, make_stores
from lightning_longmoe.optimizer.update import SETTINGS, Gradients, Memory, Target, update
from lightning_longmoe.runtime.host_memory import local_ranks
from lightning_longmoe.runtime.streams import HostStreams, Streams, streams_for

Moments = Literal["float32", "bf16"]


class OffloadStreamAdamW(AdamW):
    """AdamW with both moments, and fp32 master weights of bf16 and fp16 parameters, in host memory.

    Equal to the bit to ``torch.optim.AdamW(fused=True)`` over fp32 masters on the same device. Parameters are plain
    tensors or DTensors on any meshes; each rank updates what it holds. State exists for every trainable parameter from
    the start, as tensors (or DTensors) on the CPU.

    Args:
        params, lr, betas, eps, weight_decay, maximize: as torch's; ``lr`` may be a tensor.
        amsgrad: refused.
        bucket_numel: elements of a bucket, above 0; larger parameters are split at multiples of 16 elements.
        slots: buckets on the device at one time.
        moments: "bf16" halves the moments' host memory and their traffic; they are rounded stochastically, and the
            result is no longer AdamW's to the bit.
        streams: None: those of the parameters' device.
        progress: called with bytes done and bytes in all while host memory is made.

    Raises:
        ValueError: a setting or a parameter that is not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        bucket_numel: int = 100_000_000,
        slots: int = 2,
        moments: Moments = "float32",
        streams: Streams | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
        self._set_up(bucket_numel, slots, moments, streams, progress)

    def _set_up(
        self,
        bucket_numel: int,
        slots: int,
        moments: Moments,
        streams: Streams | None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Everything beyond torch's own constructor; also for an AdamW that becomes one of this class."""
        for name, value in (("bucket_numel", bucket_numel), ("slots", slots)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"OffloadStreamAdamW({name}={value!r}) is not allowed: give a whole number above 0.")
        if moments not in ("float32", "bf16"):
            raise ValueError(f"OffloadStreamAdamW(moments={moments!r}) is not allowed: choose 'float32' or 'bf16'.")
        for group in self.param_groups:
            _refuse_settings(group)
        self._bucket_numel, self._slots = bucket_numel, slots
        self._moments = torch.bfloat16 if moments == "bf16" else None
        self._given_streams = streams
        self._streams: dict[torch.device, Streams] = {}
        self._stores: list[Store] = []
        self._places: dict[Tensor, tuple[Store, int]] = {}
        self._gradients = Gradients()
        self._pipeline: Pipeline | None = None
        self.skipped_steps = 0
        self.staging_bytes = 0
        self._host_state = _HostState(self)
        self._extend([p for group in self.param_groups for p in group["params"]], progress)

    # -----------------------------------------------------------------------------------------------------------------
    # Parameters and their state
    # -----------------------------------------------------------------------------------------------------------------
    @property
    def state(self) -> Any:
        """By parameter: ``step``, ``exp_avg``, ``exp_avg_sq``, ``master`` (for low precision). Waits for the device."""
        self.flush()
        return self._host_state

    @state.setter
    def state(self, value: Any) -> None:
        """torch's constructor assigns an empty one."""
        assert not value, "state is loaded with load_state_dict"

    @property
    def state_device(self) -> torch.device:
        """Where loaded state belongs."""
        return torch.device("cpu")

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if hasattr(self, "_stores"):
            _refuse_settings(self.param_groups[-1])
            self._extend(self.param_groups[-1]["params"])

    def _extend(
        self, parameters: list[Tensor], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        trained = [p for p in parameters if p.requires_grad and p not in self._places]
        for device in dict.fromkeys(local_tensor(p).device for p in trained):
            mine = [p for p in trained if local_tensor(p).device == device]
            stores = make_stores(mine, self._streams_of(device), self._bucket_numel, self._moments, progress)
            for store in stores:
                self._register(store)

    def _register(self, store: Store) -> None:
        self._stores.append(store)
        for index, parameter in enumerate(store.parameters):
            self._places[parameter] = (store, index)
            values: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
            values |= {name: store.view(name, index) for name in store.slabs}
            dict.__setitem__(self._host_state, parameter, values)

    def _streams_of(self, device: torch.device) -> Streams:
        if device not in self._streams:
            self._streams[device] = self._given_streams or streams_for(device)
        return self._streams[device]

    def follow_groups(self) -> None:
        """Start anew with the parameters that are in the groups now, after someone replaced them."""
        self.flush()
        for store in self._stores:
            store.unpin(next(iter(self._streams.values())))
        self._stores, self._places, self._streams = [], {}, {}
        dict.clear(self._host_state)
        self._extend([p for group in self.param_groups for p in group["params"]])

    def flush(self) -> None:
        """Let the host wait until all state is in its memory. Reading ``state`` does it."""
        if self._host_state.in_flight:
            for streams in self._streams.values():
                streams.synchronize()
            self._host_state.in_flight = False

    def refresh_masters(self, changed_only: bool = True) -> None:
        """Take master weights from the parameters. A step does it for those that torch knows to be changed.

        Args:
            changed_only: False: from all of them, also where memory was written past torch.
        """
        self.flush()
        for store in self._stores:
            store.refresh_masters(changed_only)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank's state."""
        return sum(slab.nbytes for store in self._stores for slab in store.slabs.values())

    # -----------------------------------------------------------------------------------------------------------------
    # A step
    # -----------------------------------------------------------------------------------------------------------------
    def scale_gradients(self, scale: Tensor | None = None, limit: float | None = None) -> None:
        """What the next step does to gradients before it uses them: clipping, without a pass of its own.

        Args:
            scale: a scalar that multiplies them, as from a norm.
            limit: the largest absolute value of an element.
        """
        self._gradients = Gradients(scale, limit)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._gradients = Gradients()  # of gradients that are gone
        super().zero_grad(set_to_none)

    def prefetch(self) -> None:
        """Start fetching the first buckets, while the host still waits for a norm. Gradients must be there."""
        device = self._staged_device()
        if self._pipeline is None and device is not None:
            for store in self._stores:
                store.refresh_masters()
            works = [
                (store, bucket)
                for store in self._stores
                for bucket in store.buckets
                if any(store.parameters[piece.index].grad is not None for piece in bucket.pieces)
            ]
            self._pipeline = Pipeline(works, self._streams[device], self._slots)
            self.staging_bytes = self._pipeline.staging_bytes

    def _staged_device(self) -> torch.device | None:
        """The device to which state travels; None where it is updated in host memory."""
        staged = [d for d, streams in self._streams.items() if not isinstance(streams, HostStreams)]
        if len(staged) > 1:
            raise ValueError(f"OffloadStreamAdamW updates parameters on one device, and was given some on {staged}.")
        return staged[0] if staged else None

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient.

        Args:
            closure: computes loss and gradients anew; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients, self._gradients = self._gradients, Gradients()
        settings: dict[int, tuple[Any, ...]] = {}
        for group in self.param_groups:
            settings.update(dict.fromkeys(map(id, group["params"]), _settings(group)))
            self._extend([p for p in group["params"] if p.requires_grad and p not in self._places])
        targets = {store: self._targets(store, settings) for store in self._stores}
        if not any(targets.values()):
            self._abandon()
            return loss
        self.prefetch()
        steps = [self._host_state[store.parameters[i]]["step"] for store in self._stores for i in targets[store]]
        torch._foreach_add_(steps, 1.0)
        self._number(targets)
        if self._pipeline is not None:
            pipeline, self._pipeline = self._pipeline, None
            pipeline.run(lambda store, bucket, views: _update(store, bucket, views, targets[store], gradients))
            self._host_state.in_flight = True
        else:
            with _fair_share_of_threads():
                self._step_in_place(targets, gradients)
        for store in self._stores:
            store.masters_are_current()
        return loss

    def _abandon(self) -> None:
        if self._pipeline is not None:
            self._pipeline.abandon()
            self._pipeline = None

    def _step_in_place(self, targets: dict[Store, dict[int, Target]], gradients: Gradients) -> None:
        for store in self._stores:
            store.refresh_masters()
            for bucket in store.buckets:
                views = {name: slab[bucket.start : bucket.stop] for name, slab in store.slabs.items()}
                _update(store, bucket, views, targets[store], gradients)

    def _targets(self, store: Store, settings: dict[int, tuple[Any, ...]]) -> dict[int, Target]:
        targets = {}
        for index, parameter in enumerate(store.parameters):
            gradient = parameter.grad
            if gradient is None or id(parameter) not in settings:
                continue
            local, gradient = local_tensor(parameter), local_tensor(gradient)
            if gradient.is_sparse:
                raise RuntimeError("OffloadStreamAdamW does not support sparse gradients: use SparseAdam.")
            if local.numel() == 0:
                continue
            if gradient.stride() != local.stride():
                gradient = torch.empty_like(local).copy_(gradient)
            step = self._host_state[parameter]["step"]
            targets[index] = Target(dense_flat(local), dense_flat(gradient), settings[id(parameter)], step)
        return targets

    def _number(self, targets: dict[Store, dict[int, Target]]) -> None:
        """On a device, steps are device scalars: one for each number, made without waiting."""
        made: dict[tuple[torch.device, float], Tensor] = {}
        for of_store in targets.values():
            for target in of_store.values():
                device = target.weight.device
                if device.type == "cpu":
                    continue
                key = (device, float(target.step))
                if key not in made:
                    made[key] = torch.full((), key[1], dtype=torch.float32, device=device)
                target.step = made[key]

    # -----------------------------------------------------------------------------------------------------------------
    # Saved state
    # -----------------------------------------------------------------------------------------------------------------
    @override
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy saved state into the host memory that is there, whatever its dtype and device; nothing is allocated.

        Args:
            state_dict: of this class or of ``torch.optim.AdamW``. Parameters without an entry start fresh; masters that
                it lacks are taken from the parameters.

        Raises:
            ValueError: groups or shapes that do not fit, or state of AMSGrad.
        """
        self.flush()
        self._abandon()
        saved, running = state_dict["param_groups"], self.param_groups
        if [len(group["params"]) for group in saved] != [len(group["params"]) for group in running]:
            raise ValueError(
                f"The saved optimizer has groups of {[len(g['params']) for g in saved]} parameters, this one of"
                f" {[len(g['params']) for g in running]}: build it with the groups it was saved with."
            )
        for theirs in saved:
            _refuse_settings(theirs)
        for theirs, ours in zip(saved, running, strict=True):
            for key, parameter in zip(theirs["params"], ours["params"], strict=True):
                if parameter in self._places:
                    self._load(parameter, state_dict["state"].get(key) or {})
            ours.update({name: value for name, value in theirs.items() if name not in ("params", "fused", "foreach")})
        for store in self._stores:
            store.masters_are_current()

    @torch.no_grad()
    def _load(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        own = self._host_state[parameter]
        store, index = self._places[parameter]
        own["step"].fill_(float(values["step"]) if "step" in values else 0.0)
        for name in MOMENTS:
            _copy(values.get(name), own[name], name)
        if MASTER in store.slabs:
            if values.get(MASTER) is not None:
                _copy(values[MASTER], own[MASTER], MASTER)
            else:
                store.flat(MASTER, index).copy_(dense_flat(local_tensor(parameter)))


def _update(
    store: Store, bucket: Any, views: dict[str, Tensor], targets: dict[int, Target], gradients: Gradients
) -> None:
    wide = store.widened(views)
    memory = Memory(wide["exp_avg"], wide["exp_avg_sq"], wide.get(MASTER))
    device = views["exp_avg"].device
    update(bucket, memory, targets, gradients, lambda n: torch.empty(n, dtype=store.update_dtype, device=device))
    store.narrow(wide, views)


def _settings(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(tuple(group[name]) if name == "betas" else group[name] for name in SETTINGS)


def _refuse_settings(group: Mapping[str, Any]) -> None:
    for name in ("amsgrad", "capturable", "differentiable"):
        if group.get(name):
            raise ValueError(
                f"OffloadStreamAdamW does not do {name}=True: leave it out, or keep torch.optim.AdamW"
                " (optimizer_state=None)."
            )


def _copy(value: Any, own: Tensor, name: str) -> None:
    target = local_tensor(own)
    if value is None:
        target.zero_()
        return
    source = local_tensor(value)
    if source.shape != target.shape:
        raise ValueError(f"The saved {name} is {tuple(source.shape)} on this rank, its place {tuple(target.shape)}.")
    if source.data_ptr() != target.data_ptr() or source.dtype != target.dtype:
        target.copy_(source)


class _HostState(dict):
    """State by parameter. Assigning copies into host memory: Trainers move an optimizer's state to the device so.

    Attributes:
        in_flight: whether the device may still write it. It is kept here since wrappers copy an optimizer's attributes.
    """

    def __init__(self, optimizer: OffloadStreamAdamW) -> None:
        super().__init__()
        self._optimizer = optimizer
        self.in_flight = False

    def __setitem__(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        if parameter not in self:
            raise KeyError("OffloadStreamAdamW has no such trainable parameter; use add_param_group first.")
        self._optimizer._load(parameter, values)

    def __missing__(self, parameter: Tensor) -> dict[str, Any]:
        return {}

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def fair_threads() -> int:
    """Threads of a step in host memory: the rank's share of processors that it may use, or more where it has more."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    return max(torch.get_num_threads(), processors // local_ranks())


@contextmanager
def _fair_share_of_threads() -> Iterator[None]:
    """A launcher gives each rank one thread; the update, bound by memory, takes the rank's share of the processors."""
    before, share = torch.get_num_threads(), fair_threads()
    if share > before:
        torch.set_num_threads(share)
    try:
        yield
    finally:
        if share > before:
            torch.set_num_threads(before)
