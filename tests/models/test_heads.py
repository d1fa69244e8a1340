"""Heads against whole-vocabulary softmax in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import heads, params
from t1jax.models.config import ModelConfig

CFG = ModelConfig(
  vocab_size=31, d_model=8, num_layers=1, num_heads=1, num_kv_heads=1,
  head_dim=8, d_ff=8,
)  # fmt: skip


def _setup(cfg, b=3, s=11):
  rng = np.random.default_rng(0)
  tree = params.init(jax.random.key(0), cfg)
  hidden = jnp.asarray(rng.normal(size=(b, s, cfg.d_model)), jnp.float32)
  targets = jnp.asarray(rng.integers(0, cfg.vocab_size, (b, s)), jnp.int32)
  return tree, hidden, targets


def _twin(weight_VxD, hidden, targets, temperature):
  logits = np.asarray(hidden, np.float64) @ np.asarray(weight_VxD, np.float64).T
  logits = logits / temperature
  logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  picked = np.take_along_axis(logp, np.asarray(targets)[..., None], -1)[..., 0]
  return picked, -(np.exp(logp) * logp).sum(-1)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk", [1024, 33, 7])  # one, exact, ragged
def test_token_logprobs_and_entropy(tie, temperature, chunk):
  cfg = dataclasses.replace(CFG, tie_embeddings=tie)
  tree, hidden, targets = _setup(cfg)
  hidden = hidden * 10  # far from uniform
  weight = tree["embed"] if tie else tree["head"].T
  got = heads.token_logprobs(
    tree, cfg, hidden, targets, temperature=temperature, chunk=chunk
  )
  want = _twin(weight, hidden, targets, temperature)
  for a, b in zip(got, want):
    assert a.dtype == jnp.float32 and a.shape == targets.shape
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_gradient_does_not_depend_on_chunks():
  tree, hidden, targets = _setup(CFG)

  def loss(tree, hidden, chunk):
    logprobs, entropy = heads.token_logprobs(
      tree, CFG, hidden, targets, chunk=chunk
    )
    return jnp.sum(jnp.sin(logprobs)) + jnp.sum(entropy * entropy)

  def plain(tree, hidden):
    logp = jax.nn.log_softmax(heads.logits(tree, CFG, hidden))
    picked = jnp.take_along_axis(logp, targets[..., None], axis=-1)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    return jnp.sum(jnp.sin(picked)) + jnp.sum(entropy * entropy)

  want = jax.grad(plain, (0, 1))(tree, hidden)
  for chunk in (5, 1024):
    got = jax.grad(loss, (0, 1))(tree, hidden, chunk)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got)):
      np.testing.assert_allclose(a, b, atol=1e-5)


def _largest(jaxpr):
  """Largest array, in elements, that any equation yields."""
  best = 0
  for equation in jaxpr.eqns:
    best = max([best, *(v.aval.size for v in equation.outvars)])
    for value in equation.params.values():
      inner = getattr(value, "jaxpr", value)
      if hasattr(inner, "eqns"):
        best = max(best, _largest(inner))
  return best


def test_whole_logits_never_exist():
  tree, hidden, targets = _setup(CFG, b=8, s=64)

  def loss(tree, hidden):
    return jnp.sum(
      heads.token_logprobs(tree, CFG, hidden, targets, chunk=32)[0]
    )

  jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(tree, hidden).jaxpr
  assert _largest(jaxpr) < 8 * 64 * CFG.vocab_size / 2


def test_values_start_at_zero_and_have_no_temperature():
  cfg = CFG.critic()
  tree, hidden, _ = _setup(cfg)
  assert not np.asarray(heads.values(tree, cfg, hidden)).any()
  tree["head"] = tree["head"] + 2
  np.testing.assert_allclose(
    heads.values(tree, cfg, hidden), 2 * np.asarray(hidden).sum(-1), rtol=1e-4
  )


def test_heads_refuse_the_other_model():
  tree, hidden, targets = _setup(CFG)
  with pytest.raises(ValueError, match="head='value'"):
    heads.values(tree, CFG, hidden)
  with pytest.raises(ValueError, match="head='lm'"):
    heads.token_logprobs(tree, CFG.critic(), hidden, targets)
