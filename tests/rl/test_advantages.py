"""TB-GAE: by hand, against the float64 recursion, and its identities."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.bench import tb_gae as bench
from t1jax.rl import advantages

MAX_TURNS = 8
LENGTH = 96


@functools.partial(jax.jit, static_argnames=("which",))
def _run(stream, gamma, lam, bootstrap=0.0, *, which="tb_gae"):
  clock = dict(gamma_turn=gamma, lambda_turn=lam, bootstrap=bootstrap)
  if which == "tb_gae":
    return advantages.tb_gae(*stream, **clock, num_turns=MAX_TURNS)
  return advantages.token_gae(*stream, **clock)


def _stream(rewards, values, turn_ids, mask):
  return (
    jnp.asarray(rewards, jnp.float32),
    jnp.asarray(values, jnp.float32),
    jnp.asarray(turn_ids, jnp.int32),
    jnp.asarray(mask, bool),
  )


def _draw(seed, *, dense=True):
  """Any order of actions and observations, empty turns, padding at the end."""
  rng = np.random.default_rng(seed)
  real = int(rng.integers(1, LENGTH + 1))
  ids = np.sort(rng.integers(-1, MAX_TURNS, real))
  mask = (rng.random(real) < rng.random()) & (ids >= 0)
  rewards = rng.normal(size=real) * (rng.random(real) < (1 if dense else 0.1))
  pad = LENGTH - real
  return _stream(
    np.pad(rewards, (0, pad)),
    np.pad(rng.normal(size=real), (0, pad), constant_values=99.0),
    np.pad(ids, (0, pad), constant_values=MAX_TURNS),
    np.pad(mask, (0, pad)),
  )


# Two turns with an observation between: action tokens at 1, 2 and 4.
HAND = _stream(
  rewards=[0, 0, 1, 0, 2],
  values=[9, 1, 2, 9, 3],
  turn_ids=[-1, 0, 0, 0, 1],
  mask=[0, 1, 1, 0, 1],
)


@pytest.mark.parametrize("which", ["tb_gae", "token_gae"])
def test_by_hand(which):
  # g = l = 1 inside turn 0; at its end g = 0.5, l = 0.5.
  #   A4 = 2 - 3 = -1
  #   A2 = 1 + 0.5 * 3 - 2 + 0.25 * -1 = 0.25
  #   A1 = 0 + 2 - 1 + 0.25 = 1.25
  found, returns = _run(HAND, 0.5, 0.5, which=which)
  np.testing.assert_allclose(found, [0, 1.25, 0.25, 0, -1], atol=1e-6)
  np.testing.assert_allclose(returns, [0, 2.25, 2.25, 0, 2], atol=1e-6)


@pytest.mark.parametrize("which", ["tb_gae", "token_gae"])
def test_bootstrap_by_hand(which):
  # A4 = 2 + 0.5 * 4 - 3 = 1, then as above with +1 in place of -1.
  found, _ = _run(HAND, 0.5, 0.5, 4.0, which=which)
  np.testing.assert_allclose(found, [0, 1.75, 0.75, 0, 1], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 1))
def test_equals_the_float64_recursion(seed, gamma, lam):
  stream = _draw(seed)
  expected = bench.recursion_by_token(*map(np.asarray, stream), gamma, lam)
  scale = max(1.0, np.abs(expected[1]).max())
  for which in ("tb_gae", "token_gae"):
    for found, wanted in zip(
      _run(stream, gamma, lam, which=which), expected, strict=True
    ):
      assert np.abs(np.asarray(found) - wanted).max() / scale <= 1e-5, which


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_without_discount_it_is_plain_gae(seed):
  stream = _draw(seed)
  rewards, values, _, mask = stream
  plain = advantages.gae(rewards, values, mask, gamma=1.0, lam=1.0)
  chex.assert_trees_all_close(_run(stream, 1.0, 1.0), plain, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1), st.floats(0.1, 1))
def test_credit_decays_by_boundaries_alone(seed, gamma, lam):
  _, _, turn_ids, mask = _draw(seed)
  actions = np.flatnonzero(mask)
  if not actions.size:
    return
  rewards = np.zeros(LENGTH)
  rewards[actions[-1]] = 1.0
  stream = _stream(rewards, np.zeros(LENGTH), turn_ids, mask)
  turns = np.asarray(turn_ids)[actions]
  boundaries = np.append(np.cumsum(np.diff(turns)[::-1] > 0)[::-1], 0)
  found, _ = _run(stream, gamma, lam)
  np.testing.assert_allclose(
    np.asarray(found)[actions], (gamma * lam) ** boundaries, rtol=1e-5
  )


def test_observations_change_nothing():
  rng = np.random.default_rng(0)
  short = bench.make_stream(rng, LENGTH // 2, 6)
  long = bench.insert_observations(short, rng, LENGTH // 2)
  rest = LENGTH - LENGTH // 2
  padded = [
    np.pad(x, (0, rest), constant_values=fill)
    for x, fill in zip(short, (0, 0, MAX_TURNS, False), strict=True)
  ]
  few = _run(_stream(*padded), 0.9, 0.8)
  many = _run(_stream(*long), 0.9, 0.8)
  for a, b in zip(few, many, strict=True):
    np.testing.assert_allclose(a[padded[3]], b[long[3]], atol=1e-6)


def test_token_clock_over_all_tokens_feels_the_length_of_logs():
  # The fault P1, kept as an ablation: the same turn behind a longer log.
  def credit_of_first_action(log_length, mask_of):
    mask = np.asarray([1] + [0] * log_length + [1], bool)
    rewards = np.zeros(len(mask), np.float32)
    rewards[-1] = 1.0
    found, _ = advantages.gae(
      jnp.asarray(rewards),
      jnp.zeros(len(mask)),
      mask_of(jnp.asarray(mask)),
      gamma=0.9,
      lam=1.0,
    )
    return float(found[0])

  everything = advantages.through_last_action
  assert credit_of_first_action(3, everything) == pytest.approx(0.9**4)
  assert credit_of_first_action(9, everything) == pytest.approx(0.9**10)
  assert credit_of_first_action(9, lambda m: m) == pytest.approx(0.9)


def test_gae_by_hand():
  found, returns = advantages.gae(
    jnp.asarray([0.0, 1.0]),
    jnp.asarray([0.5, 0.25]),
    jnp.asarray([True, True]),
    gamma=0.5,
    lam=0.5,
    bootstrap=2.0,
  )
  # delta_1 = 1 + 0.5 * 2 - 0.25; delta_0 = 0.5 * 0.25 - 0.5
  np.testing.assert_allclose(found, [-0.375 + 0.25 * 1.75, 1.75])
  np.testing.assert_allclose(returns, [0.5625, 2.0])


@pytest.mark.parametrize("which", ["tb_gae", "token_gae"])
def test_a_reward_on_the_masked_tail_is_not_lost(which):
  rewards, values, turn_ids, mask = HAND
  on_tail = _stream([0, 0, 0, 1, 2], values, turn_ids, mask)
  expected = _run((rewards, values, turn_ids, mask), 0.5, 0.5, which=which)
  chex.assert_trees_all_close(
    _run(on_tail, 0.5, 0.5, which=which), expected, atol=1e-6
  )


def test_integer_rewards_are_refused():
  rewards, *rest = HAND
  with pytest.raises(AssertionError, match="int32"):
    advantages.tb_gae(
      rewards.astype(jnp.int32),
      *rest,
      gamma_turn=1.0,
      lambda_turn=1.0,
      num_turns=2,
    )


def test_no_action_is_all_zeros():
  rewards, values, turn_ids, _ = HAND
  stream = (rewards, values, turn_ids, jnp.zeros(5, bool))
  for array in _run(stream, 0.5, 0.5):
    np.testing.assert_array_equal(array, np.zeros(5))


@pytest.mark.parametrize("length", [1, 32, 33, 1025])
def test_any_length(length):
  # Around the block size of the suffix sums and its square.
  rng = np.random.default_rng(length)
  stream = _stream(
    rng.normal(size=length),
    rng.normal(size=length),
    np.arange(length) // 200,
    np.ones(length),
  )
  expected = bench.recursion_by_token(*map(np.asarray, stream), 0.9, 0.9)
  chex.assert_trees_all_close(
    _run(stream, 0.9, 0.9), jax.tree.map(np.float32, expected), atol=1e-4
  )


def test_vmap_is_the_loop():
  streams = [_draw(seed) for seed in range(4)]
  batch = jax.tree.map(lambda *x: jnp.stack(x), *streams)
  together = jax.vmap(lambda *s: _run(s, 0.9, 0.8))(*batch)
  for row, stream in enumerate(streams):
    alone = _run(stream, 0.9, 0.8)
    chex.assert_trees_all_close(
      jax.tree.map(lambda x, row=row: x[row], together), alone, atol=1e-6
    )
