"""Query geometry against values by hand, and of a checkpoint as large as Kimi K3's from its routing tensors alone."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from depthroute.analysis.geometry import QueryGeometry, effective_dimension, joint_rank, query_geometry
from depthroute.analysis.routing_tensors import Layout, Routing, read_routing
from depthroute.cli.main import main
from depthroute.common.errors import FailureError, RequestError
from depthroute.model import Decoder, ModelConfig
from depthroute.residual import AttnResConfig
from depthroute.residual.delta import DeltaConfig
from depthroute.train import load_trained

ROOT = Path(__file__).parents[2]
K3 = json.loads((ROOT / "tests" / "golden" / "attention_residuals.json").read_text())["kimi_k3"]
TINY = 1e-23  # a float32, and a bfloat16; its square is neither


def row(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def geometry_of(path: Path, tensors: dict[str, Tensor], *, unused: bool = False) -> QueryGeometry:
    save_file(tensors, path)
    return query_geometry(read_routing(path), unused=unused)


def layered(layers: int, width: int, attention: str, output: str, prefix: str = "model.") -> dict[str, Tensor]:
    """A checkpoint in the naming of Kimi K3 or flash-linear-attention; the numbers count up by depth."""
    names = [f"layers.{layer}.{kind}" for layer in range(layers) for kind in (attention, "mlp_res")] + [output]
    tensors = {}
    for depth, name in enumerate(names):
        tensors[f"{prefix}{name}_proj.weight"] = torch.full((1, width), depth + 1.0)
        tensors[f"{prefix}{name}_norm.weight"] = torch.full((width,), -depth - 1.0)
    return tensors


def test_effective_dimension_by_hand() -> None:
    assert effective_dimension(row(2, -2, 2, 2)).item() == pytest.approx(4)
    assert effective_dimension(row(0, 7, 0)).item() == pytest.approx(1)
    assert effective_dimension(row(1, 1, math.sqrt(2))).item() == pytest.approx(2**1.5)  # energies 1/4, 1/4, 1/2
    assert effective_dimension(row(0, 0)).item() == 0
    assert effective_dimension(row(1, 1, 1) * 1e-200).item() == pytest.approx(3)  # whose squares float64 does not have
    assert effective_dimension(torch.ones(3, 2, 5)).shape == (3, 2)


def test_joint_rank_by_hand() -> None:
    rank, values, tolerance = joint_rank(torch.stack([row(3, 0, 0), row(0, 4, 0), row(3, 4, 0), row(-3, 4, 0)]))
    assert rank == 2 and values.tolist() == pytest.approx([math.sqrt(48), math.sqrt(27), 0], abs=1e-14)
    assert tolerance == pytest.approx(4 * 2**-52 * math.sqrt(48))
    assert joint_rank(torch.zeros(3, 2))[0] == 0
    assert joint_rank(torch.stack([row(1, 0), row(0, 1e-15)]))[0] == 2
    assert joint_rank(torch.stack([row(1, 0), row(0, 1e-17)]))[0] == 1


def test_products_underflow_in_float32_and_not_in_float64(tmp_path: Path) -> None:
    """Subnormal products are not zero; stored zeros are zero in both; queries without a gain do not underflow."""
    tensors = {
        "residual.sites.1.query": torch.tensor([3.0, TINY, 1e-20, 0.0, 1.0]),
        "residual.sites.1.key_gain": torch.tensor([1.0, TINY, 1e-20, 5.0, 3.0]),
        "residual.sites.2.query": torch.tensor([TINY, TINY, TINY, TINY, TINY]),
        "residual.sites.2.key_gain": torch.tensor([TINY, TINY, TINY, TINY, TINY]),
        "residual.sites.3.query": torch.tensor([TINY, 0.0, 0.0, TINY, 0.0]),
    }
    found = geometry_of(tmp_path / "a.safetensors", tensors)
    assert [(query.zeros_float32, query.zeros_float64) for query in found.queries] == [(2, 1), (5, 0), (3, 3)]
    assert [query.effective_dimension_float32 for query in found.queries] == pytest.approx([2, 0, 2])
    assert [query.effective_dimension_float64 for query in found.queries] == pytest.approx([2, 5, 2])
    assert found.total.effective_dimension_float32 == pytest.approx(4 / 3) and found.total.effective_dimension_float64 == pytest.approx(3)
    assert (found.total.zeros_float32, found.total.zeros_float64, found.total.underflows) == (10, 4, 6)
    assert found.total.width_fraction == pytest.approx(4 / 15) and found.parameters == 25
    assert [query.norm for query in found.queries[:2]] == pytest.approx([math.sqrt(18), TINY**2 * math.sqrt(5)], rel=1e-6, abs=0)


def test_spectrum_and_groups_by_hand(tmp_path: Path) -> None:
    tensors = {f"residual.sites.{site}.query": 0.1 * torch.eye(4)[site // 2] for site in range(1, 7)}  # sites 2 and 3, 4 and 5 agree
    tensors["residual.sites.6.query"] = torch.tensor([0.0, 0.0, 0.0, 1.0])
    found = geometry_of(tmp_path / "a.safetensors", tensors)
    assert found.singular_values == pytest.approx((1, math.sqrt(0.02), math.sqrt(0.02), 0.1))
    assert found.rank == 4 and (found.directions(0.9), found.directions(0.96), found.directions(0.975), found.directions(1)) == (1, 2, 3, 4)
    counts = {name: (group.queries, group.rank) for name, group in found.kinds.items()}
    assert counts == {"mlp": (3, 3), "attention": (2, 2), "output": (1, 1)}
    assert list(found.roles) == ["shared"] and found.roles["shared"] == found.total
    untrained = geometry_of(tmp_path / "b.safetensors", {name: torch.zeros(4) for name in tensors})
    assert (untrained.rank, untrained.directions(0.9), untrained.total.zeros_float64) == (0, 0, 24)


# A checkpoint of Kimi K3's size. Queries lie in the span of BASIS rows of disjoint support; of the coordinates outside, some are stored
# as zeros and in the others both factors are TINY. Gains are powers of two, so that every product is exact.
BASIS, SUPPORT = 40, 64
ZEROS = {"attention": 100, "mlp": 50, "output": 7}


def k3_query(depth: int, kind: str) -> tuple[Tensor, Tensor]:
    """The stored query [1, d] and gain [d] in bfloat16. The coefficients, one everywhere and 3 once, make J + 2I: of full rank."""
    coefficients = torch.ones(BASIS)
    coefficients[depth % BASIS] = 3
    folded = torch.cat((coefficients.repeat_interleave(SUPPORT), torch.full((K3["width"] - BASIS * SUPPORT,), TINY)))
    gain = torch.full_like(folded, 2.0 ** (depth % 7 - 3))
    gain[BASIS * SUPPORT :] = TINY
    folded[: BASIS * SUPPORT] /= gain[: BASIS * SUPPORT]
    folded[K3["width"] - ZEROS[kind] :] = 0
    if depth == 0:  # stored, never executed, and outside the span
        folded[-1], gain[-1] = 1.0, 1.0
    return folded.to(torch.bfloat16)[None], gain.to(torch.bfloat16)


def write_sparse(path: Path, tensors: dict[str, Tensor], hole: tuple[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16 tensors and of one large tensor of zeros that takes no room on the disk."""
    header, data = {}, b""
    for name, tensor in tensors.items():
        values = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    end = len(data) + 2 * math.prod(hole[1])
    header[hole[0]] = {"dtype": "BF16", "shape": list(hole[1]), "data_offsets": [len(data), end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards there are, each with a matrix of 2.3 GB beside its routing tensors; 90 shards of experts there are not."""
    folder, shards = tmp_path_factory.mktemp("k3"), [f"model-{number:05}-of-00094.safetensors" for number in range(1, 95)]
    index: dict[str, str] = {}
    for layer in range(1, K3["layers"]):
        for expert in range(896):
            for part in ("gate_proj", "up_proj", "down_proj"):
                index[f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight"] = shards[4 + layer % 90]
    contents: list[dict[str, Tensor]] = [{}, {}, {}, {}]
    attention_norm, attention, mlp_norm, mlp, output_norm, output = (K3["key_prefix"] + key for key in K3["checkpoint_keys"])
    for depth in range(K3["stored_sites"]):
        layer, last = depth // 2, depth == K3["stored_sites"] - 1
        kind = "output" if last else ("attention", "mlp")[depth % 2]
        query, gain = k3_query(depth, kind)
        names = {"output": (output, output_norm), "attention": (attention, attention_norm), "mlp": (mlp, mlp_norm)}[kind]
        for place, (name, tensor) in enumerate(zip(names, (query, gain), strict=True)):
            contents[(layer // 30 + place) % 4][name.format(i=layer)] = tensor  # a query and its gain lie in different shards
    for number, tensors in enumerate(contents):
        hole = f"language_model.model.matrix_{number}.weight"
        write_sparse(folder / shards[number], tensors, (hole, (163_840, K3["width"])))
        index |= dict.fromkeys((*tensors, hole), shards[number])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1_560_000_000_000}, "weight_map": index}))
    return folder


def k3_effective_dimension() -> float:
    total = SUPPORT * (BASIS - 1 + 9)
    return math.exp(SUPPORT * (BASIS - 1) / total * math.log(total) + SUPPORT * 9 / total * math.log(total / 9))


def test_a_checkpoint_of_k3s_size(k3: Path) -> None:
    """The counts are those of the golden file, the geometry is what was built, and files that are not routing need not exist."""
    routing = read_routing(k3)
    found = query_geometry(routing)
    assert (found.layout, found.width) == ("Kimi K3", K3["width"])
    assert (found.stored_sites, found.active_sites) == (K3["stored_sites"], K3["active_sites"]) == (187, 186)
    assert found.parameters == K3["routing_parameters"] == 2_680_832 and routing.files == 4
    assert found.total.coordinates == K3["folded_coordinates"] and found.total.queries == K3["active_sites"]
    assert found.unused == ("attention 0",) and found.rank == BASIS
    assert [query.site for query in routing.queries[:4]] == ["attention 0", "mlp 0", "attention 1", "mlp 1"]
    assert [query.site for query in routing.queries[-3:]] == ["attention 92", "mlp 92", "output"]
    counts = {"attention": 92, "mlp": 93, "output": 1}
    assert {kind: group.queries for kind, group in found.kinds.items()} == counts
    assert {kind: group.rank for kind, group in found.kinds.items()} == {"attention": 20, "mlp": 20, "output": 1}  # every other coefficient
    outside = K3["width"] - BASIS * SUPPORT
    for kind, group in found.kinds.items():
        assert group.zeros_float64 == ZEROS[kind] * counts[kind] and group.zeros_float32 == outside * counts[kind]
        assert group.underflows == (outside - ZEROS[kind]) * counts[kind]
    for query in found.queries:
        assert query.effective_dimension_float32 == pytest.approx(k3_effective_dimension())
        assert query.effective_dimension_float64 == pytest.approx(k3_effective_dimension())
    coefficients = torch.ones(186, BASIS, dtype=torch.float64)
    for place, depth in enumerate(range(1, 187)):
        coefficients[place, depth % BASIS] = 3
    assert found.singular_values[:BASIS] == pytest.approx((math.sqrt(SUPPORT) * torch.linalg.svdvals(coefficients)).tolist())
    assert max(found.singular_values[BASIS:]) < found.tolerance < 1e-8
    everything = query_geometry(routing, unused=True)
    assert everything.rank == BASIS + 1 and everything.total.queries == 187 and everything.unused == ()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say how much memory was used")
def test_k3s_size_takes_seconds_and_little_memory(k3: Path) -> None:
    """In a process of its own, imports included. The shards that are there hold 9.4 GB."""
    code = (
        "import sys\nfrom depthroute.cli.main import main\n"
        "code = main(['geometry', sys.argv[1], '--json'])\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    before = time.perf_counter()
    found = subprocess.run([sys.executable, "-c", code, str(k3)], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, kilobytes = time.perf_counter() - before, int(found.stderr)
    assert sum(file.stat().st_size for file in k3.glob("*.safetensors")) > 9e9
    assert seconds < 30 and kilobytes < 2_000_000
    facts, here = json.loads(found.stdout), query_geometry(read_routing(k3)).facts  # whose last digits depend on the number of threads
    assert facts.keys() == here.keys() and facts["singular_values"] == pytest.approx(here["singular_values"], abs=1e-9)
    assert (facts["rank"], facts["active_sites"], facts["unused"]) == (BASIS, 186, ["attention 0"])
    assert facts["total"] == pytest.approx(here["total"]) and len(facts["queries"]) == 186


def test_the_files_that_hold_routing_tensors_must_be_there(k3: Path, tmp_path: Path) -> None:
    shutil.copy(k3 / "model.safetensors.index.json", tmp_path)
    for file in sorted(k3.glob("*.safetensors"))[1:]:
        (tmp_path / file.name).symlink_to(file)  # as download caches lay them out
    with pytest.raises(FailureError, match=r"model-00001-of-00094.safetensors is missing; by the index it holds 'language_model.*'"):
        read_routing(tmp_path / "model.safetensors.index.json")


def test_flash_linear_attention(tmp_path: Path) -> None:
    """Also without a prefix. Only the head of the network has `res_proj`; that of a layer is another thing."""
    for prefix in ("model.", ""):
        tensors = layered(11, 3, "attn_res", "res", prefix)
        tensors[f"{prefix}layers.0.res_proj.weight"] = torch.ones(3, 3)
        save_file(tensors, tmp_path / "model.safetensors")
        routing = read_routing(tmp_path)
        assert routing.layout == "flash-linear-attention" and len(routing.queries) == 23
        assert [query.query[0].item() for query in routing.queries] == list(range(1, 24))  # layer 10 comes after layer 2
        assert all(torch.equal(query.query, -query.gain) for query in routing.queries if query.gain is not None)
        assert [query.site for query in routing.queries if not query.active] == ["attention 0"]
        assert routing.queries[-1].query_name == f"{prefix}res_proj.weight" and routing.queries[-1].site == "output"
    assert query_geometry(routing).rank == 1


def test_a_run_of_ours(trained_run: Path) -> None:
    """Its sites, its roles, and the vectors that the model itself routes by."""
    model = load_trained(trained_run)[1]
    routing = read_routing(trained_run)
    found = query_geometry(routing)
    names = [(query.site, query.role) for query in routing.queries]
    decoupled = [[(f"attention {layer}", "query_key"), (f"attention {layer}", "value"), (f"mlp {layer}", "shared")] for layer in (1, 2)]
    assert names == [("mlp 0", "shared"), *decoupled[0], *decoupled[1], ("output", "shared")]
    assert (found.layout, found.width, found.stored_sites, found.active_sites) == ("depthroute", 12, 6, 6)
    assert found.parameters == sum(parameter.numel() for parameter in model.residual.parameters())  # shared gains once
    own = torch.cat([model.residual.route_queries(site) for site in range(1, 7)]).detach().double()
    assert found.rank == torch.linalg.matrix_rank(own).item() > 0
    assert found.singular_values == pytest.approx(torch.linalg.svdvals(own).tolist(), rel=1e-6)
    assert {role: group.queries for role, group in found.roles.items()} == {"shared": 4, "query_key": 2, "value": 2}


@pytest.mark.parametrize(
    ("residual", "sites", "unused"),
    [
        (AttnResConfig(roles="separate", first_read=True), "a0:query a0:key a0:value m0 a1:query a1:key a1:value m1 o", ["attention 0"]),
        (AttnResConfig(rank=4, key_gain=False), "m0 a1 m1 o", []),
        (DeltaConfig(), "m0 a1 m1", []),  # the head reads the stream
    ],
    ids=["separate roles", "low rank", "delta"],
)
def test_methods_of_ours(residual: Any, sites: str, unused: list[str], tmp_path: Path) -> None:
    model = Decoder(ModelConfig(vocabulary=17, width=12, layers=2, heads=2, mlp_width=20, context=8, residual=residual))
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    routing = read_routing(tmp_path / "a.safetensors")
    short = [f"{query.site[0]}{'' if query.layer is None else query.layer}:{query.role}" for query in routing.queries]
    assert [name.removesuffix(":shared") for name in short] == sites.split()
    assert list(query_geometry(routing).unused) == unused
    assert routing.width == (4 if getattr(residual, "rank", None) else 12)


QUERIES = r"net\.(?P<kind>\w+)\.(?P<layer>\d+)\.(?P<role>\w+)\.q|net\.final\.q"
GAINS = r"net\.(?P<kind>\w+)\.(?P<layer>\d+)\.gamma|net\.final\.gamma"


def own_layout() -> dict[str, Tensor]:
    names = ["attn.0.x", "attn.0.y", "ffn.0.x", "attn.1.x", "attn.1.y", "ffn.1.x"]
    queries = {f"net.{name}.q": torch.full((2, 1), depth + 1.0) for depth, name in enumerate(names)}
    gains = {f"net.{name[:-2]}.gamma": torch.full((2,), 2.0) for name in names}
    return {**queries, **gains, "net.final.q": torch.tensor([1.0, 0.0]), "net.final.gamma": torch.tensor([1.0, 0.0])}


def test_a_pattern_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By layer and kind with roles that share a gain; by site without gains; and one read a layer."""
    file = tmp_path / "a.safetensors"
    save_file(own_layout(), file)
    routing = read_routing(file, Layout(name="pattern", query=QUERIES, gain=GAINS))
    found = [f"{query.site} {query.role}" for query in routing.queries]
    layers = [[f"attention {layer} x", f"attention {layer} y", f"mlp {layer} x"] for layer in range(2)]
    assert found == [*layers[0], *layers[1], "output shared"]
    assert [query.active for query in routing.queries] == [False, False, True, True, True, True, True] and routing.parameters == 24
    assert main(["geometry", str(file), "--query-pattern", QUERIES, "--gain-pattern", GAINS, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == json.loads(json.dumps(query_geometry(routing).facts)) and facts["rank"] == 2 and facts["unused"] == ["attention 0"]
    assert facts["queries"][-1]["zeros_float64"] == 1 and facts["total"]["zeros_float64_fraction"] == 0.1
    save_file({f"route.{site}": torch.ones(2) for site in range(5)}, file)
    routing = read_routing(file, Layout(name="pattern", query=r"route\.(?P<site>\d+)"))
    assert [query.site for query in routing.queries] == ["attention 0", "mlp 0", "attention 1", "mlp 1", "output"]
    routing = read_routing(file, Layout(name="pattern", query=r"route\.(?P<layer>[1-4])"))
    assert [query.site for query in routing.queries] == ["layer 1", "layer 2", "layer 3", "layer 4"]
    assert all(query.gain is None and query.active for query in routing.queries)


def test_the_command_in_words(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(layered(2, 4, "self_attention_res", "output_attn_res", "language_model.model."), tmp_path / "a.safetensors")
    assert main(["geometry", str(tmp_path / "a.safetensors")]) == 0
    text = capsys.readouterr().out
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in text.splitlines() if line.strip()}
    assert lines["attention"] == "1 1 4.0 (100.0%) 0.0% 0.0%" and lines["all"] == "4 1 4.0 (100.0%) 0.0% 0.0%"
    assert lines["sites"] == "5 stored, 4 active; without a choice, left out: attention 0"
    assert "joint rank       1 of 4 queries" in text and "40 routing parameters" in text and "role" not in text
    assert main(["geometry", str(tmp_path / "a.safetensors"), "--unused"]) == 0
    assert "joint rank       1 of 5 queries" in capsys.readouterr().out
    assert main(["geometry", str(trained_run)]) == 0
    assert "role query_key" in capsys.readouterr().out
    assert main(["geometry", str(trained_run), "--gain-pattern", "x"]) == 2
    assert "--gain-pattern needs --query-pattern" in capsys.readouterr().err


def k3_like(**changes: Tensor | None) -> dict[str, Tensor]:
    """A small checkpoint named like Kimi K3's with tensors changed, added or, by None, taken out; __ is a dot."""
    tensors = layered(2, 4, "self_attention_res", "output_attn_res", "")
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    return tensors


MLP, GAIN = "layers__1__mlp_res_proj__weight", "layers__1__mlp_res_norm__weight"


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        ({"embedding": torch.ones(2)}, RequestError, r"no routing tensors among its 1. .* depthroute: .*residual.*; Kimi K3: .*res_"),
        (k3_like(**{GAIN: torch.ones(3)}), RequestError, "'layers.1.mlp_res_norm.weight' has 3 numbers and its query .* has 4"),
        (k3_like(**{MLP: torch.ones(3)}), RequestError, "'layers.1.mlp_res_proj.weight' has 3 numbers and 'layers.0.self.* has 4"),
        (k3_like(**{MLP: torch.ones(4, 4)}), RequestError, r"'layers.1.mlp_res_proj.weight' is \[4, 4\]; a query or a gain is a vector"),
        (k3_like(**{MLP: torch.ones(0)}), RequestError, r"is \[0\]; a query"),
        (k3_like(**{GAIN: None}), RequestError, "'layers.1.mlp_res_proj.weight' has no gain of its key norm; it should match .*mlp"),
        (k3_like(**{MLP: None}), RequestError, "'layers.1.mlp_res_norm.weight' is the gain of a key norm without a query"),
        (k3_like(**{f"ema__{MLP}": torch.ones(4)}), RequestError, "are both a query of mlp 1; a query pattern can tell them apart"),
        (k3_like(**{f"ema__{GAIN}": torch.ones(4)}), RequestError, "are gains of the same site; a gain pattern"),
        (k3_like(**{MLP: torch.ones(4, dtype=torch.int8)}), FailureError, "is stored as int8, not as floating-point"),
        (k3_like(**{MLP: torch.tensor([1, math.nan, 1, 1])}), FailureError, "'layers.1.mlp_res_proj.weight' in .* not finite"),
        (k3_like(**{MLP: torch.full((4,), 1e38)}), FailureError, "'layers.1.mlp_res_proj.weight' times its gain overflows float32"),
        ({"residual.sites.0.query": torch.ones(2)}, RequestError, "the only query is that of attention 0"),
    ],
)
def test_checkpoints_that_are_refused(tensors: dict[str, Tensor], error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        geometry_of(tmp_path / "a.safetensors", tensors)


@pytest.mark.parametrize(
    ("query", "gain", "message"),
    [
        ("(", None, r"'\(' is not a regular expression \("),
        (r"net\..*\.q", None, r"does not say where a tensor belongs; it takes a named group, \(\?P<site>"),
        (QUERIES, r"net\.attn\.(?P<site>\d+)\.gamma", "have no named group in common"),
        (r"net\.attn\.(?P<layer>\w)\.(?P<role>\w)\.q", r"net\.attn\.(?P<layer>1)\.gamma", "'net.attn.0.x.q' has no gain"),
        (r"net\.(?P<site>\w+)\.(?P<layer>0)\.(?P<role>x)\.q", None, "has 'attn' for its site; a site is a whole number from 0"),
        (r"net\.attn\.(?P<layer>\d)\.(?P<kind>\w)\.q", None, "is of the kind 'x' by its pattern; a kind has one of these in it: out"),
        (r"other\.(?P<site>\d+)", None, r"no routing tensors among its 12. Looked for, .*: pattern: other"),
    ],
)
def test_patterns_that_are_refused(query: str, gain: str | None, message: str, tmp_path: Path) -> None:
    save_file(own_layout(), tmp_path / "a.safetensors")
    with pytest.raises(RequestError, match=message):
        read_routing(tmp_path / "a.safetensors", Layout(name="pattern", query=query, gain=gain))


def test_files_that_are_refused(tmp_path: Path, trained_run: Path) -> None:
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    with pytest.raises(RequestError, match="nothing does not exist; it takes a run folder"):
        read_routing(tmp_path / "nothing")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(RequestError, match=r"holds no safetensors\. Other formats are not read"):
        read_routing(tmp_path)
    save_file(k3_like(), file)
    whole = file.read_bytes()
    for size in (0, 5, 40, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(FailureError, match=r"model.safetensors is truncated, or not safetensors \("):
            read_routing(tmp_path)
    file.write_bytes(whole)
    shutil.copy(file, tmp_path / "again.safetensors")
    with pytest.raises(RequestError, match=r"is in .*again.safetensors and in model.safetensors; name one"):
        read_routing(tmp_path)
    assert len(read_routing(file).queries) == 5
    for weight_map in (None, [], {"a": 3}):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(FailureError, match="has no weight_map from tensors to files"):
            read_routing(tmp_path)
    for shard in ("../model.safetensors", "/model.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": shard}}))
        with pytest.raises(FailureError, match="lies outside its folder"):
            read_routing(tmp_path)
    names = {**k3_like(), MLP.replace("1", "2").replace("__", "."): None, GAIN.replace("1", "2").replace("__", "."): None}
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, file.name)}))
    with pytest.raises(FailureError, match=r"model.safetensors lacks 'layers.2.mlp_res_proj.weight', which it has by the index"):
        read_routing(tmp_path)
    index.rename(tmp_path / "a.safetensors.index.json")
    shutil.copy(tmp_path / "a.safetensors.index.json", tmp_path / "b.safetensors.index.json")
    with pytest.raises(RequestError, match=r"several indices \(a.safetensors.index.json, b.safetensors.index.json\); name one"):
        read_routing(tmp_path)
    started = tmp_path / "run"
    (started / "checkpoints").mkdir(parents=True)
    with pytest.raises(RequestError, match="run has no checkpoint yet"):
        read_routing(started)
    step = next((trained_run / "checkpoints").iterdir())  # which holds the optimiser's state of every query as well
    assert [query.query_name for query in read_routing(step).queries] == [query.query_name for query in read_routing(trained_run).queries]


def test_nothing_is_left_mapped(tmp_path: Path) -> None:
    """What was read outlives the file, and another writer may reuse it."""
    save_file(k3_like(), tmp_path / "a.safetensors")
    routing: Routing = read_routing(tmp_path / "a.safetensors")
    with (tmp_path / "a.safetensors").open("r+b") as file:
        file.write(b"\0" * (tmp_path / "a.safetensors").stat().st_size)
    assert routing.queries[-1].query.tolist() == [5.0] * 4
