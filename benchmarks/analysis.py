"""Looking inside models: what analysis adds to evaluation, query geometry of a K3-size checkpoint, and exact conversion of shape S.

The run that is analysed and converted is shape S with role-decoupled routes, trained for a few steps on the default corpus. Seconds and
gigabytes are those that a person waits for and a machine needs, on two cores.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.rows import Row, finish, interleaved, parser, ratios
from depthroute.analysis.analyse import streamed
from depthroute.convert import convert_low_rank
from depthroute.data import PrepareConfig, TokenDataset, evaluation_windows, prepare
from depthroute.model import Decoder
from depthroute.recipes import recipe, run_of
from depthroute.train import load_trained, train
from depthroute.train.devices import autocast, keep_freed_memory

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "train.steps": "3", "train.sequences": "2", "train.microbatch": "2", "train.evaluation_tokens": "2048", "train.milestones": "[3]",
    "train.warmup_fraction": "0", "train.learning_rate": "1e-3",
}  # fmt: skip
K3_LAYERS, K3_WIDTH = 93, 7_168


def trained(place: Path) -> Path:
    """Shape S after three steps; its shards lie beside it."""
    data, run = place / "data", place / "run"
    vocabulary = recipe("rd-s").resolve().vocabulary
    prepare(PrepareConfig(vocabulary=vocabulary), data, report=lambda line: print(line, file=sys.stderr))
    train(run_of(recipe("rd-s"), data, residual="rd", settings=SETTINGS), run, console=False)
    return run


def analysis_rows(run: Path, tokens: int, repeats: int) -> list[Row]:
    """The streaming pass of `depthroute analyse` against the evaluation of the same tokens."""
    config, model = load_trained(run)
    model.eval()
    held_out = TokenDataset.open(Path(config.data)).held_out(limit=tokens).tokens
    batches = [torch.from_numpy(one) for one in evaluation_windows(held_out, config.model.context, sequences=2)]

    @torch.no_grad()
    def evaluate() -> None:
        for batch in batches:
            with autocast("cpu", config.train.precision):
                model.token_nll(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

    seconds = interleaved(
        {"evaluation": evaluate, "analysis": lambda: streamed(config, model, iter(batches), {})}, repeats=repeats, warm_up=1
    )  # fmt: skip
    lowest, median = ratios(seconds, "analysis", "evaluation")
    return [
        Row("analysis of shape S over its evaluation (minima)", lowest, 1.10, unit="x"),
        Row("analysis of shape S over its evaluation (median of pairs)", median, unit="x"),
    ]


def k3_checkpoint(folder: Path) -> None:
    """Routing tensors with the names and shapes of Kimi K3's, in bfloat16, and an index that also lists a shard that is not there."""
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(0)
    names = [f"language_model.model.layers.{layer}.{kind}_res" for layer in range(K3_LAYERS) for kind in ("self_attention", "mlp")]
    names.append("language_model.model.output_attn_res")
    tensors = {}
    for name in names:
        tensors[f"{name}_norm.weight"] = torch.randn(K3_WIDTH, generator=generator).bfloat16()
        tensors[f"{name}_proj.weight"] = torch.randn(1, K3_WIDTH, generator=generator).bfloat16()
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    listed = dict.fromkeys(tensors, "model-00001-of-00002.safetensors")
    listed["language_model.model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))


def geometry_rows(place: Path) -> list[Row]:
    k3_checkpoint(place / "k3")
    started = time.perf_counter()
    command = [sys.executable, "-m", "depthroute", "geometry", str(place / "k3"), "--json"]
    found = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    seconds = time.perf_counter() - started
    gigabytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    assert (found["active_sites"], found["parameters"]) == (2 * K3_LAYERS, 2_680_832), found["active_sites"]
    return [
        Row("query geometry of a K3-size checkpoint", seconds, 30.0, unit=" s"),
        Row("its memory", gigabytes, 2.0, unit=" GB"),
    ]


def conversion_rows(run: Path, place: Path, repeats: int) -> list[Row]:
    started = time.perf_counter()
    first = convert_low_rank(run, place / "low-rank")
    seconds = time.perf_counter() - started
    again = convert_low_rank(place / "low-rank", place / "again")
    models = {name: load_trained(folder)[1].eval() for name, folder in (("original", run), ("low-rank", place / "low-rank"))}
    outputs = torch.randn(models["original"].config.body.sublayers, 2, models["original"].config.context, models["original"].config.width)

    @torch.no_grad()
    def read_all(model: Decoder) -> None:
        """Every read of a pass, with the norm behind it, over outputs that are there already."""
        memory = model.residual.open(outputs[0])
        for site, output in enumerate(outputs):
            model.residual.read(memory, site, model.norm)
            memory = model.residual.write(memory, site, output)
        model.residual.close(memory, model.norm)

    pairs = interleaved({name: lambda model=model: read_all(model) for name, model in models.items()}, repeats=10 * repeats)
    return [
        Row("conversion of shape S to low-rank keys", seconds, 60.0, unit=" s"),
        Row("its largest difference of float64 logits", first["float64"]["logits_max_difference"], 1e-12),
        Row("that of converting once more", again["float64"]["logits_max_difference"], 1e-12),
        Row("rank the second time over the first", again["rank"] / first["rank"], 1.0, unit="x"),
        Row("loss after conversion (nats, absolute change)", abs(first["cross_entropy"]["difference"]), 8.9e-5),
        Row("reads with low-rank keys over the original's (minima)", ratios(pairs, "low-rank", "original")[0], 1.0, unit="x"),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=4_096, help="that analysis and evaluation are compared on")
    options.add_argument("--repeats", type=int, default=3)
    given = options.parse_args()
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        rows = geometry_rows(place)
        run = trained(place)
        rows += analysis_rows(run, given.tokens, given.repeats)
        rows += conversion_rows(run, place, given.repeats)
    finish(rows, given)


if __name__ == "__main__":
    main()
