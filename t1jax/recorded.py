"""A run directory, read back: what was recorded, found whole or refused.

A run that is not finished has less; what is there must not be damaged.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax import episodes, stages
from t1jax.metrics import METRICS_FILE, SUMMARY_FILE, read_metrics

# The evaluations that a run may have, in its order.
STAGES = ("base", "sft", "rl", "control")


@dataclasses.dataclass(frozen=True)
class Recorded:
  """What a run directory holds, read and found whole."""

  workdir: epath.Path
  source: str  # the value of --config
  config: config_dict.ConfigDict
  records: Sequence[Mapping[str, Any]]  # of metrics.jsonl
  summary: Mapping[str, Any]  # {} while the run is not finished
  evaluations: Mapping[str, Mapping[str, Any]]  # stage -> its figures
  batches: Mapping[str, episodes.Batch]  # stage -> its evaluation's episodes

  def phase(self, name: str) -> list[Mapping[str, Any]]:
    return [r for r in self.records if r.get("phase") == name]

  def iterations(self, phase: str, key: str) -> list[tuple[int, float | None]]:
    """(update of that phase, number or None) of one metric."""
    start = {"ppo": "rl"}.get(phase, phase)
    first = stages.first_step(self.config, start)
    return [
      (record["step"] - first, _finite(record[key]))
      for record in self.phase(phase)
      if key in record
    ]


def read(workdir: epath.PathLike) -> Recorded:
  """Reads a run directory; what is there must be whole."""
  workdir = epath.Path(workdir)
  config = configs.read_config(workdir)
  if not (workdir / METRICS_FILE).exists():
    raise configs.UserError(
      f"{workdir} has no {METRICS_FILE}: nothing is recorded there yet; start "
      "the training command, or restore that file"
    )
  files = {s: workdir / "evaluations" / f"{s}.json" for s in STAGES}
  evaluations = {s: read_json(f) for s, f in files.items() if f.exists()}
  for stage, result in evaluations.items():
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
  return Recorded(
    workdir=workdir,
    source=str(read_json(workdir / configs.CONFIG_FILE).get("source", "")),
    config=config,
    records=read_metrics(workdir),
    summary=read_json(workdir / SUMMARY_FILE, missing={}),
    evaluations=evaluations,
    batches={
      s: episodes.load_batch(workdir, f"evaluation-{s}") for s in evaluations
    },
  )


def _finite(value: Any) -> float | None:
  number = isinstance(value, int | float) and math.isfinite(value)
  return value if number else None


def read_json(path: epath.Path, missing: Any = None) -> dict[str, Any]:
  """A JSON object; `missing`, if given, where there is no such file."""
  if missing is not None and not path.exists():
    return missing
  try:
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
      raise ValueError(f"a {type(loaded).__name__}, expected an object")
  except ValueError as error:
    raise configs.UserError(
      f"{path} is damaged ({error}); restore it, or delete it"
    ) from error
  return loaded
