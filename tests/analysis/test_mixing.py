"""The depth-mixing matrix against the reads themselves, for every residual method that has one, and the papers' facts about it."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from depthroute.analysis.mixing import COMPOSITIONS, NONE, Mixing, MixingTotals, ranks, without_matrix
from depthroute.analysis.mixing_rows import Row
from depthroute.common.errors import RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import METHODS, AttnResConfig, PreNormConfig, ResidualConfig, RoleInputs, Trace, attnres
from depthroute.residual.delta import DeltaConfig
from depthroute.residual.denseformer import DenseFormerConfig
from depthroute.residual.depth_attention import DepthAttentionConfig
from depthroute.residual.dynamic import DynamicQueryConfig
from depthroute.residual.highway import HighwayConfig
from depthroute.residual.hyper import HyperConnectionsConfig
from depthroute.residual.laurel import LaurelConfig
from depthroute.residual.layerscale import LayerScaleConfig
from depthroute.residual.linear import LinearDepthConfig
from depthroute.residual.mhc import MHCConfig
from depthroute.residual.mrla import MRLAConfig
from depthroute.residual.muddformer import MUDDFormerConfig
from depthroute.residual.postnorm import PostNormConfig
from depthroute.residual.rezero import ReZeroConfig
from depthroute.residual.skips import SkipsConfig
from depthroute.residual.static import StaticMixConfig
from depthroute.residual.values import ValueResidualConfig

LAYERS, WIDTH = 4, 12
COLUMNS = 2 * LAYERS + 1

CONFIGS: dict[str, ResidualConfig] = {
    "prenorm": PreNormConfig(),
    "full": AttnResConfig(),
    "block": AttnResConfig(block=3),
    "full norm": AttnResConfig(block=2, rank=5, key_norm="full"),
    "projected": AttnResConfig(block=3, rank=5, keys="projected", roles="decoupled"),
    **{roles: AttnResConfig(block=3, roles=roles) for roles in ("decoupled", "tied", "average", "frozen_value", "separate")},
    "heads": AttnResConfig(block=3, heads=3),
    "heads and roles": AttnResConfig(heads=2, roles="decoupled", first_read=True),
    "sigmoid": AttnResConfig(block=4, weighting="sigmoid"),
    "no key norm": AttnResConfig(key_norm="none"),
    "window": AttnResConfig(window=3),
    "block window": AttnResConfig(block=2, window=2),
    "rms outputs": AttnResConfig(summary="rms"),
    "rms blocks": AttnResConfig(block=3, summary="rms"),
    "mean blocks": AttnResConfig(block=3, summary="mean"),
    "count prior": AttnResConfig(ends=(1, 4, 8), count_prior=1.0, learned_count_prior=True),
    "normed": AttnResConfig(block=3, values="normed", scaled=True, roles="separate"),
    "normed rms": AttnResConfig(block=3, values="normed", summary="rms", heads=3),
    "normed mean": AttnResConfig(block=2, values="normed", summary="mean"),
    "static": StaticMixConfig(),
    "static block": StaticMixConfig(block=3, summary="rms"),
    "static raw": StaticMixConfig(raw=True, block=2, window=2),
    "dynamic query": DynamicQueryConfig(query_rank=3),
    "block query": DynamicQueryConfig(block=2, query_from="block", window=2),
    "linear": LinearDepthConfig(),
    "delta": DeltaConfig(),
    "delta block": DeltaConfig(block=2, gate="sigmoid"),
    "delta window": DeltaConfig(window=2, gate="alpha"),
    "postnorm": PostNormConfig(),
    "deepnorm": PostNormConfig(deep=True),
    "rezero": ReZeroConfig(),
    "layerscale": LayerScaleConfig(),
    "highway": HighwayConfig(),
    "highway scalar": HighwayConfig(gate="scalar"),
    "highway full": HighwayConfig(gate="full", coupled=False),
    "laurel": LaurelConfig(weights=True, previous=2),
    "laurel rw": LaurelConfig(weights=True),
    "x0": SkipsConfig(),
    "skips": SkipsConfig(unet=True),
    "unet": SkipsConfig(embedding=False, unet=True),
    "denseformer": DenseFormerConfig(),
    "denseformer 2x3": DenseFormerConfig(dilation=2, period=3),
    "muddformer": MUDDFormerConfig(rounded=False),
    "muddformer norms": MUDDFormerConfig(rounded=False, separate_norms=True),
    "muddformer prepost": MUDDFormerConfig(rounded=False, prepost=True),
    "hc static": HyperConnectionsConfig(streams=2, dynamic=False),
    "hc": HyperConnectionsConfig(streams=3, norm_gain=True),
    "mhc": MHCConfig(streams=3),
    "mhc released": MHCConfig(streams=2, numerics="released", head="mean"),
    "value residual": ValueResidualConfig(),
    "depth attention": DepthAttentionConfig(stride=1),
}

# What sums to one by the methods' equations.
ROWS = {"full", "heads and roles", "no key norm", "window", "static", "dynamic query", "highway", "highway scalar"}
WEIGHTS = {
    "block", "full norm", "projected", "decoupled", "tied", "average", "frozen_value", "separate", "heads", "block window",
    "rms outputs", "rms blocks", "mean blocks", "count prior", "normed", "normed rms", "normed mean", "static block", "block query",
    "delta", "delta block", "delta window",
}  # fmt: skip
BY_CHANNEL = {
    "heads", "heads and roles", "normed rms", "postnorm", "deepnorm", "layerscale", "highway", "highway full", "muddformer prepost"
}  # fmt: skip
ONE_STREAM = ("prenorm", "rezero", "laurel rw", "highway scalar", "value residual", "depth attention")


@pytest.fixture(autouse=True)
def read_ahead_in_small_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Phase 1 from one closed source on, so that tiny networks have it."""
    monkeypatch.setattr(attnres, "READ_AHEAD_FROM", 1)


def decoder(residual: ResidualConfig, **fields: Any) -> Decoder:
    """A small decoder in float64; all that the method owns is random, and so is every norm."""
    torch.manual_seed(3)
    shape = {"vocabulary": 17, "width": WIDTH, "layers": LAYERS, "heads": 2, "mlp_width": 20, "context": 8, "init_std": 0.4}
    model = Decoder(ModelConfig(**shape | fields, residual=residual)).double()
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.normal_()
        for name, gain in model.named_parameters():
            if name.endswith(("norm.weight", "key_gain")):
                gain.copy_(1 + 0.3 * torch.randn_like(gain))
    return model


def some_tokens(batch: int = 2) -> Tensor:
    return torch.randint(17, (batch, 7), generator=torch.Generator().manual_seed(batch))


class Seen:
    """Every row, every read before its norm, and every v_i of one forward pass."""

    def __init__(self, model: Decoder, monkeypatch: pytest.MonkeyPatch, tokens: Tensor) -> None:
        self.rows: list[dict[str, Row]] = []
        self.reads: list[dict[str, Tensor]] = []
        self.outputs: list[Tensor] = []
        self.memories: list[Any] = []
        residual, mixing = model.residual, Mixing(model)
        true_open, true_write = residual.open, residual.write

        def opened(embedding: Tensor) -> Any:
            self.outputs.append(embedding)
            return true_open(embedding)

        def written(memory: Any, site: int, output: Tensor, trace: Trace) -> Any:
            self.outputs.append(output)
            return true_write(memory, site, output, trace)

        def observe(site: int, memory: Any) -> None:
            self.rows.append(mixing.rows(site, memory))
            self.reads.append(plain_read(model, memory, site))
            self.memories.append(memory)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(residual, "open", opened)
            patch.setattr(residual, "write", written)
            model(tokens, observe=observe)

    def matrix(self, role: str = "shared") -> Tensor:
        """[B, T, N, N], the mean over channels."""
        rows = [found.get(role, found.get("shared")) for found in self.rows]
        shape = (*self.outputs[0].shape[:2], COLUMNS)
        return torch.stack([row.weights.double().mean(-2).expand(shape) for row in rows if row is not None], dim=-2)


def plain_read(model: Decoder, memory: Any, site: int) -> dict[str, Tensor]:
    """What is read by role, before the norm."""
    config = model.config.residual
    if isinstance(config, PostNormConfig):
        return {"shared": memory}
    if isinstance(config, MUDDFormerConfig):
        found = memory.roles if config.separate_norms and memory.roles is not None else model.residual.read(memory, site)
        extra = {"residual": memory.stream} if isinstance(found, RoleInputs) else {}
    else:
        found, extra = model.residual.read(memory, site), {}
    if isinstance(found, Tensor):
        return {"shared": found}
    return {"query": found.query, "key": found.key, "value": found.value, **extra}


def mixture(weights: Tensor, outputs: list[Tensor]) -> Tensor:
    """sum_i weights_i v_i [B, T, D] of weights [..., G, N] and G groups of adjacent channels."""
    groups = weights.shape[-2]
    total = torch.zeros_like(outputs[0])
    for column, output in enumerate(outputs):
        split = output.unflatten(-1, (groups, -1))
        total = total + (weights[..., column, None] * split).flatten(-2)
    assert not weights[..., len(outputs) :].any()  # no part in what comes later
    return total


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_times_outputs_are_the_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(decoder(CONFIGS[name]), monkeypatch, some_tokens())
    assert len(seen.rows) == len(seen.outputs) == COLUMNS
    for site, (rows, reads) in enumerate(zip(seen.rows, seen.reads, strict=True)):
        for role, read in reads.items():
            row = next(rows[found] for found in (role, "query_key" if role in ("query", "key") else role, "shared") if found in rows)
            torch.testing.assert_close(mixture(row.weights, seen.outputs[: site + 1]), read, rtol=1e-10, atol=1e-10)


def test_with_norms_behind_sub_layers_outputs_are_what_comes_out_of_those(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AttnResConfig(block=3, values="normed", summary="rms")  # needs their magnitudes
    for norms in ("post", "sandwich"):
        seen = Seen(decoder(config, norms=norms), monkeypatch, some_tokens())
        for site, (rows, reads) in enumerate(zip(seen.rows, seen.reads, strict=True)):
            torch.testing.assert_close(mixture(rows["shared"].weights, seen.outputs[: site + 1]), reads["shared"], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_must_sum_to_one_does_for_every_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    totals = MixingTotals(model := decoder(CONFIGS[name]))
    model(some_tokens(), observe=totals.observe)
    found = totals.summary()
    assert found is not None and found["tokens"] == 14 and found["by_channel"] == (name in BY_CHANNEL)
    assert found["sums_to_one"] == ("rows" if name in ROWS else "weights" if name in WEIGHTS else None)
    assert found["deviation"] == (None if found["sums_to_one"] is None else pytest.approx(0, abs=1e-12))
    sums = Seen(model, monkeypatch, some_tokens()).matrix().sum(-1)
    assert (name in ROWS) == bool(((sums - 1).abs() < 1e-12).all())


def test_the_plain_stream_is_the_lower_triangle_of_ones() -> None:
    totals = MixingTotals(model := decoder(PreNormConfig()))
    model(some_tokens(), observe=totals.observe)
    found = totals.summary()
    assert found is not None
    shared = found["roles"]["shared"]
    assert shared["mean"] == torch.ones(COLUMNS, COLUMNS).tril().tolist() and shared["spread"] == torch.zeros(COLUMNS, COLUMNS).tolist()
    assert shared["sums"] == list(range(1, COLUMNS + 1)) and (shared["rank"], shared["crossing_rank"]) == (COLUMNS, 1)
    assert found["rows"][:3] == ["attention 0", "mlp 0", "attention 1"] and found["rows"][-1] == "output"
    assert found["columns"][:3] == ["embedding", "attention 0", "mlp 0"] and len(found["columns"]) == COLUMNS


def test_scalar_highway_is_stick_breaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """M[l, i] = g_i times all 1 - g behind it, and the embedding has what nobody took."""
    seen = Seen(model := decoder(HighwayConfig(gate="scalar")), monkeypatch, some_tokens())
    residual: Any = model.residual
    gates = []
    for site, layer in ((site, model.layers[site // 2]) for site in range(2 * LAYERS)):
        inputs = (layer.attention_norm if site % 2 == 0 else layer.mlp_norm)(seen.reads[site]["shared"])
        gate = residual.gates[str(site)]
        gates.append(torch.sigmoid((inputs * gate.weight).sum(-1) + gate.bias))
    matrix = seen.matrix()
    for row in range(COLUMNS):
        left = torch.ones_like(gates[0])
        for column in range(row, 0, -1):
            torch.testing.assert_close(matrix[..., row, column], gates[column - 1] * left, rtol=1e-12, atol=1e-14)
            left = left * (1 - gates[column - 1])
        torch.testing.assert_close(matrix[..., row, 0], left, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["hc", "hc static", "mhc"])
def test_streams_are_the_products_of_their_mixing_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 10: M[l, i] = b_i^T A_{i+1} ... A_{l-1} a_l; the embedding is in every stream."""
    seen = Seen(decoder(CONFIGS[name]), monkeypatch, some_tokens())
    matrix = seen.matrix()
    for row in range(COLUMNS - 1):  # the last read is the method's own
        reach = seen.memories[row].coefficients[..., 0]
        for column in range(row, 0, -1):
            coefficients = seen.memories[column - 1].coefficients
            expected = (coefficients[..., -1] * reach).sum(-1).expand(2, 7)
            torch.testing.assert_close(matrix[..., row, column], expected, rtol=1e-12, atol=1e-12)
            reach = (coefficients[..., 1:-1] @ reach[..., None]).squeeze(-1)
        torch.testing.assert_close(matrix[..., row, 0], reach.sum(-1).expand(2, 7), rtol=1e-12, atol=1e-12)


def test_full_is_its_weights_and_blocks_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(model := decoder(AttnResConfig()), monkeypatch, some_tokens())
    for site in range(1, COLUMNS):
        weights = model.residual.source_weights(seen.memories[site], site)["shared"]
        torch.testing.assert_close(seen.matrix()[..., site, : site + 1], weights.movedim(0, -1))
    seen = Seen(model := decoder(AttnResConfig(block=3)), monkeypatch, some_tokens())
    matrix = seen.matrix()
    for site in range(1, COLUMNS):
        weights = model.residual.source_weights(seen.memories[site], site)["shared"]
        for source, of_source in enumerate(weights[1:]):
            for column in range(3 * source + 1, min(3 * source + 3, site) + 1):  # the open block as far as it is
                assert torch.equal(matrix[..., site, column], of_source)
    assert (matrix.sum(-1)[..., 4:] > 1 + 1e-6).any()


def test_zero_queries_give_every_output_its_share_of_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(AttnResConfig(block=3))
    torch.nn.init.zeros_(model.residual.sites["8"].query)  # type: ignore[union-attr, index]
    matrix = Seen(model, monkeypatch, some_tokens()).matrix()
    torch.testing.assert_close(matrix[..., -1, :], torch.full((2, 7, COLUMNS), 1 / 4, dtype=torch.float64))


def test_ranks_of_a_token_are_what_the_methods_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Section 6: one stream is 1-semiseparable, n streams are n-semiseparable, Full is dense, and blocks are between."""

    def crossing(config: ResidualConfig) -> int:
        model = decoder(config)
        with torch.no_grad():
            for parameter in model.residual.parameters():
                parameter.mul_(0.3)  # so that nothing is nearly zero
        found = ranks(Seen(model, monkeypatch, some_tokens()).matrix()[1, 3], 1e-12)
        assert found.rank == COLUMNS  # lower triangular, and the newest output is read everywhere
        return found.crossing_rank

    assert {crossing(CONFIGS[name]) for name in ONE_STREAM} == {1}
    assert [crossing(HyperConnectionsConfig(streams=n)) for n in (1, 2, 3)] == [1, 2, 3]
    assert [crossing(MHCConfig(streams=n)) for n in (2, 3)] == [2, 3]
    assert crossing(AttnResConfig()) == (COLUMNS + 1) // 2  # as much as a block of that size can have
    assert 1 < crossing(AttnResConfig(block=4)) <= 3
    assert 1 < crossing(AttnResConfig(block=3)) <= 4
    assert crossing(LinearDepthConfig(rank=2)) == 3


def test_ranks_by_hand() -> None:
    found = ranks(torch.diag(torch.tensor([2.0, 1.0, 1e-20], dtype=torch.float64)), 1e-7)
    assert found.values == [2.0, 1.0, pytest.approx(1e-20)] and found.tolerance == pytest.approx(6e-7)
    assert (found.rank, found.crossing_rank) == (2, 1)


@pytest.mark.parametrize("name", ["separate", "hc", "highway", "heads", "muddformer", "skips"])
def test_batches_add_up_to_all_tokens_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    totals, tokens = MixingTotals(model := decoder(CONFIGS[name])), some_tokens(6)
    for part in (tokens[:1], tokens[1:4], tokens[4:]):
        model(part, observe=totals.observe)
    found, seen = totals.summary(), Seen(model, monkeypatch, tokens)
    assert found is not None and found["tokens"] == tokens.numel()
    for role, facts in found["roles"].items():
        matrix = seen.matrix(role).flatten(0, 1)
        mean = torch.tensor(facts["mean"], dtype=torch.float64)
        spread = torch.tensor(facts["spread"], dtype=torch.float64)
        torch.testing.assert_close(mean, matrix.mean(0), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(spread, matrix.std(0, correction=0), rtol=1e-9, atol=1e-12)
        assert facts["sums"] == pytest.approx(matrix.sum(-1).mean(0).tolist(), abs=1e-12)
        assert facts["singular_values"] == pytest.approx(torch.linalg.svdvals(matrix.mean(0)).tolist(), abs=1e-12)
        assert spread.max() > 1e-3


def test_every_role_has_a_whole_matrix() -> None:
    expected = {
        "block": ["shared"], "tied": ["shared"], "average": ["shared"], "decoupled": ["query_key", "value"],
        "separate": ["query", "key", "value"], "heads and roles": ["query_key", "value"],
        "muddformer": ["query", "key", "value", "residual"],
    }  # fmt: skip
    for name, roles in expected.items():
        totals = MixingTotals(model := decoder(CONFIGS[name]))
        model(some_tokens(), observe=totals.observe)
        found = totals.summary()
        assert found is not None and list(found["roles"]) == roles
        matrices = [torch.tensor(facts["mean"]) for facts in found["roles"].values()]
        for matrix in matrices[1:]:
            assert torch.equal(matrix[1::2], matrices[0][1::2])  # before an MLP there is one read
            assert not torch.equal(matrix[2:-1:2], matrices[0][2:-1:2]) and torch.equal(matrix[-1], matrices[0][-1])


@pytest.mark.parametrize("name", ["block", "hc", "highway", "muddformer prepost", "normed rms", "linear"])
def test_in_bfloat16_it_is_nearly_what_it_is_in_float32(name: str) -> None:
    found = []
    for enabled in (False, True):
        totals = MixingTotals(model := decoder(CONFIGS[name]).float())
        with torch.no_grad():
            for parameter in model.residual.parameters():
                parameter.mul_(0.1)  # sharp weights would turn on a rounded score
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(some_tokens(), observe=totals.observe)
        summary = totals.summary()
        assert summary is not None
        found.append(torch.tensor(next(iter(summary["roles"].values()))["mean"]))
    torch.testing.assert_close(found[0], found[1], rtol=0.03, atol=0.03)
    assert not torch.equal(found[0], found[1])


def test_a_method_without_a_matrix_says_why() -> None:
    class Other(PreNormConfig):
        name = "other"

    for config, reason in (
        (MRLAConfig(head_width=4), "normalised stream"),
        (LaurelConfig(rank=3), "low-rank"),
        (Other(), "'other'"),
    ):
        assert reason in str(without_matrix(config))
        totals, tokens = MixingTotals(model := decoder(config)), some_tokens()
        assert torch.equal(model(tokens, observe=totals.observe), model(tokens))
        assert totals.summary() is None and totals.reason == without_matrix(config)
        with pytest.raises(RequestError, match=reason):
            Mixing(model)
    assert without_matrix(replace(LaurelConfig(rank=3), rank=None, weights=True)) is None


def test_every_method_of_the_registry_is_decided() -> None:
    ours = {kind for kind in METHODS.values() if kind.__module__.startswith("depthroute.residual")}
    assert ours == set(COMPOSITIONS) | set(NONE) and not set(COMPOSITIONS) & set(NONE)
    assert set(COMPOSITIONS) == {type(config) for config in CONFIGS.values()}


def hooks(model: Decoder) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_watching_leaves_no_hook_and_changes_nothing() -> None:
    tokens = some_tokens()
    for name, lasting in (("block", 0), ("normed", 1), ("skips", 1)):
        totals = MixingTotals(model := decoder(CONFIGS[name], norms="sandwich"))
        assert torch.equal(model(tokens, observe=totals.observe), model(tokens))
        assert hooks(model) == lasting
        del totals
        gc.collect()
        assert hooks(model) == 0


def test_sites_are_to_come_in_order_and_a_pass_can_start_again() -> None:
    totals, tokens = MixingTotals(model := decoder(CONFIGS["normed"])), some_tokens()
    mixing, memories = Mixing(model), []

    def stop(site: int, memory: Any) -> None:
        totals.observe(site, memory)
        memories.append(memory)
        if site == 2:
            raise KeyboardInterrupt

    with pytest.raises(RequestError, match="embedding was not seen"):
        mixing.rows(0, model.residual.open(torch.ones(1, 1, WIDTH).double()))
    with pytest.raises(KeyboardInterrupt):
        model(tokens, observe=stop)
    mixing.rows(0, memories[0])
    with pytest.raises(RequestError, match="sub-layer 0 was not seen"):
        mixing.rows(1, memories[1])
    model(tokens, observe=totals.observe)
    again = MixingTotals(model)
    model(tokens, observe=again.observe)
    found, expected = totals.summary(), again.summary()
    assert found is not None and expected is not None
    assert found["roles"]["value"]["mean"] == [pytest.approx(row) for row in expected["roles"]["value"]["mean"]]
