"""Rotary grouped-query attention, over packed rows or over a cache.

Axes: B rows, S queries, C keys (C = S without a cache), J key/value heads,
G queries per key/value head (J * G query heads), P head width, D model width.
"""

import jax
import jax.numpy as jnp

from t1jax.models.config import ModelConfig

# Finite, so that a padding query (no key at all) gets finite output, not NaN.
_MASKED = -1e30


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
  """x / rms(x) * scale over the last axis, in float32; returns x's dtype."""
  x32 = x.astype(jnp.float32)
  inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
  scale = jnp.broadcast_to(scale.astype(jnp.float32), x.shape)
  return (x32 * inverse * scale).astype(x.dtype)


def rotary_table(
  cfg: ModelConfig, positions_BxS: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns cosines and sines, float32 [B, S, 1, P / 2]; once per forward."""
  half = cfg.head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  frequency = (cfg.rope_theta**-exponent)[None, None, :]
  angle = positions_BxS.astype(jnp.float32)[:, :, None] * frequency
  return jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]


def rotate(x_BxSxHxP: jax.Array, table) -> jax.Array:
  """Rotates pairs (i, i + P / 2) by their position's angle."""
  cos, sin = (t.astype(x_BxSxHxP.dtype) for t in table)
  a, b = jnp.split(x_BxSxHxP, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def packed_mask(segment_ids_BxS: jax.Array) -> jax.Array:
  """Returns [B, S, S] bool: key at or before the query in its own segment.

  Padding (segment 0) sees padding alone; nothing real sees it.
  """
  s = segment_ids_BxS.shape[1]
  same = segment_ids_BxS[:, :, None] == segment_ids_BxS[:, None, :]
  return same & jnp.tril(jnp.ones((s, s), jnp.bool_))[None]


def cache_mask(positions_BxS: jax.Array, length: int) -> jax.Array:
  """Returns [B, S, C] bool: column at or before the query's position."""
  columns = jnp.arange(length, dtype=jnp.int32)[None, None, :]
  return columns <= positions_BxS[:, :, None]


def attention(
  params: dict,
  cfg: ModelConfig,
  x_BxSxD: jax.Array,
  table,
  mask_BxSxC: jax.Array,
  write_at: jax.Array | None,
  cache: dict | None,
) -> tuple[jax.Array, dict | None]:
  """Self-attention of one layer.

  Args:
    params: {"q", "k", "v", "o"[, "q_norm", "k_norm"]}.
    cfg: the model.
    x_BxSxD: normalised input, in the compute dtype.
    table: `rotary_table` of the tokens' positions.
    mask_BxSxC: which key each query may see.
    write_at: [B, S] int32 cache column of each token; a column outside the
      cache writes nothing. None without a cache.
    cache: {"k", "v"} of [B, C, J, P], or None.

  Returns:
    [B, S, D] and the cache with this call's keys and values written.
  """
  dtype = x_BxSxD.dtype
  weights = jax.tree.map(lambda p: p.astype(dtype), params)
  q = jnp.einsum("bsd,dhp->bshp", x_BxSxD, weights["q"])
  k = jnp.einsum("bsd,djp->bsjp", x_BxSxD, weights["k"])
  v = jnp.einsum("bsd,djp->bsjp", x_BxSxD, weights["v"])
  if cfg.qk_norm:
    q = rms_norm(q, params["q_norm"], cfg.norm_eps)
    k = rms_norm(k, params["k_norm"], cfg.norm_eps)
  q, k = rotate(q, table), rotate(k, table)
  if cache is not None:
    rows = jnp.arange(x_BxSxD.shape[0], dtype=jnp.int32)[:, None]
    cache = {
      name: cache[name]
      .at[rows, write_at]
      .set(new.astype(cache[name].dtype), mode="drop", unique_indices=True)
      for name, new in (("k", k), ("v", v))
    }
    k, v = cache["k"].astype(dtype), cache["v"].astype(dtype)
  b, s, h, p = q.shape
  q = q.reshape(b, s, cfg.num_kv_heads, h // cfg.num_kv_heads, p)
  # Grouped: each key/value head meets its G queries without being repeated.
  out = _attend(q, k, v, mask_BxSxC)
  out = jnp.einsum("bshp,hpd->bsd", out.reshape(b, s, h, p), weights["o"])
  return out, cache


def _attend(q_BxSxJxGxP, k_BxCxJxP, v_BxCxJxP, mask_BxSxC):
  """Softmax attention, probabilities in float32; returns q's shape."""
  scale = q_BxSxJxGxP.shape[-1] ** -0.5
  scores = jnp.einsum(
    "bsjgp,bcjp->bjgsc",
    q_BxSxJxGxP * scale,
    k_BxCxJxP,
    preferred_element_type=jnp.float32,
  )
  scores = jnp.where(mask_BxSxC[:, None, None], scores, _MASKED)
  probs = jax.nn.softmax(scores, axis=-1).astype(v_BxCxJxP.dtype)
  return jnp.einsum("bjgsc,bcjp->bsjgp", probs, v_BxCxJxP)
