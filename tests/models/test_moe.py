"""Routing and dispatch against naive loops over tokens."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import moe, params
from t1jax.models.config import ModelConfig

CFG = ModelConfig(
  vocab_size=16,
  d_model=8,
  num_layers=1,
  num_heads=2,
  num_kv_heads=1,
  head_dim=4,
  d_ff=0,
  num_experts=4,
  top_k=2,
  d_expert=12,
  moe_layers=(0,),
)
_moe = jax.jit(moe.moe, static_argnames=("cfg", "recorded", "slots_per_expert"))
_capacity = jax.jit(moe.capacity, static_argnames="slots_per_expert")
_dense = jax.jit(moe.dense)
B, S = 3, 40  # 120 tokens: past the size below which dispatch is dense


def _layer(cfg, seed=0):
  tree = params.init(jax.random.key(seed), cfg)["layers"][0]["moe"]
  # Far from uniform, so that an expert mix-up is visible.
  return tree | {"router": tree["router"] * 50}


def _inputs(seed=0, b=B, s=S):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.normal(size=(b, s, CFG.d_model)), jnp.float32)
  return x, jnp.asarray(rng.random((b, s)) < 0.8)


def _silu(x):
  return x / (1 + np.exp(-x))


def _swiglu(tree, x):
  gate, up, down = (
    np.asarray(tree[n], np.float64) for n in ("gate", "up", "down")
  )
  return (_silu(x @ gate) * (x @ up)) @ down


def _twin(tree, cfg, x, real, replay=None):
  """One token at a time, float64."""
  x = np.asarray(x, np.float64)
  out = np.zeros_like(x)
  ids_out = np.full((*x.shape[:2], cfg.top_k), -1)
  router = np.asarray(tree["router"], np.float64)
  for b, s in np.ndindex(*x.shape[:2]):
    if not real[b, s]:
      continue
    logits = x[b, s] @ router
    ids = np.argsort(-logits, kind="stable")[: cfg.top_k]
    if replay is not None and replay[b, s, 0] >= 0:
      ids = replay[b, s]
    if cfg.norm_topk_prob:
      weights = np.exp(logits[ids]) / np.exp(logits[ids]).sum()
    else:
      weights = (np.exp(logits) / np.exp(logits).sum())[ids]
    for e, w in zip(ids, weights):
      expert = {n: tree[n][e] for n in ("gate", "up", "down")}
      out[b, s] += w * _swiglu(expert, x[b, s])
    ids_out[b, s] = ids
  if cfg.d_shared:
    out += _swiglu(tree["shared"], x)
  return out, ids_out


def _replay(seed, missing=0.3):
  """Distinct random ids per token, with rows left out."""
  rng = np.random.default_rng(seed)
  scores = rng.random((B, S, CFG.num_experts))
  ids = np.argsort(scores, axis=-1)[..., : CFG.top_k].astype(np.int16)
  ids[rng.random((B, S)) < missing] = -1
  return ids


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
@pytest.mark.parametrize(
  "change", [{}, {"d_shared": 6}, {"norm_topk_prob": False}, {"top_k": 1}]
)
def test_free_routing_is_the_naive_loop(dispatch, change):
  cfg = dataclasses.replace(CFG, dispatch=dispatch, **change)
  tree, (x, real) = _layer(cfg), _inputs()
  out, routing = _moe(tree, cfg, x, real, None)
  want, ids = _twin(tree, cfg, x, np.asarray(real))
  got = np.where(real[..., None], out, want)  # padding's output is free
  np.testing.assert_allclose(got, want, atol=2e-5)
  np.testing.assert_array_equal(routing.ids_BxSxK, ids)
  assert int(routing.replayed_rows) == 0


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_replay_takes_recorded_rows_and_own_choice_elsewhere(dispatch):
  cfg = dataclasses.replace(CFG, dispatch=dispatch)
  tree, (x, real) = _layer(cfg), _inputs()
  replay = _replay(1)
  out, routing = _moe(tree, cfg, x, real, jnp.asarray(replay))
  want, ids = _twin(tree, cfg, x, np.asarray(real), replay)
  np.testing.assert_allclose(
    np.where(real[..., None], out, want), want, atol=2e-5
  )
  np.testing.assert_array_equal(routing.ids_BxSxK, ids)
  replayed = np.asarray(real) & (replay[..., 0] >= 0)
  assert 0 < int(routing.replayed_rows) == replayed.sum() < real.sum()


def test_all_missing_replay_is_free_routing_bit_for_bit():
  tree, (x, real) = _layer(CFG), _inputs()
  free, _ = _moe(tree, CFG, x, real, None)
  missing = jnp.full((B, S, CFG.top_k), -1, jnp.int16)
  out, routing = _moe(tree, CFG, x, real, missing)
  np.testing.assert_array_equal(out, free)
  assert np.isfinite(out).all() and int(routing.replayed_rows) == 0


def test_own_routes_replayed_change_nothing():
  tree, (x, real) = _layer(CFG), _inputs()
  free, routing = _moe(tree, CFG, x, real, None)
  for kwargs in ({}, {"recorded": True}):
    out, again = _moe(tree, CFG, x, real, routing.ids_BxSxK, **kwargs)
    np.testing.assert_array_equal(out, free)
    np.testing.assert_array_equal(again.ids_BxSxK, routing.ids_BxSxK)
    assert int(again.replayed_rows) == real.sum()


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_replayed_id_outside_the_top_k_gets_router_gradient(
  dispatch, norm_topk_prob
):
  cfg = dataclasses.replace(
    CFG, dispatch=dispatch, norm_topk_prob=norm_topk_prob
  )
  tree, (x, _) = _layer(cfg), _inputs()
  real = jnp.ones((B, S), jnp.bool_)
  logits = np.asarray(jnp.einsum("bsd,de->bse", x, tree["router"]))
  worst = np.argsort(logits, axis=-1)[..., : cfg.top_k].astype(np.int32)
  own = np.asarray(moe.route(cfg, jnp.asarray(logits), real, None).ids_BxSxK)
  assert not (worst[..., None] == own[..., None, :]).any()

  def loss(table):
    routing = moe.route(cfg, table, real, jnp.asarray(worst), recorded=True)
    return jnp.sum(routing.weights_BxSxK[..., 0])

  grad = np.asarray(jax.grad(loss)(jnp.asarray(logits)))
  at_ids = np.take_along_axis(grad, worst, axis=-1)
  assert (np.abs(at_ids) > 0).all()
  if norm_topk_prob:  # restricted softmax: nobody else takes part
    np.testing.assert_allclose(
      np.abs(grad).sum(), np.abs(at_ids).sum(), rtol=1e-6
    )

  def through_layer(router):
    out, _ = _moe(
      tree | {"router": router}, cfg, x, real, jnp.asarray(worst), recorded=True
    )
    return jnp.sum(out * out)

  assert np.abs(jax.grad(through_layer)(tree["router"])).max() > 1e-3


def _expert_loads(skew, seed):
  """Ids of every token, from uniform to all tokens on the same experts."""
  rng = np.random.default_rng(seed)
  scores = rng.normal(size=(B, S, CFG.num_experts))
  scores += skew * np.arange(CFG.num_experts)
  return np.argsort(-scores, axis=-1)[..., : CFG.top_k].astype(np.int32)


def _loss(tree, x, real, ids, dispatch, slots):
  cfg = dataclasses.replace(CFG, dispatch=dispatch)
  out, routing = moe.moe(
    tree, cfg, x, real, ids, recorded=True, slots_per_expert=slots
  )
  out = jnp.where(real[..., None], out, 0.0)
  return jnp.sum(jnp.sin(out)), routing.load_E


_step = jax.jit(
  jax.value_and_grad(_loss, (0, 1), has_aux=True), static_argnums=(4, 5)
)


@pytest.mark.parametrize("skew", [0.0, 1.0, 100.0])
def test_capacity_equals_dense_with_gradients_at_any_load(skew):
  tree, (x, real) = _layer(CFG), _inputs()
  ids = jnp.asarray(_expert_loads(skew, 3))
  (want, load), grads = _step(tree, x, real, ids, "dense", None)
  if skew == 100.0:
    assert int(load.max()) == real.sum()  # one expert has every token
  assert int(load.sum()) == real.sum() * CFG.top_k
  # No promise, one that leaves room, and the tightest.
  for slots in (None, B * S, int(load.max())):
    (got, _), other = _step(tree, x, real, ids, "capacity", slots)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(other)):
      np.testing.assert_allclose(a, b, atol=2e-5)


@hypothesis.settings(max_examples=15, deadline=None)
@hypothesis.given(
  st.integers(0, 10_000), st.floats(0, 5), st.floats(0, 1), st.booleans()
)
def test_capacity_drops_nothing(seed, skew, fraction, bound):
  tree, (x, _) = _layer(CFG), _inputs()
  rng = np.random.default_rng(seed)
  real = rng.random((B, S)) < fraction
  ids = np.where(real[..., None], _expert_loads(skew, seed), -1)
  flat = jnp.asarray(ids.reshape(B * S, -1))
  load = np.bincount(ids[real].ravel(), minlength=CFG.num_experts)
  weights = jnp.asarray(
    rng.random((B * S, 2)) * (np.asarray(flat) >= 0), jnp.float32
  )
  args = (tree, x.reshape(B * S, -1), flat, weights)
  slots = moe.capacity_for(int(load.max()), B * S) if bound else None
  got = _capacity(*args, jnp.asarray(load, jnp.int32), slots_per_expert=slots)
  np.testing.assert_allclose(got, _dense(*args), atol=2e-5)


def test_broken_capacity_promise_is_nan_not_a_dropped_token():
  tree, (x, real) = _layer(CFG), _inputs()
  ids = jnp.asarray(_expert_loads(100.0, 0))
  out, routing = _moe(
    tree, CFG, x, real, ids, recorded=True,
    slots_per_expert=int(real.sum()) - 1,
  )  # fmt: skip
  assert np.isnan(out).all() and int(routing.load_E.max()) == real.sum()


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_padding_loads_no_expert_and_sends_no_gradient(dispatch):
  cfg = dataclasses.replace(CFG, dispatch=dispatch)
  tree, (x, real) = _layer(cfg), _inputs()
  for replay in (None, jnp.asarray(_replay(2))):
    _, routing = _moe(tree, cfg, x, real, replay)
    ids, load = np.asarray(routing.ids_BxSxK), np.asarray(routing.load_E)
    assert (ids[~np.asarray(real)] == -1).all()
    assert load.sum() == real.sum() * cfg.top_k
    np.testing.assert_array_equal(
      load, np.bincount(ids[real].ravel(), minlength=4)
    )
    padding = jnp.where(real[..., None], 0.0, x)
    grad = jax.grad(
      lambda x, replay=replay: jnp.sum(_moe(tree, cfg, x, real, replay)[0])
    )(x)
    assert not np.asarray(jnp.where(real[..., None], 0.0, grad)).any()
    # Nor does its content reach anyone: another padding, the same output.
    out = _moe(tree, cfg, x, real, replay)[0]
    other = _moe(tree, cfg, x + 7 * padding, real, replay)[0]
    np.testing.assert_array_equal(out[real], other[real])


def test_recorded_row_without_a_route_loads_no_expert():
  tree, (x, _) = _layer(CFG), _inputs()
  ids = _expert_loads(0.0, 0)
  ids[1, 5] = -1
  real = jnp.ones((B, S), jnp.bool_)
  out, routing = _moe(tree, CFG, x, real, jnp.asarray(ids), recorded=True)
  assert not np.asarray(out[1, 5]).any() and np.isfinite(out).all()
  assert int(routing.replayed_rows) == B * S - 1
  assert int(routing.load_E.sum()) == (B * S - 1) * CFG.top_k


def test_ties_go_to_the_lower_expert():
  np.testing.assert_array_equal(
    moe.top_k(jnp.asarray([[1.0, 3.0, 3.0, 3.0]]), 2), [[1, 2]]
  )


def test_capacity_ladder_is_short_and_sufficient():
  rungs = {moe.capacity_for(n, 4096) for n in range(4097)}
  assert len(rungs) < 20 and max(rungs) == 4096
  assert all(moe.capacity_for(n, 4096) >= n for n in range(4097))


def test_max_load_ignores_padding_and_missing_rows():
  routes = np.full((2, 1, 4, 2), -1, np.int16)
  routes[1, 0, :3] = [[0, 1], [1, 2], [1, 3]]
  segments = np.array([[1, 1, 0, 1]])
  assert moe.max_load(routes, segments, 4) == 2
  assert moe.max_load(routes[:0], segments, 4) == 0
