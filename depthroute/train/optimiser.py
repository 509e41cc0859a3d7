"""The optimiser of a run: AdamW, or Muon for the matrices of the body; which parameters decay, and how fast routes learn."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from depthroute.common.errors import RequestError
from depthroute.model.experts import ExpertMatrices
from depthroute.model.linear import Projection
from depthroute.parallel.sharding import by_mesh
from depthroute.train.config import ParameterGroup, TrainConfig
from depthroute.train.muon import Muon

Named = Iterable[tuple[str, nn.Parameter]]
Found = tuple[str, nn.Module, nn.Parameter]  # name, owner and parameter

STATES: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
}


class Optimiser:
    """Torch optimisers that step together, each over parameters of its own. `STATES` has what they keep for a parameter."""

    def __init__(self, *optimisers: torch.optim.Optimizer) -> None:
        self.optimisers = optimisers

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimiser in self.optimisers for group in optimiser.param_groups]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """In the order of the groups."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def step(self) -> None:
        for optimiser in self.optimisers:
            optimiser.step()

    def zero_grad(self) -> None:
        """Leave every parameter without a gradient."""
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)

    def state_tensors(self, named: Named) -> dict[str, Tensor]:
        """What there is of the state of the parameters `named`, as "NAME.key"; of one that never had a gradient there is none."""
        holders = self._holders()
        return {
            f"{name}.{key}": value
            for name, parameter in named if id(parameter) in holders
            for key, value in holders[id(parameter)].state.get(parameter, {}).items() if isinstance(value, Tensor)
        }

    def make_state(self, named: Named, keys: Collection[str]) -> dict[str, Tensor]:
        """Replace the state of the parameters `named` by zeros, to be filled in place: those of `keys` ("NAME.key") that are theirs.

        They lie as the parameter does, on its shards too. `keys` of other names are left out: other ranks may hold them.

        Raises:
            KeyError: a key that the optimiser does not keep for that parameter; its argument is the key.
        """
        holders = self._holders()
        wanted: dict[str, list[str]] = {}
        for key in keys:
            wanted.setdefault(key.rpartition(".")[0], []).append(key)
        made: dict[str, Tensor] = {}
        for name, parameter in named:
            holder = holders.get(id(parameter))
            if holder is not None:
                holder.state.pop(parameter, None)
            for key in wanted.get(name, ()):
                state = key.removeprefix(f"{name}.")
                if holder is None or state not in STATES[type(holder)]:
                    raise KeyError(key)
                made[key] = holder.state[parameter][state] = _zeros(parameter, state)
        return made

    def _holders(self) -> dict[int, torch.optim.Optimizer]:
        """The optimiser of every parameter, by its id."""
        return {
            id(parameter): optimiser for optimiser in self.optimisers for group in optimiser.param_groups for parameter in group["params"]
        }


def build_optimiser(model: nn.Module | Sequence[nn.Module], config: TrainConfig) -> Optimiser:
    """The optimiser that `config` asks for, over a model or over the parts of one that a rank holds, whose names are the whole model's.

    AdamW (Loshchilov and Hutter, 2019) is in its fused form, which the CPU and CUDA have. Muon takes the matrices of the body
    (`is_body_matrix`), and AdamW everything else; their updates are of one size, so that one learning rate serves both. With
    `config.groups` each of these says which parameters are whose.

    Raises:
        RequestError: as `check_groups`; of parts only what can be seen from the parameters that they have.
    """
    if isinstance(model, nn.Module):
        check_groups(model, config)
    found = list(_trainable(model))
    if config.groups:
        adamw, muon = [], []
        for group, own in zip(config.groups, _shared_out(found, config.groups), strict=True):
            decay = config.weight_decay if group.weight_decay is None else group.weight_decay
            if group.optimiser == "muon":
                muon += _matrices(own, decay, group.rate)
            else:
                adamw += _groups(own, decay, group.rate, group.rate)
    else:
        matrices = [entry for entry in found if config.optimiser == "muon" and is_body_matrix(*entry)]
        chosen = {id(parameter) for _, _, parameter in matrices}
        muon = _matrices(matrices, config.weight_decay, config.matrix_rate)
        adamw = _groups([entry for entry in found if id(entry[2]) not in chosen], config.weight_decay, 1.0, config.route_rate)
    optimisers: list[torch.optim.Optimizer] = []
    if adamw:
        optimisers.append(torch.optim.AdamW(adamw, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True))
    if muon:
        optimisers.append(Muon(muon, config.learning_rate, config.weight_decay, config.momentum))
    optimiser = Optimiser(*optimisers)
    set_learning_rate(optimiser, config.learning_rate)
    return optimiser


def check_groups(model: nn.Module, config: TrainConfig) -> None:
    """Refuse `config.groups` that do not fit a whole model, which may be on the meta device.

    Raises:
        RequestError: a trainable parameter is in no group, a group has none, or Muon would have one that is not the matrix of a linear map
            inside a layer.
    """
    for number, (group, own) in enumerate(zip(config.groups, _shared_out(list(_trainable(model)), config.groups), strict=True)):
        if not own:
            raise RequestError(
                f"train.groups[{number}] has no parameter: none of this model's that is trained has a name that is wholly "
                f"{group.parameters!r}, or the groups before it have them all. Change or remove it."
            )


def is_body_matrix(name: str, owner: nn.Module, parameter: nn.Parameter) -> bool:
    """Whether `parameter` is the matrix of a linear map inside a layer, or of each of its experts, which Muon is for.

    The embedding and the head are outside the layers, and so is all that the residual method adds: a row of such a matrix is a vector by
    itself, a token's or a query, and mixing the rows has no meaning. Nor has it in a router, whose rows are the experts', or in a
    convolution by channels.
    """
    return name.startswith("layers.") and (
        (isinstance(owner, Projection) and parameter.ndim == 2) or (isinstance(owner, ExpertMatrices) and parameter.ndim == 3)
    )


def decays(owner: nn.Module, local: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay applies to the parameter `local` of `owner`.

    It does to matrices, unless the module names them in `no_decay`, and to vectors that it names in `decayed`.

    Route queries and key gains are never decayed: decay pulls a query to zero, which is the plain mean of the sources, so it would be
    a bias for one arm only. A residual method that keeps several queries in one matrix lists it in `no_decay`.
    """
    return local in getattr(owner, "decayed", ()) or (parameter.ndim >= 2 and local not in getattr(owner, "no_decay", ()))


def parameter_groups(
    model: nn.Module | Sequence[nn.Module], weight_decay: float, route_rate: float = 1.0
) -> list[dict[str, Any]]:
    """Groups for a torch optimiser, each trainable parameter in exactly one: decayed, then not decayed.

    `rate` of a group is what the learning rate is multiplied by: 1, and `route_rate` for the parameters of the residual method, those
    under `residual.` of a decoder. Where that is 1 too there are two groups at most; else the two of the body, then the two of the
    residual method. Where parameters are sharded over different meshes, each group is one for every mesh. A tied parameter counts once.
    Frozen parameters (`requires_grad` false) are in none.
    """
    return _groups(_trainable(model), weight_decay, 1.0, route_rate)


def set_learning_rate(optimiser: Optimiser | torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group its share, `rate`, of the learning rate of a step."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate * group["rate"]


def _trainable(model: nn.Module | Sequence[nn.Module]) -> Iterator[Found]:
    """Each parameter once."""
    seen: set[int] = set()
    for part in [model] if isinstance(model, nn.Module) else model:
        owners = dict(part.named_modules())
        for name, parameter in part.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, owners[name.rpartition(".")[0]], parameter


def _shared_out(found: Sequence[Found], groups: Sequence[ParameterGroup]) -> list[list[Found]]:
    """What each group has of the parameters: the first that matches a name has it. RequestError where none does, or it is not for Muon."""
    shared: list[list[Found]] = [[] for _ in groups]
    for entry in found if groups else ():
        number = next((number for number, group in enumerate(groups) if re.fullmatch(group.parameters, entry[0])), None)
        if number is None:
            raise RequestError(f"no group of train.groups matches the parameter {entry[0]}; add one, such as a last one with '.*'.")
        if groups[number].optimiser == "muon" and not is_body_matrix(*entry):
            raise RequestError(
                f"train.groups[{number}] = {groups[number].parameters!r} gives {entry[0]} to Muon, which is for matrices of linear maps "
                "inside the layers alone; give it to a group of 'adamw' before that one."
            )
        shared[number].append(entry)
    return shared


def _matrices(found: Iterable[Found], weight_decay: float, rate: float) -> list[dict[str, Any]]:
    """Groups for Muon."""
    return [
        {"params": parameters, "weight_decay": weight_decay, "rate": rate} for parameters in by_mesh([entry[2] for entry in found])
    ]


def _groups(found: Iterable[Found], weight_decay: float, body_rate: float, route_rate: float) -> list[dict[str, Any]]:
    """Groups for AdamW."""
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {
        (rate, decayed): [] for rate in (body_rate, route_rate) for decayed in (True, False)
    }
    for name, owner, parameter in found:
        rate = route_rate if name.startswith("residual.") else body_rate
        groups[rate, decays(owner, name.rpartition(".")[2], parameter)].append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decayed else 0.0, "rate": rate}
        for (rate, decayed), together in groups.items() for parameters in by_mesh(together)
    ]


def _zeros(parameter: nn.Parameter, state: str) -> Tensor:
    if state == "step":  # where the fused kernel reads it; the same on every rank, so no DTensor
        return torch.zeros((), dtype=torch.float32, device=parameter.device)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format, requires_grad=False)
