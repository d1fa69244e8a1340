"""Train a terminal agent: base, supervised warm start, PPO, evaluation.

  python -m t1jax.train --config=configs/tiny.py --workdir=runs/tiny

The run directory holds config.json, metrics.jsonl, TensorBoard events, the
data, checkpoints, the policy of each stage and summary.json. The same command
on the same directory goes on where the run was stopped; a finished run is left
alone. Any field can be set: --config.rl.iterations=5.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax.checkpoint import Checkpoints, abstract, export_base
from t1jax.evaluate import (
  EXPECTED_ERRORS,
  TOKENIZER_FILE,
  Arena,
  Setting,
  base_directory,
  family_tasks,
  heldout_tasks,
  judge,
  load_stage,
  read_families,
  read_setting,
  stage_directory,
)
from t1jax.metrics import LiveProgress, MetricsWriter, write_summary
from t1jax.models import params as model_params
from t1jax.models import tokenizer as tokenizers
from t1jax.models.tokenizer import SentencePieceTokenizer
from t1jax.rewards import schemes, verifier
from t1jax.rl import batching, learner, supervised
from t1jax.rl.critic import init_from_actor
from t1jax.rl.settings import OptimizerConfig, RLConfig
from t1jax.rollout import demonstrations
from t1jax.rollout.collect import Attempt
from t1jax.rollout.trajectory import Demonstration, Trajectory
from t1jax.tasks import datasets
from t1jax.tasks.families.base import NUMBERS, WORDS, make_task
from t1jax.tasks.task import from_bytes, to_bytes


@dataclasses.dataclass
class Run:
  """What every stage of a run shares."""

  config: config_dict.ConfigDict
  setting: Setting
  rl: RLConfig
  workdir: epath.Path
  arena: Arena
  metrics: MetricsWriter
  progress: LiveProgress
  denominators: Mapping[str, float] = dataclasses.field(default_factory=dict)


def main(argv: Sequence[str]) -> None:
  """Runs the stages of a config, or goes on with them."""
  # ---- what is asked for, checked before anything is allocated
  call = configs.parse_command_line(argv, description=__doc__)
  config = call.config
  if call.workdir is None:
    raise configs.UserError("--workdir is missing: say where the run may live")
  pretraining = config.pretrain.enabled
  tokenizer = (
    train_tokenizer(config)
    if pretraining
    else SentencePieceTokenizer.load(base_directory(config) / TOKENIZER_FILE)
  )
  setting = read_setting(config, tokenizer)
  with configs.user_errors("config section ppo"):
    rl = RLConfig.from_dict(
      {**config.ppo, "temperature": config.sampler.temperature}
    )
  workdir = configs.claim_workdir(call.workdir, config, source=call.source)
  summary_file = workdir / "summary.json"
  if summary_file.exists():
    print(f"{workdir} is finished; its summary:\n{summary_file.read_text()}")
    return

  with (
    LiveProgress() as progress,
    MetricsWriter(workdir, resume_step=last_step(workdir, config)) as metrics,
    Arena(config, setting) as arena,
  ):
    run = Run(config, setting, rl, workdir, arena, metrics, progress)
    summary = pretrain(run) if pretraining else train(run)
  write_summary(workdir, summary)
  print(json.dumps(summary, indent=2))


def train(run: Run) -> dict[str, Any]:
  """Base → supervised warm start → critic warm-up → PPO → evaluation."""
  config, started = run.config, time.monotonic()

  # ---- data: demonstrations, training tasks, held-out tasks
  data = build_data(run)
  train_tasks = [from_bytes(e["task"]) for e in datasets.load(data, "train")]
  run.denominators = family_denominators(train_tasks)

  # ---- base and supervised warm start
  base = load_stage(run.workdir, "base", run.setting)
  results = {"base": evaluate_stage(run, "base", base)}
  sft = warm_start(run, base, data)
  results["sft"] = evaluate_stage(run, "sft", sft)

  # ---- critic warm-up and PPO
  actor, rl_facts = reinforce(run, sft, data)
  results["rl"] = evaluate_stage(run, "rl", actor)

  # ---- control: the same episodes spent on rejection-sampling SFT
  if config.control.enabled:
    control, _ = imitate_successes(run, sft, data)
    results["control"] = evaluate_stage(run, "control", control)

  success = {stage: r["strict_success"] for stage, r in results.items()}
  whole = success["rl"] - success["base"]
  return {
    "strict_success": success,
    "interval": {stage: r["interval"] for stage, r in results.items()},
    "by_family": {stage: r["by_family"] for stage, r in results.items()},
    "n_heldout": results["rl"]["n_heldout"],
    "rl_share_of_gain": (
      (success["rl"] - success["sft"]) / whole if whole > 0 else 0.0
    ),
    **rl_facts,
    "wall_seconds": time.monotonic() - started,
  }


# ---- stages


def warm_start(run: Run, params: Any, data: epath.Path) -> Any:
  """Supervised learning on demonstrations until validation is flat."""
  sft, chat = run.config.sft, run.setting.chat
  source = datasets.load(data, "demonstrations")
  epoch = -(-len(source) // sft.batch_size)
  return supervise(
    run,
    "sft",
    params,
    source=source,
    convert=lambda example, rng: demonstrations.imitate(chat, example),
    validation=[
      demonstrations.imitate(chat, e) for e in datasets.load(data, "validation")
    ],
    optimizer=optimizer_config(sft.optimizer, "sft.optimizer"),
    batch_size=sft.batch_size,
    steps=sft.max_epochs * epoch,
    evaluate_every=epoch,
    patience=sft.patience,
    tolerance=sft.tolerance,
  )


def supervise(
  run: Run,
  name: str,
  params: Any,
  *,
  source: datasets.Source,
  convert: Callable[[datasets.Example, np.random.Generator], Demonstration],
  validation: Sequence[Demonstration],
  optimizer: OptimizerConfig,
  batch_size: int,
  steps: int,
  evaluate_every: int,
  patience: int,
  tolerance: float,
) -> Any:
  """Learns from examples; returns the parameters of the best validation."""
  finished = stage_directory(run.workdir, name)
  if finished.exists():
    return load_stage(run.workdir, name, run.setting)
  cfg, seed = run.setting.model, run.config.seed
  pack = {"buckets": run.rl.buckets, "token_budget": run.rl.token_budget}
  held = batching.pack_demonstrations(validation, **pack)
  stream = datasets.batches(source, batch_size=batch_size, seed=seed)
  state = supervised.init_supervised(copy(params), optimizer)
  best = copy(params)
  host = {"step": 0, "best": float("1e9"), "stale": 0, "cursor": None}
  first = first_step(run.config, name)
  run.progress.phase(name, total=steps)
  with Checkpoints(run.workdir / "checkpoints" / name) as checkpoints:
    if checkpoints.latest is not None:
      restored = checkpoints.restore(abstract({"state": state, "best": best}))
      state, best = restored.state["state"], restored.state["best"]
      host = restored.host
      stream.set_state(host["cursor"])
    while host["step"] < steps and host["stale"] < patience:
      rng = np.random.default_rng((seed, host["step"]))
      batch = batching.pack_demonstrations(
        [convert(e, rng) for e in next(stream)], **pack
      )
      state, report = supervised.sft_step(state, batch, cfg, optimizer)
      host["step"] += 1
      if host["step"] % evaluate_every and host["step"] < steps:
        continue
      loss = supervised.evaluation_loss(state.params, held, cfg)
      numbers = {k: float(v) for k, v in report.items()}
      numbers["validation_loss"] = loss
      run.metrics.write(first + host["step"], name, numbers)
      run.progress.update(host["step"], **numbers)
      if loss < host["best"] * (1 - tolerance):
        host |= {"best": loss, "stale": 0}
        best = copy(state.params)
      else:
        host["stale"] += 1
      host["cursor"] = jsonable(stream.get_state())
      checkpoints.save(host["step"], {"state": state, "best": best}, host)
  finish_stage(run, name, best, {"validation_loss": host["best"]})
  return best


def reinforce(run: Run, sft: Any, data: epath.Path) -> tuple[Any, dict]:
  """Critic warm-up with the actor frozen, then PPO."""
  name, cfg, config = "rl", run.setting.model, run.config
  if stage_directory(run.workdir, name).exists():
    return load_stage(run.workdir, name, run.setting), stage_facts(run, name)
  stream = task_stream(run, data)
  # Two copies: the actor's and the critic's buffers are both donated.
  state = learner.init_state(copy(sft), init_from_actor(sft, cfg), run.rl)
  first = first_step(config, name)
  with Checkpoints(run.workdir / "checkpoints" / name) as checkpoints:
    if checkpoints.latest is not None:
      restored = checkpoints.restore(abstract(state))
      state, host = restored.state, restored.host
      stream.set_state(host["cursor"])
    else:
      state, facts = warm_up(run, state, stream)
      host = {
        "iteration": 0,
        "cursor": jsonable(stream.get_state()),
        "facts": facts,
      }
      checkpoints.save(0, state, host)
    facts = host["facts"]
    run.progress.phase("ppo", total=config.rl.iterations)
    for iteration in range(host["iteration"] + 1, config.rl.iterations + 1):
      clock = time.monotonic()
      played = rollout(run, state.actor, int(state.weight_version), stream,
                       step=iteration, episodes=config.rl.episodes,
                       keep=config.rl.keep)  # fmt: skip
      rollout_seconds = time.monotonic() - clock
      state, numbers = learner.ppo_update(state, played, cfg, run.rl)
      numbers |= {
        "seconds_rollout": rollout_seconds,
        "seconds_step": time.monotonic() - clock,
        **episode_seconds(played),
      }
      run.metrics.write(first + iteration, "ppo", numbers)
      run.progress.update(
        iteration,
        **{k: numbers[k] for k in HEADLINE if k in numbers},
      )
      facts["replay_agreement"] = min(
        facts.get("replay_agreement", 1.0),
        numbers.get("replayed_fraction", 1.0),
      )
      done = iteration == config.rl.iterations
      if done or iteration % config.rl.checkpoint_every == 0:
        host |= {
          "iteration": iteration,
          "cursor": jsonable(stream.get_state()),
          "facts": facts,
        }
        checkpoints.save(iteration, state, host)
  finish_stage(run, name, state.actor, facts)
  return state.actor, facts


# Shown while PPO runs.
HEADLINE = (
  "success",
  "reward",
  "explained_variance",
  "entropy",
  "logprob_gap",
  "seconds_step",
)


def warm_up(
  run: Run, state: learner.LearnerState, stream
) -> tuple[learner.LearnerState, dict[str, Any]]:
  """One pass of the critic over rollouts of the frozen actor."""
  sizes = run.config.warm_up
  total = sizes.episodes + sizes.evaluation
  run.progress.phase("warm-up", total=2)
  played = rollout(run, state.actor, 0, stream, step=0, episodes=total)
  run.progress.update(1)
  state, numbers = learner.warm_up_critic(
    state,
    played[: sizes.episodes],
    run.setting.model,
    run.rl,
    evaluation=played[sizes.episodes :],
  )
  run.metrics.write(first_step(run.config, "rl"), "warm_up", numbers)
  variance = {
    when: numbers[f"explained_variance_{when}"] for when in ("before", "after")
  }
  run.progress.update(2, **variance)
  return state, {"explained_variance": variance}


def imitate_successes(run: Run, sft: Any, data: epath.Path) -> tuple[Any, dict]:
  """The control: PPO's tasks and episodes, but SFT on what succeeded."""
  name, config = "control", run.config
  if stage_directory(run.workdir, name).exists():
    return load_stage(run.workdir, name, run.setting), stage_facts(run, name)
  stream = task_stream(run, data)
  optimizer = dataclasses.replace(
    run.rl.actor, learning_rate=config.control.learning_rate
  )
  state = supervised.init_supervised(copy(sft), optimizer)
  host = {"iteration": 0, "cursor": None}
  first = first_step(config, name)
  run.progress.phase(name, total=config.rl.iterations)
  with Checkpoints(run.workdir / "checkpoints" / name) as checkpoints:
    if checkpoints.latest is not None:
      restored = checkpoints.restore(abstract(state))
      state, host = restored.state, restored.host
      stream.set_state(host["cursor"])
    else:  # the episodes that PPO spends on warming up its critic
      sizes = config.warm_up
      played = rollout(run, state.params, 0, stream, step=0,
                       episodes=sizes.episodes + sizes.evaluation)  # fmt: skip
      state, _ = imitate_batch(run, state, played, optimizer, 0)
    for iteration in range(host["iteration"] + 1, config.rl.iterations + 1):
      played = rollout(run, state.params, iteration, stream, step=iteration,
                       episodes=config.rl.episodes)  # fmt: skip
      state, numbers = imitate_batch(run, state, played, optimizer, iteration)
      run.metrics.write(first + iteration, name, numbers)
      run.progress.update(iteration, **numbers)
      done = iteration == config.rl.iterations
      if done or iteration % config.rl.checkpoint_every == 0:
        host = {
          "iteration": iteration,
          "cursor": jsonable(stream.get_state()),
        }
        checkpoints.save(iteration, state, host)
  finish_stage(run, name, state.params, {})
  return state.params, {}


def imitate_batch(
  run: Run,
  state: supervised.SupervisedState,
  played: Sequence[Trajectory],
  optimizer: OptimizerConfig,
  draw: int,
) -> tuple[supervised.SupervisedState, dict[str, float]]:
  """Supervised updates on the successful episodes, each used once."""
  wins = [
    Demonstration(t.tokens, t.loss_mask) for t in played if t.outcome.success
  ]
  order = np.random.default_rng((run.config.seed, draw)).permutation(len(wins))
  losses = []
  for part in np.array_split(order, run.config.control.minibatches):
    if not len(part):
      continue
    batch = batching.pack_demonstrations(
      [wins[i] for i in part],
      buckets=run.rl.buckets,
      token_budget=run.rl.token_budget,
    )
    state, report = supervised.sft_step(
      state, batch, run.setting.model, optimizer
    )
    losses.append(float(report["loss"]))
  return state, {
    "success": len(wins) / max(1, len(played)),
    "loss": float(np.mean(losses)) if losses else 0.0,
  }


def evaluate_stage(run: Run, stage: str, params: Any) -> dict[str, Any]:
  """Held-out success of a stage's policy; read back if it was taken before."""
  record = run.workdir / "evaluations" / f"{stage}.json"
  if record.exists():
    return json.loads(record.read_text())
  held = heldout_tasks(run.setting, run.config.data.heldout)
  run.progress.phase(f"evaluate {stage}", total=len(held))
  done: list[bool] = []

  def show(trajectory: Trajectory) -> None:
    done.append(trajectory.outcome.success)
    run.progress.update(len(done), success=sum(done) / len(done))

  result = judge(run.arena, params, held, seed=run.config.seed, on_done=show)
  step = first_step(run.config, f"evaluate {stage}")
  run.metrics.write(
    step, "evaluation", {f"success_{stage}": result["strict_success"]}
  )
  record.parent.mkdir(parents=True, exist_ok=True)
  record.write_text(json.dumps(result))
  return result


def pretrain(run: Run) -> dict[str, Any]:
  """Makes a base model: shell sessions of other seeds, without their tasks."""
  config, chat, started = run.config, run.setting.chat, time.monotonic()
  pre = config.pretrain

  def convert(example, rng):
    return demonstrations.session(
      chat, example, shown_names(example, rng, pre.hints), rng
    )

  data = build_data(run)
  validation = datasets.load(data, "pretrain_validation")
  rng = np.random.default_rng(config.seed)
  params = model_params.init(jax.random.key(config.seed), run.setting.model)
  params = supervise(
    run,
    "pretrain",
    params,
    source=datasets.load(data, "pretrain"),
    convert=convert,
    validation=[convert(e, rng) for e in validation],
    optimizer=optimizer_config(pre.optimizer, "pretrain.optimizer"),
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
    "hours": (time.monotonic() - started) / 3600,
  }
  out = run.workdir / "base"
  size = export_base(params, card, out)
  chat.tokenizer.save(out / TOKENIZER_FILE)
  return {**card, "bytes": size, "directory": str(out)}


def shown_names(
  example: datasets.Example, rng: np.random.Generator, others: int
) -> list[str]:
  """Names and numbers that a session types, and some that it does not."""
  typed = "\n".join(turn["command"] for turn in example["turns"])
  used = [name for name in (*WORDS, *NUMBERS) if name in typed]
  extra = [WORDS[i] for i in rng.permutation(len(WORDS))[:others]]
  return list(dict.fromkeys(used + extra))


# ---- pieces


def train_tokenizer(config: config_dict.ConfigDict) -> SentencePieceTokenizer:
  """A tokenizer from the text of pretraining tasks; deterministic."""
  tasks = [
    make_task(f, "pretrain", i)
    for i in range(min(200, config.pretrain.sessions))
    for f in read_families(config)
  ]
  texts = []
  for task in tasks:
    texts += [task.instruction, *task.oracle, "submit"]
    texts += [
      body.decode()
      for path, body in sorted(task.environment.items())
      if path.startswith("files/") and body.isascii()
    ]
  return tokenizers.train(
    texts,
    vocab_size=config.pretrain.vocab_size,
    symbols=[*WORDS, *NUMBERS],
  )


def build_data(run: Run) -> epath.Path:
  """Materialises this run's tasks and demonstrations, once."""
  config, setting = run.config, run.setting
  sizes = config.data
  first = sizes.demonstrations + sizes.validation
  if config.pretrain.enabled:
    pre = config.pretrain
    demonstrated = {
      "pretrain": ("pretrain", range(pre.sessions)),
      "pretrain_validation": (
        "pretrain",
        range(pre.sessions, pre.sessions + pre.validation),
      ),
    }
    plain = {}
  else:
    demonstrated = {
      "demonstrations": ("train", range(sizes.demonstrations)),
      "validation": ("train", range(sizes.demonstrations, first)),
    }
    plain = {"train": ("train", range(first, first + sizes.train))}

  def record(split, source, indices):
    tasks = family_tasks(setting.families, source, indices)
    run.progress.phase(f"record {split}", total=len(tasks))
    examples = run.arena.run(
      demonstrations.record(
        tasks,
        open_sandbox=run.arena.open_sandbox,
        verify=verifier.verify,
        limits=setting.limits,
        concurrency=config.sandboxes,
        on_done=run.progress.update,
      )
    )
    return [{**e, "split": split} for e in examples]

  def list_tasks(split, source, indices):
    for task in family_tasks(setting.families, source, indices):
      yield {
        "name": task.name,
        "family": task.family,
        "domain": task.domain,
        "split": split,
        "instruction": task.instruction,
        "task": to_bytes(task),
        "turns": [],
      }

  makers = {
    split: lambda s=split, a=args: record(s, *a)
    for split, args in demonstrated.items()
  } | {
    split: lambda s=split, a=args: list_tasks(s, *a)
    for split, args in plain.items()
  }
  return datasets.build(
    run.workdir / "data",
    fingerprint=datasets.fingerprint(
      {
        "families": [f.name for f in setting.families],
        "data": config.data.to_dict(),
        "limits": config.limits.to_dict(),
        "pretrain": config.pretrain.to_dict(),
      }
    ),
    examples=makers,
  )


def task_stream(run: Run, data: epath.Path):
  """Training tasks, for ever, with a cursor."""
  return datasets.batches(
    datasets.load(data, "train"), batch_size=1, seed=run.config.seed
  )


def rollout(
  run: Run,
  params: Any,
  version: int,
  stream,
  *,
  step: int,
  episodes: int,
  keep: int | None = None,
) -> list[Trajectory]:
  """Plays the next `episodes` training tasks and scores them."""
  tasks = [from_bytes(next(stream)[0]["task"]) for _ in range(episodes)]
  attempts = [
    Attempt(task, 0, (run.config.seed, step, number, 0))
    for number, task in enumerate(tasks)
  ]
  played = run.arena.play(params, version, attempts, keep=keep)
  broken = [t for t in played if t.outcome.status == "infra_failure"]
  for trajectory in broken[:1]:
    run.progress.say(
      f"{len(broken)} infra failures, e.g. {trajectory.task}: "
      f"{trajectory.outcome.error}"
    )
  if len(broken) * 2 > len(played):
    raise configs.UserError(
      f"{len(broken)} of {len(played)} episodes failed outside the agent's "
      f"reach; the first says: {broken[0].outcome.error}"
    )
  return [scored(run, trajectory) for trajectory in played]


def scored(run: Run, trajectory: Trajectory) -> Trajectory:
  """The trajectory with its reward by the configured scheme."""
  outcome = trajectory.outcome
  if outcome.status == "infra_failure":
    return trajectory
  parts = schemes.reward_parts(
    schemes.count(
      ((a.name, a.kind, a.passed) for a in outcome.assertions),
      strict=outcome.success,
    ),
    trajectory.family,
    run.denominators,
    max_assertions=run.config.rl.max_assertions,
  )
  outcome = dataclasses.replace(
    outcome, reward=parts[run.config.rl.reward], reward_parts=parts
  )
  return dataclasses.replace(trajectory, outcome=outcome)


def family_denominators(tasks) -> dict[str, float]:
  """D_f of every family, from the tasks that training draws from."""
  scales: dict[str, list[int]] = {}
  for task in tasks:
    scale = task.num_assertions - len(task.hygiene)
    scales.setdefault(task.family, []).append(scale)
  return schemes.family_denominators(scales)


def episode_seconds(played: Sequence[Trajectory]) -> dict[str, float]:
  """Summed seconds of all episodes, by what they waited for."""
  total: dict[str, float] = {}
  for trajectory in played:
    for phase, seconds in trajectory.outcome.seconds.items():
      key = f"episode_seconds_{phase}"
      total[key] = total.get(key, 0.0) + seconds
  return total


def finish_stage(
  run: Run, name: str, params: Any, facts: Mapping[str, Any]
) -> None:
  """Leaves a stage's policy where later stages and programs look for it."""
  export_base(
    params,
    {"stage": name, "facts": dict(facts)},
    stage_directory(run.workdir, name),
    dtype=np.float32,
  )


def stage_facts(run: Run, name: str) -> dict[str, Any]:
  card = stage_directory(run.workdir, name) / "base.json"
  return json.loads(card.read_text())["card"]["facts"]


def first_step(config: config_dict.ConfigDict, stage: str) -> int:
  """Where a stage's steps begin in the metrics, counted over all stages."""
  rounds = config.rl.iterations + 1
  lengths = {
    "evaluate base": 1,
    "pretrain": config.pretrain.steps + 1 if config.pretrain.enabled else 0,
    "sft": config.sft.max_epochs * sft_epoch(config),
    "evaluate sft": 1,
    "rl": rounds,
    "evaluate rl": 1,
    "control": rounds,
    "evaluate control": 1,
  }
  names = list(lengths)
  return 1 + sum(lengths[n] for n in names[: names.index(stage)])


def sft_epoch(config: config_dict.ConfigDict) -> int:
  """Updates per epoch of the warm start."""
  count = len(read_families(config)) * config.data.demonstrations
  return -(-count // config.sft.batch_size)


def last_step(
  workdir: epath.Path, config: config_dict.ConfigDict
) -> int | None:
  """The metrics step that an interrupted run goes on from; None if new."""
  reached = []
  for stage in ("pretrain", "sft", "rl", "control"):
    directory = workdir / "checkpoints" / stage
    if directory.exists():
      with Checkpoints(directory, read_only=True) as checkpoints:
        if checkpoints.latest is not None:
          reached.append(first_step(config, stage) + checkpoints.latest)
  for stage in ("base", "sft", "rl", "control"):
    if (workdir / "evaluations" / f"{stage}.json").exists():
      reached.append(first_step(config, f"evaluate {stage}"))
  return max(reached, default=None)


def optimizer_config(fields: Mapping[str, Any], where: str) -> OptimizerConfig:
  with configs.user_errors(f"config section {where}"):
    return OptimizerConfig.from_dict(fields)


def copy(params: Any) -> Any:
  """A copy in buffers of its own: steps donate what they are given."""
  return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), params)


def jsonable(state: Any) -> Any:
  """A data cursor as JSON gives it back."""
  return json.loads(json.dumps(state))


if __name__ == "__main__":
  sys.exit(configs.run_program(main, expected=EXPECTED_ERRORS))
