"""Continuous batching: many requests at once over one model."""
