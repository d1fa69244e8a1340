"""Evaluate a run's policy on held-out tasks, in real sandboxes.

  python -m t1jax.evaluate --workdir=runs/tiny

Restores the policy that a stage of the run ended with, plays every held-out
task once and prints the strict success rate, by family, as one JSON line. The
training program calls the same functions for the figures of its summary.
"""

import asyncio
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np
from absl import flags
from etils import epath
from ml_collections import config_dict

from t1jax import checkpoint, paths
from t1jax import config as configs
from t1jax.metrics import LiveProgress, MetricsError, wilson_interval
from t1jax.models import params as model_params
from t1jax.models.config import ModelConfig
from t1jax.models.tokenizer import SentencePieceTokenizer, TokenizerError
from t1jax.rewards import verifier
from t1jax.rl.settings import RLConfig
from t1jax.rollout import harness
from t1jax.rollout.chat import Chat
from t1jax.rollout.collect import Attempt, Routing, Runner, collect
from t1jax.rollout.trajectory import Trajectory, TrajectoryError
from t1jax.sampling.client import EngineClient
from t1jax.sampling.engine import Engine
from t1jax.sampling.log import Log
from t1jax.sandbox.base import Limits, SandboxError
from t1jax.sandbox.environment import install_environment
from t1jax.sandbox.farm import Farm
from t1jax.tasks import families
from t1jax.tasks.datasets import DatasetError
from t1jax.tasks.families.base import Family, make_task
from t1jax.tasks.task import Task, TaskError, read_task

ASSETS = epath.resource_path("t1jax") / "assets"
TOKENIZER_FILE = "tokenizer.model"
# Mistakes that rooms report in their own words; one line each.
EXPECTED_ERRORS = (
  checkpoint.CheckpointError,
  DatasetError,
  MetricsError,
  SandboxError,
  TaskError,
  TokenizerError,
  TrajectoryError,
)


@dataclasses.dataclass(frozen=True)
class Setting:
  """What a config says, checked and typed: before anything is allocated."""

  chat: Chat
  model: ModelConfig
  limits: harness.Limits
  families: tuple[Family, ...]
  base_dir: epath.Path
  directory_tasks: tuple[Task, ...] = ()  # Harbor tasks that the user brings


# What the programs read from a config.
_SECTIONS = (
  "seed", "base", "families", "model", "data", "limits", "sampler", "wandb",
  "sandboxes", "sft", "warm_up", "rl", "ppo", "control", "pretrain",
)  # fmt: skip


def check_sections(
  config: config_dict.ConfigDict, source: str
) -> config_dict.ConfigDict:
  """Returns the config; UserError names the sections that it lacks."""
  missing = [name for name in _SECTIONS if name not in config]
  if missing:
    raise configs.UserError(
      f"{source} lacks {', '.join(missing)}; it is damaged, or of another "
      "version: compare it with configs/tiny.py"
    )
  return config


def read_setting(
  config: config_dict.ConfigDict, tokenizer: SentencePieceTokenizer
) -> Setting:
  """The setting of a config.

  Raises:
    UserError: a section that does not fit its type, naming the section.
    TaskError: a task directory that cannot be read, or whose instruction
      leaves no room for an action.
  """
  for name, texts in (
    ("families", config.families),
    ("data.directories", config.data.directories),
  ):
    if not all(isinstance(text, str) for text in texts):
      raise configs.UserError(
        f"config field {name}: expected texts, got {tuple(texts)!r}"
      )
  with configs.user_errors("config section model", ValueError, TypeError):
    model = ModelConfig(vocab_size=tokenizer.vocab_size, **config.model)
  with configs.user_errors("config section limits", ValueError, TypeError):
    limits = harness.Limits(**config.limits)
  chat = Chat(tokenizer)
  brought = tuple(read_task(d) for d in config.data.directories)
  for task in brought:
    length = len(chat.prompt(task.instruction))
    if length + 2 > limits.max_tokens:
      raise TaskError(
        f"task {task.name}: its instruction is {length} tokens, and an episode "
        f"ends at limits.max_tokens = {limits.max_tokens}; raise that, or "
        "shorten instruction.md"
      )
  return Setting(
    chat=chat,
    model=model,
    limits=limits,
    families=read_families(config),
    base_dir=base_directory(config),
    directory_tasks=brought,
  )


def learner_settings(
  config: config_dict.ConfigDict, setting: Setting
) -> RLConfig:
  """The learner's settings; raises UserError for one that is out of range."""
  with configs.user_errors("config section ppo"):
    return RLConfig.from_dict(
      {
        **config.ppo,
        "max_turns": config.limits.max_turns,
        "seed": config.seed,
        "temperature": config.sampler.temperature,
        "forbidden_ids": setting.chat.forbidden_ids,
      }
    )


def read_families(config: config_dict.ConfigDict) -> tuple[Family, ...]:
  """The families that a config names; all of them when it names none."""
  with configs.user_errors("config field families", TaskError):
    chosen = tuple(families.family(name) for name in config.families)
  if len(set(chosen)) < len(chosen):
    raise configs.UserError(
      f"config field families names one twice: {', '.join(config.families)}"
    )
  return chosen or families.FAMILIES


def base_directory(config: config_dict.ConfigDict) -> epath.Path:
  """Where the base model and its tokenizer lie; raises PathError if nowhere."""
  paths.check_reachable(config.base)
  return epath.Path(config.base) if config.base else ASSETS / "tiny"


def read_tokenizer(config: config_dict.ConfigDict) -> SentencePieceTokenizer:
  """The base model's tokenizer; raises UserError where there is none."""
  directory = base_directory(config)
  file = directory / TOKENIZER_FILE
  if not file.exists():
    raise configs.UserError(
      f"config field base: {directory} has no {TOKENIZER_FILE}; give the "
      "directory of a base model, such as base/ in a pretraining run"
    )
  return SentencePieceTokenizer.load(file)


def heldout_tasks(setting: Setting, per_family: int) -> list[Task]:
  """The held-out tasks, the same for every stage and every seed."""
  return family_tasks(setting.families, "heldout", range(per_family))


def family_tasks(
  chosen: Sequence[Family], split: str, indices: Sequence[int]
) -> list[Task]:
  """Tasks of all families, in turns, so that any prefix is balanced."""
  return [make_task(f, split, i) for i in indices for f in chosen]


def keep_compiled_programs() -> None:
  """Keeps compiled programs between runs, unless JAX was told where already."""
  if not jax.config.jax_compilation_cache_dir:
    cache = epath.Path("~/.cache/t1jax/programs").expanduser()
    jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


class Arena:
  """A sampler and a farm of sandboxes: where policies play tasks.

  A context manager. Episodes live on an event loop of its own, so that the
  programs that use it stay synchronous between batches of episodes.
  """

  def __init__(self, config: config_dict.ConfigDict, setting: Setting):
    self._setting = setting
    self._slots = config.sampler.num_slots
    self._log = Log(setting.limits.max_tokens)
    with configs.user_errors("config section sampler", ValueError, TypeError):
      self._engine = Engine(
        setting.model,
        max_len=setting.limits.max_tokens,
        stop_id=setting.chat.stop_id,
        forbidden_ids=setting.chat.forbidden_ids,
        log=self._log,
        **config.sampler,
      )
    self._farm = Farm(max_sandboxes=max(config.sandboxes, self._slots))
    self._loop = asyncio.Runner()
    self._stack = contextlib.AsyncExitStack()
    self._client: EngineClient | None = None

  def __enter__(self) -> Self:
    self._loop.__enter__()
    try:
      self._loop.run(self._start())
    except BaseException:
      self._loop.close()
      raise
    return self

  async def _start(self) -> None:
    await self._stack.enter_async_context(self._farm)
    self._client = await self._stack.enter_async_context(
      EngineClient(self._engine)
    )

  def __exit__(self, *_: object) -> None:
    try:
      self._loop.run(self._stack.aclose())
    finally:
      self._loop.close()

  def run(self, coroutine) -> Any:
    """Runs a coroutine on the arena's loop."""
    return self._loop.run(coroutine)

  @contextlib.asynccontextmanager
  async def open_sandbox(self, task: Task):
    """A sandbox with the task's environment in it."""
    limits = Limits(
      memory_mb=int(task.config.memory_mb), disk_mb=int(task.config.storage_mb)
    )
    async with self._farm.sandbox(limits) as sandbox:
      await install_environment(sandbox, task)
      yield sandbox

  def take_log(self) -> dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]]:
    """What the engine ran in the last `play`: see `sampling.log`."""
    return self._log.take()

  def play(
    self,
    params: Any,
    weight_version: int,
    attempts: Sequence[Attempt],
    *,
    keep: int | None = None,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
  ) -> list[Trajectory]:
    """Plays attempts with these parameters; see `rollout.collect`."""
    self._log.take()  # what nobody asked for
    self._engine.load(params, weight_version)
    model = self._setting.model
    runner = Runner(
      client=self._client,
      chat=self._setting.chat,
      routing=Routing(model.num_experts, model.num_moe_layers, model.top_k),
      limits=self._setting.limits,
      open_sandbox=self.open_sandbox,
      verify=verifier.verify,
    )
    return self._loop.run(
      collect(
        attempts,
        runner.run,
        concurrency=self._slots,
        keep=keep,
        on_done=on_done,
      )
    )


def judge(
  arena: Arena,
  params: Any,
  held: Sequence[Task],
  *,
  seed: int,
  on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> tuple[dict[str, Any], list[Trajectory]]:
  """Plays every task once.

  Infra failures are played again, so that every policy is judged on the same
  tasks; what fails three times is reported and left out.

  Returns:
    `strict_success`, `interval` (95 %, Wilson), `n_heldout`, `successes`,
    `infra_failures`, and `by_family` (family -> success rate); and the last
    try at each task, in the order of `held`.
  """
  # Its own stream: no training episode has a negative step.
  pending = [
    Attempt(t, 0, (seed, -1 % 2**32, i, 0)) for i, t in enumerate(held)
  ]
  last: dict[tuple[int, ...], Trajectory] = {}
  for _ in range(3):
    played = arena.play(params, 0, pending, on_done=on_done)
    last |= {a.seed: t for a, t in zip(pending, played, strict=True)}
    pending = [
      a for a in pending if last[a.seed].outcome.status == "infra_failure"
    ]
    if not pending:
      break
  verdicts: dict[str, list[bool]] = {}
  for trajectory in last.values():
    if trajectory.outcome.status != "infra_failure":
      verdicts.setdefault(trajectory.family, []).append(
        trajectory.outcome.success
      )
  results = [ok for oks in verdicts.values() for ok in oks]
  return {
    "strict_success": sum(results) / max(1, len(results)),
    "interval": wilson_interval(sum(results), len(results)),
    "n_heldout": len(results),
    "successes": sum(results),
    "infra_failures": len(pending),
    "by_family": {f: sum(v) / len(v) for f, v in sorted(verdicts.items())},
  }, list(last.values())


def main(argv: Sequence[str]) -> None:
  """Evaluates what a stage of a run ended with."""
  values = flags.FlagValues()
  flags.DEFINE_string(
    "stage", "rl", "base, pretrain, sft, rl or control", flag_values=values
  )
  flags.DEFINE_integer(
    "per_family", 0, "held-out tasks per family; 0 = the run's own", 0,
    flag_values=values,
  )  # fmt: skip
  keep_compiled_programs()
  call = configs.parse_command_line(
    argv, description=__doc__, flag_values=values, resume_config=True
  )
  if call.workdir is None:
    raise configs.UserError("--workdir is missing: give a run's directory")
  config = check_sections(call.config, call.source)
  if config.pretrain.enabled:  # its tokenizer and base are its own
    with config.unlocked():
      config.base = str(call.workdir / "base")
  setting = read_setting(config, read_tokenizer(config))
  params = load_stage(call.workdir, values.stage, setting)
  held = heldout_tasks(setting, values.per_family or config.data.heldout)
  with Arena(config, setting) as arena, LiveProgress() as progress:
    progress.phase("evaluate", total=len(held))
    done: list[Trajectory] = []
    result, _ = judge(
      arena,
      params,
      held,
      seed=config.seed,
      on_done=lambda t: (done.append(t), progress.update(len(done))),
    )
  print(json.dumps({"stage": values.stage, **result}))


def load_stage(
  workdir: epath.PathLike, stage: str, setting: Setting
) -> Mapping[str, Any]:
  """Parameters that a finished stage of the run left.

  Raises:
    UserError: no such stage, or the run has not finished it.
    CheckpointError: its files are damaged.
  """
  known = ("base", "pretrain", "sft", "rl", "control")
  if stage not in known:
    raise configs.UserError(
      f"--stage={stage} is unknown{configs.suggest(stage, known)}"
    )
  if stage == "base":
    return load_base(setting)
  directory = stage_directory(workdir, stage)
  if not checkpoint.has_base(directory):
    there = [s for s in known if checkpoint.has_base(directory.with_name(s))]
    raise configs.UserError(
      f"stage {stage} of {workdir} is not finished (finished: "
      f"{', '.join(there) or 'none'}); go on with the same training command, "
      "or name another --stage"
    )
  try:
    abstract = model_params.abstract(setting.model)
    return checkpoint.load_base(directory, abstract)[0]
  except checkpoint.CheckpointError as error:
    raise checkpoint.CheckpointError(
      f"the policy of stage {stage} cannot be read: {error}; or delete "
      f"{directory}, and the training command makes it again from the last "
      "checkpoint"
    ) from error


def load_base(setting: Setting) -> Mapping[str, Any]:
  """The base model that a config names; CheckpointError if it does not fit."""
  abstract = model_params.abstract(setting.model)
  return checkpoint.load_base(setting.base_dir, abstract)[0]


def stage_directory(workdir: epath.PathLike, stage: str) -> epath.Path:
  """Where a finished stage leaves its policy (float32, for evaluation)."""
  return epath.Path(workdir) / "policies" / stage


if __name__ == "__main__":
  sys.exit(configs.run_program(main, expected=EXPECTED_ERRORS))
