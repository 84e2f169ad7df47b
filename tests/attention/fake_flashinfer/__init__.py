"""A stand-in for FlashInfer that runs on the CPU, for tests.

Names and signatures are those of flashinfer-python 0.6.13, as far as radixkv calls it. It computes in float64, and
raises `ContractError` wherever a call breaks what the package's documentation or sources ask for. Above all where the
real kernels would silently read something else: wrong integer types, page ids out of range, a plan that overwrites the
one before it on its way to the device.

    import fake_flashinfer                      # strict, in place of the package
    double = fake_flashinfer.Double(...)        # an object of its own, in place of the package
    FlashInferBackend("cpu", module=double)
"""

from __future__ import annotations

from .double import Double
from .graphs import FakeGraph, FakeGraphs
from .timeline import ContractError, FakeTransfers, Timeline

__all__ = ["ContractError", "Double", "FakeGraph", "FakeGraphs", "FakeTransfers", "Timeline"]

__version__ = Double.__version__

_default = Double()


def __getattr__(name):
    return getattr(_default, name)
