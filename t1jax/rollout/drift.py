"""Drift: do the ids that are trained on differ from those that were sampled?

The engine keeps a log of its own (`sampling.log`): what went into its device
programs and what came out, by position. Here the learner's packed ids are held
against it. The two travel by separate ways, so a token that is lost, moved,
re-encoded or masked wrongly on either of them shows.

T1 (arXiv 2609.11042) reports a drift of 0.000 % in the loss region over 1,402
multi-turn samples.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Ids that were inputs and ids that were sampled, by position; -1 for none.
EpisodeLog = tuple[np.ndarray, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Drift:
  """Counts over trajectories; they add up."""

  trajectories: int = 0
  multi_turn: int = 0  # of them, with two turns or more
  loss_positions: int = 0
  loss_drifted: int = 0
  other_positions: int = 0
  other_drifted: int = 0

  def __add__(self, other: "Drift") -> "Drift":
    return Drift(
      *map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other)))
    )

  def facts(self) -> dict[str, float]:
    """`drift_trajectories` (multi-turn ones), `drift_positions` (of the loss
    region), `drift_rate` there and `drift_rate_outside`, as shares."""
    return {
      "drift_trajectories": self.multi_turn,
      "drift_positions": self.loss_positions,
      "drift_rate": self.loss_drifted / max(1, self.loss_positions),
      "drift_rate_outside": self.other_drifted / max(1, self.other_positions),
    }


def compare(
  tokens_T: np.ndarray,
  loss_mask_T: np.ndarray,
  turn_ids_T: np.ndarray,
  log: EpisodeLog | None,
) -> Drift:
  """Holds one trajectory, as it is trained on, against the engine's log.

  A position of the loss region is sound when its id is the one that was
  sampled there and, but for the last, the one that was an input there. Any
  other position is sound when nothing was sampled there and its id was the
  input.

  Args:
    tokens_T: int ids.
    loss_mask_T: bool.
    turn_ids_T: int, -1 for the prompt.
    log: what the engine noted; None when it knows no such episode, and then
      every position has drifted.
  """
  length = len(tokens_T)
  inputs, sampled = log or (np.zeros(0, np.int32),) * 2
  reach = max(length, len(inputs), len(sampled))
  tokens = _padded(tokens_T, reach)
  mask = np.zeros(reach, bool)
  mask[:length] = loss_mask_T
  inputs, sampled = _padded(inputs, reach), _padded(sampled, reach)
  # What the engine went on with and the learner does not have is drift, too.
  in_loss = mask | ((sampled >= 0) & (np.arange(reach) >= length))
  expected = np.where(mask, sampled, -1)
  drifted = (sampled != expected) | (mask & (sampled != tokens))
  known = np.arange(reach) != length - 1  # the last token is no input
  drifted |= known & (inputs != tokens)
  return Drift(
    trajectories=1,
    multi_turn=int(turn_ids_T.max(initial=-1) >= 1),
    loss_positions=int(in_loss.sum()),
    loss_drifted=int((drifted & in_loss).sum()),
    other_positions=int((~in_loss).sum()),
    other_drifted=int((drifted & ~in_loss).sum()),
  )


def audit(
  micro_batches: Iterable[Any],
  seeds: Sequence[tuple[int, ...]],
  logs: Mapping[tuple[int, ...], EpisodeLog],
) -> Drift:
  """Holds packed batches against the engine's log, trajectory by trajectory.

  Args:
    micro_batches: of `rl.batching`, as the learner trains on them; it lies
      above this room.
    seeds: the episode's seed, by the index that spans name.
    logs: seed -> the engine's log of the episode.
  """
  total = Drift()
  for micro in micro_batches:
    for span in micro.spans:
      batch, where = micro.batch, span.where
      total += compare(
        np.asarray(batch.tokens[where]),
        np.asarray(batch.loss_mask[where]),
        np.asarray(batch.turn_ids[where]),
        logs.get(seeds[span.index]),
      )
  return total


def _padded(ids: np.ndarray, length: int) -> np.ndarray:
  return np.pad(
    np.asarray(ids, np.int64), (0, length - len(ids)), constant_values=-1
  )
