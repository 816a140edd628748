"""Memory of pipeline stages and of their model states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from bytescale_ext.plan.activation.tensors import expert_bytes, layer_tensors
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from bytescale_ext.plan.memory.model_states import StateSizes, expert_parameters, largest_matrix, stage_parameters
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.schedule.document_slices import affordable_tokens
from bytescale_ext.plan.setup.layers import expert_load, stage_settings
from bytescale_ext.plan.setup.setup import FULL, NO_RECOMPUTE, Setup
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of one process.

    Attributes:
        dense: parameters that all HDP ranks have.
        experts: parameters of the experts that HDP ranks share.
        expert_holders: HDP ranks with the same experts, of ``num_ranks`` ranks.
        num_ranks: HDP ranks.
        ends: parameters of the embedding and the output layer, a part of ``dense``.
    """

    dense: float
    experts: float = 0.0
    expert_holders: int = 1
    num_ranks: int = 1
    ends: float = 0.0

    @property
    def count(self) -> float:
        """All parameters."""
        return self.dense + self.experts

    @property
    def parts(self) -> tuple[tuple[float, int], ...]:
        """Each part with the number of HDP ranks that have the same."""
        return (self.dense, self.num_ranks), (self.experts, self.expert_holders)

    def updated(self, shares_optimizer: bool) -> float:
        """Return the number of parameters that a process updates."""
        return sum(count / ranks for count, ranks in self.parts) if shares_optimizer else self.count

    def updated_ends(self, shares_optimizer: bool) -> float:
        """Return the number of parameters of the embedding and the output layer that a process updates."""
        return self.ends / (self.num_ranks if shares_optimizer else 1)

    def state_bytes(self, element_bytes: int, sizes: StateSizes, shares_optimizer: bool, kept_share: float) -> float:
        """Return the device bytes of parameters, gradients and resident optimizer states.

        ``kept_share``: share of the optimizer's states that is on the device.
        """
        of_ends = sizes.optimizer(element_bytes, is_end=True) - sizes.optimizer(element_bytes)
        states = self.updated(shares_optimizer) * sizes.optimizer(element_bytes)
        states += self.updated_ends(shares_optimizer) * of_ends
        return self.count * (element_bytes + sizes.gradient) + kept_share * states


def parameters(setup: Setup) -> list[Parameters]:
    """Return the parameters of a process of each stage."""
    mesh, cluster = setup.mesh, setup.cluster
    tensor_of_expert = mesh.expert_tensor_parallel or mesh.tensor_parallel
    holders = max(1, cluster.num_ranks * mesh.tensor_parallel // (tensor_of_expert * mesh.expert_parallel))
    added = setup.states.added_parameters or (0.0,) * mesh.num_stages
    return [
        Parameters(
            dense=more + _dense_parameters(setup, stage),
            experts=expert_parameters(shape, tensor_of_expert, mesh.expert_parallel),
            expert_holders=holders,
            num_ranks=cluster.num_ranks,
            ends=_num_ends(setup, stage) * shape.vocab * shape.hidden / mesh.tensor_parallel,
        )
        for stage, (shape, more) in enumerate(zip(setup.shape.stages(mesh.stage_layers), added, strict=True))
    ]


def _dense_parameters(setup: Setup, stage: int) -> float:
    """Return the parameters of a stage without experts and added parameters. Tied embeddings of a stage count once."""
    mesh, shape = setup.mesh, setup.shape.stages(setup.mesh.stage_layers)[stage]
    has_embedding, has_head = _has_ends(setup, stage)
    twice = has_embedding + has_head - _num_ends(setup, stage)
    count = stage_parameters(shape, mesh.tensor_parallel, has_embedding, has_head)
    return count - twice * shape.vocab * shape.hidden / mesh.tensor_parallel


def _has_ends(setup: Setup, stage: int) -> tuple[bool, bool]:
    """Return whether a stage has the embedding and the output layer on its devices."""
    return stage == 0 and not setup.states.embedding_in_host, stage == setup.mesh.last_stage


def _num_ends(setup: Setup, stage: int) -> int:
    """Return the number of embeddings and output layers of a stage. Tied embeddings of a stage are one."""
    has_embedding, has_head = _has_ends(setup, stage)
    return has_embedding + has_head - (has_embedding and has_head and setup.states.ties_embeddings)


@lru_cache(maxsize=256)
def state_cases(setup: Setup) -> tuple[StateCase, ...]:
    """Return the paged model states of each stage, without experts and added parameters."""
    mesh, states = setup.mesh, setup.states
    option = states.decided if not isinstance(states.option, str) else None
    is_one_matrix = mesh.num_stages == 1 and states.ties_embeddings
    return tuple(
        StateCase(
            shape=replace(setup.shape, num_layers=layers),
            tensor_parallel=mesh.tensor_parallel,
            has_embedding=stage == 0 and not is_one_matrix,
            has_head=stage == mesh.last_stage,
            element_bytes=setup.numerics.element_bytes,
            optimizer_ranks=setup.optimizer_ranks,
            page_bytes=states.page_bytes,
            stage=max(1, option.stage) if option else 1,
            window_layers=option.window_layers if option else 2,
            update_steps=states.update_steps,
            node_ranks=setup.sharing_ranks,
            update_bytes=states.sizes.update,
        )
        for stage, layers in enumerate(mesh.stage_layers)
    )


@lru_cache(maxsize=256)
def stage_state_bytes(setup: Setup) -> tuple[float, ...]:
    """Return the device memory of the decided model states of each stage during a step."""
    option = setup.states.decided
    if option.stage:
        return tuple(case.paged_bytes for case in state_cases(setup))
    element, sizes, shares = setup.numerics.element_bytes, setup.states.sizes, setup.mesh.shares_optimizer
    kept = 1.0 - setup.states.offloaded_share
    return tuple(stage.state_bytes(element, sizes, shares, kept) for stage in parameters(setup))


@lru_cache(maxsize=256)
def stage_update_bytes(setup: Setup) -> tuple[float, ...]:
    """Return the device memory that the update of each stage takes in addition, when no activations exist."""
    if setup.states.decided.stage:  # updates run on the host
        return (0.0,) * setup.mesh.num_stages
    sizes, mesh, kept = setup.states.sizes, setup.mesh, 1.0 - setup.states.offloaded_share
    matrix = largest_matrix(setup.shape, mesh.tensor_parallel, mesh.expert_tensor_parallel or mesh.tensor_parallel)
    of_stages = []
    for stage in parameters(setup):
        of_all = sizes.update * stage.updated(mesh.shares_optimizer)
        of_ends = sizes.end_update * stage.updated_ends(mesh.shares_optimizer)
        of_stages.append(kept * (of_all + max(of_ends, sizes.matrix_update * matrix)))
    return tuple(of_stages)


def stage_memory(setup: Setup) -> StageMemory:
    """Return the device memory of the stages, with their model states and without an activation policy.

    If layers are recomputed in blocks, all layers count here as if they kept their activations.
    """
    numerics, cost, mesh = setup.numerics, setup.cost, setup.mesh
    if not setup.measured:
        cost = replace(cost, layer_bytes=_layer_bytes(setup))
    settings = stage_settings(setup, mesh.last_stage, ONE_SLICE)
    memory = StageMemory.of(cost, mesh.stage_layers, setup.cluster, settings)
    states, update = stage_state_bytes(setup), stage_update_bytes(setup)
    memory = replace(memory, rows_multiple=setup.rows_multiple, state_bytes=states, update_bytes=update)
    memory = memory.with_virtual_stages() if mesh.virtual_stages > 1 else memory
    return _recomputing(setup, memory) if numerics.recompute == FULL else memory


def recomputing_memory(setup: Setup) -> StageMemory:
    """Return the device memory of the stages as if they recomputed all layers, for a setup without full recompute."""
    return _recomputing(setup, stage_memory(setup))


def _recomputing(setup: Setup, memory: StageMemory) -> StageMemory:
    return memory.recomputing(input_bytes(setup), setup.slicing != ONE_SLICE, more_recomputed_bytes(setup))


def more_recomputed_bytes(setup: Setup) -> float:
    """Return the bytes of a token in addition to the mean activations of a layer, while a layer runs again.

    The largest layer may be larger than the mean. An expert layer's input and its gradient exist until the layer runs
    in the next step, because Megatron's dispatchers of experts refer to the graph that ends in them. Layers without
    experts free both. They are assumed to come first or, if they are half of the layers, to alternate with the others.
    """
    shape, layers = setup.shape, max(setup.mesh.stage_layers)
    if not shape.num_expert_layers:
        return 0.0
    with_experts = layers * (1.0 - shape.dense_share)
    waiting = (with_experts - 1.0) * _tensor_bytes(setup)[0] if 2 * with_experts > layers + 1 else 0.0
    kinds = (0, shape.num_layers) if shape.dense_share else (shape.num_layers,)
    largest = max(_layer_bytes(replace(setup, shape=replace(shape, num_expert_layers=count))) for count in kinds)
    return waiting + largest - _layer_bytes(setup)


def _layer_bytes(setup: Setup) -> float:
    """Return the bytes of a token in all that a layer saves, the mean of all layers."""
    numerics, ranks = setup.numerics, setup.mesh.tensor_parallel
    experts = expert_bytes(setup.shape, numerics.element_bytes, ranks, expert_load(setup), numerics.operators)
    return sum(_tensor_bytes(setup)) + experts


def input_bytes(setup: Setup) -> float:
    """Return the bytes of a token that a recomputed layer keeps: measured, or the bytes of its input."""
    return setup.cost.recompute_bytes if setup.measured else _tensor_bytes(setup)[0]


def _tensor_bytes(setup: Setup) -> list[float]:
    """Return the bytes of a token in each tensor that a layer saves."""
    mesh, numerics = setup.mesh, setup.numerics
    tensors = layer_tensors(
        setup.shape, numerics.element_bytes, mesh.tensor_parallel, mesh.sequence_parallel, numerics.operators
    )
    return [tensor.bytes_per_token for tensor in tensors]


def affordable_keys(setup: Setup, slicing: Slicing) -> int:
    """Return the longest sequence whose keys can be kept between slices in the memory that 1F1B would take.

    It counts the bytes that a token always keeps in a layer: all tensors in 16 bits or, if activations are recomputed
    or leave the device, only the layer's input.
    """
    tensor_parallel = setup.mesh.tensor_parallel
    tensors = layer_tensors(setup.shape, tensor_parallel=tensor_parallel)
    if setup.numerics.recompute != NO_RECOMPUTE or setup.policy.is_on:
        tensors = tensors[:1]
    layer_bytes = sum(tensor.bytes_per_token for tensor in tensors)
    keys = key_value_bytes(setup.shape, tensor_parallel)
    return affordable_tokens(setup.mesh.num_stages, slicing, setup.cluster.tokens_per_rank, layer_bytes, keys)
