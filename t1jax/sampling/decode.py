"""The sampler's two device programs: prefill and a chunk of decode steps.

Axes: R rows of the program, S prefilled tokens, N decode steps, L MoE layers,
K experts per token, V vocabulary.

Prefill only extends the cache; it predicts nothing. Every sampled token, the
first of a turn too, comes out of `decode`, whose first input is the last token
of the history. So sampling is written once, and an append of one token needs
no prefill at all.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct

from t1jax.models import heads, transformer
from t1jax.models.config import ModelConfig
from t1jax.sampling import cache as kv
from t1jax.sampling.cache import Cache


@struct.dataclass
class Rows:
  """What one chunk of decoding needs to know about each of its rows."""

  slots: jax.Array  # [R] int32, distinct; padding rows name idle slots
  tokens: jax.Array  # [R] int32, the next input
  positions: jax.Array  # [R] int32, the position of that input
  budgets: jax.Array  # [R] int32, tokens still to sample; 0 on padding rows
  keys: jax.Array  # [R, 2] uint32, the episode's own key
  temperatures: jax.Array  # [R] float32, 0 = greedy


@struct.dataclass
class Chunk:
  """What a chunk of decoding produced; row r holds `counts[r]` entries."""

  tokens: jax.Array  # [R, N] int32, sampled
  logprobs: jax.Array  # [R, N] float32
  routes: jax.Array  # [R, N, L, K] int16, experts of the step's *input*
  counts: jax.Array  # [R] int32


def sample(
  logits_RxV: jax.Array,
  allowed_V: jax.Array,
  keys_Rx2: jax.Array,
  positions_R: jax.Array,
  temperatures_R: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Samples one token a row by the Gumbel maximum.

  The noise depends on (key, position) alone, not on the row, so an episode
  draws the same numbers wherever and beside whomever it runs.

  Args:
    logits_RxV: float.
    allowed_V: bool; ids where it is False have probability 0.
    keys_Rx2: uint32, one key per episode.
    positions_R: int32, position of the token to be sampled.
    temperatures_R: float32 >= 0; 0 takes the most likely token.

  Returns:
    (tokens_R int32, logprobs_R float32). The log-prob is that of the
    distribution sampled from: allowed ids only, at the row's temperature. A
    greedy row has no such number (it would be 0) and reports temperature 1.
  """
  greedy_R = temperatures_R == 0.0
  scale_R = jnp.where(greedy_R, jnp.float32(1.0), temperatures_R)
  logits_RxV = logits_RxV.astype(jnp.float32) / scale_R[:, None]
  logits_RxV = jnp.where(allowed_V[None, :], logits_RxV, -jnp.inf)

  def noise(key: jax.Array, position: jax.Array) -> jax.Array:
    key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
    return jax.random.gumbel(key, allowed_V.shape, jnp.float32)

  noise_RxV = jax.vmap(noise)(keys_Rx2, positions_R)
  noise_RxV = jnp.where(greedy_R[:, None], jnp.float32(0.0), noise_RxV)
  tokens_R = jnp.argmax(logits_RxV + noise_RxV, axis=-1).astype(jnp.int32)
  chosen_R = jnp.take_along_axis(logits_RxV, tokens_R[:, None], axis=-1)[:, 0]
  return tokens_R, chosen_R - jax.nn.logsumexp(logits_RxV, axis=-1)


def prefill(
  params,
  cache: Cache,
  slots_R: jax.Array,
  tokens_RxS: jax.Array,
  starts_R: jax.Array,
  lengths_R: jax.Array,
  *,
  cfg: ModelConfig,
  columns: int,
) -> tuple[Cache, jax.Array]:
  """Appends up to S tokens to each row's cached history.

  Args:
    params: the model's parameters.
    cache: the persistent cache (donated).
    slots_R: int32, distinct.
    tokens_RxS: int32; row r's first `lengths_R[r]` are real.
    starts_R: int32, tokens already cached: the first new position.
    lengths_R: int32, 0 on padding rows.
    cfg: the model.
    columns: static; every start + length is at most this.

  Returns:
    (cache, routes [R, S, L, K] int16, -1 on padding).
  """
  width = tokens_RxS.shape[1]
  offsets_S = jnp.arange(width, dtype=jnp.int32)
  real_RxS = offsets_S[None, :] < lengths_R[:, None]
  positions_RxS = jnp.where(
    real_RxS, starts_R[:, None] + offsets_S[None, :], jnp.int32(0)
  )
  outputs = transformer.apply(
    params,
    cfg,
    tokens_RxS,
    positions_RxS,
    real_RxS.astype(jnp.int32),
    cache=kv.take(cache, slots_R, columns),
  )
  cache = kv.put(cache, outputs.cache, slots_R, starts_R, width)
  routes_RxSxLxK = jnp.transpose(outputs.routes_LxBxSxK, (1, 2, 0, 3))
  return cache, routes_RxSxLxK.astype(jnp.int16)


def decode(
  params,
  cache: Cache,
  rows: Rows,
  allowed_V: jax.Array,
  stop_id: jax.Array,
  *,
  cfg: ModelConfig,
  steps: int,
  columns: int,
) -> tuple[Cache, Chunk]:
  """Samples up to `steps` tokens a row; returns early when every row is done.

  A row is done when it has sampled `stop_id` or used its budget. Its later
  steps are padding: they write nothing and count for nothing.

  Args:
    params: the model's parameters.
    cache: the persistent cache (donated).
    rows: the rows to run.
    allowed_V: bool, ids that may be sampled.
    stop_id: int32 scalar.
    cfg: the model.
    steps: static N.
    columns: static; every position + min(budget, steps) is at most this.

  Returns:
    (cache, chunk).
  """
  num_rows = rows.tokens.shape[0]
  shape = (num_rows, steps)
  # With a row for every slot the work is done in place, without a copy.
  whole = kv.slots(cache) == num_rows
  chunk = Chunk(
    tokens=jnp.zeros(shape, jnp.int32),
    logprobs=jnp.zeros(shape, jnp.float32),
    routes=jnp.full(
      (*shape, cfg.num_moe_layers, cfg.top_k), -1, dtype=jnp.int16
    ),
    counts=jnp.zeros((num_rows,), jnp.int32),
  )

  def unfinished(state) -> jax.Array:
    step, _, _, active_R, _ = state
    return (step < steps) & jnp.any(active_R)

  def advance(state):
    step, work, tokens_R, active_R, chunk = state
    # A done row stands still: it may be at its last column.
    positions_R = jnp.where(active_R, rows.positions + step, jnp.int32(0))
    outputs = transformer.apply(
      params,
      cfg,
      tokens_R[:, None],
      positions_R[:, None],
      active_R.astype(jnp.int32)[:, None],
      cache=work,
      columns=columns,
    )
    logits_RxV = heads.logits(params, cfg, outputs.hidden_BxSxD)[:, 0]
    sampled_R, logprobs_R = sample(
      logits_RxV, allowed_V, rows.keys, positions_R + 1, rows.temperatures
    )
    routes_Rx1xLxK = jnp.transpose(outputs.routes_LxBxSxK, (1, 2, 0, 3))
    put = functools.partial(
      jax.lax.dynamic_update_slice_in_dim, start_index=step, axis=1
    )
    chunk = Chunk(
      tokens=put(chunk.tokens, sampled_R[:, None]),
      logprobs=put(chunk.logprobs, logprobs_R[:, None]),
      routes=put(chunk.routes, routes_Rx1xLxK.astype(jnp.int16)),
      counts=chunk.counts + active_R.astype(jnp.int32),
    )
    step = step + 1
    active_R = active_R & (sampled_R != stop_id) & (step < rows.budgets)
    return step, outputs.cache, sampled_R, active_R, chunk

  work = cache if whole else kv.take(cache, rows.slots, columns)
  state = (jnp.int32(0), work, rows.tokens, rows.budgets > 0, chunk)
  _, work, _, _, chunk = jax.lax.while_loop(unfinished, advance, state)
  if whole:
    return work, chunk
  return kv.put(cache, work, rows.slots, rows.positions, steps), chunk
