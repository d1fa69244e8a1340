"""What the learner logs: rollouts, routing, sums over micro-batches, time."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from t1jax.rl.batching import MicroBatch
from t1jax.rl.programs import Load
from t1jax.rollout.trajectory import Trajectory


def routing(
  loads: Sequence[Load],
  micro_batches: Sequence[MicroBatch],
  *,
  replay: bool,
) -> dict[str, float]:
  """Replay and load of the MoE layers over a global batch.

  Returns:
    Nothing for a dense model. `replayed_fraction`: of the rows that were
    inputs (every token but a trajectory's last), in every layer, how many
    took a recorded route. `fallback_fraction`: how many should have but had
    none. `load_violation`: largest expert load over the mean, worst layer.
    `replayed_layers`: layers that replayed at least one row.
  """
  tokens_LxE = np.sum([np.asarray(x.tokens_LxE, np.int64) for x in loads], 0)
  if not tokens_LxE.size:
    return {}
  rows_L = np.sum([np.asarray(x.replayed_rows_L, np.int64) for x in loads], 0)
  inputs = sum(m.num_tokens - len(m.spans) for m in micro_batches)
  replayed = float(rows_L.sum()) / max(1, inputs * len(rows_L))
  mean_L = np.maximum(tokens_LxE.mean(axis=1), 1e-9)
  return {
    "replayed_fraction": replayed,
    "fallback_fraction": 1.0 - replayed if replay else 0.0,
    "replayed_layers": float((rows_L > 0).sum()),
    "load_violation": float((tokens_LxE.max(axis=1) / mean_L).max()),
  }


def rollout(trajectories: Sequence[Trajectory]) -> dict[str, float]:
  """What the verified episodes of a batch were like, as means."""
  if not trajectories:
    return {"episodes": 0.0}
  outcomes = [t.outcome for t in trajectories]
  parts = defaultdict(list)
  for outcome in outcomes:
    for name, value in outcome.reward_parts.items():
      parts[f"reward_{name}"].append(value)
  means = {
    "reward": [o.reward for o in outcomes],
    "success": [o.success for o in outcomes],
    "truncated": [o.status == "truncated" for o in outcomes],
    "timeout": [o.status == "timeout" for o in outcomes],
    "turns": [t.num_turns for t in trajectories],
    "tokens": [len(t) for t in trajectories],
    "action_tokens": [t.loss_mask.sum() for t in trajectories],
    **parts,
  }
  return {"episodes": float(len(trajectories))} | {
    name: float(np.mean(np.asarray(values, np.float64)))
    for name, values in means.items()
  }


def sum_of(
  totals: Sequence[Mapping[str, jax.Array]],
) -> dict[str, float]:
  """Statistics of a global batch from those of its micro-batches."""
  merged: dict[str, float] = {}
  for part in totals:
    for name, value in jax.device_get(part).items():
      if name not in merged:
        merged[name] = float(value)
      elif name.startswith("max_"):
        merged[name] = max(merged[name], float(value))
      else:
        merged[name] += float(value)
  return merged


def mean_of(
  reports: Sequence[Mapping[str, float]],
) -> dict[str, float]:
  """Mean over updates of what each reported; a maximum stays one."""
  if not reports:
    return {}
  return {
    name: float(
      (np.max if name.endswith("_max") else np.mean)(
        [report[name] for report in reports]
      )
    )
    for name in reports[0]
  }


class Clock:
  """Seconds per phase, and tokens per second over all of them."""

  def __init__(self):
    self._last = self._start = time.perf_counter()
    self._seconds = {}

  def lap(self, phase: str) -> None:
    now = time.perf_counter()
    self._seconds[f"seconds_{phase}"] = now - self._last
    self._last = now

  def metrics(self, tokens: int) -> dict[str, float]:
    total = max(self._last - self._start, 1e-9)
    return {
      **self._seconds,
      "seconds_learner": total,
      "learner_tokens_per_second": tokens / total,
    }
