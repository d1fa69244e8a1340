"""What is logged: sums over micro-batches, routing, rollouts."""

import dataclasses

import numpy as np
import pytest

from t1jax.rl import batching, statistics
from t1jax.rl.programs import Load


def test_sums_add_and_maxima_do_not():
  found = statistics.sum_of(
    [{"k": 1.0, "max_k": 5.0}, {"k": 2.0, "max_k": 3.0}]
  )
  assert found == {"k": 3.0, "max_k": 5.0}


def test_updates_average_and_maxima_do_not():
  found = statistics.mean_of(
    [{"k": 1.0, "k_max": 5.0}, {"k": 2.0, "k_max": 3.0}]
  )
  assert found == {"k": 1.5, "k_max": 5.0}
  assert statistics.mean_of([]) == {}


def test_routing_counts_every_input_once(make_trajectories):
  trajectories = make_trajectories(0, 4)
  micros = batching.pack(
    trajectories, buckets=(32,), token_budget=64, num_moe_layers=1, top_k=2
  )
  inputs = sum(len(t) - 1 for t in trajectories)
  # The routes are all recorded; say that the first batch replayed half.
  loads = [
    Load(np.asarray([[4, 2, 2, 0]]), np.asarray([inputs // 2 if first else 0]))
    for first in (True, *[False] * (len(micros) - 1))
  ]
  found = statistics.routing(loads, micros, replay=True)
  assert found["replayed_fraction"] == pytest.approx((inputs // 2) / inputs)
  assert found["fallback_fraction"] == 1.0 - found["replayed_fraction"]
  assert found["load_violation"] == 2.0
  assert (
    statistics.routing(loads, micros, replay=False)["fallback_fraction"] == 0.0
  )


def test_a_dense_model_reports_no_routing():
  empty = Load(np.zeros((0, 0), np.int32), np.zeros((0,), np.int32))
  assert statistics.routing([empty], [], replay=True) == {}


def test_rollout_means(make_trajectories):
  trajectories = make_trajectories(0, 4)
  trajectories[0] = dataclasses.replace(
    trajectories[0],
    outcome=dataclasses.replace(trajectories[0].outcome, status="truncated"),
  )
  found = statistics.rollout(trajectories)
  rewards = [t.outcome.reward for t in trajectories]
  assert found["episodes"] == 4.0
  assert found["truncated"] == 0.25
  assert found["reward"] == found["reward_binary"] == np.mean(rewards)
  assert found["tokens"] == np.mean([len(t) for t in trajectories])
