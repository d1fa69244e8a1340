"""Rewards: the verifier and the schemes that score what it read."""
