"""What of Lightning's checkpoint goes where, and back: sharded tensors by their path, the rest into ``meta.pt``."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_longmoe.saving.agreement import CheckpointError

FORMAT_VERSION = 1

KeyPath = tuple[str, ...]
"""Path of a tensor in the checkpoint: ("state_dict", fqn) or ("optimizer_0", "state", fqn, name)."""


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of model and optimizers, nested as `flat_keys` flattens them, and the rest for ``meta.pt``."""
    meta = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
    model = checkpoint["state_dict"]
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, value in model.items():
        if isinstance(value, Tensor) and first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
    tensors: dict[str, Any] = {
        "state_dict": {n: v for n, v in model.items() if isinstance(v, Tensor) and n not in tied},
    }
    saving: dict[str, Any] = {
        "version": FORMAT_VERSION,
        "tied": tied,
        "objects": {n: v for n, v in model.items() if not isinstance(v, Tensor)},
    }
    if "optimizer_states" in checkpoint:
        saving["optimizers"] = []
        for index, state in enumerate(checkpoint["optimizer_states"]):
            tensors[f"optimizer_{index}"] = {"state": _part(state["state"], of_tensors=True)}
            rest = {key: value for key, value in state.items() if key != "state"}
            saving["optimizers"].append({**rest, "values": _part(state["state"], of_tensors=False)})
    meta["longmoe"] = {**meta.get("longmoe", {}), "saving": saving}
    return tensors, _on_host(meta, "checkpoint")


def _part(state: Mapping[str, Mapping[str, Any]], of_tensors: bool) -> dict[str, dict[str, Any]]:
    parts = {
        fqn: {name: value for name, value in values.items() if isinstance(value, Tensor) == of_tensors}
        for fqn, values in state.items()
    }
    return {fqn: values for fqn, values in parts.items() if values}


def _on_host(value: Any, where: str) -> Any:
    """``value`` with the tensors in its containers on the CPU.

    Raises:
        CheckpointError: a sharded tensor outside the model and the optimizers.
    """
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"{where} is a sharded tensor, and only those in checkpoint['state_dict'] and in the optimizers are"
            " saved in shards. Put its .full_tensor() there, on all ranks."
        )
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _on_host(inner, f"{where}[{key!r}]")) for key, inner in value.items())
    if type(value) in (list, tuple):
        return type(value)(_on_host(inner, f"{where}[{index}]") for index, inner in enumerate(value))
    return value


def flat_keys(tensors: Mapping[str, Any], prefix: KeyPath = ()) -> dict[KeyPath, Tensor]:
    """Nested tensors by their path."""
    keys: dict[KeyPath, Tensor] = {}
    for name, value in tensors.items():
        path = (*prefix, str(name))
        keys.update({path: value} if isinstance(value, Tensor) else flat_keys(value, path))
    return keys


def ordinary_checkpoint(meta: Mapping[str, Any], full: Mapping[KeyPath, Tensor]) -> dict[str, Any]:
    """Lightning's ordinary checkpoint from the content of ``meta.pt`` and whole tensors.

    Optimizer states are numbered as torch numbers parameters; their fqns are kept beside.
    """
    saving = meta["longmoe"]["saving"]
    model = {path[1]: value for path, value in full.items() if path[0] == "state_dict"}
    model.update({name: model[first] for name, first in saving["tied"].items()})
    checkpoint = {key: value for key, value in meta.items() if key != "longmoe"}
    checkpoint["state_dict"] = {**model, **saving["objects"]}
    kept: dict[str, Any] = {"version": saving["version"]}
    if "optimizers" in saving:
        names = [[name for group in o["param_groups"] for name in group["params"]] for o in saving["optimizers"]]
        kept = {**kept, "parameter_names": names, "local": [o["local"] for o in saving["optimizers"]]}
        checkpoint["optimizer_states"] = [
            _numbered(optimizer, {path[2:]: v for path, v in full.items() if path[0] == f"optimizer_{i}"}, names[i])
            for i, optimizer in enumerate(saving["optimizers"])
        ]
    checkpoint["longmoe"] = {**{k: v for k, v in meta["longmoe"].items() if k != "saving"}, "saving": kept}
    return checkpoint


def _numbered(optimizer: Mapping[str, Any], full: Mapping[KeyPath, Tensor], names: list[str]) -> dict[str, Any]:
    """One optimizer's state in torch's form; ``full`` by (fqn, name)."""
    number = {name: index for index, name in enumerate(names)}
    state: dict[Any, dict[str, Any]] = {}
    for (fqn, name), value in full.items():
        state.setdefault(number[fqn], {})[name] = value
    for fqn, values in optimizer["values"].items():
        state.setdefault(number[fqn], {}).update(values)
    groups = [{**group, "params": [number[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": {**dict(sorted(state.items())), **optimizer["other"]}, "param_groups": groups}
