"""The comparison: the same prompts through plain transformers and through the engine, tokens compared."""

from __future__ import annotations
