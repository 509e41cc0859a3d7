"""The arithmetic behind the figures, and the numbers that are printed."""

from __future__ import annotations

import math

import pytest

from depthroute.report import numbers
from depthroute.report.curve_plots import POINTS, smooth
from depthroute.report.routing_plots import average_sites
from depthroute.report.theme import PALETTE


def test_smoothing_is_a_trailing_mean_of_finite_points() -> None:
    line = [(1, 4.0), (2, math.nan), (3, 2.0), (4, 6.0), (5, 1.0)]
    assert smooth(line, 2) == [(1, 4.0), (3, 3.0), (4, 4.0), (5, 3.5)]


def test_a_long_curve_is_thinned_and_keeps_its_last_point() -> None:
    line = smooth([(step, float(step)) for step in range(1, 10_001)], 1)
    assert len(line) <= POINTS and line[-1] == (10_000, 10_000.0)


def test_weights_are_averaged_over_seeds_and_an_open_block_joins_the_closed_one() -> None:
    def run(first: float) -> dict[str, object]:
        role = {"weights": [first, 1 - first], "effective_sources": 1.0 + first}
        return {"sites": [{"site": 1, "kind": "mlp", "layer": 0, "sources": ["embedding", "block 1 so far"], "roles": {"shared": role}}]}

    (site,) = average_sites([run(0.2), run(0.6)], "shared")
    assert site.label == "0 MLP" and site.open_block == "block 1"
    assert site.weights == pytest.approx({"embedding": 0.4, "block 1": 0.6}) and site.effective == pytest.approx(1.4)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (numbers.difference(-0.01234), "\u22120.0123"),
        (numbers.difference(0.01236), "+0.0124"),
        (numbers.difference(-0.00001), "0.0000"),
        (numbers.interval([-0.03, 0.01]), "\u22120.0300\u00a0to\u00a0+0.0100"),
        (numbers.interval(None), "\u2013"),
        (numbers.percent(-0.0159), "\u22121.59\u00a0%"),
        (numbers.probability(2 / 2**5), "0.0625"),
        (numbers.count(119_791_296), "119,791,296"),
        (numbers.scaled(4_096_000, "tokens"), "4.1\u00a0million\u00a0tokens"),
        (numbers.duration(3725), "1\u00a0h\u00a02\u00a0min"),
        (numbers.mebibytes(3 * 2**20), "3\u00a0MiB"),
    ],
)
def test_numbers_are_printed_in_one_way(shown: str, expected: str) -> None:
    assert shown == expected


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_enough_in_both_schemes(scheme: int) -> None:
    """WCAG 2.2: 4.5 for text, 3 for the lines of a figure."""
    paper = luminance(PALETTE["paper"][scheme])
    for name, colors in PALETTE.items():
        if name in ("paper", "surface", "rule", "heat", "on-heat"):
            continue
        dark, light = sorted((luminance(colors[scheme]), paper))
        ratio = (light + 0.05) / (dark + 0.05)
        assert ratio >= (3.0 if name.startswith("arm-") else 4.5), f"{name}: {ratio:.2f}"
