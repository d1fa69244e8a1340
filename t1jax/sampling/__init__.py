"""Sampling: caches and the continuous-batching engine."""
