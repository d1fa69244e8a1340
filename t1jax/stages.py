"""The stages of a run: each starts where it was stopped and ends in a policy.

A stage saves what its next step depends on in `checkpoints/STAGE` and leaves
its final policy in `policies/STAGE`; a finished stage is read back. Every batch
of episodes lies in `trajectories/`; one that is played again replaces its file.
"""

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax.checkpoint import Checkpoints, abstract, export_base, has_base
from t1jax.corpus import TaskStream
from t1jax.evaluate import (
  Arena,
  Setting,
  heldout_tasks,
  judge,
  load_stage,
  read_families,
  stage_directory,
)
from t1jax.metrics import LiveProgress, MetricsWriter
from t1jax.paths import write_atomically
from t1jax.rewards import schemes
from t1jax.rl import batching, learner, supervised
from t1jax.rl.agreement import agreement
from t1jax.rl.critic import init_from_actor
from t1jax.rl.settings import OptimizerConfig, RLConfig
from t1jax.rollout import drift, storage
from t1jax.rollout.collect import Attempt
from t1jax.rollout.trajectory import (
  Demonstration,
  Trajectory,
  TrajectoryError,
)
from t1jax.tasks import datasets


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
  check_hold: Callable[[], None]  # raises when another process runs it now
  denominators: Mapping[str, float] = dataclasses.field(default_factory=dict)

  def record(self, step: int, phase: str, numbers: Mapping[str, Any]) -> None:
    """Records the numbers of one step, as long as the run is ours."""
    self.check_hold()
    self.metrics.write(step, phase, numbers)

  def save(
    self, checkpoints: Checkpoints, step: int, state: Any, host: Mapping
  ) -> None:
    """Saves a stage's state; the metrics up to it are kept first."""
    self.check_hold()
    self.metrics.flush()
    checkpoints.save(step, state, host)


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
  if has_base(stage_directory(run.workdir, name)):
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
      run.record(first + host["step"], name, numbers)
      run.progress.update(host["step"], **numbers)
      if loss < host["best"] * (1 - tolerance):
        host |= {"best": loss, "stale": 0}
        best = copy(state.params)
      else:
        host["stale"] += 1
      host["cursor"] = jsonable(stream.get_state())
      run.save(checkpoints, host["step"], {"state": state, "best": best}, host)
  finish_stage(run, name, best, {"validation_loss": host["best"]})
  return best


def reinforce(run: Run, sft: Any, data: epath.Path) -> tuple[Any, dict]:
  """Critic warm-up with the actor frozen, then PPO."""
  name, cfg, config = "rl", run.setting.model, run.config
  if has_base(stage_directory(run.workdir, name)):
    return load_stage(run.workdir, name, run.setting), stage_facts(run, name)
  stream = TaskStream(data, run.config.seed)
  # Two copies: the actor's and the critic's buffers are both donated.
  state = learner.init_state(copy(sft), init_from_actor(sft, cfg), run.rl)
  first = first_step(config, name)
  with Checkpoints(run.workdir / "checkpoints" / name) as checkpoints:
    if checkpoints.latest is not None:
      restored = checkpoints.restore(abstract(state))
      state, host = restored.state, restored.host
      stream.cursor = host["cursor"]
    else:
      state, facts = warm_up(run, state, stream)
      host = {
        "iteration": 0,
        "cursor": stream.cursor,
        "facts": facts,
        "drift": dataclasses.asdict(drift.Drift()),
      }
      run.save(checkpoints, 0, state, host)
    facts, drifted = host["facts"], drift.Drift(**host["drift"])
    run.progress.phase("ppo", total=config.rl.iterations)
    for iteration in range(host["iteration"] + 1, config.rl.iterations + 1):
      clock = time.monotonic()
      played = rollout(run, name, state.actor, int(state.weight_version),
                       stream, step=iteration, episodes=config.rl.episodes,
                       keep=config.rl.keep)  # fmt: skip
      rollout_seconds = time.monotonic() - clock
      packed: list[batching.MicroBatch] = []
      state, numbers = learner.ppo_update(
        state, played, cfg, run.rl, observe=packed.extend
      )
      seeds = [t.seed for t in learner.trainable(played)[0]]
      found = drift.audit(packed, seeds, run.arena.take_log())
      drifted += found
      numbers |= {
        "seconds_rollout": rollout_seconds,
        "seconds_step": time.monotonic() - clock,
        **episode_seconds(played),
        **found.facts(),
      }
      run.record(first + iteration, "ppo", numbers)
      run.progress.update(
        iteration,
        **{k: numbers[k] for k in HEADLINE if k in numbers},
      )
      done = iteration == config.rl.iterations
      if done:
        facts |= {"logprob_gap": numbers["logprob_gap"]}
        facts |= routing_facts(run, state.actor, played) | drifted.facts()
      if done or iteration % config.rl.checkpoint_every == 0:
        host |= {
          "iteration": iteration,
          "cursor": stream.cursor,
          "facts": facts,
          "drift": dataclasses.asdict(drifted),
        }
        run.save(checkpoints, iteration, state, host)
  finish_stage(run, name, state.actor, facts)
  return state.actor, facts


def routing_facts(
  run: Run, actor: Any, played: Sequence[Trajectory]
) -> dict[str, float]:
  """How far the newest actor uses the sampler's experts on its last episodes.

  `replay_agreement` with routes replayed, `free_agreement` without.
  """
  kept, _ = learner.trainable(played)
  cfg = run.setting.model
  return {
    name: agreement(actor, kept, cfg, run.rl, replay=replay)["agreement"]
    for name, replay in (("replay_agreement", True), ("free_agreement", False))
  }


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
  run: Run, state: learner.LearnerState, stream: TaskStream
) -> tuple[learner.LearnerState, dict[str, Any]]:
  """One pass of the critic over rollouts of the frozen actor.

  Its explained variance is measured on tasks that it did not learn from, each
  tried several times.
  """
  run.progress.phase("warm-up", total=2)
  played, held = warm_up_episodes(run, state.actor, stream)
  run.progress.update(1)
  state, numbers = learner.warm_up_critic(
    state, played, run.setting.model, run.rl, evaluation=held
  )
  run.record(first_step(run.config, "rl"), "warm_up", numbers)
  prefix = "explained_variance_"
  variance = {
    name.removeprefix(prefix): number
    for name, number in numbers.items()
    if name.startswith(prefix)
  }
  run.progress.update(2, **variance)
  return state, {"explained_variance": variance}


def warm_up_episodes(
  run: Run, params: Any, stream: TaskStream
) -> tuple[list[Trajectory], list[Trajectory]]:
  """What the critic is warmed up on, and what it is judged on."""
  sizes = run.config.warm_up
  played = rollout(
    run, "rl", params, 0, stream, step=0, episodes=sizes.episodes
  )
  held = rollout(
    run, "rl-judged", params, 0, stream, step=0, first=sizes.episodes,
    episodes=sizes.evaluation, attempts=sizes.attempts,
  )  # fmt: skip
  return played, held


def imitate_successes(run: Run, sft: Any, data: epath.Path) -> tuple[Any, dict]:
  """The control: PPO's tasks and episodes, but SFT on what succeeded."""
  name, config = "control", run.config
  if has_base(stage_directory(run.workdir, name)):
    return load_stage(run.workdir, name, run.setting), stage_facts(run, name)
  stream = TaskStream(data, run.config.seed)
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
      stream.cursor = host["cursor"]
    else:
      # The critic's warm-up: this very policy played it, on these very tasks.
      try:
        played = recorded(run, "rl-00000") + recorded(run, "rl-judged-00000")
        stream.take(config.warm_up.episodes + config.warm_up.evaluation)
      except TrajectoryError as error:
        run.progress.say(f"{error}; its episodes are played again")
        parts = warm_up_episodes(run, state.params, stream)
        played = [t for part in parts for t in part]
      state, _ = imitate_batch(run, state, played, optimizer, 0)
    for iteration in range(host["iteration"] + 1, config.rl.iterations + 1):
      played = rollout(run, name, state.params, iteration, stream,
                       step=iteration, episodes=config.rl.episodes,
                       keep=config.rl.keep)  # fmt: skip
      state, numbers = imitate_batch(run, state, played, optimizer, iteration)
      run.record(first + iteration, name, numbers)
      run.progress.update(iteration, **numbers)
      done = iteration == config.rl.iterations
      if done or iteration % config.rl.checkpoint_every == 0:
        host = {
          "iteration": iteration,
          "cursor": stream.cursor,
        }
        run.save(checkpoints, iteration, state, host)
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
    return configs.read_json(record)
  held = heldout_tasks(run.setting, run.config.data.heldout)
  run.progress.phase(f"evaluate {stage}", total=len(held))
  done: list[bool] = []

  def show(trajectory: Trajectory) -> None:
    done.append(trajectory.outcome.success)
    run.progress.update(len(done), success=sum(done) / len(done))

  result, played = judge(
    run.arena, params, held, seed=run.config.seed, on_done=show
  )
  keep_scored(run, f"evaluation-{stage}", played)
  check_infra(run, played, tolerated=0.02)
  step = first_step(run.config, f"evaluate {stage}")
  run.record(step, "evaluation", {f"success_{stage}": result["strict_success"]})
  run.metrics.flush()
  record.parent.mkdir(parents=True, exist_ok=True)
  write_atomically(record, json.dumps(result) + "\n")
  return result


def rollout(
  run: Run,
  stage: str,
  params: Any,
  version: int,
  stream: TaskStream,
  *,
  step: int,
  episodes: int,
  attempts: int = 1,
  first: int = 0,
  keep: int | None = None,
) -> list[Trajectory]:
  """Plays the next training tasks, scores and records what was played.

  Args:
    run: the run.
    stage: names the file, with `step`.
    params: the policy.
    version: its weight version.
    stream: where the tasks come from.
    step: keys the random draws, with the number of the task and the attempt.
    episodes: how many tasks.
    attempts: how often each is tried.
    first: number of the first task.
    keep: see `rollout.collect`.
  """
  tries = [
    Attempt(task, attempt, (run.config.seed, step, number, attempt))
    for number, task in enumerate(stream.take(episodes), start=first)
    for attempt in range(attempts)
  ]
  played = run.arena.play(params, version, tries, keep=keep)
  scored = keep_scored(run, f"{stage}-{step:05d}", played)
  check_infra(run, played, tolerated=0.5)
  return scored


def check_infra(
  run: Run, played: Sequence[Trajectory], *, tolerated: float
) -> None:
  """Says what failed outside the agents' reach; too much of it ends the run."""
  broken = [t for t in played if t.outcome.status == "infra_failure"]
  if not broken:
    return
  what = (
    f"{len(broken)} of {len(played)} episodes failed outside the agent's "
    f"reach; the first ({broken[0].task}) says: {broken[0].outcome.error}"
  )
  if len(broken) > tolerated * len(played):
    raise configs.UserError(f"{what}; mend that, then run the same command")
  run.progress.say(what)


def keep_scored(
  run: Run, name: str, played: Sequence[Trajectory]
) -> list[Trajectory]:
  """Scores a batch of episodes and writes it to the run's trajectories."""
  scored = [
    dataclasses.replace(
      t,
      outcome=schemes.score(
        t.outcome,
        t.family,
        run.denominators,
        scheme=run.config.rl.reward,
        max_assertions=run.config.rl.max_assertions,
      ),
    )
    for t in played
  ]
  run.check_hold()
  storage.write(trajectory_file(run, name), scored)
  return scored


def recorded(run: Run, name: str) -> list[Trajectory]:
  """A batch of episodes that this run played before."""
  return list(storage.read(trajectory_file(run, name)))


def trajectory_file(run: Run, name: str) -> epath.Path:
  return run.workdir / "trajectories" / f"{name}.array_record"


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
  run.check_hold()
  export_base(
    params,
    {"stage": name, "facts": dict(facts)},
    stage_directory(run.workdir, name),
    dtype=np.float32,
  )


def has_policies(workdir: epath.Path, config: config_dict.ConfigDict) -> bool:
  """Whether every stage has left its policy; a run makes what lacks."""
  if config.pretrain.enabled:
    return has_base(stage_directory(workdir, "pretrain"))
  stages = ("sft", "rl", *(("control",) if config.control.enabled else ()))
  return all(has_base(stage_directory(workdir, s)) for s in stages)


def stage_facts(run: Run, name: str) -> dict[str, Any]:
  card = stage_directory(run.workdir, name) / "base.json"
  return json.loads(card.read_text())["card"]["facts"]


def first_step(config: config_dict.ConfigDict, stage: str) -> int:
  """Where a stage's steps begin in the metrics, counted over all stages."""
  rounds = config.rl.iterations + 1
  lengths = {
    "pretrain": config.pretrain.steps + 1 if config.pretrain.enabled else 0,
    "evaluate base": 1,
    "sft": config.sft.max_epochs * sft_epoch(config) + 1,
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
  count += len(config.data.directories)
  return -(-count // config.sft.batch_size)


def last_step(
  workdir: epath.Path, config: config_dict.ConfigDict
) -> int | None:
  """The metrics step that an interrupted run goes on from; None if new."""
  reached = []
  for stage in ("pretrain", "sft", "rl", "control"):
    directory = workdir / "checkpoints" / stage
    if directory.exists():
      with Checkpoints(directory) as checkpoints:
        if checkpoints.latest is not None:
          reached.append(first_step(config, stage) + checkpoints.latest)
  for stage in ("base", "sft", "rl", "control"):
    if (workdir / "evaluations" / f"{stage}.json").exists():
      reached.append(first_step(config, f"evaluate {stage}"))
  return max(reached, default=None)


def copy(params: Any) -> Any:
  """A copy in buffers of its own: steps donate what they are given."""
  return jax.tree.map(lambda x: jax.numpy.array(x, copy=True), params)


def jsonable(state: Any) -> Any:
  """A data cursor as JSON gives it back."""
  return json.loads(json.dumps(state))
