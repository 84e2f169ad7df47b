"""The tests of the engine use the tiny models of the plug-in's test kit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may look for a model on the network
sys.path.insert(0, str(Path(__file__).parents[1] / "hf"))
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
