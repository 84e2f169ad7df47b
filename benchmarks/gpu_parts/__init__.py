"""The phases of `gpu.py` and what they share."""
