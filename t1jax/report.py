"""Make a run's report: one HTML file that shows what was learned, and how.

  python -m t1jax.report --workdir=runs/tiny

Writes report.html into the run directory, local or gs://. It needs nothing
else, neither network nor scripts: mail it, print it, open it from a bucket. It
shows the headline figures with 95 % intervals, the curves of training, success
by family and domain, where the time went, and four whole episodes, token by
token, with the critic's values and the advantages that PPO learned from.

Training calls this at its end. By hand it also reports on a run that is not
finished, or that only made a base model: it shows what there is, and changes
nothing but report.html. What is damaged is named in one line, and an old
report stays.
"""

import collections
import dataclasses
import datetime
import json
import math
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax import config as configs
from t1jax import episodes, stages
from t1jax.charts import (
  Html,
  Series,
  bar,
  line_chart,
  number,
  percent,
  plain,
  table,
)
from t1jax.evaluate import (
  ASSETS,
  EXPECTED_ERRORS,
  TOKENIZER_FILE,
  base_directory,
  keep_compiled_programs,
  learner_settings,
  read_setting,
)
from t1jax.metrics import (
  METRICS_FILE,
  SUMMARY_FILE,
  read_metrics,
  wilson_interval,
  write_atomically,
)
from t1jax.models.tokenizer import SentencePieceTokenizer

REPORT_FILE = "report.html"
# A stage's name here, and the line of the charts whose colour it has.
STAGES = {
  "base": ("base", 3),
  "sft": ("warm start", 2),
  "rl": ("PPO", 0),
  "control": ("control", 1),
}
_RESAMPLES = 4000


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
    """(update of that phase, number) of one metric; also where it is null."""
    start = {"ppo": "rl"}.get(phase, phase)
    first = stages.first_step(self.config, start)
    return [(r["step"] - first, r[key]) for r in self.phase(phase) if key in r]


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
  page = render(read(workdir))
  path = epath.Path(workdir) / REPORT_FILE
  # Whatever encoding a machine writes text in, ASCII is the same in it.
  write_atomically(path, page.encode("ascii", "xmlcharrefreplace").decode())
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


# ---- reading


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
  evaluations = {s: _read_json(f) for s, f in files.items() if f.exists()}
  for stage, result in evaluations.items():
    for key in ("strict_success", "interval", "n_heldout", "by_family"):
      if key not in result:
        raise configs.UserError(f"{files[stage]} has no {key}; restore it")
  return Recorded(
    workdir=workdir,
    source=str(_read_json(workdir / configs.CONFIG_FILE).get("source", "")),
    config=config,
    records=read_metrics(workdir),
    summary=_read_json(workdir / SUMMARY_FILE, missing={}),
    evaluations=evaluations,
    batches={
      s: episodes.load_batch(workdir, f"evaluation-{s}") for s in evaluations
    },
  )


def _read_json(path: epath.Path, missing: Any = None) -> dict[str, Any]:
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


# ---- the page


def render(run: Recorded) -> str:
  """The whole page."""
  title = f"t1jax: {run.workdir.name}"
  parts = (
    ("What was run", _header(run)),
    ("What was reached", _headline(run)),
    ("Training", _curves(run)),
    ("Success by family and domain", _by_group(run)),
    ("Where the time went", _time(run)),
    ("Episodes, token by token", _episodes(run)),
  )
  body = "".join(
    f"<section><h2>{heading}</h2>{content}</section>"
    for heading, content in parts
    if content
  )
  style = (ASSETS / "report.css").read_text()
  script = (ASSETS / "report.js").read_text()
  return (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{plain(title)}</title><style>{style}</style></head>"
    f"<body><main><h1>{plain(title)}</h1>{body}</main>"
    f"<script>{script}</script></body></html>\n"
  )


def _header(run: Recorded) -> str:
  facts = [
    ("config", run.source or "not recorded"),
    ("seed", run.config.get("seed", "not recorded")),
    ("directory", run.workdir),
  ]
  if run.records:
    first, last = run.records[0], run.records[-1]
    if "wall_seconds" in last:
      facts.append(("worked", _duration(last["wall_seconds"])))
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
    f'{state}<dl class="facts">{listed}</dl>{_differences(run, fields)}'
    f"<details><summary>The whole config</summary>{whole}</details>"
  )


def _differences(run: Recorded, fields: Mapping[str, Any]) -> str:
  """How the run's config differs from what its file says now."""
  # Only a file of the project at hand: a run from elsewhere names any file.
  try:
    path = pathlib.Path(run.source).resolve()
    if "://" in run.source or not path.is_relative_to(pathlib.Path.cwd()):
      return ""
    defaults = configs.flatten(configs.load_config(run.source).to_dict())
  except Exception:  # a config is a program: whatever it does, it is no help
    return ""
  rows = [
    (name, str(defaults.get(name, "absent")), str(fields.get(name, "absent")))
    for name in sorted({*defaults, *fields})
    if defaults.get(name) != fields.get(name)
  ]
  if not rows:
    return f"<p>All fields as {plain(run.source)} has them.</p>"
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
    name, line = STAGES[stage]
    rate, (low, high) = result["strict_success"], result["interval"]
    rows.append((
      name,
      bar(rate, percent(rate), line=line, interval=(low, high)),
      f"{percent(low)} to {percent(high)}",
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
      for t in batch.trajectories
      if t.outcome.status != "infra_failure"
    }
    for stage, batch in run.batches.items()
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
    share = run.summary.get("rl_share_of_gain", share)
    yield (
      "PPO's share of the whole gain",
      percent(share),
      f"95 %: {percent(low)} to {percent(high)}",
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
      "expert choices that the learner replays as the sampler made them",
      percent,
    ),
    "free_agreement": ("the same without replay", percent),
    "logprob_gap": ("mean log-prob gap, learner to sampler (nats)", number),
    "drift_rate": ("tokens that drifted between sampler and learner", percent),
    "wall_seconds": ("time worked", _duration),
    "hours": ("time worked", lambda hours: _duration(3600 * hours)),
  }
  elsewhere = ("rl_share_of_gain", "n_heldout", "strict_success")
  for name, value in run.summary.items():
    if not isinstance(value, int | float) or name in elsewhere:
      continue
    words, show = known.get(name, (name.replace("_", " "), number))
    yield words, show(value), name


def _curves(run: Recorded) -> str:
  """The small multiples."""
  scheme = run.config.get("rl", {}).get("reward", "")

  def ppo(key: str, name: str) -> Series:
    return Series(name, run.iterations("ppo", key))

  per_iteration = {"x_label": "PPO iteration"}
  share = {"bounds": (0.0, None), "show": percent}
  figures = (
    line_chart(
      "Success while learning",
      [
        ppo("success", "PPO"),
        Series("control", run.iterations("control", "success")),
      ],
      note="on training tasks, by the policy before each update",
      unit="share of episodes",
      bounds=(0.0, 1.0),
      show=percent,
      **per_iteration,
    ),
    line_chart(
      "Reward by scheme",
      [
        ppo(f"reward_{part}", part + (" (trained)" if part == scheme else ""))
        for part in ("spr", "fdr", "t1_dense", "fraction")
      ],
      note="mean per episode; one is trained on, the others are for comparison",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Explained variance of the critic",
      [ppo("explained_variance", "before each update")],
      note="1 is perfect, 0 no better than a constant",
      bounds=(0.0, 1.0),
      **per_iteration,
    ),
    line_chart(
      "Learner against sampler",
      [
        ppo("logprob_gap_max", "largest log-prob gap"),
        ppo("logprob_gap", "mean log-prob gap"),
        ppo("k3", "k3 divergence"),
      ],
      note="the same weights and tokens, scored by two programs",
      unit="nats, logarithmic",
      log=True,
      **per_iteration,
    ),
    line_chart(
      "Clipped by PPO",
      [
        ppo("clip_fraction_low", "ratio below the range"),
        ppo("clip_fraction_high", "above it"),
      ],
      unit="share of sampled tokens",
      **share,
      **per_iteration,
    ),
    line_chart(
      "Entropy of the policy",
      [ppo("entropy", "mean over sampled tokens")],
      unit="nats",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Expert load",
      [ppo("load_violation", "largest violation")],
      note="how far the busiest expert exceeds the mean load, 0 is balanced",
      unit="times the mean",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Routes that were not replayed",
      [ppo("fallback_fraction", "chosen anew by the learner")],
      unit="share of tokens",
      bounds=(0.0, 0.01),
      show=percent,
      **per_iteration,
    ),
    line_chart(
      "Warm start",
      [
        Series("validation", run.iterations("sft", "validation_loss")),
        Series("training batch", run.iterations("sft", "loss")),
      ],
      unit="cross-entropy, nats per token",
      bounds=(0.0, None),
      x_label="update",
    ),
    line_chart(
      "Making the base",
      [
        Series("validation", run.iterations("pretrain", "validation_loss")),
        Series("training batch", run.iterations("pretrain", "loss")),
      ],
      unit="cross-entropy, nats per token",
      bounds=(0.0, None),
      x_label="update",
    ),
  )
  drawn = "".join(figures)
  return f'<div class="charts">{drawn}</div>' if drawn else ""


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
    stage: collections.defaultdict(lambda: [0, 0]) for stage in run.batches
  }
  for stage, batch in run.batches.items():
    for t in batch.trajectories:
      if t.outcome.status != "infra_failure":
        pair = counts[stage][getattr(t, group)]
        pair[0] += t.outcome.success
        pair[1] += 1
  groups = sorted({g for of in counts.values() for g in of})
  if not groups:
    return ""
  totals = [max(of[g][1] for of in counts.values()) for g in groups]
  rows = [
    [g, *(_rate(*of[g], STAGES[s][1]) for s, of in counts.items()), str(total)]
    for g, total in zip(groups, totals, strict=True)
  ]
  return table(
    [group, *(STAGES[s][0] for s in counts), "tasks"], rows, caption=caption
  )


def _rate(successes: int, trials: int, line: int) -> Html | str:
  if not trials:
    return "–"
  rate = successes / trials
  return bar(
    rate, percent(rate), line=line, interval=wilson_interval(successes, trials)
  )


def _time(run: Recorded) -> str:
  """Seconds of the run by phase, of an iteration and of an episode by part."""
  if not run.records:
    return ""
  spent: dict[str, float] = {}
  before = 0.0
  for record in run.records:
    now = record.get("wall_seconds", before)
    phase = record.get("phase", "")
    spent[phase] = spent.get(phase, 0.0) + max(0.0, now - before)
    before = now
  names = {
    "evaluation": "evaluations, and the data before the first",
    "sft": "warm start",
    "warm_up": "critic warm-up",
    "ppo": "PPO",
    "control": "control",
    "pretrain": "base model and its data",
  }
  parts = [
    _seconds_table(
      {names.get(p, p): s for p, s in spent.items()},
      "The run, by phase",
      "phase",
      _duration,
    )
  ]
  iterations = run.phase("ppo")
  means = _means(iterations, "seconds_")
  step = means.get("step", 0.0)
  if step:
    work = {
      "rollout": "rollouts: episodes in sandboxes",
      "values": "critic: values",
      "logprobs": "actor: log-probs before the update",
      "critic": "critic: update",
      "actor": "actor: update",
    }
    shown = {words: means.get(key, 0.0) for key, words in work.items()}
    shown["the rest"] = max(0.0, step - sum(shown.values()))
    parts.append(
      _seconds_table(
        shown,
        f"A PPO iteration: {step:.1f} s, mean of {len(iterations)}",
        "part",
        lambda seconds: f"{seconds:.2f} s",
      )
    )
  waits = _means(iterations, "episode_seconds_")
  played = sum(r.get("episodes", 0) for r in iterations)
  if waits and played:
    scale = len(iterations) / played
    words = {
      "boot": "its sandbox to boot",
      "model": "the sampler, shared with other episodes",
      "shell": "its commands",
      "verify": "its verdict",
    }
    parts.append(
      _seconds_table(
        {words.get(k, k): s * scale for k, s in waits.items()},
        "An episode of PPO, by what it waited for",
        "waiting for",
        lambda seconds: f"{seconds:.2f} s",
      )
    )
  return f'<div class="charts">{"".join(parts)}</div>'


def _seconds_table(seconds, caption, heading, show) -> str:
  whole = sum(seconds.values()) or 1.0
  rows = [
    (name, bar(s / whole, show(s)), percent(s / whole))
    for name, s in seconds.items()
  ]
  return table([heading, "time", "share"], rows, caption=caption)


def _means(records, prefix) -> dict[str, float]:
  found: dict[str, list[float]] = {}
  for record in records:
    for key, value in record.items():
      if key.startswith(prefix) and value is not None:
        found.setdefault(key.removeprefix(prefix), []).append(value)
  return {key: sum(v) / len(v) for key, v in found.items()}


def _episodes(run: Recorded) -> str:
  """Episodes of the newest credited batch and of the last evaluation."""
  if not run.batches and not run.phase("ppo"):
    return ""
  config = run.config
  if config.pretrain.enabled:  # its tokenizer is its own, and comes last
    tokenizer_file = run.workdir / "base" / TOKENIZER_FILE
    if not tokenizer_file.exists():
      return "<p>They can be read once the base and its tokenizer are made.</p>"
  else:
    tokenizer_file = base_directory(config) / TOKENIZER_FILE
  tokenizer = SentencePieceTokenizer.load(tokenizer_file)
  setting = read_setting(config, tokenizer)
  evaluation = None
  for stage in ("rl", "sft", "base"):
    evaluation = evaluation or run.batches.get(stage)
  batch = None
  if run.phase("ppo"):
    rl = learner_settings(config, setting)
    critic, step = episodes.load_critic(run.workdir, setting.model, rl)
    batch = episodes.credited_batch(
      run.workdir, critic, step, setting.model, rl
    )
    if "rl" in run.batches:
      how = (
        f"the critic of the checkpoint after iteration {step}, as though the "
        "evaluation had been a batch; nothing was learned from it"
      )
      evaluation = episodes.give_credit(
        run.batches["rl"], critic, how, setting.model, rl
      )
  choices = episodes.choose(batch, evaluation)
  if not choices:
    return ""
  intro = (
    "<p>Every token as the learner saw it; what the policy sampled is "
    "underlined. Point at a token, or choose it and walk on with the arrow "
    "keys, to read its id, log-prob, value, advantage, turn and experts.</p>"
  )
  return intro + episodes.section(choices, tokenizer, setting.model)


def _duration(seconds: float) -> str:
  whole = round(seconds)
  if whole < 120:
    return f"{whole} s"
  if whole < 7200:
    return f"{whole // 60} min {whole % 60} s"
  return f"{whole // 3600} h {whole % 3600 // 60} min"


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
