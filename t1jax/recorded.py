"""A run directory, read back.

    run = Recorded.open("runs/tiny")
    iterations, success = run.curve("ppo", "success")
    episodes = run.episodes("rl", 1)

A run that is not finished has less; what is there is found whole or refused.
Each thing is read when it is first asked for, and nothing in the directory is
ever changed, so a run may be read while it trains.
"""

import functools
import math
import re
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax import corpus
from t1jax.checkpoint import Checkpoints
from t1jax.evaluate import (
  Setting,
  check_sections,
  keep_compiled_programs,
  learner_settings,
  read_setting,
  read_tokenizer,
)
from t1jax.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics
from t1jax.models import params as model_params
from t1jax.rewards import schemes
from t1jax.rl import learner
from t1jax.rl.settings import RLConfig
from t1jax.rollout import storage
from t1jax.rollout.trajectory import Trajectory
from t1jax.stages import first_step
from t1jax.tasks import datasets

# The evaluations that a run may have, in its order.
STAGES = ("base", "sft", "rl", "control")


class Recorded:
  """What a run directory holds; damage is raised where it is met."""

  def __init__(self, workdir: epath.PathLike):
    self.workdir = epath.Path(workdir)

  @classmethod
  def open(cls, workdir: epath.PathLike) -> Self:
    """Opens the directory of a main job, for a notebook.

    Args:
      workdir: local or gs://. A relative one is looked for in the current
        directory and in those above it: notebooks live below the checkout.

    Raises:
      UserError: there is no run, or it only made a base model.
    """
    keep_compiled_programs()
    run = cls(look_up(workdir))
    if not (run.workdir / configs.CONFIG_FILE).exists():
      raise configs.UserError(
        f"there is no run in {workdir}; `bash launch/local.sh` makes runs/tiny "
        "in half an hour, `bash launch/local.sh --config=configs/tiny.py:smoke "
        "--workdir=runs/smoke` a small one in a minute (T1JAX_RUN=runs/smoke)"
      )
    if run.config.pretrain.enabled:
      raise configs.UserError(
        f"{run.workdir} made a base model: it has no PPO to look at; give the "
        "directory of a main job"
      )
    return run

  # ---- what was asked for

  @functools.cached_property
  def config(self) -> config_dict.ConfigDict:
    return check_sections(
      configs.read_config(self.workdir),
      str(self.workdir / configs.CONFIG_FILE),
    )

  @functools.cached_property
  def source(self) -> str:
    """The value of --config; empty where it was not recorded."""
    return str(
      configs.read_json(self.workdir / configs.CONFIG_FILE).get("source", "")
    )

  @functools.cached_property
  def changed(self) -> Mapping[str, Any]:
    """What the command line set: field -> (in the config's file, here)."""
    record = configs.read_json(self.workdir / configs.CONFIG_FILE)
    return record.get("changed") or {}

  @property
  def made_base(self) -> epath.Path:
    """Where a run that makes a base model leaves it, with its tokenizer."""
    return self.workdir / "base"

  @functools.cached_property
  def setting(self) -> Setting:
    """The config, typed; with the tokenizer that the run used or made."""
    config = self.config.copy_and_resolve_references()
    base = config.base and look_up(config.base)
    with config.unlocked():
      # Tasks that the user brought may be gone, and nothing here plays them.
      config.data.directories = ()
      config.base = str(self.made_base if config.pretrain.enabled else base)
    return read_setting(config, read_tokenizer(config))

  @functools.cached_property
  def rl(self) -> RLConfig:
    return learner_settings(self.config, self.setting)

  @functools.cached_property
  def denominators(self) -> Mapping[str, float]:
    """Each family's scale D_f, counted from the run's training tasks."""
    built = sorted(self.workdir.glob("data/*/*/*/dataset_info.json"))
    if not built:
      raise configs.UserError(f"{self.workdir} has no dataset in data/")
    return schemes.family_denominators(
      corpus.family_scales(datasets.load(built[-1].parent, "train"))
    )

  # ---- numbers

  @functools.cached_property
  def records(self) -> list[dict[str, Any]]:
    """The records of metrics.jsonl, oldest first."""
    if not (self.workdir / METRICS_FILE).exists():
      raise configs.UserError(
        f"{self.workdir} has no {METRICS_FILE}: nothing is recorded there yet; "
        "start the training command, or restore that file"
      )
    return read_metrics(self.workdir)

  def phase(self, name: str) -> list[dict[str, Any]]:
    return [r for r in self.records if r.get("phase") == name]

  def points(self, phase: str, name: str) -> list[tuple[int, float | None]]:
    """(step, number or None) of the records of a phase that have the name.

    The steps of `ppo` and `control` are iterations, those of other phases
    updates; all are counted from 1.
    """
    start = first_step(self.config, {"ppo": "rl"}.get(phase, phase))
    return [
      (record["step"] - start, _finite(record[name]))
      for record in self.phase(phase)
      if name in record
    ]

  def curve(self, phase: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and numbers of `points`, those without a number left out."""
    found = [p for p in self.points(phase, name) if p[1] is not None]
    steps, numbers = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, int), np.array(numbers, float)

  @functools.cached_property
  def summary(self) -> Mapping[str, Any]:
    """What summary.json says; empty while the run is not finished."""
    file = self.workdir / SUMMARY_FILE
    return configs.read_json(file) if file.exists() else {}

  @functools.cached_property
  def evaluations(self) -> Mapping[str, Mapping[str, Any]]:
    """Figures of the evaluations that there are, by stage."""
    files = {s: self.workdir / "evaluations" / f"{s}.json" for s in STAGES}
    found = {s: configs.read_json(f) for s, f in files.items() if f.exists()}
    for stage, result in found.items():
      with configs.user_errors(
        f"{files[stage]} is damaged; restore it, or delete it",
        KeyError,
        TypeError,
        ValueError,
      ):
        low, high = result["interval"]
        numbers = low, high, result["strict_success"], result["n_heldout"]
        if not all(map(math.isfinite, numbers)):
          raise ValueError(f"numbers that are none: {numbers}")
    return found

  # ---- episodes

  def iterations(self, stage: str = "rl") -> tuple[int, ...]:
    """Iterations of a stage whose episodes are recorded, oldest first.

    Iteration 0 of `rl` is the critic's warm-up.
    """
    pattern = re.compile(rf"{stage}-(\d+)\.array_record")
    directory = self.workdir / "trajectories"
    names = [p.name for p in directory.iterdir()] if directory.exists() else []
    found = map(pattern.fullmatch, names)
    return tuple(sorted(int(match[1]) for match in found if match))

  def episodes(
    self, stage: str, iteration: int | None = None
  ) -> list[Trajectory]:
    """The episodes that an iteration of a stage played.

    Without an iteration `stage` is a whole name, such as `evaluation-rl`.
    Raises TrajectoryError unless all of them are there and whole.
    """
    name = stage if iteration is None else f"{stage}-{iteration:05d}"
    file = self.workdir / "trajectories" / f"{name}.array_record"
    return list(storage.read(file))

  @functools.cached_property
  def evaluated(self) -> Mapping[str, list[Trajectory]]:
    """The episodes of the evaluations that there are, by stage."""
    return {s: self.episodes(f"evaluation-{s}") for s in self.evaluations}

  # ---- the learner

  @functools.cached_property
  def checkpoints(self) -> tuple[int, ...]:
    """PPO iterations after which the learner was saved, oldest first.

    Raises UserError when there is none (yet).
    """
    directory = self.workdir / "checkpoints" / "rl"
    steps = ()
    if directory.exists():
      with Checkpoints(directory, read_only=True) as saved:
        steps = saved.steps
    if not steps:
      raise configs.UserError(
        f"no checkpoint in {directory}: the run has saved no learner yet; let "
        "it reach PPO with the training command, or restore that directory"
      )
    return steps

  @functools.cached_property
  def reproducible(self) -> list[int]:
    """Iterations whose episodes, and learner before them, are recorded."""
    played = self.iterations("rl")
    return [k + 1 for k in self.checkpoints if k + 1 in played]

  def last_reproducible(self) -> int:
    """The newest of them; raises UserError when there is none (yet)."""
    if not self.reproducible:
      raise configs.UserError(
        f"{self.workdir} has no PPO batch with the checkpoint that it began "
        "from; let the run reach its first PPO iterations"
      )
    return self.reproducible[-1]

  def learner_after(self, iteration: int) -> learner.LearnerState:
    """The learner as PPO iteration `iteration` left it, bit by bit.

    It is what the next iteration began with: its actor played those episodes
    and its critic gave them their values.

    Raises:
      CheckpointError: there is none of this iteration, or it is damaged.
    """
    model = self.setting.model
    shapes = jax.eval_shape(
      functools.partial(learner.init_state, rl=self.rl),
      *map(model_params.abstract, (model, model.critic())),
    )
    directory = self.workdir / "checkpoints" / "rl"
    with Checkpoints(directory, read_only=True) as saved:
      return saved.restore(shapes, iteration).state

  def text(self, tokens: np.ndarray) -> str:
    """Readable text of token ids, control tokens included."""
    return "".join(self.setting.chat.tokenizer.piece(int(i)) for i in tokens)


def look_up(path: epath.PathLike) -> epath.Path:
  """A relative path in the current directory, or in the nearest above it.

  Where it is nowhere, it comes back as given.
  """
  path = epath.Path(path).expanduser()
  if "://" in str(path) or path.is_absolute():
    return path
  here = epath.Path().resolve()
  places = [place / path for place in (here, *here.parents)]
  return next((place for place in places if place.exists()), path)


def _finite(value: Any) -> float | None:
  number = isinstance(value, int | float) and math.isfinite(value)
  return value if number else None
