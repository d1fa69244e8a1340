"""Sparse mixture of experts: routing (free or replayed) and dispatch.

Axes: B rows, S tokens, T = B * S, D model width, E experts, K experts per
token, C slots per expert, F inner width of an expert.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models.config import ModelConfig


@flax.struct.dataclass
class Routing:
  """Which experts each token used, and how strongly."""

  ids_BxSxK: jax.Array  # int32; -1 where no expert is loaded
  weights_BxSxK: jax.Array  # float32
  load_E: jax.Array  # int32 tokens per expert
  replayed_rows: jax.Array  # int32 scalar: real rows with a replayed route


def swiglu(params: dict, x: jax.Array) -> jax.Array:
  """down(silu(gate(x)) * up(x)) over the last axis."""
  gate, up, down = (params[n].astype(x.dtype) for n in ("gate", "up", "down"))
  return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def moe(
  params: dict,
  cfg: ModelConfig,
  x_BxSxD: jax.Array,
  real_BxS: jax.Array,
  replay_BxSxK: jax.Array | None,
  *,
  recorded: bool = False,
  capacity: int | None = None,
) -> tuple[jax.Array, Routing]:
  """One MoE layer; arguments as in `transformer.apply`.

  Returns:
    [B, S, D] in x's dtype and the routing that was used.
  """
  b, s, d = x_BxSxD.shape
  # The router works in float32 whatever the compute dtype: a bf16 rounding
  # flips experts.
  logits = jnp.einsum(
    "bsd,de->bse",
    x_BxSxD.astype(jnp.float32),
    params["router"].astype(jnp.float32),
  )
  routing = route(cfg, logits, real_BxS, replay_BxSxK, recorded=recorded)
  x = x_BxSxD.reshape(b * s, d)
  ids = routing.ids_BxSxK.reshape(b * s, cfg.top_k)
  weights = routing.weights_BxSxK.reshape(b * s, cfg.top_k)
  if cfg.dispatch == "dense":
    out = dense(params, x, ids, weights)
  else:
    out = dispatch_capacity(
      params, x, ids, weights, routing.load_E, capacity=capacity
    )
  if cfg.d_shared:
    out = out + swiglu(params["shared"], x)
  return out.reshape(b, s, d), routing


def route(
  cfg: ModelConfig,
  logits_BxSxE: jax.Array,
  real_BxS: jax.Array,
  replay_BxSxK: jax.Array | None,
  *,
  recorded: bool = False,
) -> Routing:
  """Chooses experts and weighs them by the live logits.

    ids = where(row missing, own top-k, replayed)          no gradient
    weights = softmax over the live logits of ids          (norm_topk_prob)
            = softmax over all live logits, read at ids    (otherwise)

  Selecting ids before the softmax (not zeroing afterwards) lets the gradient
  reach the router for every id used, also one outside the live top-k.

  Args:
    cfg: the model.
    logits_BxSxE: float32 router logits.
    real_BxS: bool; padding loads no expert.
    replay_BxSxK: int ids, -1 rows = missing; None = all missing.
    recorded: no row is missing, so no top-k is computed.

  Returns:
    Routing.
  """
  if recorded:
    ids = replay_BxSxK.astype(jnp.int32)
    replayed = ids[..., 0] >= 0
  else:
    ids = top_k(jax.lax.stop_gradient(logits_BxSxE), cfg.top_k)
    replayed = jnp.zeros_like(real_BxS)
    if replay_BxSxK is not None:
      replayed = replay_BxSxK[..., 0] >= 0
      ids = jnp.where(replayed[..., None], replay_BxSxK.astype(jnp.int32), ids)
  ids = jnp.where(real_BxS[..., None], ids, -1)
  # A comparison instead of a gather: -1 matches no expert (it would wrap to
  # the last one as an index), and the transpose is no scatter.
  experts = jnp.arange(cfg.num_experts, dtype=jnp.int32)[None, None, None, :]
  chosen_BxSxKxE = ids[..., None] == experts

  def at_ids(table_BxSxE):
    return jnp.sum(
      jnp.where(chosen_BxSxKxE, table_BxSxE[:, :, None, :], 0.0), axis=-1
    )

  if cfg.norm_topk_prob:
    weights = jax.nn.softmax(at_ids(logits_BxSxE), axis=-1)
  else:
    weights = at_ids(jax.nn.softmax(logits_BxSxE, axis=-1))
  return Routing(
    ids_BxSxK=ids,
    weights_BxSxK=weights,
    load_E=jnp.sum(chosen_BxSxKxE, axis=(0, 1, 2), dtype=jnp.int32),
    replayed_rows=jnp.sum(replayed & real_BxS, dtype=jnp.int32),
  )


def top_k(logits: jax.Array, k: int) -> jax.Array:
  """Returns int32 [..., k], best first; ties go to the lower id."""
  return jax.lax.top_k(logits, k)[1].astype(jnp.int32)


def dense(
  params: dict, x_TxD: jax.Array, ids_TxK: jax.Array, weights_TxK: jax.Array
) -> jax.Array:
  """Every expert on every token, then a masked sum: the oracle."""
  dtype = x_TxD.dtype
  gate, up, down = (params[n].astype(dtype) for n in ("gate", "up", "down"))
  experts = jnp.arange(gate.shape[0], dtype=jnp.int32)[None, None, :]
  weights_TxE = jnp.sum(
    jnp.where(ids_TxK[..., None] == experts, weights_TxK[..., None], 0.0),
    axis=1,
  ).astype(dtype)
  hidden = jax.nn.silu(jnp.einsum("td,edf->tef", x_TxD, gate))
  hidden = hidden * jnp.einsum("td,edf->tef", x_TxD, up)
  return jnp.einsum("tef,efd->td", hidden * weights_TxE[..., None], down)


def capacity_for(max_load: int, num_tokens: int) -> int:
  """Smallest rung of the static ladder that holds `max_load` (host side).

  Rungs are powers of two and their midpoints (16, 24, 32, 48, 64, ...), at
  most `num_tokens`: at most a third of the slots is wasted and a run meets
  few shapes.
  """
  rung = 16
  while rung < max_load:
    if rung + rung // 2 >= max_load:
      rung += rung // 2
      break
    rung *= 2
  return min(rung, max(num_tokens, 1))


def max_load(
  routes_LxBxSxK: np.ndarray, segment_ids_BxS: np.ndarray, num_experts: int
) -> int:
  """Largest number of real tokens that one expert gets in any layer."""
  real = segment_ids_BxS > 0
  loads = [
    np.bincount(ids[real].ravel() + 1, minlength=num_experts + 1)[1:].max()
    for ids in routes_LxBxSxK.astype(np.int64)
  ]
  return int(max(loads, default=0))


def dispatch_capacity(
  params: dict,
  x_TxD: jax.Array,
  ids_TxK: jax.Array,
  weights_TxK: jax.Array,
  load_E: jax.Array,
  *,
  capacity: int | None = None,
) -> jax.Array:
  """Groups tokens by expert into [E, C, D], one batched product; dropless.

  Returns [T, D]. Without a promised `capacity` an overflow takes the dense
  path; with one it turns the output into NaN.
  """
  tokens, k = ids_TxK.shape
  num_experts = load_E.shape[0]
  fullest = jnp.max(load_E)
  if capacity is not None:
    out = _capacity(params, x_TxD, ids_TxK, weights_TxK, load_E, capacity)
    return jnp.where(fullest <= capacity, out, jnp.nan)
  mean = tokens * k / num_experts
  capacity = min(tokens, 8 * math.ceil(1.5 * mean / 8))
  if capacity == tokens:
    return _capacity(params, x_TxD, ids_TxK, weights_TxK, load_E, capacity)
  return jax.lax.cond(
    fullest <= capacity,
    lambda p, x, w: _capacity(p, x, ids_TxK, w, load_E, capacity),
    jax.checkpoint(lambda p, x, w: dense(p, x, ids_TxK, w)),
    params, x_TxD, weights_TxK,
  )  # fmt: skip


def _capacity(params, x_TxD, ids_TxK, weights_TxK, load_E, capacity):
  tokens, k = ids_TxK.shape
  num_experts = load_E.shape[0]
  slots = num_experts * capacity
  # Position of each assignment among those of its expert, by counting.
  flat = ids_TxK.reshape(-1)
  experts = jnp.arange(num_experts, dtype=jnp.int32)[None, :]
  onehot = (flat[:, None] == experts).astype(jnp.int32)
  place = jnp.sum(jnp.cumsum(onehot, axis=0) * onehot, axis=1) - 1
  slot = jnp.where(
    (flat >= 0) & (place < capacity), flat * capacity + place, slots
  )
  assignment = jnp.arange(tokens * k, dtype=jnp.int32)
  source = (
    jnp.full((slots,), tokens * k, jnp.int32)
    .at[slot]
    .set(assignment, mode="drop", unique_indices=True)
  )
  slot_TxK = slot.reshape(tokens, k)
  dtype = x_TxD.dtype
  gate, up, down = (params[n].astype(dtype) for n in ("gate", "up", "down"))
  inputs = _to_slots(x_TxD, source // k, slot_TxK)
  inputs = inputs.reshape(num_experts, capacity, -1)
  hidden = jax.nn.silu(jnp.einsum("ecd,edf->ecf", inputs, gate))
  hidden = hidden * jnp.einsum("ecd,edf->ecf", inputs, up)
  outputs = jnp.einsum("ecf,efd->ecd", hidden, down).reshape(slots, -1)
  picked = _from_slots(outputs, source, slot_TxK)
  weights = jnp.where(slot_TxK < slots, weights_TxK, 0.0).astype(dtype)
  return jnp.einsum("tkd,tk->td", picked, weights)


# Slots and assignments are inverse to each other, so both directions and both
# gradients are gathers. The transpose that autodiff would write is a scatter,
# which XLA:CPU runs serially.


def _gather(x, index):
  return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _to_slots(x_TxD, token_of_slot, slot_TxK):
  """[T, D] -> [slots, D]; an empty slot is zero."""
  return _gather(x_TxD, token_of_slot)


def _to_slots_fwd(x_TxD, token_of_slot, slot_TxK):
  return _gather(x_TxD, token_of_slot), slot_TxK


def _to_slots_bwd(slot_TxK, grad):
  return jnp.sum(_gather(grad, slot_TxK), axis=1), None, None


_to_slots.defvjp(_to_slots_fwd, _to_slots_bwd)


@jax.custom_vjp
def _from_slots(y, source, slot_TxK):
  """[slots, D] -> [T, K, D]; an assignment without a slot is zero."""
  return _gather(y, slot_TxK)


def _from_slots_fwd(y, source, slot_TxK):
  return _gather(y, slot_TxK), source


def _from_slots_bwd(source, grad):
  return _gather(grad.reshape(-1, grad.shape[-1]), source), None, None


_from_slots.defvjp(_from_slots_fwd, _from_slots_bwd)
