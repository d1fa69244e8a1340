"""Attention against a float64 loop over queries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import attention
from t1jax.models.config import ModelConfig

H, J, P = 4, 2, 8


def _qkv(b, s, c, seed=0):
  rng = np.random.default_rng(seed)
  return tuple(
    jnp.asarray(rng.normal(size=shape), jnp.float32)
    for shape in ((b, s, H, P), (b, c, J, P), (b, c, J, P))
  )


def _twin(q, k, v, visible):
  """visible(b, s) -> indices of the keys that query s of row b may see."""
  q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
  out = np.zeros_like(q)
  for b, s, h in np.ndindex(*q.shape[:3]):
    keys, head = visible(b, s), h // (H // J)
    scores = k[b, keys, head] @ q[b, s, h] / np.sqrt(P)
    probs = np.exp(scores - scores.max())
    out[b, s, h] = probs / probs.sum() @ v[b, keys, head]
  return out


def _segments(b, s, seed=0):
  rng = np.random.default_rng(seed)
  segments = np.sort(rng.integers(1, 4, (b, s)), axis=1)
  segments[:, s - s // 8 :] = 0
  return segments


# One chunk, several unrolled ones with a ragged last, and the loop.
@pytest.mark.parametrize("s", [1, 24, 300, 1100])
def test_packed_attention_is_one_sequence_per_segment(s):
  q, k, v = _qkv(2, s, s)
  segments = _segments(2, s)
  got = attention.attend(q, k, v, attention.packed(jnp.asarray(segments)))
  picks = np.unique(np.linspace(0, s - 1, 40).astype(int))

  def visible(b, i):
    earlier = np.arange(picks[i] + 1)
    return earlier[segments[b, : picks[i] + 1] == segments[b, picks[i]]]

  want = _twin(q[:, picks], k, v, visible)
  real = segments[:, picks] > 0
  np.testing.assert_allclose(
    np.asarray(got[:, picks])[real], want[real], atol=1e-5
  )
  assert np.isfinite(got).all()


@pytest.mark.parametrize("s", [1, 7, 200])
def test_cached_attention_sees_columns_up_to_its_position(s):
  c = 260
  q, k, v = _qkv(3, s, c)
  first = np.array([0, 13, 59])
  positions = jnp.asarray(first[:, None] + np.arange(s)[None], jnp.int32)
  got = attention.attend(q, k, v, attention.cached(positions, c))
  want = _twin(q, k, v, lambda b, i: np.arange(first[b] + i + 1))
  np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("s", [24, 300, 1100])
def test_written_gradient_is_autodiff_s(s):
  q, k, v = _qkv(1, s, s)
  segments = jnp.asarray(_segments(1, s))

  def plain(q, k, v):
    k, v = (jnp.repeat(x, H // J, axis=2) for x in (k, v))
    scores = jnp.einsum("bshp,bchp->bhsc", q, k) / np.sqrt(P).astype(np.float32)
    mask = segments[:, :, None] == segments[:, None, :]
    mask = mask & jnp.tril(jnp.ones((1, s, s), jnp.bool_))
    probs = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
    return jnp.einsum("bhsc,bchp->bshp", probs, v)

  def fast(q, k, v):
    return attention.attend(q, k, v, attention.packed(segments))

  want, got = (
    jax.grad(lambda *x, f=f: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))(q, k, v)
    for f in (plain, fast)
  )
  for a, b in zip(want, got):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_scores_after_rotation_depend_on_distance_alone():
  cfg = ModelConfig(
    vocab_size=2,
    d_model=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=P,
    d_ff=8,
  )
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, P)), jnp.float32) for _ in "qk")

  def score(i, j):
    a, b = (
      attention.rotate(
        x, attention.rotary_table(cfg, jnp.full((1, 1), n, jnp.int32))
      )
      for x, n in ((q, i), (k, j))
    )
    return float(jnp.sum(a * b))

  assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
  assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-3)
  assert score(7, 7) == pytest.approx(float(jnp.sum(q * k)), abs=1e-5)


def test_rms_norm():
  x = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)
  scale = np.arange(8, dtype=np.float32)
  want = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale
  np.testing.assert_allclose(
    attention.rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-6),
    want,
    atol=1e-6,
  )
