"""`depthroute methods`: the residual methods, and whether each does what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from depthroute.cli.options import read


@dataclass(frozen=True, kw_only=True)
class Options:
    """The table of residual methods; with names, all that is known of each."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Methods by name. Default: all."""
    check: bool = False
    """Build each method's degenerate case and what it should equal, and compare outputs and gradients."""
    json: bool = False
    """Print JSON."""


def main(arguments: Sequence[str]) -> None:
    options = read(Options, "methods", arguments)
    from depthroute.common.errors import FailureError, RequestError, choose
    from depthroute.report.methods import details, row, show
    from depthroute.residual import SPECIFICATIONS

    for name in options.names:
        if name not in SPECIFICATIONS:
            raise RequestError(choose("residual method", name, SPECIFICATIONS))
    chosen = [SPECIFICATIONS[name] for name in options.names or SPECIFICATIONS]
    if options.check:
        from depthroute.analysis.degenerate import verify

        found = {method.name: verify(method) for method in chosen}
        if options.json:
            print(json.dumps({name: [one.facts for one in all_of] for name, all_of in found.items()}, indent=2))
        else:
            width, says = (max(map(len, texts)) for texts in (found, [one.case.says for all_of in found.values() for one in all_of]))
            for name, all_of in found.items():
                for one in all_of:
                    verdict = "holds" if one.holds else "FAILS"
                    print(f"{verdict}  {name:<{width}}  {one.case.says:<{says}}  output {one.logits:.0e}, gradients {one.gradients:.0e}")
        failed = [name for name, all_of in found.items() if not all(one.holds for one in all_of)]
        if failed:
            raise FailureError(f"the degenerate case of {', '.join(failed)} does not hold.")
    elif options.json:
        print(json.dumps([row(method) for method in chosen], indent=2))
    elif options.names:
        print("\n".join(details(method) for method in chosen), end="")
    else:
        print(show(chosen, None if sys.stdout.isatty() else 200), end="")
