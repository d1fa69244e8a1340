"""Rotary grouped-query attention, over packed rows or over a cache.

Axes: B rows, S queries, C keys (C = S without a cache), J key/value heads,
G queries per key/value head (J * G query heads), P head width, D model width.
"""

import flax.struct
import jax
import jax.numpy as jnp

from t1jax.models.config import ModelConfig

# Finite, so that a padding query (no key at all) gets finite output, not NaN.
_MASKED = -1e30
# Queries per chunk.
_CHUNK = 128


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


@flax.struct.dataclass
class Visibility:
  """Who sees whom: key c is visible to query s of the same row when

    key_order[c] <= query_order[s]  and  key_segment[c] == query_segment[s]

  Kept as four small arrays, not as a [B, S, C] mask, so that long rows build
  only the part they are at. In `causal` visibility (packed rows) order is the
  index in the row, so a prefix of queries needs only that prefix of keys.
  """

  query_order_BxS: jax.Array
  key_order_BxC: jax.Array
  query_segment_BxS: jax.Array
  key_segment_BxC: jax.Array
  causal: bool = flax.struct.field(pytree_node=False)


def packed(segment_ids_BxS: jax.Array) -> Visibility:
  """Each token sees itself and what precedes it in its own segment.

  Padding (segment 0) sees padding alone; nothing real sees it.
  """
  s = segment_ids_BxS.shape[1]
  order = jnp.arange(s, dtype=jnp.int32)[None, :]
  return Visibility(order, order, segment_ids_BxS, segment_ids_BxS, True)


def cached(positions_BxS: jax.Array, columns: int) -> Visibility:
  """A token at position p sees the cache columns up to p, its own included."""
  zero = jnp.zeros((1, 1), jnp.int32)
  order = jnp.arange(columns, dtype=jnp.int32)[None, :]
  return Visibility(positions_BxS, order, zero, zero, False)


def attention(
  params: dict,
  cfg: ModelConfig,
  x_BxSxD: jax.Array,
  table: tuple[jax.Array, jax.Array],
  visibility: Visibility,
  write_at_BxS: jax.Array | None,
  cache: dict | None,
) -> tuple[jax.Array, dict | None]:
  """Self-attention of one layer.

  Args:
    params: {"q", "k", "v", "o"[, "q_norm", "k_norm"]}.
    cfg: the model.
    x_BxSxD: normalised input, in the compute dtype.
    table: `rotary_table` of the tokens' positions.
    visibility: which keys each query may see.
    write_at_BxS: int32 cache column of each token; a column outside the
      cache writes nothing. None without a cache.
    cache: {"k", "v"} of [B, C, J, P], or None.

  Returns:
    [B, S, D] and the cache with this call's keys and values written.
  """
  dtype = x_BxSxD.dtype
  # One product and one rotation for all heads instead of three and two.
  names = ("q", "k", "v")
  wide = jnp.concatenate([params[n].astype(dtype) for n in names], axis=1)
  heads = jnp.einsum("bsd,dhp->bshp", x_BxSxD, wide)
  h, j = cfg.num_heads, cfg.num_kv_heads
  qk, v = heads[:, :, : h + j], heads[:, :, h + j :]
  if cfg.qk_norm:
    q = rms_norm(qk[:, :, :h], params["q_norm"], cfg.norm_eps)
    k = rms_norm(qk[:, :, h:], params["k_norm"], cfg.norm_eps)
    qk = jnp.concatenate([q, k], axis=2)
  qk = rotate(qk, table)
  q, k = qk[:, :, :h], qk[:, :, h:]
  if cache is not None:
    rows = jnp.arange(x_BxSxD.shape[0], dtype=jnp.int32)[:, None]
    cache = {
      name: cache[name]
      .at[rows, write_at_BxS]
      .set(new.astype(cache[name].dtype), mode="drop")
      for name, new in (("k", k), ("v", v))
    }
    columns = visibility.key_order_BxC.shape[1]
    k, v = (cache[name][:, :columns].astype(dtype) for name in ("k", "v"))
  out = attend(q, k, v, visibility)
  out = jnp.einsum("bshp,hpd->bsd", out, params["o"].astype(dtype))
  return out, cache


def attend(
  q_BxSxHxP: jax.Array,
  k_BxCxJxP: jax.Array,
  v_BxCxJxP: jax.Array,
  visibility: Visibility,
) -> jax.Array:
  """Grouped softmax attention, probabilities in float32; returns q's shape.

  Each key/value head meets its G queries as the rows of one matrix, so that
  keys are not repeated and every product is a plain batched one. Queries go
  in chunks: up to 8 unrolled ones, each against the keys it can see, else a
  loop whose memory is one chunk's.
  """
  b, s, h, p = q_BxSxHxP.shape
  j = k_BxCxJxP.shape[2]
  q = (q_BxSxHxP * p**-0.5).reshape(b, s, j, h // j, p)
  if s == 1:
    return _attend_one(q[:, 0], k_BxCxJxP, v_BxCxJxP, visibility).reshape(
      b, 1, h, p
    )
  q = jnp.transpose(q, (0, 2, 3, 1, 4))  # [B, J, G, S, P]
  k, v = (jnp.swapaxes(x, 1, 2) for x in (k_BxCxJxP, v_BxCxJxP))
  if s <= 8 * _CHUNK:
    chunks = []
    for start in range(0, s, _CHUNK):
      end = min(start + _CHUNK, s)
      keys = end if visibility.causal else k.shape[2]
      visible = _visible(visibility, start, end - start)[:, :, :keys]
      chunks.append(
        _softmax_attention(
          q[:, :, :, start:end], k[:, :, :keys], v[:, :, :keys], visible
        )
      )
    out = jnp.concatenate(chunks, axis=3)
  else:
    padding = -s % _CHUNK
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, padding), (0, 0)))
    visibility = visibility.replace(
      query_order_BxS=_pad(visibility.query_order_BxS, padding),
      query_segment_BxS=_pad(visibility.query_segment_BxS, padding),
    )

    @jax.checkpoint
    def one(start):
      part = jax.lax.dynamic_slice_in_dim(q, start, _CHUNK, axis=3)
      return _softmax_attention(part, k, v, _visible(visibility, start, _CHUNK))

    starts = jnp.arange(0, s + padding, _CHUNK, dtype=jnp.int32)
    out = jnp.moveaxis(jax.lax.map(one, starts), 0, 3)
    out = out.reshape(*q.shape[:3], s + padding, p)[:, :, :, :s]
  return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(b, s, h, p)


def _pad(x_BxS, padding):
  if x_BxS.shape[1] == 1:  # one value for the whole row
    return x_BxS
  return jnp.pad(x_BxS, ((0, 0), (0, padding)))


def _visible(visibility, start, size):
  """The [B, size, C] part of the mask for queries from `start`."""

  def part(x_BxS):
    if x_BxS.shape[1] == 1:
      return x_BxS[:, :, None]
    return jax.lax.dynamic_slice_in_dim(x_BxS, start, size, axis=1)[:, :, None]

  before = visibility.key_order_BxC[:, None, :] <= part(
    visibility.query_order_BxS
  )
  same = visibility.key_segment_BxC[:, None, :] == part(
    visibility.query_segment_BxS
  )
  return before & same


def _attend_one(q_BxJxGxP, k_BxCxJxP, v_BxCxJxP, visibility):
  """One query per row, reading keys in the cache's own layout.

  Queries are spread over a block-diagonal [J * G, J * P], which multiplies by
  zeros but spares a transposed copy of the whole cache at every step.
  """
  b, j, g, p = q_BxJxGxP.shape
  c = k_BxCxJxP.shape[1]
  eye = jnp.eye(j, dtype=q_BxJxGxP.dtype)[None, :, None, :, None]
  q = (q_BxJxGxP[:, :, :, None, :] * eye).reshape(b, j * g, j * p)
  scores = jnp.einsum(
    "bhq,bcq->bhc",
    q,
    k_BxCxJxP.reshape(b, c, j * p),
    preferred_element_type=jnp.float32,
  )
  visible = _visible(visibility, 0, 1)
  probs = jax.nn.softmax(jnp.where(visible, scores, _MASKED), axis=-1)
  out = jnp.einsum(
    "bhc,bcq->bhq", probs.astype(q.dtype), v_BxCxJxP.reshape(b, c, j * p)
  )
  return jnp.sum(out.reshape(b, j, g, j, p) * eye, axis=3)


@jax.custom_vjp
def _softmax_attention(q_BxJxGxSxP, k_BxJxCxP, v_BxJxCxP, visible_BxSxC):
  """softmax(q k^T) v with scaled queries.

  The gradient is written out because it needs only q, k, v, the output and
  the probabilities; autodiff would save more arrays of the scores' size.
  """
  return _softmax_attention_fwd(
    q_BxJxGxSxP, k_BxJxCxP, v_BxJxCxP, visible_BxSxC
  )[0]


def _softmax_attention_fwd(q, k, v, visible):
  b, j, g, s, p = q.shape
  c = k.shape[2]
  scores = jnp.einsum(
    "bjsp,bjcp->bjsc",
    q.reshape(b, j, g * s, p),
    k,
    preferred_element_type=jnp.float32,
  ).reshape(b, j, g, s, c)
  scores = jnp.where(visible[:, None, None], scores, _MASKED)
  probs = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  probs = probs.reshape(b, j, g * s, c)
  out = jnp.einsum("bjsc,bjcp->bjsp", probs, v)
  out = out.reshape(q.shape).astype(q.dtype)
  return out, (q, k, v, probs, out)


def _softmax_attention_bwd(saved, grad):
  q, k, v, probs, out = saved
  b, j, g, s, p = q.shape
  q, out, grad = (x.reshape(b, j, g * s, p) for x in (q, out, grad))
  f32 = jnp.float32
  grad_v = jnp.einsum("bjsc,bjsp->bjcp", probs, grad)
  grad_probs = jnp.einsum(
    "bjsp,bjcp->bjsc", grad, v, preferred_element_type=f32
  )
  mean = jnp.sum(out.astype(f32) * grad.astype(f32), axis=-1, keepdims=True)
  grad_scores = (probs.astype(f32) * (grad_probs - mean)).astype(q.dtype)
  grad_q = jnp.einsum("bjsc,bjcp->bjsp", grad_scores, k)
  grad_k = jnp.einsum("bjsc,bjsp->bjcp", grad_scores, q)
  return grad_q.reshape(b, j, g, s, p), grad_k, grad_v, None


_softmax_attention.defvjp(_softmax_attention_fwd, _softmax_attention_bwd)
