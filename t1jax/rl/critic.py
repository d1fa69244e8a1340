"""The critic: a copy of the actor with a value head, and its quality."""

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models import params as model_params
from t1jax.models.config import ModelConfig


def init_from_actor(actor: dict, cfg: ModelConfig) -> dict:
  """Critic parameters: the actor's trunk, copied, and a value head of zeros.

  Copied, not shared: both models' updates donate their buffers. Routers are
  part of the trunk; from here on the critic's go their own way. A critic of
  fewer layers (`cfg.critic_layers`) takes the actor's first ones.

  Args:
    actor: the actor's parameters.
    cfg: the actor's model; the critic's is `cfg.critic()`.
  """
  specs = model_params.specs(cfg.critic())
  trunk = {name: tree for name, tree in actor.items() if name != "head"}
  trunk["layers"] = trunk["layers"][: cfg.critic().num_layers]
  critic = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), trunk)
  head = specs["head"]
  critic["head"] = jnp.zeros(head.shape, jnp.dtype(head.dtype))
  return critic


def explained_variance(values_N: np.ndarray, returns_N: np.ndarray) -> float:
  """1 - Var(returns - values) / Var(returns), over N action tokens.

  1 is perfect, 0 no better than a constant, negative worse than one. Where
  the returns do not vary nothing can be explained, and it is 0.
  """
  values_N = np.asarray(values_N, np.float64)
  returns_N = np.asarray(returns_N, np.float64)
  if values_N.shape != returns_N.shape or values_N.ndim != 1:
    raise ValueError(
      f"values {values_N.shape} and returns {returns_N.shape} must be one"
      " vector each, of the same length."
    )
  variance = returns_N.var() if returns_N.size else 0.0
  # Returns that are equal but for rounding: their variance is noise.
  if variance <= 1e-12 * max(1.0, float(np.square(returns_N).max(initial=0))):
    return 0.0
  return float(1.0 - (returns_N - values_N).var() / variance)
