"""Depth routing in a model of your own: fifteen lines around the sub-layers you already have.

Run it: .venv/bin/python examples/own_model.py
"""

import torch
from torch import nn

from depthroute.residual import Body, parse_residual


class MyTransformer(nn.Module):
    """Any pre-norm sub-layers will do; here a causal convolution and an MLP."""

    def __init__(self, width: int = 64, layers: int = 6, residual: str = "block:4") -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.sublayers = nn.ModuleList(self.mixer(width) if i % 2 == 0 else self.mlp(width) for i in range(2 * layers))
        body = Body(width=width, layers=layers, attention_activation=width, mlp_activation=4 * width)
        self.residual = parse_residual(residual).build(body)  # owns every parameter that routing adds
        self.norm = nn.RMSNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        memory = self.residual.open(self.embed(tokens))
        for site, sublayer in enumerate(self.sublayers):
            memory = self.residual.write(memory, site, sublayer(self.residual.read(memory, site)))
        return self.norm(self.residual.close(memory)) @ self.embed.weight.T

    @staticmethod
    def mixer(width: int) -> nn.Module:
        return nn.Sequential(nn.RMSNorm(width), CausalConvolution(width))

    @staticmethod
    def mlp(width: int) -> nn.Module:
        return nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class CausalConvolution(nn.Conv1d):
    def __init__(self, width: int, kernel: int = 8) -> None:
        super().__init__(width, width, kernel, padding=kernel - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)


def main() -> None:
    torch.manual_seed(0)
    text = torch.tensor(list(__doc__.encode() * 40))
    for residual in ("prenorm", "block:4", "full"):
        torch.manual_seed(0)
        model = MyTransformer(residual=residual)
        routing = {id(parameter) for parameter in model.residual.parameters()}
        optimiser = torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if id(p) not in routing]},
                {"params": list(model.residual.parameters()), "weight_decay": 0.0},  # route queries are never decayed
            ],
            lr=2e-3,
        )
        for _ in range(60):
            starts = torch.randint(0, len(text) - 65, (16,))
            batch = torch.stack([text[start : start + 65] for start in starts])
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        print(f"{residual:<8} {loss.item():.3f} nats per byte")


if __name__ == "__main__":
    main()
