"""Initial values from (seed, parameter name), whatever the order in which a model was built.

Two models of a study then share every parameter they have in common, bit for bit: a difference between arms cannot come from
different random numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from depthroute.common.errors import RequestError
from depthroute.parallel.sharding import put

FALLBACK_STD = 0.02


def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of `model` in place from a generator of its own.

    A module that owns parameters says how with `initial_values(name, parameter, generator)`. Without that method, `nn.Linear` and
    `nn.Embedding` weights are normal with standard deviation 0.02, biases zero, norm weights one. A tied parameter is filled once,
    under the first of its names. The generators are CPU generators: values are drawn there, whole, whatever the device of a parameter and
    however it is sharded.

    Raises:
        RequestError: a parameter belongs to a module of which nothing says how it starts.
    """
    owners = dict(model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path, _, local = name.rpartition(".")
            here = parameter.device.type == "cpu" and not isinstance(parameter, DTensor)
            values = parameter if here else torch.empty(parameter.shape, dtype=parameter.dtype)
            _fill(owners[path], name, local, values, parameter_generator(seed, name))
            if not here:
                put(values, parameter)


def parameter_generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator of one parameter, seeded with the first 64 bits of BLAKE2b of `seed:name`."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu")
    generator.manual_seed(int.from_bytes(digest, "big"))
    return generator


def _fill(owner: nn.Module, name: str, local: str, parameter: Tensor, generator: torch.Generator) -> None:
    fill = getattr(owner, "initial_values", None)
    if fill is not None:
        fill(local, parameter, generator)
    elif isinstance(owner, nn.Linear | nn.Embedding) and local == "weight":
        parameter.normal_(0.0, FALLBACK_STD, generator=generator)
    elif isinstance(owner, nn.Linear | nn.LayerNorm) and local == "bias":
        parameter.zero_()
    elif isinstance(owner, nn.LayerNorm | nn.RMSNorm) and local == "weight":
        parameter.fill_(1.0)
    else:
        raise RequestError(
            f"nothing says how the parameter {name!r} starts: give {type(owner).__name__} a method "
            "initial_values(name, parameter, generator) that fills it in place."
        )
