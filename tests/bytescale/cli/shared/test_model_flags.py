"""Model of a string of flags: read as in training, with its refusals, without a GPU."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape
from megatron.bytescale import cpu
from megatron.bytescale.cli.shared import model_flags
from megatron.bytescale.cli.shared.model_flags import arguments_of, model_of, shape_of_flags, with_needed, words_of

SIZES = "--num-layers 4 --hidden-size 512 --num-attention-heads 4"
LLAMA = (
    "--normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear --ffn-hidden-size 1024 "
    "--group-query-attention --num-query-groups 2 --bf16"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 32 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 64 --position-embedding-type rope"
)


def test_megatrons_defaults() -> None:
    shape = shape_of_flags("--num-layers 2 --hidden-size 48 --num-attention-heads 4")
    assert shape == ModelShape(2, 48, 4, 4, 12, 192, gated=False, vocab=32000)


def test_the_vocabulary_is_padded_as_training_pads_it() -> None:
    assert shape_of_flags(f"{SIZES} --vocab-size 1000").vocab == 1024
    assert shape_of_flags(f"{SIZES} --vocab-size 1000 --make-vocab-size-divisible-by 8").vocab == 1000


def test_the_vocabulary_is_the_tokenizers(tmp_path: Path) -> None:
    Tokenizer(WordLevel({f"word {number}": number for number in range(300)})).save(str(tmp_path / "tokenizer.json"))
    flags = f"{SIZES} --tokenizer-type HuggingFaceTokenizer --tokenizer-model {tmp_path}"
    assert shape_of_flags(flags).vocab == 384, "300 words, padded to a multiple of 128"
    assert shape_of_flags(f"{flags} --vocab-size 1000").vocab == 1024
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        shape_of_flags(flags)


def test_groups_of_queries_need_their_flag() -> None:
    with pytest.raises(ValueError, match="--num-query-groups without --group-query-attention"):
        shape_of_flags(f"{SIZES} --num-query-groups 2")
    assert shape_of_flags(SIZES).num_kv_heads == 4
    assert shape_of_flags(f"{SIZES} --group-query-attention --num-query-groups 2").num_kv_heads == 2


def test_experts_windows_latents_and_later_tokens() -> None:
    sparse = shape_of_flags(f"{SIZES} --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq 2")
    assert (sparse.num_expert_layers, sparse.expert_ffn_hidden, sparse.experts_per_token) == (2, 192, 2)
    assert shape_of_flags(f"{SIZES} --num-experts 8 --moe-latent-size 16").expert_latent == 16
    cut = shape_of_flags(f"{SIZES} --window-size 128,0 --window-attn-skip-freq 2")
    assert (cut.num_window_layers, cut.window_tokens) == (2, 128)
    assert shape_of_flags(f"{SIZES} --mtp-num-layers 2 --position-embedding-type rope").later_layers == 2
    latent = shape_of_flags(f"{SIZES} {LATENT}")
    assert latent.latent == LatentShape(24, 16, 8, 64)
    assert (latent.head_dim, latent.num_kv_heads) == (40, 4)


@pytest.mark.parametrize(
    ("flags", "on_cuda", "expected"),
    [
        (LLAMA, True, LayerOperators(angles=128, split_angles=True)),
        (LLAMA, False, LayerOperators(split_norms=True, split_activation=True, angles=128, split_angles=True)),
        (f"{LLAMA} --transformer-impl transformer_engine", True, LayerOperators(joined_norms=True, angles=128)),
        ("--hidden-dropout 0.1", True, LayerOperators()),
        ("--hidden-dropout 0.1", False, LayerOperators(split_activation=True)),
    ],
)
def test_operators(flags: str, on_cuda: bool, expected: LayerOperators) -> None:
    assert model_of(words_of(f"{SIZES} {flags}"), on_cuda).operators == expected


def test_types_and_rows() -> None:
    engine = f"{SIZES} {LLAMA} --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe"
    assert (model_of(words_of(SIZES)).dtype, model_of(words_of(SIZES)).rows_multiple) == ("float32", 1)
    assert model_of(words_of(f"{engine} tensorwise")) == model_of(words_of(f"{engine} blockwise"))
    assert (model_of(words_of(f"{engine} tensorwise")).dtype) == "bfloat16"
    assert [model_of(words_of(f"{engine} {one}")).rows_multiple for one in ("tensorwise", "mxfp8")] == [16, 32]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (f"{SIZES} --hidden-dropout much", "argument --hidden-dropout: invalid float value"),
        (f"{SIZES} --nonsense 3", "Megatron 0.19.2 knows no --nonsense"),
        (f"{SIZES} --fp8-format hybrid --fp8-recipe tensorwise", "use --transformer-impl transformer_engine"),
    ],
)
def test_what_training_refuses_is_refused(flags: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        shape_of_flags(flags)
    assert str(caught.value).startswith("--model-flags: ")
    assert "\n" not in str(caught.value)


def test_transformer_engine_is_not_for_cpu() -> None:
    with pytest.raises(ValueError, match="there is no GPU"):
        model_of(words_of(f"{SIZES} --transformer-impl transformer_engine"), on_cuda=False)


def test_a_training_of_many_processes_is_checked_by_one() -> None:
    words = with_needed(words_of(f"{SIZES} {LLAMA} --hybrid-data-parallel --tensor-model-parallel-size 2"))
    args = arguments_of([*words, "--sequence-parallel", "--pipeline-model-parallel-size", "2"], processes=64)
    assert (args.world_size, args.data_parallel_size, args.padded_vocab_size) == (64, 16, 32000)
    with pytest.raises(ValueError, match="63 processes cannot be divided"):
        arguments_of(words, processes=63)


def test_flags_that_are_given_are_kept() -> None:
    assert with_needed(["--hidden-dropout=0.1"]) == ["--hidden-dropout=0.1", "--attention-dropout", "0"]
    written = shlex.split(f"{SIZES} --save none --save-interval 1 --tokenizer-type HuggingFaceTokenizer")
    assert model_of([*written, "--tokenizer-model", "none"]).shape.vocab == model_flags.USUAL_VOCAB


def test_torch_is_as_it_was() -> None:
    device, is_there = torch.device, torch.cuda.is_available()
    shape_of_flags(SIZES)
    with pytest.raises(ValueError, match="--num-layers"):
        shape_of_flags("")
    assert torch.device is device
    assert torch.cuda.is_available() == is_there
    assert not cpu.installed()
