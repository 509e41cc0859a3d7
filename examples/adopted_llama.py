"""A Llama of transformers is given Attention Residuals without changing a logit, trained on with a rate for the routing, and decoded.

Needs `pip install depthroute[hf]`. The checkpoint is made on the spot; a real one is a folder with config.json and safetensors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from depthroute.convert import adopt_checkpoint, adopted_routing
from depthroute.infer import Sampling, generate
from depthroute.train import load_trained
from depthroute.train.optimiser import parameter_groups, set_learning_rate


def main() -> None:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        source, run = Path(folder, "llama"), Path(folder, "routed")
        shape = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
        LlamaForCausalLM(shape).save_pretrained(source)
        found = adopt_checkpoint(source, run, residual=adopted_routing("block:2"))["float64"]
        print(f"logits of the routed model differ by {found['logits_max_difference']:.0e} of {found['logits_max']:.1f}")
        _, model = load_trained(run)

    optimiser = torch.optim.AdamW(parameter_groups(model, weight_decay=0.1, route_rate=100.0), lr=1e-4)
    set_learning_rate(optimiser, 1e-4)
    text = torch.arange(256).remainder(13).view(4, 64)
    for _ in range(20):
        sums = model.loss(text[:, :-1], text[:, 1:])
        (sums.objective / sums.tokens).backward()
        optimiser.step()
        optimiser.zero_grad()
    print(f"loss after 20 steps: {sums.nll.item() / sums.tokens:.2f} nats")
    moved = max(site.query.abs().max().item() for site in model.residual.sites.values())
    print(f"route queries have moved from zero to {moved:.3f}")
    print(generate(model, [[1, 2, 3]], limit=8, sampling=Sampling(temperature=0.0))[0].ids)


if __name__ == "__main__":
    main()
