"""The main job: a 1.6M-parameter sparse MoE learns to use a real shell.

  bash launch/local.sh
  python -m t1jax.train --config=configs/tiny.py --workdir=runs/tiny

Hardware: 2 CPU cores, 4 GiB of memory; 27 minutes, of which the control
takes 9 (--config.control.enabled=False). Strict success on 260 held-out tasks
(seed 0): base 0.4 %, warm start 68.5 %, PPO 90.0 %, control 96.2 %.

Arguments (`configs/tiny.py:ARGUMENT`):
  smoke     everything once, in about a minute; learns nothing
  pretrain  makes the base checkpoint that the package ships (25 minutes; its
            own strict success is 0.4 %, one task of 260)
"""

from ml_collections import config_dict

from t1jax.config import parse_arg


def get_config(arg: str | None = None) -> config_dict.ConfigDict:
  """The config of the main job, or of one of its variants."""
  variant = parse_arg(arg, ("smoke", "pretrain"))
  config = config_dict.create(
    seed=0,
    # Directory of the base model and its tokenizer; "" = the package's own.
    base="",
    families=(),  # names; () = all of them
    model=dict(
      d_model=128,
      num_layers=4,
      num_heads=4,
      num_kv_heads=2,
      head_dim=32,
      d_ff=384,
      num_experts=8,
      top_k=2,
      d_expert=128,
      moe_layers=(1, 2, 3),
    ),
    data=dict(  # tasks per family
      demonstrations=9,
      validation=8,
      train=800,
      heldout=20,
      directories=(),  # Harbor task directories that join the training tasks
    ),
    limits=dict(  # of one episode
      max_turns=6,
      max_tokens=256,
      max_action_tokens=20,
      command_seconds=5.0,
      episode_seconds=60.0,
      observation_bytes=400,
    ),
    sampler=dict(
      num_slots=128,
      temperature=1.0,
      dtype="float32",
      decode_rows=32,
      decode_steps=8,
      prefill_rows=8,
      prefill_buckets=(16, 64),
      columns=(256,),
    ),
    # Shows the metrics at Weights & Biases, too; "" = not. mode: online, or
    # offline (nothing leaves the machine).
    wandb=dict(project="", entity="", mode="online"),
    sandboxes=48,  # alive at once while demonstrations are recorded
    sft=dict(
      batch_size=24,
      max_epochs=60,
      patience=3,  # epochs without a better validation loss
      tolerance=0.01,  # relative; less is not better
      optimizer=dict(learning_rate=3e-4, warmup_steps=20, b2=0.98),
    ),
    warm_up=dict(
      episodes=832,
      evaluation=60,  # tasks that the critic does not learn from ...
      attempts=4,  # ... each tried so often
    ),
    rl=dict(
      iterations=40,
      episodes=208,
      keep=208,  # episodes enough for an update; the surplus is aborted
      reward="spr",
      max_assertions=10.0,
      checkpoint_every=5,
    ),
    ppo=dict(
      gamma_turn=1.0,
      lambda_turn=0.8,
      advantage="tb_gae",
      ratio_low=0.70,
      ratio_high=6.00,
      tis_cap=2.0,
      whiten=True,
      replay=True,
      actor=dict(learning_rate=2e-4, warmup_steps=4, decay_steps=160, b2=0.99),
      critic=dict(learning_rate=7.5e-4, warmup_steps=4, b2=0.99),
      actor_minibatches=4,
      critic_minibatches=8,
      warmup_minibatches=52,
      warmup_epochs=3,
      buckets=(256,),
      token_budget=4096,
    ),
    # The control spends the same episodes on rejection-sampling SFT.
    control=dict(enabled=True, learning_rate=2e-4, minibatches=4),
    pretrain=dict(
      enabled=False,
      vocab_size=768,
      sessions=600,  # per family
      drills=3500,  # sessions that copy names and numbers to no end
      validation=20,
      hints=3,  # names shown that the session does not use
      batch_size=36,
      steps=2000,
      evaluate_every=200,
      optimizer=dict(
        algorithm="muon",
        learning_rate=3e-3,
        warmup_steps=20,
        decay_steps=2000,
        final_fraction=0.05,
        b2=0.98,
        weight_decay=0.01,
      ),
    ),
  )
  if "pretrain" in variant:
    config.pretrain.enabled = True
  if "smoke" in variant:
    config.data.update(demonstrations=2, validation=1, train=4, heldout=1)
    # What has learned so little never succeeds; by this it still earns some.
    config.rl.reward = "fraction"
    config.sft.max_epochs = 2
    config.warm_up.update(episodes=13, evaluation=6, attempts=2)
    config.rl.update(iterations=1, episodes=13, keep=13)
    # One shape of each program: compiling is most of so short a run.
    config.sampler.update(num_slots=16, decode_rows=16, prefill_buckets=(64,))
  return config
