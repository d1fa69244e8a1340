"""Reinforcement learning: batching, advantages, losses, learner."""
