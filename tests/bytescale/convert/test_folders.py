"""Conversion of models of each family to Megatron checkpoints and back: equal logits, tensors and launch lines."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from safetensors.torch import load_file, save_file

from megatron.bytescale.core.models.gpt.gpt_layer_specs import with_core_attention
from megatron.bytescale.core.transformer.spec_utils import layers_of
from megatron.bytescale.launch import TRACKER
from tests.bytescale.convert.models import MODELS, VOCAB, configuration_of
from tests.e2e.corpora import documents, write_documents
from tests.e2e.drafts import COMMON, ONE
from tests.e2e.hdp.test_models import PlainAttention
from tests.e2e.once import once
from tests.e2e.oracle import train_with_named_weights
from tests.e2e.training import HDP, MODEL, TRAIN, train, train_once, train_ranks
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOKENS = 48
EXPERT_BIAS = "e_score_correction_bias"
LENGTHS = (100, 3, 64, 65, 130, 17, 40, 9)


def write_models(folder: Path) -> dict[str, Any]:
    """Write a model of each family, convert it to Megatron and back; return the results of each conversion."""
    import transformers

    from megatron.bytescale.convert.rotary import of_every_version

    for seed, kind in enumerate(MODELS):
        torch.manual_seed(seed)
        values = {**configuration_of(kind), "dtype": "float32"}
        settings = {**values, **of_every_version(values["rope_parameters"])}
        config = transformers.CONFIG_MAPPING[values["model_type"]](**settings)
        model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            torch.nn.init.uniform_(parameter, 0.5, 1.5) if parameter.dim() == 1 else parameter.data.normal_(std=0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(EXPERT_BIAS):
                buffer.normal_(std=0.1)
        model.save_pretrained(folder / kind)
        tokens = torch.randint(0, VOCAB, (1, TOKENS))
        torch.save((tokens, model(tokens).logits.detach()), folder / f"{kind}.pt")
    source, tokens = write_odd_model(folder / "odd"), torch.arange(TOKENS)[None]
    odd = transformers.AutoModelForCausalLM.from_pretrained(source)
    torch.save((tokens, odd(tokens).logits.detach()), folder / "odd.pt")
    found: dict[str, Any] = run_ranks(convert_all, 1, folder, timeout=600)[0]
    return {"folder": folder, **found}


def convert_all(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Return (flags, parameters, family after the round trip, largest difference of logits) of each family."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.convert.folders import from_hugging_face, to_folder

    found = {}
    for kind in MODELS:
        converted = from_hugging_face(folder / kind, folder / f"{kind}-megatron", None)
        assert converted.notes == []
        back = to_folder(folder / f"{kind}-megatron", folder / f"{kind}-back").kind
        tokens, logits = torch.load(folder / f"{kind}.pt")
        difference = (megatron_logits(folder / f"{kind}-megatron", tokens) - logits).abs().max()
        found[kind] = (converted.flags, converted.parameters, back, float(difference / logits.abs().max()))
    found["kept"] = kept_settings(folder)
    found["bf16"] = from_hugging_face(folder / "qwen3", folder / "rounded", "bf16").flags
    found["refused"] = {name: refused(case, folder) for name, case in REFUSED.items()}
    with pytest.raises(ValueError, match="none: there is no checkpoint"):
        to_folder(folder / "none", folder / "never")
    with pytest.raises(ValueError, match="qwen3: it exists already"):
        to_folder(folder / "qwen3-megatron", folder / "qwen3")
    return found


TOKENS_OF_SOURCE = {"bos_token_id": 100, "eos_token_id": [98, 99], "pad_token_id": 97}
KEPT: dict[str, str] = {
    "generation_config.json": json.dumps({"eos_token_id": [98, 99], "temperature": 0.7}),
    "chat_template.jinja": "{{ messages[0].content }}",
    "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}),
}
ODD: dict[str, Any] = {
    **TOKENS_OF_SOURCE, "vocab_size": 101, "rope_theta": 12345.5, "rope_scaling": {"type": "linear", "factor": 1.5},
    "sliding_window": 8, "use_sliding_window": True, "swiglu_limit": 7.0, "torch_dtype": "float32", "own_key": 5,
}  # fmt: skip


def write_odd_model(folder: Path) -> Path:
    """Write a Llama model with a vocabulary of 101, keys that its class ignores, and the keys of old versions."""
    import transformers

    torch.manual_seed(11)
    config = {**configuration_of("llama"), "rope_parameters": {**ODD["rope_scaling"], "rope_type": "linear"}}
    made = transformers.LlamaConfig(**{**config, "rope_theta": ODD["rope_theta"], "vocab_size": 101})
    model = transformers.AutoModelForCausalLM.from_config(made).float()
    model.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    values.pop("rope_parameters", None)
    values.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps({**values, **ODD}))
    for name, text in KEPT.items():
        (folder / name).write_text(text)
    return folder


def kept_settings(folder: Path) -> dict[str, Any]:
    """Return (flags, files and configuration after the round trip, difference of logits) of an odd model."""
    from megatron.bytescale.convert.folders import from_hugging_face, to_folder

    flags = from_hugging_face(folder / "odd", folder / "odd-megatron", None).flags
    to_folder(folder / "odd-megatron", folder / "odd-back")
    back = {name: (folder / "odd-back" / name).read_text() for name in KEPT}
    tokens, logits = torch.load(folder / "odd.pt")
    difference = (megatron_logits(folder / "odd-megatron", tokens) - logits).abs().max()
    config = json.loads((folder / "odd-back" / "config.json").read_text())
    return {"flags": flags, "files": back, "config": config, "difference": float(difference / logits.abs().max())}


def megatron_logits(load: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [1, t, vocabulary] of tokens [1, t] by Megatron's own layers and attention."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron.bytescale.inference.load import Heads, checkpoint_arguments, checkpoint_at, read_weights

    checkpoint = checkpoint_at("--load", load)
    args = checkpoint_arguments(checkpoint)
    config = gpt_config_from_args(args)
    config.rope_scaling_factor = args.rope_scaling_factor
    if args.multi_latent_attention:
        config.transformer_layer_spec = plain_latent_attention
    model: Any = GPTModelBuilder(config).build_model(ProcessGroupCollection.use_mpu_process_groups()).eval()
    read_weights(model, checkpoint, Heads(checkpoint, None, {}))
    places = torch.arange(TOKENS)
    hidden = places[None] > places[:, None]  # layers with a window mask the attention themselves
    with torch.no_grad():  # with gradients, experts with biases fail if each rank has all experts
        logits: torch.Tensor = model(tokens, places[None], hidden[None, None])
    return logits


class QueriesWithoutNorm(MLASelfAttention):
    """Megatron's latent attention. Queries without a latent have no norm, which would need TransformerEngine."""

    def _resolve_qk_norm_config(self, submodules: Any) -> Any:
        if self.config.q_lora_rank is not None:
            return super()._resolve_qk_norm_config(submodules)
        return {name: getattr(submodules, name) for name in ("linear_q_proj", "linear_kv_up_proj", "kv_layernorm")}


def plain_latent_attention(config: Any, vp_stage: int | None = None) -> Any:
    """Return Megatron's local layers with its dense attention, which its latent attention must be given."""
    from megatron.training.models.gpt import default_layer_spec

    spec = with_core_attention(default_layer_spec(config, vp_stage), PlainAttention)
    for layer in layers_of(spec):
        layer.submodules.self_attention.module = QueriesWithoutNorm
    return spec


def broken(folder: Path, change: Callable[[Path], object]) -> Path:
    """Return a changed copy of a model."""
    copy = folder / "broken"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / "llama", copy)
    change(copy)
    return copy


def without_a_tensor(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, copy / "model.safetensors")


def with_another_shape(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))


def with_wide_heads(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "head_dim": 1 << 28}))


REFUSED: dict[str, Callable[[Path], object]] = {
    "no folder": lambda copy: shutil.rmtree(copy),
    "bad json": lambda copy: (copy / "config.json").write_text("{"),
    "no tensors": lambda copy: (copy / "model.safetensors").unlink(),
    "cut short": lambda copy: (copy / "model.safetensors").write_bytes(b"short"),
    "a tensor is missing": without_a_tensor,
    "another shape": with_another_shape,
    "wide heads": with_wide_heads,
}
MESSAGES = {
    "no folder": "config.json: No such file",
    "bad json": "config.json: Expecting property name",
    "no tensors": "there is neither model.safetensors nor model.safetensors.index.json",
    "cut short": "model.safetensors: ",
    "a tensor is missing": "the tensor model.norm.weight is missing",
    "wide heads": "parameters; its files hold ",
    "another shape": "has the shape [192, 64], not [160, 64], as config.json says",
}


def refused(change: Callable[[Path], object], folder: Path) -> str:
    """Return the error of converting a changed model. Checks that nothing is written."""
    from megatron.bytescale.convert.folders import from_hugging_face

    with pytest.raises(ValueError, match=r".") as caught:
        from_hugging_face(broken(folder, change), folder / "never", None)
    assert not (folder / "never").exists()
    return str(caught.value)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    made: dict[str, Any] = once(write_models, "converted models")
    return made


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers(kind: str, found: dict[str, Any]) -> None:
    flags, num_parameters, back, difference = found[kind]
    assert difference < 1e-5
    assert back == configuration_of(kind)["model_type"]
    stored = load_file(found["folder"] / kind / "model.safetensors")
    assert num_parameters == sum(one.numel() for name, one in stored.items() if not name.endswith(EXPERT_BIAS))
    assert flags[-2:] == ["--padded-vocab-size", str(VOCAB)]


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_comes_back_as_it_was(kind: str, found: dict[str, Any]) -> None:
    import transformers

    folder = found["folder"]
    given, back = (load_file(folder / name / "model.safetensors") for name in (kind, f"{kind}-back"))
    assert given.keys() == back.keys()
    assert all(torch.equal(given[name], back[name]) for name in given)
    configs = [transformers.AutoConfig.from_pretrained(folder / name).to_dict() for name in (kind, f"{kind}-back")]
    differing = {name for name in configs[0] if configs[0][name] != configs[1].get(name)} - {"_name_or_path"}
    assert not differing, {name: (configs[0][name], configs[1].get(name)) for name in differing}


def test_what_generation_needs_comes_back(found: dict[str, Any]) -> None:
    config, files = found["kept"]["config"], found["kept"]["files"]
    assert {name: config[name] for name in TOKENS_OF_SOURCE} == TOKENS_OF_SOURCE
    assert files == KEPT
    assert (config["vocab_size"], config["torch_dtype"], config["own_key"]) == (101, "float32", 5)


def test_keys_are_read_as_the_class_reads_them_and_written_for_all_versions(found: dict[str, Any]) -> None:
    flags, config = found["kept"]["flags"], found["kept"]["config"]
    assert found["kept"]["difference"] < 1e-5
    assert "--window-size" not in flags
    assert "--quick-geglu" not in flags
    assert flags[flags.index("--rotary-base") + 1] == "12345.5"
    scaling = {"rope_type": "linear", "factor": 1.5}
    assert (config["rope_theta"], config["rope_scaling"]) == (12345.5, scaling)
    assert config["rope_parameters"] == {**scaling, "rope_theta": 12345.5}


@pytest.mark.full
def test_an_odd_vocabulary_trains_with_two_tensor_ranks(found: dict[str, Any], tmp_path: Path) -> None:
    data = write_documents(tmp_path / "docs", lengths=LENGTHS, copies=1)
    load, save = found["folder"] / "odd-megatron", tmp_path / "saved"
    words = [*found["kept"]["flags"], *TRAIN, *HDP, "--data-path", data, "--seq-length", 256]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 101, "--ckpt-format", "torch_dist"]
    words += ["--tensor-model-parallel-size", 2, "--hdp-tokens-per-rank", 256, "--train-iters", 1]
    first, last = train_ranks(2, *words, "--global-batch-size", len(LENGTHS), "--load", load, "--save", save)
    assert len(last.losses) == 1
    assert "the embedding has 102 rows for 101 tokens" in first.text
    back = run_ranks(back_from, 1, save, timeout=600)[0]
    assert back["vocab_size"] == 101
    assert back["rows"] == 101
    assert back["eos_token_id"] == [98, 99]


def back_from(rank: int, world: int, save: Path) -> dict[str, Any]:
    """Return the configuration of a trained checkpoint after the way back, and the rows of its embedding."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.convert.folders import to_folder

    to_folder(save, save.parent / "back")
    rows = load_file(save.parent / "back" / "model.safetensors")["model.embed_tokens.weight"].shape[0]
    return {**json.loads((save.parent / "back" / "config.json").read_text()), "rows": rows}


def exported(rank: int, world: int, saved: list[Path], folder: Path) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
    """Return the notes and the tensors of each checkpoint after the way to a Hugging Face model."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.bytescale.convert.folders import to_folder

    notes = [to_folder(save, folder / str(number)).notes for number, save in enumerate(saved)]
    return [(note, load_file(folder / str(number) / "model.safetensors")) for number, note in enumerate(notes)]


def test_a_model_with_later_layers_is_written_without_them(tmp_path: Path) -> None:
    """Losses of later tokens have no weight here, so the model is trained as without their layers."""
    common = [*MODEL, *COMMON, "--data-path", documents(), *ONE, "--train-iters", 1]
    later = ["--mtp-num-layers", 1, "--mtp-loss-scaling-factor", 0]
    runs = [train_once(1, *common, *flags, entry=train_with_named_weights) for flags in ([], later)]
    alone, with_later = run_ranks(exported, 1, [run.save for run in runs], tmp_path, timeout=600)[0]
    assert alone[0] == []
    assert with_later[0] == ["left out, because the model does not have it: multi-token prediction, 1 layer(s)"]
    assert alone[1].keys() == with_later[1].keys()
    assert all(torch.allclose(tensor, with_later[1][name], atol=1e-5) for name, tensor in alone[1].items())


def test_a_type_is_chosen(found: dict[str, Any]) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    assert "--bf16" in found["bf16"]
    entries = FileSystemReader(found["folder"] / "rounded" / "release").read_metadata().state_dict_metadata
    assert entries["embedding.word_embeddings.weight"].properties.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert (found["folder"] / "rounded" / TRACKER).read_text() == "release"


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_folder_is_refused(case: str, found: dict[str, Any]) -> None:
    assert MESSAGES[case] in found["refused"][case]


TRAININGS: dict[str, list[object]] = {
    "qwen3": ["--tensor-model-parallel-size", 2, "--hdp-tokens-per-rank", 256],
    "deepseek_v2_lite": ["--hdp-tokens-per-rank", 128],  # the longest document is a ring
    "deepseek_v3": ["--hdp-tokens-per-rank", 128],
    "glm4_moe": ["--hdp-tokens-per-rank", 128],
    "gpt_oss": [
        *"--hdp-tokens-per-rank 128 --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall".split(),
    ],
}


@pytest.mark.parametrize("kind", sampled(TRAININGS, ["deepseek_v3", "gpt_oss"]))
def test_training_begins_with_the_loss_of_transformers(kind: str, found: dict[str, Any], tmp_path: Path) -> None:
    import transformers
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = write_documents(tmp_path / "docs", lengths=LENGTHS, copies=1)
    flags, *_ = found[kind]
    words = [*flags, *TRAIN, *HDP, "--data-path", data, "--seq-length", 256, "--ckpt-format", "torch_dist"]
    words += ["--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1, *TRAININGS[kind]]
    load = found["folder"] / f"{kind}-megatron"
    ours = train(2, *words, "--global-batch-size", len(LENGTHS), "--train-iters", 1, "--load", load)
    model = transformers.AutoModelForCausalLM.from_pretrained(found["folder"] / kind, dtype=torch.float32)
    total, count = 0.0, 0
    for document in IndexedDataset(str(data)):
        tokens = torch.from_numpy(document.astype("int64"))
        logits = model(tokens[None, :-1]).logits[0].detach()
        total += float(torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
        count += len(tokens) - 1
    assert ours.losses == pytest.approx([total / count], rel=1e-5), ours.text[-3000:]


@pytest.mark.parametrize("kind", sampled(["qwen3_moe", "mixtral", "gpt_oss"], ["qwen3_moe"]))
def test_the_router_loss_is_that_of_transformers(kind: str, found: dict[str, Any], tmp_path: Path) -> None:
    """All documents are one micro-batch.

    Transformers averages loads and probabilities over all layers, so it is asked for one layer at a time. Its loads add
    up to the experts of a token, and Megatron's to one.
    """
    import transformers
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    data = write_documents(tmp_path / "docs", lengths=LENGTHS, copies=1)
    words = [*found[kind][0], *TRAIN, *HDP, "--data-path", data, "--seq-length", 256, "--ckpt-format"]
    words += ["torch_dist", "--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1, "--train-iters", 1]
    words += ["--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", 0.01]
    words += ["--hdp-tokens-per-rank", sum(LENGTHS), "--global-batch-size", len(LENGTHS)]
    ours = train(1, *words, "--load", found["folder"] / f"{kind}-megatron")
    model = transformers.AutoModelForCausalLM.from_pretrained(found["folder"] / kind, dtype=torch.float32)
    documents = [torch.from_numpy(document.astype("int64"))[None] for document in IndexedDataset(str(data))]
    with torch.no_grad():
        routers = [model(tokens, output_router_logits=True).router_logits for tokens in documents]
    each, count = model.config.num_experts_per_tok, routers[0][0].shape[-1]
    losses = [load_balancing_loss_func((torch.cat(layer),), count, each) for layer in zip(*routers, strict=True)]
    (told,) = re.findall(r"load_balancing_loss: (\S+)", ours.text)
    assert float(told) == pytest.approx(float(sum(losses)) / len(losses) / each, rel=1e-5)


def decoded(rank: int, world: int, load: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the likeliest tokens after each prompt, token by token."""
    from bytescale_ext.decode.sampler import Sampler
    from megatron.bytescale.inference.engine import GenerationRequest
    from megatron.bytescale.inference.load import open_decoder

    decoder, _ = open_decoder(load, None, on_cpu=True)
    request = GenerationRequest(num_tokens, Sampler(0.0, VOCAB), None, batch=2)
    return [one.tokens for one in decoder.generate_all(prompts, request)]


DECODED = {
    "qwen3_moe": 1, "glm4_moe": 1, "mixtral": 2, "mistral": 1, "gpt_oss": 2, "deepseek_v2_lite": 1, "deepseek_v2": 2,
    "deepseek_v3": 2,
}  # fmt: skip
"""Family with experts, windows, sinks or latent attention -> tensor-parallel ranks."""


@pytest.mark.parametrize("kind", sampled(DECODED, ["gpt_oss", "deepseek_v3"]))
def test_texts_are_those_of_transformers(kind: str, found: dict[str, Any]) -> None:
    """Some prompts are shorter and some are longer than a window of 16."""
    import transformers

    prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [27], [18, 28, 18, *range(30, 70)]]
    ranks, load = DECODED[kind], found["folder"] / f"{kind}-megatron"
    ours = run_ranks(decoded, ranks, load, prompts, 12, init_group=ranks > 1)
    model = transformers.AutoModelForCausalLM.from_pretrained(found["folder"] / kind, dtype=torch.float32)
    model.generation_config.eos_token_id = None  # texts have 12 tokens
    texts = [model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0] for prompt in prompts]
    assert ours[0] == [text[len(prompt) :].tolist() for text, prompt in zip(texts, prompts, strict=True)]
    assert all(one == ours[0] for one in ours)
