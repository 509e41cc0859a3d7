"""Small random models of transformers, saved as a Hugging Face folder, and what they compute in float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2, "rms_norm_eps": 1e-3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
# Every setting that the readers know is somewhere not what it usually is.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied, biases, llama3 rope": ("Llama", {
        "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, "num_key_value_heads": 1,
    }),
    "llama, linear rope, eps 0.1": ("Llama", {
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 300.0}, "rms_norm_eps": 0.1, "head_dim": 6,
    }),
    "mistral, window 5": ("Mistral", {"sliding_window": 5, "head_dim": 16}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2, window 5 from layer 1, tied": ("Qwen2", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "tie_word_embeddings": True,
    }),
    "qwen2, its window is null": ("Qwen2", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
    "qwen3, biases": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
    "qwen3, window in one layer": ("Qwen3", {
        "head_dim": 8, "use_sliding_window": True, "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }),
}  # fmt: skip


def public_model(name: str, folder: Path, *, dtype: torch.dtype = torch.float32, shard: str | None = None, **changes: Any) -> nn.Module:
    """Make the model of a shape with gains and biases that matter, save it in `folder`, and return it."""
    import transformers

    family, settings = SHAPES[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings, **changes})
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("norm.weight", "bias")):
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.to(dtype).save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))  # type: ignore[operator]
    return model.eval()


def exact(model: nn.Module) -> nn.Module:
    """The model in float64, its norms too, which transformers computes in float32 whatever the model is in."""
    for module in model.double().modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = _norm_of(module)  # type: ignore[method-assign]
    return model


def _norm_of(module: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        return module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))  # type: ignore[operator]

    return forward


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


def ids(rows: int = 3, length: int = 24, vocabulary: int = 64) -> Tensor:
    return torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(5))


def change_config(folder: Path, **changes: Any) -> None:
    """Set fields of config.json; None stays null."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Set tensors of model.safetensors by name, or remove them."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
