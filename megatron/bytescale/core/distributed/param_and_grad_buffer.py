"""Megatron's gradient buffers in host memory, so that the device never holds the gradients of a whole model.

Megatron's DDP keeps one buffer, with views for buckets and for the ``main_grad`` of each parameter. A hook adds each
gradient to its view. Here the buffer is a block of host memory with the same layout. A hook that runs before Megatron's
moves each gradient to the block. After the backward pass the buckets are reduced through chunks of device memory. All
later work (scaling, norm, clipping, Adam on pages) reads host memory.

With a distributed optimizer the processes of a node share each block. They divide work on a whole block (zeroing,
scaling), with a barrier before and after it. Norm, clipping and Adam read only the process's own shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, Protocol

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup, _ParamAndGradBuffer

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.parallel.upload import upload
from bytescale_ext.states.collectives import ChunkedCollectives
from bytescale_ext.states.gradients import GradientSums
from bytescale_ext.states.node_memory import HostBlocks, SharedBlock
from bytescale_ext.states.window import LayerWindow
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

CHUNK_BYTES: Final = 64 << 20
"""Size of the device memory that holds one chunk of gradients during a reduction."""

SUMMED_LATER: Final = (
    "sequence_parallel",
    "average_gradients_across_tp_domain",
    "shared_embedding",
    "shared",
    "pipeline_parallel",
)
"""Attributes of parameters whose gradients Megatron sums over further groups after the data-parallel reduction."""

NAMES_SUMMED_LATER: Final = ("q_layernorm", "k_layernorm", "position_embeddings")


class ModelParameter(Protocol):
    """A parameter of Megatron's, with its accumulated gradient.

    Attributes:
        grad: gradient of the last backward pass.
        main_grad: sum of the gradients.
        grad_added_to_main_grad: whether a fused kernel has added the gradient already.
    """

    grad: torch.Tensor | None
    main_grad: torch.Tensor
    grad_added_to_main_grad: bool


class HostGradients:
    """The gradients of all chunks of a model in host memory.

    Attributes:
        sums: adds gradients to host memory.
        device: device on which the gradients are computed.
        host_bytes: host memory in use, in bytes.
        windows: layer windows of the model chunks whose parameters are also in host memory (stage 3).
    """

    def __init__(
        self, chunks: Sequence[DistributedDataParallel], config: StateConfig, blocks: HostBlocks, on_cuda: bool
    ) -> None:
        """Move the gradient buffers of these DDP modules, which contain no gradients yet, to ``blocks``.

        Raises ValueError if host memory is too small, or in stage 2 on a GPU if parameters are float32.
        """
        is_float32 = any(weight.dtype is torch.float32 for chunk in chunks for weight in chunk.parameters())
        if on_cuda and is_float32 and config.stage == 2:
            raise ValueError(
                "--state-stage 2 on a GPU: parameters are float32: add --bf16, or use --state-stage 1 or 3"
            )  # torch refuses a gradient on another device than its parameter
        self.sums = GradientSums(config.page_bytes, on_cuda)
        self.host_bytes = self.sums.slots.nbytes
        self.device = blocks.device
        self.windows: list[LayerWindow] = []
        self._blocks = blocks
        self._shared: dict[object, SharedBlock] = {}  # parameter -> memory with its sum, if it is shared
        self._later: dict[torch.nn.Parameter, torch.Tensor] = {}  # parameter -> its part of the buffer
        self._lent: dict[torch.nn.Parameter, torch.Tensor] = {}
        names = {parameter: name for chunk in chunks for name, parameter in chunk.module.named_parameters()}
        for chunk in chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                self._move(buffer, names)
                config.check_fits(self.host_bytes)
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                specialize(group, HostBucketGroup)
                group.host_gradients = self
                shared = next((self._shared[one] for one in group.params if one in self._shared), None)
                group.node = None if shared is None else shared.node

    def _move(self, buffer: _ParamAndGradBuffer, names: dict[torch.nn.Parameter, str]) -> None:
        """Move one of Megatron's buffers to host memory, with the same layout."""
        if buffer.grad_data not in self._blocks:
            buffer.grad_data = self._blocks.allocate(buffer.numel, buffer.grad_dtype, buffer.data_parallel_group)
        whole = buffer.grad_data
        self.host_bytes += self._blocks.num_bytes(whole)
        shared = self._blocks.shared(whole)
        buffer.node = None if shared is None else shared.node
        specialize(buffer, HostBuffer)
        buffer.host_gradients = self
        for bucket in buffer.buckets:
            bucket.grad_data = whole[bucket.offset : bucket.offset + bucket.grad_data.numel()]
        for parameter in buffer.params:
            if shared is not None:
                self._shared[parameter] = shared
            start, stop, _ = buffer.param_index_map[parameter]
            parameter.main_grad = whole[start:stop].view(parameter.shape)
            parameter.register_post_accumulate_grad_hook(self.take)
            is_later = any(getattr(parameter, name, False) for name in SUMMED_LATER)
            if is_later or any(part in names[parameter] for part in NAMES_SUMMED_LATER):
                self._later[parameter] = parameter.main_grad

    def take(self, parameter: ModelParameter) -> None:
        """Add a parameter's gradient to its sum in host memory, and leave none to Megatron's hook, which runs next."""
        gradient, parameter.grad = parameter.grad, None
        # Set on an embedding whose gradient as the output weight was added before.
        is_shared = getattr(parameter, "zero_out_wgrad", False)
        if gradient is not None and (is_shared or not parameter.grad_added_to_main_grad):
            self.sums.add(parameter.main_grad, gradient, self._shared.get(parameter))

    def lend(self, parameters: set[torch.nn.Parameter]) -> None:
        """Copy to the device the gradients that Megatron next sums over other groups, which it does on the device."""
        for parameter in parameters & self._later.keys():
            self._lent[parameter] = self._later[parameter].to(self.device, copy=True)
            parameter.main_grad = self._lent[parameter]  # type: ignore[attr-defined]

    def take_back(self) -> None:
        """Copy lent gradients to host memory.

        Processes that share a gradient have lent equal values. All have read it before the first writes. The barriers
        come in the order of the buffers, which is the same on all ranks.
        """
        for node in dict.fromkeys(block.node for parameter, block in self._shared.items() if parameter in self._lent):
            node.barrier()
        for parameter, lent in self._lent.items():
            self._later[parameter].copy_(lent)
            parameter.main_grad = self._later[parameter]  # type: ignore[attr-defined]
        self._lent.clear()


class HostBuffer(_ParamAndGradBuffer):  # type: ignore[misc]
    """A buffer whose gradients are in host memory.

    Attributes:
        node: ranks that share the memory, or None.
    """

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Scale all gradients, after copying lent gradients back to host memory.

        A factor on the device, such as one over the number of tokens, is a scalar. It is copied to host memory, because
        torch refuses to scale host memory by it.
        """
        self.host_gradients.take_back()
        if isinstance(scaling_factor, torch.Tensor):
            scaling_factor = scaling_factor.to(self.grad_data.device)
        if self.node is None:
            super().scale_gradients(scaling_factor)
            return
        self.node.barrier()
        self.grad_data[self.node.own(self.numel)] *= scaling_factor
        self.node.barrier()

    def reset(self) -> None:
        """Zero all gradients, before the first gradient of a step and after the update of every rank."""
        if self.node is None:
            super().reset()
            return
        self.node.barrier()
        self.grad_data[self.node.own(self.numel)].zero_()
        self.node.barrier()


class HostBucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """Buckets whose gradients are in host memory. They are reduced after the backward pass.

    Attributes:
        node: ranks that share the memory, or None.
    """

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Reduce all buckets, chunk by chunk, over the ranks that share the parameters. Blocks."""
        ddp = self.ddp_config
        if ddp.check_for_nan_in_grad or ddp.check_for_large_grads:
            self.check_grads(ddp.check_for_nan_in_grad, ddp.check_for_large_grads)
        op = torch.distributed.ReduceOp.AVG if ddp.average_in_collective else torch.distributed.ReduceOp.SUM
        for bucket in self.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                own = slice(None) if self.node is None else self.node.own(bucket.grad_data.numel())
                bucket.grad_data[own] *= bucket.gradient_scaling_factor
                self._meet()
            chunks = self._chunks(bucket.grad_data.dtype)
            if ddp.use_distributed_optimizer and not force_all_reduce:
                chunks.reduce_scatter(bucket.grad_data, op)
            else:
                chunks.reduce(bucket.grad_data, op)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Wait until all gradients are in host memory, and reduce them."""
        self.param_gather_dispatched = False
        self.host_gradients.sums.finish()
        for window in self.host_gradients.windows:
            window.release()
        self._meet()
        self.start_grad_sync(force_all_reduce)
        self._meet()
        self.host_gradients.lend(self.params)

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Gather parameters after the optimizer's update, in chunks if they are in host memory. Blocks."""
        if not self.host_gradients.windows:
            super().start_param_sync(force_sync)
            return
        for bucket in self.buckets:
            self._chunks(bucket.param_data.dtype).gather(bucket.param_data)
        self._meet()
        self.param_gather_dispatched = True

    def _meet(self) -> None:
        """Wait for the ranks that share the memory."""
        if self.node is not None:
            self.node.barrier()

    def _chunks(self, dtype: torch.dtype) -> ChunkedCollectives:
        """Return the chunked collectives for tensors of a dtype."""
        shares = self.ddp_config.use_distributed_optimizer
        group = self.intra_distributed_optimizer_instance_group if shares else self.data_parallel_group
        return ChunkedCollectives(group, self.host_gradients.device, CHUNK_BYTES // dtype.itemsize, self.node)


@cache
def taking_gradients(kind: type[MegatronOptimizer]) -> type[MegatronOptimizer]:
    """Return the subclass of an optimizer of Megatron for gradients in host memory."""

    class TakingGradients(kind):  # type: ignore[misc,valid-type]
        def prepare_grads(self) -> bool:
            """Attach the gradients once all of them are in host memory."""
            self.host_gradients.take_back()
            return bool(super().prepare_grads())

        def get_grads_for_grad_norm(self, grad_norm_group: str | None = None) -> list[torch.Tensor]:
            """Return the norm of each gradient as a tensor [1] on the device.

            Megatron computes the norm of these norms with kernels that read only device memory. It equals the norm of
            all gradients.
            """
            gradients = super().get_grads_for_grad_norm(grad_norm_group)
            if not gradients:
                return []
            norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients])
            return list(upload(norms, self.host_gradients.device).split(1))

    return TakingGradients
