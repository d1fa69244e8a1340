"""The learner whole: order, exclusion, replay, and that it learns."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.rl import batching, credit, critic, learner, programs
from t1jax.rl.settings import OptimizerConfig, RLConfig

RL = RLConfig(
  buckets=(32,),
  token_budget=128,
  max_turns=4,
  actor=OptimizerConfig(learning_rate=1e-3),
  critic=OptimizerConfig(learning_rate=1e-2),
)


@pytest.fixture(scope="module")
def start(cfg, draw_actor):
  """Factory of equal first states; each is consumed by its update."""

  def make(rl=RL):
    actor = draw_actor(0)
    return learner.init_state(actor, critic.init_from_actor(actor, cfg), rl)

  return make


def _assert_equal(a, b):
  jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y), a, b)


def _changed(a, b) -> bool:
  return any(
    (np.asarray(x) != np.asarray(y)).any()
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )


def _host(tree):
  return jax.tree.map(np.asarray, jax.device_get(tree))


def test_one_update_moves_both_and_reports(cfg, start, make_trajectories):
  trajectories = make_trajectories(0, 8)
  state = start()
  before = _host((state.actor, state.critic))
  state, metrics = learner.ppo_update(state, trajectories, cfg, RL)
  assert _changed(state.actor, before[0])
  assert _changed(state.critic, before[1])
  assert int(state.step) == int(state.weight_version) == 1
  assert all(isinstance(v, float) for v in metrics.values())
  assert all(np.isfinite(v) for v in metrics.values())
  # One minibatch, one epoch: the policy is still itself, clipping is idle.
  assert metrics["ratio_mean"] == 1.0
  assert metrics["clip_fraction_low"] == metrics["clip_fraction_high"] == 0.0
  assert metrics["update_k3"] == 0.0
  assert 0.0 < metrics["ess"] < 1.0
  assert metrics["logprob_gap"] > 0.0
  assert metrics["k3"] > 0.0
  assert metrics["success"] == np.mean([t.outcome.reward for t in trajectories])
  # Full replay: every row that was an input, none fell back.
  assert metrics["replayed_fraction"] == 1.0
  assert metrics["fallback_fraction"] == 0.0
  assert metrics["replayed_layers"] == cfg.num_moe_layers
  assert metrics["load_violation"] >= 1.0
  assert metrics["actor_router_grad_norm"] > 0.0
  assert metrics["critic_router_grad_norm"] == 0.0  # behind a head of zeros
  assert metrics["critic_grad_norm"] > 0.0


def test_infra_failures_are_in_nothing(cfg, start, make_trajectories):
  trajectories = make_trajectories(0, 8)
  failures = [
    dataclasses.replace(
      t, outcome=dataclasses.replace(t.outcome, status="infra_failure")
    )
    for t in make_trajectories(1, 3)
  ]
  clean, without = learner.ppo_update(start(), trajectories, cfg, RL)
  mixed, with_failures = learner.ppo_update(
    start(), [*trajectories, *failures], cfg, RL
  )
  _assert_equal(_host(clean), _host(mixed))
  assert with_failures.pop("infra_failures") == 3.0
  assert without.pop("infra_failures") == 0.0
  timing = ("seconds", "learner_tokens_per_second")
  for name in without:
    if not name.startswith(timing):
      assert without[name] == with_failures[name], name


def test_only_failures_change_nothing(cfg, start, make_trajectories):
  failures = make_trajectories(1, 3, status="infra_failure")
  state = start()
  before = _host((state.actor, state.critic))
  state, metrics = learner.ppo_update(state, failures, cfg, RL)
  _assert_equal(_host((state.actor, state.critic)), before)
  assert metrics["infra_failures"] == 3.0
  assert metrics["episodes"] == 0.0


def test_the_actor_is_credited_with_values_from_before(
  cfg, start, make_trajectories
):
  # The critic's step comes first, yet its size must not reach the actor.
  trajectories = make_trajectories(0, 8)
  actors = []
  for rate in (1e-2, 1.0):
    rl = dataclasses.replace(RL, critic=OptimizerConfig(learning_rate=rate))
    state, _ = learner.ppo_update(start(rl), trajectories, cfg, rl)
    actors.append(_host(state.actor))
  _assert_equal(*actors)


def test_losses_are_means_over_all_micro_batches(cfg, start, make_trajectories):
  # At ratio 1 and weight 1 the policy loss is the mean advantage, negated;
  # at value 0 the value loss is half the mean squared return.
  trajectories = make_trajectories(5, 21)
  rl = dataclasses.replace(RL, tis_cap=0.0)
  (group,) = learner._minibatches(trajectories, cfg, rl, 1, 0)
  assert len(group) > 1
  _, metrics = learner.ppo_update(start(rl), trajectories, cfg, rl)
  assert metrics["advantage_mean"] > 0.1
  assert metrics["policy_loss"] == pytest.approx(
    -metrics["advantage_mean"], rel=1e-4
  )
  second_moment = metrics["return_std"] ** 2 + metrics["return_mean"] ** 2
  assert metrics["value_loss"] == pytest.approx(second_moment / 2, rel=1e-4)


def test_calibration_trains_the_critic_alone(cfg, start, make_trajectories):
  state = start()
  before = _host((state.actor, state.actor_opt, state.critic))
  state, metrics = learner.ppo_update(
    state, make_trajectories(0, 8), cfg, RL, train_actor=False
  )
  _assert_equal(_host((state.actor, state.actor_opt)), before[:2])
  assert _changed(state.critic, before[2])
  assert int(state.weight_version) == 0
  assert "policy_loss" not in metrics


def test_minibatches_take_old_logprobs_from_before(
  cfg, start, make_trajectories
):
  rl = dataclasses.replace(
    RL, actor_minibatches=2, critic_minibatches=1, actor_epochs=2
  )
  state, metrics = learner.ppo_update(
    start(rl), make_trajectories(0, 8), cfg, rl
  )
  # From the second update on the policy has left its old self.
  assert 0.0 < metrics["update_k3"] < 0.1
  assert metrics["ratio_std"] > 0.0
  assert metrics["ratio_mean"] == pytest.approx(1.0, abs=0.1)
  counts = [
    int(leaf)
    for path, leaf in jax.tree_util.tree_flatten_with_path(state.actor_opt)[0]
    if "count" in jax.tree_util.keystr(path)
  ]
  assert counts
  assert set(counts) == {4}


def test_live_old_logprobs_equal_the_pass(cfg, start, make_trajectories):
  # The pass that is saved with one minibatch would have said the same.
  trajectories = make_trajectories(0, 8)
  groups = learner._minibatches(trajectories, cfg, RL, 1, 0)
  advantage = {
    i: np.where(t.loss_mask, 1.0, 0.0).astype(np.float32)
    for i, t in enumerate(trajectories)
  }
  groups = [batching.refill(g, advantages=advantage) for g in groups]
  state = start()
  explicit = learner._with_logprobs(
    state.actor, groups, cfg, RL, "old_logprobs"
  )
  live, _ = learner.actor_step(state, groups[0], cfg, RL, old_is_live=True)
  other, report = learner.actor_step(
    start(), explicit[0], cfg, RL, old_is_live=False
  )
  assert report["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    live.actor,
    other.actor,
  )


def test_replay_without_routes_is_an_error(cfg, start, make_trajectories):
  # R3: a field lost on the way must not turn replay off in silence.
  trajectories = make_trajectories(0, 3)
  trajectories[1] = dataclasses.replace(
    trajectories[1], routes=np.full_like(trajectories[1].routes, -1)
  )
  with pytest.raises(
    learner.LearnerError, match=r"trajectory 1 .*replay=False"
  ):
    learner.ppo_update(start(), trajectories, cfg, RL)


def test_missing_rows_fall_back_and_are_counted(cfg, start, make_trajectories):
  trajectories = make_trajectories(0, 8)
  routes = trajectories[0].routes.copy()
  routes[1:3] = -1
  trajectories[0] = dataclasses.replace(trajectories[0], routes=routes)
  _, metrics = learner.ppo_update(start(), trajectories, cfg, RL)
  inputs = sum(len(t) - 1 for t in trajectories)
  assert metrics["fallback_fraction"] == pytest.approx(2 / inputs)
  assert metrics["replayed_fraction"] == pytest.approx(1 - 2 / inputs)


def test_capacity_dispatch_with_a_known_load(cfg, start, make_trajectories):
  # Same update, sorted dispatch at the rung that the routes ask for.
  trajectories = make_trajectories(0, 8)
  sparse = dataclasses.replace(cfg, dispatch="capacity")
  (group,) = learner._minibatches(trajectories, sparse, RL, 1, 0)
  variant = learner._variant(group[0], sparse, True)
  assert variant["recorded"]
  assert variant["capacity"] is not None
  found, _ = learner.actor_step(start(), group, sparse, RL, old_is_live=True)
  expected, _ = learner.actor_step(start(), group, cfg, RL, old_is_live=True)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
    found.actor,
    expected.actor,
  )


def test_a_reference_is_asked_for(cfg, start, make_trajectories):
  rl = dataclasses.replace(RL, kl_coefficient=0.1)
  with pytest.raises(learner.LearnerError, match="reference=params"):
    learner.ppo_update(start(), make_trajectories(0, 3), cfg, rl)


def test_other_lengths_compile_nothing(cfg, start, make_trajectories):
  learner.ppo_update(start(), make_trajectories(0, 8), cfg, RL)
  compiled = [
    programs.value_pass, programs.actor_gradient, programs.critic_gradient,
    programs.apply_update,
  ]  # fmt: skip
  before = [f._cache_size() for f in compiled]
  learner.ppo_update(start(), make_trajectories(5, 21), cfg, RL)
  assert [f._cache_size() for f in compiled] == before


def test_rewarded_actions_grow_likelier(cfg, start, make_trajectories):
  # Two episodes that differ in one action: the paid one must gain.
  trajectory = make_trajectories(3, 1)[0]
  last = np.flatnonzero(trajectory.loss_mask)[-1]
  pair = []
  for token, reward in ((5, 1.0), (6, -1.0)):
    tokens = trajectory.tokens.copy()
    tokens[last] = token
    pair.append(
      dataclasses.replace(
        trajectory,
        tokens=tokens,
        outcome=dataclasses.replace(trajectory.outcome, reward=reward),
      )
    )
  rl = dataclasses.replace(RL, tis_cap=0.0, critic_epochs=1)
  (group,) = learner._minibatches(pair, cfg, rl, 1, 0)

  def gap(actor):
    (filled,) = learner._with_logprobs(actor, [group], cfg, rl, "old_logprobs")
    found = batching.unpack(filled, [m.batch.old_logprobs for m in filled])
    return found[0][last] - found[1][last]

  state = start(rl)
  before = gap(state.actor)
  for _ in range(3):
    state, _ = learner.ppo_update(state, pair, cfg, rl)
  assert gap(state.actor) > before + 0.01


def test_warm_up_teaches_the_critic_and_leaves_the_actor(
  cfg, start, make_trajectory
):
  # The prompt says how the episode ends.
  rng = np.random.default_rng(0)
  trajectories = []
  for index in range(24):
    t = make_trajectory(rng, ((2, 1), (2, 0)), reward=float(index % 2))
    tokens = t.tokens.copy()
    tokens[:3] = 7 + index % 2
    # Both endings occur in every task.
    task = f"task {index // 4}"
    trajectories.append(dataclasses.replace(t, tokens=tokens, task=task))
  rl = dataclasses.replace(RL, warmup_epochs=6, warmup_minibatches=2)
  state = start(rl)
  before = _host((state.actor, state.actor_opt))
  state, metrics = learner.warm_up_critic(
    state, trajectories[:16], cfg, rl, evaluation=trajectories[16:]
  )
  _assert_equal(_host((state.actor, state.actor_opt)), before)
  assert metrics["critic_updates"] == 12.0
  assert metrics["explained_variance_before"] == pytest.approx(0.0, abs=1e-6)
  assert metrics["explained_variance_after"] > 0.5
  assert metrics["explained_variance_first_action"] > 0.5
  assert metrics["explained_variance_within_task"] > 0.5
  alone = [
    dataclasses.replace(t, task=str(i)) for i, t in enumerate(trajectories)
  ]
  _, metrics = learner.warm_up_critic(state, alone[:16], cfg, rl)
  assert metrics["explained_variance_within_task"] == 0.0


def test_state_is_all_arrays(start):
  # So that a checkpoint can hold everything the next step depends on.
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(start()))
  assert start().step.dtype == jnp.int32


def test_credit_is_what_the_update_has(cfg, start, make_trajectories):
  rl = dataclasses.replace(RL, whiten=True)
  state, _ = learner.ppo_update(start(rl), make_trajectories(0, 8), cfg, rl)
  played = make_trajectories(1, 6)
  (broken,) = make_trajectories(2, 1, status="infra_failure")
  played = [*played[:2], broken, *played[2:]]
  values, advantages, returns = learner.estimate_credit(
    state.critic, played, cfg, rl
  )
  assert set(values) == set(advantages) == set(returns) == {0, 1, 3, 4, 5, 6}
  flat = [credit.at_actions(x, played) for x in (values, returns, advantages)]
  _, numbers = learner.ppo_update(state, played, cfg, rl)
  assert numbers["value_std"] == pytest.approx(flat[0].std(), abs=1e-6)
  assert numbers["return_std"] == pytest.approx(flat[1].std(), abs=1e-6)
  assert flat[2].mean() == pytest.approx(0, abs=1e-6)
  assert flat[2].std() == pytest.approx(1, abs=1e-4)
