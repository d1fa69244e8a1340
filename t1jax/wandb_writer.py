"""The metrics of a run at Weights & Biases, when the config asks for it.

  --config.wandb.project=terminal-agents           # after `wandb login`
  --config.wandb.project=x --config.wandb.mode=offline

Needs `pip install -e .[wandb]`. Offline, nothing leaves the machine: what lies
in the run directory's `wandb/` is sent by `wandb sync` when wanted.
"""

import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from etils import epath
from ml_collections import config_dict

from t1jax import paths
from t1jax.config import UserError, suggest

MODES = ("online", "offline")
RUN_FILE = "wandb.json"  # keeps the id, so that a resumed run goes on there
_INIT_SECONDS = 30.0


def check(section: config_dict.ConfigDict) -> None:
  """Raises UserError when `config.wandb` asks for what cannot be."""
  if section.mode not in MODES:
    raise UserError(
      f"config field wandb.mode is {section.mode!r}; expected one of "
      f"{', '.join(MODES)}{suggest(section.mode, MODES)}"
    )
  if not section.project:
    return
  if importlib.util.find_spec("wandb") is None:
    raise UserError(
      f"config field wandb.project is {section.project!r}, but wandb is not "
      "installed; pip install -e '.[wandb]', or leave the field empty"
    )
  import wandb

  if section.mode == "offline":
    return
  try:
    logged_in = wandb.login(prompt=False)
  except wandb.errors.Error as error:
    raise _refusal(error) from error
  if not logged_in:
    raise UserError(
      f"config field wandb.project is {section.project!r}, but nobody is "
      "logged in at W&B; wandb login, set WANDB_API_KEY, or "
      "--config.wandb.mode=offline"
    )


def _refusal(error: Exception) -> UserError:
  said = str(error).strip().split("\n")[0]
  return UserError(
    f"W&B refuses ({said}); mend that, or --config.wandb.mode=offline"
  )


class WandbWriter:
  """Sends numbers to one W&B run, the same one after each resume."""

  def __init__(
    self,
    workdir: epath.PathLike,
    config: config_dict.ConfigDict,
    *,
    notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
  ):
    """Starts the run, or goes on with it.

    Args:
      workdir: the run directory, local or gs://.
      config: of the run; its section `wandb` passed `check`.
      notify: is told, in one line, where the run can be seen.

    Raises:
      UserError: W&B refuses or does not answer.
    """
    import wandb

    record = epath.Path(workdir) / RUN_FILE
    self._mirror = paths.Mirror(workdir)
    if not record.exists():
      paths.write_atomically(
        record, json.dumps({"id": uuid.uuid4().hex[:8]}) + "\n"
      )
    section = config.wandb
    try:
      self._run = wandb.init(
        project=section.project,
        entity=section.entity or None,
        mode=section.mode,
        id=json.loads(record.read_text())["id"],
        resume="allow",
        dir=os.fspath(self._mirror.local),
        config=config.to_dict(),
        settings=wandb.Settings(
          console="off", silent=True, init_timeout=_INIT_SECONDS
        ),
      )
    except wandb.errors.Error as error:
      self._mirror.close()
      raise _refusal(error) from error
    # W&B's own step may not go back, ours does after a resume.
    self._run.define_metric("step")
    self._run.define_metric("*", step_metric="step")
    offline = section.mode == "offline"
    notify(
      f"W&B: {f'offline, in {workdir}/wandb' if offline else self._run.url}"
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
  ) -> None:
    self._run.finish(exit_code=0 if kind is None else 1)
    self._mirror.close()

  def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
    """Sends the numbers of one step; see MetricsWriter.write."""
    named = {f"{phase}/{k}": v for k, v in values.items() if v is not None}
    self._run.log({"step": step, **named})

  def summarise(self, summary: Mapping[str, Any]) -> None:
    """Keeps what the run ended with."""
    self._run.summary.update(dict(summary))

  def flush(self) -> None:
    self._mirror.push()
