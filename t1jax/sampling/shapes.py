"""The few static sizes that programs are compiled for, and rows in them."""

from collections.abc import Sequence

import numpy as np


def check_at_least(name: str, value: int, bound: int) -> None:
  """Raises ValueError, naming the engine's argument, for a smaller value."""
  if value < bound:
    raise ValueError(f"Engine {name} is {value}; it must be >= {bound}.")


def ladder(name: str, sizes: Sequence[int], top: int) -> tuple[int, ...]:
  """Ascending sizes, cut at `top` and ending in it.

  Raises ValueError, naming the engine's argument, for a size below 1.
  """
  for size in sizes:
    check_at_least(name, size, 1)
  return tuple(sorted({min(size, top) for size in (*sizes, top)}))


def fit(rungs: tuple[int, ...], size: int) -> int:
  """The smallest rung that holds `size`, or the last."""
  return next((rung for rung in rungs if rung >= size), rungs[-1])


def place(
  used: list[int], rows: int, num_slots: int
) -> tuple[np.ndarray, list[int]]:
  """Lays cache slots out in a program of `rows` rows.

  Args:
    used: the sessions' slots, at most `rows`, distinct.
    rows: of the program.
    num_slots: of the cache.

  Returns:
    slots [rows] int32, distinct: a padding row names any slot not in use here,
    which is safe because it writes back what it read; and each session's row.
    With a row for every slot, row r is slot r.
  """
  if rows == num_slots:
    return np.arange(rows, dtype=np.int32), used
  others = sorted(set(range(num_slots)) - set(used))
  slots = np.array(used + others[: rows - len(used)], np.int32)
  return slots, list(range(len(used)))
