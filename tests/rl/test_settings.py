"""Settings are checked before anything is allocated."""

import ml_collections
import pytest

from t1jax.rl.settings import OptimizerConfig, RLConfig


def test_from_config_dict():
  found = RLConfig.from_dict(
    ml_collections.ConfigDict(
      {
        "gamma_turn": 1,
        "buckets": [64, 128],
        "actor": {"learning_rate": 1e-4, "warmup_steps": 5},
      }
    )
  )
  assert found.buckets == (64, 128)
  assert found.gamma_turn == 1.0
  assert found.actor == OptimizerConfig(learning_rate=1e-4, warmup_steps=5)
  assert found.critic == RLConfig().critic
  assert hash(found) == hash(RLConfig.from_dict(vars(found)))


def test_defaults_read_the_paper_as_ratio_bounds():
  assert (RLConfig().ratio_low, RLConfig().ratio_high) == (0.70, 6.00)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"lambda_turns": 0.9}, "Did you mean 'lambda_turn'"),
    ({"actor": {"learning_rat": 0.9}}, "Did you mean 'learning_rate'"),
    ({"seed": 0.5}, "RLConfig.seed is 0.5; expected int"),
    ({"replay": 1}, "RLConfig.replay is 1; expected bool"),
    ({"whiten": "yes"}, "expected bool"),
    ({"seed": True}, "expected int"),
    ({"ratio_low": 1.3}, "RLConfig.ratio_low"),
    ({"ratio_high": 0.5}, "RLConfig.ratio_high"),
    ({"lambda_turn": 1.5}, "RLConfig.lambda_turn"),
    ({"advantage": "gae"}, "one of tb_gae"),
    ({"buckets": (64, 32)}, "RLConfig.buckets"),
    ({"actor_minibatches": 4, "critic_minibatches": 6}, "multiple or divisor"),
    ({"actor": {"learning_rate": 0.0}}, "OptimizerConfig.learning_rate"),
  ],
)
def test_refusals(fields, message):
  with pytest.raises(ValueError, match=message):
    RLConfig.from_dict(fields)
