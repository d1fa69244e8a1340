"""PPO's losses and the statistics that say whether to trust them.

Axes: B rows, S tokens. Every argument is aligned to token t and counts only
where `mask_BxS` (the action tokens) is True: no statistic, entropy and KL
included, ever reads an observation.

A loss is a *sum* over the micro-batch divided by a denominator that the caller
counted over the whole global batch. Summing micro-batches therefore gives the
token-mean of the global batch, however it was split, packed, padded or
sharded.

Statistics come as sums (and maxima) for the same reason; `summarize` turns
the totals into numbers.
"""

from collections.abc import Mapping

import chex
import jax
import jax.numpy as jnp
import numpy as np

# F(tau): share of tokens whose probability changed by more than this factor.
_TAU = 2.0
# Nats. Log-ratios are cut here before exp: past 88 its float32 value is inf,
# and one such token would turn the whole gradient into NaN.
_FURTHEST = 20.0


def ppo_loss(
  logprobs_BxS: jax.Array,
  old_logprobs_BxS: jax.Array,
  behaviour_logprobs_BxS: jax.Array,
  advantages_BxS: jax.Array,
  mask_BxS: jax.Array,
  denominator: jax.Array,
  *,
  ratio_low: float,
  ratio_high: float,
  tis_cap: float,
  entropy_BxS: jax.Array | None = None,
  entropy_coefficient: float = 0.0,
  reference_logprobs_BxS: jax.Array | None = None,
  kl_coefficient: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Clipped surrogate with truncated importance sampling.

    ratio = exp(logp - logp_old)
    w     = min(exp(logp_old - logp_behaviour), tis_cap)       no gradient
    L     = -w min(ratio A, clip(ratio, ratio_low, ratio_high) A)

  `ratio` is what clipping bounds: the policy against itself before the
  update. `w` corrects for the sampler, whose numerics and weights differ.

  Args:
    logprobs_BxS: log-probs under the policy that is updated.
    old_logprobs_BxS: the learner's own before the update.
    behaviour_logprobs_BxS: the sampler's.
    advantages_BxS: float32.
    mask_BxS: bool, action tokens.
    denominator: action tokens of the global batch, float32 scalar.
    ratio_low: lower bound of the ratio, in (0, 1].
    ratio_high: upper bound, >= 1.
    tis_cap: truncation of w; 0 leaves w out (w = 1).
    entropy_BxS: entropy of the policy, nats. Needed for its bonus; without
      a coefficient it is only reported.
    entropy_coefficient: weight of the bonus; 0: not computed.
    reference_logprobs_BxS: log-probs under a fixed reference policy.
    kl_coefficient: weight of the k3 estimate of KL(policy || reference); 0:
      not computed.

  Returns:
    The loss, float32 scalar, and statistics to sum over micro-batches (keys
    that start with `max_` to maximise).
  """
  chex.assert_rank(
    [logprobs_BxS, old_logprobs_BxS, behaviour_logprobs_BxS, advantages_BxS], 2
  )
  chex.assert_equal_shape(
    [
      logprobs_BxS,
      old_logprobs_BxS,
      behaviour_logprobs_BxS,
      advantages_BxS,
      mask_BxS,
    ]
  )
  chex.assert_type(mask_BxS, bool)
  chex.assert_rank(denominator, 0)
  # Zeros where masked *before* exp: padding may hold anything, and an inf
  # that is masked afterwards still turns the gradient into NaN.
  change = _bounded(_where(mask_BxS, logprobs_BxS - old_logprobs_BxS))
  gap = jax.lax.stop_gradient(
    _bounded(_where(mask_BxS, old_logprobs_BxS - behaviour_logprobs_BxS))
  )
  advantages = _where(mask_BxS, advantages_BxS)
  ratio = jnp.exp(change)
  clipped = jnp.clip(ratio, ratio_low, ratio_high)
  surrogate = jnp.minimum(ratio * advantages, clipped * advantages)
  if tis_cap > 0:
    surrogate = surrogate * jnp.minimum(jnp.exp(gap), tis_cap)
  policy_loss = -_total(mask_BxS, surrogate) / denominator
  loss = policy_loss
  statistics = {
    "policy_loss": policy_loss,
    **_policy_statistics(change, advantages, mask_BxS, ratio_low, ratio_high),
    **gap_statistics(old_logprobs_BxS, behaviour_logprobs_BxS, mask_BxS),
  }
  if tis_cap > 0:
    statistics["tis_truncated"] = _total(
      mask_BxS, (jnp.exp(gap) > tis_cap).astype(jnp.float32)
    )
  if entropy_BxS is not None:
    statistics["entropy"] = _total(mask_BxS, jax.lax.stop_gradient(entropy_BxS))
  if entropy_coefficient:
    if entropy_BxS is None:
      raise ValueError("entropy_coefficient needs entropy_BxS.")
    bonus = _total(mask_BxS, entropy_BxS) / denominator
    loss = loss - entropy_coefficient * bonus
  if kl_coefficient:
    if reference_logprobs_BxS is None:
      raise ValueError("kl_coefficient needs reference_logprobs_BxS.")
    away = _bounded(_where(mask_BxS, reference_logprobs_BxS - logprobs_BxS))
    kl = _total(mask_BxS, k3(away)) / denominator
    statistics["reference_kl_loss"] = kl
    loss = loss + kl_coefficient * kl
  statistics["actor_loss"] = loss
  return loss, jax.lax.stop_gradient(statistics)


def value_loss(
  values_BxS: jax.Array,
  old_values_BxS: jax.Array,
  returns_BxS: jax.Array,
  mask_BxS: jax.Array,
  denominator: jax.Array,
  *,
  value_clip: float = 0.0,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """Half the squared error to the returns, token-mean of the global batch.

  Args:
    values_BxS: the critic's, with gradient.
    old_values_BxS: the critic's before the update.
    returns_BxS: targets.
    mask_BxS: bool, action tokens.
    denominator: action tokens of the global batch.
    value_clip: > 0: the larger of the errors of V and of V held within
      value_clip of its old value (Schulman's PPO2). 0: not computed.

  Returns:
    The loss and statistics to sum.
  """
  chex.assert_rank([values_BxS, old_values_BxS, returns_BxS, mask_BxS], 2)
  chex.assert_equal_shape([values_BxS, old_values_BxS, returns_BxS, mask_BxS])
  chex.assert_type(mask_BxS, bool)
  error = jnp.square(_where(mask_BxS, values_BxS - returns_BxS))
  statistics = {}
  if value_clip > 0:
    held = old_values_BxS + jnp.clip(
      values_BxS - old_values_BxS, -value_clip, value_clip
    )
    held_error = jnp.square(_where(mask_BxS, held - returns_BxS))
    statistics["value_clip_fraction"] = _total(
      mask_BxS, (held_error > error).astype(jnp.float32)
    )
    error = jnp.maximum(error, held_error)
  loss = 0.5 * _total(mask_BxS, error) / denominator
  statistics["value_loss"] = loss
  return loss, jax.lax.stop_gradient(statistics)


def supervised_loss(
  logprobs_BxS: jax.Array, mask_BxS: jax.Array, denominator: jax.Array
) -> jax.Array:
  """Cross-entropy on the masked tokens, token-mean of the global batch."""
  chex.assert_rank([logprobs_BxS, mask_BxS], 2)
  chex.assert_equal_shape([logprobs_BxS, mask_BxS])
  return -_total(mask_BxS, logprobs_BxS) / denominator


def k3(log_ratio: jax.Array) -> jax.Array:
  """Schulman's k3: exp(d) - 1 - d >= 0, with d = log q/p and samples of p.

  Its mean under p is KL(p || q).
  """
  return jnp.expm1(log_ratio) - log_ratio


def gap_statistics(
  old_logprobs_BxS: jax.Array,
  behaviour_logprobs_BxS: jax.Array,
  mask_BxS: jax.Array,
) -> dict[str, jax.Array]:
  """How far the learner's log-probs are from the sampler's, as sums.

  Replaying the experts does not close this gap by itself (other kernels, other
  precision, weights a few updates old), so it is watched at every update.
  """
  gap = _where(mask_BxS, old_logprobs_BxS - behaviour_logprobs_BxS)
  near = _bounded(gap)
  weight = jnp.where(mask_BxS, jnp.exp(near), jnp.zeros_like(gap))
  return {
    "gap_abs": _total(mask_BxS, jnp.abs(gap)),
    "gap_k3": _total(mask_BxS, k3(near)),
    "gap_outside": _total(
      mask_BxS, (jnp.abs(gap) > jnp.log(_TAU)).astype(jnp.float32)
    ),
    "weight": jnp.sum(weight),
    "weight_squared": jnp.sum(jnp.square(weight)),
    "max_gap_abs": jnp.max(jnp.abs(gap)),
  }


def summarize(
  totals: Mapping[str, jax.Array | float], num_tokens: float
) -> dict[str, float]:
  """Numbers to log from statistics summed over a global batch.

  Losses are already means; other sums are divided by `num_tokens`, the action
  tokens. With none, every mean is 0 rather than NaN.

  Returns, where the totals hold them: losses; clip_fraction_low/high;
  ratio_mean/std/max; update_k3; entropy; logprob_gap (mean absolute),
  logprob_gap_max, k3, f_tau2 and ess (effective sample size of
  the importance weights over the number of tokens) of learner against
  sampler; tis_truncated_fraction.
  """
  totals = {name: float(value) for name, value in totals.items()}
  count = max(float(num_tokens), 1.0)
  names = {
    "clip_low": "clip_fraction_low",
    "clip_high": "clip_fraction_high",
    "ratio": "ratio_mean",
    "update_k3": "update_k3",
    "entropy": "entropy",
    "gap_abs": "logprob_gap",
    "gap_k3": "k3",
    "gap_outside": "f_tau2",
    "tis_truncated": "tis_truncated_fraction",
    "value_clip_fraction": "value_clip_fraction",
  }
  metrics = {
    name: value for name, value in totals.items() if name.endswith("_loss")
  }
  metrics |= {
    name: totals[key] / count for key, name in names.items() if key in totals
  }
  if "ratio_squared" in totals:
    mean = totals["ratio"] / count
    variance = totals["ratio_squared"] / count - mean**2
    metrics["ratio_std"] = float(np.sqrt(max(variance, 0.0)))
    metrics["ratio_max"] = totals["max_ratio"]
  if "weight_squared" in totals:
    squared = totals["weight_squared"]
    metrics["ess"] = totals["weight"] ** 2 / squared / count if squared else 0.0
    metrics["logprob_gap_max"] = totals["max_gap_abs"]
  return metrics


def _policy_statistics(change, advantages, mask, ratio_low, ratio_high):
  ratio = jnp.exp(change)
  # A bound counts as active only where it changes the surrogate.
  low = (ratio < ratio_low) & (advantages < 0)
  high = (ratio > ratio_high) & (advantages > 0)
  return {
    "clip_low": _total(mask, low.astype(jnp.float32)),
    "clip_high": _total(mask, high.astype(jnp.float32)),
    "ratio": _total(mask, ratio),
    "ratio_squared": _total(mask, jnp.square(ratio)),
    "max_ratio": jnp.max(jnp.where(mask, ratio, jnp.zeros_like(ratio))),
    "update_k3": _total(mask, k3(change)),
  }


def _where(mask, x):
  return jnp.where(mask, x, jnp.zeros_like(x))


def _bounded(log_ratio):
  return jnp.clip(log_ratio, -_FURTHEST, _FURTHEST)


def _total(mask, x):
  return jnp.sum(_where(mask, x))
