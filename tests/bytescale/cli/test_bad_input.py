"""Invalid input of every subcommand: one line on standard error, exit code 2, and no output files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bytescale import cli
from megatron.bytescale.cli.shared.inputs import OneLineParser
from megatron.bytescale.cli.shared.lengths import read_lengths
from megatron.bytescale.cli.shared.slicing import cost_of_options
from tests.data.sources import write_data_set
from tests.sample import examples

PLAN = ["plan", "--lengths", "{in}/lengths.npy", "--ranks", "9", "--tokens-per-rank", "10"]
SIMULATE = "simulate --sampler sft --seq-length 8K --ranks 8 --tokens-per-rank 8K --global-tokens 64K --seeds 1".split()
SCHEDULE = "schedule --pipeline-parallel 4 --micro-batches 8".split()
MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
MEMORY = ["memory-plan", "--model-flags"]
ACTIVATIONS = ["activations", "--model-flags"]
CORPUS = ["corpus", "--output", "{in}/out"]
TOKENIZED = [*CORPUS, "--from", "{in}/lines.jsonl", "--tokenizer-type"]
DRY_RUN = ["dry-run", "--ranks", "8"]
SEARCH = ["search", "--model-flags", MODEL, "--sampler", "sft", *"--seq-length 1K --ranks 8".split(),
          *"--global-batch-size 8 --device-memory-gb 1 --steps 1".split()]  # fmt: skip
SCULPT = "data sculpt --input {in}/docs --seq-length 8 --output {in}/out".split()
PROFILE = ["profile", "--output", "{in}/cost.json"]

# (command line, words of the message); {in} is the folder of the fixture ``folder``.
CASES: list[tuple[list[str], str]] = [
    ([], "required: COMMAND"),
    (["plans"], "invalid choice: 'plans'"),
    # plan
    (["plan"], "required: --lengths, --ranks, --tokens-per-rank"),
    *(([*PLAN, "--ranks", bad], f"'{bad}' is not a whole number") for bad in ("0", "1.5", "", "8K")),
    ([*PLAN, "--ranks", "100000000"], "'100000000' is not a whole number from 1 to 1048576"),
    *(([*PLAN, "--tokens-per-rank", bad], f"'{bad}' is not a size") for bad in ("0", "-8", "8KB", "1e3")),
    ([*PLAN, "--tokens-per-rank", str(10**20)], "is not a size from 1 to 1024G"),
    ([*PLAN, "--num-sequences", "99999999"], "has 3 documents from document 0 on; give at most that many"),
    ([*PLAN, "--start", "3"], "has 3 documents, numbered from 0"),
    ([*PLAN, "--start", "-1"], "--start -1"),
    ([*PLAN, "--start", "one"], "invalid int value: 'one'"),
    ([*PLAN, "--tokens-multiple", "3"], "multiple"),
    ([*PLAN, "--balance", "best"], "choose one of auto, none, dp, pp, bytescale"),
    ([*PLAN, "--balance", "dp", "--pipeline-parallel", "2"], "dp makes no aligned slots"),
    ([*PLAN, "--pipeline-parallel", "5"], "5 stages do not divide the 32 layers"),
    ([*PLAN, "--slices", "0", "--pipeline-parallel", "2"], "--slices 0 must be at least 1"),
    ([*PLAN, "--slices", "auto"], "--slices auto needs a pipeline"),
    ([*PLAN, "--slices", "auto", "--pipeline-parallel", "2"], "needs --device-memory-gb"),
    ([*PLAN, "--slices", "auto", "--pipeline-parallel", "2", "--device-memory-gb", "80", "--eager"], "remove them"),
    ([*PLAN, "--slices", "auto", "--pipeline-parallel", "2", "--device-memory-gb", "0.001"], "GB"),
    ([*PLAN, "--eager", "--pipeline-parallel", "2"], "--eager needs --slices"),
    ([*PLAN, "--kept-keys", "5", "--pipeline-parallel", "2"], "--kept-keys 5"),
    ([*PLAN, "--link-gb-per-second", "0"], "--link-gb-per-second 0 must be positive"),
    ([*PLAN, "--device-memory-gb", "80"], "--device-memory-gb needs --slices auto"),
    ([*PLAN, "--speeds", "1xa"], "'1xa' is no speed"),
    ([*PLAN, "--speeds", "1x3"], "positive numbers, one for each rank"),
    ([*PLAN, "--static-width", "2"], "width 2 does not divide 9"),
    ([*PLAN, "--static-width", "3", "--balance", "dp"], "remove them"),
    ([*PLAN, "--cost-file", "{in}/none.json"], "none.json"),
    ([*PLAN, "--cost-file", "{in}"], "{in}"),
    ([*PLAN, "--cost-file", "{in}/bad.json"], "bad.json"),
    ([*PLAN, "--cost-file", "{in}/not.json"], "not.json"),
    ([*PLAN, "--ranks", "2"], "sequence 2 has 55 tokens.*at least 28"),
    ([*PLAN, "--output", "x"], "it has no option --output"),
    ([*PLAN, "--lengths", "{in}"], "is a folder; give one of its .idx or .npy files"),
    ([*PLAN, "--lengths", "{in}/none.npy"], "no such file"),
    ([*PLAN, "--lengths", "{in}/bad.json"], r"give a Megatron index \(.idx\) or a numpy array"),
    ([*PLAN, "--lengths", "{in}/text.npy"], "is not a numpy array"),
    ([*PLAN, "--lengths", "{in}/floats.npy"], "must be one-dimensional and of integers"),
    ([*PLAN, "--lengths", "{in}/negative.npy"], "document 1 has -7 tokens"),
    ([*PLAN, "--lengths", "{in}/empty.npy"], "has no documents"),
    ([*PLAN, "--lengths", "{in}/huge.npy"], "document 1 has 18446744073709551615 tokens, more than"),
    ([*PLAN, "--lengths", "{in}/long.npy", "--seq-length", "1"], "more than 50,000,000 pieces of 1 tokens"),
    ([*PLAN, "--ranks", "1048576"], "is printed for at most 65,536 ranks"),
    ([*SCHEDULE, "--micro-batches", "1000000"], "4,000,000 passes, and at most 131,072 are simulated"),
    ([*PLAN, "--lengths", "{in}/short.idx"], "short.idx"),
    # simulate
    (["simulate"], "required: --seq-length"),
    ([*SIMULATE, "--lengths", "{in}/lengths.npy"], "not allowed with argument --sampler"),
    ([*SIMULATE, "--sampler", "bytd"], "--sampler bytd is unknown; choose one of byted, github, wikipedia"),
    ([*SIMULATE, "--schedulers", "ours,best"], "--schedulers: 'best' is unknown; choose from static"),
    ([*SIMULATE, "--seq-length", "1M"], "--seq-length 1048576 does not fit on 8 ranks.*at least 131072"),
    ([*SIMULATE, "--global-tokens", "1K"], "context 8192 and 1024 tokens of a step"),
    ([*SIMULATE, "--pipeline-parallel", "3"], "3 stages do not divide the 32 layers"),
    ([*SIMULATE, "--slices", "two"], "invalid slices_value value: 'two'|--slices"),
    ([*SIMULATE, "--plot", "{in}/none/bars.png"], "there is no folder"),
    ([*SIMULATE, "--plot", "{in}/bars.txt"], "give a name that ends with .png, .svg or .pdf"),
    ([*SIMULATE, "--cost-file", "{in}/none.json"], "none.json"),
    # schedule
    (["schedule"], "required: --pipeline-parallel, --micro-batches"),
    ([*SCHEDULE, "--micro-batches", "many"], "'many' is not a whole number"),
    ([*SCHEDULE, "--seq1f1b-partition", "equal"], "--seq1f1b-partition 'equal': give time, flops, even"),
    ([*SCHEDULE, "--vpp", "2", "--zero-bubble"], "zero bubble does not work with virtual stages"),
    ([*SCHEDULE, "--slices", "4", "--seq1f1b-partition", "1,2"], "give 4 slices of 131072 tokens in total"),
    ([*SCHEDULE, "--slices", "4", "--seq-length", "3"], "use at most 3 slices"),
    ([*SCHEDULE, "--slices", "4", "--tensor-parallel", "3"], "the nearest possible lengths are 131070 or 131073"),
    ([*SCHEDULE, "--pipeline-parallel", "2", "--vpp", "2"], "--vpp 2 needs --pipeline-parallel of 3 or more"),
    ([*SCHEDULE, "--slices", "3", "--vpp", "2", "--micro-batches", "5"], "the nearest numbers of micro-batches"),
    ([*SCHEDULE, "--plot", "{in}"], "give a name that ends with"),
    ([*SCHEDULE, "--plot", "{in}/none/a.png"], "there is no folder"),
    ([*SCHEDULE, "--cost-file", "{in}/bad.json"], "bad.json"),
    # activations
    (["activations", "--host-memory-gb", "-1"], "--host-memory-gb must be at least 0"),
    (["activations", "--host-memory-gb", "much"], "invalid float value"),
    (["activations", "--device-memory-gb", "1"], "it takes .* GB of device memory"),
    (["activations", "--activation-policy", "best"], "choose one of none, memo"),
    (["activations", "--activation-policy", "memo", "--host-memory-gb", "1"], "GB of host memory"),
    (["activations", "--link-gb-per-second", "0"], "--link-gb-per-second must be positive"),
    (["activations", "--tflops", "0", "1", "1"], "--tflops must be positive"),
    (["activations", "--tflops", "1", "1"], "expected 3 arguments"),
    ([*ACTIVATIONS, "--num-layers 2"], "no --hidden-size, --num-attention-heads"),
    ([*ACTIVATIONS, "--num-layers two --hidden-size 8 --num-attention-heads 2"], "--num-layers"),
    ([*ACTIVATIONS, f"{MODEL} --hidden-size 101"], "--hidden-size 101 must be a multiple of --num-attention-heads 4"),
    ([*ACTIVATIONS, f"{MODEL} --group-query-attention --num-query-groups 3"], "make it a divisor of"),
    ([*ACTIVATIONS, f"{MODEL} 'unclosed"], "No closing quotation"),
    # memory-plan
    ([*MEMORY, "--num-layers 2"], "no --hidden-size, --num-attention-heads"),
    ([*MEMORY, "--num-layers 1 --hidden-size 8 --num-attention-heads 1"], "needs at least 2 layers"),
    ([*MEMORY, f"{MODEL} --num-experts 2"], "memory plans are for dense models"),
    ([*MEMORY, f"{MODEL} --position-embedding-type yarn"], "--model-flags: argument --position-embedding-type"),
    (["memory-plan", "--solver-seconds", "-1"], "--solver-seconds must be positive|expected one argument"),
    (["memory-plan", "--activation-policy", "memo"], "give --host-memory-gb"),
    (["memory-plan", "--host-memory-gb", "inf"], "is not an amount of memory"),
    (["memory-plan", "--output", "{in}/none/m.json"], "there is no folder"),
    (["memory-plan", "--output", "{in}"], "cannot be written"),
    # timeline
    (["timeline"], "required: --output"),
    (["timeline", "--output", "{in}/out", "--from", "{in}/none"], "is not a directory"),
    (["timeline", "--output", "{in}/out", "--from", "{in}"], "rank0.jsonl"),
    (["timeline", "--output", "{in}/none/out", "--plan", "{in}/bad.json"], "there is no folder"),
    (["timeline", "--output", "{in}/out", "--plan", "{in}/none.json"], "none.json"),
    (["timeline", "--output", "{in}/out", "--plan", "{in}/bad.json"], "is not the output of bytescale plan --json"),
    (["timeline", "--output", "{in}/out", "--plan", "{in}/broken.json"], "is a broken plan: tokens .* of seq 2"),
    (["timeline", "--output", "{in}/out", "--plan", "{in}/plan.json", "--step", "3"], "leave it out with --plan"),
    # corpus
    (["corpus"], "required: --output"),
    ([*CORPUS, "--from", "{in}/none"], "no such file or folder: change --from"),
    ([*CORPUS, "--from", "{in}", "--glob", "*.cpp"], "no file below matches"),
    *(([*CORPUS, "--from", "{in}", "--glob", bad], "is no pattern for") for bad in ("/etc/*", "{in}/*")),
    ([*CORPUS, "--from", "{in}/chat.jsonl"], "chat.jsonl:1: a chat under the key 'messages'"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--json-key", "body"], "no text under the key 'body'.*change --json-key"),
    ([*CORPUS, "--from", "{in}/broken.jsonl"], "broken.jsonl:1: not JSON"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--vocab-size", "300"], "add --tokenizer-type"),
    ([*TOKENIZED, "NullTokenizer"], "--tokenizer-type NullTokenizer needs --vocab-size"),
    ([*TOKENIZED, "HuggingFaceTokenizer"], "needs --tokenizer-model|transformers is not installed"),
    ([*TOKENIZED, "HuggingFaceTokenizer", "--tokenizer-model", "{in}/none"], "{in}/none: no such file"),
    ([*TOKENIZED, "HuggingFaceTokenizer", "--tokenizer-model", "path/to/mine"], "path/to/mine: no such file"),
    ([*TOKENIZED, "SentencePieceTokenizer", "--tokenizer-model", "none.model"], "none.model: no such file"),
    (["corpus", "--output", "{in}/", "--from", "{in}/lines.jsonl"], "give a path that ends in a name"),
    (["corpus", "--output", "{in}/out.bin", "--from", "{in}/lines.jsonl"], "without .bin or .idx"),
    (["corpus", "--output", "{in}/lines.jsonl/out", "--from", "{in}/lines.jsonl"], "cannot write to"),
    # data sculpt
    (["data"], "required: COMMAND"),
    (["data", "sculpt"], "required: --seq-length, --output"),
    ([*SCULPT, "--input", "{in}/none"], "none.idx: no such file"),
    ([*SCULPT, "--input", "{in}/short"], "short.idx"),
    ([*SCULPT, "--input", "{in}/broken.jsonl"], "broken.jsonl:1: not JSON"),
    ([*SCULPT, "--input", "{in}/binary.jsonl"], "binary.jsonl:1: not JSON"),
    ([*SCULPT, "--input", "{in}/empty.jsonl"], "all of them empty"),
    ([*SCULPT, "--input", "{in}/chat.jsonl"], "a chat under the key 'messages'"),
    ([*SCULPT, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "docs holds tokens already"),
    ([*SCULPT, "--vocab-size", "9"], "add --tokenizer-type"),
    ([*SCULPT, "--embedder", "bert"], "--embedder bert: give hf:PATH"),
    ([*SCULPT, "--embedder", "hf:{in}/none"], "there is no folder {in}/none"),
    ([*SCULPT, "--embedder", "hf:{in}"], "sentence-transformers is not installed"),
    ([*SCULPT, "--output", "{in}/"], "--output .*give a path that ends in a name"),
    ([*SCULPT, "--output", "{in}/lines.jsonl/out"], "change --output"),
    # profile
    (["profile"], "required: --output"),
    (PROFILE, "give the flags of the training command after a --"),
    ([*PROFILE, "--max-tokens", "3", "--", "--num-layers", "2"], "3"),
    ([*PROFILE, "--ring-bytes-per-second", "0", "--", "--num-layers", "2"], "give a positive number"),
    ([*PROFILE, "--node-bytes-per-second", "-1", "--", "--num-layers", "2"], "give a positive number"),
    (["profile", "--output", "{in}/none/c.json", "--", "--num-layers", "2"], "there is no folder"),
    (["profile", "--output", "{in}", "--", "--num-layers", "2"], "cannot be written"),
    # dry-run
    (["dry-run"], "required: --ranks"),
    (DRY_RUN, "give the flags of the training command after a --"),
    ([*DRY_RUN, "--rank", "8", "--", "--num-layers", "2"], "ranks are numbered from 0 to 7"),
    ([*DRY_RUN, "--sampler", "none", "--", "--num-layers", "2"], "--sampler none is unknown"),
    ([*DRY_RUN, "--seed", "-1", "--", "--num-layers", "2"], "argument --seed: '-1' is not a whole number from 0"),
    ([*DRY_RUN, "--lengths", "{in}/none.idx", "--", "--num-layers", "2"], "no such file"),
    ([*DRY_RUN, "--sampler", "github", "--lengths", "a.npy", "--", "--cpu"], "not allowed with"),
    # search
    (["search"], "required: --model-flags, --seq-length"),
    ([*SEARCH, "--device", "h100", "--sampler", "none"], "--sampler none is unknown"),
    ([*SEARCH, "--device", "tpu"], "--device tpu is unknown; choose one of h100, bytescale, or give --cost-file"),
    ([*SEARCH, "--device", "h100", "--cost-file", "c.json"], "not allowed with"),
    ([*SEARCH, "--cost-file", "{in}/none.json"], "No such file"),
    ([*SEARCH, "--cost-file", "bytescale_ext/measure/costs/h100_7b.json"], "is for another model: hidden is 4096"),
    ([*SEARCH, "--device", "h100", "--ranks", "12"], "--ranks 12 is not a multiple of --ranks-per-node 8"),
    ([*SEARCH, "--device", "h100", "--device-memory-gb", "0"], "--device-memory-gb 0 must be positive"),
    ([*SEARCH, "--device", "h100", "--host-memory-gb", "nan"], "--host-memory-gb nan must be at least 0"),
    ([*SEARCH, "--device", "h100", "--slowdown", "0.5"], "--slowdown 0.5 must be at least 1"),
    ([*SEARCH, "--device", "h100", "--launcher", "mpirun"], "--launcher mpirun is unknown; choose one of torchrun"),
    ([*SEARCH, "--device", "h100", "--explain", "--lr"], "expected one argument"),
    ([*SEARCH, "--device", "h100", "--explain", "lr"], "--explain --lr: the search does not vary it"),
    ([*SEARCH, "--device", "h100", "--output", "{in}/none/run.sh"], "there is no folder"),
    ([*SEARCH, "--device", "h100", "--plot", "{in}/plot.txt"], "give a name that ends with"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} --pipeline-model-parallel-size 2"], "search decides"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} --seq-length=8"], "--seq-length=8, which the search"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} --enable-cuda-graph"], "work with --enable-cuda-graph"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} --nonsense 4"], "Megatron 0.19.2 knows no --nonsense"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} --expert-model-parallel-size 2"], "search decides"),
    ([*SEARCH, "--device", "h100", "--model-flags", f"{MODEL} 'open"], "--model-flags: No closing quotation"),
    ([*SEARCH, "--device", "h100", "--verify", "2", "--ranks", "16"], "several nodes of --ranks-per-node 8"),
    ([*SEARCH, "--device", "h100", "--verify", "2", "--explain", "hdp-tokens-per-rank"], "exclude each other"),
    ([*SEARCH, "--device", "h100", "--verify", "2", *"--ranks 32768 --ranks-per-node 32768".split()],
     "too many processes for its|this machine, which has"),
    ([*SEARCH, "--device", "h100", "--ranks", "7"], "--global-batch-size 8 is not a multiple of the HDP ranks"),
    ([*SEARCH, "--device", "h100", "--device-memory-gb", "1e-6"], "what fits: .* GB of device memory"),
    # doctor
    (["doctor", "--head-dim", "wide"], "'wide' is not a whole number"),
    (["doctor", "all"], "it has no option all"),
]  # fmt: skip

STATES = ["states", "--model-flags", MODEL]
NGRAM = "ngram --data {in}/docs".split()
MIX = "data mix --output {in}/out --seq-length 8".split()
CLEAN = "data clean --output {in}/out --input a={in}/lines.jsonl".split()
GENERATE = "generate --load {in} --prompt x".split()

# Values of kinds that parsers take by accident, repeated and contradicting options, and sizes without an end.
MORE: list[tuple[list[str], str]] = [
    *(
        ([*PLAN, "--ranks", bad], "--ranks: '.*': write numbers with the digits 0 to 9")
        for bad in ("\uff19", "1_0", "\u0663")
    ),
    ([*PLAN, "--ranks", "\u00b2"], "--ranks: '\u00b2': write numbers"),
    ([*PLAN, "--tokens-per-rank", "\uff11\uff10"], "--tokens-per-rank: .* digits 0 to 9 only"),
    ([*PLAN, "--tokens-per-rank", "1_0K"], "--tokens-per-rank: .* digits 0 to 9 only"),
    ([*PLAN, "--start", "\u0663"], "--start: .* digits 0 to 9 only"),
    ([*PLAN, "--speeds", "1x1_0"], "--speeds: .* digits 0 to 9 only"),
    ([*PLAN, "--link-gb-per-second", "\uff15"], "--link-gb-per-second: .* digits 0 to 9 only"),
    ([*PLAN, "--start", "9" * 30], "--start 9+: .* has 3 documents"),
    ([*PLAN, "--ranks", "9" * 5000], "argument --ranks: '9+' is not a whole number"),
    ([*PLAN, "--num-sequences", "0"], "--num-sequences: '0' is not a size"),
    ([*PLAN, "--seq-length", "0"], "--seq-length: '0' is not a size"),
    ([*PLAN, "--lengths", ""], "argument --lengths: its value is empty"),
    ([*PLAN, "--cost-file", ""], "argument --cost-file: its value is empty"),
    ([*PLAN, "--lengths", "{in}/two.npy"], r"holds shape \(1, 2\)"),
    ([*PLAN, "--lengths", "{in}/several.npz"], "give a Megatron index"),
    ([*PLAN, "--lengths", "{in}/folder.npy"], "is a folder"),
    ([*PLAN, "--lengths", "{in}/loop.npy"], "no such file"),
    ([*PLAN, "--lengths", "{in}/a\nb.npy"], "a b.npy: no such file"),
    ([*PLAN, "--cost-file", "{in}/it's a\nname.json"], "it's a name.json"),
    ([*PLAN, "--cost-file", "{in}/folder.npy"], "Is a directory"),
    ([*PLAN, "--device", "h100", "--cost-file", "{in}/bad.json"], "--cost-file: not allowed with argument --device"),
    ([*PLAN, "--static-width", "10"], "--static-width 10 does not divide 9 ranks"),
    ([*PLAN, "--swapped-keys", "-1"], "--swapped-keys -1"),
    ([*PLAN, "--host-memory-gb", "5"], "--host-memory-gb needs --slices auto"),
    ([*PLAN, "--link-gb-per-second", "1e400"], "--link-gb-per-second inf must be positive"),
    ([*PLAN, "--speeds", "1,2,nan"], "--speeds: 'nan'"),
    ([*PLAN, "--ranks="], "--ranks: '' is not"),
    ([*PLAN, "--json=yes"], "--json: ignored explicit argument"),
    ([*PLAN, "--tokens-multiple", "9" * 11], "--tokens-multiple"),
    ([*SIMULATE, "--sampler", ""], "--sampler is unknown"),
    ([*SIMULATE, "--schedulers", ""], "--schedulers: its value is empty"),
    ([*SIMULATE, "--schedulers", "ours,"], "--schedulers: '' is unknown"),
    ([*SIMULATE, "--seeds", "0"], "--seeds: '0' is not"),
    ([*SIMULATE, "--global-tokens", "1024G"], "--global-tokens 1,099,511,627,776 are about .* documents in a step"),
    ([*SIMULATE, "--ranks", "1048576"], "--ranks 1,048,576: at most 65,536 are simulated"),
    ([*SIMULATE, "--plot", "{in}/folder.png"], "--plot .* cannot be written"),
    (["simulate", "--lengths", "{in}/empty.npy", *SIMULATE[3:]], "--lengths .* has no documents"),
    ([*SCHEDULE, "--eager"], "--eager needs --slices of 2 or more"),
    ([*SCHEDULE, "--slices", "2", "--seq1f1b-partition", "1,nan"], "--seq1f1b-partition '1,nan': give time"),
    ([*SCHEDULE, "--seq1f1b-partition", ""], "--seq1f1b-partition: its value is empty"),
    ([*SCHEDULE, "--vpp", "1000000"], "--vpp 1000000 are 32,000,000 passes"),
    ([*SCHEDULE, "--model", "gpt-9b"], "--model: invalid choice"),
    (["activations", "--tflops", "nan", "1", "1"], "--tflops must be positive"),
    (["activations", "--device-memory-gb", "nan"], "--device-memory-gb must be at least 0"),
    (["activations", "--optimizer-ranks", "0"], "--optimizer-ranks: '0' is not"),
    (["activations", "--plot", "{in}/none/a.png"], "--plot .* there is no folder"),
    ([*STATES, "--state-stage", "7"], "--state-stage: invalid choice"),
    ([*STATES, "--page-mb", "nan"], "--page-mb nan must be"),
    ([*STATES, "--adam-gb-per-second", "-1"], "--adam-gb-per-second must be positive"),
    ([*STATES, "--nvme-gb", "nan"], "--nvme-gb must be 0 or more"),
    ([*CORPUS, "--from", ""], "--from: its value is empty"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--glob", ""], "--glob: its value is empty"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--seed", "-1"], "--seed: '-1' is not a whole number"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--seed", "9" * 30], "--seed: '9+' is not a whole number"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--tokens", "\u0665"], "--tokens: .* digits 0 to 9 only"),
    ([*CORPUS, "--from", "{in}/lines.jsonl", "--sft", "--pairs", "--weights", "w"], "--pairs with --weights"),
    ([*CORPUS, "--from", "{in}/loop.npy"], "loop.npy"),
    (["corpus", "--output", "/proc/none/out", "--from", "{in}/lines.jsonl"], "cannot write to"),
    ([*TOKENIZED, "NullTokenizer", "--vocab-size", "-5"], "--vocab-size: '-5' is not a size"),
    ([*TOKENIZED, "NullTokenizer", "--vocab-size", "9"], "lines.jsonl:1: the tokenizer cannot read the text .*'one'"),
    ([*CLEAN, "--jaccard", "nan"], "jaccard"),
    ([*CLEAN, "--tasks", "0"], "tasks"),
    ([*CLEAN, "--memory-gb", "inf"], "memory-gb"),
    (["data", "clean", "--output", "{in}/out", "--input", "{in}/lines.jsonl"], "give NAME=PATH"),
    (["data", "clean", "--output", ""], "--output: its value is empty"),
    ([*MIX, "--data", "{in}/docs", "--temperature", "nan"], "--temperature nan: give a number above 0"),
    ([*MIX, "--data", "{in}/docs", "--duplication-power", "inf"], "--duplication-power inf"),
    ([*MIX, "--report", "{in}/lines.jsonl"], "not a report of bytescale data clean"),
    ([*SCULPT, "--overflow", "some"], "--overflow: invalid choice"),
    ([*SCULPT, "--seed", "-7"], "--seed: '-7' is not a whole number"),
    ([*NGRAM, "--orders", "99999999"], "--orders 99999999: n-grams have at most 1024 tokens"),
    ([*NGRAM, "--heads", "1048576"], "--tokens 1,048,576 read 2,097,152 rows each"),
    ([*NGRAM, "--orders", "a"], "--orders"),
    (["ngram", "--data", ""], "--data: its value is empty"),
    ([*GENERATE, "--seed", "-1"], "--seed: '-1' is not a whole number"),
    ([*GENERATE, "--temperature", "nan"], "--temperature nan"),
    (["generate", "--load", "", "--prompt", "x"], "--load: its value is empty"),
    (["convert", "--to", "hf", "--output", "", "--load", "{in}"], "--output: its value is empty"),
    (["convert", "--from", "hf", "--output", "{in}/out", "--load", "{in}"], "--from hf needs --input, and no --load"),
    (["draft", "export", "--output", "{in}/out", "--load", "{in}", "--to", "onnx"], "--to: invalid choice"),
    (["timeline", "--output", "{in}/out", "--plan", "{in}/lengths.npy"], "UnicodeDecodeError: .*invalid start byte$"),
    (["timeline", "--output", "", "--plan", "{in}/bad.json"], "--output: its value is empty"),
    (["logprobs", "--load", "{in}", "--data", "{in}/docs", "--output", "{in}/out"], "--hybrid-data-parallel"),
    (["doctor", "--launch", ""], "--launch: give a command"),
    (["doctor", "--head-dim", "0"], "--head-dim: '0' is not"),
    ([*DRY_RUN, "--ranks", "\uff18", "--", "--num-layers", "2"], "--ranks: .* digits 0 to 9 only"),
    ([*DRY_RUN, "--rank", "1_0", "--", "--num-layers", "2"], "--rank: .* digits 0 to 9 only"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of many kinds of files, most of them invalid."""
    root = tmp_path_factory.mktemp("bad")
    arrays = {"lengths": [30, 7, 55], "negative": [4, -7], "empty": [], "floats": [1.5]}
    for name, values in arrays.items():
        np.save(root / f"{name}.npy", np.array(values, dtype=None if name == "floats" else np.int64))
    np.save(root / "huge.npy", np.array([5, 2**64 - 1], dtype=np.uint64))
    np.save(root / "long.npy", np.array([2**30]))
    np.save(root / "two.npy", np.array([[1, 2]]))
    np.savez(root / "several.npz", np.array([1]))
    (root / "it's a\nname.json").write_text("{")
    for name in ("folder.npy", "folder.png"):
        (root / name).mkdir()
    (root / "loop.npy").symlink_to("loop.npy")
    (root / "text.npy").write_text("no array")
    (root / "short.idx").write_bytes(b"MMIDIDX")
    (root / "bad.json").write_text('{"a": 1}')
    (root / "not.json").write_text("{")
    (root / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    (root / "lines.jsonl").write_text('{"text": "one"}\n')
    (root / "broken.jsonl").write_text("{\n")
    (root / "binary.jsonl").write_bytes(b"\x7fELF\xff\x00")
    (root / "empty.jsonl").write_text("")
    write_data_set(root / "docs", [[[1, 2, 3]], [[4, 5, 6, 7]]])
    return root


@pytest.fixture(scope="module")
def plans(folder: Path) -> Path:
    """Write a plan, and the same plan without its first micro-batch."""
    parser = OneLineParser()
    cli.plan.add_arguments(parser)
    args = parser.parse_args([word.format(**{"in": folder}) for word in PLAN[1:]])
    lengths = read_lengths(args.lengths)
    decision = cli.plan.decision_of(args, cost_of_options(args), lengths)
    plan = cli.plan.planner_of(decision)(lengths).to_json()
    (folder / "plan.json").write_text(json.dumps(plan))
    broken = {**plan, "lengths": [*plan["lengths"][:-1], 10**6]}
    (folder / "broken.json").write_text(json.dumps(broken))
    return folder


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the error lines of a refused command line, one for each reason."""
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert re.fullmatch(r"(bytescale[a-z -]*: error: .+\n)+", shown.err), shown.err
    assert shown.out == ""
    return shown.err


@pytest.mark.parametrize(
    ("words", "message"), [*CASES, *MORE], ids=lambda value: "" if isinstance(value, str) else " ".join(value)[:60]
)
def test_one_line(words: list[str], message: str, plans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(plans.rglob("*"))
    line = refusal([word.replace("{in}", str(plans)) for word in words], capsys)
    assert re.search(message.replace("{in}", str(plans)), line), line
    assert sorted(plans.rglob("*")) == before


VALUES = st.one_of(
    st.integers(-3, 3).map(str),
    st.sampled_from(
        ["", "8K", "1e9", "nan", "inf", "auto", "none", "time", "1,2", ",", "x" * 50, "/dev/null", "/", "\0"]
    ),
    st.text(max_size=4),
)
FAST = {"plan": PLAN[3:], "simulate": SIMULATE[1:], "schedule": SCHEDULE[1:], "activations": []}


@pytest.mark.full
@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=examples(150))
def test_random_options_never_end_in_a_traceback(folder: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FAST)))
    (command,) = (row for row in cli.COMMANDS if name == row.NAME)
    parser = OneLineParser()
    command.add_arguments(parser)
    options = [action for action in parser._actions if action.option_strings]
    words = [name, *FAST[name]]
    if name == "plan":
        words += ["--lengths", str(folder / "lengths.npy")]
    for option in data.draw(st.lists(st.sampled_from(options), max_size=3)):
        if option.dest not in ("help", "plot", "output"):
            words += [option.option_strings[0], *([] if option.nargs == 0 else [data.draw(VALUES)])]
    assert cli.main(words) in (0, 2)


CHEAP: list[tuple[str, str]] = [
    ("generate --prompt x --load {in}/none", "none: there is no checkpoint"),
    ("generate --prompt x --load {in}", "there is no checkpoint"),
    ("convert --to hf --output {in}/new/out --load {in}", "there is no checkpoint"),
    ("convert --from hf --output {in}/new/out --input {in}", "config.json: No such file"),
    ("convert --from hf --output {in}/new/out --input {in}/list", "config.json: not a JSON object"),
    ("convert --from hf --output {in}/new/out --input {in}/endless", "a number that is not finite"),
    ("convert --from hf --output {in}/new/out --input {in}/other", "model_type 'gpt2' cannot be converted"),
    ("convert --from hf --output {in}/new/out --input {in}/kinds", "model_type .*cannot be converted"),
    ("convert --from hf --output {in} --input {in}/llama", "it exists already"),
    ("draft export --output {in}/new/out --load {in}", "there is no checkpoint"),
    *((f"{command} --model-flags=--num-layers=2", "no --hidden-size, --num-attention-heads: give the model") for command
      in ("activations", "memory-plan", "states --tokens-per-rank 2K",
          "search --sampler sft --seq-length 1K --ranks 8 --device h100 --device-memory-gb 80")),
]  # fmt: skip
"""Command lines that are refused before torch is imported, and words of the message."""
SLOW = ("torch", "megatron.core", "transformers")
ASK = """
import sys
from megatron.bytescale import cli
for line in sys.stdin.read().splitlines():
    assert cli.main(line.split()) == 2, line
    assert not {slow} & sys.modules.keys(), line
"""


@pytest.mark.ranks
def test_cheap_checks_come_before_slow_imports(tmp_path: Path) -> None:
    for name, config in {"list": [], "other": {"model_type": "gpt2"}, "kinds": {"model_type": ["llama"]},
                         "llama": {"model_type": "llama"},
                         "endless": {"model_type": "llama", "rope": [float("inf")]}}.items():  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    before = sorted(tmp_path.rglob("*"))
    lines = "\n".join(line.replace("{in}", str(tmp_path)) for line, _ in CHEAP)
    program = ASK.format(slow=set(SLOW))
    ended = subprocess.run([sys.executable, "-c", program], input=lines, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    errors = ended.stderr.splitlines()
    assert len(errors) == len(CHEAP)
    for (line, message), error in zip(CHEAP, errors, strict=True):
        assert re.match(rf"bytescale {line.split()[0]}.*: error: ", error), error
        assert re.search(message, error), error
    assert sorted(tmp_path.rglob("*")) == before, "a refused command leaves no folder"
