"""Made-up trajectories for the RL room, with every field filled."""

import jax
import numpy as np
import pytest

from t1jax.models import params as model_params
from t1jax.models.config import ModelConfig
from t1jax.rollout.trajectory import (
  AssertionResult,
  Demonstration,
  Outcome,
  Trajectory,
)

VOCAB = 32


@pytest.fixture(scope="session")
def cfg():
  """One dense layer, then one sparse one: layer 1 owns row 0 of routes."""
  return ModelConfig(
    vocab_size=VOCAB,
    d_model=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    d_ff=16,
    num_experts=4,
    top_k=2,
    d_expert=16,
    moe_layers=(1,),
    dispatch="dense",  # compiles fast; one test takes the other
  )


@pytest.fixture(scope="session")
def draw_actor(cfg):
  """Factory: seed -> the actor's parameters, with buffers of their own."""
  return jax.jit(lambda seed: model_params.init(jax.random.key(seed), cfg))


@pytest.fixture(scope="session")
def make_trajectory():
  """Factory: (rng, turn lengths, ...) -> Trajectory.

  `turns` is a sequence of (actions, observations) lengths. Lengths, not
  tokens, are the caller's; the rest is drawn.
  """

  def make(
    rng,
    turns=((3, 2), (2, 0)),
    prompt=3,
    *,
    reward=1.0,
    status="completed",
    num_moe_layers=1,
    top_k=2,
    num_experts=4,
    task="t",
  ):
    mask, turn_ids = [False] * prompt, [-1] * prompt
    for turn, (actions, observations) in enumerate(turns):
      mask += [True] * actions + [False] * observations
      turn_ids += [turn] * (actions + observations)
    length = len(mask)
    mask = np.asarray(mask)
    routes = np.stack(
      [
        [
          rng.permutation(num_experts)[:top_k]
          for _ in range(max(num_moe_layers, 1))
        ]
        for _ in range(length)
      ]
    )[:, :num_moe_layers].astype(np.int16)
    routes[-1:] = -1
    logprobs = np.where(mask, -rng.exponential(3.0, length), 0.0)
    return Trajectory(
      tokens=rng.integers(1, VOCAB, length).astype(np.int32),
      loss_mask=mask,
      logprobs=logprobs.astype(np.float32),
      turn_ids=np.asarray(turn_ids, np.int32),
      weight_version=np.zeros(length, np.int32),
      routes=routes,
      outcome=Outcome(
        status,
        success=reward >= 1.0,
        assertions=(AssertionResult("done", "semantic", reward >= 1.0),),
        reward=reward,
        reward_parts={"binary": float(reward >= 1.0)},
      ),
      task=task,
    )

  return make


@pytest.fixture(scope="session")
def make_trajectories(make_trajectory):
  """Factory: (seed, count) -> trajectories of uneven lengths, all < 32."""

  def make(seed, count, **kwargs):
    rng = np.random.default_rng(seed)
    return [
      make_trajectory(
        rng,
        [
          (int(rng.integers(1, 4)), int(rng.integers(0, 4)))
          for _ in range(int(rng.integers(1, 4)))
        ],
        prompt=int(rng.integers(1, 6)),
        reward=float(rng.integers(0, 2)),
        **kwargs,
      )
      for _ in range(count)
    ]

  return make


@pytest.fixture(scope="session")
def make_demonstrations():
  def make(seed, count):
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
      length = int(rng.integers(4, 20))
      mask = rng.random(length) < 0.5
      mask[0], mask[-1] = False, True
      tokens = rng.integers(1, VOCAB, length).astype(np.int32)
      examples.append(Demonstration(tokens, mask))
    return examples

  return make
