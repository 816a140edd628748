"""Input of all planning, as one frozen value.

Training makes a ``Setup`` from Megatron's arguments, a command from its options, and a search from a strategy. The
other files of this folder derive layers, memory, costs, choices, planners and forecasts from it, in the same way for
all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Final, Literal

from bytescale_ext.plan.activation.load import MEMORY_BYTES_PER_SECOND, Machine
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import FUSED_ADAM, StateSizes
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.states.timeline import (
    ADAM_BYTES_PER_SECOND,
    READ_BYTES_PER_SECOND,
    WRITE_BYTES_PER_SECOND,
    Speeds,
)
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster, Slicing

AUTO: Final = "auto"
"""Value of a choice that is left to the planner."""

NO_RECOMPUTE: Final = "none"
FULL: Final = "full"
BLOCK: Final = "block"

PAGE_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """Distribution of the model over devices.

    Attributes:
        stage_layers: transformer layers of each pipeline stage.
        tensor_parallel: number of ranks that share each layer.
        sequence_parallel: whether tensor-parallel ranks also share the tokens of norms and residuals.
        virtual_stages: number of virtual stages (model chunks) of each pipeline stage.
        expert_parallel: number of parts into which the experts of a layer are divided.
        expert_tensor_parallel: number of ranks that share each expert; None: ``tensor_parallel``.
        shares_optimizer: whether HDP ranks share Adam's states (ZeRO-1).
        devices_per_node: number of devices of a node; None: all devices are in one node.
        stages_before_ranks: whether Megatron numbers the stages of a pipeline before the next HDP rank
            (``--use-tp-pp-dp-mapping``), not all HDP ranks before the next stage.
    """

    stage_layers: tuple[int, ...]
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    virtual_stages: int = 1
    expert_parallel: int = 1
    expert_tensor_parallel: int | None = None
    shares_optimizer: bool = False
    devices_per_node: int | None = None
    stages_before_ranks: bool = False

    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
        return len(self.stage_layers)

    @property
    def expert_ranks(self) -> int:
        """HDP ranks that exchange tokens in layers of experts."""
        group = (self.expert_tensor_parallel or self.tensor_parallel) * self.expert_parallel
        return math.lcm(group, self.tensor_parallel) // self.tensor_parallel

    @property
    def last_stage(self) -> int:
        """Number of the last stage, which has the output layer."""
        return self.num_stages - 1


@dataclass(frozen=True, slots=True)
class Numerics:
    """Numerical settings of layers.

    Attributes:
        element_bytes: bytes of one element of a parameter or an activation.
        operators: fused and unfused operators of a layer.
        loss_tokens: number of tokens with logits at the same time (``--chunked-cross-entropy``); None: all tokens of a
            micro-batch.
        rows: multiple of rows in matrix products: 16 or 32 in FP8, else 1.
        recompute: layers that are recomputed: "none", "full" (all), "block" (the first layers of each stage) or
            "selective" (parts of layers).
        recomputed_layers: number of layers of each stage that "block" recomputes.
        sum_bytes: bytes of one element of a sum of key gradients.
        counts_documents: whether routers exchange the expert loads of documents in rings (``seq_aux_loss``).
        measures_logits: whether attention computes its scores once more for the largest logits (``--qk-clip``).
    """

    element_bytes: int = 2
    operators: LayerOperators = FUSED
    loss_tokens: int | None = None
    rows: int = 1
    recompute: str = NO_RECOMPUTE
    recomputed_layers: int = 0
    sum_bytes: int = 4
    counts_documents: bool = False
    measures_logits: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory and links of one process.

    Attributes:
        device_bytes: whole memory of the device, for model states, activations and keys.
        host_bytes: host memory for activations and keys and, if the planner chooses model states, for their pages.
        disk_bytes: space on a local disk for pages.
        link_bytes_per_second: speed between device and host memory, one way.
        memory_bytes_per_second: speed of device memory.
    """

    device_bytes: float = math.inf
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    link_bytes_per_second: float = LINK_BYTES_PER_SECOND
    memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND

    def machine(self, device_bytes: float, host_bytes: float) -> Machine:
        """Return the machine with these remaining memories and the links of the budget."""
        return Machine(device_bytes, host_bytes, self.link_bytes_per_second, self.memory_bytes_per_second)


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences of the training.

    Attributes:
        longest: tokens of the longest sequence.
        micro_batches: number of micro-batches of a rank in a step; for documents, an estimate from their tokens.
        sample_slices: tokens of each slice of samples that all have the same length; empty: documents, or whole
            samples.
        are_documents: whether sequences are documents. With documents, ranks may have any number of micro-batches.
        partition: quantity that is equal in all slices of a document: "time", "flops" or "even" (tokens).
    """

    longest: int
    micro_batches: int = 1
    sample_slices: tuple[int, ...] = ()
    are_documents: bool = True
    partition: str = "time"


@dataclass(frozen=True, slots=True)
class Planning:
    """Settings of the placement of documents.

    Attributes:
        balance: name of the planner; "auto" is the balance planner that fits the mesh.
        static_width: ranks of a static context-parallel mesh to compare with, or None.
    """

    balance: str = AUTO
    static_width: int | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """Activation policy: tensors are kept, swapped or recomputed.

    Attributes:
        name: policy by name, one of ``POLICIES``.
        swap, recompute: given shares of the tokens, or None.
    """

    name: str = "none"
    swap: float | None = None
    recompute: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether activations follow a plan."""
        return self.name != "none" or self.has_shares

    @property
    def has_shares(self) -> bool:
        """Whether shares are given, instead of planned."""
        return (self.swap, self.recompute) != (None, None)


@dataclass(frozen=True, slots=True)
class States:
    """Model states: parameters, gradients and Adam's states.

    Attributes:
        option: place of the states, or "auto".
        allowed: values of ``--state-stage`` that "auto" may choose.
        page_bytes: bytes of a page.
        update_steps: number of steps that overlap with an update; 0: each step waits for its update.
        has_disk: whether pages may be on a local disk.
        ties_embeddings: whether input and output embedding are one matrix.
        embedding_in_host: whether the input embedding is a table in host memory.
        added_parameters: further parameters of each stage, such as n-gram tables; empty: none.
        sizes: bytes of the states of one parameter.
        offloaded_share: share of Adam's states that Megatron itself keeps in host memory (``--optimizer-cpu-offload``).
        shares_node: whether processes of a node may share gradients and parameters in host memory.
        shares_budget: whether pages share ``Budget.host_bytes`` with activations, because the planner chose them.
        speeds: speeds of Adam in host memory and of the disk.
        update_bytes_per_second: speed at which Adam reads and writes memory for resident states.
    """

    option: StateOption | Literal["auto"] = field(default_factory=StateOption)
    allowed: tuple[int, ...] = (1, 2, 3)
    page_bytes: int = PAGE_BYTES
    update_steps: int = 0
    has_disk: bool = False
    ties_embeddings: bool = False
    embedding_in_host: bool = False
    added_parameters: tuple[float, ...] = ()
    sizes: StateSizes = FUSED_ADAM
    offloaded_share: float = 0.0
    shares_node: bool = True
    shares_budget: bool = False
    speeds: Speeds = field(
        default_factory=lambda: Speeds(
            LINK_BYTES_PER_SECOND, ADAM_BYTES_PER_SECOND, READ_BYTES_PER_SECOND, WRITE_BYTES_PER_SECOND
        )
    )
    update_bytes_per_second: float = MEMORY_BYTES_PER_SECOND

    @property
    def decided(self) -> StateOption:
        """Decided place of the states."""
        assert isinstance(self.option, StateOption), "the model states are not chosen yet"
        return self.option


@dataclass(frozen=True)
class Setup:
    """Setup of a run: the input of all planning.

    Attributes:
        shape: sizes of the model.
        mesh: layout of the model on devices.
        numerics: element types, operators and recomputation of layers.
        cluster: HDP ranks, C, and ranks of a node.
        cost: seconds of the model, measured or scaled from a known device.
        sequences: documents or samples of the training.
        budget: memory and links of one process.
        slicing: slices of a micro-batch; "auto": the planner chooses them for each step.
        policy: activation policy.
        states: model states.
        planning: planner of the documents.
        measured: whether ``cost`` was measured with this model, not only with its device.
    """

    shape: ModelShape
    mesh: Mesh
    numerics: Numerics
    cluster: Cluster
    cost: ModelCost
    sequences: Sequences
    budget: Budget = Budget()
    slicing: Slicing | Literal["auto"] = ONE_SLICE
    policy: Policy = Policy()
    states: States = States()
    planning: Planning = Planning()
    measured: bool = True

    def __hash__(self) -> int:
        """Return a cached hash, because caches of figures use setups as keys."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, entry.name) for entry in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        """Return only the fields, because hashes differ between processes."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @property
    def sharing_ranks(self) -> int:
        """Processes of a node that share gradients and parameters in host memory (from stage 2 on).

        Each must update a shard of its own, when no process computes.
        """
        shares = self.mesh.shares_optimizer and self.states.shares_node and not self.states.update_steps
        return self.cluster.node_ranks if shares else 1

    @property
    def rows_multiple(self) -> int:
        """Number to whose multiple the rows of micro-batches and slices are padded."""
        return self.numerics.rows * (self.mesh.tensor_parallel if self.mesh.sequence_parallel else 1)

    @property
    def expert_padding(self) -> float:
        """Largest number of rows that FP8 adds to the experts of a rank in one layer and pass; 0 without experts."""
        return self.shape.num_experts / self.mesh.expert_parallel * (self.numerics.rows - 1)

    @property
    def chooses_slices(self) -> bool:
        """Whether the planner chooses the slices of each step."""
        return self.slicing == AUTO

    @property
    def given_slicing(self) -> Slicing:
        """Slices of every step, if the planner does not choose them."""
        assert isinstance(self.slicing, Slicing), "the planner chooses the slices of each step"
        return self.slicing

    @property
    def swaps_keys(self) -> bool:
        """Whether keys may be kept in host memory, by the given slices or by the planner's choice without a policy."""
        if isinstance(self.slicing, Slicing):
            return self.slicing.swapped_tokens > 0
        return self.budget.host_bytes > 0 and not self.policy.is_on

    @property
    def plans_offload(self) -> bool:
        """Whether the plan of a step chooses the offloaded share of each micro-batch (ByteScale section 5.2)."""
        return self.sequences.are_documents and self.policy.name == "offload" and self.policy.swap is None

    @property
    def has_aligned_slots(self) -> bool:
        """Whether ranks that share a sequence must have it in the same micro-batch slot."""
        return self.mesh.num_stages > 1 or self.mesh.expert_ranks > 1

    @property
    def optimizer_ranks(self) -> int:
        """Number of ranks that share Adam's states of dense parameters."""
        return self.cluster.num_ranks if self.mesh.shares_optimizer else 1

    def with_option(self, option: StateOption) -> Setup:
        """Return this setup with model states that the planner chose."""
        return replace(self, states=replace(self.states, option=option, shares_budget=True))


def setup_of_cost(
    cost: ModelCost, num_stages: int = 1, cluster: Cluster | None = None, longest: int | None = None
) -> Setup:
    """Return the setup of a model from its cost, with stages of equal layers.

    HDP ranks share Adam's states, and operators of layers are fused.

    Args:
        cost: measured or published seconds of the model.
        num_stages: pipeline stages.
        cluster: HDP ranks; None: one rank.
        longest: tokens of the longest sequence; None: as many as fit on all ranks.

    Raises:
        ValueError: the stages do not divide the layers.
    """
    cluster = cluster or Cluster(1, 8192)
    return Setup(
        shape=cost.shape,
        mesh=Mesh(equal_layers(cost.shape, num_stages), cost.tensor_parallel, shares_optimizer=True),
        numerics=Numerics(cost.element_bytes),
        cluster=cluster,
        cost=cost,
        sequences=Sequences(longest or cluster.num_ranks * cluster.tokens_per_rank),
    )


def equal_layers(shape: ModelShape, num_stages: int) -> tuple[int, ...]:
    """Return the layers of equal stages. Raises ValueError if they do not divide the layers."""
    if num_stages < 1 or shape.num_layers % num_stages:
        raise ValueError(f"{num_stages} stages do not divide the {shape.num_layers} layers of the model")
    return (shape.num_layers // num_stages,) * num_stages
