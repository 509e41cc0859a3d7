"""The two forms that every study of a paper has."""

from __future__ import annotations

from typing import Literal

Form = Literal["small", "paper"]
"""`paper`: the sizes of the paper. `small`: the same arms, controls, scales and claims with every size scaled down, for two cores."""
