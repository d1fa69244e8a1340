"""Ladders of static sizes, by hand."""

import pytest

from t1jax.sampling.shapes import fit, ladder, place


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


def test_padding_rows_name_slots_that_nobody_uses():
  slots, rows = place([4, 1], 4, 6)
  assert slots.tolist() == [4, 1, 0, 2] and rows == [0, 1]
  slots, rows = place([4, 1], 6, 6)
  assert slots.tolist() == [0, 1, 2, 3, 4, 5] and rows == [4, 1]


def test_a_size_below_one_is_named():
  with pytest.raises(ValueError, match="Engine columns is 0"):
    ladder("columns", (16, 0), 128)
