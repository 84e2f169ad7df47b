"""Attention over the paged pool: one interface, several backends."""

from radixkv.attention.interface import AttentionBackend, AttentionBatch, AttentionSpec
from radixkv.attention.reference import ReferenceBackend

__all__ = ["AttentionBackend", "AttentionBatch", "AttentionSpec", "ReferenceBackend"]
