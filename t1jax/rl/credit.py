"""Credit for whole rollout batches: estimators applied, then whitened.

Axes: R rows (one trajectory each), T tokens of a row, padded to a bucket.
"""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.rl import advantages as estimators
from t1jax.rl import batching
from t1jax.rl.settings import RLConfig
from t1jax.rollout.trajectory import Trajectory


class CreditError(ValueError):
  """A trajectory that the configured estimator cannot take."""


def estimate(
  trajectories: Sequence[Trajectory],
  values: Mapping[int, np.ndarray],
  rl: RLConfig,
  *,
  lam: float | None = None,
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray]]:
  """Advantages and returns of each trajectory, by the configured estimator.

  Args:
    trajectories: verified ones, so nothing is bootstrapped.
    values: index -> [T] float32, V aligned to token t.
    rl: settings.
    lam: in place of the estimator's own lambda (rl.lambda_turn or
      rl.lambda_token).

  Returns:
    Two dicts, index -> [T] float32, 0 outside the action tokens.

  Raises:
    CreditError: an episode has more than rl.max_turns turns.
  """
  by_bucket = defaultdict(list)
  for index in values:
    trajectory = trajectories[index]
    if trajectory.num_turns > rl.max_turns:
      raise CreditError(
        f"Trajectory {index} (task {trajectory.task!r}) has"
        f" {trajectory.num_turns} turns, more than max_turns={rl.max_turns}."
        " Raise max_turns to the harness's limit."
      )
    by_bucket[min(b for b in rl.buckets if b >= len(trajectory))].append(index)
  advantages, returns = {}, {}
  by_turn = rl.advantage == "tb_gae"
  gamma = rl.gamma_turn if by_turn else rl.gamma_token
  if lam is None:
    lam = rl.lambda_turn if by_turn else rl.lambda_token
  for bucket, indices in sorted(by_bucket.items()):
    rows = batching.rows_of(bucket, rl.token_budget)
    for first in range(0, len(indices), rows):
      members = indices[first : first + rows]
      streams = _streams(trajectories, values, members, rows, bucket, rl)
      found = _advantages_RxT(
        *streams,
        gamma,
        lam,
        estimator=rl.advantage,
        num_turns=rl.max_turns,
      )
      for row, index in enumerate(members):
        length = len(trajectories[index])
        advantages[index] = np.asarray(found[0])[row, :length]
        returns[index] = np.asarray(found[1])[row, :length]
  return advantages, returns


def whiten(
  advantages: Mapping[int, np.ndarray], trajectories: Sequence[Trajectory]
) -> dict[int, np.ndarray]:
  """Mean 0, variance 1 over all action tokens of the rollout batch.

  Global by construction: it runs before the batch is split. One token, or
  equal ones, become 0 rather than NaN.
  """
  flat = at_actions(advantages, trajectories)
  mean = flat.mean() if flat.size else 0.0
  scale = 1.0 / (flat.std() + 1e-8) if flat.size else 0.0
  return {
    index: np.where(
      trajectories[index].loss_mask, (array - mean) * scale, 0.0
    ).astype(np.float32)
    for index, array in advantages.items()
  }


def at_actions(
  arrays: Mapping[int, np.ndarray], trajectories: Sequence[Trajectory]
) -> np.ndarray:
  """[N] float64: the entries at action tokens, of all trajectories."""
  parts = [
    array[trajectories[index].loss_mask] for index, array in arrays.items()
  ]
  return np.concatenate(parts).astype(np.float64) if parts else np.zeros(0)


@functools.partial(jax.jit, static_argnames=("estimator", "num_turns"))
def _advantages_RxT(
  rewards, values, turn_ids, mask, gamma, lam, *, estimator, num_turns
):
  if estimator == "tb_gae":
    one = functools.partial(
      estimators.tb_gae,
      gamma_turn=gamma,
      lambda_turn=lam,
      num_turns=num_turns,
    )
    return jax.vmap(one)(rewards, values, turn_ids, mask)

  def token_clock(rewards_T, values_T, mask_T):
    steps_T = mask_T
    if estimator == "token_clock_all":
      steps_T = estimators.through_last_action(mask_T)
    found = estimators.gae(rewards_T, values_T, steps_T, gamma=gamma, lam=lam)
    return jax.tree.map(
      lambda x: jnp.where(mask_T, x, jnp.zeros_like(x)), found
    )

  return jax.vmap(token_clock)(rewards, values, mask)


def _streams(trajectories, values, members, rows, bucket, rl):
  """Rewards, values, turn ids and masks, one trajectory per row."""
  rewards = np.zeros((rows, bucket), np.float32)
  padded_values = np.zeros((rows, bucket), np.float32)
  turn_ids = np.full((rows, bucket), rl.max_turns, np.int32)
  mask = np.zeros((rows, bucket), bool)
  for row, index in enumerate(members):
    trajectory = trajectories[index]
    length = len(trajectory)
    rewards[row, :length] = batching.terminal_rewards(trajectory)
    padded_values[row, :length] = values[index]
    turn_ids[row, :length] = trajectory.turn_ids
    mask[row, :length] = trajectory.loss_mask
  return rewards, padded_values, turn_ids, mask
