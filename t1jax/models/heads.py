"""What is read off the hidden states: logits, log-probabilities, values.

Alignment is the caller's: the hidden state at t - 1 predicts token t.
Axes: B rows, S tokens, T = B * S, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models.config import ModelConfig

_NEVER = np.float32(-1e9)  # the logit of what cannot be sampled


def logits(params: dict, cfg: ModelConfig, hidden: jax.Array) -> jax.Array:
  """Returns float32 [..., V] for hidden states [..., D] (after final norm)."""
  _require(cfg, "lm", "logits")
  subscripts, weight = (
    ("...d,vd->...v", params["embed"])
    if cfg.tie_embeddings
    else ("...d,dv->...v", params["head"])
  )
  return jnp.einsum(
    subscripts,
    hidden,
    weight.astype(hidden.dtype),
    preferred_element_type=jnp.float32,
  )


def token_logprobs(
  params: dict,
  cfg: ModelConfig,
  hidden_BxSxD: jax.Array,
  targets_BxS: jax.Array,
  *,
  temperature: float = 1.0,
  chunk: int = 1024,
  forbidden_ids: tuple[int, ...] = (),
) -> tuple[jax.Array, jax.Array]:
  """Exact log-probability of each target and entropy of each distribution.

  Tokens pass the head in chunks and each chunk is recomputed in the backward
  pass, so that at most [chunk, V] logits exist at a time.

  Args:
    params: the model's parameters.
    cfg: the model, with an LM head.
    hidden_BxSxD: hidden states that predict the targets.
    targets_BxS: int32 in [0, V); a negative one reads an arbitrary entry.
    temperature: logits are divided by it before the softmax.
    chunk: tokens per chunk.
    forbidden_ids: never sampled, so not in the distribution either: a sampler
      that excludes control tokens normalises over the others. As a target
      such an id reads 0.

  Returns:
    Two float32 [B, S], in nats.
  """
  b, s = targets_BxS.shape
  total = b * s
  chunk = min(chunk, total)
  padding = -total % chunk
  allowed_V = np.ones(cfg.vocab_size, bool)
  allowed_V[list(forbidden_ids)] = False

  def split(x):
    x = x.reshape(total, *x.shape[2:])
    x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(-1, chunk, *x.shape[1:])

  @jax.checkpoint
  def one(pair):
    hidden_CxD, targets_C = pair
    scaled_CxV = logits(params, cfg, hidden_CxD) / temperature
    if forbidden_ids:
      # Finite: 0 probability times it is 0, and not a number never arises.
      scaled_CxV = jnp.where(allowed_V[None], scaled_CxV, _NEVER)
    log_z = jax.nn.logsumexp(scaled_CxV, axis=-1)
    logprobs_CxV = scaled_CxV - log_z[:, None]
    picked = jnp.take_along_axis(
      logprobs_CxV, jnp.maximum(targets_C, 0)[:, None], axis=-1
    )[:, 0]
    if forbidden_ids:
      allowed_C = jnp.asarray(allowed_V)[targets_C]
      picked = jnp.where(allowed_C, picked, jnp.zeros_like(picked))
    # Not log_z - E[logit]: that cancels when logits are large.
    return picked, -jnp.sum(jnp.exp(logprobs_CxV) * logprobs_CxV, axis=-1)

  logprobs, entropy = jax.lax.map(
    one, (split(hidden_BxSxD), split(targets_BxS))
  )
  return tuple(x.reshape(-1)[:total].reshape(b, s) for x in (logprobs, entropy))


def values(
  params: dict, cfg: ModelConfig, hidden_BxSxD: jax.Array
) -> jax.Array:
  """Returns float32 [B, S]; no temperature ever touches a value."""
  _require(cfg, "value", "values")
  return jnp.einsum(
    "bsd,d->bs",
    hidden_BxSxD.astype(jnp.float32),
    params["head"].astype(jnp.float32),
  )


def _require(cfg, head, what):
  if cfg.head != head:
    raise ValueError(
      f"heads.{what} needs a model with head={head!r}; this one has "
      f"head={cfg.head!r}. Build it from the matching ModelConfig."
    )
