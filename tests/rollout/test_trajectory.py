"""Trajectories: one way in, every length checked, cuts stay together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.rollout import trajectory as tj

E, L, K = 4, 2, 2


def rows(n, seed=0):
  rng = np.random.default_rng(seed)
  picks = [[rng.permutation(E)[:K] for _ in range(L)] for _ in range(n)]
  return np.asarray(picks, np.int32).reshape(n, L, K)


def grow(turns=3, sampled=4, observed=5, prompt=6):
  """An episode as the collector grows it: routes lag by one token a turn."""
  builder = tj.TrajectoryBuilder(E, L, K)
  builder.append(range(prompt), turn=-1, weight_version=7)
  pending = prompt
  for turn in range(turns):
    builder.append(
      range(sampled), turn=turn, weight_version=7, logprobs=[-0.5] * sampled
    )
    builder.append_routes(rows(pending + sampled - 1, seed=turn))
    if turn + 1 < turns:
      builder.append(range(observed), turn=turn, weight_version=7)
    pending = 1 + observed
  return builder


def test_fields_have_one_length_and_the_last_row_is_missing():
  done = grow().finish(tj.Outcome("completed"), task="t", family="f")
  total = 6 + 3 * 4 + 2 * 5
  for name in tj.TOKEN_FIELDS:
    assert len(getattr(done, name)) == total
  assert (done.routes[-1] == -1).all() and (done.routes[:-1] >= 0).all()
  assert done.loss_mask.sum() == 12 and done.num_turns == 3
  assert (done.logprobs[~done.loss_mask] == 0).all()
  assert done.routes.dtype == np.int16 and done.tokens.dtype == np.int32


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 28))
def test_a_cut_cuts_all_fields_together(length):
  whole = grow().finish(tj.Outcome("completed"))
  cut = whole.cut(length)
  for name in tj.TOKEN_FIELDS[:-1]:
    got, kept = getattr(cut, name), getattr(whole, name)
    np.testing.assert_array_equal(got, kept[:length])
  np.testing.assert_array_equal(cut.routes[:-1], whole.routes[: length - 1])
  assert (cut.routes[-1] == -1).all()
  assert (whole.routes[length - 1 : -1] >= 0).all()  # the source is untouched


def test_segments_are_prompt_actions_and_answers():
  builder = grow(turns=2, sampled=4, observed=5, prompt=6)
  builder.append([0], turn=1, weight_version=7)  # a stop that nobody sampled
  builder.append_routes(rows(1))
  done = builder.finish(tj.Outcome("completed"))
  assert list(done.segments()) == [
    (-1, False, slice(0, 6)),
    (0, True, slice(6, 10)),
    (0, False, slice(10, 15)),
    (1, True, slice(15, 19)),
    (1, False, slice(19, 20)),
  ]


def test_a_cut_out_of_range_raises():
  whole = grow().finish(tj.Outcome("completed"))
  for length in (0, -1, len(whole) + 1):
    with pytest.raises(tj.TrajectoryError, match="cut to"):
      whole.cut(length)


def poison(routes, where, ids):
  routes = routes.copy()
  routes[where] = ids
  return routes


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ([[-1, -1], [0, 1]], "partly recorded"),
    ([[0, 1], [1, 4]], "outside"),
    ([[0, 1], [-2, 1]], "outside"),
    ([[0, 1], [3, 3]], "twice"),
  ],
)
def test_a_bad_route_row_raises_with_its_token(ids, message):
  builder = tj.TrajectoryBuilder(E, L, K)
  builder.append(range(10), turn=-1, weight_version=0)
  builder.append_routes(rows(3))
  with pytest.raises(tj.TrajectoryError, match=f"token 5 .*{message}"):
    builder.append_routes(poison(rows(4), 2, ids))


def test_wrong_lengths_and_values_raise_with_their_position():
  builder = tj.TrajectoryBuilder(E, L, K)
  builder.append([1, 2], turn=-1, weight_version=0)
  with pytest.raises(tj.TrajectoryError, match="at token 2: 2 ids came with"):
    builder.append([1, 2], turn=0, weight_version=0, logprobs=[-1.0])
  with pytest.raises(tj.TrajectoryError, match="at token 3: log-prob nan"):
    builder.append(
      [1, 2], turn=0, weight_version=0, logprobs=[-1.0, float("nan")]
    )
  with pytest.raises(tj.TrajectoryError, match="3 route rows for 2 tokens"):
    builder.append_routes(rows(3))
  with pytest.raises(tj.TrajectoryError, match="expected \\[m, L, K\\]"):
    builder.append_routes(rows(2)[:, :1])
  builder.append([3], turn=2, weight_version=0)
  with pytest.raises(tj.TrajectoryError, match="turn 1 follows turn 2"):
    builder.append([4], turn=1, weight_version=0)


def test_missing_rows_are_an_error_not_silence():
  builder = tj.TrajectoryBuilder(E, L, K)
  builder.append(range(8), turn=-1, weight_version=0)
  builder.append_routes(rows(5))
  with pytest.raises(tj.TrajectoryError, match="5 route rows for 8 tokens"):
    builder.finish(tj.Outcome("completed"))


def test_an_abort_is_cut_at_the_last_covered_row():
  builder = grow()
  builder.append(range(5), turn=2, weight_version=7)
  whole = builder.finish(tj.Outcome("infra_failure", error="gone"))
  assert len(whole) == 6 + 3 * 4 + 2 * 5  # the last sampled id stays
  assert (whole.routes[:-1] >= 0).all()


def test_a_dropped_layer_is_seen():
  builder = tj.TrajectoryBuilder(E, 2, 1)
  builder.append(range(20), turn=-1, weight_version=0)
  routes = np.ones((20, 2, 1), np.int32)
  routes[:, 1] = 0
  builder.append_routes(routes)
  with pytest.raises(tj.TrajectoryError, match="MoE layer 1 routes every"):
    builder.finish(tj.Outcome("completed"))


def test_a_dense_model_has_rows_of_no_layers():
  builder = tj.TrajectoryBuilder(0, 0, 0)
  builder.append(range(20), turn=-1, weight_version=0)
  builder.append_routes(np.zeros((19, 0, 0), np.int32))
  done = builder.finish(tj.Outcome("completed"))
  assert done.routes.shape == (20, 0, 0)


def test_an_outcome_cannot_contradict_itself():
  ok = tj.AssertionResult("a", "semantic", True)
  bad = tj.AssertionResult("b", "gate", False)
  assert tj.Outcome("completed", True, (ok,)).success
  assert not tj.Outcome("completed").success
  with pytest.raises(tj.TrajectoryError, match="'b' did not pass"):
    tj.Outcome("completed", True, (ok, bad))
  with pytest.raises(tj.TrajectoryError, match=r"outcome\.status"):
    tj.Outcome("finished")
