"""The compiled programs: alignment, and gradients that no split can change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import heads, transformer
from t1jax.rl import batching, critic, programs
from t1jax.rl.settings import OptimizerConfig, RLConfig

RL = RLConfig(buckets=(32,), token_budget=128)


@pytest.fixture(scope="module")
def actor(draw_actor):
  return draw_actor(0)


@pytest.fixture(scope="module")
def value_net(cfg, actor):
  """A critic whose head says something."""
  tree = critic.init_from_actor(actor, cfg)
  tree["head"] = jax.random.normal(jax.random.key(1), tree["head"].shape)
  return tree


def _pack(trajectories, buckets=(32,), token_budget=128):
  micros = batching.pack(
    trajectories,
    buckets=buckets,
    token_budget=token_budget,
    num_moe_layers=1,
    top_k=2,
  )
  rng = np.random.default_rng(7)
  fields = {
    name: {
      i: (rng.normal(size=len(t)) * 0.3).astype(np.float32)
      for i, t in enumerate(trajectories)
    }
    for name in ("advantages", "returns", "values", "old_logprobs")
  }
  return batching.refill(micros, **fields)


def _logprobs(params, batch, cfg):
  return np.asarray(
    programs.logprob_pass(
      params,
      batch,
      cfg=cfg,
      temperature=1.0,
      chunk=1024,
      recorded=False,
      capacity=None,
    )
  )


def _values(params, batch, cfg):
  return np.asarray(
    programs.value_pass(params, batch.replace(routes=None), cfg=cfg.critic())
  )


def test_logprob_of_a_token_comes_from_the_state_before_it(
  cfg, actor, make_trajectories
):
  trajectory = make_trajectories(0, 1)[0]
  (micro,) = _pack([trajectory])
  found = _logprobs(actor, micro.batch, cfg)[0, : len(trajectory)]
  # The slow twin: this trajectory alone, whole logits, one row a token.
  length = len(trajectory)
  outputs = transformer.apply(
    actor,
    cfg,
    jnp.asarray(trajectory.tokens)[None],
    jnp.arange(length)[None],
    jnp.ones((1, length), jnp.int32),
    routes_LxBxSxK=jnp.asarray(trajectory.routes.transpose(1, 0, 2)[:, None]),
  )
  table = np.asarray(
    jax.nn.log_softmax(heads.logits(actor, cfg, outputs.hidden_BxSxD))
  )[0]
  expected = [table[t - 1, trajectory.tokens[t]] for t in range(1, length)]
  np.testing.assert_allclose(found[1:], expected, atol=1e-5)
  # Shifted by one either way it must not pass.
  assert np.abs(found[:-1] - expected).max() > 1e-3
  assert np.abs(found[2:] - expected[:-1]).max() > 1e-3


def test_value_of_a_token_is_read_before_the_token(
  cfg, value_net, make_trajectories
):
  trajectory = make_trajectories(1, 1)[0]
  at = len(trajectory) - 2
  tokens = trajectory.tokens.copy()
  tokens[at] = tokens[at] % 31 + 1
  changed = dataclasses.replace(trajectory, tokens=tokens)
  (first,), (second,) = _pack([trajectory]), _pack([changed])
  before = _values(value_net, first.batch, cfg)[0]
  after = _values(value_net, second.batch, cfg)[0]
  # V(t) knows the tokens before t, not token t: only t + 1 feels the change.
  np.testing.assert_array_equal(before[: at + 1], after[: at + 1])
  assert abs(before[at + 1] - after[at + 1]) > 1e-4


def test_value_and_logprob_share_their_place():
  reading = jnp.asarray([[10.0, 11.0, 12.0]])
  np.testing.assert_array_equal(
    programs.predictions_of(reading), [[0.0, 10.0, 11.0]]
  )


def test_neighbours_in_a_row_do_not_matter(
  cfg, value_net, actor, make_trajectories
):
  trajectories = make_trajectories(2, 6)
  together = _pack(trajectories)
  for run, params in ((_logprobs, actor), (_values, value_net)):
    packed = batching.unpack(
      together, [run(params, m.batch, cfg) for m in together]
    )
    for index, trajectory in enumerate(trajectories):
      (alone,) = _pack([trajectory])
      length = len(trajectory)
      np.testing.assert_allclose(
        packed[index][1:], run(params, alone.batch, cfg)[0, 1:length], atol=2e-5
      )


def _actor_gradient(actor, micros, cfg, *, recorded=False):
  total = jnp.float32(sum(m.num_actions for m in micros))
  gradient = programs.zero_gradient(actor)
  for micro in micros:
    gradient, _, _ = programs.actor_gradient(
      actor,
      gradient,
      micro.batch,
      total,
      cfg=cfg,
      terms=RL.policy_terms,
      recorded=recorded,
      capacity=None,
      old_is_live=False,
    )
  return gradient


def _critic_gradient(params, micros, cfg):
  total = jnp.float32(sum(m.num_actions for m in micros))
  gradient = programs.zero_gradient(params)
  for micro in micros:
    gradient, _ = programs.critic_gradient(
      params,
      gradient,
      micro.batch.replace(routes=None),
      total,
      cfg=cfg.critic(),
      value_clip=0.0,
    )
  return gradient


def _relative_gap(a, b):
  return max(
    float(jnp.abs(x - y).max() / jnp.maximum(jnp.abs(y).max(), 1e-6))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def test_gradients_do_not_depend_on_the_split(
  cfg, actor, value_net, make_trajectories
):
  trajectories = make_trajectories(3, 10)
  whole = _pack(trajectories)
  # Other neighbours, other padding, two shapes and many micro-batches.
  split = _pack(trajectories, buckets=(16, 48), token_budget=48)
  assert len(split) > 2 * len(whole)
  for gap in (
    _relative_gap(
      _actor_gradient(actor, split, cfg), _actor_gradient(actor, whole, cfg)
    ),
    _relative_gap(
      _critic_gradient(value_net, split, cfg),
      _critic_gradient(value_net, whole, cfg),
    ),
  ):
    assert gap <= 1e-5


def test_recorded_and_mixed_agree(cfg, actor, make_trajectories):
  micros = _pack(make_trajectories(4, 6))
  assert all(m.recorded for m in micros)
  gap = _relative_gap(
    _actor_gradient(actor, micros, cfg, recorded=True),
    _actor_gradient(actor, micros, cfg, recorded=False),
  )
  assert gap <= 1e-5


def test_replay_changes_the_gradient(cfg, actor, make_trajectories):
  # Otherwise the tests above could pass with routes that nobody reads.
  micros = _pack(make_trajectories(4, 6))
  free = [
    dataclasses.replace(m, batch=m.batch.replace(routes=None)) for m in micros
  ]
  gap = _relative_gap(
    _actor_gradient(actor, free, cfg), _actor_gradient(actor, micros, cfg)
  )
  assert gap > 1e-2


def test_the_critic_refuses_the_actors_routes(
  cfg, value_net, make_trajectories
):
  (micro,) = _pack(make_trajectories(5, 2))
  with pytest.raises(ValueError, match="its own router"):
    programs.value_pass(value_net, micro.batch, cfg=cfg.critic())


def test_update_reports_the_routers_gradient(cfg, draw_actor):
  params = draw_actor(0)
  config = OptimizerConfig(learning_rate=1e-3)
  gradient = jax.tree.map(jnp.zeros_like, params)
  router = params["layers"][1]["moe"]["router"]
  gradient["layers"][1]["moe"]["router"] = jnp.full_like(router, 2.0)
  gradient["embed"] = jnp.full_like(gradient["embed"], 1.0)
  routed = 4.0 * router.size
  everything = routed + gradient["embed"].size
  _, _, norms = programs.apply_update(
    params,
    programs.init_optimizer(params, config=config),
    gradient,
    config=config,
  )
  assert float(norms["router_grad_norm"]) == pytest.approx(routed**0.5)
  assert float(norms["grad_norm"]) == pytest.approx(everything**0.5)


def test_warm_up_and_decay_of_the_learning_rate():
  config = OptimizerConfig(
    learning_rate=1.0, warmup_steps=2, decay_steps=2, final_fraction=0.5,
    max_grad_norm=1e9, b1=0.0, b2=0.0, eps=1e-30,
  )  # fmt: skip
  params = {"w": jnp.zeros((1,))}
  state = programs.init_optimizer(params, config=config)
  path = [0.0]
  for _ in range(5):
    params, state, _ = programs.apply_update(
      params, state, {"w": jnp.ones((1,))}, config=config
    )
    path.append(-float(params["w"][0]))
  steps = np.diff(path)
  # Adam with no memory moves by the learning rate itself.
  np.testing.assert_allclose(steps, [0.5, 0.75, 1.0, 0.75, 0.5], atol=1e-6)


def test_muon_moves_each_matrix_alike_in_all_directions(cfg, draw_actor):
  config = OptimizerConfig(algorithm="muon", learning_rate=1e-2, b1=0.0, b2=0.0)
  params = draw_actor(0)
  before = jax.tree.map(np.asarray, params)
  rng = np.random.default_rng(0)
  gradient = jax.tree.map(
    lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params
  )
  # An expert whose gradient is a thousand times smaller moves as far.
  experts = gradient["layers"][1]["moe"]["up"].at[0].multiply(1e-3)
  gradient["layers"][1]["moe"]["up"] = experts
  after, _, _ = programs.apply_update(
    params,
    programs.init_optimizer(params, config=config),
    gradient,
    config=config,
  )
  moved = jax.tree.map(lambda a, b: np.asarray(a) - b, after, before)
  layer = moved["layers"][1]
  d = cfg.d_model
  matrices = [
    *layer["moe"]["up"],
    *layer["moe"]["down"],
    layer["attn"]["q"].reshape(d, -1),
    layer["attn"]["o"].reshape(-1, d),
    moved["layers"][0]["mlp"]["gate"],
  ]
  for matrix in matrices:
    # Moonlight's scale: 0.2 sqrt(max(in, out)) times an orthogonal matrix;
    # five Newton-Schulz steps leave singular values between 0.6 and 1.3.
    scale = 1e-2 * 0.2 * max(matrix.shape) ** 0.5
    values = np.linalg.svd(matrix, compute_uv=False) / scale
    assert values.min() > 0.5 and values.max() < 1.3, values
  # What is no matrix between layers moves as Adam moves it.
  for leaf in (moved["embed"], layer["moe"]["router"], layer["attn_norm"]):
    np.testing.assert_allclose(np.abs(leaf), 1e-2, rtol=1e-3)
