"""Sparse mixture of experts: routing (free or replayed) and dispatch.

Axes: B rows, S tokens, T = B * S, D model width, E experts, K experts per
token, C slots per expert, F inner width of an expert.
"""

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models.config import ModelConfig

# Up to here every expert on every token is cheaper than sorting (decoding).
_FEW_TOKENS = 64


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
  slots_per_expert: int | None = None,
) -> tuple[jax.Array, Routing]:
  """One MoE layer; arguments as in `transformer.apply` (its `capacity` is
  `slots_per_expert`).

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
  few = b * s <= _FEW_TOKENS and slots_per_expert is None
  if cfg.dispatch == "dense" or few:
    out = dense(params, x, ids, weights)
  else:
    out = capacity(
      params, x, ids, weights, routing.load_E, slots_per_expert=slots_per_expert
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
  weights = jnp.where(ids >= 0, weights, 0.0)
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


def capacity(
  params: dict,
  x_TxD: jax.Array,
  ids_TxK: jax.Array,
  weights_TxK: jax.Array,
  load_E: jax.Array,
  *,
  slots_per_expert: int | None = None,
) -> jax.Array:
  """Sorts assignments into equal groups of one expert each; dropless.

  All groups then pass their expert in one batched product [N, C, D]. With a
  promised `slots_per_expert` there are N = E groups of that size, and a
  larger load turns the output into NaN. Without one the groups are small and
  an expert takes as many as its load asks for: sum_e ceil(load_e / C) never
  exceeds ceil(T K / C) + E - 1, so no load, however skewed, overflows or
  changes the cost. (A fixed capacity with a dense fallback trains 4x slower
  as soon as one expert is popular, and compiles both.)

  Returns [T, D].
  """
  num_tokens, k = ids_TxK.shape
  num_experts = load_E.shape[0]
  experts = jnp.arange(num_experts, dtype=jnp.int32)
  if slots_per_expert is None:
    size = _group_size(num_tokens * k // num_experts)
    num_groups = -(-num_tokens * k // size) + num_experts - 1
    groups_E = -(-load_E // size)
    end_E = jnp.cumsum(groups_E)
    first_E = end_E - groups_E
    group = jnp.arange(num_groups, dtype=jnp.int32)
    # Groups past the last used one hold no token; any expert serves them.
    owner_N = jnp.minimum(
      jnp.sum(group[:, None] >= end_E[None, :], axis=1, dtype=jnp.int32),
      num_experts - 1,
    )
  else:
    size, num_groups = slots_per_expert, num_experts
    first_E, owner_N = experts, None
  num_slots = num_groups * size

  # The place of an assignment among those of its expert, by counting; in
  # order of tokens, so that the result does not depend on the sort.
  flat = ids_TxK.reshape(-1)
  chosen = (flat[:, None] == experts[None, :]).astype(jnp.int32)
  place = jnp.sum(jnp.cumsum(chosen, axis=0) * chosen, axis=1) - 1
  slot = jnp.sum(chosen * first_E[None, :], axis=1) * size + place
  inside = flat >= 0
  if slots_per_expert is not None:
    inside = inside & (place < size)
  slot = jnp.where(inside, slot, num_slots)
  assignment = jnp.arange(num_tokens * k, dtype=jnp.int32)
  source = (
    jnp.full((num_slots,), num_tokens * k, jnp.int32)
    .at[slot]
    .set(assignment, mode="drop", unique_indices=True)
  )
  slot_TxK = slot.reshape(num_tokens, k)

  # Gate and up in one product: one read of the inputs instead of two.
  gate, up, down = (
    params[name].astype(x_TxD.dtype) for name in ("gate", "up", "down")
  )
  wide = jnp.concatenate([gate, up], axis=2)
  if owner_N is not None:
    wide, down = wide[owner_N], down[owner_N]
  inputs = _to_slots(x_TxD, source // k, slot_TxK)
  inputs = inputs.reshape(num_groups, size, -1)
  gate, up = jnp.split(jnp.einsum("ncd,ndf->ncf", inputs, wide), 2, axis=2)
  outputs = jnp.einsum("ncf,nfd->ncd", jax.nn.silu(gate) * up, down)
  picked = _from_slots(outputs.reshape(num_slots, -1), source, slot_TxK)
  out = jnp.sum(picked * weights_TxK[..., None].astype(picked.dtype), axis=1)
  if slots_per_expert is not None:
    out = jnp.where(jnp.max(load_E) <= slots_per_expert, out, jnp.nan)
  return out


def _group_size(mean_load: int) -> int:
  """Slots per group: a power of two, at most an eighth of the mean load.

  The E - 1 spare groups then waste at most an eighth of the slots.
  """
  size = 8
  while size * 16 <= mean_load:
    size *= 2
  return size


# Slots and assignments are inverse to each other, so both directions and both
# gradients are gathers. The transpose that autodiff would write is a scatter,
# which XLA:CPU runs serially.


# An empty slot may hold any finite token and an assignment without a slot (its
# weight is 0) may read any output, but neither may pass a gradient on.


def _take_any(x, index):
  return x.at[index].get(mode="clip")


def _take_or_zero(x, index):
  return x.at[index].get(mode="fill", fill_value=0)


@jax.custom_vjp
def _to_slots(x_TxD, token_of_slot, slot_TxK):
  """[T, D] -> [slots, D]."""
  return _take_any(x_TxD, token_of_slot)


def _to_slots_fwd(x_TxD, token_of_slot, slot_TxK):
  return _take_any(x_TxD, token_of_slot), slot_TxK


def _to_slots_bwd(slot_TxK, grad):
  return jnp.sum(_take_or_zero(grad, slot_TxK), axis=1), None, None


_to_slots.defvjp(_to_slots_fwd, _to_slots_bwd)


@jax.custom_vjp
def _from_slots(y, source, slot_TxK):
  """[slots, D] -> [T, K, D]."""
  return _take_any(y, slot_TxK)


def _from_slots_fwd(y, source, slot_TxK):
  return _take_any(y, slot_TxK), source


def _from_slots_bwd(source, grad):
  return _take_or_zero(grad.reshape(-1, grad.shape[-1]), source), None, None


_from_slots.defvjp(_from_slots_fwd, _from_slots_bwd)
