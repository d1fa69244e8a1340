"""Train a terminal agent: base, supervised warm start, PPO, evaluation.

  python -m t1jax.train --config=configs/tiny.py --workdir=runs/tiny

The run directory, local or gs://BUCKET/DIR, holds config.json, metrics.jsonl,
TensorBoard events, the data, checkpoints, the trajectories of every rollout and
evaluation, the policy of each stage, summary.json and report.html. The same
command on the same directory goes on where the run was stopped; a finished run
is left alone. Any field can be set: --config.rl.iterations=5.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax import corpus, report, stages, wandb_writer
from t1jax.checkpoint import export_base
from t1jax.evaluate import (
  EXPECTED_ERRORS,
  TOKENIZER_FILE,
  Arena,
  Setting,
  check_sections,
  keep_compiled_programs,
  learner_settings,
  load_base,
  read_setting,
  read_tokenizer,
)
from t1jax.metrics import (
  SUMMARY_FILE,
  LiveProgress,
  MetricsWriter,
  write_summary,
)
from t1jax.models import params as model_params
from t1jax.rewards import schemes
from t1jax.rl.settings import OptimizerConfig, RLConfig
from t1jax.rollout import demonstrations
from t1jax.stages import Run, evaluate_stage
from t1jax.tasks import datasets
from t1jax.wandb_writer import WandbWriter

# A 0 in one of these would be noticed only when its stage begins, or never.
_AT_LEAST_ONE = (
  "sandboxes",
  "data.demonstrations",
  "data.validation",
  "data.train",
  "data.heldout",
  "sft.batch_size",
  "sft.max_epochs",
  "sft.patience",
  "warm_up.episodes",
  "warm_up.evaluation",
  "warm_up.attempts",
  "rl.iterations",
  "rl.episodes",
  "rl.keep",
  "rl.checkpoint_every",
  "control.minibatches",
  "pretrain.sessions",
  "pretrain.validation",
  "pretrain.batch_size",
  "pretrain.steps",
  "pretrain.evaluate_every",
)


def main(argv: Sequence[str]) -> None:
  """Runs the stages of a config, or goes on with them."""
  # ---- what is asked for, checked before anything is allocated
  keep_compiled_programs()
  call = configs.parse_command_line(argv, description=__doc__)
  config = check_sections(call.config, call.source)
  if call.workdir is None:
    raise configs.UserError("--workdir is missing: say where the run may live")
  pretraining = config.pretrain.enabled
  tokenizer = (
    corpus.train_tokenizer(config) if pretraining else read_tokenizer(config)
  )
  setting = read_setting(config, tokenizer)
  rl = read_rl(config, setting)
  arena = Arena(config, setting)
  wandb_writer.check(config.wandb)
  base = None if pretraining else load_base(setting)
  workdir = configs.claim_workdir(
    call.workdir, config, source=call.source, changed=call.changed
  )
  summary_file = workdir / SUMMARY_FILE
  if summary_file.exists() and stages.has_policies(workdir, config):
    summary = configs.read_json(summary_file)
    print(
      f"{workdir} is finished; its summary:\n{json.dumps(summary, indent=2)}"
    )
    if not (workdir / report.REPORT_FILE).exists():
      report.write_or_say_why_not(workdir)
    return

  with (
    configs.hold_workdir(workdir) as check_hold,
    LiveProgress() as progress,
    open_wandb(workdir, config, progress) as wandb,
    MetricsWriter(
      workdir,
      resume_step=stages.last_step(workdir, config),
      also=wandb,
      check_hold=check_hold,
    ) as metrics,
    arena,
  ):
    run = Run(
      config, setting, rl, workdir, arena, metrics, progress, check_hold
    )
    summary = pretrain(run) if pretraining else train(run, base)
    if wandb is not None:
      wandb.summarise(summary)
    check_hold()
    write_summary(workdir, summary)
  print(json.dumps(summary, indent=2))
  report.write_or_say_why_not(workdir)


def open_wandb(
  workdir: epath.Path, config: config_dict.ConfigDict, progress: LiveProgress
) -> contextlib.AbstractContextManager[WandbWriter | None]:
  """A writer to W&B, or nothing when the config names no project."""
  if not config.wandb.project:
    return contextlib.nullcontext()
  return WandbWriter(workdir, config, notify=progress.say)


def read_rl(config: config_dict.ConfigDict, setting: Setting) -> RLConfig:
  """The learner's settings; what else could end a run late is checked too.

  Raises:
    UserError: a field that is out of range, or two that do not fit.
  """
  fields = configs.flatten(config.to_dict())
  for name in _AT_LEAST_ONE:
    if fields[name] < 1:
      raise configs.UserError(
        f"config field {name} is {fields[name]}; expected at least 1"
      )
  if not 0 <= config.sft.tolerance < 1:
    raise configs.UserError(
      f"config field sft.tolerance is {config.sft.tolerance}; expected a "
      "fraction of the validation loss, at least 0 and below 1"
    )
  if not 0 <= config.seed < 2**32:
    raise configs.UserError(
      f"config field seed is {config.seed}; expected 0 to 2**32 - 1"
    )
  with configs.user_errors("config section rl"):
    schemes.check(config.rl.reward, config.rl.max_assertions)
  if not config.sampler.temperature > 0:  # the sampler itself would be greedy
    raise configs.UserError(
      f"config field sampler.temperature is {config.sampler.temperature}; "
      "expected above 0: the learner takes log-probs under it"
    )
  rl = learner_settings(config, setting)
  with configs.user_errors("config sections sft, control, pretrain"):
    for section in (config.sft, config.pretrain):
      OptimizerConfig.from_dict(section.optimizer)
    OptimizerConfig(learning_rate=config.control.learning_rate)
  longest = config.limits.max_tokens
  if rl.buckets[-1] < longest:
    raise configs.UserError(
      f"config field ppo.buckets ends at {rl.buckets[-1]}, but an episode may "
      f"have limits.max_tokens = {longest}; add a bucket of {longest}"
    )
  return rl


def train(run: Run, base: Any) -> dict[str, Any]:
  """Base → supervised warm start → critic warm-up → PPO → evaluation."""
  config = run.config

  # ---- data: demonstrations, training tasks, held-out tasks
  data = corpus.build(run.workdir, config, run.setting, run.arena, run.progress)
  run.denominators = schemes.family_denominators(
    corpus.family_scales(datasets.load(data, "train"))
  )

  # ---- base and supervised warm start
  results = {"base": evaluate_stage(run, "base", base)}
  sft = warm_start(run, base, data)
  results["sft"] = evaluate_stage(run, "sft", sft)

  # ---- critic warm-up and PPO
  actor, rl_facts = stages.reinforce(run, sft, data)
  results["rl"] = evaluate_stage(run, "rl", actor)

  # ---- control: the same episodes spent on rejection-sampling SFT
  if config.control.enabled:
    control, _ = stages.imitate_successes(run, sft, data)
    results["control"] = evaluate_stage(run, "control", control)

  success = {stage: r["strict_success"] for stage, r in results.items()}
  whole = success["rl"] - success["base"]
  return {
    "strict_success": success,
    "interval": {stage: r["interval"] for stage, r in results.items()},
    "by_family": {stage: r["by_family"] for stage, r in results.items()},
    "n_heldout": results["rl"]["n_heldout"],
    "infra_failures": {s: r["infra_failures"] for s, r in results.items()},
    "rl_share_of_gain": (
      (success["rl"] - success["sft"]) / whole if whole > 0 else 0.0
    ),
    **rl_facts,
    "wall_seconds": run.metrics.wall_seconds,
  }


def pretrain(run: Run) -> dict[str, Any]:
  """Makes a base model: shell sessions of other seeds, without their tasks."""
  config, chat = run.config, run.setting.chat
  pre = config.pretrain

  def convert(example, rng):
    return demonstrations.session(
      chat, example, corpus.shown_names(example, rng, pre.hints), rng
    )

  data = corpus.build(run.workdir, config, run.setting, run.arena, run.progress)
  validation = datasets.load(data, "pretrain_validation")
  rng = np.random.default_rng(config.seed)
  params = model_params.init(jax.random.key(config.seed), run.setting.model)
  params = stages.supervise(
    run,
    "pretrain",
    params,
    source=datasets.load(data, "pretrain"),
    convert=convert,
    validation=[convert(e, rng) for e in validation],
    optimizer=OptimizerConfig.from_dict(pre.optimizer),
    batch_size=pre.batch_size,
    steps=pre.steps,
    evaluate_every=pre.evaluate_every,
    patience=pre.steps,
    tolerance=0.0,
  )
  result = evaluate_stage(run, "base", params)
  card = {
    "model": config.model.to_dict(),
    "vocab_size": run.setting.model.vocab_size,
    "strict_success": result["strict_success"],
    "hours": run.metrics.wall_seconds / 3600,
  }
  out = run.workdir / "base"
  size = export_base(params, card, out)
  chat.tokenizer.save(out / TOKENIZER_FILE)
  return {**card, "bytes": size, "directory": str(out)}


def warm_start(run: Run, params: Any, data: epath.Path) -> Any:
  """Supervised learning on demonstrations until validation is flat."""
  sft, chat = run.config.sft, run.setting.chat
  source = datasets.load(data, "demonstrations")
  epoch = -(-len(source) // sft.batch_size)
  return stages.supervise(
    run,
    "sft",
    params,
    source=source,
    convert=lambda example, rng: demonstrations.imitate(chat, example),
    validation=[
      demonstrations.imitate(chat, e) for e in datasets.load(data, "validation")
    ],
    optimizer=OptimizerConfig.from_dict(sft.optimizer),
    batch_size=sft.batch_size,
    steps=sft.max_epochs * epoch,
    evaluate_every=epoch,
    patience=sft.patience,
    tolerance=sft.tolerance,
  )


if __name__ == "__main__":
  sys.exit(configs.run_program(main, expected=EXPECTED_ERRORS))
