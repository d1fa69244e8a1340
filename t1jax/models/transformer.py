"""The decoder: one function for training, prefill and decoding.

Axes: B rows, S tokens, D model width, L MoE layers, E experts, K experts per
token, C cache columns.
"""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from t1jax.models import attention, moe
from t1jax.models.config import ModelConfig


@flax.struct.dataclass
class Outputs:
  """What a forward pass yields, one row per input token."""

  hidden_BxSxD: jax.Array  # after the final norm, in the compute dtype
  routes_LxBxSxK: jax.Array  # int32 experts used; -1 where none was loaded
  load_LxE: jax.Array  # int32 real tokens per expert
  replayed_rows_L: jax.Array  # int32 real rows that took a replayed route
  cache: tuple | None


def apply(
  params: dict,
  cfg: ModelConfig,
  tokens_BxS: jax.Array,
  positions_BxS: jax.Array,
  segment_ids_BxS: jax.Array,
  *,
  routes_LxBxSxK: jax.Array | None = None,
  recorded: bool = False,
  capacity: int | None = None,
  cache: tuple | None = None,
  columns: int | None = None,
) -> Outputs:
  """Runs the decoder.

  Without a cache a row packs segments (1, 2, ...; 0 is padding), each a
  sequence of its own. With a cache a row is one sequence: a token at position
  p writes column p and sees columns <= p, so decoding (S = 1) and chunked
  prefill are this same call; tokens of segment 0 write nothing and their
  outputs mean nothing.

  Args:
    params: tree of `params.specs(cfg)`.
    cfg: the model; static.
    tokens_BxS: int32 ids.
    positions_BxS: int32 position in its segment.
    segment_ids_BxS: int32, 0 = padding.
    routes_LxBxSxK: experts to replay by MoE layer, -1 rows = not recorded;
      None = the model routes by itself.
    recorded: static promise that every real row has a route: the program then
      holds no top-k. A real row of -1 loads no expert, which is right only
      for a sequence's last token (nothing reads its hidden state).
    capacity: static tokens per expert that the caller knows to suffice
      (`moe.capacity_for`); exceeding it yields NaN, never a dropped token.
      None = nothing is promised and any load fits.
    cache: per layer {"k", "v"} of [B, C, num_kv_heads, head_dim].
    columns: static promise that every real position is below it: attention
      then reads only so many columns of the cache, which is most of a decode
      step's time. Breaking it yields NaN in that row. None = all of them.

  Returns:
    Outputs; `cache` is the updated one.
  """
  chex.assert_rank([tokens_BxS, positions_BxS, segment_ids_BxS], 2)
  chex.assert_equal_shape([tokens_BxS, positions_BxS, segment_ids_BxS])
  b, s = tokens_BxS.shape
  if routes_LxBxSxK is not None and cfg.num_moe_layers:
    chex.assert_shape(routes_LxBxSxK, (cfg.num_moe_layers, b, s, cfg.top_k))
  if recorded and routes_LxBxSxK is None and cfg.num_moe_layers:
    raise ValueError(
      "apply(recorded=True) has no routes; pass routes_LxBxSxK of shape "
      f"{(cfg.num_moe_layers, b, s, cfg.top_k)} or recorded=False."
    )
  if columns is not None and cache is None:
    raise ValueError(
      f"apply(columns={columns}) without a cache; it bounds the cache columns "
      "that attention reads. Pass a cache or leave it out."
    )
  dtype = jnp.dtype(cfg.compute_dtype)
  real_BxS = segment_ids_BxS > 0
  table = attention.rotary_table(cfg, positions_BxS)
  if cache is None:
    visibility, write_at = attention.packed(segment_ids_BxS), None
  else:
    length = cache[0]["k"].shape[1]
    visibility = attention.cached(positions_BxS, columns or length)
    write_at = jnp.where(real_BxS, positions_BxS, length)

  def layer(tree, x, layer_cache, replay):
    normed = attention.rms_norm(x, tree["attn_norm"], cfg.norm_eps)
    mixed, layer_cache = attention.attention(
      tree["attn"], cfg, normed, table, visibility, write_at, layer_cache
    )
    x = x + mixed
    normed = attention.rms_norm(x, tree["mlp_norm"], cfg.norm_eps)
    if "moe" not in tree:
      return x + moe.swiglu(tree["mlp"], normed), layer_cache, None
    out, routing = moe.moe(
      tree["moe"], cfg, normed, real_BxS, replay,
      recorded=recorded, slots_per_expert=capacity,
    )  # fmt: skip
    return x + out, layer_cache, routing

  if cfg.remat:
    layer = jax.checkpoint(layer)
  x = params["embed"].astype(dtype)[tokens_BxS]
  routings, caches = [], []
  # Unrolled: on CPU a scan over layers trains about 25 % slower.
  for index, tree in enumerate(params["layers"]):
    row = cfg.moe_index.get(index)
    replay = None
    if row is not None and routes_LxBxSxK is not None:
      replay = routes_LxBxSxK[row]
    layer_cache = None if cache is None else cache[index]
    x, layer_cache, routing = layer(tree, x, layer_cache, replay)
    caches.append(layer_cache)
    if routing is not None:
      routings.append(routing)
  if columns is not None:
    broken = jnp.any(real_BxS & (positions_BxS >= columns), axis=1)
    x = jnp.where(broken[:, None, None], jnp.nan, x)
  k, e = cfg.top_k, cfg.num_experts
  return Outputs(
    hidden_BxSxD=attention.rms_norm(x, params["final_norm"], cfg.norm_eps),
    routes_LxBxSxK=_stack([r.ids_BxSxK for r in routings], (b, s, k)),
    load_LxE=_stack([r.load_E for r in routings], (e,)),
    replayed_rows_L=_stack([r.replayed_rows for r in routings], ()),
    cache=None if cache is None else tuple(caches),
  )


def _stack(parts, shape):
  if not parts:
    return jnp.zeros((0, *shape), jnp.int32)
  return jnp.stack(parts)
