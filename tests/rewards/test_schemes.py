"""Reward schemes: hand-computed values, order properties, refusals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t1jax.rewards import schemes

SEMANTIC, HYGIENE, GATE = schemes.KINDS


def _assertions(semantic, hygiene=(), gate=()):
  rows = [(f"s{i}", SEMANTIC, ok) for i, ok in enumerate(semantic)]
  rows += [(f"h{i}", HYGIENE, ok) for i, ok in enumerate(hygiene)]
  rows += [(f"g{i}", GATE, ok) for i, ok in enumerate(gate)]
  return rows


def test_count_by_hand():
  counts = schemes.count(
    _assertions((True, False, True), (True, True), (False,))
  )
  assert counts == schemes.Counts(
    strict=False, passed=4, total=6, semantic_passed=2, scale=4
  )


def test_a_failed_gate_takes_success_but_not_semantic_credit():
  counts = schemes.count(_assertions((True, True), (True,), (False,)))
  parts = schemes.reward_parts(counts, "f", {"f": 2.0})
  assert parts["binary"] == 0.0
  assert parts["fdr"] == 1.0
  assert parts["spr"] == 0.5


def test_gate_and_hygiene_earn_nothing_in_fdr_and_spr():
  counts = schemes.count(_assertions((False,), (True, True), (True,)))
  parts = schemes.reward_parts(counts, "f", {"f": 2.0})
  assert (parts["fdr"], parts["spr"]) == (0.0, 0.0)
  assert parts["t1_dense"] == pytest.approx(0.3)


def test_no_assertion_is_no_success():
  counts = schemes.count(())
  assert not counts.strict
  assert set(schemes.reward_parts(counts, "f", {}).values()) == {0.0}


def test_the_verifiers_verdict_only_lowers():
  assert not schemes.count(_assertions((True,)), strict=False).strict
  assert not schemes.count(_assertions((False,)), strict=True).strict


@pytest.mark.parametrize(
  ("passed", "expected"), [(0, 0.0), (7, 0.7), (10, 1.0), (15, 1.5), (99, 1.5)]
)
def test_t1_dense(passed, expected):
  reward = schemes.t1_dense(passed)
  assert isinstance(reward, float)
  assert reward == pytest.approx(expected)
  # The fault P2: an array that takes its dtype from the rewards keeps 0.7.
  assert np.asarray([reward]).dtype == np.float64


def test_family_denominator_interpolates():
  # Positions 0..4, the 90th percentile sits at 3.6: 4 + 0.6 * (9 - 4).
  assert schemes.family_denominator([1, 2, 3, 4, 9]) == pytest.approx(7.0)
  assert schemes.family_denominator([0, 0]) == 1.0
  assert schemes.family_denominator([]) == 82.0


def test_unknown_family_falls_back():
  counts = schemes.count(_assertions((True,)))
  parts = schemes.reward_parts(counts, "new", {"old": 3.0})
  assert parts["fdr"] == pytest.approx(1 / 82)


@given(
  st.booleans(),
  st.integers(0, 10_000),
  st.floats(1.0, 1e4),
)
def test_spr_orders_success_above_failure(strict, passed, denominator):
  reward = schemes.spr(strict, passed, denominator)
  assert 0.0 <= reward < 2.0
  assert (reward >= 1.0) == strict


@given(st.integers(0, 500), st.floats(1.0, 500.0))
def test_spr_and_fdr_grow_with_passes(passed, denominator):
  assert schemes.fdr(passed + 1, denominator) > schemes.fdr(passed, denominator)
  assert schemes.spr(False, passed + 1, denominator) > schemes.spr(
    False, passed, denominator
  )


def test_refusals_say_what_to_do():
  with pytest.raises(ValueError, match=r"kind .style.; expected.*semantic"):
    schemes.count([("a", "style", True)])
  with pytest.raises(ValueError, match="pass strict=False"):
    schemes.Counts(True, passed=1, total=2, semantic_passed=1, scale=2)
  with pytest.raises(ValueError, match="denominator is 0"):
    schemes.fdr(1, 0)
