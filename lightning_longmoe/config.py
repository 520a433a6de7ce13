"""The configuration dataclasses, and nothing else.

All of them are frozen and keyword-only, hold plain values (so that YAML and the command line can express every one of
them) and check what can be checked without a process group. What depends on the world size is checked in
:mod:`lightning_longmoe.layout`; what depends on the model, in :mod:`lightning_longmoe.parallelize`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union

from lightning_longmoe.runtime.host_memory import parse_bytes

T = TypeVar("T")

Activation = Literal["silu", "gelu", "identity", "gpt_oss"]


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or (not isinstance(value, int)) or value < 1:
            raise ValueError(
                f"{type(config).__name__}({name}={value!r}) is not allowed: give a whole number of at least 1."
            )


def require_seconds(owner: str, name: str, value: Any) -> None:
    """Raise ValueError for what is not a number of seconds above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{owner}({name}={value!r}) is not allowed: give seconds as a number above 0.")


def _as_names(config: object, name: str) -> None:
    """One class name given as text is a list of one."""
    value = getattr(config, name)
    if isinstance(value, str):
        value = [value]
    if value is not None and not (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)):
        raise ValueError(f"{type(config).__name__}({name}={value!r}) is not allowed: give class names, or None.")
    object.__setattr__(config, name, None if value is None else list(value))


def _require_choice(config: object, name: str, choices: tuple[Any, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{type(config).__name__}({name}={value!r}) is not allowed. Choose one of {list(choices)}.")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the groups that share the ranks of one world; the groups overlap, their sizes are not multiplied."""

    expert_parallel_size: Union[int, Literal["auto"]] = "auto"
    """Ranks that hold one copy of all experts together. "auto": the largest common divisor of the expert count and the
    ranks of a node; 1 for a model without experts."""
    context_parallel_size: int = 1
    """Ranks that share one batch, each holding a part of every sequence."""
    vocabulary_parallel_size: Union[int, Literal["auto"]] = "auto"
    """Ranks that hold one copy of the vocabulary projection together. "auto": the ranks of a node."""
    replicate_size: int = 1
    """Copies of the sharded model (HSDP). Parameters are sharded over world size / replicate_size ranks."""

    def __post_init__(self) -> None:
        _require_positive(self, "context_parallel_size", "replicate_size")
        for name in ("expert_parallel_size", "vocabulary_parallel_size"):
            if getattr(self, name) != "auto":
                _require_positive(self, name)


@dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    """How parameters are sharded with FSDP2."""

    blocks: Union[list[str], None] = None
    """Class names of the modules that become FSDP units. None: the model's own ``_no_split_modules``, else the elements
    of its outermost ``nn.ModuleList``."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward. False keeps them until the backward: faster, larger."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the gradient reduction."""
    sync_each_microbatch: bool = True
    """Reduce gradients after every micro-batch. False reduces once in each accumulation window, which saves
    communication and keeps *unsharded* gradients alive between the micro-batches."""
    meta_device: bool = False
    """Build what ``configure_model`` makes on the meta device, and give the weights their values shard by shard after
    sharding: for models larger than a host. The weights are the same at every world size."""

    def __post_init__(self) -> None:
        _require_choice(self, "reduce_dtype", ("float32", "bfloat16"))
        _as_names(self, "blocks")


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Activation checkpointing of decoder blocks (non-reentrant)."""

    enabled: bool = True
    """Recompute each block in the backward instead of keeping its activations."""
    blocks: Union[list[str], None] = None
    """Class names of the modules that are recomputed. None: the blocks that become FSDP units."""
    boundaries_per_layer: int = 1
    """1: a block is recomputed as a whole, and its input is kept. 2: the two parts that it names in
    ``recompute_parts`` (attention, experts) are recomputed one after the other: twice as many boundaries are kept, and
    only one part's activations are alive at a time."""

    def __post_init__(self) -> None:
        _require_choice(self, "boundaries_per_layer", (1, 2))
        _as_names(self, "blocks")


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Which tensors of a batch run along the sequence, who shifts the labels, and how a window is normalised."""

    sequence_keys: tuple[str, ...] = ("input_ids", "labels", "position_ids", "attention_mask", "document_ids")
    """Keys of the batch whose tensors run along the sequence and are split over the context ranks."""
    sequence_dim: int = 1
    """The dimension of those tensors that is the sequence."""
    labels_shifted: bool = False
    """False: ``labels[i]`` is the token at position i and the strategy shifts by one, before any split, when the module
    holds a `CausalLMHead`. True: ``labels[i]`` already is the token that follows position i."""
    shift_labels: bool = True
    """False: the labels of a batch are left as the dataloader gives them, also for a module that holds a
    `CausalLMHead`: for one that shifts them itself, with `shift_labels` of ``lightning_longmoe.models`` or in a loss of
    its own, and for labels that are no tokens, as the classes of sequences."""
    normalize: Literal["window", "microbatch"] = "window"
    """"window": gradients are the mean over all valid labels of an accumulation window. "microbatch": the mean of the
    micro-batches' means, as plain Lightning does."""

    def __post_init__(self) -> None:
        _require_choice(self, "normalize", ("window", "microbatch"))
        object.__setattr__(self, "sequence_keys", tuple(self.sequence_keys))
        if self.sequence_dim < 0:
            raise ValueError(f"BatchConfig(sequence_dim={self.sequence_dim}) is not allowed: count from 0 upwards.")


@dataclass(frozen=True, kw_only=True)
class SaveConfig:
    """How checkpoints are written."""

    sharded: bool = True
    """True: a folder, each rank writes its own shards. False: rank 0 gathers everything into one file."""
    all_ranks_timeout_s: float = 25.0
    """How long a save waits for every rank to take part before it fails with the ranks that are missing."""
    weights_only: bool = True
    """Refuse checkpoints that hold more than plain values and tensors, where the Trainer is not told."""

    def __post_init__(self) -> None:
        require_seconds("SaveConfig", "all_ranks_timeout_s", self.all_ranks_timeout_s)


@dataclass(frozen=True, kw_only=True)
class ExpertLayout:
    """How the weights of a stack of experts are laid out, and what is computed between their two products."""

    gated: bool = True
    """Two halves, gate and up, of which the first goes through the activation and multiplies the second."""
    transposed: bool = False
    """False: ``gate_up_proj [E, 2F, H]``, ``down_proj [E, H, F]``. True: ``[E, H, 2F]`` and ``[E, F, H]``."""
    interleaved: bool = False
    """Gate and up alternate along 2F (gate 0, up 0, gate 1, ...) instead of lying one after the other."""
    activation: Activation = "silu"
    """"gpt_oss": gate·sigmoid(1.702·gate)·(up + 1), with both clamped."""
    clamp: Union[float, None] = None
    """Largest gate, and largest absolute up, before the activation; None: no clamp."""

    def __post_init__(self) -> None:
        _require_choice(self, "activation", ("silu", "gelu", "identity", "gpt_oss"))
        if self.activation == "gpt_oss" and not self.gated:
            raise ValueError("ExpertLayout(activation='gpt_oss', gated=False) is not allowed: gpt_oss is a gated form.")
        if self.interleaved and not self.gated:
            raise ValueError("ExpertLayout(interleaved=True, gated=False) is not allowed: nothing to interleave.")


def as_config(value: Any, kind: type[T], name: str) -> T:
    """Return ``value`` as a ``kind``: Python callers may pass a mapping where a config is meant.

    Raises:
        ValueError: ``value`` is neither a ``kind`` nor a mapping of its fields.
    """
    if isinstance(value, kind):
        return value
    fields = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    if isinstance(value, dict):
        unknown = sorted(set(value) - set(fields))
        if unknown:
            raise ValueError(f"{name} has no field {unknown}. {kind.__name__} takes {fields}.")
        return kind(**value)
    raise ValueError(
        f"{name}={value!r} is not allowed: give a {kind.__name__}(...) or a mapping of its fields {fields}."
    )


def as_operator(value: Any, kind: type[T], name: str) -> Union[T, Literal["auto"], None]:
    """As `as_config`, for an operator's argument, which may also be "auto" or None (off)."""
    if value is None or value == "auto":
        return value
    if isinstance(value, str):
        raise ValueError(f"{name}={value!r} is not allowed: give 'auto', None or a {kind.__name__}(...).")
    return as_config(value, kind, name)


@dataclass(frozen=True, kw_only=True)
class PipelinedLLEP:
    """Chunked, least-loaded expert dispatch (arXiv 2609.14306, Eq. 1; the assignment of arXiv 2601.17111)."""

    tokens_per_chunk: int = 4096
    """Tokens of one rank in one chunk. Buffers grow with it, not with the sequence and not with the routing."""
    max_chunks: Union[int, None] = 10
    """Largest number of chunks; where it binds, a chunk holds more tokens than ``tokens_per_chunk``. None: no limit."""
    capacity_factor: float = 1.0
    """Rows that a rank may be assigned, as a multiple of the even share; below 1 it counts as 1."""
    min_tokens_per_gemm: int = 1024
    """Fewest rows of an expert that are split off for another rank, unless they are the last of that expert."""
    imbalance_threshold: float = 1.3
    """Largest over mean load of the ranks from which on experts' rows are moved; below it every row goes home. 1: rows
    are always moved."""
    depth: int = 2
    """Chunks in flight. 2: a chunk travels while another is computed. 1: one after the other, with smaller buffers."""

    def __post_init__(self) -> None:
        _require_positive(self, "tokens_per_chunk", "min_tokens_per_gemm")
        if self.max_chunks is not None:
            _require_positive(self, "max_chunks")
        _require_choice(self, "depth", (1, 2))
        for name, least in (("capacity_factor", 0.0), ("imbalance_threshold", 1.0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
                raise ValueError(f"PipelinedLLEP({name}={value!r}) is not allowed: give a number of at least {least}.")
        if self.capacity_factor == 0:
            raise ValueError("PipelinedLLEP(capacity_factor=0) is not allowed: give a number above 0.")


@dataclass(frozen=True, kw_only=True)
class RingDTP:
    """Vocabulary projection and loss over a ring of vocabulary shards (arXiv 2609.14306, Eq. 2-3, Algorithm 2)."""

    mode: Literal["auto", "weights", "activations"] = "auto"
    """What travels around the ring. "weights": the vocabulary shards, past tokens that stay. "activations": the tokens,
    past shards that stay. "auto": tokens where no rank has more of them than V / P, else shards."""
    token_tile: int = 2048
    """Most tokens of one tile of logits, and of one travelling piece where tokens travel."""
    vocab_tile: int = 8192
    """Most vocabulary rows of one tile of logits, and of one travelling piece where shards travel."""

    def __post_init__(self) -> None:
        _require_choice(self, "mode", ("auto", "weights", "activations"))
        _require_positive(self, "token_tile", "vocab_tile")


@dataclass(frozen=True, kw_only=True)
class BoundaryOffload:
    """Inputs of recomputed blocks wait in host memory (selective checkpoint offload, arXiv 2609.14306, Algorithm 3)."""

    host_budget: Union[int, str, None] = None
    """Host memory of one rank for boundaries, in bytes or like "16GiB"; the earliest go first, the others stay on the
    device. None: all of them go."""
    keep_last: int = 2
    """The last boundaries of a forward, which the backward wants at once, stay on the device."""

    def __post_init__(self) -> None:
        if self.host_budget is not None:
            parse_bytes(self.host_budget, "BoundaryOffload.host_budget")
        if isinstance(self.keep_last, bool) or not isinstance(self.keep_last, int) or self.keep_last < 0:
            raise ValueError(f"BoundaryOffload(keep_last={self.keep_last!r}) is not allowed: give 0 or more.")

    @property
    def host_budget_bytes(self) -> Union[int, None]:
        """The budget in bytes; None: no limit."""
        return None if self.host_budget is None else parse_bytes(self.host_budget, "BoundaryOffload.host_budget")


@dataclass(frozen=True, kw_only=True)
class OptimizerOffload:
    """AdamW's state in host memory, updated on the device in buckets (arXiv 2609.14306, Eq. 5 and Algorithm 4)."""

    bucket_numel: int = 100_000_000
    """Elements that are updated at a time. The device holds ``slots`` buckets of state: 12 bytes an element where the
    parameters are bfloat16, and 4 more for the gradient of one; 8 where they are float32."""
    slots: int = 2
    """Buckets on the device at one time: while one is updated, another comes and a third goes."""
    moments: Literal["float32", "bf16"] = "float32"
    """"bf16" halves the moments' host memory and traffic. They are rounded stochastically: not exact."""

    def __post_init__(self) -> None:
        _require_positive(self, "bucket_numel", "slots")
        _require_choice(self, "moments", ("float32", "bf16"))


@dataclass(frozen=True, kw_only=True)
class ContextConfig:
    """How attention sees over the ranks that share a sequence."""

    kind: Literal["auto", "ulysses", "ring", "hybrid"] = "auto"
    """"ulysses": ranks exchange heads for tokens. "ring": keys and values come by. "hybrid": heads within a node, a
    ring over nodes. "auto": by heads, ranks and ranks of a node; the start-up table says why."""
    ulysses_size: Union[int, Literal["auto"]] = "auto"
    """Ranks of a hybrid that exchange heads."""

    def __post_init__(self) -> None:
        _require_choice(self, "kind", ("auto", "ulysses", "ring", "hybrid"))
        if self.ulysses_size != "auto":
            _require_positive(self, "ulysses_size")
            if self.kind != "hybrid":
                raise ValueError(f"ContextConfig(ulysses_size={self.ulysses_size}) is allowed with kind='hybrid' only.")
