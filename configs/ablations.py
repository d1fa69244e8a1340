"""What each part is worth: the main job, short, with one thing changed.

  python -m t1jax.ablate --workdir=runs/ablations --names=no_replay,t1_dense
  python -m t1jax.train --config=configs/ablations.py:no_replay --workdir=DIR

Hardware: 2 CPU cores. The first run of a seed makes the warm start that its
others share (2 minutes); each run is then about 3 minutes.

Arguments (`configs/ablations.py:NAME`), each a few lines in `CHANGES`:
  baseline         nothing changed: replay, TB-GAE, SPR, a warm, full critic
  no_replay        the learner routes by itself
  no_warmup        PPO starts with a critic that has learned nothing
  token_gae        the clock of GAE ticks at every action token, lambda 0.95
  binary_reward, fraction_reward, t1_dense, fdr    other rewards
  spr              the baseline's own reward: the same as `baseline`
  critic_small     a critic of one layer, without experts, in place of all
  no_tis           no importance weight from the sampler to the learner
  literal_clip     PPO's ratio in [0.30, 5.00], as the paper's words read
  smoke            beside a name: everything once, learns nothing
"""

import pathlib

from ml_collections import config_dict

from t1jax.config import load_config, parse_arg

BASE = pathlib.Path(__file__).with_name("tiny.py")

CHANGES = {
  "baseline": {},
  "no_replay": {"ppo.replay": False},
  "no_warmup": {"ppo.warmup_epochs": 0},
  "token_gae": {
    "ppo.advantage": "token_clock_actions",
    "ppo.gamma_token": 1.0,
    "ppo.lambda_token": 0.95,
  },
  "binary_reward": {"rl.reward": "binary"},
  "fraction_reward": {"rl.reward": "fraction"},
  "t1_dense": {"rl.reward": "t1_dense"},
  "fdr": {"rl.reward": "fdr"},
  "spr": {"rl.reward": "spr"},
  "critic_small": {"model.critic_layers": 1},
  "no_tis": {"ppo.tis_cap": 0.0},
  "literal_clip": {"ppo.ratio_low": 0.30, "ppo.ratio_high": 5.00},
}


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
  """The config of one ablation; of the baseline without an argument."""
  chosen = parse_arg(arg, (*CHANGES, "smoke"))
  config = load_config(f"{BASE}:smoke" if "smoke" in chosen else str(BASE))
  config.control.enabled = False
  if "smoke" not in chosen:  # short enough to run three seeds of each
    config.warm_up.update(episodes=416, evaluation=26)
    config.ppo.warmup_minibatches = 26
    config.rl.update(iterations=12, episodes=104, keep=104)
  # What a change may set that the main job leaves at its default.
  with config.unlocked():
    config.model.critic_layers = 0
    config.ppo.update(gamma_token=1.0, lambda_token=1.0)
  for name in chosen:
    for field, value in CHANGES.get(name, {}).items():
      section, _, leaf = field.partition(".")
      config[section][leaf] = value
  return config
