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
    "megatron/bytescale/training/memory/activations.py": "tests/e2e/activation",
    "megatron/bytescale/training/memory/host_tables.py": "tests/e2e/states",
    "megatron/bytescale/training/build.py": "tests/e2e/runs/test_new_feature.py",
    "megatron/bytescale/core/pipeline_parallel/agreement.py": "tests/e2e/runs/test_agreement.py",
    "megatron/bytescale/training/drafts.py": "tests/e2e/hdp/test_drafts.py",
    "megatron/bytescale/training/hdp.py": "tests/e2e/hdp",
    "megatron/bytescale/training/slices.py": "tests/e2e/slices",
    "megatron/bytescale/training/stock.py": "tests/e2e/runs/test_stock.py",
    "megatron/bytescale/training/training.py": "tests/e2e/runs/test_logging.py",
}
# Modules of today's import cycles through functions. A module leaves the set when its cycle ends; none enters.
IN_A_CYCLE = {
    "megatron.bytescale.features",
    "megatron.bytescale.features.experts.gate",
    "megatron.bytescale.features.experts.placement",
    "megatron.bytescale.features.experts.trace",
    "megatron.bytescale.features.experts.upcycle",
    "megatron.bytescale.features.hdp",
    "megatron.bytescale.features.memory.activations",
    "megatron.bytescale.features.memory.embedding",
    "megatron.bytescale.features.memory.host_tables",
    "megatron.bytescale.features.memory.memory_plan",
    "megatron.bytescale.features.memory.memory_record",
    "megatron.bytescale.features.memory.ngram",
    "megatron.bytescale.features.memory.state_choice",
    "megatron.bytescale.features.memory.states",
    "megatron.bytescale.features.ray",
    "megatron.bytescale.features.sculpt",
    "megatron.bytescale.features.sft",
    "megatron.bytescale.features.slices",
    "megatron.bytescale.features.zero_bubble",
    "megatron.bytescale.training.build",
    "megatron.bytescale.training.experts.gate",
    "megatron.bytescale.training.experts.loads",
    "megatron.bytescale.training.experts.upcycle",
    "megatron.bytescale.training.hdp",
    "megatron.bytescale.training.memory.activation_memory",
    "megatron.bytescale.training.memory.activations",
    "megatron.bytescale.training.memory.host_tables",
    "megatron.bytescale.training.memory.late_updates",
    "megatron.bytescale.training.memory.memory_record",
    "megatron.bytescale.training.slices",
    "scripts.bench.gpu_all",
    "scripts.bench.gpu_commands",
}
