"""Training on documents: data, preparation of the model, and forward step, in Megatron's formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training.config import TokenizerConfig
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import print_rank_0

from bytescale_ext.attention.kernels.table import choose_kernel, counting
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.drafts import DraftConfig
from bytescale_ext.config.experts import PlacementConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.tables import TablesConfig
from bytescale_ext.config.multi_token import MultiTokenConfig
from bytescale_ext.config.preferences import PreferenceConfig
from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.config.slices import DocumentSliceConfig
from bytescale_ext.data.loading.loader import StepLoader, StepsAhead
from bytescale_ext.data.loading.planning import CheckedPlanner, PlanMaker, Planner, PlannerInProcess, Predict
from bytescale_ext.data.loading.prompts import PromptSource, SharedPrompts
from bytescale_ext.data.loading.step import LoaderSettings
from bytescale_ext.data.ray.loader import RemoteSplit, RemoteStepLoader
from bytescale_ext.data.samples.lengths import check_indexed_dataset, check_token_ids
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.measure.learning import FIRST_STEP
from bytescale_ext.plan.cost.shards import CoupledShards
from bytescale_ext.plan.setup.costs import cost_source
from bytescale_ext.plan.setup.forecast import Forecast
from bytescale_ext.plan.setup.planner import planner_of
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import Fact, StepPlan
from bytescale_ext.plan.step.reductions import Overlaps
from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.arguments.data import DataArguments
from megatron.bytescale.arguments.layer_settings import RouterChanges
from megatron.bytescale.arguments.options import current
from megatron.bytescale.arguments.running import Batches, LossChecks
from megatron.bytescale.arguments.units import ALSO, CountedFlags
from megatron.bytescale.arguments.vocabulary import Vocabulary
from megatron.bytescale.core.datasets.answer_dataset import answer_config, build_conversations, check_answers
from megatron.bytescale.core.datasets.document_dataset import (
    DocumentConfig,
    SampleSource,
    build_document_datasets,
    check_labels,
    check_splits,
)
from megatron.bytescale.core.datasets.group_dataset import group_config
from megatron.bytescale.core.datasets.remote import check_line_file, open_remote, start_remote
from megatron.bytescale.core.datasets.step_tokens import samples_that_hold
from megatron.bytescale.core.datasets.window_dataset import build_windows, window_config
from megatron.bytescale.core.distributed.ordered_reductions import order_reductions
from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams, PackedUnit
from megatron.bytescale.core.parallel_state import create_ring_comm, hdp_rank
from megatron.bytescale.core.pipeline_parallel.schedules import wrap_finalize_model_grads
from megatron.bytescale.core.transformer.document_dropout import number_tokens, use_document_dropout, uses_noise
from megatron.bytescale.core.transformer.moe.document_loads import balances_documents, route_by_document
from megatron.bytescale.core.transformer.moe.router import padding_mask
from megatron.bytescale.core.transformer.moe.step_loads import add_step_loads, sum_step_loads
from megatron.bytescale.learned_costs import learner_of
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import DatasetProvider, ForwardStep, LossFunction


def train_on_documents(training: Training, runtime: Runtime) -> Training:
    """Give Megatron documents: data, attention, positions and forward step.

    Raises ValueError for data that cannot be read.
    """
    data, run = current(DataArguments), runtime.run
    check_data(data, run, is_text=run.find(RemoteConfig) is not None)
    if line := current(Vocabulary).text():
        print_rank_0(line)
    if all(run.find(kind) is None for kind in (RemoteConfig, SculptConfig, AnswerLossConfig)):  # these check it
        check_labels(check_splits(DocumentConfig(**data.settings()), data.wanted_samples()))
    if run.find(SculptConfig) is None:
        print_units(data, has_lengths=run.find(RemoteConfig) is None)
    learns = runtime.hdp.learns_costs and run.find(RemoteConfig) is None  # Ray's actors plan with the first costs
    if learns:
        runtime.add_parts(learner=learner_of(runtime))
    more = f"; learning from step {FIRST_STEP}" if learns else ""
    print_rank_0(f"> bytescale: costs: {cost_source(run.decision.setup)}{more}")
    use_document_model(training, runtime)
    return replace(training, dataset_provider=dataset_provider(runtime), forward_step=forward_step(runtime))


def print_units(data: DataArguments, *, has_lengths: bool) -> None:
    """Print the quantities that count documents. If lengths are known, also print the meaning of a blend's weights."""
    flags = ", ".join(current(CountedFlags).given())
    print_rank_0(f"> bytescale: these count documents, not samples of one length: {flags}; {ALSO}")
    together, of_splits = data.blends()
    shares = data.shares(together if of_splits is None else of_splits[0]) if has_lengths else None
    if shares is not None:
        text = shares.text(data.hdp_blend_by == "tokens", "--hdp-blend-by tokens")
        print_rank_0(f"> bytescale: {text}")


def use_document_model(training: Training, runtime: Runtime) -> Training:
    """Give the model attention and positions of documents, and mark the end of the gradients."""
    training.model.transformer_layer_spec = document_layer_spec(runtime)
    training.model.pre_wrap_hooks += [partial(prepare_model, runtime), add_step_loads]
    training.model.post_wrap_hooks.append(partial(use_document_dropout, runtime))
    training.model.post_wrap_hooks.append(partial(order_reductions, runtime))
    training.wrap_finalize(sum_step_loads)
    training.wrap_finalize(partial(count_sequences, runtime=runtime))
    return training.wrap_finalize(partial(wrap_finalize_model_grads, runtime=runtime))


def load_from_ray(training: Training, runtime: Runtime) -> Training:
    """Load documents from Ray actors, which start here on process 0. Raises ValueError if they cannot start."""
    data = current(DataArguments)
    remote = open_remote(data, runtime.run, current(TokenizerConfig))
    make_plan = plan_maker(runtime, planner_of(runtime.run.decision))

    def sources(num_samples: Sequence[int | None]) -> Sequence[RemoteSplit | None]:
        return start_remote(remote, data.settings(), num_samples, make_plan)

    return replace(training, dataset_provider=dataset_provider(runtime, sources))


def train_on_windows(training: Training, runtime: Runtime) -> Training:
    """Plan windows or their documents instead of a data set's documents. Raises ValueError for empty splits."""
    data = current(DataArguments)
    windows = window_config(runtime.run.get(SculptConfig), data.settings())
    check_splits(windows, data.wanted_samples(), windows.num_windows)
    return replace(
        training,
        dataset_provider=dataset_provider(runtime, lambda sizes: build_windows(windows.in_saved_order(), sizes)),
    )


def train_on_answers(training: Training, runtime: Runtime) -> Training:
    """Restrict the loss of documents to their answers. Raises ValueError for splits without an answer."""
    data = current(DataArguments)
    config = answer_config(runtime.run.get(AnswerLossConfig).prefixes, data.settings())
    for line in check_answers(check_splits(config, data.wanted_samples())):
        print_rank_0(line)
    return replace(
        training,
        dataset_provider=dataset_provider(runtime, lambda sizes: build_conversations(config.in_saved_order(), sizes)),
    )


def prepare_model(runtime: Runtime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Choose the kernel and create the ring communicator. Every process calls it before DDP wraps the model."""
    run = runtime.run
    shape = run.shape
    inputs = (runtime.device, run.process.dtype, shape.head_dim, runtime.hdp.kernel, shape.window is not None)
    kernel, reason, _ = choose_kernel(*inputs, value_dim=shape.value_dim)
    print_rank_0(f"> bytescale: attention kernel {kernel.name} ({reason})")
    counted, calls = counting(kernel)
    comm = create_ring_comm(runtime.device, run.process.timeout_minutes)
    runtime.add_parts(kernel=counted, kernel_calls=calls, comm=comm)
    return use_document_positions(model_chunks)


def document_sources(num_samples: Sequence[int | None]) -> Sequence[SampleSource | None]:
    """Return the documents of each split of Megatron's data sets."""
    config = DocumentConfig(**current(DataArguments).settings()).in_saved_order()
    return build_document_datasets(config, num_samples, lambda: True)


def dataset_provider(
    runtime: Runtime,
    sources: Callable[[Sequence[int | None]], Sequence[SampleSource | RemoteSplit | None]] = document_sources,
    planner: Planner | None = None,
) -> DatasetProvider:
    """Return ``train_valid_test_datasets_provider``: a loader of whole steps for each split.

    Args:
        runtime: runtime of this process.
        sources: number of samples per split -> samples of each split.
        planner: planner of the steps, instead of the run's planner.
    """
    planner = planner or planner_of(runtime.run.decision)

    def provide(num_samples: Sequence[int | None], vp_stage: int | None = None) -> tuple[StepsAhead | None, ...]:
        if vp_stage:  # all chunks run the step of the first chunk's loader
            return None, None, None
        batches = current(Batches)
        places = (
            (batches.consumed_train_samples, batches.global_batch_size),
            (batches.consumed_valid_samples, batches.evaluation),
            (0, batches.evaluation),
        )
        drafts, depths = runtime.run.find(DraftConfig), runtime.run.find(MultiTokenConfig)
        tables = runtime.run.find(TablesConfig)
        loaders: list[StepsAhead | None] = []
        splits = sources(enough_samples(runtime, num_samples))
        for source, (consumed, size), cyclic in zip(splits, places, (False, True, True), strict=True):
            settings = replace(
                common_settings(runtime, size, consumed),
                first_step=0 if cyclic else batches.iteration,
                cyclic=cyclic,
                schedule=() if cyclic else runtime.hdp.schedule,
                tokens_per_step=None if cyclic else runtime.hdp.global_tokens,
                future_tokens=next((heads.num_heads for heads in (drafts, depths) if heads is not None), 0),
                weighs_future=depths is not None,
                normalization=runtime.hdp.loss_normalization,
                grams=None if tables is None or tables.ngram is None else tables.ngram.rule,
            )
            loaders.append(None if source is None else step_loader(runtime, source, settings, planner))
        return tuple(loaders)

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own tokens
    return provide


def common_settings(runtime: Runtime, samples_per_step: int, consumed_samples: int) -> LoaderSettings:
    """Return the settings that the loaders of all splits share; they begin again after the last sample."""
    slices = runtime.run.find(DocumentSliceConfig)
    return LoaderSettings(
        rank=hdp_rank(),
        samples_per_step=samples_per_step,
        consumed_samples=consumed_samples,
        cyclic=True,
        plan_ahead=runtime.hdp.plan_ahead,
        rows_multiple=runtime.hdp.rows_multiple,
        vocab_size=runtime.run.shape.vocab,
        pin_memory=runtime.parts.clock.on_cuda,
        slice_rule=None if slices is None or slices.slicing.num_slices == 1 else slices.rule,
        window=runtime.run.shape.window,
    )


def enough_samples(runtime: Runtime, num_samples: Sequence[int | None]) -> Sequence[int | None]:
    """Return each split's number of samples, adjusted if training steps differ in samples."""
    batches, hdp, answers = current(Batches), runtime.hdp, runtime.run.find(AnswerLossConfig)
    train, *others = num_samples
    if train and hdp.global_tokens is not None:
        settings = current(DataArguments).settings()
        config = DocumentConfig(**settings)
        if answers is not None:
            in_groups = runtime.run.find(PreferenceConfig) is not None or hdp.loss_normalization == "groups"
            config = (group_config if in_groups else answer_config)(answers.prefixes, settings)
        left = hdp.global_tokens * (batches.train_iters - batches.iteration)
        train = batches.consumed_train_samples + samples_that_hold(left, config)
    if train and hdp.schedule:
        train += hdp.schedule[-1][1]  # the last step may start just before the end
    return [train, *others]


def plan_maker(runtime: Runtime, planner: Planner) -> PlanMaker:
    """Return the maker and checker of each step's plan."""
    return PlanMaker(planner, _check(runtime), runtime.hdp.plan_seconds)


def own_plan_maker(
    runtime: Runtime, planner: Planner, trains: bool = False, predict: Predict | None = None
) -> PlanMaker:
    """Return the maker of each step's plan for this rank. A slow planner plans and checks in another process.

    ``trains``: whether steps reduce gradients and may be learned from.
    """
    rank, facts = hdp_rank(), list[Fact[object]]()
    if trains and runtime.parts.reductions is not None:
        facts.append(Overlaps(rank, runtime.hdp.expert_ranks))
    if trains and runtime.parts.learner is not None:
        facts.append(CoupledShards(rank))
    checked = CheckedPlanner(planner, _check(runtime), rank, tuple(facts), predict)
    return PlanMaker(PlannerInProcess(checked), None, runtime.hdp.plan_seconds, predict)


def _check(runtime: Runtime) -> Callable[[StepPlan], None]:
    return partial(
        check_step_plan,
        tokens_multiple=runtime.hdp.rows_multiple,
        num_layers=runtime.run.decision.offloading_layers,
        ranks_per_node=runtime.hdp.cluster.ranks_per_node,
    )


def step_loader(
    runtime: Runtime, source: SampleSource | RemoteSplit, settings: LoaderSettings, planner: Planner
) -> StepsAhead:
    """Return the loader of one split for one process of the job. The process that logs also predicts training steps."""
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
    predict = Forecast(runtime.run.decision).time_of_plan if is_last and not settings.cyclic else None
    if isinstance(source, RemoteSplit):
        is_end = parallel_state.is_pipeline_first_stage(ignore_virtual=True) or parallel_state.is_pipeline_last_stage(
            ignore_virtual=True
        )
        process = runtime.run.process.rank
        plans = replace(plan_maker(runtime, planner), predict=predict)
        return RemoteStepLoader(source, plans, process, settings, reads_tokens=is_end)
    if computes_prompts_once(runtime) and isinstance(source, PromptSource):
        cluster, has_slices = runtime.hdp.cluster, runtime.run.find(DocumentSliceConfig) is not None
        widest = 1 if has_slices else cluster.num_ranks
        rule = SharedPrompts(cluster.tokens_per_rank, widest, runtime.hdp.cost.both)
        settings = replace(settings, prompts=rule)
    loads = None if settings.cyclic else runtime.parts.load_history
    learner = None if settings.cyclic else runtime.parts.learner
    costs = None if learner is None else learner.at
    plans = own_plan_maker(runtime, planner, not settings.cyclic, predict)
    return StepLoader(source, plans, settings, source.sequences, loads, costs)


def computes_prompts_once(runtime: Runtime) -> bool:
    """Return whether a run with ``--loss`` may compute the prompt of a group once for all answers.

    Losses and biases of routers would count fewer tokens than with copies; replicas of experts, windows, n-grams,
    latents and activation policies of such groups are not tested. In slices, such groups have no rings.
    """
    run = runtime.run
    if run.find(PreferenceConfig) is None:
        return False
    others = (TablesConfig, ActivationConfig, PlacementConfig)
    is_plain = run.shape.window is None and run.shape.latent is None and not current(RouterChanges).any()
    return is_plain and all(run.find(kind) is None for kind in others)


def forward_step(runtime: Runtime) -> ForwardStep:
    """Return a ``forward_step_func`` that runs one micro-batch of documents through the model or a stage's chunk.

    With slices it runs one slice, with the keys and values of earlier slices.
    """

    def forward(data_iterator: Iterator[PackedUnit], model: torch.nn.Module) -> tuple[torch.Tensor, LossFunction]:
        index, packed, prefix = next(data_iterator)
        chunk = unwrap_model(model)
        if model.training:
            runtime.parts.clock.mark("forward", index)
            is_first = prefix is None or not isinstance(packed.layout, SliceLayout) or not packed.layout.index
            if not chunk.vp_stage and is_first:
                # Once per stage, because Megatron's counter divides by the number of stages.
                runtime.step.counted_lengths += packed.counted_lengths
        before_backward = []
        if model.training and uses_noise(chunk.config):
            before_backward.append(number_tokens(runtime, packed, chunk.config))
        if model.training and balances_documents(chunk.config):
            before_backward.append(route_by_document(runtime, packed, index, chunk))
        packed = packed.to(runtime.device)
        output = model(
            packed.tokens[None] if chunk.pre_process else None,
            packed.positions[None],
            None,
            labels=packed.labels[None] if chunk.post_process else None,
            packed_seq_params=DocumentSeqParams(
                positions=packed.positions,
                layout=packed.layout,
                window_layout=packed.window_layout,
                prefix=prefix,
                future=packed.future,
                future_weights=packed.future_weights,
                gram_rows=packed.gram_rows,
            ),
            padding_mask=padding_mask(packed, model),
        )
        for hook in before_backward if output.requires_grad else ():
            output.register_hook(hook)
        if model.training and output.requires_grad:
            output.register_hook(lambda _: runtime.parts.clock.mark("backward", index))
        return output, partial(sum_of_losses, packed)

    return forward


def count_sequences(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Wrap ``finalize_model_grads_func``: report the sequence lengths of a step to Megatron's FLOP counter.

    The first rank of a sequence's ring reports it, once for each stage. The bounds are on the device, because Megatron
    would otherwise wait for the device to copy them. They start with an empty sequence, because Megatron ignores a
    step without sequences.
    """

    def finalize_model_grads(*args: object, **kwargs: object) -> object:
        lengths = (0, *runtime.step.counted_lengths)
        runtime.step.counted_lengths.clear()
        update_seqlen_stats_from_cu_seqlens(CuSeqlens.of_lengths(lengths).on(torch.device(runtime.device)))
        return original(*args, **kwargs)

    return finalize_model_grads


def sum_of_losses(
    packed: PackedMicroBatch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return (sum of the losses, number of labels, report) of a micro-batch; Megatron divides by all ranks' labels.

    ``losses``: loss of each token of the micro-batch, in any shape. The first two results are scalars.
    """
    total = torch.sum(losses.view(-1).float() * packed.loss_mask)
    num_labels = packed.num_labels.to(torch.int)
    if current(LossChecks).check_for_nan_in_loss_and_grad:
        documents = packed.documents_text()
        for test in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=test,
                message=f"{test.__name__[2:]} loss in the documents {documents}",
                tolerance=0.0,
                fatal=True,
            )
    return total, num_labels, {"lm loss": torch.stack([total.detach(), num_labels.to(total.dtype)])}


def check_data(data: DataArguments, run: RunConfig, is_text: bool) -> None:
    """Raise ValueError for missing, truncated or empty data sets, and for other formats or vocabularies.

    Reads the index of each data set; only the first process scans token ids. ``is_text``: the data are files of text.
    """
    prefixes = data.prefixes()
    if not prefixes:
        raise ValueError("no data: give --data-path PREFIX (`bytescale corpus` creates a data set)")
    for prefix in prefixes:
        if is_text:
            check_line_file(prefix, run.get(RemoteConfig).json_key, data.data_cache_path)
            continue
        check_indexed_dataset(prefix, data.data_cache_path)
        if run.process.rank == 0:
            check_token_ids(prefix, run.shape.vocab, cache=data.data_cache_path)
    with refusals_of_megatron():
        config = BlendedMegatronDatasetConfig(**data.settings())
    parts = config.blend_per_split if config.blend is None else config.split_matrix
    for name, wanted, part in (("train", not data.skip_train, parts[0]), ("valid", data.eval_iters > 0, parts[1])):
        if wanted and part is None:  # Megatron would train or evaluate without data
            raise ValueError(
                f"no documents for the {name} split: give another --split (it is {data.split}) or "
                f"--{name}-data-path{', or --eval-iters 0' if name == 'valid' else ''}"
            )
