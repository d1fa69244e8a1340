"""Are the tasks sound, cheap, and only to be solved by looking?

    python -m t1jax.bench.tasks [--instances=100] [--families=a,b]

One JSON line. For every family: how often the oracle passes and a do-nothing
agent does, the share of assertions that the latter passes, the verifier's
CPU time, the oracle's turns, and the success of the best *fixed* command
list, one whose text does not depend on what was printed. The lists tried:

* verbatim: the oracle of another instance;
* templated: an oracle's shape with every name that the instruction shows
  bound to this instance, and every name that only looking would show filled
  by a rule: another instance's value, the most common one, a wildcard, or a
  fixed or random choice among what the environment offers (`Draft.choices`:
  the rule is told which candidates are plausible).

A program that looks by itself (command substitution, xargs) observes and is
not a fixed list. The best of many rules is chosen on the same instances that
it is scored on, so the figure errs on the high side.

Commands run in a scratch copy of the environment with /app mapped onto it,
not in a sandbox: nothing here is typed by a model.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence

from t1jax.tasks.dockerfile import copied_files, parse
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import Draft, Family, make_draft, make_task
from t1jax.tasks.overlap import overlaps
from t1jax.tasks.task import Task

_NUM_CHOICE_RULES = 6
_NUM_SOURCES = 5
_MAX_SHAPES = 4
_LOOKS = frozenset(("cat", "find", "grep", "ls", "readlink", "sort"))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What one run of the verifier said; `cpu_seconds` is user + system."""

  passed: dict[str, bool]
  strict: bool
  cpu_seconds: float


class Scratch:
  """A task's environment, built once in a temporary directory.

  `run` starts from a fresh copy each time. Only for environments of this
  package: commands run with the caller's rights.
  """

  def __init__(self, task: Task, root: pathlib.Path) -> None:
    self.task = task
    self.app, self.logs = root / "app", root / "logs"
    self._base = root / "base"
    self._base.mkdir(parents=True)
    steps = parse(task.environment["Dockerfile"].decode())
    for step in steps:
      if step.kind == "copy":
        placed = copied_files(step, task.room("environment"))
        for path, (data, mode) in placed.items():
          file = self._base / path.removeprefix("/app/")
          file.parent.mkdir(parents=True, exist_ok=True)
          file.write_bytes(data)
          file.chmod(mode)
    setup = [step.args[0] for step in steps if step.kind == "run"]
    if setup:
      self._shell(setup, self._base)
    source = self._mapped(task.tests["verify.py"].decode(), self.app)
    self._verify = root / "verify.py"
    self._verify.write_text(source)
    self._code = compile(source, "verify.py", "exec")

  def _mapped(self, text: str, app: pathlib.Path) -> str:
    text = text.replace("/logs/verifier", str(self.logs))
    return re.sub(r"/app\b", str(app), text)

  def _shell(self, commands: Sequence[str], app: pathlib.Path) -> None:
    script = self._mapped("\n".join(commands), app)
    subprocess.run(
      ["/bin/sh", "-c", script],
      cwd=app,
      env={"PATH": "/usr/bin:/bin", "HOME": str(app.parent), "LC_ALL": "C"},
      stdin=subprocess.DEVNULL,
      stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL,
      timeout=20,
      check=False,
    )

  def run(self, commands: Sequence[str]) -> None:
    """Resets the environment and runs the commands in one shell."""
    for place in (self.app, self.logs):
      shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(self._base, self.app, symlinks=True)
    if commands:
      self._shell(commands, self.app)

  def verify(self) -> Verdict:
    """Runs the verifier as tests/test.sh does, in a Python of its own."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
      ["/usr/bin/env", "python3", "-I", "-S", str(self._verify)],
      env={"PATH": "/usr/bin:/bin"},
      check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    user = after.ru_utime - before.ru_utime
    return self._read(user + after.ru_stime - before.ru_stime)

  def solved_by(self, commands: Sequence[str]) -> bool:
    """Strict success of a command list; the verifier runs in this process."""
    self.run(commands)
    with contextlib.chdir(self.app):
      exec(self._code, {"__name__": "__main__"})
    return self._read(0.0).strict

  def _read(self, cpu_seconds: float) -> Verdict:
    report = json.loads((self.logs / "ctrf.json").read_text())["results"]
    passed = {t["name"]: t["status"] == "passed" for t in report["tests"]}
    strict = (self.logs / "reward.txt").read_text().strip() == "1"
    if strict != all(passed.values()):
      raise AssertionError(f"{self.task.name}: reward and assertions differ")
    return Verdict(passed, strict, cpu_seconds)


def visible_slots(draft: Draft) -> dict[str, str]:
  """The slots whose values the instruction shows."""
  shown = set(re.findall(r"\w+", draft.instruction))
  return {
    slot: value
    for slot, value in draft.slots.items()
    if slot not in draft.choices and value in shown
  }


def shape(draft: Draft) -> tuple[str, ...]:
  """The oracle with each slot's value replaced by {slot}."""
  found = []
  for command in draft.oracle:
    # Longest first: a value may hold another ("lemon.tar", "lemon").
    for slot, value in sorted(
      draft.slots.items(), key=lambda item: -len(item[1])
    ):
      end = r"(?!\d)" if value[-1].isdigit() else r"(?!\w)"
      command = re.sub(
        rf"(?<![\w{{]){re.escape(value)}{end}", f"{{{slot}}}", command
      )
    found.append(command)
  return tuple(found)


def bind(template: Iterable[str], values: dict[str, str]) -> tuple[str, ...]:
  """Fills a shape; a slot without a value becomes a wildcard."""
  return tuple(
    re.sub(r"\{(\w+)\}", lambda m: values.get(m[1], "*"), command)
    for command in template
  )


def acts(commands: Iterable[str]) -> tuple[str, ...]:
  """The commands without those that only print.

  Nobody reads what a fixed list prints, so they change nothing but the time
  that this benchmark takes.
  """
  return tuple(
    command
    for command in commands
    if command.split()[0] not in _LOOKS
    or re.search(r">|-exec|-delete|-o\b", command)
  )


def _number(*parts: object) -> int:
  digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
  return int.from_bytes(digest)


def blind_lists(
  drafts: Sequence[Draft], index: int
) -> dict[tuple[str, object], tuple[str, ...]]:
  """Every fixed list tried on instance `index`: rule -> commands."""
  draft, lists = drafts[index], {}
  sources = [j for j in range(min(len(drafts), _NUM_SOURCES + 1)) if j != index]
  for j in sources:
    lists["verbatim", j] = drafts[j].oracle
  common: dict[str, str] = {}
  for slot in {slot for d in drafts for slot in d.slots}:
    seen = [d.slots[slot] for d in drafts if slot in d.slots]
    common[slot] = collections.Counter(seen).most_common(1)[0][0]
  counted = collections.Counter(shape(d) for d in drafts)
  shown = visible_slots(draft)
  for s, (template, _) in enumerate(counted.most_common(_MAX_SHAPES)):
    fills: dict[tuple[str, object], dict[str, str]] = {
      ("wildcard", 0): {},
      ("common", 0): common,
      ("random", 0): {
        slot: options[_number(index, slot) % len(options)]
        for slot, options in draft.choices.items()
      },
    }
    for j in sources:
      fills["other", j] = dict(drafts[j].slots)
    for rule in range(_NUM_CHOICE_RULES):
      fills["choice", rule] = {
        slot: sorted(options)[_number(rule, slot) % len(options)]
        for slot, options in draft.choices.items()
      }
    for (kind, number), values in fills.items():
      lists[kind, (s, number)] = bind(template, {**values, **shown})
  return lists


def measure(family: Family, instances: int, split: str = "heldout") -> dict:
  """The figures of one family, over its first `instances` of a split."""
  drafts = [make_draft(family, split, i) for i in range(instances)]
  oracle, nothing, shares, cpu = 0, 0, [], []
  wins: collections.Counter = collections.Counter()
  memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
  with tempfile.TemporaryDirectory(dir=memory) as root:
    for i, draft in enumerate(drafts):
      place = pathlib.Path(root) / str(i)
      scratch = Scratch(make_task(family, split, i), place)
      scratch.run(draft.oracle)
      verdict = scratch.verify()
      oracle += verdict.strict
      cpu.append(verdict.cpu_seconds)
      scratch.run(())
      verdict = scratch.verify()
      nothing += verdict.strict
      shares.append(statistics.mean(verdict.passed.values()))
      known: dict[tuple[str, ...], bool] = {}
      for rule, whole in blind_lists(drafts, i).items():
        commands = acts(whole)
        if commands not in known:
          known[commands] = scratch.solved_by(commands)
        wins[rule] += known[commands]
      shutil.rmtree(place)
  (kind, _), best = max(wins.items(), key=lambda item: item[1])
  return {
    "domain": family.domain,
    "oracle_pass": oracle / instances,
    "nop_pass": nothing / instances,
    "nop_assertion_share": round(statistics.mean(shares), 4),
    "verifier_cpu_ms": round(1e3 * statistics.median(cpu), 1),
    "median_turns": statistics.median(len(d.oracle) for d in drafts),
    "best_fixed_list": best / instances,
    "best_fixed_kind": kind if best else None,
  }


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--instances", type=int, default=100, help="per family (%(default)s)"
  )
  parser.add_argument("--families", default="", help="names, with commas")
  args = parser.parse_args(argv)
  if args.instances < 2:
    parser.error(f"--instances={args.instances}: expected 2 or more")
  wanted = [name for name in args.families.split(",") if name]
  unknown = set(wanted) - {family.name for family in FAMILIES}
  if unknown:
    parser.error(
      f"--families: no family {sorted(unknown)}; known: "
      f"{sorted(family.name for family in FAMILIES)}"
    )
  chosen = [f for f in FAMILIES if not wanted or f.name in wanted]
  with concurrent.futures.ProcessPoolExecutor(
    max_workers=min(len(chosen), os.cpu_count() or 1),
    mp_context=multiprocessing.get_context("spawn"),
  ) as pool:
    results = list(
      pool.map(_measure_named, [(f.name, args.instances) for f in chosen])
    )
  found = {f.name: r for f, r in zip(chosen, results)}
  line = {
    "bench": "tasks",
    "instances": args.instances,
    "num_families": len(found),
    "num_domains": len({r["domain"] for r in results}),
    "oracle_pass": min(r["oracle_pass"] for r in results),
    "nop_pass": max(r["nop_pass"] for r in results),
    "best_fixed_list": max(r["best_fixed_list"] for r in results),
    "verifier_cpu_ms": max(r["verifier_cpu_ms"] for r in results),
    "median_turns": statistics.median(r["median_turns"] for r in results),
    "heldout_overlaps": len(
      overlaps(
        _slots(chosen, "heldout", 200),
        [*_slots(chosen, "train", 500), *_slots(chosen, "pretrain", 500)],
      )
    ),
    "families": found,
  }
  json.dump(line, sys.stdout)
  sys.stdout.write("\n")


def _slots(
  families: Sequence[Family], split: str, count: int
) -> list[tuple[str, str, dict[str, str]]]:
  return [
    (f"{f.name}-{split}-{i:05d}", f.name, dict(make_draft(f, split, i).slots))
    for f in families
    for i in range(count)
  ]


def _measure_named(job: tuple[str, int]) -> dict:
  # Families hold functions that don't pickle by value: send the name.
  name, instances = job
  return measure(next(f for f in FAMILIES if f.name == name), instances)


if __name__ == "__main__":
  main()
