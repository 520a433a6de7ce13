"""`LongMoEStrategy`: the life of a training step, each override a few lines that call the rooms of this package.

Read top to bottom: processes and meshes, precision, the model, data, steps, loops, checkpoints, the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_longmoe import _compat, saving
from lightning_longmoe.advice import add_advice
from lightning_longmoe.batches import Batches
from lightning_longmoe.batches.watch import Watch, batches_for
from lightning_longmoe.buffers import agree_on_buffers
from lightning_longmoe.config import (
    BatchConfig,
    BoundaryOffload,
    ContextConfig,
    FSDPConfig,
    OptimizerOffload,
    ParallelConfig,
    PipelinedLLEP,
    RecomputeConfig,
    RingDTP,
    SaveConfig,
    as_config,
    as_operator,
    require_seconds,
)
from lightning_longmoe.environment import (
    choose_launcher,
    leave_process_group_at_exit,
    refuse_fresh_start,
    refuse_unusable_callbacks,
    refuse_unusable_environment,
)
from lightning_longmoe.layout import Layout
from lightning_longmoe.loops import evaluate_without_inference_mode, reduce_tensor
from lightning_longmoe.materialize import agree_on_initial_values, agreed_seed, materialize, move_to_device
from lightning_longmoe.models.auxiliary import discard_aux_losses, refuse_waiting_aux_losses
from lightning_longmoe.models.moe import update_router_biases
from lightning_longmoe.optimizer.remap import EarlyParameters, refuse_fused_over_meshes, remap_optimizers
from lightning_longmoe.optimizer.swap import offload_optimizers
from lightning_longmoe.parallelize import (
    Takeover,
    average_outside,
    check_run,
    layout_for,
    parallelize,
    parallelized,
    reshard,
)
from lightning_longmoe.precision import LongMoEPrecision
from lightning_longmoe.report import log_config, plain_setting, print_start_up_table
from lightning_longmoe.runtime.host_memory import node_bytes, parse_share
from lightning_longmoe.runtime.meshes import Meshes, meshes_for, user_mesh

if TYPE_CHECKING:
    import lightning.pytorch as pl


class LongMoEStrategy(ModelParallelStrategy):
    """Trains mixture-of-experts language models at long context with every memory peak bounded.

    Parallelises the LightningModule for the user: FSDP2 over all ranks, experts over expert-parallel groups, activation
    checkpointing of decoder blocks. Loss and gradients are those of one process on the joined batch.

    Args:
        parallel: sizes of the expert, context and vocabulary groups and of the replicas.
        fsdp: units and policy of FSDP2.
        recompute: activation checkpointing.
        context: how attention sees over the ranks that share a sequence.
        batch: which tensors run along the sequence, who shifts the labels, how an accumulation window is normalised.
        dispatch: how tokens travel to their experts. "auto": PipelinedLLEP where experts are spread over ranks. None:
            the plain, unchunked all-to-all.
        vocabulary: how the vocabulary projection, its loss and token embeddings are spread. "auto": RingDTP where there
            is a head of ours and more than one rank. None: the whole weight is gathered, the loss goes over chunks of
            tokens.
        boundaries: where the inputs of recomputed blocks wait for the backward. "auto": in host memory on CUDA. None:
            on the device.
        optimizer_state: where AdamW's state lives. "auto": in host memory on CUDA, where 16 bytes for each trained
            element of a rank are more than half of the device's memory. None: on the device.
        host_memory: of a node's memory, what the offloads of all its ranks may fill together: a fraction such as
            "0.8", or bytes such as "900GiB".
        saving: how checkpoints are written.
        launcher: "script" runs the script once for each device; "fork" and "spawn" start processes from a notebook.
        process_group_backend: None takes "nccl" for GPUs and "gloo" for the CPU.
        timeout_s: seconds after which a collective that a rank never joins fails.

    Raises:
        ValueError: a setting is not allowed by itself. What depends on the world or the model is checked at start-up.
    """

    strategy_name = "longmoe"

    def __init__(
        self,
        parallel: ParallelConfig = ParallelConfig(),
        fsdp: FSDPConfig = FSDPConfig(),
        recompute: RecomputeConfig = RecomputeConfig(),
        context: ContextConfig = ContextConfig(),
        batch: BatchConfig = BatchConfig(),
        dispatch: PipelinedLLEP | Literal["auto"] | None = "auto",
        vocabulary: RingDTP | Literal["auto"] | None = "auto",
        boundaries: BoundaryOffload | Literal["auto"] | None = "auto",
        optimizer_state: OptimizerOffload | Literal["auto"] | None = "auto",
        host_memory: str | float | int = "0.8",
        saving: SaveConfig = SaveConfig(),
        launcher: Literal["script", "fork", "spawn"] = "script",
        process_group_backend: str | None = None,
        timeout_s: float = 1800,
    ) -> None:
        require_seconds("LongMoEStrategy", "timeout_s", timeout_s)
        if launcher not in ("script", "fork", "spawn"):
            raise ValueError(f"LongMoEStrategy(launcher={launcher!r}): choose 'script', 'fork' or 'spawn'.")
        self.parallel = as_config(parallel, ParallelConfig, "parallel")
        self.fsdp = as_config(fsdp, FSDPConfig, "fsdp")
        self.recompute = as_config(recompute, RecomputeConfig, "recompute")
        self.context = as_config(context, ContextConfig, "context")
        self.batch = as_config(batch, BatchConfig, "batch")
        self.saving = as_config(saving, SaveConfig, "saving")
        self.dispatch = as_operator(dispatch, PipelinedLLEP, "dispatch")
        self.vocabulary = as_operator(vocabulary, RingDTP, "vocabulary")
        self.boundaries = as_operator(boundaries, BoundaryOffload, "boundaries")
        self._optimizer_offload = as_operator(optimizer_state, OptimizerOffload, "optimizer_state")
        self.host_memory = host_memory
        self._host_memory_bytes = parse_share(host_memory, node_bytes())
        self.timeout = timedelta(seconds=timeout_s)
        super().__init__(
            save_distributed_checkpoint=self.saving.sharded,
            process_group_backend=process_group_backend,
            timeout=self.timeout,
        )
        self._launcher_name = launcher
        self._meshes: Meshes | None = None
        self._early = EarlyParameters()
        self._batches: Batches | None = None
        self._accumulating = False
        self._watch: Watch | None = None

    def config(self) -> dict[str, Any]:
        """The settings as plain values, for loggers and checkpoints."""
        names = ("parallel", "fsdp", "recompute", "context", "batch", "dispatch", "vocabulary", "boundaries", "saving")
        settings = {name: plain_setting(getattr(self, name)) for name in names}
        optimizer_state = plain_setting(self._optimizer_offload)
        return {**settings, "optimizer_state": optimizer_state, "host_memory": self.host_memory}

    def __repr__(self) -> str:
        """Also what Lightning shows when a Trainer of the other package, pytorch_lightning, refuses this object."""
        return f"<{type(self).__name__}: use `from lightning.pytorch import Trainer`, not pytorch_lightning's>"

    # -----------------------------------------------------------------------------------------------------------------
    # Processes and meshes
    # -----------------------------------------------------------------------------------------------------------------
    @property
    def meshes(self) -> Meshes:
        """Meshes and groups of this run."""
        if self._meshes is None:
            raise RuntimeError(
                "LongMoEStrategy.meshes exists only while the Trainer runs: read it in `configure_model` or later,"
                " not in `__init__`."
            )
        return self._meshes

    @property
    def layout(self) -> Layout:
        """Who is in which group."""
        return self.meshes.layout

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank reads; ranks that share sequences have the same."""
        return self.layout.coordinates(self.global_rank).data

    @property
    def data_size(self) -> int:
        """In how many parts the data is dealt."""
        return self.layout.data_size

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return self.batches.sampler_kwargs()

    @override
    def _configure_launcher(self) -> None:
        self._launcher = choose_launcher(self, self._launcher_name, self.num_processes, self.num_nodes)

    @override
    def setup_environment(self) -> None:
        refuse_unusable_environment(self.root_device, self.world_size)
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        leave_process_group_at_exit()
        assert self.lightning_module is not None
        # The module's experts decide the automatic expert size, and `configure_model` may still have to make them: here
        # only the mesh that users see is needed, and it does not depend on them.
        self._device_mesh = user_mesh(self.world_size, self.root_device.type, self.timeout)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    def takeover(self) -> Takeover:
        """What was done to the module."""
        done = parallelized(self.lightning_module) if self.lightning_module is not None else None
        if done is None:
            raise RuntimeError("LongMoEStrategy.takeover exists only after the Trainer has set the module up.")
        return done.takeover

    def _choose_meshes(self, module: pl.LightningModule) -> Meshes:
        """Meshes for this module; those it was parallelised with when it comes back in a second run."""
        layout = layout_for(module, self.parallel, self.vocabulary, self.world_size, self.num_processes)
        kept = parallelized(module)
        if kept is not None and kept.meshes.layout != layout:
            raise ValueError(
                f"This module is already sharded as {kept.meshes.layout} and cannot be sharded again as {layout}."
                " Save a checkpoint and load it into a fresh module, or keep the sizes."
            )
        return kept.meshes if kept is not None else meshes_for(layout, self.root_device.type, self.timeout)

    # -----------------------------------------------------------------------------------------------------------------
    # Precision
    # -----------------------------------------------------------------------------------------------------------------
    @property
    @override
    def precision_plugin(self) -> LongMoEPrecision:
        return self._precision_plugin or LongMoEPrecision("32-true")  # type: ignore[return-value]

    @precision_plugin.setter
    @override
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Whatever the Trainer was asked for becomes an FSDP2 policy; autocast would cast routers and losses."""
        if precision_plugin is not None and not isinstance(precision_plugin, LongMoEPrecision):
            precision_plugin = LongMoEPrecision(precision_plugin.precision)
        self._precision_plugin = precision_plugin

    # -----------------------------------------------------------------------------------------------------------------
    # The model and its optimizers
    # -----------------------------------------------------------------------------------------------------------------
    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        if not self.fsdp.meta_device:
            yield
            return
        with torch.device("meta"):
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        refuse_unusable_callbacks(trainer)
        refuse_fresh_start(trainer)
        evaluate_without_inference_mode(trainer)
        module = self.lightning_module
        self._meshes = self._choose_meshes(module)
        self._device_mesh = module._device_mesh = self._meshes.user
        self._early.remember(module)
        if parallelized(module) is None:  # a second run keeps what the first made of the module
            self._parallelize(module)
        reshard(module)
        check_run(module)
        self._stop_watching()
        context = self.takeover.context
        self._batches, self._watch = batches_for(module, self.batch, trainer, self.meshes, context, self.global_rank)
        self.barrier("parallelized")
        if trainer.state.fn == TrainerFn.FITTING:
            log_config(trainer, self.config())
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _parallelize(self, module: pl.LightningModule) -> None:
        self.precision_plugin.convert_module(module)
        agree_on_initial_values(module, self.meshes.control)
        takeover = parallelize(
            module,
            self.meshes,
            self.fsdp,
            self.recompute,
            self.dispatch,
            self.context,
            self.vocabulary,
            self.boundaries,
            self.precision_plugin,
            host_limit_bytes=self._host_memory_bytes // self.num_processes,
        )
        materialize(module, self.root_device, agreed_seed(self.meshes.control))
        move_to_device(module, self.root_device)
        self._early.release(module)
        _compat.lazily_initialize_root(module)
        if self.is_global_zero:
            print_start_up_table(self.layout, takeover, module)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        replaced = remap_optimizers(self.lightning_module, self.optimizers, self._early)
        if replaced:
            rank_zero_info(f"{replaced} parameters of an optimizer built before sharding were replaced by live ones.")
        share = self._host_memory_bytes // self.num_processes
        decision, taken, lines = offload_optimizers(self.optimizers, self._optimizer_offload, self.root_device, share)
        self.optimizers = self.optimizers  # Lightning wraps them anew, as what they now are
        self.takeover.decisions["optimizer_state"] = decision
        for line in lines:
            rank_zero_info(line)
        for optimizer in self.optimizers:
            refuse_fused_over_meshes(optimizer)
        if self.takeover.offloader is not None:
            self.takeover.offloader.set_limit(share - taken)

    # -----------------------------------------------------------------------------------------------------------------
    # Data
    # -----------------------------------------------------------------------------------------------------------------
    @property
    def batches(self) -> Batches:
        """Loaders and batches of this run."""
        assert self._batches is not None, "exists after setup"
        return self._batches

    @override
    def process_dataloader(self, dataloader: object) -> object:
        return self.batches.wrap(dataloader)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        return self.batches.prepare(super().batch_to_device(batch, device, dataloader_idx), dataloader_idx)

    @override
    def on_train_start(self) -> None:
        self.batches.on_train_start()

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.takeover.reduction.begin_microbatch(self.batches.next_window(batch_idx))

    # -----------------------------------------------------------------------------------------------------------------
    # A step: forward and backward of each micro-batch, then the update
    #
    #   1 on_train_batch_start  the window's count of valid targets goes to the heads          (batches, reduction)
    #   2 training_step         blocks gather, route, dispatch; the head gives the global mean  (dispatch, vocabulary)
    #   3 backward              blocks are recomputed; gradients are reduced as they come       (recompute, FSDP2)
    #   4 post_backward         what lives outside FSDP2 is averaged over its copies            (parallelize)
    #   5 clip_gradients        one norm over all meshes                                        (precision, clipping)
    #   6 optimizer_step        runs 2 to 5 of the window's last micro-batch, then updates; routers' biases follow
    # -----------------------------------------------------------------------------------------------------------------
    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().training_step, *args, **kwargs)

    def _step(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """One of the four steps, and a look at what it did with its labels."""
        self.batches.begin_step()
        output = run(*args, **kwargs)
        self.batches.end_step(output)
        return output

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Around each micro-batch that does not step: gradients are reduced all the same unless told otherwise."""
        if self.fsdp.sync_each_microbatch:
            yield
            return
        self._set_gradient_sync(False)
        try:
            yield
        finally:
            self._set_gradient_sync(True)

    def _set_gradient_sync(self, enabled: bool) -> None:
        self._accumulating = not enabled  # gradients stay unreduced on each rank until the window's last micro-batch
        for child in self.lightning_module.modules():  # type: ignore[union-attr]
            if isinstance(child, FSDPModule):
                child.set_requires_gradient_sync(enabled, recurse=False)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        assert self.lightning_module is not None
        self.takeover.reduction.end_microbatch()
        if not self._accumulating:
            average_outside(self.lightning_module, self.meshes)
        if self.lightning_module.automatic_optimization:
            refuse_waiting_aux_losses()
        else:
            self._gather_root()  # the rest of a manual training_step may run the module again

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        assert self.lightning_module is not None
        output = super().optimizer_step(optimizer, self._checked(closure), model, **kwargs)
        update_router_biases(self.lightning_module)
        if not self.lightning_module.automatic_optimization:
            self._gather_root()
        return output

    def _checked(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure, which runs the last micro-batch of the window, and then a look at what the window held."""

        def run() -> Any:
            output = closure()
            self.takeover.reduction.check_window()
            return output

        return run

    def _gather_root(self) -> None:
        """In manual optimization the root's forward still runs: give it its parameters, as they now are."""
        root = self.lightning_module
        if isinstance(root, FSDPModule):
            root.reshard()
            root.unshard()

    @property
    def last_grad_norm(self) -> Tensor | None:
        """The global gradient norm before the last clipping by norm; None before the first."""
        return self.precision_plugin.last_grad_norm

    # -----------------------------------------------------------------------------------------------------------------
    # Loops
    # -----------------------------------------------------------------------------------------------------------------
    @override
    def on_train_end(self) -> None:
        reshard(self.lightning_module)  # type: ignore[arg-type]

    def _start_evaluation(self) -> None:
        agree_on_buffers(self.lightning_module, self.meshes.control)  # type: ignore[arg-type]
        self.batches.on_evaluation_start()

    @override
    def on_validation_start(self) -> None:
        self._start_evaluation()

    @override
    def on_test_start(self) -> None:
        self._start_evaluation()

    @override
    def on_predict_start(self) -> None:
        self._start_evaluation()

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        output = self._step(super().predict_step, *args, **kwargs)
        return self.batches.prediction(output, args[0] if args else kwargs["batch"])

    @override
    def on_validation_end(self) -> None:
        reshard(self.lightning_module)  # type: ignore[arg-type]

    @override
    def on_test_end(self) -> None:
        reshard(self.lightning_module)  # type: ignore[arg-type]

    @override
    def on_predict_end(self) -> None:
        self.batches.on_predict_end()
        reshard(self.lightning_module)  # type: ignore[arg-type]

    @override
    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @override
    def reduce(
        self, tensor: Tensor | Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor | Any:
        """Sum, then divide in floating point: gloo has no average, and Lightning also averages whole numbers."""
        return reduce_tensor(tensor, group, reduce_op, self.root_device)

    # -----------------------------------------------------------------------------------------------------------------
    # Checkpoints
    # -----------------------------------------------------------------------------------------------------------------
    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return saving.model_state(self.lightning_module)  # type: ignore[arg-type]

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return saving.optimizer_state(self.lightning_module, optimizer)  # type: ignore[arg-type]

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise ValueError(f"{type(self).__name__} writes to mounted file systems and takes no storage_options.")
        assert self.lightning_module is not None
        control, timeout_s = self.meshes.control, self.saving.all_ranks_timeout_s
        saving.require_all_ranks(control, timeout_s)
        agree_on_buffers(self.lightning_module, control)
        checkpoint["longmoe"] = {
            "config": self.config(),
            "layout": dataclasses.asdict(self.layout),
            "decisions": self.takeover.decisions,
            "resume": saving.gather_per_rank(self.batches.resume_state(), control),
        }
        save = saving.save_sharded if self.saving.sharded else saving.save_single_file
        save(filepath, checkpoint, self.lightning_module, control_group=control, timeout_s=timeout_s)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        assert self.lightning_module is not None
        checkpoint = saving.load(
            checkpoint_path,
            self.lightning_module,
            self.optimizers,
            weights_only=self.saving.weights_only if weights_only is None else weights_only,
            strict=self.lightning_module.strict_loading,
            control_group=self.meshes.control,
        )
        states = checkpoint.get("longmoe", {}).get("resume")
        if states and self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            same_world = len(states) == self.world_size  # else only what all ranks had in common goes on: rank 0 has it
            self.batches.load_resume_state(states[self.global_rank if same_world else 0])
        return checkpoint

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            saving.remove(filepath)

    # -----------------------------------------------------------------------------------------------------------------
    # The end
    # -----------------------------------------------------------------------------------------------------------------
    @override
    def on_exception(self, exception: BaseException) -> None:
        """Forget what a failed step left behind. No collective: the other ranks may not have failed."""
        add_advice(exception)
        discard_aux_losses()
        if self.lightning_module is not None and parallelized(self.lightning_module) is not None:
            self.takeover.reduction.begin_microbatch(None)
            if self.takeover.offloader is not None:
                self.takeover.offloader.reset()

    @override
    def teardown(self) -> None:
        self._stop_watching()
        done = None if self.lightning_module is None else parallelized(self.lightning_module)
        if done is not None and done.takeover.offloader is not None:
            done.takeover.offloader.close()
        super().teardown()

    def _stop_watching(self) -> None:
        if self._watch is not None:
            self._watch.end()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register(
            cls.strategy_name,
            cls,
            description="FSDP2 with expert parallelism for long-context mixture-of-experts models",
            override=True,
        )

