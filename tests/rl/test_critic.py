"""The critic's start and the measure of its quality."""

import dataclasses

import jax
import numpy as np
import pytest

from t1jax.models import params as model_params
from t1jax.rl import critic


def test_critic_is_the_actors_trunk_with_a_silent_head(cfg, draw_actor):
  actor = draw_actor(0)
  found = critic.init_from_actor(actor, cfg)
  wanted = model_params.abstract(cfg.critic())
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a, b),
    {k: v for k, v in found.items() if k != "head"},
    {k: v for k, v in actor.items() if k != "head"},
  )
  assert not np.asarray(found["head"]).any()


def test_a_small_critic_has_the_first_layers(cfg, draw_actor):
  small = dataclasses.replace(cfg, critic_layers=1)
  actor = draw_actor(0)
  found = critic.init_from_actor(actor, small)
  wanted = model_params.abstract(small.critic())
  assert jax.tree.map(np.shape, found) == jax.tree.map(np.shape, wanted)
  assert len(found["layers"]) == 1 and small.critic().moe_layers == ()
  np.testing.assert_array_equal(
    found["layers"][0]["attn"]["q"], actor["layers"][0]["attn"]["q"]
  )
  with pytest.raises(ValueError, match="critic_layers"):
    dataclasses.replace(cfg, critic_layers=cfg.num_layers + 1)


def test_critic_shares_no_buffer_with_the_actor(cfg, draw_actor):
  actor = draw_actor(0)
  found = critic.init_from_actor(actor, cfg)
  for leaf in jax.tree.leaves(actor):
    leaf.delete()
  assert np.isfinite(np.asarray(found["embed"])).all()


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    ([1.0, 2.0, 3.0, 4.0], 1.0),
    ([2.5, 2.5, 2.5, 2.5], 0.0),
    ([4.0, 3.0, 2.0, 1.0], -3.0),
    ([11.0, 12.0, 13.0, 14.0], 1.0),  # a bias is not variance
  ],
)
def test_explained_variance(values, expected):
  returns = np.asarray([1.0, 2.0, 3.0, 4.0])
  found = critic.explained_variance(np.asarray(values), returns)
  assert found == pytest.approx(expected)


def test_nothing_to_explain_is_zero():
  assert critic.explained_variance(np.zeros(0), np.zeros(0)) == 0.0
  assert critic.explained_variance(np.arange(3.0), np.full(3, 0.1)) == 0.0
