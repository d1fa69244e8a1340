"""Supervised steps on demonstrations: the warm start and its control."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import optax

from t1jax.models.config import ModelConfig
from t1jax.rl import programs
from t1jax.rl.batching import MicroBatch
from t1jax.rl.settings import OptimizerConfig


@flax.struct.dataclass
class SupervisedState:
  """An actor under supervision."""

  params: dict
  opt_state: optax.OptState
  step: jax.Array  # int32 scalar, updates taken


def init_supervised(
  params: dict, optimizer: OptimizerConfig
) -> SupervisedState:
  """A state around `params`, whose buffers the first step consumes."""
  return SupervisedState(
    params=params,
    opt_state=programs.init_optimizer(params, config=optimizer),
    step=jnp.zeros((), jnp.int32),
  )


def sft_step(
  state: SupervisedState,
  micro_batches: Sequence[MicroBatch],
  cfg: ModelConfig,
  optimizer: OptimizerConfig,
  *,
  chunk: int = 1024,
) -> tuple[SupervisedState, dict[str, jax.Array]]:
  """One update on a global batch given as micro-batches.

  Args:
    state: consumed.
    micro_batches: from `batching.pack_demonstrations`.
    cfg: the actor's model.
    optimizer: the same at every step.
    chunk: tokens whose logits exist at a time.

  Returns:
    The new state; `loss` (nats per masked token), `grad_norm`,
    `router_grad_norm`, as device scalars so that the host need not wait.
  """
  denominator = _denominator(micro_batches)
  gradient = programs.zero_gradient(state.params)
  loss = jnp.zeros((), jnp.float32)
  for micro in micro_batches:
    gradient, part, _ = programs.supervised_gradient(
      state.params,
      gradient,
      micro.batch.replace(routes=None),
      denominator,
      cfg=cfg,
      chunk=chunk,
    )
    loss = loss + part
  params, opt_state, norms = programs.apply_update(
    state.params, state.opt_state, gradient, config=optimizer
  )
  state = SupervisedState(params, opt_state, state.step + 1)
  return state, {"loss": loss, **norms}


def evaluation_loss(
  params: dict,
  micro_batches: Sequence[MicroBatch],
  cfg: ModelConfig,
  *,
  chunk: int = 1024,
) -> float:
  """Mean loss over the masked tokens of all micro-batches, in nats."""
  denominator = _denominator(micro_batches)
  parts = [
    programs.supervised_loss(
      params,
      micro.batch.replace(routes=None),
      denominator,
      cfg=cfg,
      chunk=chunk,
    )[0]
    for micro in micro_batches
  ]
  return float(sum(float(part) for part in parts))


def _denominator(micro_batches):
  # All masked: the loss is 0 over 1, not 0 over 0.
  return jnp.float32(max(1, sum(m.num_actions for m in micro_batches)))
