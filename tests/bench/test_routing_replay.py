"""The routing-replay bench at a small size: its claims, not its figures."""

import pytest

from t1jax.bench import routing_replay


@pytest.fixture(scope="module")
def figures():
  return routing_replay.measure(learning_steps=12, per_family=1)


def test_replay_makes_the_learner_use_the_samplers_experts(figures):
  assert figures["agreement_on"] == 1.0
  assert figures["agreement_off"] < 1.0
  assert figures["outside_top_k"] > 0


def test_replay_narrows_the_gap_but_does_not_close_it(figures):
  assert 0 < figures["logprob_gap_on"] < figures["logprob_gap_off"]
  assert 0 < figures["k3_on"] < figures["k3_off"]


def test_routers_learn_also_from_experts_outside_their_top_k(figures):
  assert figures["router_grad_norm"] > 0
  assert figures["router_grad_norm_outside"] > 0
