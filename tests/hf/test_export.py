"""An exported run loads in a fresh process, with depthroute and without, and gives the run's logits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, GenerationConfig

from depthroute.cli import export as command
from depthroute.common.errors import FailureError, RequestError
from depthroute.data import EOS, PAD, TokenDataset
from depthroute.hf import export
from depthroute.hf.export import export_hf
from depthroute.model import Decoder
from depthroute.report.model_card import method_of, model_card
from depthroute.residual import SPECIFICATIONS, AttnResConfig, PreNormConfig
from depthroute.train import load_trained
from tests.bodies import BODIES

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error", DeprecationWarning)
folder, way = sys.argv[1:]
if way == "alone":
    class Blocked:
        def find_spec(self, name, *_):
            if name.partition(".")[0] == "depthroute":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    sys.meta_path.insert(0, Blocked())
else:
    import depthroute.hf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
trusted = {"trust_remote_code": True} if way == "alone" else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **trusted)
tokenizer = AutoTokenizer.from_pretrained(folder, **trusted)
batch = tokenizer(["abcd", "abcdefgh ij"], return_tensors="pt", padding=True)
text = model.generate(**batch, max_new_tokens=5, do_sample=False)
logits = model(torch.arange(4, 16)[None]).logits
if way == "alone":  # saved again, it still needs nothing else
    import tempfile
    with tempfile.TemporaryDirectory() as again:
        model.save_pretrained(again)
        other = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True)
        assert torch.equal(other(torch.arange(4, 16)[None]).logits, logits)
loaded = {"module": type(model).__module__, "depthroute": "depthroute" in sys.modules}
print(json.dumps({"logits": logits.tolist(), "text": text.tolist(), **loaded}))
"""


@pytest.mark.parametrize("way", ["alone", "installed"])
def test_a_fresh_process_gives_the_same_logits(exported: Path, trained_run: Path, tmp_path: Path, way: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(exported), way], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["depthroute"] == (way == "installed")
    assert found["module"].startswith("transformers_modules." if way == "alone" else "depthroute.hf")
    _, decoder = load_trained(trained_run)
    expected = decoder.double().logits(torch.arange(4, 16)[None])
    torch.testing.assert_close(torch.tensor(found["logits"], dtype=torch.float64), expected, rtol=1e-12, atol=1e-12)
    assert all(len(row) > 5 for row in found["text"])


def test_the_files(exported: Path) -> None:
    assert {path.name for path in exported.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "modeling_depthroute.py", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["DepthrouteForCausalLM"] and config["model_type"] == "depthroute"
    generation = GenerationConfig.from_pretrained(exported)
    assert (generation.pad_token_id, generation.bos_token_id, generation.eos_token_id) == (PAD, EOS, EOS)
    assert str(exported.parent) not in "".join(path.read_text(encoding="utf-8") for path in exported.glob("*.json"))


@pytest.mark.parametrize("text", ["abcd  ef\n", "<eos>", "a<pad> <bos>b<unk>", "d\u00e9 \U0001f600", ""])
def test_the_tokenizer_gives_the_same_ids(exported: Path, trained_run: Path, text: str) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(exported), TokenDataset.open(trained_run.parent / "tokens").tokenizer()
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.decode([*ours.encode(text), EOS], skip_special_tokens=True) == text
    assert (theirs.pad_token_id, theirs.eos_token_id, theirs.bos_token_id) == (PAD, EOS, EOS)


def test_half_precision_is_stored_but_for_the_route_queries(trained_run: Path, tmp_path: Path) -> None:
    found = export_hf(trained_run, tmp_path / "half", dtype="bfloat16")
    assert found["logits_max_difference"] <= 1e-9 * found["logits_max"]
    stored = export_hf(trained_run, tmp_path / "whole")
    assert stored["rounding_max_difference"] == 0 < 1e-6 * found["logits_max"] < found["rounding_max_difference"]
    kinds = {name: tensor.dtype for name, tensor in load_file(tmp_path / "half" / "model.safetensors").items()}
    for name, kind in kinds.items():
        assert kind == (torch.float32 if ".residual." in name and name.endswith("query") else torch.bfloat16), name
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_weights_that_half_precision_does_not_hold(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, decoder = load_trained(trained_run)
    with torch.no_grad():
        decoder.embedding.weight.mul_(1e6)
    monkeypatch.setattr(export, "load_trained", lambda run: (config, decoder))
    with pytest.raises(RequestError, match="dtype = float16: it does not hold the weights"):
        export_hf(trained_run, tmp_path / "out", dtype="float16")
    assert not list(tmp_path.iterdir())


def test_what_is_refused(trained_run: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for run, out, words in (
        (trained_run, tmp_path / "full", "no empty folder"),
        (tmp_path / "nothing", tmp_path / "out", "not a run folder"),
    ):
        with pytest.raises(RequestError, match=words):
            export_hf(run, out)
    with pytest.raises(RequestError, match="perhaps you meant 'float16'"):
        export_hf(trained_run, tmp_path / "out", dtype="float61")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_logits_that_differ_leave_nothing_behind(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(residual: type[object]) -> str:
        return original(residual).replace("F.silu(", "F.gelu(")

    from depthroute.hf import bundle

    original = bundle.modelling_source
    monkeypatch.setattr(bundle, "modelling_source", changed)
    with pytest.raises(FailureError, match="the exported logits differ"):
        export_hf(trained_run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_tokens_that_differ_leave_nothing_behind(trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "PROBES", ("abc",))
    monkeypatch.setattr("depthroute.data.TextTokenizer.encode", lambda self, text: [9])
    with pytest.raises(FailureError, match="tokenizer gives 'abc' the ids"):
        export_hf(trained_run, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_command(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command.main(["hf", str(trained_run), str(tmp_path / "out"), "--json"])
    assert json.loads(capsys.readouterr().out)["parameters"] == 7308
    assert (tmp_path / "out" / "README.md").read_text(encoding="utf-8") == model_card(trained_run)


def test_the_card_says_what_the_run_says(trained_run: Path, exported: Path) -> None:
    card = (exported / "README.md").read_text(encoding="utf-8")
    result = json.loads((trained_run / "result.json").read_text())
    data = TokenDataset.open(trained_run.parent / "tokens")
    facts = data.manifest.splits.validation
    for words in (
        "library_name: transformers", "RD-AttnRes, Eqs. 3-5", "7,308, of which 168", data.fingerprint, f"{result['nll']:.4f}",
        f"{result['perplexity']:.2f}", f"{result['nll'] / 0.6931471805599453 * facts.tokens / facts.bytes:.4f}", "4 of 4, 256",
        "trust_remote_code=True", "import depthroute.hf",
    ):  # fmt: skip
        assert words in card, words
    assert str(trained_run.parent) not in card


def stopped(run: Path, folder: Path, step: int) -> Path:
    """The run's configuration, with a checkpoint of an earlier step of which only the state is there."""
    checkpoint = folder / "checkpoints" / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": step}))
    (folder / "config.json").write_text((run / "config.json").read_text())
    return checkpoint


def test_the_card_leaves_out_what_is_not_known(trained_run: Path, tmp_path: Path) -> None:
    stopped(trained_run, tmp_path, 3)
    card = model_card(tmp_path)
    for words in ("What was measured", "Machine", "Parameters", "metrics", "None"):
        assert words not in card
    assert "RD-AttnRes" in card and "3 of 4, 192" in card


def test_the_card_is_of_the_weights_that_are_exported(trained_run: Path, tmp_path: Path) -> None:
    """Not of an evaluation that a killed run made behind its last checkpoint."""
    checkpoint = stopped(trained_run, tmp_path, 3)
    line = json.loads((trained_run / "evaluations.jsonl").read_text().splitlines()[-1])
    found = [{**line, "step": step, "nll": 5.0 + step / 10} for step in (2, 4)]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    card = model_card(tmp_path)
    assert model_card(checkpoint) == card
    assert "after step 2, before these weights, which are those of step 3. " in card and "The training had not ended" in card
    assert "5.2000" in card and "5.4000" not in card and "3 of 4, 192" in card


def test_the_card_names_the_optimiser(trained_run: Path, tmp_path: Path) -> None:
    stopped(trained_run, tmp_path, 3)
    assert "| AdamW, betas 0.9 and 0.95, eps 1e-08, weight decay 0.1 |" in model_card(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["train"] |= {"optimiser": "muon", "matrix_rate": 2.0, "route_rate": 3.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    card = model_card(tmp_path)
    assert "| Muon, momentum 0.95, for the matrices of the layers; for the rest AdamW, betas 0.9 and 0.95, eps 1e-08" in card
    assert "; times 3 for the residual method; times 2 for the matrices of the layers |" in card


def test_the_card_of_an_adopted_checkpoint(trained_run: Path, tmp_path: Path) -> None:
    stopped(trained_run, tmp_path, 3)
    source = {"architectures": ["LlamaForCausalLM"], "folder": "/x"}
    (tmp_path / "adoption.json").write_text(json.dumps({"layout": "Llama", "source": source}))
    card = model_card(tmp_path)
    assert "a checkpoint of LlamaForCausalLM" in card and "## How it was trained on" in card and "/x" not in card
    assert "licence and limits apply; the steps above came after" in card and "nothing else" not in card


def test_the_row_of_every_method_is_found() -> None:
    for name, method in SPECIFICATIONS.items():
        found = method_of(method.configure(AttnResConfig(block=2, rank=4 if name == "low-rank" else None)))
        assert found is not None
        same = [one.configure(AttnResConfig(block=2)) for one in (found, method)]  # some names are settings of others
        assert found.name == name or same[0] == same[1]
    assert method_of(AttnResConfig(block=2, sum_reads=True)) is SPECIFICATIONS["block"]
    assert method_of(PreNormConfig()) is SPECIFICATIONS["prenorm"]


def test_a_model_of_packed_documents_is_exported_as_one_of_single_documents(decoder: Callable[..., Decoder], tmp_path: Path) -> None:
    ours = decoder("block:2", document_end=4)
    model = export.around(ours)
    assert model.config.decoder_config().document_end is None and ours.config.document_end == 4
    model.save_pretrained(tmp_path)
    tokens = export._one_document(ours.config, torch.Generator().manual_seed(0))
    assert 4 not in tokens and 5 in tokens
    assert export._verified(ours, tmp_path, tokens)["logits_max_difference"] < 1e-9
    with pytest.raises(FailureError, match="the exported logits differ"):
        export._verified(ours, tmp_path, tokens.masked_fill(tokens == 5, 4))


def test_a_run_that_transformers_does_not_serve_is_refused(
    trained_run: Path, decoder: Callable[..., Decoder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = load_trained(trained_run)
    monkeypatch.setattr(export, "load_trained", lambda run: (config, decoder("block:2", **BODIES["kimi"])))
    with pytest.raises(RequestError, match=r"model\.mixers = \['kda', 'mla'\]: a model of transformers has softmax attention"):
        export_hf(trained_run, tmp_path / "out")
    assert not list(tmp_path.iterdir())
