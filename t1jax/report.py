"""Make a run's report: one HTML file that shows what was learned, and how.

  python -m t1jax.report --workdir=runs/tiny

Writes report.html into the run directory, local or gs://. It needs nothing
else, neither network nor scripts: mail it, print it, open it from a bucket. It
shows the headline figures with 95 % intervals, the curves of training, success
by family and domain, where the time went, and up to four whole episodes, token
by token, with the critic's values and the advantages that PPO learned from.

Training calls this at its end. By hand it also reports on a run that is not
finished, or that only made a base model: it shows what there is, and changes
nothing but report.html. What is damaged is named in one line, and an old
report stays.
"""

import collections
import datetime
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from t1jax import config as configs
from t1jax import curves, episodes
from t1jax.charts import (
  Html,
  bar,
  duration,
  interval,
  number,
  page,
  percent,
  plain,
  table,
)
from t1jax.evaluate import (
  EXPECTED_ERRORS,
  TOKENIZER_FILE,
  keep_compiled_programs,
)
from t1jax.metrics import SUMMARY_FILE, wilson_interval
from t1jax.paths import write_atomically
from t1jax.recorded import Recorded

REPORT_FILE = "report.html"
# A stage's name here, and the line of the charts whose colour it has.
_STAGES = {
  "base": ("base", 3),
  "sft": ("warm start", 2),
  "rl": ("PPO", 0),
  "control": ("control", 1),
}
_RESAMPLES = 4000


def main(argv: Sequence[str]) -> None:
  """Writes the report of a run."""
  keep_compiled_programs()
  call = configs.parse_command_line(
    argv, description=__doc__, resume_config=True
  )
  if call.workdir is None:
    raise configs.UserError("--workdir is missing: give a run's directory")
  if call.config.to_dict() != configs.read_config(call.workdir).to_dict():
    raise configs.UserError(
      "--config has no place here: a report is of the config that the run was "
      "made with; leave it out"
    )
  print(write(call.workdir))


def write(workdir: epath.PathLike) -> epath.Path:
  """Writes report.html of a run directory, whole or not at all; returns it.

  Raises:
    UserError, or one of EXPECTED_ERRORS: what is missing or damaged.
  """
  path = epath.Path(workdir) / REPORT_FILE
  write_atomically(path, render(Recorded(workdir)))
  return path


def write_or_say_why_not(workdir: epath.PathLike) -> None:
  """As `write`, at the end of a program whose work a report must not lose."""
  try:
    print(f"report: {write(workdir)}", file=sys.stderr)
  except Exception as error:
    print(
      f"the run is whole, but not its report ({type(error).__name__}: "
      f"{' '.join(str(error).split())}); mend that, then run "
      f"python -m t1jax.report --workdir={workdir}",
      file=sys.stderr,
    )


def render(run: Recorded) -> str:
  """The whole page."""
  title = f"t1jax: {run.workdir.name}"
  parts = (
    ("What was run", _header(run)),
    ("What was reached", _headline(run)),
    ("Training", curves.draw(run)),
    ("Success by family and domain", _by_group(run)),
    ("Where the time went", curves.time_spent(run)),
    ("Episodes, token by token", _episodes(run)),
  )
  return page(title, [part for part in parts if part[1]])


def _header(run: Recorded) -> str:
  facts = [
    ("config", run.source or "not recorded"),
    ("seed", run.config.get("seed", "not recorded")),
    ("directory", run.workdir),
  ]
  if run.records:
    first, last = run.records[0], run.records[-1]
    if "wall_seconds" in last:
      facts.append(("worked", duration(last["wall_seconds"])))
    if "time" in first:
      facts.append(
        ("recorded", f"{_utc(first['time'])} to {_utc(last['time'])}")
      )
  listed = "".join(
    f"<div><dt>{plain(name)}</dt><dd>{plain(fact)}</dd></div>"
    for name, fact in facts
  )
  state = ""
  if not run.summary:
    reached = "nothing is recorded yet"
    if run.records:
      last = run.records[-1]
      reached = f"the last record is step {last['step']}, {last.get('phase')}"
    state = (
      f'<p class="notice">This run is not finished: {plain(reached)}. What '
      "follows is what there is so far.</p>"
    )
  fields = configs.flatten(run.config.to_dict())
  whole = table(
    ["field", "value"],
    [(name, str(value)) for name, value in sorted(fields.items())],
    caption="The whole config",
  )
  return (
    f'{state}<dl class="facts">{listed}</dl>{_differences(run)}'
    f"<details><summary>The whole config</summary>{whole}</details>"
  )


def _differences(run: Recorded) -> str:
  """What the command line set, as it was recorded when the run began."""
  rows = [
    (name, str(in_file), str(here))
    for name, (in_file, here) in sorted(run.changed.items())
  ]
  if not rows:
    return ""
  return table(
    ["field", "in the file", "in this run"],
    rows,
    caption=f"What differs from {run.source}",
  )


def _headline(run: Recorded) -> str:
  if not run.evaluations and not run.summary:
    return ""
  rows = []
  for stage, result in run.evaluations.items():
    name, line = _STAGES[stage]
    rate, (low, high) = result["strict_success"], result["interval"]
    rows.append((
      name,
      bar(rate, percent(rate), line=line, interval=(low, high)),
      interval(low, high),
      str(result["n_heldout"]),
    ))  # fmt: skip
  success = table(
    ["stage", "strict success", "95 % interval", "held-out tasks"],
    rows,
    caption="Strict success on held-out tasks, each played once",
  )
  cards = [*_paired(run), *_scalars(run)]
  figures = "".join(
    f"<div><dt>{plain(name)}</dt><dd>{plain(value)}"
    f"{f'<small>{plain(note)}</small>' if note else ''}</dd></div>"
    for name, value, note in cards
  )
  whole = table(
    ["name", "value"],
    [(k, _value(v)) for k, v in configs.flatten(run.summary).items()],
    caption=SUMMARY_FILE,
  )
  details = f"<details><summary>All of {SUMMARY_FILE}</summary>{whole}"
  details += "</details>"
  return (
    f"{success if rows else ''}<dl class='cards'>{figures}</dl>"
    f"{details if run.summary else ''}"
  )


def _paired(run: Recorded) -> Iterable[tuple[str, str, str]]:
  """Differences between stages: they played the same tasks, so in pairs."""
  verdicts = {
    stage: {
      t.task: t.outcome.success
      for t in played
      if t.outcome.status != "infra_failure"
    }
    for stage, played in run.evaluated.items()
  }
  for after, before, name in (
    ("rl", "sft", "PPO's gain over the warm start"),
    ("rl", "control", "PPO's lead over the control"),
  ):
    if after in verdicts and before in verdicts:
      gain, low, high = _resampled(
        verdicts, (after, before), lambda m: m[0] - m[1]
      )
      yield (
        name,
        f"{100 * gain:+.1f} points",
        f"95 %: {100 * low:+.1f} to {100 * high:+.1f}",
      )
  if {"base", "sft", "rl"} <= verdicts.keys():
    share, low, high = _resampled(
      verdicts,
      ("base", "sft", "rl"),
      lambda m: _ratio(m[2] - m[1], m[2] - m[0]),
    )
    yield (
      "PPO's share of the whole gain",
      percent(share),
      f"95 %: {interval(low, high)}",
    )


def _resampled(verdicts, names, statistic) -> tuple[float, float, float]:
  """A statistic of mean success rates, and its 95 % interval.

  The interval is a percentile bootstrap over the tasks that all stages have a
  verdict on; the draws are the same for every report.
  """
  tasks = sorted(set.intersection(*(set(verdicts[n]) for n in names)))
  if not tasks:
    return 0.0, 0.0, 0.0
  played = np.array(
    [[verdicts[n][task] for task in tasks] for n in names], np.float64
  )
  rng = np.random.default_rng(0)
  drawn = rng.integers(len(tasks), size=(_RESAMPLES, len(tasks)))
  spread = statistic(played[:, drawn].mean(axis=2))
  low, high = np.percentile(spread, (2.5, 97.5))
  return float(statistic(played.mean(axis=1))), float(low), float(high)


def _ratio(part, whole):
  return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), 0.0)


def _scalars(run: Recorded) -> Iterable[tuple[str, str, str]]:
  """The other single numbers of the summary, known to this page or not."""
  variance = run.summary.get("explained_variance")
  for record in run.phase("warm_up"):
    variance = variance or {
      when: record.get(f"explained_variance_{when}")
      for when in ("before", "after")
    }
  if isinstance(variance, Mapping) and variance.get("after") is not None:
    yield (
      "explained variance of the critic after warm-up",
      number(variance["after"]),
      f"{_value(variance.get('before'))} before; on episodes it did not learn "
      "from",
    )
  known = {
    "replay_agreement": (
      "expert choices equal to the sampler's, with replay",
      percent,
    ),
    "free_agreement": (
      "expert choices equal to the sampler's, without replay",
      percent,
    ),
    "logprob_gap": ("mean log-prob gap, learner to sampler (nats)", number),
    "drift_rate": ("tokens that drifted between sampler and learner", percent),
    "wall_seconds": ("time worked", duration),
    "hours": ("time worked", lambda hours: duration(3600 * hours)),
  }
  elsewhere = ("rl_share_of_gain", "n_heldout", "strict_success")
  for name, value in run.summary.items():
    if name in elsewhere or not isinstance(value, int | float):
      continue
    if not math.isfinite(value):
      continue
    words, show = known.get(name, (name.replace("_", " "), number))
    yield words, show(value), name


def _by_group(run: Recorded) -> str:
  """Success by family and by domain, a bar for each stage."""
  return "".join(
    _group_table(run, group, caption)
    for group, caption in (
      ("family", "Strict success by task family"),
      ("domain", "Strict success by domain"),
    )
  )


def _group_table(run: Recorded, group: str, caption: str) -> str:
  counts = {
    stage: collections.defaultdict(lambda: [0, 0]) for stage in run.evaluated
  }
  for stage, played in run.evaluated.items():
    for t in played:
      if t.outcome.status != "infra_failure":
        pair = counts[stage][getattr(t, group)]
        pair[0] += t.outcome.success
        pair[1] += 1
  groups = sorted({g for of in counts.values() for g in of})
  if not groups:
    return ""
  rows = [
    [
      f"{g} ({max(of[g][1] for of in counts.values())})",
      *(_rate(*of[g], _STAGES[s][1]) for s, of in counts.items()),
    ]
    for g in groups
  ]
  return table(
    [f"{group} (tasks)", *(_STAGES[s][0] for s in counts)],
    rows,
    caption=f"{caption}, with 95 % intervals",
  )


def _rate(successes: int, trials: int, line: int) -> Html | str:
  if not trials:
    return "–"
  rate = successes / trials
  return bar(
    rate, percent(rate), line=line, interval=wilson_interval(successes, trials)
  )


def _episodes(run: Recorded) -> str:
  """Episodes of the newest credited batch and of the last evaluation."""
  if not run.evaluated and not run.phase("ppo"):
    return ""
  unmade = not (run.made_base / TOKENIZER_FILE).exists()
  if run.config.pretrain.enabled and unmade:
    return "<p>They can be read once the base and its tokenizer are made.</p>"
  choices = episodes.choose(*episodes.load(run))
  if not choices:
    return ""
  intro = (
    "<p>Every token as the learner saw it; what the policy sampled is "
    "underlined. Point at a token, or choose it and walk on with the arrow "
    "keys, to read its id, log-prob, value, advantage, turn and experts.</p>"
  )
  tokenizer = run.setting.chat.tokenizer
  return intro + episodes.section(choices, tokenizer, run.setting.model)


def _utc(seconds: float) -> str:
  moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
  return moment.strftime("%Y-%m-%d %H:%M UTC")


def _value(value: Any) -> str:
  if isinstance(value, float) and math.isfinite(value):
    return number(value)
  if isinstance(value, list):
    return ", ".join(_value(v) for v in value)
  return str(value)


if __name__ == "__main__":
  sys.exit(configs.run_program(main, expected=EXPECTED_ERRORS))
