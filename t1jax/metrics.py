"""What a run records: metrics.jsonl, TensorBoard, summary.json, the screen.

metrics.jsonl has one JSON object per line: `step`, `phase`, `time` (seconds
since 1970), `wall_seconds` (that the run has worked; stops, and what was done
again after them, left out), and the numbers. It may end in half a line after a
crash; opening it again trims that, and drops what lies past the step that the
run resumes at.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self, TextIO

import tensorboardX
from etils import epath
from rich.console import Console
from rich.progress import (
  BarColumn,
  MofNCompleteColumn,
  Progress,
  TaskID,
  TextColumn,
  TimeElapsedColumn,
)

from t1jax import paths

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
# To a bucket whole files are copied, but not more often than this, in seconds.
_PUSH_SECONDS = 30.0


class MetricsError(ValueError):
  """A damaged metrics file; the message names the line."""


def read_metrics(workdir: epath.PathLike) -> list[dict[str, Any]]:
  """The records of a run, oldest first; half a line at the end is left out.

  Raises MetricsError with the line number when a line before the last is
  damaged.
  """
  path = epath.Path(workdir) / METRICS_FILE
  if not path.exists():
    return []
  records = []
  lines = path.read_bytes().split(b"\n")
  for number, line in enumerate(lines, start=1):
    if number == len(lines):  # without its newline: nothing, or half a line
      break
    try:
      record = json.loads(line)
    except ValueError as error:
      raise MetricsError(
        f"{path}, line {number} is not JSON ({error}); mend or delete that line"
      ) from error
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
      raise MetricsError(
        f"{path}, line {number} is no record with a step; mend or delete it"
      )
    records.append(record)
  return records


class Sink(Protocol):
  """Where the numbers go as well, e.g. `wandb_writer.WandbWriter`."""

  def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None: ...

  def flush(self) -> None: ...


class MetricsWriter:
  """Appends numbers to metrics.jsonl and to TensorBoard events."""

  def __init__(
    self,
    workdir: epath.PathLike,
    *,
    resume_step: int | None = None,
    also: Sink | None = None,
    check_hold: Callable[[], None] = lambda: None,
  ):
    """Opens the files of a run directory, local or gs://.

    In a bucket they are behind by up to half a minute, until `flush`.

    Args:
      workdir: the run directory; made when missing.
      resume_step: the step of the restored checkpoint. Records of later steps
        are dropped: they will be written again. None starts a new file.
      also: gets what is written, too.
      check_hold: raises ValueError when another process has taken the run
        directory over; then nothing of ours may be copied there any more.
    """
    self._check_hold = check_hold
    self._also = also
    self._mirror = paths.Mirror(workdir)
    self._path = self._mirror.local / METRICS_FILE
    kept = [] if resume_step is None else read_metrics(workdir)
    kept = [r for r in kept if r["step"] <= resume_step]
    paths.write_atomically(self._path, "".join(map(_line, kept)))
    self._before = kept[-1].get("wall_seconds", 0.0) if kept else 0.0
    self._started = time.monotonic()
    self._events = tensorboardX.SummaryWriter(
      str(self._mirror.local / "tensorboard"),
      purge_step=None if resume_step is None else resume_step + 1,
    )
    self.flush()

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def write(self, step: int, phase: str, values: Mapping[str, Any]) -> None:
    """Records numbers of one step.

    Args:
      step: the run's step, counted over all phases, so that a resume can tell
        what is past it.
      phase: e.g. "sft"; TensorBoard shows the values as "sft/loss".
      values: name -> number (Python, NumPy or JAX scalar). One that is not
        finite is written as null: JSON has no word for it.
    """
    record = {
      "step": int(step),
      "phase": phase,
      "time": round(time.time(), 3),
      "wall_seconds": round(self.wall_seconds, 3),
    }
    if clash := record.keys() & values.keys():
      raise ValueError(f"metric names {sorted(clash)} are taken; rename them")
    numbers = {name: _number(name, value) for name, value in values.items()}
    with self._path.open("a") as file:
      file.write(_line({**record, **numbers}))
    for name, value in numbers.items():
      if value is not None:
        self._events.add_scalar(f"{phase}/{name}", value, step)
    if self._also is not None:
      self._also.write(int(step), phase, numbers)
    if time.monotonic() - self._pushed > _PUSH_SECONDS:
      self.flush()

  @property
  def wall_seconds(self) -> float:
    """Seconds that the run has worked, over all resumes."""
    return self._before + time.monotonic() - self._started

  def flush(self) -> None:
    """Returns when all that was written is where the run directory is.

    To be called before anything is saved that a resumed run goes on from: what
    the metrics lack by then is never written again.
    """
    self._events.flush()
    if self._also is not None:
      self._also.flush()
    self._check_hold()
    self._mirror.push()
    self._pushed = time.monotonic()

  def close(self) -> None:
    self._events.close()
    try:
      self._check_hold()
    except ValueError:  # whoever took over has newer files there
      self._mirror.drop()
    else:
      self._mirror.close()


def _line(record: Mapping[str, Any]) -> str:
  return json.dumps(record, allow_nan=False) + "\n"


def _number(name: str, value: Any) -> int | float | None:
  if isinstance(value, bool | int):
    return int(value)
  try:
    value = float(value)
  except (TypeError, ValueError) as error:
    raise ValueError(f"metric {name} is not a number: {value!r}") from error
  return value if math.isfinite(value) else None


def write_summary(workdir: epath.PathLike, summary: Mapping[str, Any]) -> None:
  """Writes summary.json of a run directory, whole or not at all."""
  paths.write_atomically(
    epath.Path(workdir) / SUMMARY_FILE,
    json.dumps(summary, indent=2, allow_nan=False) + "\n",
  )


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
  """The 95 % Wilson score interval of a success rate.

  Source: Wilson (1927), J. Am. Stat. Assoc. 22, 209-212, with z = 1.959964.
  Unlike the normal one it stays in [0, 1] and is not empty at 0 and at 1.

  Args:
    successes: in [0, trials].
    trials: independent ones; with 0 nothing is known and (0, 1) comes back.

  Returns: (low, high), both in [0, 1].
  """
  if not 0 <= successes <= trials:
    raise ValueError(
      f"successes must be in [0, trials], got {successes} of {trials}"
    )
  if trials == 0:
    return 0.0, 1.0
  z = 1.959963984540054
  rate = successes / trials
  scale = 1 + z * z / trials
  centre = (rate + z * z / (2 * trials)) / scale
  spread = math.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
  half = z / scale * spread
  # The bounds are exact at 0 and 1; in floating point they may miss the rate.
  low, high = max(0.0, centre - half), min(1.0, centre + half)
  return min(low, rate), max(high, rate)


class LiveProgress:
  """What the run is doing now: a bar per phase on a terminal, else lines.

  with LiveProgress() as progress:
    progress.phase("sft", total=200)
    progress.update(10, loss=1.25, accuracy=0.5)
  """

  def __init__(
    self, stream: TextIO = sys.stderr, *, seconds_between_lines: float = 5.0
  ):
    """Shows on `stream`; a stream that is no terminal gets plain lines.

    Args:
      stream: where to.
      seconds_between_lines: plain lines of one phase keep this distance; the
        last one of a phase is always shown.
    """
    self._stream = stream
    self._pause = seconds_between_lines
    self._bars: Progress | None = None
    if stream.isatty():
      self._bars = Progress(
        TextColumn("{task.description:>8}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=Console(file=stream),
      )
    self._task: TaskID | None = None
    self._name = ""
    self._total = 0
    self._said = -math.inf
    self._pending = ""
    self._started = time.monotonic()

  def __enter__(self) -> Self:
    if self._bars:
      self._bars.start()
    return self

  def __exit__(self, *_: object) -> None:
    self._flush()
    if self._bars:
      self._bars.stop()

  def phase(self, name: str, *, total: int) -> None:
    """Starts a phase of `total` steps; the one before it is over."""
    self._flush()
    self._name, self._total = name, total
    self._said, self._started = -math.inf, time.monotonic()
    if self._bars:
      self._task = self._bars.add_task(name, total=total, numbers="")

  def update(self, done: int, **numbers: float) -> None:
    """Shows that `done` steps of the phase are done, and its latest numbers."""
    shown = " ".join(f"{k} {_short(v)}" for k, v in numbers.items())
    if self._bars:
      self._bars.update(self._task, completed=done, numbers=shown)
      return
    seconds = time.monotonic() - self._started
    self._pending = (
      f"{self._name} {done}/{self._total} {shown} ({seconds:.0f} s)\n"
    )
    if done >= self._total or time.monotonic() - self._said >= self._pause:
      self._flush()

  def say(self, line: str) -> None:
    """Prints a line above the bars."""
    if self._bars:
      self._bars.console.print(line, markup=False, highlight=False)
    else:
      self._stream.write(line + "\n")
      self._stream.flush()

  def _flush(self) -> None:
    if self._pending:
      self._stream.write(self._pending)
      self._stream.flush()
      self._pending, self._said = "", time.monotonic()


def _short(value: Any) -> str:
  if isinstance(value, str | int):
    return str(value)
  return f"{float(value):.4g}"
