"""Exceptions from the rules of test_layout.py and test_imports.py."""

from __future__ import annotations

# Functions with more than MAX_PARAMETERS parameters, because other code calls them: (file, name): calling code.
FOREIGN_SIGNATURES = {
    ("bytescale_ext/attention/fused_largest.py", "_largest"): "Triton, whose kernels take pointers, steps and sizes",
    ("bytescale_ext/attention/fused_merge.py", "_join"): "Triton, whose kernels take pointers, steps and sizes",
    ("megatron/bytescale/core/transformer/dot_product_attention.py", "forward"): "Megatron's attention layer",
    ("megatron/bytescale/core/models/gpt/chunked_loss.py", "chunked_loss"): "Megatron's GPTModel",
    ("megatron/bytescale/inference/cache.py", "forward"): "Megatron's attention layer",
}
# Modules that no test of the mirrored folder imports, and why.
TESTED_ELSEWHERE = {
    "bytescale_ext/errors.py": "exceptions without code",
    "bytescale_ext/config/memory/activations.py": "tests/bytescale/features/activations, by the flags",
    "bytescale_ext/plan/setup/forecast.py": "tests/bytescale/cli and tests/plan/search, with every command",
    "bytescale_ext/data/loading/plan_worker.py": "the program of a process that test_planning.py starts",
}
# Files of bytescale_ext that may use Any, and why.
MAY_USE_ANY = {
    "bytescale_ext/terminal.py": "attributes of a stream of any kind",
    "bytescale_ext/json_input.py": "JSON of a user has values of any type",
    "bytescale_ext/new_file.py": "a file is binary or text",
    "bytescale_ext/pickles.py": "the stack of Python's unpickler has values of any type",
}
# Modules in current import cycles through functions. A module leaves the set when its cycle ends; no module is added.
IN_A_CYCLE = {
    "scripts.bench.gpu_all",
    "scripts.bench.gpu_commands",
}
