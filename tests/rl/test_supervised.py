"""Supervised steps: they learn, and no split changes them."""

import jax
import numpy as np
import pytest

from t1jax.rl import batching, supervised
from t1jax.rl.settings import OptimizerConfig

OPTIMIZER = OptimizerConfig(learning_rate=1e-2)


def _pack(examples, token_budget):
  return batching.pack_demonstrations(
    examples, buckets=(32,), token_budget=token_budget
  )


def test_the_loss_falls(cfg, draw_actor, make_demonstrations):
  micros = _pack(make_demonstrations(0, 8), 128)
  state = supervised.init_supervised(draw_actor(0), OPTIMIZER)
  before = supervised.evaluation_loss(state.params, micros, cfg)
  assert before == pytest.approx(np.log(cfg.vocab_size), rel=0.1)
  reported = []
  for _ in range(8):
    state, metrics = supervised.sft_step(state, micros, cfg, OPTIMIZER)
    reported.append(float(metrics["loss"]))
  after = supervised.evaluation_loss(state.params, micros, cfg)
  assert reported[0] == pytest.approx(before, rel=1e-5)
  assert after < before - 0.2
  assert int(state.step) == 8


def test_no_split_changes_the_step(cfg, draw_actor, make_demonstrations):
  examples = make_demonstrations(1, 8)
  stepped = []
  for budget in (128, 32):
    state = supervised.init_supervised(draw_actor(0), OPTIMIZER)
    state, metrics = supervised.sft_step(
      state, _pack(examples, budget), cfg, OPTIMIZER
    )
    stepped.append(metrics)
  for name in ("loss", "grad_norm", "router_grad_norm"):
    np.testing.assert_allclose(stepped[0][name], stepped[1][name], rtol=1e-5)
  assert float(stepped[0]["router_grad_norm"]) > 0


def test_the_loss_is_on_the_mask_alone(cfg, draw_actor, make_demonstrations):
  (example,) = make_demonstrations(2, 1)
  blank = type(example)(example.tokens, np.zeros_like(example.loss_mask))
  micros = _pack([blank], 32)
  params = draw_actor(0)
  assert supervised.evaluation_loss(params, micros, cfg) == 0.0
  # All masked: nothing moves, nothing is NaN.
  state = supervised.init_supervised(params, OPTIMIZER)
  state, metrics = supervised.sft_step(state, micros, cfg, OPTIMIZER)
  assert float(metrics["grad_norm"]) == 0.0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
