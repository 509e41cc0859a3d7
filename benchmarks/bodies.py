"""The parts of the Kimi bodies: KDA against its recurrence and against softmax attention, experts against a dense MLP, and two exact facts.

Layers have the sizes of the Attention Residuals paper's smallest scaling run: width 896, 12 heads of 128, experts of 400, 8 of 64 and a
shared one. Times are those of a forward and a backward pass in float32, interleaved in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.infer.session import Session
from depthroute.model import Decoder, ModelConfig
from depthroute.model.attention import Attention
from depthroute.model.bodies import ExpertsConfig, KDAConfig, MLAConfig
from depthroute.model.experts import Experts
from depthroute.model.kda import DeltaAttention
from depthroute.model.layers import MLP
from depthroute.model.rotary import Rotary
from depthroute.model.sight import whole_sequence
from depthroute.ops import delta_rule, delta_rule_by_token
from depthroute.residual import AttnResConfig, parse_residual
from depthroute.train import initialise
from depthroute.train.devices import keep_freed_memory

SHORT, LONG = 1_024, 8_192  # tokens
EXPERT_TOKENS = 4_096
EXPERTS = ExpertsConfig(number=64, chosen=8, width=400, shared=1)
ACTIVE = EXPERTS.chosen + EXPERTS.shared
LAYER = ModelConfig(
    vocabulary=256, width=896, layers=4, heads=12, head_width=128, mlp_width=ACTIVE * EXPERTS.width, context=LONG,
    mixers=("softmax", "kda", "softmax", "kda"), kda=KDAConfig(), experts=EXPERTS,
)  # fmt: skip
# A whole body that decodes and compares quickly: three layers with KDA for each with latent attention, the last with latent attention.
SMALL = ModelConfig(
    vocabulary=256, width=64, layers=9, heads=4, mlp_width=160, context=8_192, mixers=("kda", "kda", "kda", "mla"), last_mixer="mla",
    kda=KDAConfig(), mla=MLAConfig(latent=32, shared_key=8), experts=ExpertsConfig(number=8, chosen=2, width=48),
    norm_eps=1e-30, init_std=0.1,
)  # fmt: skip
METHODS = ("full", "block:6", "rd", "low-rank,rank=16", "full,heads=4", "full,weighting=sigmoid", "full,key_norm=none")


def both_passes(run: Callable[[], Tensor], parameters: list[Tensor]) -> Callable[[], None]:
    """A forward pass, and the gradients of all that it is made of."""

    def step() -> None:
        found = run()
        torch.autograd.grad(found, parameters, torch.ones_like(found), allow_unused=True)

    return step


def prepared(module: nn.Module) -> nn.Module:
    initialise(module, 0)
    return module


def layer_step(module: nn.Module, *arguments: Any) -> Callable[[], None]:
    x = arguments[0].clone().requires_grad_()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return both_passes(lambda: module(x, *arguments[1:]).output, [x, *trained])


def given_to_rule(heads: int = LAYER.heads, width: int = LAYER.resolved_head_width) -> list[Tensor]:
    """Queries, keys, values, log decays of -0.08 on average, and strengths."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gate = (torch.randn(1, heads, SHORT, width, generator=generator) for _ in range(4))
    given = [
        torch.nn.functional.normalize(query, dim=-1) * width**-0.5, torch.nn.functional.normalize(key, dim=-1), value,
        -0.1 * torch.nn.functional.softplus(gate), torch.rand(1, heads, SHORT, generator=generator),
    ]  # fmt: skip
    return [one.requires_grad_() for one in given]


def rule(heads: int, width: int, repeats: int) -> list[Row]:
    """The chunked form and the recurrence on what the heads of a layer project."""
    given = given_to_rule(heads, width)
    forms = {"chunks": delta_rule, "tokens": delta_rule_by_token}
    runs = {name: both_passes(lambda form=form: form(*given)[0], given) for name, form in forms.items()}
    seconds = interleaved(runs, repeats=repeats, warm_up=2)
    lowest, median = ratios(seconds, "tokens", "chunks")
    title = f"KDA, {SHORT:,} tokens, {heads} heads of {width}, mild decays: recurrence over chunks"
    return [
        Row(f"{title} (median of pairs)", median, 8, at_most=False, unit="x"),
        Row(f"{title} (minima)", lowest, unit="x"),
    ]


def decays_and_documents(repeats: int) -> list[Row]:
    """What strong decays and documents cost the chunked form, which then takes pairs by halves."""
    mild = given_to_rule()
    strong = [one.detach().clone().requires_grad_() for one in mild]
    strong[3] = (50 * strong[3].detach()).requires_grad_()
    begins = torch.zeros(1, SHORT, dtype=torch.bool)
    begins[0, ::300] = True
    runs = {
        "mild": both_passes(lambda: delta_rule(*mild)[0], mild), "strong": both_passes(lambda: delta_rule(*strong)[0], strong),
        "documents": both_passes(lambda: delta_rule(*mild, begins=begins)[0], mild),
    }  # fmt: skip
    seconds = interleaved(runs, repeats=repeats, warm_up=1)
    words = {"strong": "strong decays over mild ones", "documents": "documents over one"}
    return [
        Row(f"KDA, {SHORT:,} tokens in chunks: {said} (median of pairs)", ratios(seconds, name, "mild")[1], unit="x")
        for name, said in words.items()
    ]


def mixers(tokens: int, target: float, repeats: int) -> list[Row]:
    """A layer's token mixer, whole: projections, gates, convolutions, what mixes, and the output projection."""
    sight = whole_sequence(Rotary(LAYER.resolved_head_width, tokens, LAYER.rope_base)(0, tokens), tokens, None)
    x = torch.randn(1, tokens, LAYER.width, generator=torch.Generator().manual_seed(1))
    runs = {
        "softmax": layer_step(prepared(Attention(LAYER, 0)), x, sight),
        "kda": layer_step(prepared(DeltaAttention(LAYER, 1, True)), x, sight),
    }
    seconds = interleaved(runs, repeats=repeats, warm_up=1)
    lowest, median = ratios(seconds, "kda", "softmax")
    return [
        Row(f"layer, {tokens:,} tokens: KDA over softmax attention (median of pairs)", median, target, unit="x"),
        Row(f"layer, {tokens:,} tokens: KDA over softmax attention (minima)", lowest, unit="x"),
    ]


def experts(repeats: int) -> list[Row]:
    """The rate of a mixture in active multiply-adds, router and sorting included in its time, against a dense MLP of that size.

    The router has its first values: experts are loaded about evenly.
    """
    x = torch.randn(1, EXPERT_TOKENS, LAYER.width, generator=torch.Generator().manual_seed(2))
    shared = MLP(LAYER, EXPERTS.shared * EXPERTS.width)
    runs = {"experts": layer_step(prepared(Experts(LAYER, shared)), x), "dense": layer_step(prepared(MLP(LAYER)), x)}
    seconds = interleaved(runs, repeats=repeats, warm_up=1)
    lowest, median = ratios(seconds, "dense", "experts")
    sizes = f"{EXPERTS.chosen} of {EXPERTS.number} and {EXPERTS.shared} shared, {EXPERT_TOKENS:,} tokens"
    title = f"experts, {sizes}: part of a dense MLP's rate"
    return [
        Row(f"{title} (median of pairs)", median, 0.6, at_most=False, unit="x"),
        Row(f"{title} (minima)", lowest, unit="x"),
    ]


def decoding() -> list[Row]:
    """What a text leaves behind in the layers with KDA, early and late, and in those with latent attention."""
    only = replace(SMALL, mixers=("kda",), last_mixer=None, mla=None)
    sizes = {}
    for name, config in (("kda", only), ("hybrid", SMALL)):
        model = prepared(Decoder(config)).eval()
        assert isinstance(model, Decoder)
        for tokens in (64, 4_096):
            session = Session(model)
            session.prefill([[token % config.vocabulary for token in range(tokens)]])
            sizes[name, tokens] = session.cache_bytes
    return [
        Row("decoding: what KDA carries behind 4,096 tokens over 64", sizes["kda", 4_096] / sizes["kda", 64], 1.0, unit="x"),
        Row("decoding: what the hybrid body carries behind 4,096 tokens over 64", sizes["hybrid", 4_096] / sizes["hybrid", 64], unit="x"),
    ]


def latent_steps(repeats: int) -> list[Row]:
    """One more token of a text, through layers with latent attention and with softmax attention of as many heads."""
    softmax = ModelConfig(vocabulary=256, width=896, layers=2, heads=12, head_width=128, mlp_width=896, context=4_096)
    bodies = {"softmax": softmax, "mla": replace(softmax, mixers=("mla",), mla=MLAConfig())}
    runs: dict[str, Callable[[], object]] = {}
    for name, config in bodies.items():
        model = prepared(Decoder(config)).eval()
        assert isinstance(model, Decoder)
        session = Session(model)
        session.prefill([[token % 256 for token in range(2_048)]])
        runs[name] = lambda session=session: session.step(torch.tensor([1]))
    seconds = interleaved(runs, repeats=repeats)
    measure = "decoding behind 2,048 tokens: latent over softmax attention (median of pairs)"
    return [Row(measure, ratios(seconds, "mla", "softmax")[1], unit="x")]


def zero_queries() -> list[Row]:
    """Logits and gradients of the body, with route queries at zero and of PreNorm: the largest difference over the largest value."""
    tokens = torch.randint(SMALL.vocabulary, (2, 33), generator=torch.Generator().manual_seed(3))

    def results(residual: str) -> dict[str, Tensor]:
        model = Decoder(replace(SMALL, residual=parse_residual(residual, AttnResConfig())))
        initialise(model, 0)
        model = model.double()
        model.loss(tokens[:, :-1], tokens[:, 1:]).objective.backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if not name.startswith("residual.")}
        return {"logits": model.logits(tokens[:, :-1]).detach()} | {name: one for name, one in found.items() if one is not None}

    plain = results("prenorm")
    rows = []
    for method in METHODS:
        routed = results(method)
        assert routed.keys() == plain.keys()
        worst = max(((routed[name] - plain[name]).abs().max() / plain[name].abs().max()).item() for name in plain)
        rows.append(Row(f"zero queries, {method}: logits and gradients against PreNorm, float64", worst, 1e-10))
    return rows


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=9, help="pairs of times; fewer for the slowest rows")
    options.add_argument("--threads", type=int, help="CPU threads; default: what torch chooses")
    given = options.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    keep_freed_memory()
    rows = rule(LAYER.heads, LAYER.resolved_head_width, given.repeats)
    rows += rule(6, 16, given.repeats)  # the two-core body's
    rows += decays_and_documents(max(3, given.repeats // 3))
    rows += mixers(SHORT, 2.5, given.repeats)
    rows += mixers(LONG, 1.0, max(3, given.repeats // 3))
    rows += experts(given.repeats)
    rows += decoding()
    rows += latent_steps(given.repeats)
    rows += zero_queries()
    finish(rows, given)


if __name__ == "__main__":
    main()
