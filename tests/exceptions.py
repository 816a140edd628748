"""Exceptions from the rules of test_layout.py and test_imports.py."""

from __future__ import annotations

# Functions with more than MAX_PARAMETERS parameters, because other code calls them: (file, name): which code.
FOREIGN_SIGNATURES = {
    ("bytescale_ext/attention/fused_merge.py", "_join"): "Triton, whose kernels take pointers, steps and sizes",
    ("megatron/bytescale/core/transformer/dot_product_attention.py", "forward"): "Megatron's attention layer",
    ("megatron/bytescale/core/models/gpt/chunked_loss.py", "chunked_loss"): "Megatron's GPTModel",
}
# Modules that no test of the mirrored folder imports, and why.
TESTED_ELSEWHERE = {
    "bytescale_ext/errors.py": "exceptions without code",
    "bytescale_ext/data/loading/plan_worker.py": "the program of a process that test_planning.py starts",
    "megatron/bytescale/core/models/gpt/gpt_layer_specs.py": "tests/e2e/hdp, with every model",
    "megatron/bytescale/core/packed_seq_params.py": "tests/e2e/hdp, with every model",
    "megatron/bytescale/core/pipeline_parallel/p2p_communication.py": "tests/e2e/hdp/test_pipelines.py",
    "megatron/bytescale/core/transformer/dot_product_attention.py": "tests/e2e/hdp, with every layout",
    "megatron/bytescale/training/activations.py": "tests/e2e/activation",
    "megatron/bytescale/training/build.py": "tests/e2e/runs/test_new_feature.py",
    "megatron/bytescale/core/pipeline_parallel/agreement.py": "tests/e2e/runs/test_agreement.py",
    "megatron/bytescale/training/hdp.py": "tests/e2e/hdp",
    "megatron/bytescale/training/slices.py": "tests/e2e/slices",
    "megatron/bytescale/training/stock.py": "tests/e2e/runs/test_stock.py",
    "megatron/bytescale/training/training.py": "tests/e2e/runs/test_logging.py",
}
# Files in which Megatron's arguments and objects enter, which have no types.
ANY_FILES = {
    "megatron/bytescale/arguments/model_shape.py",
    "megatron/bytescale/arguments/refusals.py",
    "megatron/bytescale/arguments/values.py",
    "megatron/bytescale/arguments/resolve.py",
    "megatron/bytescale/core/datasets/corpus.py",
    "megatron/bytescale/core/datasets/document_dataset.py",
    "megatron/bytescale/core/datasets/remote.py",
    "megatron/bytescale/core/models/common/embeddings/rotary_pos_embedding.py",
    "megatron/bytescale/core/models/gpt/gpt_layer_specs.py",
    "megatron/bytescale/core/optimizer/distrib_optimizer.py",
    "megatron/bytescale/core/pipeline_parallel/p2p_communication.py",
    "megatron/bytescale/core/pipeline_parallel/schedules.py",
    "megatron/bytescale/core/pipeline_parallel/seq1f1b.py",
    "megatron/bytescale/core/pipeline_parallel/stand_in.py",
    "megatron/bytescale/core/transformer/dot_product_attention.py",
    "megatron/bytescale/core/transformer/moe/expert_ranks.py",
    "megatron/bytescale/core/transformer/moe/slice_router.py",
    "megatron/bytescale/core/transformer/transformer_layer.py",
    "megatron/bytescale/cpu.py",
    "megatron/bytescale/features/__init__.py",
    "megatron/bytescale/features/activations.py",
    "megatron/bytescale/features/feature.py",
    "megatron/bytescale/features/hdp.py",
    "megatron/bytescale/features/loss_chunks.py",
    "megatron/bytescale/features/memory_plan.py",
    "megatron/bytescale/features/memory_record.py",
    "megatron/bytescale/features/ray.py",
    "megatron/bytescale/features/slices.py",
    "megatron/bytescale/registry.py",
    "megatron/bytescale/runtime.py",
    "megatron/bytescale/training/activation_memory.py",
    "megatron/bytescale/training/activations.py",
    "megatron/bytescale/training/build.py",
    "megatron/bytescale/training/hdp.py",
    "megatron/bytescale/training/one_device.py",
    "megatron/bytescale/training/profile.py",
    "megatron/bytescale/training/slices.py",
    "megatron/bytescale/training/stock.py",
    "megatron/bytescale/training/training.py",
}
