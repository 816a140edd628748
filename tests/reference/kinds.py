"""Models that are trained and compared: their settings, and the command lines that ask for them."""

from __future__ import annotations

from dataclasses import replace

from tests.e2e.corpora import VOCAB
from tests.reference.settings import HEADS, HIDDEN, Clip, Experts, Latent, Positions, Settings, Yarn

YARN = Yarn(factor=8, original_length=64)
LATENT = Latent(query_rank=12, rank=16, plain=8, rotated=4, value=6)
CLASSIC = Settings(
    key_heads=HEADS,
    norm="layer",
    activation="gelu",
    has_biases=True,
    is_tied=True,
    positions=Positions("learned"),
)
SIGMOID = Experts(score="sigmoid", bias_rate=0.05, scaling=1.5, z_loss=1e-2, shared=16)

KINDS: dict[str, Settings] = {
    "plain": Settings(),
    "classic": CLASSIC,
    "no positions": Settings(positions=Positions("none"), norm="layer", has_qkv_bias=True),
    "partial interleaved": Settings(positions=Positions(share=0.5, interleaved=True, base=500000), key_heads=1),
    "interpolated": Settings(positions=Positions(interpolation=4, base=500), is_tied=True, head_size=12),
    "llama 3": Settings(positions=Positions(llama_factor=4, base=500000, without=(1,)), has_qk_norm=True),
    "yarn": Settings(positions=Positions(yarn=YARN), has_biases=True),
    "yarn unrounded": Settings(
        positions=Positions(yarn=replace(YARN, is_rounded=False, scale=1.0, scale_all=0.5, fast=4)), key_heads=HEADS
    ),
    "windows": Settings(windows=(40, 40), activation="squared_relu"),
    "window and sinks": Settings(windows=(24, None), sink="learned", positions=Positions(yarn=YARN)),
    "zero sinks": Settings(sink="zero", norm="layer", has_qk_norm=True),
    "latent": Settings(latent=LATENT, has_qk_norm=True, positions=Positions(interleaved=True)),
    "latent yarn": Settings(
        latent=replace(LATENT, query_rank=None),
        has_qk_norm=True,
        positions=Positions(interleaved=True, yarn=replace(YARN, factor=4, scale=1.0, scale_all=0.5)),
    ),
    "latent experts": Settings(
        latent=LATENT, has_qk_norm=True, positions=Positions(interleaved=True, base=500), experts=SIGMOID
    ),
    "softmax experts": Settings(experts=Experts(z_loss=1e-2, layers=(0, 1))),
    "softmax before": Settings(experts=Experts(score="before", scaling=2.0, shared=16, is_shared_gated=True)),
    "one expert": Settings(experts=Experts(score="sigmoid", chosen=1), norm="layer"),
    "sigmoid experts": Settings(experts=SIGMOID, positions=Positions(base=500)),
    "groups of experts": Settings(experts=replace(SIGMOID, count=8, groups=(4, 2), chosen=4)),
    "softmax groups": Settings(experts=Experts(score="before", count=8, groups=(4, 2), layers=(0, 1), z_loss=1e-2)),
    "later tokens": Settings(depths=2, depth_weight=0.5),
    "later token": Settings(depths=1, depth_weight=0.3, positions=Positions("none"), norm="layer", is_tied=True),
}


KINDS |= {
    "later tokens experts": replace(KINDS["later token"], experts=Experts(shared=16), depths=2),
    "answers": Settings(only_answers=True, positions=Positions("none")),
    "answers experts": Settings(only_answers=True, experts=SIGMOID),
    "answers later tokens": Settings(only_answers=True, depths=2, depth_weight=0.4),
}

BY_HAND = {
    "balanced documents": Settings(experts=replace(SIGMOID, document_loss=0.1), positions=Positions(base=500)),
    "balanced steps": Settings(experts=Experts(layers=(0, 1), document_loss=0.05, step_loss=0.1)),
    "balanced latent later tokens": Settings(
        latent=LATENT,
        has_qk_norm=True,
        positions=Positions(interleaved=True),
        experts=replace(SIGMOID, document_loss=0.1),
        depths=1,
        depth_weight=0.3,
    ),
    "balanced answers": Settings(only_answers=True, experts=Experts(document_loss=0.2, shared=16)),
    "projected experts": Settings(experts=replace(SIGMOID, latent=12), positions=Positions(base=500)),
    "projected softmax experts": Settings(experts=Experts(latent=20, layers=(0, 1), document_loss=0.1), is_tied=True),
    "projected later tokens": replace(KINDS["later token"], experts=Experts(latent=12, shared=16), depths=2),
    "clipped": Settings(clip=Clip(1.0, 0.3)),
    "clipped window and sinks": Settings(windows=(24, None), sink="learned", key_heads=1, clip=Clip(1.0)),
    "clipped latent": replace(KINDS["latent"], clip=Clip(1.0, 0.3)),
    "clipped later tokens": Settings(depths=2, depth_weight=0.5, clip=Clip(1.0)),
}
"""Models whose combinations are chosen by hand: with balancing losses, experts of latents, or clipped logits."""
KINDS |= BY_HAND


def flags(model: Settings) -> list[str]:
    """Return the words of the command line that ask for a model."""
    words = (
        f"--num-layers {model.layers} --hidden-size {HIDDEN} --num-attention-heads {HEADS} "
        f"--ffn-hidden-size {model.width} --seq-length {model.length} --max-position-embeddings {model.length} "
        "--attention-dropout 0 --hidden-dropout 0 --init-method-std 0.2 "
        f"--tokenizer-type NullTokenizer --vocab-size {VOCAB}"
    ).split()
    words += ["--normalization", {"rms": "RMSNorm", "layer": "LayerNorm"}[model.norm]]
    words += {"swiglu": ["--swiglu"], "gelu": [], "squared_relu": ["--squared-relu"]}[model.activation]
    words += [] if model.has_biases else ["--disable-bias-linear"]
    words += ["--add-qkv-bias"] if model.has_qkv_bias else []
    words += [] if model.is_tied else ["--untie-embeddings-and-output-weights"]
    words += ["--qk-layernorm"] if model.has_qk_norm else []
    words += latent_flags(model.latent, model.positions) if model.latent else attention_flags(model)
    words += position_flags(model)
    words += expert_flags(model.experts, model.layers) if model.experts else []
    words += ["--sft"] if model.only_answers else []
    if model.clip is not None:
        words += f"--qk-clip --qk-clip-threshold {model.clip.threshold} --qk-clip-alpha {model.clip.alpha}".split()
    if model.depths:
        words += f"--mtp-num-layers {model.depths} --mtp-loss-scaling-factor {model.depth_weight}".split()
    return words


def attention_flags(model: Settings) -> list[str]:
    words = ["--kv-channels", str(model.head_size)]
    if model.key_heads < HEADS:
        words += ["--group-query-attention", "--num-query-groups", str(model.key_heads)]
    if any(model.windows):
        layers = [int(window is not None) for window in model.windows]
        words += ["--window-size", f"{max(filter(None, model.windows))},0"]
        words += ["--window-attn-skip-freq", str(layers).replace(" ", "")]
    if model.sink != "none":
        words += ["--softmax-type", {"zero": "off-by-one", "learned": "learnable"}[model.sink]]
    return words


def latent_flags(latent: Latent, positions: Positions) -> list[str]:
    sizes = (
        f"--multi-latent-attention --kv-lora-rank {latent.rank} --qk-head-dim {latent.plain} "
        f"--qk-pos-emb-head-dim {latent.rotated} --v-head-dim {latent.value} "
        f"--rope-type {'rope' if positions.yarn is None else 'yarn'}"
    ).split()
    return [*sizes, *(["--q-lora-rank", str(latent.query_rank)] if latent.query_rank else [])]


def position_flags(model: Settings) -> list[str]:
    positions, yarn = model.positions, model.positions.yarn
    kind = {"rotary": "rope", "learned": "learned_absolute", "none": "none"}[positions.kind]
    words = ["--position-embedding-type", "yarn" if yarn and not model.latent else kind]
    if positions.kind != "rotary":
        return words
    words += ["--rotary-base", str(positions.base).removesuffix(".0")]
    words += ["--rotary-percent", str(positions.share)] if positions.share != 1 else []
    words += ["--rotary-interleaved"] if positions.interleaved and not model.latent else []
    if positions.interpolation != 1:
        words += ["--rotary-seq-len-interpolation-factor", str(positions.interpolation)]
    if positions.llama_factor is not None:
        words += ["--use-rope-scaling", "--rope-scaling-factor", str(positions.llama_factor)]
    if positions.without:
        words += [
            "--no-rope-freq",
            str([int(layer in positions.without) for layer in range(model.layers)]).replace(" ", ""),
        ]
    return words + (yarn_flags(yarn) if yarn else [])


def yarn_flags(yarn: Yarn) -> list[str]:
    words = (
        f"--rotary-scaling-factor {yarn.factor} --yarn-original-max-position-embeddings {yarn.original_length} "
        f"--yarn-beta-fast {yarn.fast} --yarn-beta-slow {yarn.slow}"
    ).split()
    words += [] if yarn.is_rounded else ["--no-yarn-correction-range-round-to-int"]
    words += ["--mscale", str(yarn.scale)] if yarn.scale is not None else []
    return words + (["--mscale-all-dim", str(yarn.scale_all)] if yarn.scale_all is not None else [])


def balancing_flags(experts: Experts) -> list[str]:
    losses = {"seq_aux_loss": experts.document_loss, "global_aux_loss": experts.step_loss}
    given = {name: coefficient for name, coefficient in losses.items() if coefficient}
    words = ["--moe-router-load-balancing-type", *(given or ["none"])]
    return [*words, "--moe-aux-loss-coeff", *map(str, given.values())] if given else words


def expert_flags(experts: Experts, layers: int) -> list[str]:
    where = [int(layer in experts.layers) for layer in range(layers)]
    words = (
        f"--num-experts {experts.count} --moe-router-topk {experts.chosen} --moe-ffn-hidden-size {experts.width} "
        f"--moe-layer-freq {str(where).replace(' ', '')} --moe-token-dispatcher-type alltoall "
        f"{' '.join(balancing_flags(experts))} "
        f"--moe-router-score-function {'sigmoid' if experts.score == 'sigmoid' else 'softmax'}"
    ).split()
    words += ["--moe-router-pre-softmax"] if experts.score == "before" else []
    words += ["--moe-router-topk-scaling-factor", str(experts.scaling)] if experts.scaling != 1 else []
    if experts.bias_rate is not None:
        words += ["--moe-router-enable-expert-bias", "--moe-router-bias-update-rate", str(experts.bias_rate)]
    if experts.groups is not None:
        words += f"--moe-router-num-groups {experts.groups[0]} --moe-router-group-topk {experts.groups[1]}".split()
    words += ["--moe-z-loss-coeff", str(experts.z_loss)] if experts.z_loss else []
    words += ["--moe-latent-size", str(experts.latent)] if experts.latent else []
    words += ["--moe-shared-expert-intermediate-size", str(experts.shared)] if experts.shared else []
    return words + (["--moe-shared-expert-gate"] if experts.is_shared_gated else [])
