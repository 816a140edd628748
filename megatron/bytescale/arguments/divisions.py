"""Checks how layers, widths and experts are divided among ranks, which Megatron asserts without naming a flag."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Divisions:
    """Sizes of the model and of its parallelism, before Megatron checks them; None: not given."""

    num_layers: int | None
    ffn_hidden_size: int | None
    num_experts: int | None
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    expert_model_parallel_size: int
    num_layers_per_virtual_pipeline_stage: int | None
    num_virtual_stages_per_pipeline_rank: int | None
    pipeline_model_parallel_layout: str | None
    decoder_first_pipeline_num_layers: int | None
    decoder_last_pipeline_num_layers: int | None
    account_for_embedding_in_pipeline_split: bool
    account_for_loss_in_pipeline_split: bool

    @property
    def ends(self) -> dict[str, int]:
        """Flag -> layers of the first and the last stage, if they are given."""
        given = {
            "--decoder-first-pipeline-num-layers": self.decoder_first_pipeline_num_layers,
            "--decoder-last-pipeline-num-layers": self.decoder_last_pipeline_num_layers,
        }
        return {flag: layers for flag, layers in given.items() if layers is not None}

    def wrong(self) -> Iterator[str]:
        """Yield a reason for each size that cannot be divided as the flags say."""
        sizes = {
            "--tensor-model-parallel-size": self.tensor_model_parallel_size,
            "--pipeline-model-parallel-size": self.pipeline_model_parallel_size,
            "--expert-model-parallel-size": self.expert_model_parallel_size,
        }
        small = [f"{flag} {size} must be at least 1" for flag, size in sizes.items() if size < 1]
        yield from small
        if small:
            return
        if self.ffn_hidden_size and self.ffn_hidden_size % self.tensor_model_parallel_size:
            yield (
                f"--ffn-hidden-size {self.ffn_hidden_size} must be a multiple of --tensor-model-parallel-size "
                f"{self.tensor_model_parallel_size}"
            )
        if self.num_experts and self.num_experts % self.expert_model_parallel_size:
            yield (
                f"--num-experts {self.num_experts} must be a multiple of --expert-model-parallel-size "
                f"{self.expert_model_parallel_size}"
            )
        if self.num_layers and self.num_layers > 0 and self.pipeline_model_parallel_layout is None:
            yield from self._wrong_ends(self.num_layers) if self.ends else self._wrong_stages(self.num_layers)

    def _wrong_ends(self, layers: int) -> Iterator[str]:
        """Yield a reason for each stage of unequal stages that cannot have its layers."""
        stages, virtual = self.pipeline_model_parallel_size, self.num_virtual_stages_per_pipeline_rank
        if self.num_layers_per_virtual_pipeline_stage is not None:
            yield (
                f"{' and '.join(self.ends)}: give --num-virtual-stages-per-pipeline-rank in place of "
                "--num-layers-per-virtual-pipeline-stage"
            )
        for flag, given in self.ends.items():
            if given < 1:
                yield f"{flag} {given} must be at least 1"
            elif virtual and given % virtual:
                yield f"{flag} {given} must be a multiple of --num-virtual-stages-per-pipeline-rank {virtual}"
        if stages < len(self.ends) or stages == 1:
            return  # a refusal of every run
        others, left = stages - len(self.ends), layers - sum(self.ends.values())
        text = " and ".join(f"{flag} {given}" for flag, given in self.ends.items())
        if left < others or (left and not others) or (others and left % (others * (virtual or 1))):
            parts = f"{others} other stages" + (f" of {virtual} virtual stages each" if virtual else "")
            yield f"--num-layers {layers} less {text} leaves {left} layers for {parts}, which need equally many"

    def _wrong_stages(self, layers: int) -> Iterator[str]:
        """Yield a reason if equal stages or equal virtual stages cannot be made."""
        stages = self.pipeline_model_parallel_size
        counted = {
            "--account-for-embedding-in-pipeline-split": self.account_for_embedding_in_pipeline_split,
            "--account-for-loss-in-pipeline-split": self.account_for_loss_in_pipeline_split,
        }
        more = [flag for flag, counts in counted.items() if counts]
        total = layers + len(more)
        text = " ".join([f"--num-layers {layers}", *(f"+ 1 ({flag})" for flag in more)])
        if total % stages:
            yield (
                f"{text} must be a multiple of --pipeline-model-parallel-size {stages}; "
                "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers make unequal stages"
            )
            return
        of_stage = total // stages
        virtual = {
            "--num-layers-per-virtual-pipeline-stage": self.num_layers_per_virtual_pipeline_stage,
            "--num-virtual-stages-per-pipeline-rank": self.num_virtual_stages_per_pipeline_rank,
        }
        for flag, size in virtual.items():
            if size is not None and (size < 1 or of_stage % size):
                yield f"{flag} {size} must divide the {of_stage} layers of a stage ({text} on {stages} stages)"
