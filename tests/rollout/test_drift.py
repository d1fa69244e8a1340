"""Drift by hand, and every kind of damage seen."""

import dataclasses
import types

import numpy as np
import pytest

from t1jax.rollout.drift import Drift, audit, compare

# Two given ids, two sampled, one given, one sampled.
TOKENS = np.array([5, 6, 7, 8, 9, 4])
MASK = np.array([0, 0, 1, 1, 0, 1], bool)
TURNS = np.array([-1, -1, 0, 0, 0, 1])
INPUTS = np.array([5, 6, 7, 8, 9])
SAMPLED = np.array([-1, -1, 7, 8, -1, 4])


def test_what_was_sampled_is_trained_on():
  found = compare(TOKENS, MASK, TURNS, (INPUTS, SAMPLED))
  assert found == Drift(1, 1, 3, 0, 3, 0)
  assert found.facts() == {
    "drift_trajectories": 1, "drift_positions": 3,
    "drift_rate": 0.0, "drift_rate_outside": 0.0,
  }  # fmt: skip


def swapped(array, at, value):
  array = array.copy()
  array[at] = value
  return array


@pytest.mark.parametrize(
  "tokens, mask, log, in_loss, outside",
  [
    (swapped(TOKENS, 3, 1), MASK, (INPUTS, SAMPLED), 1, 0),
    (swapped(TOKENS, 5, 1), MASK, (INPUTS, SAMPLED), 1, 0),
    (swapped(TOKENS, 4, 1), MASK, (INPUTS, SAMPLED), 0, 1),
    (TOKENS, swapped(MASK, 4, True), (INPUTS, SAMPLED), 1, 0),  # not sampled
    (TOKENS, swapped(MASK, 3, False), (INPUTS, SAMPLED), 1, 0),  # no loss on it
    (TOKENS, MASK & False, (INPUTS, SAMPLED), 3, 0),  # nor anywhere
    (TOKENS, MASK, (swapped(INPUTS, 3, 1), SAMPLED), 1, 0),  # went on with 1
    (TOKENS, MASK, (INPUTS[:-1], SAMPLED), 0, 1),  # an input is missing
    (TOKENS, MASK, (np.append(INPUTS, [4, 3]), np.append(SAMPLED, 3)), 1, 0),
    (TOKENS, MASK, None, 3, 3),
  ],
)
def test_damage_is_seen_where_it_is(tokens, mask, log, in_loss, outside):
  found = compare(tokens, mask, TURNS, log)
  assert (found.loss_drifted, found.other_drifted) == (in_loss, outside)


def test_a_shift_by_one_token_is_drift_nearly_everywhere():
  log = (np.append(3, INPUTS), np.append(-1, SAMPLED))
  found = compare(TOKENS, MASK, TURNS, log)
  assert found.loss_drifted == found.loss_positions
  assert found.other_drifted == found.other_positions


@dataclasses.dataclass
class Span:
  index: int
  row: int
  start: int
  length: int = 6

  @property
  def where(self):
    return self.row, slice(self.start, self.start + self.length)


def packed(*spans, stray=False):
  """Two rows of 14, each span holding the same six tokens."""
  fields = {name: np.zeros((2, 14), int) for name in ("tokens", "turn_ids")}
  mask = np.zeros((2, 14), bool)
  for span in spans:
    fields["tokens"][span.where] = TOKENS
    fields["turn_ids"][span.where] = TURNS
    mask[span.where] = MASK
  mask[1, 13] = stray
  batch = types.SimpleNamespace(**fields, loss_mask=mask)
  return [types.SimpleNamespace(batch=batch, spans=spans)]


ONE, TWO = Span(0, 0, 0), Span(1, 0, 6)


@pytest.mark.parametrize(
  "batches, drifted",
  [
    (packed(ONE, TWO), 0),
    (packed(ONE), 3),  # the other was lost
    (packed(ONE, TWO, Span(1, 1, 0)), 3),  # it is there twice
    (packed(ONE, TWO, stray=True), 1),  # a loss on padding
    (packed(ONE, Span(1, 0, 7)), 0),  # wherever it lies
    ([], 6),
  ],
)
def test_each_trajectory_is_trained_on_once(batches, drifted):
  log = (INPUTS, SAMPLED)
  found = audit(batches, [(7,), (8,)], {(7,): log, (8,): log})
  assert found.loss_drifted == drifted


def test_counts_add_up():
  one = Drift(1, 1, 3, 1, 3, 2)
  assert one + one + Drift() == Drift(2, 2, 6, 2, 6, 4)
  assert Drift().facts()["drift_rate"] == 0.0
