"""Credit over a rollout batch: estimators by name, whitening."""

import dataclasses

import numpy as np
import pytest

from t1jax.bench.tb_gae import recursion_by_token
from t1jax.rl import batching, credit
from t1jax.rl.settings import RLConfig

RL = RLConfig(
  buckets=(16, 32), token_budget=64, gamma_turn=0.9, lambda_turn=0.8,
  gamma_token=0.9, lambda_token=0.8, max_turns=4,
)  # fmt: skip


@pytest.fixture(scope="module")
def rollouts(make_trajectories):
  trajectories = make_trajectories(0, 9)
  rng = np.random.default_rng(1)
  values = {
    i: rng.normal(size=len(t)).astype(np.float32)
    for i, t in enumerate(trajectories)
  }
  return trajectories, values


def _expected(trajectory, values, turn_ids, steps):
  found = recursion_by_token(
    batching.terminal_rewards(trajectory), values, turn_ids, steps, 0.9, 0.8
  )[0]
  return np.where(trajectory.loss_mask, found, 0.0)


def test_every_trajectory_gets_its_own_recursion(rollouts):
  trajectories, values = rollouts
  advantages, returns = credit.estimate(trajectories, values, RL)
  assert sorted(advantages) == list(range(len(trajectories)))
  for index, t in enumerate(trajectories):
    expected = _expected(t, values[index], t.turn_ids, t.loss_mask)
    np.testing.assert_allclose(advantages[index], expected, atol=1e-5)
    np.testing.assert_allclose(
      returns[index],
      expected + np.where(t.loss_mask, values[index], 0.0),
      atol=1e-5,
    )


@pytest.mark.parametrize("name", ["token_clock_actions", "token_clock_all"])
def test_token_clocks(rollouts, name):
  trajectories, values = rollouts
  rl = dataclasses.replace(RL, advantage=name)
  advantages, _ = credit.estimate(trajectories, values, rl)
  for index, t in enumerate(trajectories):
    steps = t.loss_mask
    if name == "token_clock_all":
      steps = np.arange(len(t)) <= np.flatnonzero(t.loss_mask)[-1]
    # Every token is a turn of its own: each step ticks.
    expected = _expected(t, values[index], np.arange(len(t)), steps)
    np.testing.assert_allclose(advantages[index], expected, atol=1e-5)


def test_too_many_turns_says_what_to_raise(rollouts):
  trajectories, values = rollouts
  rl = dataclasses.replace(RL, max_turns=1)
  with pytest.raises(credit.CreditError, match="Raise max_turns"):
    credit.estimate(trajectories, values, rl)


def test_whitening_is_global(rollouts):
  trajectories, values = rollouts
  advantages, _ = credit.estimate(trajectories, values, RL)
  white = credit.whiten(advantages, trajectories)
  flat = credit.at_actions(white, trajectories)
  assert flat.mean() == pytest.approx(0.0, abs=1e-6)
  assert flat.std() == pytest.approx(1.0, abs=1e-5)
  order = credit.at_actions(advantages, trajectories)
  np.testing.assert_allclose(
    flat, (order - order.mean()) / order.std(), atol=1e-5
  )


def test_whitening_one_token_is_zero(make_trajectory):
  one = make_trajectory(np.random.default_rng(0), ((1, 0),))
  white = credit.whiten({0: np.full(len(one), 3.0, np.float32)}, [one])
  np.testing.assert_array_equal(white[0], np.zeros(len(one)))
