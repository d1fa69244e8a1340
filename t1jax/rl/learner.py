"""The actor-critic learner: from verified trajectories to the next state.

Per rollout batch, in this order: pack; values and old log-probs from *before*
any update; advantages, one trajectory at a time; critic; actor. The critic
goes first, but the actor is credited with the values from before it moved.

Infra failures leave at the door: they are in no loss and no statistic but
their own count.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from t1jax.models import moe
from t1jax.models.config import ModelConfig
from t1jax.rl import batching, credit, losses, programs, statistics
from t1jax.rl.batching import MicroBatch
from t1jax.rl.critic import explained_variance
from t1jax.rl.settings import RLConfig
from t1jax.rollout.trajectory import Trajectory


class LearnerError(ValueError):
  """Trajectories that this configuration must not train on."""


@flax.struct.dataclass
class LearnerState:
  """Everything that the next update depends on."""

  actor: dict
  actor_opt: optax.OptState
  critic: dict
  critic_opt: optax.OptState
  step: jax.Array  # int32 scalar, rollout batches consumed
  weight_version: jax.Array  # int32 scalar, times that the actor changed


def init_state(actor: dict, critic: dict, rl: RLConfig) -> LearnerState:
  """A first state; the next update consumes the buffers handed in."""
  return LearnerState(
    actor=actor,
    actor_opt=programs.init_optimizer(actor, config=rl.actor),
    critic=critic,
    critic_opt=programs.init_optimizer(critic, config=rl.critic),
    step=jnp.zeros((), jnp.int32),
    weight_version=jnp.zeros((), jnp.int32),
  )


def trainable(
  trajectories: Sequence[Trajectory],
) -> tuple[list[Trajectory], int]:
  """The trajectories with a verdict, and how many infra failures had none."""
  kept = [t for t in trajectories if t.outcome.status != "infra_failure"]
  return kept, len(trajectories) - len(kept)


def ppo_update(
  state: LearnerState,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  reference: dict | None = None,
  train_actor: bool = True,
  observe: Callable[[Sequence[MicroBatch]], None] = lambda micro_batches: None,
) -> tuple[LearnerState, dict[str, float]]:
  """One actor-critic step on a rollout batch.

  Args:
    state: consumed; its buffers are donated.
    trajectories: of the actor in `state`, or of one a few versions older.
    cfg: the actor's model; the critic's is `cfg.critic()`.
    rl: settings.
    reference: parameters of a frozen policy, needed with kl_coefficient > 0.
      It must share no buffer with the state.
    train_actor: False trains the critic alone (a calibration update).
    observe: is shown the packed batches that the update is made of; spans
      count the trajectories without infra failures.

  Returns:
    The new state and metrics (floats).

  Raises:
    LearnerError: replay is on and a trajectory has no route at all, an
      episode has more turns than max_turns, or a reference is missing.
    batching.BatchingError: a trajectory cannot be packed.
  """
  if rl.kl_coefficient and reference is None:
    raise LearnerError(
      f"kl_coefficient is {rl.kl_coefficient} but ppo_update got no reference"
      " policy. Pass reference=params, or set the coefficient to 0."
    )
  kept, infra = trainable(trajectories)
  metrics = {"infra_failures": float(infra), **statistics.rollout(kept)}
  clock = statistics.Clock()
  groups = _minibatches(
    kept,
    cfg,
    rl,
    max(rl.actor_minibatches, rl.critic_minibatches),
    int(state.step),
  )
  observe([micro for group in groups for micro in group])
  if not any(micro.num_actions for group in groups for micro in group):
    return state.replace(step=state.step + 1), metrics
  groups, estimate_metrics = _estimate(
    state.critic, groups, kept, cfg, rl, None
  )
  metrics |= estimate_metrics
  clock.lap("values")

  updates = rl.actor_epochs * rl.actor_minibatches
  if train_actor:
    if updates > 1:
      groups = _with_logprobs(state.actor, groups, cfg, rl, "old_logprobs")
    if rl.kl_coefficient:
      # R12: the actor's routes are its own; the reference routes by itself.
      groups = _with_logprobs(
        reference, groups, cfg, rl, "reference_logprobs", replay=False
      )
    clock.lap("logprobs")

  reports = []
  for _ in range(rl.critic_epochs):
    for minibatch in _merge(groups, rl.critic_minibatches):
      state, report = critic_step(state, minibatch, cfg, rl)
      reports.append(report)
  metrics |= statistics.mean_of(reports)
  clock.lap("critic")

  if train_actor:
    reports = []
    for _ in range(rl.actor_epochs):
      for minibatch in _merge(groups, rl.actor_minibatches):
        state, report = actor_step(
          state, minibatch, cfg, rl, old_is_live=updates == 1
        )
        reports.append(report)
    metrics |= statistics.mean_of(reports)
    state = state.replace(weight_version=state.weight_version + 1)
    clock.lap("actor")
  metrics |= clock.metrics(sum(len(t) for t in kept))
  return state.replace(step=state.step + 1), metrics


def warm_up_critic(
  state: LearnerState,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  evaluation: Sequence[Trajectory] = (),
) -> tuple[LearnerState, dict[str, float]]:
  """Trains the critic on rollouts of a frozen actor.

  Args:
    state: consumed; only the critic and its optimiser change.
    trajectories: to learn from, `warmup_epochs` times.
    cfg: the actor's model.
    rl: settings; targets use `warmup_lambda`.
    evaluation: trajectories that the critic does not learn from. Explained
      variance is measured on them; without any, on the training ones.

  Returns:
    The new state; metrics with `explained_variance_before` and `_after`, over
    all action tokens; afterwards also `_first_action`, over the episodes'
    first action tokens alone, and `_within_task`, over deviations from the
    mean of all attempts at a task (tasks tried once are left out).
  """
  kept, infra = trainable(trajectories)
  held, _ = trainable(evaluation)
  judged = held or kept
  metrics = {"infra_failures": float(infra)}
  clock = statistics.Clock()
  lam = rl.warmup_lambda
  before = _quality(state.critic, judged, cfg, rl)
  # The critic starts from nothing: there is no old value to stay close to.
  free = dataclasses.replace(rl, value_clip=0.0)
  reports = []
  for epoch in range(rl.warmup_epochs):
    groups = _minibatches(kept, cfg, rl, rl.warmup_minibatches, epoch)
    groups, _ = _estimate(state.critic, groups, kept, cfg, rl, lam)
    for group in groups:
      if any(micro.num_actions for micro in group):
        state, report = critic_step(state, group, cfg, free)
        reports.append(report)
  after = _quality(state.critic, judged, cfg, rl)
  metrics |= statistics.mean_of(reports)
  metrics["critic_updates"] = float(len(reports))
  metrics["explained_variance_before"] = before.pop("all")
  metrics["explained_variance_after"] = after.pop("all")
  metrics |= {f"explained_variance_{name}": x for name, x in after.items()}
  clock.lap("warm_up")
  metrics |= clock.metrics(sum(len(t) for t in kept) * rl.warmup_epochs)
  return state, metrics


def estimate_credit(
  critic: dict,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], dict[int, np.ndarray]]:
  """Values, advantages and returns as an update with this critic has them.

  Args:
    critic: parameters from before the update.
    trajectories: the whole rollout batch: whitening is over all of it.
    cfg: the actor's model.
    rl: settings.

  Returns:
    Three dicts from a trajectory's index to [T] float32, 0 outside the action
    tokens but for values; infra failures are in none of them.
  """
  kept = [
    index
    for index, trajectory in enumerate(trajectories)
    if trajectory.outcome.status != "infra_failure"
  ]
  micros = batching.pack(
    trajectories,
    indices=kept,
    buckets=rl.buckets,
    token_budget=rl.token_budget,
    num_moe_layers=cfg.num_moe_layers,
    top_k=cfg.top_k,
  )
  values = _values(critic, [micros], cfg)
  advantages, returns = credit.estimate(trajectories, values, rl)
  if rl.whiten:
    advantages = credit.whiten(advantages, trajectories)
  return values, advantages, returns


def critic_step(
  state: LearnerState,
  micro_batches: Sequence[MicroBatch],
  cfg: ModelConfig,
  rl: RLConfig,
) -> tuple[LearnerState, dict[str, float]]:
  """One update of the critic on a global batch; `state` is consumed."""
  count = sum(micro.num_actions for micro in micro_batches)
  denominator = jnp.float32(max(count, 1))
  gradient = programs.zero_gradient(state.critic)
  totals = []
  for micro in micro_batches:
    gradient, parts = programs.critic_gradient(
      state.critic,
      gradient,
      micro.batch.replace(routes=None, reference_logprobs=None),
      denominator,
      cfg=cfg.critic(),
      value_clip=rl.value_clip,
    )
    totals.append(parts)
  critic, critic_opt, norms = programs.apply_update(
    state.critic, state.critic_opt, gradient, config=rl.critic
  )
  report = losses.summarize(statistics.sum_of(totals), count)
  report |= {f"critic_{name}": float(x) for name, x in norms.items()}
  return state.replace(critic=critic, critic_opt=critic_opt), report


def actor_step(
  state: LearnerState,
  micro_batches: Sequence[MicroBatch],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  old_is_live: bool,
) -> tuple[LearnerState, dict[str, float]]:
  """One update of the actor on a global batch; `state` is consumed.

  Args:
    state: the learner's.
    micro_batches: with advantages, and old log-probs unless `old_is_live`.
    cfg: the actor's model.
    rl: settings.
    old_is_live: no update of the actor has come between the rollout batch and
      this one, so its live log-probs are the old ones.
  """
  count = sum(micro.num_actions for micro in micro_batches)
  denominator = jnp.float32(max(count, 1))
  gradient = programs.zero_gradient(state.actor)
  totals, loads = [], []
  for micro in micro_batches:
    gradient, parts, load = programs.actor_gradient(
      state.actor,
      gradient,
      _replayed(micro.batch, rl.replay),
      denominator,
      cfg=cfg,
      terms=rl.policy_terms,
      old_is_live=old_is_live,
      **_variant(micro, cfg, rl.replay),
    )
    totals.append(parts)
    loads.append(load)
  actor, actor_opt, norms = programs.apply_update(
    state.actor, state.actor_opt, gradient, config=rl.actor
  )
  report = losses.summarize(statistics.sum_of(totals), count)
  report |= {f"actor_{name}": float(x) for name, x in norms.items()}
  report |= statistics.routing(loads, micro_batches, replay=rl.replay)
  return state.replace(actor=actor, actor_opt=actor_opt), report


def _minibatches(trajectories, cfg, rl, count, draw) -> list[list[MicroBatch]]:
  """Whole trajectories dealt at random into `count` packed minibatches."""
  if rl.replay and cfg.num_moe_layers:
    for index, trajectory in enumerate(trajectories):
      if len(trajectory) > 1 and not (trajectory.routes >= 0).any():
        raise LearnerError(
          f"replay is on, but trajectory {index} (task {trajectory.task!r})"
          " has no route recorded. Find where the routes field was lost"
          " between sampler and learner, or set replay=False."
        )
  order = np.random.default_rng((rl.seed, draw)).permutation(len(trajectories))
  return [
    batching.pack(
      trajectories,
      indices=sorted(int(i) for i in order[first::count]),
      buckets=rl.buckets,
      token_budget=rl.token_budget,
      num_moe_layers=cfg.num_moe_layers,
      top_k=cfg.top_k,
    )
    for first in range(count)
  ]


def _merge(groups, count):
  """The same micro-batches in `count` minibatches, without empty ones."""
  size = len(groups) // count
  merged = [
    [micro for group in groups[i : i + size] for micro in group]
    for i in range(0, len(groups), size)
  ]
  return [m for m in merged if any(micro.num_actions for micro in m)]


def _per_trajectory(groups, run):
  """Runs a pass on every micro-batch; index -> [T] array."""
  # All are dispatched before the first result is fetched.
  micros = [micro for group in groups for micro in group]
  arrays = [run(micro) for micro in micros]
  return batching.unpack(micros, [np.asarray(a, np.float32) for a in arrays])


def _estimate(critic, groups, trajectories, cfg, rl, lam):
  """Fills values, advantages and returns in; also their statistics."""
  values = _values(critic, groups, cfg)
  advantages, returns = credit.estimate(trajectories, values, rl, lam=lam)
  flat = {
    name: credit.at_actions(arrays, trajectories)
    for name, arrays in (
      ("value", values),
      ("return", returns),
      ("advantage", advantages),
    )
  }
  metrics = {}
  if flat["value"].size:
    for name, array in flat.items():
      metrics[f"{name}_mean"] = float(array.mean())
      metrics[f"{name}_std"] = float(array.std())
    metrics["explained_variance"] = explained_variance(
      flat["value"], flat["return"]
    )
  if rl.whiten:
    advantages = credit.whiten(advantages, trajectories)
  groups = [
    batching.refill(
      group, values=values, advantages=advantages, returns=returns
    )
    for group in groups
  ]
  return groups, metrics


def _values(critic, groups, cfg):
  return _per_trajectory(
    groups,
    lambda micro: programs.value_pass(
      critic,
      micro.batch.replace(routes=None, reference_logprobs=None),
      cfg=cfg.critic(),
    ),
  )


def _quality(critic, trajectories, cfg, rl):
  """Explained variance of the warm-up's targets, three ways."""
  values = _values(critic, _minibatches(trajectories, cfg, rl, 1, 0), cfg)
  _, returns = credit.estimate(trajectories, values, rl, lam=rl.warmup_lambda)
  by_task = defaultdict(list)
  for index, trajectory in enumerate(trajectories):
    if trajectory.loss_mask.any():
      by_task[trajectory.task].append(index)
  found = {
    name: ([np.zeros(0)], [np.zeros(0)])
    for name in ("all", "first_action", "within_task")
  }
  for indices in by_task.values():
    masks = [trajectories[i].loss_mask for i in indices]
    for side, arrays in enumerate((values, returns)):
      parts = [arrays[i][m] for i, m in zip(indices, masks, strict=True)]
      whole = np.concatenate(parts).astype(np.float64)
      found["all"][side].append(whole)
      found["first_action"][side].append([part[0] for part in parts])
      if len(indices) > 1:
        found["within_task"][side].append(whole - whole.mean())
  return {
    name: explained_variance(*(np.concatenate(side) for side in sides))
    for name, sides in found.items()
  }


def _with_logprobs(params, groups, cfg, rl, field, *, replay=None):
  replay = rl.replay if replay is None else replay
  found = _per_trajectory(
    groups,
    lambda micro: programs.logprob_pass(
      params,
      _replayed(micro.batch, replay).replace(reference_logprobs=None),
      cfg=cfg,
      temperature=rl.temperature,
      forbidden_ids=rl.forbidden_ids,
      chunk=rl.logprob_chunk,
      **_variant(micro, cfg, replay),
    ),
  )
  return [batching.refill(group, **{field: found}) for group in groups]


def _replayed(batch, replay):
  return batch if replay else batch.replace(routes=None)


def _variant(micro, cfg, replay):
  """Which compiled variant of the actor fits this micro-batch.

  With every route recorded the load is known here, so the capacity is a rung
  of the static ladder that surely suffices. It is at least 1.25 times the
  mean load, so that ordinary batches share one rung and one program.
  """
  recorded = bool(replay and micro.recorded and cfg.num_moe_layers)
  capacity = None
  if recorded and cfg.dispatch == "capacity":
    tokens = micro.batch.tokens.size
    load = moe.max_load(
      micro.batch.routes, micro.batch.segment_ids, cfg.num_experts
    )
    usual = math.ceil(1.25 * tokens * cfg.top_k / cfg.num_experts)
    capacity = moe.capacity_for(max(load, usual), tokens)
  return {"recorded": recorded, "capacity": capacity}
