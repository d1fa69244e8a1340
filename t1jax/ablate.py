"""Run ablations over several seeds, and compare them on one page.

  python -m t1jax.ablate --workdir=runs/ablations
  python -m t1jax.ablate --workdir=runs/ablations --names=no_replay,t1_dense

Trains `--config=FILE.py:NAME` for every name and seed, one after the other, in
WORKDIR/NAME-SEED. The baseline of a seed comes first; the others begin from its
dataset and warm start, unless they change what those depend on (what they copy
of its evaluations is scored by its reward). After each run
WORKDIR/ablations.html and ablations.json say what is known so far. What is
finished is not done again, and a stopped run goes on: repeat the command.
"""

import argparse
import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

import numpy as np
from ml_collections import config_dict
from scipy import stats

from t1jax import config as configs
from t1jax.charts import Series, line_chart, page, percent, plain, table
from t1jax.metrics import (
  SUMMARY_FILE,
  LiveProgress,
  MetricsError,
  read_metrics,
)
from t1jax.paths import write_atomically

BASELINE = "baseline"
# What a warm start does not depend on: sections, or fields, of the config.
_AFTER_WARM_START = ("warm_up.", "rl.", "ppo.", "control.", "model.critic_")
# They also say how demonstrations are packed.
_PACKING = ("ppo.buckets", "ppo.token_budget")
# What one run leaves to another that begins where its warm start ended.
_WARM_START = (
  "data",
  "policies/sft",
  "evaluations/base.json",
  "evaluations/sft.json",
  "trajectories/evaluation-base.array_record",
  "trajectories/evaluation-sft.array_record",
)


@dataclasses.dataclass(frozen=True)
class Result:
  """One finished run."""

  sft: float  # strict success on held-out tasks
  rl: float
  explained_variance: float  # after warm-up
  learning: tuple[float, ...]  # success while training, by iteration


def main(argv: Sequence[str]) -> None:
  """Runs what is not finished yet, and writes the comparison."""
  options, overrides = _options(argv)
  workdir = pathlib.Path(options.workdir).expanduser().absolute()
  runs = plan(workdir, options, overrides)
  todo = [run for name in runs for run in runs[name].values()]
  todo.sort(key=lambda run: run.seed)  # the baseline of a seed comes first
  with LiveProgress() as progress:
    progress.phase("ablations", total=len(todo))
    for number, run in enumerate(todo, start=1):
      if not run.finished:
        progress.say(f"{run.name}, seed {run.seed}: {run.directory}")
        baseline = runs[BASELINE][run.seed]
        if run is not baseline and shares_warm_start(run, baseline):
          lend_warm_start(baseline.directory, run.directory)
        _train(run, overrides)
      results = read_results(runs)
      write(workdir, results, options.seeds)
      progress.update(number, **{run.name: results[run.name][run.seed].rl})
  print(workdir / "ablations.html")


@dataclasses.dataclass(frozen=True)
class Run:
  """One ablation with one seed."""

  name: str
  seed: int
  spec: str  # the value of --config
  config: config_dict.ConfigDict  # with the seed and all overrides
  directory: pathlib.Path

  @property
  def finished(self) -> bool:
    return (self.directory / SUMMARY_FILE).exists()


def plan(
  workdir: pathlib.Path, options, overrides: Sequence[str]
) -> dict[str, dict[int, Run]]:
  """Every run: name -> seed -> run; the baseline first.

  An ablation that changes nothing is the baseline and is left out.

  Raises:
    UserError: an unknown name or field, or a directory that holds the run of
      another config.
  """
  runs: dict[str, dict[int, Run]] = {}
  for name in (BASELINE, *options.names):
    spec = f"{options.config}:{name}" + (",smoke" if options.smoke else "")
    runs[name] = {}
    for seed in options.seeds:
      arguments = [f"--config={spec}", f"--config.seed={seed}", *overrides]
      config = configs.parse_command_line(
        [__name__, *arguments], description=""
      ).config
      directory = workdir / f"{name}-{seed}"
      configs.holds_run(directory, config)
      runs[name][seed] = Run(name, seed, spec, config, directory)
    if name != BASELINE and all(
      run.config.to_dict() == runs[BASELINE][seed].config.to_dict()
      for seed, run in runs[name].items()
    ):
      print(f"{name} is what the baseline does: left out", file=sys.stderr)
      del runs[name]
  return runs


def _options(argv):
  parser = argparse.ArgumentParser(
    prog="python -m t1jax.ablate",
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    epilog="--config.FIELD=VALUE sets a field of every run.",
  )
  parser.add_argument("--workdir", required=True, help="local directory")
  parser.add_argument(
    "--config",
    default="configs/ablations.py",
    help="file whose arguments are the names (%(default)s)",
  )
  parser.add_argument(
    "--names",
    default="",
    help="NAME,NAME,... out of the file's CHANGES, whose comments say what "
    "each does; default: all of them, near two hours on two cores",
  )
  parser.add_argument(
    "--seeds", default="0,1,2", help="of every name's runs (%(default)s)"
  )
  parser.add_argument(
    "--smoke", action="store_true", help="everything once; learns nothing"
  )
  options, overrides = parser.parse_known_args(argv[1:])
  for text in overrides:
    if not text.startswith("--config.") or "=" not in text:
      parser.error(f"unexpected {text}; expected --config.FIELD=VALUE")
    if text.startswith("--config.seed="):
      parser.error("the seeds of all runs are given by --seeds")
  try:
    options.seeds = list(dict.fromkeys(map(int, options.seeds.split(","))))
  except ValueError:
    parser.error(f"--seeds={options.seeds}: expected numbers, 0,1,2")
  known = getattr(configs.load_module(options.config), "CHANGES", None)
  if not known:
    parser.error(f"--config={options.config} has no CHANGES to run")
  names = options.names.split(",") if options.names else list(known)
  options.names = [n for n in dict.fromkeys(names) if n != BASELINE]
  return options, overrides


def shares_warm_start(one: Run, other: Run) -> bool:
  """Whether two runs differ only in what comes after the warm start."""
  a, b = (configs.flatten(r.config.to_dict()) for r in (one, other))
  return all(
    name.startswith(_AFTER_WARM_START) and name not in _PACKING
    for name in a.keys() | b.keys()
    if a.get(name) != b.get(name)
  )


def lend_warm_start(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies a finished warm start to a run that has not begun."""
  if source == target or (target / configs.CONFIG_FILE).exists():
    return
  for name in _WARM_START:
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    if (source / name).is_dir():
      shutil.copytree(source / name, target / name, dirs_exist_ok=True)
    else:
      shutil.copyfile(source / name, target / name)


def _train(run: Run, overrides: Sequence[str]) -> None:
  command = [
    sys.executable, "-m", "t1jax.train", f"--config={run.spec}",
    f"--config.seed={run.seed}", f"--workdir={run.directory}", *overrides,
  ]  # fmt: skip
  run.directory.mkdir(parents=True, exist_ok=True)
  file = run.directory / "log.txt"
  with open(file, "ab") as log:
    done = subprocess.run(command, stdout=log, stderr=log, check=False)
  if done.returncode:
    said = file.read_text(errors="replace").strip().splitlines()
    raise configs.UserError(
      f"{run.name}, seed {run.seed}, ended with exit code {done.returncode} "
      f"({said[-1] if said else 'no output'}); see {file}, mend that, and "
      "repeat the command"
    )


def read_results(
  runs: Mapping[str, Mapping[int, Run]],
) -> dict[str, dict[int, Result]]:
  """What is finished: name -> seed -> result."""
  return {
    name: {s: _read_result(r) for s, r in by_seed.items() if r.finished}
    for name, by_seed in runs.items()
  }


def _read_result(run: Run) -> Result:
  file = run.directory / SUMMARY_FILE
  summary = configs.read_json(file)
  with configs.user_errors(f"{file} lacks a number", KeyError, TypeError):
    return Result(
      sft=summary["strict_success"]["sft"],
      rl=summary["strict_success"]["rl"],
      explained_variance=summary["explained_variance"]["after"],
      learning=tuple(
        record["success"]
        for record in read_metrics(run.directory)
        if record["phase"] == "ppo"
      ),
    )


def difference(
  one: Mapping[int, float], other: Mapping[int, float]
) -> tuple[float, float, float]:
  """Mean of one - other over their common seeds, and its 95 % interval.

  Paired by seed, Student's t; without a second seed the interval is infinite.
  """
  pairs = [one[s] - other[s] for s in sorted(one.keys() & other.keys())]
  if len(pairs) < 2:
    return float(np.mean(pairs)) if pairs else 0.0, -np.inf, np.inf
  mean = float(np.mean(pairs))
  spread = float(np.std(pairs, ddof=1)) / len(pairs) ** 0.5
  reach = float(stats.t.ppf(0.975, len(pairs) - 1)) * spread
  return mean, mean - reach, mean + reach


def verdict(found: tuple[float, float, float], seeds: int) -> str:
  """What a difference to the baseline shows, in words."""
  mean, low, high = (100 * x for x in found)
  if seeds < 3 or low == high:  # equal by chance: success comes in steps
    return f"{mean:+.1f} points, which {seeds} such seeds cannot tell from 0"
  between = f"{low:+.1f} to {high:+.1f} points"
  if high < 0:
    return f"worse than the baseline ({between}): it matters here"
  if low > 0:
    return f"better than the baseline ({between})"
  return f"no difference can be shown ({mean:+.1f} points, {between})"


def write(
  workdir: pathlib.Path,
  results: Mapping[str, Mapping[int, Result]],
  seeds: Sequence[int],
) -> None:
  """Writes ablations.json and ablations.html."""
  baseline = results[BASELINE]
  final = {n: {s: r.rl for s, r in of.items()} for n, of in results.items()}
  pace = {
    n: {s: float(np.mean(r.learning)) for s, r in of.items() if r.learning}
    for n, of in results.items()
  }
  rows, words, charts, record = [], [], [], {}
  for name, of in results.items():
    if not of:
      continue
    found = difference(final[name], final[BASELINE])
    faster = difference(pace[name], pace[BASELINE])
    common = len(of.keys() & baseline.keys())
    record[name] = {
      "strict_success": final[name],
      "difference": found[0],
      "training_success": pace[name],
      "training_difference": faster[0],
    }
    if common > 1:
      record[name]["interval"] = found[1:]
      record[name]["training_interval"] = faster[1:]
    itself = name == BASELINE
    rows.append(
      [
        name,
        ", ".join(percent(of[s].rl) for s in seeds if s in of),
        percent(float(np.mean([r.rl for r in of.values()]))),
        "" if itself else _points(found),
        percent(float(np.mean(list(pace[name].values() or [0.0])))),
        "" if itself else _points(faster),
        f"{np.mean([r.explained_variance for r in of.values()]):.2f}",
      ]
    )
    if not itself:
      words.append(
        f"{name}: on held-out tasks {verdict(found, common)}; while training "
        f"{verdict(faster, common)}."
      )
      charts.append(
        line_chart(
          name,
          [_mean_curve(BASELINE, baseline), _mean_curve(name, of)],
          x_label="PPO iteration",
          unit="success while training",
          bounds=(0.0, 1.0),
          show=percent,
        )
      )
  done = sum(map(len, results.values()))
  head = (
    f"<p>{done} runs of {len(results) * len(seeds)}. Each begins from the "
    "warm start of its seed; a difference is paired by seed, its interval is "
    "95 % of Student's t over the seeds. Held-out success is of the last "
    "policy; training success is the mean over all iterations, which is less "
    "noisy and says who learns sooner. One interval in twenty misses: among so "
    "many, expect one that does.</p>"
  )
  columns = [
    "ablation", "held-out success by seed", "mean", "against the baseline",
    "training success", "against the baseline", "explained variance",
  ]  # fmt: skip
  sections = [
    ("What was measured", head + table(columns, rows, caption="All runs")),
    (
      "What it says",
      "<ul>" + "".join(f"<li>{plain(w)}</li>" for w in words) + "</ul>",
    ),
    ("How they learn", f'<div class="charts">{"".join(charts)}</div>'),
  ]
  write_atomically(workdir / "ablations.json", json.dumps(record, indent=2))
  write_atomically(
    workdir / "ablations.html", page("t1jax: ablations", sections)
  )


def _points(found: tuple[float, float, float]) -> str:
  mean, low, high = (100 * x for x in found)
  spread = f" [{low:+.1f}, {high:+.1f}]" if np.isfinite(low) else ""
  return f"{mean:+.1f}{spread}"


def _mean_curve(name: str, of: Mapping[int, Result]) -> Series:
  curves = [r.learning for r in of.values() if r.learning]
  shortest = min(map(len, curves), default=0)
  means = np.mean([c[:shortest] for c in curves], axis=0) if curves else []
  return Series(name, [(i, float(y)) for i, y in enumerate(means, start=1)])


if __name__ == "__main__":
  sys.exit(configs.run_program(main, expected=(MetricsError,)))
