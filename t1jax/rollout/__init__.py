"""Rollout: chat template, harness, trajectories and collection."""
