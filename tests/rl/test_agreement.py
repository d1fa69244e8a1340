"""Learner and sampler compute the same log-probs, control tokens excluded."""

import dataclasses

import jax
import numpy as np
import pytest

from t1jax.models import params as model_params
from t1jax.models.config import ModelConfig
from t1jax.rl import batching
from t1jax.rl.agreement import agreement, compare
from t1jax.rl.settings import RLConfig
from t1jax.rollout.trajectory import Outcome, TrajectoryBuilder
from t1jax.sampling.engine import Engine

CFG = ModelConfig(
  vocab_size=24, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1,
  head_dim=8, d_ff=16, num_experts=4, top_k=2, d_expert=8, moe_layers=(0, 1),
)  # fmt: skip
FORBIDDEN, STOP = (20, 21, 22), 23
RL = RLConfig(buckets=(64,), token_budget=256, forbidden_ids=FORBIDDEN)


@pytest.fixture(scope="module")
def played():
  params = model_params.init(jax.random.key(0), CFG)
  # A policy that would love to say a control token, as one that was
  # pretrained on whole transcripts does.
  params["embed"] = params["embed"].at[20].multiply(30.0)
  engine = Engine(
    CFG, num_slots=6, max_len=60, stop_id=STOP, forbidden_ids=FORBIDDEN,
    prefill_buckets=(16,), columns=(60,), decode_rows=6,
  )  # fmt: skip
  engine.load(params, 0)
  builders = {}
  for n in range(6):
    session = engine.open((3, n))
    builders[session] = TrajectoryBuilder(4, 2, 2)
  for turn in range(2):
    for session, builder in builders.items():
      given = [20 + turn, 1, 2, 3 + session % 5, 22]
      builder.append(given, turn=turn - 1, weight_version=0)
      engine.submit(session, given, 12)
    while engine.has_work:
      for reply in engine.step():
        builder = builders[reply.session]
        builder.append(
          reply.tokens, turn=turn, weight_version=0, logprobs=reply.logprobs
        )
        builder.append_routes(reply.input_routes)
  return params, [b.finish(Outcome("completed")) for b in builders.values()]


def test_they_agree_when_the_learner_knows_what_is_never_sampled(played):
  params, trajectories = played
  for replay in (True, False):
    found = agreement(params, trajectories, CFG, RL, replay=replay)
    assert found["agreement"] == 1.0 and found["logprob_gap"] < 1e-4
    assert found["k3"] < 1e-6
  inputs = sum(len(t) - 1 for t in trajectories)
  assert found["pairs"] == inputs * CFG.num_moe_layers


def test_they_differ_when_it_does_not(played):
  params, trajectories = played
  blind = dataclasses.replace(RL, forbidden_ids=())
  found = agreement(params, trajectories, CFG, blind, replay=True)
  assert found["agreement"] == 1.0 and found["logprob_gap"] > 0.1


def test_a_changed_route_is_seen(played):
  params, trajectories = played
  first = trajectories[0]
  routes = first.routes.copy()
  live = set(routes[5, 1].tolist())
  routes[5, 1] = sorted(set(range(4)) - live)
  changed = [dataclasses.replace(first, routes=routes), *trajectories[1:]]
  off = agreement(params, changed, CFG, RL, replay=False)
  assert off["agreement"] == pytest.approx(1 - 1 / off["pairs"])
  on = agreement(params, changed, CFG, RL, replay=True)
  assert on["agreement"] == 1.0
  assert on["logprob_gap"] > 1e-4  # other experts, other numbers


def test_each_layer_answers_for_itself(played):
  params, trajectories = played
  first = trajectories[0]
  routes = first.routes.copy()
  for position in (3, 5):
    live = set(routes[position, 1].tolist())
    routes[position, 1] = sorted(set(range(4)) - live)
  routes[7] = -1  # not recorded, so not compared
  changed = [dataclasses.replace(first, routes=routes), *trajectories[1:]]
  found = compare(params, changed, CFG, RL, replay=False)
  inputs = sum(len(t) - 1 for t in trajectories)
  np.testing.assert_array_equal(found.pairs_L, inputs - 1)
  np.testing.assert_array_equal(found.same_L, [inputs - 1, inputs - 3])
  np.testing.assert_allclose(found.agreement_L, [1.0, 1 - 2 / (inputs - 1)])
  summary = agreement(params, changed, CFG, RL, replay=False)
  assert summary["agreement"] == found.agreement
  assert summary["pairs"] == found.pairs_L.sum()
  assert len(found.log_ratio_N) == sum(t.loss_mask.sum() for t in trajectories)
  assert summary["logprob_gap"] == np.abs(found.log_ratio_N).mean()


@pytest.mark.parametrize("axis", [0, 2])  # another layer's, the token's before
def test_misplaced_routes_are_seen(played, monkeypatch, axis):
  params, trajectories = played
  pack = batching.pack

  def misplace(*args, **kwargs):
    for micro in pack(*args, **kwargs):
      routes = np.roll(micro.batch.routes, 1, axis)
      yield dataclasses.replace(micro, batch=micro.batch.replace(routes=routes))

  monkeypatch.setattr(batching, "pack", misplace)
  found = agreement(params, trajectories, CFG, RL, replay=True)
  assert found["agreement"] < 0.9


def test_no_trajectory_no_gap():
  params = model_params.init(jax.random.key(0), CFG)
  found = agreement(params, [], CFG, RL, replay=True)
  assert found == {
    "agreement": 1.0, "logprob_gap": 0.0, "k3": 0.0, "pairs": 0.0,
  }  # fmt: skip
  assert np.isfinite(list(found.values())).all()
  nothing = compare(params, [], CFG, RL, replay=False)
  np.testing.assert_array_equal(nothing.agreement_L, [1.0, 1.0])
