"""What the engine's device programs took in and gave out, by position.

Written from the arrays that went to the device and came back, not from what
the sessions keep: so it can be held against trajectories (`rollout.drift`).
That a program fed each sampled token to its next step is taken for granted.
"""

import numpy as np


class Log:
  """Two rows of ids per episode: inputs and samples, -1 where there is none."""

  def __init__(self, max_len: int):
    self._max_len = max_len
    self._rows: dict[tuple[int, ...], np.ndarray] = {}

  def open(self, seed: tuple[int, ...]) -> None:
    """Begins an episode, or begins it again."""
    self._rows[seed] = np.full((2, self._max_len + 1), -1, np.int32)

  def inputs(self, seed: tuple[int, ...], first: int, ids: np.ndarray) -> None:
    """Ids that entered a program at positions from `first` on."""
    self._write(0, seed, first, ids)

  def samples(self, seed: tuple[int, ...], first: int, ids: np.ndarray) -> None:
    """Ids that a program drew for positions from `first` on."""
    self._write(1, seed, first, ids)

  def _write(self, row, seed, first, ids) -> None:
    # An aborted episode's last program may end after its log was taken.
    rows = self._rows.get(seed)
    if rows is not None:
      rows[row, first : first + len(ids)] = ids

  def take(self) -> dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]:
    """Inputs and samples [n] of each episode, to its last position; forgets."""
    rows, self._rows = self._rows, {}
    found = {}
    for seed, both in rows.items():
      end = int(np.flatnonzero((both >= 0).any(axis=0)).max(initial=-1)) + 1
      found[seed] = both[0, :end], both[1, :end]
    return found
