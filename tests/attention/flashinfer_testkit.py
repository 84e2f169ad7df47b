"""The FlashInfer backend over a stand-in for the package, for tests on the CPU."""

from __future__ import annotations

from radixkv.attention.flashinfer_backend import FlashInferBackend
from radixkv.attention.flashinfer_plan import FlashInferCosts
from tests.attention.fake_flashinfer import Double

# Shared parts always, never, or where they save something; decodes apart from prompts always or never.
OVER_DOUBLE_COSTS = [
    None,
    FlashInferCosts(launch_bytes=-(10**9), split_bytes=0),
    FlashInferCosts(launch_bytes=-(10**9), split_bytes=10**12),
    FlashInferCosts(launch_bytes=300, split_bytes=500),
    FlashInferCosts(launch_bytes=3000, split_bytes=0),
    FlashInferCosts(cascade=False, split_bytes=0),
]


def over_double(device="cpu", *, double=None, costs=OVER_DOUBLE_COSTS[1], **options):
    """A backend over a double of its own; unless told otherwise it takes any head size and dtype, and shares."""
    options.setdefault("workspace_bytes", 1 << 16)  # memory that is cleared at first: tests need none
    return FlashInferBackend(device, module=double or Double.relaxed(), costs=costs, **options)
