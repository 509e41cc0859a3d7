"""Reads that are multiplied by the number of their sources: with zero queries the plain stream itself."""

from __future__ import annotations

import pytest
import torch

from depthroute.model import Decoder, ModelConfig
from depthroute.residual import RMSNorm, parse_residual

FORMS = (
    "full", "block:3", "rd:3", "block:2,rank=4", "block:2,rank=4,key_norm=full", "block:2,roles=separate", "rd-average:2",
    "block:2,heads=2",
)  # fmt: skip


def built(residual: str, eps: float) -> Decoder:
    shape = {"vocabulary": 40, "width": 16, "layers": 4, "heads": 2, "mlp_width": 24, "context": 12, "norm_eps": eps}
    return Decoder(ModelConfig(**shape, residual=parse_residual(residual))).double()  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_no_epsilon_is_felt(form: str) -> None:
    """With a large one and a small stream the mean of the sources is another network; their sum is not. Gradients of the body too."""
    plain, summed, mean = built("prenorm", 1e-2), built(f"{form},sum_reads=true", 1e-2), built(form, 1e-2)
    for model in (summed, mean):
        model.load_state_dict(plain.state_dict(), strict=False)
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
    found = {}
    for name, model in (("plain", plain), ("summed", summed), ("mean", mean)):
        logits = model.logits(tokens)
        logits.logsumexp(-1).sum().backward()
        found[name] = [logits.detach(), *(p.grad for n, p in sorted(model.named_parameters()) if not n.startswith("residual."))]
    for expected, one, other in zip(found["plain"], found["summed"], found["mean"], strict=True):
        assert expected is not None and one is not None and other is not None
        assert (one - expected).abs().max() < 1e-12 * expected.abs().max()
    assert (found["mean"][0] - found["plain"][0]).abs().max() > 1e-3 * found["plain"][0].abs().max()  # type: ignore[operator,union-attr]


@pytest.mark.parametrize("form", ["block:3", "rd:3", "block:2,weighting=sigmoid"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_read_is_the_usual_one_times_its_sources(form: str, fused: bool) -> None:
    """Whether the read holds the norm or leaves it to a module with a hook."""
    one, other = (parse_residual(text).build(built("prenorm", 1e-6).config.body).double() for text in (form, f"{form},sum_reads=true"))
    with torch.no_grad():
        for parameter, same in zip(one.parameters(), other.parameters(), strict=True):
            same.copy_(parameter.normal_(0, 0.5))
    norm = RMSNorm(16, eps=0.3).double()
    if not fused:
        norm.register_forward_hook(lambda *_: None)
    memories = [method.open(torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))) for method in (one, other)]
    for site in range(8):
        plain, summed = one.read(memories[0], site), other.read(memories[1], site)
        through = other.read(memories[1], site, norm)
        count = len(one.source_names(site))
        for a, b, c in zip(*(x if isinstance(x, tuple) else (x,) for x in (plain, summed, through)), strict=True):
            torch.testing.assert_close(b, count * a, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(c, norm(count * a), rtol=1e-12, atol=1e-13)
        output = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(site))
        memories = [method.write(memory, site, output) for method, memory in zip((one, other), memories, strict=True)]


