"""PPO's losses: by hand, blind to what is masked, additive over splits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.rl import losses

BOUNDS = dict(ratio_low=0.7, ratio_high=6.0)


def _row(*values):
  return jnp.asarray([values], jnp.float32)


def _ppo(ratio, advantages, *, weight=None, mask=None, cap=2.0, **kwargs):
  ratio = np.asarray(ratio, np.float64)
  weight = np.ones_like(ratio) if weight is None else np.asarray(weight)
  mask = np.ones(ratio.shape, bool) if mask is None else np.asarray(mask)
  logprobs, old, behaviour = (
    np.log(ratio),
    np.zeros_like(ratio),
    -np.log(weight),
  )
  return losses.ppo_loss(
    *(_row(*x) for x in (logprobs, old, behaviour, advantages)),
    jnp.asarray(mask)[None],
    jnp.float32(max(mask.sum(), 1)),
    tis_cap=cap,
    **{**BOUNDS, **kwargs},
  )


@pytest.mark.parametrize(
  ("ratio", "advantage", "expected"),
  [
    (1.0, 2.0, -2.0),
    (8.0, 1.0, -6.0),  # too likely already: clipped at 6
    (8.0, -1.0, 8.0),  # a mistake made likelier is never clipped
    (0.5, -1.0, 0.7),  # unlikely enough: clipped at 0.7
    (0.5, 1.0, -0.5),
  ],
)
def test_clipping_by_hand(ratio, advantage, expected):
  loss, _ = _ppo([ratio], [advantage])
  assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_the_importance_weight_is_truncated():
  loss, parts = _ppo([1.0, 1.0], [1.0, 1.0], weight=[0.5, 9.0])
  assert float(loss) == pytest.approx(-(0.5 + 2.0) / 2, rel=1e-5)
  assert losses.summarize(parts, 2)["tis_truncated_fraction"] == 0.5
  loss, _ = _ppo([1.0], [1.0], weight=[9.0], cap=0.0)
  assert float(loss) == pytest.approx(-1.0)


def test_clipped_tokens_give_no_gradient():
  def loss(logprobs):
    return losses.ppo_loss(
      logprobs,
      _row(0, 0, 0, 0),
      _row(0, 0, 0, 0),
      _row(1, -1, 1, -1),
      jnp.ones((1, 4), bool),
      jnp.float32(4),
      tis_cap=2.0,
      **BOUNDS,
    )[0]

  gradient = jax.grad(loss)(jnp.log(_row(7, 7, 0.5, 0.5)))
  np.testing.assert_array_equal(
    np.asarray(gradient[0]) != 0, [False, True, True, False]
  )


def test_statistics_by_hand():
  _, parts = _ppo(
    [8.0, 0.5, 1.0, 1.0], [1.0, -1.0, 1.0, 1.0], weight=[1.0, 3.0, 1.0, 0.4]
  )
  found = losses.summarize(parts, 4)
  gaps = np.log([1.0, 3.0, 1.0, 0.4])
  weights = np.exp(gaps)
  assert found["clip_fraction_high"] == 0.25
  assert found["clip_fraction_low"] == 0.25
  assert found["ratio_mean"] == pytest.approx(10.5 / 4)
  assert found["ratio_max"] == pytest.approx(8.0)
  assert found["ratio_std"] == pytest.approx(np.std([8, 0.5, 1, 1]), rel=1e-5)
  assert found["logprob_gap"] == pytest.approx(np.abs(gaps).mean(), rel=1e-5)
  assert found["logprob_gap_max"] == pytest.approx(np.log(3), rel=1e-5)
  assert found["k3"] == pytest.approx((weights - 1 - gaps).mean(), rel=1e-5)
  # 3 and 0.4 lie outside [1/2, 2].
  assert found["f_tau2"] == 0.5
  assert found["ess"] == pytest.approx(
    weights.sum() ** 2 / (weights**2).sum() / 4, rel=1e-5
  )


@given(st.floats(-5, 5))
def test_k3_is_never_negative(d):
  assert float(losses.k3(jnp.float32(d))) >= -1e-6


def test_masked_tokens_are_never_read():
  # NaN and inf there: neither the loss, its gradient nor a statistic sees it.
  mask = jnp.asarray([[True, False, False]])
  clean = _row(-0.5, 0, 0)
  dirty = _row(-0.5, np.nan, np.inf)

  def run(x):
    return losses.ppo_loss(
      x + clean,
      x,
      x,
      x,
      mask,
      jnp.float32(1),
      tis_cap=2.0,
      entropy_BxS=x,
      entropy_coefficient=0.1,
      **BOUNDS,
    )

  for a, b in zip(
    jax.tree.leaves(run(clean)), jax.tree.leaves(run(dirty)), strict=True
  ):
    np.testing.assert_array_equal(a, b)
  gradient = jax.grad(lambda x: run(x)[0])(dirty)
  assert np.isfinite(gradient).all()


def test_an_all_masked_batch_is_zero():
  loss, parts = _ppo([1.0, 2.0], [1.0, 1.0], mask=[False, False])
  assert float(loss) == 0.0
  assert all(np.isfinite(v) for v in losses.summarize(parts, 0).values())


def test_entropy_and_kl_enter_only_with_a_coefficient():
  entropy = _row(2.0, 4.0)
  plain, parts = _ppo([1.0, 1.0], [0.0, 0.0], entropy_BxS=entropy)
  assert float(plain) == 0.0
  assert losses.summarize(parts, 2)["entropy"] == 3.0
  bonus, _ = _ppo(
    [1.0, 1.0], [0.0, 0.0], entropy_BxS=entropy, entropy_coefficient=0.1
  )
  assert float(bonus) == pytest.approx(-0.3)
  kl, _ = _ppo(
    [1.0, 1.0],
    [0.0, 0.0],
    reference_logprobs_BxS=jnp.log(_row(2.0, 1.0)),
    kl_coefficient=0.5,
  )
  assert float(kl) == pytest.approx(0.5 * (2 - 1 - np.log(2)) / 2, rel=1e-5)
  with pytest.raises(ValueError, match="reference_logprobs"):
    _ppo([1.0], [0.0], kl_coefficient=0.5)


def test_value_loss_by_hand():
  values, old, returns = _row(3.0, 0.0), _row(1.0, 0.0), _row(4.0, 1.0)
  mask = jnp.ones((1, 2), bool)
  run = functools.partial(
    losses.value_loss, values, old, returns, mask, jnp.float32(2)
  )
  assert float(run()[0]) == pytest.approx(0.5 * (1 + 1) / 2)
  # Held within 0.5 of the old value the first error is 4 - 1.5.
  loss, parts = run(value_clip=0.5)
  assert float(loss) == pytest.approx(0.5 * (2.5**2 + 1) / 2)
  assert losses.summarize(parts, 2)["value_clip_fraction"] == 0.5


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 7))
def test_sums_do_not_depend_on_the_split(seed, cut):
  rng = np.random.default_rng(seed)
  arrays = [jnp.asarray(rng.normal(size=(8, 4)), jnp.float32) for _ in range(4)]
  mask = jnp.asarray(rng.random((8, 4)) < 0.5)
  count = jnp.float32(max(1, int(mask.sum())))

  first = jnp.asarray(np.arange(8)[:, None] < cut) & mask
  whole, one, other = (
    float(_loss_of(arrays, part, count))
    for part in (mask, first, mask & ~first)
  )
  assert one + other == pytest.approx(whole, rel=1e-5, abs=1e-6)


@jax.jit
def _loss_of(arrays, mask, count):
  return losses.ppo_loss(*arrays, mask, count, tis_cap=2.0, **BOUNDS)[0]


def test_supervised_loss_by_hand():
  loss = losses.supervised_loss(
    _row(-1.0, -2.0, np.nan),
    jnp.asarray([[True, True, False]]),
    jnp.float32(2),
  )
  assert float(loss) == 1.5


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("nats", [-200.0, 100.0, 200.0])
def test_a_token_that_is_far_off_leaves_loss_and_gradient_finite(
  nats, advantage
):
  def run(logprobs, behaviour):
    return losses.ppo_loss(
      logprobs,
      _row(0.0),
      behaviour,
      _row(advantage),
      jnp.ones((1, 1), bool),
      jnp.float32(1),
      tis_cap=2.0,
      reference_logprobs_BxS=_row(0.0),
      kl_coefficient=0.1,
      **BOUNDS,
    )

  for logprobs, behaviour in ((nats, 0.0), (0.0, nats)):
    (loss, parts), gradient = jax.value_and_grad(run, has_aux=True)(
      _row(logprobs), _row(behaviour)
    )
    assert np.isfinite(loss) and np.isfinite(gradient).all()
    assert np.isfinite(list(losses.summarize(parts, 1).values())).all()
