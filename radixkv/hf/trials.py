"""Trials of a model: whether another way to run it gives the logits of its plain forwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from radixkv.core.errors import UnsupportedModelError, is_out_of_memory
from radixkv.hf.own_forward import own_forward
from radixkv.hf.support import quiet_eval, tolerance

__all__ = ["ModelTrials"]


class ModelTrials:
    """What trials have in common, however the model is run in them. Nothing of the model stays changed.

    Args:
        model: The causal LM.
        device: Where it is.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self._model = model
        self._name = type(model).__name__
        self._forked = [device] if device.type == "cuda" else []

    def require_interface(self) -> None:
        """Make sure that the model says to compute its attention by transformers' `AttentionInterface`.

        Raises:
            UnsupportedModelError: It says not to.
        """
        can_set = getattr(type(self._model), "_can_set_attn_implementation", None)
        if can_set is not None and not can_set():
            raise UnsupportedModelError(f"{self._name} does not use transformers' AttentionInterface")

    def compare(self, expected: Tensor, got: Tensor, when: str) -> None:
        """Make sure that logits are equal up to rounding in the dtype of the model.

        Args:
            expected: Of a plain forward.
            got: The same shape.
            when: Under what circumstances they were had, for the message.

        Raises:
            UnsupportedModelError: They differ.
        """
        expected, got = expected.cpu().double(), got.cpu().double()
        spread = float((expected - expected.mean()).norm()) or 1.0
        share = float((expected - got).norm()) / spread
        if not share < tolerance(next(self._model.parameters())):
            raise UnsupportedModelError(
                f"{self._name} gives other logits {when} (relative difference {share:.2g})"
            )

    def undisturbed(self, trial: Callable[[], None], what: str) -> None:
        """Make a trial in evaluation mode, without gradients and with random numbers as before.

        Raises:
            UnsupportedModelError: Whatever else the trial raises is a verdict.
            MemoryError: Or another error that says that memory ran out, which is none.
        """
        try:
            with torch.random.fork_rng(devices=self._forked), torch.no_grad(), quiet_eval(self._model):
                own_forward(trial)
        except UnsupportedModelError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            why = str(error) or type(error).__name__
            raise UnsupportedModelError(f"{self._name} failed in {what}: {why}") from error
