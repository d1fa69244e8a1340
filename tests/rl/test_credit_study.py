"""Credit that reaches the first action, and what lambda trades."""

import dataclasses

import numpy as np
import pytest

from t1jax.rl import credit, credit_study
from t1jax.rl.settings import RLConfig

GAMMA, LAMBDA = 0.9, 0.8
RL = RLConfig(
  buckets=(64,), token_budget=256, gamma_turn=GAMMA, lambda_turn=LAMBDA,
  gamma_token=GAMMA, lambda_token=LAMBDA, max_turns=4,
)  # fmt: skip


def test_a_made_up_episode_has_the_lengths_asked_for():
  made = credit_study.made_up_episode(3, 4, 5, prompt=2)
  assert [
    (turn, sampled, part.stop - part.start)
    for turn, sampled, part in made.segments()
  ] == [
    (-1, False, 2), (0, True, 4), (0, False, 5), (1, True, 4), (1, False, 5),
    (2, True, 4),
  ]  # fmt: skip


@pytest.mark.parametrize(
  ("estimator", "ticks"),
  [
    ("tb_gae", lambda n, a, o: n - 1),
    ("token_clock_actions", lambda n, a, o: n * a - 1),
    ("token_clock_all", lambda n, a, o: n * a + (n - 1) * o - 1),
  ],
)
def test_credit_decays_by_the_ticks_of_the_clock(estimator, ticks):
  lengths = [(1, 2, 0), (3, 1, 4), (4, 2, 5), (2, 9, 1)]
  got = credit_study.first_action_credit(
    [credit_study.made_up_episode(*each) for each in lengths],
    dataclasses.replace(RL, advantage=estimator),
  )
  expected = [(GAMMA * LAMBDA) ** ticks(*each) for each in lengths]
  np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_what_an_episode_earned_does_not_matter(make_trajectories):
  trajectories = make_trajectories(0, 5)
  got = credit_study.first_action_credit(trajectories, RL)
  crossed = np.array([t.num_turns - 1 for t in trajectories])
  np.testing.assert_allclose(got, (GAMMA * LAMBDA) ** crossed, rtol=1e-4)


def test_lambda_trades_bias_for_variance(make_trajectory):
  """A critic that says 0.7 everywhere, rewards of 0 and 1 after three turns."""
  rng = np.random.default_rng(0)
  rl = dataclasses.replace(RL, gamma_turn=1.0)
  played = [
    make_trajectory(rng, [(2, 1)] * 3, reward=reward)
    for reward in (0.0, 0.0, 0.0, 1.0)
  ]
  values = {i: np.full(len(t), 0.7, np.float32) for i, t in enumerate(played)}
  found = credit_study.tradeoff(played, values, rl, (0.0, 0.5, 1.0))
  # The first turn's return is V of the next turn for all but lambda^2.
  mixed = 1 - np.array([0.0, 0.5, 1.0]) ** 2
  np.testing.assert_allclose(found.bias_M, mixed * (0.7 - 0.25), atol=1e-6)
  spread = np.std([0.7 - 0.0] * 3 + [0.7 - 1.0], ddof=1) / 2
  np.testing.assert_allclose(found.error_M, mixed * spread, atol=1e-6)
  assert found.variance_M[-1] == found.variance_M.max()
  _, returns = credit.estimate(played, values, rl, lam=1.0)
  whole = credit.at_actions(returns, played) - 0.7
  assert found.variance_M[-1] == pytest.approx(whole.var(), abs=1e-6)


def test_episodes_without_values_are_left_out(make_trajectories):
  played = make_trajectories(1, 4)
  values = {i: np.zeros(len(t), np.float32) for i, t in enumerate(played)}
  some = {i: values[i] for i in (0, 2)}
  alone = credit_study.tradeoff(
    [played[0], played[2]], {0: values[0], 1: values[2]}, RL, (0.5,)
  )
  found = credit_study.tradeoff(played, some, RL, (0.5,))
  np.testing.assert_allclose(found.bias_M, alone.bias_M)
  np.testing.assert_allclose(found.variance_M, alone.variance_M)
