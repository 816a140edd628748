"""Memory plan of one rank in a file: the recorded step, and the address of each of its tensors."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from bytescale_ext.errors import PlanError
from bytescale_ext.json_input import whole
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.entries import entries_of, from_entries
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.check import check_two_level_plan
from bytescale_ext.plan.memory.plan import TwoLevelPlan, TwoLevelPlanJson
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing

SHARE_TOLERANCE = 0.01
"""Largest difference of shares that count as equal, because shares are rounded to rows."""


class StepMemoryJson(TwoLevelPlanJson):
    """JSON format of a plan file. ``record`` has the fields of ``StepRecord``."""

    record: dict[str, object]
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Traits of a model that decide the tensors of a layer and of the head, in addition to its sizes.

    Attributes:
        normalization: kind of all norms, "RMSNorm" or "LayerNorm".
        linear_biases: whether all matrix products have biases.
        qkv_biases: whether the product of queries, keys and values has a bias.
        qk_norms: whether queries and keys are normalized.
        positions: "rope", "learned_absolute" or "none".
        learned_positions: number of rows of the table of learned positions; 0 without a table.
        tied_embeddings: whether the output layer has the weight of the embedding.
        fused_activation: whether bias and activation function are one kernel.
        transformer_impl: implementation of the layers, "local" or "transformer_engine".
    """

    normalization: str = "RMSNorm"
    linear_biases: bool = False
    qkv_biases: bool = False
    qk_norms: bool = False
    positions: str = "rope"
    learned_positions: int = 0
    tied_embeddings: bool = False
    fused_activation: bool = False
    transformer_impl: str = "local"


@dataclass(frozen=True, slots=True)
class StepParallelism:
    """Distribution of a step over the ranks of a pipeline. The default is one process without a pipeline.

    Attributes:
        tensor_parallel: number of ranks that share each layer.
        sequence_parallel: whether these ranks also share the norms.
        stage_layers: number of layers of each pipeline stage; () for one stage.
        virtual_stages: number of model chunks of each stage.
        group_size: number of micro-batches, or slices, that pass a virtual stage together; 0 for one chunk.
        overlapped_messages: whether virtual stages receive ahead.
        micro_batches: number of micro-batches of a step in each pipeline; 1 for one stage.
        slices: tokens of each slice of a micro-batch; () without slices.
        slicing: order of the slices on a stage.
    """

    tensor_parallel: int = 1
    sequence_parallel: bool = False
    stage_layers: tuple[int, ...] = ()
    virtual_stages: int = 1
    group_size: int = 0
    overlapped_messages: bool = False
    micro_batches: int = 1
    slices: tuple[int, ...] = ()
    slicing: Slicing = ONE_SLICE

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return max(1, len(self.stage_layers))

    @classmethod
    def from_json(cls, value: object) -> StepParallelism:
        """Return the layout of the JSON form of ``asdict``. Raises KeyError or TypeError for other values."""
        known = entries_of(value)
        tuples: dict[str, object] = {}
        for name in ("stage_layers", "slices"):
            numbers = known[name]
            if not isinstance(numbers, list | tuple):
                raise TypeError(f"{name} is a {type(numbers).__name__} instead of a list")
            tuples[name] = tuple(numbers)
        return from_entries(cls, {**known, **tuples, "slicing": from_entries(Slicing, known["slicing"])})


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Settings of a recorded step: one micro-batch on one process, or the step of one rank of a pipeline.

    Attributes:
        shape: sizes of the model, with the padded vocabulary.
        num_tokens: tokens of the micro-batch, or of the largest slice.
        dtype: type of the parameters, for example "bfloat16".
        loss_tokens: number of tokens with logits at the same time (``--chunked-cross-entropy``), or None.
        activations: plan of kept, swapped and recomputed shares.
        traits: traits of the model.
        device: "cuda" or "cpu", because kernels keep different tensors.
        layout: ranks that share the step, and its order of work.
    """

    shape: ModelShape
    num_tokens: int
    dtype: str
    loss_tokens: int | None
    activations: ActivationPlan
    traits: ModelTraits
    device: str
    layout: StepParallelism = StepParallelism()

    def differences(self, other: StepRecord) -> list[str]:
        """Return the reasons why a plan of this record cannot serve ``other``, which may have fewer tokens."""
        mine, theirs = self._compared(), other._compared()
        reasons = [
            f"{name} is {mine[name]} there and {theirs[name]} here" for name in mine if mine[name] != theirs[name]
        ]
        if other.num_tokens > self.num_tokens:
            reasons.append(f"it is for {self.num_tokens} tokens and micro-batches have up to {other.num_tokens}")
        for field in fields(ActivationPlan):
            own, other_value = getattr(self.activations, field.name), getattr(other.activations, field.name)
            near = isinstance(own, float) and abs(own - other_value) <= SHARE_TOLERANCE
            if field.name != "policy" and own != other_value and not near:
                reasons.append(f"the {field.name} of activations is {own} there and {other_value} here")
        return reasons

    def _compared(self) -> dict[str, object]:
        """Return the values that must be equal, by their names in messages."""
        step = {"dtype": self.dtype, "device": self.device, "--chunked-cross-entropy": self.loss_tokens}
        layout = asdict(self.layout)
        return {**asdict(self.shape), **asdict(self.traits), **step, **layout.pop("slicing"), **layout}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Plan of one rank, or of all ranks with equal records. ``bytescale memory-plan`` writes it to a file.

    Attributes:
        record: recorded step.
        buffer_bytes: largest device memory into which the swapped tensors of one layer are read back.
        plan: addresses of the tensors.
    """

    record: StepRecord
    buffer_bytes: int
    plan: TwoLevelPlan

    def to_json(self) -> StepMemoryJson:
        """Return plain lists and dicts."""
        return {"record": asdict(self.record), "buffer_bytes": self.buffer_bytes, **self.plan.to_json()}

    @classmethod
    def from_json(cls, value: StepMemoryJson) -> StepMemory:
        """Return the checked plan that ``to_json`` wrote. Raises ValueError for another format or an invalid plan."""
        try:
            known = entries_of(value["record"])
            shape = from_entries(ModelShape, known["shape"])
            activations = from_entries(ActivationPlan, known["activations"])
            traits = from_entries(ModelTraits, known["traits"])
            layout = StepParallelism.from_json(known["layout"])
            made = {"shape": shape, "activations": activations, "traits": traits, "layout": layout}
            record = from_entries(StepRecord, {**known, **made})
            memory = cls(record, whole(value["buffer_bytes"]), TwoLevelPlan.from_json(value))
            check_two_level_plan(memory.plan)
            return memory
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a memory plan ({error}); `bytescale memory-plan --output` writes one") from None
        except PlanError as error:
            fault = str(error).partition("\n")[0]  # without the picture of the plan
            raise ValueError(f"an invalid memory plan: {fault}") from None

    def check_serves(self, step: StepRecord, where: object) -> None:
        """Raise ValueError, which names all differences, unless the plan serves this step."""
        reasons = self.record.differences(step)
        if reasons:
            raise ValueError(
                f"--memory-plan {where} is for another model or step: {'; '.join(reasons)}; record one with "
                "--record-memory-plan, or with `bytescale memory-plan` and these sizes"
            )
