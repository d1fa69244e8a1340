"""Packing: everything arrives once, whole, with its routes; refusals."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.rl import batching
from t1jax.rl.batching import BatchingError

SHAPE = dict(num_moe_layers=2, top_k=2)
BUCKETS = (8, 16, 32)


def _pack(trajectories, *, buckets=BUCKETS, token_budget=64, **kwargs):
  return batching.pack(
    trajectories,
    buckets=buckets,
    token_budget=token_budget,
    **{**SHAPE, **kwargs},
  )


def _of_lengths(make_trajectory, lengths):
  rng = np.random.default_rng(0)
  return [
    make_trajectory(rng, ((n - 1, 0),), prompt=1, num_moe_layers=2)
    for n in lengths
  ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(2, 32), max_size=25), st.sampled_from([16, 64]))
def test_everything_arrives_once_and_whole(make_trajectory, lengths, budget):
  trajectories = _of_lengths(make_trajectory, lengths)
  micros = _pack(trajectories, token_budget=budget)
  seen = []
  for micro in micros:
    batch = micro.batch
    rows, bucket = batch.tokens.shape
    assert bucket in BUCKETS
    assert rows == max(1, budget // bucket)
    assert batch.routes.shape == (2, rows, bucket, 2)
    taken = np.zeros((rows, bucket), int)
    for span in micro.spans:
      trajectory = trajectories[span.index]
      seen.append(span.index)
      taken[span.where] += 1
      row, where = span.where
      np.testing.assert_array_equal(batch.tokens[span.where], trajectory.tokens)
      np.testing.assert_array_equal(
        batch.behaviour_logprobs[span.where], trajectory.logprobs
      )
      np.testing.assert_array_equal(
        batch.loss_mask[span.where], trajectory.loss_mask
      )
      np.testing.assert_array_equal(
        batch.turn_ids[span.where], trajectory.turn_ids
      )
      # The routes travel with the token ids: [T, L, K] is [L, row, T, K].
      np.testing.assert_array_equal(
        batch.routes[:, row, where].transpose(1, 0, 2), trajectory.routes
      )
      np.testing.assert_array_equal(
        batch.positions[span.where], np.arange(span.length)
      )
      assert len(set(batch.segment_ids[span.where])) == 1
    np.testing.assert_array_equal(taken, batch.segment_ids > 0)
    padding = batch.segment_ids == 0
    assert (batch.routes[:, padding] == -1).all()
    assert not batch.loss_mask[padding].any()
    for row in batch.segment_ids:
      found = row[row > 0]
      assert (np.diff(found) >= 0).all()
      assert set(found) == set(range(1, len(set(found)) + 1))
  assert sorted(seen) == list(range(len(lengths)))


def test_the_same_input_packs_the_same(make_trajectory):
  trajectories = _of_lengths(make_trajectory, [5, 9, 5, 30, 2, 9, 16, 7])
  first, second = _pack(trajectories), _pack(trajectories)
  assert [m.spans for m in first] == [m.spans for m in second]


def test_short_ones_fill_the_gaps_of_long_ones(make_trajectory):
  (micro,) = _pack(_of_lengths(make_trajectory, [20, 12]), token_budget=32)
  assert micro.batch.tokens.shape == (1, 32)
  np.testing.assert_array_equal(micro.batch.segment_ids[0], [1] * 20 + [2] * 12)


def test_odd_rows_move_into_free_rows_of_the_next_bucket(make_trajectory):
  # One row of 32 leaves its batch of two half empty; the row of 16 joins it.
  (micro,) = _pack(_of_lengths(make_trajectory, [32, 16]))
  assert micro.batch.tokens.shape == (2, 32)


def test_an_episode_over_the_budget_is_a_micro_batch_of_its_own(
  make_trajectory,
):
  micros = _pack(_of_lengths(make_trajectory, [30, 30]), token_budget=16)
  assert [m.batch.tokens.shape for m in micros] == [(1, 32), (1, 32)]


def test_too_long_says_how_long_and_what_to_do(make_trajectory):
  trajectories = _of_lengths(make_trajectory, [5, 33])
  with pytest.raises(
    BatchingError, match=r"Trajectory 1 has 33 tokens.*\(32\).*at least 33"
  ):
    _pack(trajectories)


def test_terminal_reward_sits_on_the_last_action(make_trajectory):
  rng = np.random.default_rng(0)
  trajectory = make_trajectory(rng, ((2, 3), (1, 4)), prompt=2, reward=0.7)
  rewards = batching.terminal_rewards(trajectory)
  expected = np.zeros(12, np.float32)
  expected[7] = 0.7
  np.testing.assert_array_equal(rewards, expected)
  assert rewards.dtype == np.float32


def test_recorded_only_when_every_input_has_a_route(make_trajectory):
  trajectories = _of_lengths(make_trajectory, [8, 8])
  (micro,) = _pack(trajectories, buckets=(16,), token_budget=16)
  assert micro.recorded
  routes = trajectories[1].routes.copy()
  routes[3] = -1
  trajectories[1] = dataclasses.replace(trajectories[1], routes=routes)
  (micro,) = _pack(trajectories, buckets=(16,), token_budget=16)
  assert not micro.recorded


def test_a_dense_model_has_no_routes(make_trajectory):
  rng = np.random.default_rng(0)
  trajectory = make_trajectory(rng, num_moe_layers=0)
  (micro,) = _pack([trajectory], num_moe_layers=0)
  assert micro.batch.routes.shape[0] == 0
  assert micro.recorded


def test_unpack_and_refill_are_inverse(make_trajectory):
  trajectories = _of_lengths(make_trajectory, [5, 9, 30, 2])
  micros = _pack(trajectories)
  arrays = {
    i: np.random.default_rng(i).normal(size=len(t)).astype(np.float32)
    for i, t in enumerate(trajectories)
  }
  filled = batching.refill(micros, values=arrays)
  back = batching.unpack(filled, [m.batch.values for m in filled])
  for index, array in arrays.items():
    np.testing.assert_array_equal(back[index], array)


def test_chosen_indices_keep_their_numbers(make_trajectory):
  trajectories = _of_lengths(make_trajectory, [5, 9, 30, 2])
  micros = _pack(trajectories, indices=[3, 1])
  assert sorted(s.index for m in micros for s in m.spans) == [1, 3]


def test_infra_failures_cannot_slip_in(make_trajectory):
  rng = np.random.default_rng(0)
  bad = make_trajectory(rng, num_moe_layers=2, status="infra_failure")
  with pytest.raises(BatchingError, match="infra failure"):
    _pack([bad])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda t: {"loss_mask": np.ones_like(t.loss_mask)}, r"loss_mask\[0\]"),
    (lambda t: {"routes": t.routes.transpose(1, 0, 2)}, "axis order"),
    (
      lambda t: {"outcome": dataclasses.replace(t.outcome, reward=np.nan)},
      "reward nan",
    ),
  ],
)
def test_refusals(make_trajectory, change, message):
  trajectory = make_trajectory(np.random.default_rng(0), num_moe_layers=2)
  with pytest.raises(BatchingError, match=message):
    _pack([dataclasses.replace(trajectory, **change(trajectory))])


def test_bad_buckets():
  with pytest.raises(BatchingError, match="strictly increasing"):
    _pack([], buckets=(16, 16))


def test_demonstrations_pack_by_the_same_rule(make_demonstrations):
  examples = make_demonstrations(0, 12)
  micros = batching.pack_demonstrations(
    examples, buckets=(8, 32), token_budget=64
  )
  spans = [s for m in micros for s in m.spans]
  assert sorted(s.index for s in spans) == list(range(12))
  assert sum(m.num_actions for m in micros) == sum(
    e.loss_mask.sum() for e in examples
  )
  for micro in micros:
    assert micro.batch.routes is None
    for span in micro.spans:
      np.testing.assert_array_equal(
        micro.batch.tokens[span.where], examples[span.index].tokens
      )
