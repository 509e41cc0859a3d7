"""Lets tests import what they share: `touched`, `multiplied`, `tried`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode adds nothing by itself
