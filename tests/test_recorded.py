"""A run directory read back: what was recorded, and nothing is changed."""

import json

import numpy as np
import pytest

from t1jax.config import UserError
from t1jax.recorded import Recorded
from t1jax.rewards import schemes
from t1jax.rl import credit, learner
from t1jax.rl.critic import explained_variance
from t1jax.rollout.trajectory import Outcome


@pytest.fixture(scope="module")
def run(finished):
  return Recorded.open(finished)


def test_curves_count_from_one(run):
  steps, success = run.curve("ppo", "success")
  assert steps.tolist() == [1] and 0 <= success[0] <= 1
  assert run.curve("control", "success")[0].tolist() == [1]
  updates, loss = run.curve("sft", "loss")
  assert updates.tolist() == [1, 2] and (loss > 0).all()
  nothing = run.curve("ppo", "no_such_number")
  assert [len(x) for x in nothing] == [0, 0]


def test_a_config_without_a_section_is_one_line(tmp_path):
  (tmp_path / "config.json").write_text('{"config": {"seed": 0}}')
  with pytest.raises(UserError, match=r"config.json lacks base, .*ppo"):
    _ = Recorded(tmp_path).config


def test_episodes_and_checkpoints_are_found(run):
  assert run.iterations("rl") == (0, 1)
  assert run.iterations("control") == (1,)  # before: the warm-up's of rl
  assert run.iterations("nothing") == ()
  assert len(run.episodes("rl", 1)) == 13
  assert run.checkpoints == (0, 1)
  assert run.last_reproducible() == 1
  assert run.summary["n_heldout"] == 2
  turn, sampled, part = next(run.episodes("rl", 1)[0].segments())
  assert (turn, sampled) == (-1, False)
  text = run.text(run.episodes("rl", 1)[0].tokens[part])
  assert text.startswith("<|task|>") and text.endswith("<|act|>")


def test_credit_is_what_the_update_recorded(run):
  state = run.learner_after(0)
  assert int(state.step) == 0
  assert int(run.learner_after(1).step) == 1
  episodes = run.episodes("rl", 1)
  values, _, returns = learner.estimate_credit(
    state.critic, episodes, run.setting.model, run.rl
  )
  flat = [credit.at_actions(x, episodes) for x in (values, returns)]
  for name, now in (
    ("value_mean", flat[0].mean()),
    ("return_mean", flat[1].mean()),
    ("explained_variance", explained_variance(*flat)),
  ):
    assert now == pytest.approx(run.curve("ppo", name)[1][0], abs=1e-5), name


def test_rewards_follow_from_assertions_and_scales(run):
  assert set(run.denominators) == set(run.config.families)
  for episode in run.episodes("rl", 1):
    again = schemes.score(
      Outcome(
        "completed",
        success=episode.outcome.success,
        assertions=episode.outcome.assertions,
      ),
      episode.family,
      run.denominators,
      scheme=run.config.rl.reward,
      max_assertions=run.config.rl.max_assertions,
    )
    assert again.reward == episode.outcome.reward
    assert again.reward_parts == episode.outcome.reward_parts


def test_a_relative_directory_is_found_from_below(
  finished, tmp_path, monkeypatch
):
  (tmp_path / "runs").mkdir()
  (tmp_path / "runs" / "mine").symlink_to(finished)
  (tmp_path / "notebooks").mkdir()
  monkeypatch.chdir(tmp_path / "notebooks")
  assert len(Recorded.open("runs/mine").records) > 5
  with pytest.raises(UserError, match="no run in runs/other"):
    Recorded.open("runs/other")


def test_what_cannot_be_read_is_said(finished, tmp_path):
  record = json.loads((finished / "config.json").read_text())
  (tmp_path / "config.json").write_text(json.dumps(record))
  young = Recorded.open(tmp_path)
  assert young.summary == {} and young.iterations("rl") == ()
  for look in (young.last_reproducible, lambda: young.checkpoints):
    with pytest.raises(UserError, match="has saved no learner yet"):
      look()
  with pytest.raises(UserError, match="no dataset"):
    _ = young.denominators
  with pytest.raises(UserError, match="nothing is recorded there"):
    young.curve("ppo", "success")
  record["config"]["pretrain"]["enabled"] = True
  (tmp_path / "config.json").write_text(json.dumps(record))
  with pytest.raises(UserError, match="made a base model"):
    Recorded.open(tmp_path)


def test_a_saved_learner_needs_the_batch_that_it_began(run, tmp_path):
  (tmp_path / "config.json").write_bytes(
    (run.workdir / "config.json").read_bytes()
  )
  (tmp_path / "metrics.jsonl").touch()
  lonely = Recorded.open(tmp_path)
  lonely.__dict__["checkpoints"] = (3,)
  with pytest.raises(UserError, match="no PPO batch"):
    lonely.last_reproducible()
  assert np.size(lonely.curve("ppo", "success")[0]) == 0
