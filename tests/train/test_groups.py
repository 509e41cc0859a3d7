"""Groups of parameters by their names: each parameter in exactly one, and what does not fit refused before work starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from depthroute.common.errors import RequestError
from depthroute.model import Decoder
from depthroute.residual import parse_residual
from depthroute.train import train
from depthroute.train.config import ParameterGroup, RunConfig
from depthroute.train.muon import Muon
from depthroute.train.optimiser import build_optimiser, decays
from tests.bodies import KIMI

BODY = {**KIMI, "layers": 3, "residual": parse_residual("rd:2")}

KIMI_GROUPS = (
    ParameterGroup(parameters="norm[.]weight", rate=4.0),  # the final one, not those whose names end so
    ParameterGroup(parameters=".*mlp[.](gate|up|down)[.]weight", optimiser="muon", rate=3.0, weight_decay=0.2),
    ParameterGroup(parameters="residual[.].*", rate=2.0, weight_decay=0.4),
    ParameterGroup(parameters="layers[.].*(query|key|value)[.]weight", optimiser="muon"),
    ParameterGroup(parameters=".*", rate=0.5),
)


def test_a_parameter_is_in_the_first_group_that_matches_its_whole_name(config: Callable[..., RunConfig]) -> None:
    settings = config(model=BODY, groups=KIMI_GROUPS, weight_decay=0.1, momentum=0.9)
    model = Decoder(settings.model)
    optimiser = build_optimiser(model, settings.train)
    found = {
        id(parameter): (type(inner), group["rate"], group["weight_decay"], group["lr"])
        for inner in optimiser.optimisers for group in inner.param_groups for parameter in group["params"]
    }
    assert len(optimiser.parameters) == len(found)
    owners = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert id(parameter) not in found
            continue
        path, _, local = name.rpartition(".")
        number = next(number for number, group in enumerate(KIMI_GROUPS) if re.fullmatch(group.parameters, name))
        kind = Muon if number in (1, 3) else torch.optim.AdamW
        rate, decay = [(4.0, 0.1), (3.0, 0.2), (2.0, 0.4), (1.0, 0.1), (0.5, 0.1)][number]
        assert found[id(parameter)] == (kind, rate, decay if decays(owners[path], local, parameter) else 0.0, 3e-3 * rate), name
    queries = [parameter for name, parameter in model.named_parameters() if name.startswith("residual.") and "query" in name]
    assert queries and all(found[id(parameter)][2] == 0.0 for parameter in queries)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_groups_that_say_what_the_fields_say_train_the_same(tmp_path: Path, config: Callable[..., RunConfig], name: str) -> None:
    model = {"residual": parse_residual("rd:2")}
    fields = {"optimiser": name, "route_rate": 2.0, **({"matrix_rate": 3.0} if name == "muon" else {})}
    groups = [ParameterGroup(parameters="residual[.].*", rate=2.0), ParameterGroup(parameters=".*")]
    if name == "muon":
        groups.insert(0, ParameterGroup(parameters="layers[.].*(attention|mlp)[.][a-z]*[.]weight", optimiser="muon", rate=3.0))
    plain = train(config(model=model, gradient_clip=None, **fields), tmp_path / "fields", console=False)
    assert train(config(model=model, gradient_clip=None, groups=tuple(groups)), tmp_path / "groups", console=False)["nll"] == plain["nll"]


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([("layers[.].*", "adamw")], r"no group of train.groups matches the parameter embedding.weight; add one, such as a last one with"),
        ([(".*", "adamw"), ("norm[.]weight", "adamw")], r"train.groups\[1\] has no parameter: .* 'norm\[.\]weight', or the groups before"),
        ([(".*router[.]bias", "adamw"), (".*", "adamw")], r"train.groups\[0\] has no parameter"),
        ([("layers[.].*", "muon"), (".*", "adamw")], r"train.groups\[0\] = 'layers\[.\].\*' gives layers.0.attention_norm.weight to Muon"),
        ([(".*conv.*", "muon"), (".*", "adamw")], r"gives layers.0.attention.query_convolution.weight to Muon"),
        ([("residual[.].*", "muon"), (".*", "adamw")], r"gives residual.* to Muon"),
        ([("embedding.*", "muon"), (".*", "adamw")], r"gives embedding.weight to Muon"),
        ([(".*router.*", "muon"), (".*", "adamw")], r"gives layers.1.mlp.router.weight to Muon"),
    ],
)
def test_groups_that_do_not_fit_are_refused_before_the_folder_is_there(
    tmp_path: Path, config: Callable[..., RunConfig], groups: list[tuple[str, str]], words: str
) -> None:
    made = tuple(ParameterGroup(parameters=parameters, optimiser=optimiser) for parameters, optimiser in groups)  # type: ignore[arg-type]
    settings = config(model=BODY, groups=made)
    with pytest.raises(RequestError, match=words):
        build_optimiser(Decoder(settings.model), settings.train)
    with pytest.raises(RequestError, match=words):
        train(settings, tmp_path / "run", console=False)
    assert not (tmp_path / "run").exists()


def test_a_part_of_a_model_need_not_have_every_group(config: Callable[..., RunConfig]) -> None:
    settings = config(model=BODY, groups=KIMI_GROUPS)
    part = nn.ModuleDict({"layers": nn.ModuleDict({"2": Decoder(settings.model).layers[2]})})
    assert len(build_optimiser([part], settings.train).parameters) == sum(parameter.requires_grad for parameter in part.parameters())
