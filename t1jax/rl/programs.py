"""The compiled programs of the learner: passes, gradients, one update.

Axes: B rows, S tokens, L MoE layers, E experts, K experts per token.

A step over a global batch is one gradient program per micro-batch, which adds
into a float32 accumulator that it is given (and donated), then one update
program. Shapes are few: one per bucket, and two variants of the actor's
programs, *recorded* (no top-k) and *mixed*.

Alignment: hidden[t-1] predicts token t. `predictions_of` moves what was read
from a hidden state to the token that it predicts; values and log-probs both
pass through it and nothing else shifts anything.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp
import optax
from optax import contrib

from t1jax.models import heads, transformer
from t1jax.models.config import ModelConfig
from t1jax.rl import losses
from t1jax.rl.batching import Batch
from t1jax.rl.settings import OptimizerConfig, PolicyTerms


@flax.struct.dataclass
class Load:
  """What the MoE layers did on a micro-batch, as sums."""

  tokens_LxE: jax.Array  # int32, real tokens per expert
  replayed_rows_L: jax.Array  # int32, real rows that took a replayed route


def predictions_of(hidden_read_BxS: jax.Array) -> jax.Array:
  """Moves a reading at t-1 to t. Token 0 has no predictor and reads 0."""
  return jnp.pad(hidden_read_BxS[:, :-1], ((0, 0), (1, 0)))


def action_logprobs(
  params: dict,
  batch: Batch,
  *,
  cfg: ModelConfig,
  temperature: float,
  forbidden_ids: tuple[int, ...] = (),
  chunk: int,
  recorded: bool,
  capacity: int | None,
) -> tuple[jax.Array, jax.Array, Load]:
  """Log-prob of each token and entropy of what predicted it, [B, S], aligned.

  Routes are replayed when the batch has any.
  """
  outputs = transformer.apply(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    routes_LxBxSxK=batch.routes,
    recorded=recorded,
    capacity=capacity,
  )
  targets_BxS = jnp.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
  logprobs, entropy = heads.token_logprobs(
    params,
    cfg,
    outputs.hidden_BxSxD,
    targets_BxS,
    temperature=temperature,
    forbidden_ids=forbidden_ids,
    chunk=chunk,
  )
  load = Load(outputs.load_LxE, outputs.replayed_rows_L)
  return predictions_of(logprobs), predictions_of(entropy), load


def action_values(params: dict, batch: Batch, *, cfg: ModelConfig) -> jax.Array:
  """V of the state that predicts each token, [B, S] float32, aligned.

  The critic routes by its own router: a batch with routes is refused.
  """
  if batch.routes is not None:
    raise ValueError(
      "The critic was handed the actor's routes. It has its own router: pass"
      " batch.replace(routes=None)."
    )
  outputs = transformer.apply(
    params, cfg, batch.tokens, batch.positions, batch.segment_ids
  )
  return predictions_of(heads.values(params, cfg, outputs.hidden_BxSxD))


value_pass = jax.jit(action_values, static_argnames=("cfg",))


@functools.partial(
  jax.jit,
  static_argnames=(
    "cfg",
    "temperature",
    "forbidden_ids",
    "chunk",
    "recorded",
    "capacity",
  ),
)
def logprob_pass(params: dict, batch: Batch, **static) -> jax.Array:
  """Log-prob of each token, [B, S] float32, aligned."""
  return action_logprobs(params, batch, **static)[0]


@functools.partial(
  jax.jit,
  static_argnames=("cfg", "terms", "recorded", "capacity", "old_is_live"),
  donate_argnames=("accumulated",),
)
def actor_gradient(
  params: dict,
  accumulated: dict,
  batch: Batch,
  denominator: jax.Array,
  *,
  cfg: ModelConfig,
  terms: PolicyTerms,
  recorded: bool,
  capacity: int | None,
  old_is_live: bool,
) -> tuple[dict, dict[str, jax.Array], Load]:
  """Adds this micro-batch's part of the PPO gradient.

  Args:
    params: the actor's.
    accumulated: float32 tree like params; consumed.
    batch: with advantages, and old log-probs unless `old_is_live`.
    denominator: action tokens of the global batch.
    cfg: the actor's model.
    terms: `RLConfig.policy_terms`.
    recorded, capacity: as for `transformer.apply`.
    old_is_live: the parameters are still those from before the update (a
      single minibatch and epoch), so the live log-probs are the old ones and
      the pass that would compute them is saved.

  Returns:
    The accumulator, statistics and expert load of this micro-batch.
  """

  def loss_fn(params):
    logprobs, entropy, load = action_logprobs(
      params,
      batch,
      cfg=cfg,
      temperature=terms.temperature,
      forbidden_ids=terms.forbidden_ids,
      chunk=terms.logprob_chunk,
      recorded=recorded,
      capacity=capacity,
    )
    old = jax.lax.stop_gradient(logprobs) if old_is_live else batch.old_logprobs
    loss, statistics = losses.ppo_loss(
      logprobs,
      old,
      batch.behaviour_logprobs,
      batch.advantages,
      batch.loss_mask,
      denominator,
      ratio_low=terms.ratio_low,
      ratio_high=terms.ratio_high,
      tis_cap=terms.tis_cap,
      entropy_BxS=entropy,
      entropy_coefficient=terms.entropy_coefficient,
      reference_logprobs_BxS=batch.reference_logprobs,
      kl_coefficient=terms.kl_coefficient,
    )
    return loss, (statistics, load)

  gradient, (statistics, load) = jax.grad(loss_fn, has_aux=True)(params)
  return _add(accumulated, gradient), statistics, load


@functools.partial(
  jax.jit,
  static_argnames=("cfg", "value_clip"),
  donate_argnames=("accumulated",),
)
def critic_gradient(
  params: dict,
  accumulated: dict,
  batch: Batch,
  denominator: jax.Array,
  *,
  cfg: ModelConfig,
  value_clip: float,
) -> tuple[dict, dict[str, jax.Array]]:
  """Adds this micro-batch's part of the value gradient."""

  def loss_fn(params):
    return losses.value_loss(
      action_values(params, batch, cfg=cfg),
      batch.values,
      batch.returns,
      batch.loss_mask,
      denominator,
      value_clip=value_clip,
    )

  gradient, statistics = jax.grad(loss_fn, has_aux=True)(params)
  return _add(accumulated, gradient), statistics


def _supervised(params, batch, denominator, *, cfg, chunk):
  logprobs, _, load = action_logprobs(
    params,
    batch,
    cfg=cfg,
    temperature=1.0,
    chunk=chunk,
    recorded=False,
    capacity=None,
  )
  loss = losses.supervised_loss(logprobs, batch.loss_mask, denominator)
  return loss, load


supervised_loss = jax.jit(_supervised, static_argnames=("cfg", "chunk"))


@functools.partial(
  jax.jit,
  static_argnames=("cfg", "chunk"),
  donate_argnames=("accumulated",),
)
def supervised_gradient(
  params: dict,
  accumulated: dict,
  batch: Batch,
  denominator: jax.Array,
  *,
  cfg: ModelConfig,
  chunk: int,
) -> tuple[dict, jax.Array, Load]:
  """Adds this micro-batch's part of the supervised gradient."""
  loss_fn = functools.partial(
    _supervised, batch=batch, denominator=denominator, cfg=cfg, chunk=chunk
  )
  (loss, load), gradient = jax.value_and_grad(loss_fn, has_aux=True)(params)
  return _add(accumulated, gradient), loss, load


@jax.jit
def zero_gradient(params: dict) -> dict:
  """A float32 accumulator of the parameters' shapes."""
  return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW or Muon."""
  parts = []
  if config.warmup_steps:
    # Starts at one step's worth: the first update is not lost.
    parts.append(
      optax.linear_schedule(
        config.learning_rate / config.warmup_steps,
        config.learning_rate,
        config.warmup_steps,
      )
    )
  parts.append(
    optax.cosine_decay_schedule(
      config.learning_rate, config.decay_steps, config.final_fraction
    )
    if config.decay_steps
    else optax.constant_schedule(config.learning_rate)
  )
  schedule = (
    optax.join_schedules(parts, [config.warmup_steps])
    if len(parts) > 1
    else parts[0]
  )
  if config.algorithm == "muon":
    algorithm = contrib.muon(
      schedule,
      adam_b1=config.b1,
      adam_b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
      muon_weight_dimension_numbers=_muon_axes,
      consistent_rms=0.2,
    )
  else:
    algorithm = optax.adamw(
      schedule,
      b1=config.b1,
      b2=config.b2,
      eps=config.eps,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
    )
  return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), algorithm)


# (input axes, output axes) of the matrices that Muon moves; experts are
# matrices of their own.
_MUON_AXES = {
  "q": (0, (1, 2)),
  "k": (0, (1, 2)),
  "v": (0, (1, 2)),
  "o": ((0, 1), 2),
  "gate": (-2, -1),
  "up": (-2, -1),
  "down": (-2, -1),
}


def _muon_axes(params):
  def of(path, leaf):
    del leaf
    axes = _MUON_AXES.get(getattr(path[-1], "key", None))
    return axes and contrib.MuonDimensionNumbers(*axes)

  return jax.tree_util.tree_map_with_path(of, params)


@functools.partial(jax.jit, static_argnames=("config",))
def init_optimizer(params: dict, *, config: OptimizerConfig) -> optax.OptState:
  """The optimiser's first state."""
  with _promotion_as_optax_expects():
    return make_optimizer(config).init(params)


@functools.partial(
  jax.jit,
  static_argnames=("config",),
  donate_argnames=("params", "opt_state"),
)
def apply_update(
  params: dict,
  opt_state: optax.OptState,
  gradient: dict,
  *,
  config: OptimizerConfig,
) -> tuple[dict, optax.OptState, dict[str, jax.Array]]:
  """One optimiser step; parameters and optimiser state are consumed.

  Returns:
    Parameters, optimiser state, and the norms of the gradient before
    clipping: `grad_norm` of all of it, `router_grad_norm` of the routers.
  """
  norms = {
    "grad_norm": _norm(jax.tree.leaves(gradient)),
    "router_grad_norm": router_norm(gradient),
  }
  with _promotion_as_optax_expects():
    updates, opt_state = make_optimizer(config).update(
      gradient, opt_state, params
    )
    params = optax.apply_updates(params, updates)
  return params, opt_state, norms


def router_norm(tree: dict) -> jax.Array:
  """Norm of the routers' part of a gradient, float32 scalar."""
  return _norm(_routers(tree))


def _promotion_as_optax_expects():
  # Optax raises floats to integer step counts, which strict rules forbid.
  return jax.numpy_dtype_promotion("standard")


def _norm(leaves):
  squares = [jnp.sum(jnp.square(leaf)) for leaf in leaves]
  return jnp.sqrt(sum(squares, start=jnp.float32(0.0)))


def _routers(tree):
  return [
    leaf
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    if any(getattr(key, "key", None) == "router" for key in path)
  ]


def _add(accumulated, gradient):
  return jax.tree.map(
    lambda total, part: total + part.astype(jnp.float32), accumulated, gradient
  )
