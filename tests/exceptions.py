"""Exceptions from the rules of test_layout.py and test_imports.py."""

from __future__ import annotations

# Functions with more than MAX_PARAMETERS parameters, because other code calls them: (file, name): which code.
FOREIGN_SIGNATURES = {
    ("bytescale_ext/attention/fused_merge.py", "_join"): "Triton, whose kernels take pointers, steps and sizes",
    ("megatron/bytescale/core/transformer/dot_product_attention.py", "forward"): "Megatron's attention layer",
    ("megatron/bytescale/core/models/gpt/chunked_loss.py", "chunked_loss"): "Megatron's GPTModel",
    ("megatron/bytescale/inference/cache.py", "forward"): "Megatron's attention layer",
}
# Modules that no test of the mirrored folder imports, and why.
TESTED_ELSEWHERE = {
    "bytescale_ext/errors.py": "exceptions without code",
    "bytescale_ext/data/loading/plan_worker.py": "the program of a process that test_planning.py starts",
    "megatron/bytescale/cli/dry_run.py": "tests/bytescale/cli/shared/test_launch_line.py types the command",
    "megatron/bytescale/core/models/gpt/gpt_layer_specs.py": "tests/e2e/hdp, with every model",
    "megatron/bytescale/core/packed_seq_params.py": "tests/e2e/hdp, with every model",
    "megatron/bytescale/core/models/common/embeddings/host_embedding.py": "tests/e2e/states/test_embedding.py",
    "megatron/bytescale/core/models/common/embeddings/host_memory.py": "tests/e2e/states, with every layout",
    "megatron/bytescale/core/transformer/dot_product_attention.py": "tests/e2e/hdp, with every layout",
    "megatron/bytescale/features/activations/build.py": "tests/e2e/activation",
    "megatron/bytescale/features/tables/build.py": "tests/e2e/states",
    "megatron/bytescale/build.py": "tests/e2e/runs/test_new_feature.py",
    "megatron/bytescale/training/pretrain_arguments.py": "tests/e2e/runs/test_new_feature.py",
    "megatron/bytescale/core/pipeline_parallel/agreement.py": "tests/e2e/runs/test_agreement.py",
    "megatron/bytescale/features/drafts/build.py": "tests/e2e/hdp/test_drafts.py",
    "megatron/bytescale/features/hdp/build.py": "tests/e2e/hdp",
    "megatron/bytescale/features/slices/build.py": "tests/e2e/slices",
    "megatron/bytescale/training/stock.py": "tests/e2e/runs/test_stock.py",
    "megatron/bytescale/training/training.py": "tests/e2e/runs/test_logging.py",
}
# Modules of today's import cycles through functions. A module leaves the set when its cycle ends; none enters.
IN_A_CYCLE = {
    "scripts.bench.gpu_all",
    "scripts.bench.gpu_commands",
}
