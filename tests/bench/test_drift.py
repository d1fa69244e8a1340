"""The drift bench at a small size: its claims, not its figures."""

import pytest

from t1jax.bench import drift


@pytest.fixture(scope="module")
def figures():
  return drift.measure(count=10, learning_steps=12)


def test_tokens_in_tokens_out_does_not_drift(figures):
  assert figures["drift_trajectories"] >= 10 and figures["drift_positions"] > 0
  assert figures["drift_rate"] == figures["drift_rate_outside"] == 0.0


def test_text_does(figures):
  assert figures["reencoded_drift_rate"] > 0
  assert 0 < figures["reencoded_trajectories"] <= 1
