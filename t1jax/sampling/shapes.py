"""The few static sizes that programs are compiled for."""

from collections.abc import Sequence


def ladder(name: str, sizes: Sequence[int], top: int) -> tuple[int, ...]:
  """Ascending sizes, cut at `top` and ending in it.

  Raises ValueError, naming the engine's argument, for a size below 1.
  """
  for size in sizes:
    if size < 1:
      raise ValueError(f"Engine {name} is {size}; it must be >= 1.")
  return tuple(sorted({min(size, top) for size in (*sizes, top)}))


def fit(rungs: tuple[int, ...], size: int) -> int:
  """The smallest rung that holds `size`, or the last."""
  return next((rung for rung in rungs if rung >= size), rungs[-1])
