"""Puts the test kit of the plug-in on the path and keeps torch to one thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here may look for a model on the network
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch


@pytest.fixture(autouse=True)
def _steady() -> None:
    """One thread and a fixed seed: two threads spin on a shared machine and the tests gain nothing from them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
