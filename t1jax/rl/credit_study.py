"""What an advantage estimator does with credit: how far, and at what price.

Measured with the code that the learner runs, `credit.estimate`, on recorded
episodes and on made-up ones.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from t1jax.rl import credit
from t1jax.rl.settings import RLConfig
from t1jax.rollout.trajectory import Outcome, Trajectory, TrajectoryBuilder


def made_up_episode(
  turns: int, actions: int, observations: int, prompt: int = 1
) -> Trajectory:
  """An episode whose lengths alone matter: all tokens are 0, no routes.

  Args:
    turns: how many times the policy acts.
    actions: tokens that it samples in each turn.
    observations: tokens that answer each turn but the last.
    prompt: tokens before the first action.
  """
  builder = TrajectoryBuilder(num_experts=1, num_moe_layers=0, top_k=1)
  builder.append([0] * prompt, turn=-1, weight_version=0)
  for turn in range(turns):
    builder.append(
      [0] * actions, turn=turn, weight_version=0, logprobs=[0.0] * actions
    )
    if turn + 1 < turns:
      builder.append([0] * observations, turn=turn, weight_version=0)
  builder.append_routes(np.zeros((len(builder), 0, 1), np.int16))
  return builder.finish(Outcome("completed"))


def first_action_credit(
  trajectories: Sequence[Trajectory], rl: RLConfig
) -> np.ndarray:
  """[R] how much of a terminal reward of 1 the first action token gets.

  The rewards of the trajectories are replaced by 1 and the critic knows
  nothing (V = 0), so what is left of the 1 is what the estimator's clock let
  through: (gamma lambda)^ticks.

  Args:
    trajectories: with an action in each.
    rl: the estimator, its gamma and lambda, buckets and token budget.
  """
  rewarded = [
    dataclasses.replace(t, outcome=dataclasses.replace(t.outcome, reward=1.0))
    for t in trajectories
  ]
  nothing = {
    index: np.zeros(len(t), np.float32) for index, t in enumerate(rewarded)
  }
  advantages, _ = credit.estimate(rewarded, nothing, rl)
  return np.array(
    [
      advantages[index][np.argmax(t.loss_mask)]
      for index, t in enumerate(rewarded)
    ]
  )


@dataclasses.dataclass(frozen=True)
class Tradeoff:
  """What each lambda does to the advantages of one rollout batch.

  Attributes:
    lambdas_M: [M] the lambdas tried.
    bias_M: [M] mean over episodes of the return that the first action token
      gets, minus the same with lambda = 1, which is what was really earned.
    error_M: [M] standard error of that mean.
    variance_M: [M] variance of the advantages over all action tokens.
  """

  lambdas_M: np.ndarray
  bias_M: np.ndarray
  error_M: np.ndarray
  variance_M: np.ndarray


def tradeoff(
  trajectories: Sequence[Trajectory],
  values: Mapping[int, np.ndarray],
  rl: RLConfig,
  lambdas: Sequence[float],
) -> Tradeoff:
  """Bias and variance of the configured estimator by lambda.

  A lambda below 1 trusts the critic's values: the advantages vary less, and
  are as wrong as the critic is. The bias is that of the average over the
  batch; errors that cancel between episodes do not show in it.

  Args:
    trajectories: the rollout batch, verified.
    values: index -> [T] float32, of a critic that has not learned from it;
      what is missing here (infra failures) is left out.
    rl: settings.
    lambdas: what to try in place of the configured lambda.
  """
  first = {i: int(np.argmax(trajectories[i].loss_mask)) for i in values}

  def measure(lam):
    advantages, returns = credit.estimate(trajectories, values, rl, lam=lam)
    opening = np.array([returns[i][at] for i, at in first.items()], np.float64)
    return opening, credit.at_actions(advantages, trajectories).var()

  earned, _ = measure(1.0)
  found = [measure(lam) for lam in lambdas]
  off_MxR = np.array([opening - earned for opening, _ in found])
  return Tradeoff(
    lambdas_M=np.asarray(lambdas, np.float64),
    bias_M=off_MxR.mean(1),
    error_M=off_MxR.std(1) / np.sqrt(max(1, len(first) - 1)),
    variance_M=np.array([variance for _, variance in found]),
  )
