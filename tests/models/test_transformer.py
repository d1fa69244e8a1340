"""The decoder against separate sequences, and a cache against none."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import params, transformer
from t1jax.models.config import ModelConfig

CFG = ModelConfig(
  vocab_size=50,
  d_model=16,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=24,
  num_experts=4,
  top_k=2,
  d_expert=12,
  d_shared=8,
  moe_layers=(0, 2),  # a dense layer in between
)
DENSE = dataclasses.replace(CFG, moe_layers=())
_apply = jax.jit(
  transformer.apply, static_argnames=("cfg", "recorded", "capacity", "columns")
)


@pytest.fixture(scope="module")
def tree():
  return _init(CFG)


def _init(cfg):
  return jax.jit(params.init, static_argnums=1)(jax.random.key(0), cfg)


def _tokens(b, s, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, CFG.vocab_size, (b, s)), jnp.int32)


def _row(tokens):
  b, s = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(s, dtype=jnp.int32)[None], (b, s))
  return tokens, positions, jnp.ones((b, s), jnp.int32)


def _cache(cfg, b, columns):
  shape = (b, columns, cfg.num_kv_heads, cfg.head_dim)
  # Garbage, as a reused slot holds: nothing may read it.
  return tuple(
    {"k": jnp.full(shape, 9.0), "v": jnp.full(shape, 9.0)}
    for _ in range(cfg.num_layers)
  )


def test_packed_equals_unpacked(tree):
  lengths = (5, 70, 1, 20)
  sequences = [_tokens(1, n, seed) for seed, n in enumerate(lengths)]
  total = sum(lengths)
  tokens = jnp.concatenate([*sequences, _tokens(1, 4, 99)], axis=1)
  segments = np.repeat([1, 2, 3, 4, 0], [*lengths, 4])[None]
  positions = np.concatenate([np.arange(n) for n in (*lengths, 4)])[None]
  packed = _apply(
    tree, CFG, tokens, jnp.asarray(positions), jnp.asarray(segments)
  )
  start = 0
  for n, sequence in zip(lengths, sequences):
    alone = _apply(tree, CFG, *_row(sequence))
    here = slice(start, start + n)
    np.testing.assert_allclose(
      packed.hidden_BxSxD[:, here], alone.hidden_BxSxD, atol=1e-5
    )
    np.testing.assert_array_equal(
      packed.routes_LxBxSxK[:, :, here], alone.routes_LxBxSxK
    )
    start += n
  assert (np.asarray(packed.routes_LxBxSxK)[:, :, total:] == -1).all()
  assert (np.asarray(packed.load_LxE).sum(1) == total * CFG.top_k).all()


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_cache_prefill_chunks_and_decode_equal_the_full_pass(tree, dispatch):
  cfg = dataclasses.replace(CFG, dispatch=dispatch)
  lengths = np.array([37, 60, 11])
  b, s = 3, 60
  tokens, positions, _ = _row(_tokens(b, s))
  valid = np.arange(s)[None] < lengths[:, None]
  full = _apply(tree, cfg, tokens, positions, jnp.asarray(valid, jnp.int32))
  cache = _cache(cfg, b, 64)
  hidden = np.zeros(full.hidden_BxSxD.shape, np.float32)
  routes = np.full(full.routes_LxBxSxK.shape, -1)
  done = np.zeros(b, np.int64)
  # Rows advance by different amounts in each call: prefill, a later chunk,
  # single steps, and rows that sit a call out.
  for width, amounts in (
    (24, (24, 9, 5)), (30, (6, 30, 0)), *[(1, (1, 1, 1))] * 30
  ):  # fmt: skip
    amounts = np.minimum(amounts, lengths - done)
    columns = done[:, None] + np.arange(width)[None]
    inside = np.arange(width)[None] < amounts[:, None]
    at = np.minimum(columns, s - 1)
    out = _apply(
      tree,
      cfg,
      jnp.asarray(np.take_along_axis(np.asarray(tokens), at, axis=1)),
      jnp.asarray(columns, jnp.int32),
      jnp.asarray(inside, jnp.int32),
      cache=cache,
      columns=64 if width == 30 else None,
    )
    cache = out.cache
    for row in range(b):
      here = slice(done[row], done[row] + amounts[row])
      hidden[row, here] = out.hidden_BxSxD[row, : amounts[row]]
      routes[:, row, here] = out.routes_LxBxSxK[:, row, : amounts[row]]
    done += amounts
  np.testing.assert_array_equal(done, lengths)
  np.testing.assert_allclose(
    hidden[valid], np.asarray(full.hidden_BxSxD)[valid], atol=1e-5
  )
  np.testing.assert_array_equal(routes, full.routes_LxBxSxK)


def test_inactive_rows_write_nothing(tree):
  cache = _cache(CFG, 2, 8)
  tokens = _tokens(2, 1)
  positions = jnp.full((2, 1), 3, jnp.int32)
  segments = jnp.asarray([[1], [0]], jnp.int32)
  out = _apply(tree, CFG, tokens, positions, segments, cache=cache)
  for layer in out.cache:
    for column in (layer["k"], layer["v"]):
      assert (np.asarray(column[1]) == 9).all()
      changed = (np.asarray(column[0]) != 9).any(axis=(1, 2))
      np.testing.assert_array_equal(changed, np.arange(8) == 3)


def test_column_bound_is_exact_and_its_breach_is_nan(tree):
  cache = _cache(CFG, 2, 32)
  tokens, positions, segments = _row(_tokens(2, 8))
  cache = _apply(tree, CFG, tokens, positions, segments, cache=cache).cache
  step = (_tokens(2, 1), jnp.asarray([[8], [5]], jnp.int32), segments[:, :1])
  full = _apply(tree, CFG, *step, cache=cache)
  short = _apply(tree, CFG, *step, cache=cache, columns=9)
  np.testing.assert_allclose(full.hidden_BxSxD, short.hidden_BxSxD, atol=1e-6)
  assert short.cache[0]["k"].shape == full.cache[0]["k"].shape
  broken = _apply(tree, CFG, *step, cache=cache, columns=8)
  bad = np.isnan(broken.hidden_BxSxD).all(axis=(1, 2))
  np.testing.assert_array_equal(bad, [True, False])


def test_replay_reaches_the_right_layer(tree):
  row = _row(_tokens(2, 40))
  own = _apply(tree, CFG, *row)
  routes = np.array(own.routes_LxBxSxK)
  # Layer 2 owns row 1: only it is changed, and with it only its load.
  routes[1] = (routes[1] + 1) % CFG.num_experts
  out = _apply(
    tree, CFG, *row, routes_LxBxSxK=jnp.asarray(routes), recorded=True
  )
  np.testing.assert_array_equal(out.routes_LxBxSxK, routes)
  np.testing.assert_array_equal(out.load_LxE[0], own.load_LxE[0])
  np.testing.assert_array_equal(out.load_LxE[1], np.roll(own.load_LxE[1], 1))
  np.testing.assert_array_equal(out.replayed_rows_L, [80, 80])
  assert np.abs(out.hidden_BxSxD - own.hidden_BxSxD).max() > 1e-3


def _primitives(jaxpr):
  """Names of all primitives, in nested jaxprs too."""
  names = set()
  for equation in jaxpr.eqns:
    names.add(equation.primitive.name)
    for value in jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr"),
    ):
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        names |= _primitives(inner)
  return names


def test_recorded_program_has_no_top_k_and_no_branch(tree):
  row = _row(_tokens(2, 40))
  routes = _apply(tree, CFG, *row).routes_LxBxSxK

  def names(recorded):
    def loss(tree, routes):
      out = _apply(tree, CFG, *row, routes_LxBxSxK=routes, recorded=recorded)
      return jnp.sum(out.hidden_BxSxD)

    return _primitives(jax.make_jaxpr(jax.grad(loss))(tree, routes).jaxpr)

  assert "top_k" in names(False)
  assert not names(True) & {"top_k", "sort", "approx_top_k", "argmax", "cond"}


def test_no_moe_layer_means_l_is_0():
  tree = _init(DENSE)
  row = _row(_tokens(2, 6))
  for k in (0, 2):
    out = _apply(
      tree, DENSE, *row, recorded=True,
      routes_LxBxSxK=jnp.zeros((0, 2, 6, k), jnp.int16),
    )  # fmt: skip
    assert out.routes_LxBxSxK.shape == (0, 2, 6, DENSE.top_k)
    assert out.load_LxE.shape == (0, DENSE.num_experts)
    assert out.replayed_rows_L.shape == (0,)
    assert np.isfinite(out.hidden_BxSxD).all()


@functools.partial(jax.jit, static_argnums=1)
def _grads(tree, cfg, row):
  def loss(tree):
    hidden = transformer.apply(tree, cfg, *row).hidden_BxSxD
    return jnp.sum(jnp.sin(hidden.astype(jnp.float32)))

  return jax.grad(loss)(tree)


@pytest.mark.parametrize(
  "change",
  [
    {"qk_norm": True, "remat": True},
    {"compute_dtype": "bfloat16", "dispatch": "dense"},
    {"compute_dtype": "bfloat16"},
    {"tie_embeddings": False, "norm_topk_prob": False, "d_shared": 0},
  ],
)
def test_gradient_reaches_every_parameter(change):
  cfg = dataclasses.replace(CFG, num_layers=2, moe_layers=(1,), **change)
  grads = _grads(_init(cfg), cfg, _row(_tokens(2, 40)))
  for path, g in jax.tree_util.tree_leaves_with_path(grads):
    name = jax.tree_util.keystr(path)
    assert g.dtype == jnp.float32 and np.isfinite(g).all(), name
    assert np.abs(g).max() > 0 or name == "['head']", name


def test_remat_changes_no_gradient(tree):
  row = _row(_tokens(2, 40))
  for a, b in zip(
    jax.tree.leaves(_grads(tree, CFG, row)),
    jax.tree.leaves(_grads(tree, dataclasses.replace(CFG, remat=True), row)),
  ):
    np.testing.assert_allclose(a, b, atol=1e-5)


def test_refusals(tree):
  row = _row(_tokens(1, 4))
  with pytest.raises(ValueError, match="has no routes"):
    _apply(tree, CFG, *row, recorded=True)
  with pytest.raises(ValueError, match="without a cache"):
    _apply(tree, CFG, *row, columns=4)
  with pytest.raises(AssertionError):
    _apply(tree, CFG, *row, routes_LxBxSxK=jnp.zeros((1, 1, 4, 2), jnp.int32))
