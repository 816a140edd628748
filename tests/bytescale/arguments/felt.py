"""The loss and the gradient of a small model, as a command line makes it, without data and without Megatron's loop."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tests.harness import run_ranks

if TYPE_CHECKING:
    from bytescale_ext.config.run import RunConfig

NUM_TOKENS = 200
VOCAB = 128
Felt = tuple[float, float] | str
"""(sum of losses, sum of the norms of gradients), or the line that refuses the command line."""


def felt(*lines: Sequence[object]) -> list[Felt]:
    """Return the result of each command line; all in one process, from the same weights and tokens."""
    words = [[str(word) for word in line] for line in lines]
    found: list[Felt] = run_ranks(_felt_by_all, 1, words, timeout=600)[0]
    return found


def _felt_by_all(rank: int, world: int, lines: Sequence[list[str]]) -> list[Felt]:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from tests.e2e.oracle import draw_weights_by_name

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    draw_weights_by_name()
    return [_felt_by(words) for words in lines]


def _felt_by(words: list[str]) -> Felt:
    from tests.bytescale.arguments.resolving import checked

    try:
        with contextlib.redirect_stderr(io.StringIO()):
            args = checked(1, words, VOCAB)
        return loss_and_gradient(args)[-1]
    except ValueError as error:
        return str(error)
    except SystemExit:
        return "argparse refuses it"


def configurations_of(args: Any) -> list[Any]:
    """Return Megatron's configurations of the training: the model, its layers, and the rest."""
    from megatron.bytescale.training.pretrain_arguments import pretrain_config, stock_training

    model = stock_training(args).model
    container = pretrain_config(args, model)
    rest = [getattr(container, field.name) for field in dataclasses.fields(container) if field.name != "model"]
    return [model, model.transformer, *(part for part in rest if dataclasses.is_dataclass(part))]


def loss_and_gradient(args: Any) -> tuple[list[Any], RunConfig, Any, tuple[float, float]]:
    """Return Megatron's configurations, the run's configuration, the model, and its loss and gradient norm."""
    import torch
    from megatron.core import num_microbatches_calculator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import global_vars
    from megatron.training.models.gpt import GPTModelBuilder

    from bytescale_ext.attention.kernels.table import choose_kernel
    from megatron.bytescale.arguments.resolve import resolve
    from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
    from megatron.bytescale.core.transformer.dot_product_attention import sample_layout
    from megatron.bytescale.core.transformer.moe.document_loads import DocumentLoads, RoutedRows
    from megatron.bytescale.core.transformer.moe.step_loads import add_step_loads
    from megatron.bytescale.runtime import Runtime

    global_vars._GLOBAL_ARGS = args
    run = resolve(args)
    runtime = Runtime.of(run)
    window, shape = run.shape.window, run.shape
    settings = {"windows": window is not None, "value_dim": shape.value_dim}
    kernel = choose_kernel(torch.device("cpu"), torch.float32, shape.head_dim, None, **settings)[0]
    comm: Any = SimpleNamespace(rank=0)
    runtime.add_parts(kernel=kernel, comm=comm)
    configurations = configurations_of(args)
    config: Any = configurations[0]
    config.transformer_layer_spec, config.vocab_size = document_layer_spec(runtime), VOCAB
    model: Any = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    use_document_positions([model])
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 8, 1, 1)
    batch: Any = SimpleNamespace(num_tokens=NUM_TOKENS)
    runtime.step.batch = batch
    documents = DocumentLoads(torch.tensor([float(NUM_TOKENS)]), (), 1)
    runtime.step.routed = RoutedRows(documents, 0, torch.zeros(NUM_TOKENS, dtype=torch.int64))
    add_step_loads([model])
    tokens, labels = torch.randint(0, VOCAB, (2, 1, NUM_TOKENS), generator=torch.Generator().manual_seed(5))
    layouts = [sample_layout(NUM_TOKENS, 1, limit) for limit in (None, window)]
    params = DocumentSeqParams(positions=torch.arange(NUM_TOKENS), layout=layouts[0], window_layout=layouts[1])
    mask = None if args.num_experts is None else torch.zeros(1, NUM_TOKENS, dtype=torch.bool)
    output = (tokens, torch.arange(NUM_TOKENS)[None], None)
    loss = model.train()(*output, labels=labels, packed_seq_params=params, padding_mask=mask).double().sum()
    loss.backward()
    norms = [parameter.grad.double().norm() for parameter in model.parameters() if parameter.grad is not None]
    return configurations, run, model, (float(loss), float(torch.stack(norms).sum()))
