"""A run directory, read: what notebooks need of a run that is over, or not yet.

    run = RecordedRun.open("runs/tiny")
    iterations, success = run.curve("ppo", "success")
    episodes = run.episodes("rl", 1)

Nothing in the directory is ever changed, so a run may be read while it trains.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax.checkpoint import Checkpoints
from t1jax.evaluate import (
  TOKENIZER_FILE,
  Setting,
  base_directory,
  keep_compiled_programs,
  read_setting,
)
from t1jax.metrics import SUMMARY_FILE, read_metrics
from t1jax.models import params as model_params
from t1jax.models.tokenizer import SentencePieceTokenizer
from t1jax.rewards import schemes
from t1jax.rl import learner
from t1jax.rl.critic import init_from_actor
from t1jax.rl.settings import RLConfig
from t1jax.rollout import storage
from t1jax.rollout.trajectory import Trajectory
from t1jax.stages import first_step
from t1jax.tasks import datasets
from t1jax.train import family_scales, read_rl

# Which stage's steps the records of a phase count.
_STAGE_OF = {"sft": "sft", "ppo": "rl", "control": "control"}


@dataclasses.dataclass(frozen=True)
class RecordedRun:
  """What a run directory holds; made by `open`."""

  workdir: epath.Path
  config: config_dict.ConfigDict
  setting: Setting
  rl: RLConfig
  metrics: list[dict[str, Any]]

  @classmethod
  def open(cls, workdir: epath.PathLike) -> Self:
    """Opens a run directory.

    Args:
      workdir: local or gs://. A relative one is looked for in the current
        directory and in those above it: notebooks live below the checkout.

    Raises:
      UserError: there is no run, or it is none that this code can read.
    """
    keep_compiled_programs()
    found = look_up(workdir)
    if not (found / configs.CONFIG_FILE).exists():
      raise configs.UserError(
        f"there is no run in {workdir}; `bash launch/local.sh` makes runs/tiny "
        "in half an hour, `bash launch/local.sh --config=configs/tiny.py:smoke "
        "--workdir=runs/smoke` a small one in a minute (T1JAX_RUN=runs/smoke)"
      )
    config = configs.read_config(found)
    if config.pretrain.enabled:
      raise configs.UserError(
        f"{found} made a base model: it has no PPO to look at; give the "
        "directory of a main job"
      )
    readable = config.copy_and_resolve_references()
    with readable.unlocked():
      # Tasks that the user brought may be gone, and nothing here plays them.
      readable.data.directories = ()
      readable.base = str(look_up(config.base)) if config.base else ""
    tokenizer = SentencePieceTokenizer.load(
      base_directory(readable) / TOKENIZER_FILE
    )
    setting = read_setting(readable, tokenizer)
    rl = read_rl(config, setting)
    return cls(found, config, setting, rl, read_metrics(found))

  @functools.cached_property
  def summary(self) -> dict[str, Any]:
    """What summary.json says; empty while the run is not finished."""
    file = self.workdir / SUMMARY_FILE
    return json.loads(file.read_text()) if file.exists() else {}

  def curve(self, phase: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps of a phase that recorded a number, and the number.

    Args:
      phase: `sft`, whose steps are updates; `ppo` or `control`, whose steps
        are iterations. All are counted from 1.
      name: of the number.
    """
    start = first_step(self.config, _STAGE_OF[phase])
    found = [
      (record["step"] - start, record[name])
      for record in self.metrics
      if record["phase"] == phase and record.get(name) is not None
    ]
    steps, numbers = zip(*found, strict=True) if found else ((), ())
    return np.array(steps, int), np.array(numbers, float)

  def iterations(self, stage: str = "rl") -> tuple[int, ...]:
    """Iterations of a stage whose episodes are recorded, oldest first.

    Iteration 0 of `rl` is the critic's warm-up.
    """
    pattern = re.compile(rf"{stage}-(\d+)\.array_record")
    directory = self.workdir / "trajectories"
    names = [p.name for p in directory.iterdir()] if directory.exists() else []
    return tuple(sorted(int(m[1]) for n in names if (m := pattern.match(n))))

  def episodes(self, stage: str, iteration: int) -> list[Trajectory]:
    """The episodes that an iteration of a stage played."""
    name = f"{stage}-{iteration:05d}.array_record"
    return list(storage.read(self.workdir / "trajectories" / name))

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
        f"{self.workdir} has saved no learner yet; let the run reach PPO"
      )
    return steps

  def learner_after(self, iteration: int) -> learner.LearnerState:
    """The learner as PPO iteration `iteration` left it, bit by bit.

    It is what the next iteration began with: its actor played those episodes
    and its critic gave them their values.

    Raises:
      CheckpointError: there is none of this iteration, or it is damaged.
    """

    def initial(actor):
      critic = init_from_actor(actor, self.setting.model)
      return learner.init_state(actor, critic, self.rl)

    shapes = jax.eval_shape(initial, model_params.abstract(self.setting.model))
    directory = self.workdir / "checkpoints" / "rl"
    with Checkpoints(directory, read_only=True) as saved:
      return saved.restore(shapes, iteration).state

  def last_reproducible(self) -> int:
    """The newest iteration whose learner was saved just before it.

    Raises:
      UserError: there is none (yet).
    """
    played = self.iterations("rl")
    found = [k + 1 for k in self.checkpoints if k + 1 in played]
    if not found:
      raise configs.UserError(
        f"{self.workdir} has no PPO batch with the checkpoint that it began "
        "from; let the run reach its first PPO iterations"
      )
    return found[-1]

  @functools.cached_property
  def denominators(self) -> Mapping[str, float]:
    """Each family's scale D_f, counted from the run's training tasks."""
    built = sorted(self.workdir.glob("data/*/*/*/dataset_info.json"))
    if not built:
      raise configs.UserError(f"{self.workdir} has no dataset in data/")
    return schemes.family_denominators(
      family_scales(datasets.load(built[-1].parent, "train"))
    )

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
