"""Ladders of static sizes, by hand."""

import pytest

from t1jax.sampling.shapes import fit, ladder


def test_a_ladder_ascends_and_ends_at_the_top():
  assert ladder("columns", (64, 16, 999), 128) == (16, 64, 128)
  assert ladder("columns", (), 7) == (7,)


def test_the_smallest_rung_that_holds_it_fits():
  rungs = ladder("columns", (16, 64), 128)
  assert [fit(rungs, n) for n in (1, 16, 17, 128, 500)] == [
    16,
    16,
    64,
    128,
    128,
  ]


def test_a_size_below_one_is_named():
  with pytest.raises(ValueError, match="Engine columns is 0"):
    ladder("columns", (16, 0), 128)
