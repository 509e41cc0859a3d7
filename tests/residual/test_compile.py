"""Every method is one graph to the compiler, with the output and gradients that it has without.

The tracing half of the compiler is tried (`aot_eager`): that is where graphs break and mutations are sorted out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from depthroute.model import Decoder
from depthroute.residual import ResidualConfig

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it loads its compiler

Make = Callable[..., Decoder]


@pytest.fixture(autouse=True)
def forget_what_was_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_whole_model_is_one_graph(decoder: Make, tokens: Tensor, config: ResidualConfig) -> None:
    model = decoder(config)
    weights = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def gradients(forward: Callable[[Tensor], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        hidden = forward(tokens[:, :-1])
        (hidden * weights).sum().backward()
        return hidden.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected, plain = gradients(model)
    found, compiled = gradients(torch.compile(model, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert compiled.keys() == plain.keys()
    largest = 1e-2 * max(gradient.abs().max().item() for gradient in plain.values())
    for name, gradient in plain.items():
        torch.testing.assert_close(compiled[name], gradient, rtol=1e-10, atol=1e-11 * max(gradient.abs().max().item(), largest), msg=name)


@torch.no_grad()
def test_other_batches_and_lengths_take_no_other_graph(decoder: Make, config: ResidualConfig) -> None:
    model = decoder(config)
    graph = torch.compile(model, backend="eager", fullgraph=True, dynamic=True)
    for number, (batch, length) in enumerate(((2, 8), (3, 5), (4, 7))):
        tokens = torch.randint(17, (batch, length), generator=torch.Generator().manual_seed(batch))
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            found = graph(tokens)
        torch.testing.assert_close(found, model(tokens), rtol=1e-11, atol=1e-11)
