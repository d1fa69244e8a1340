"""Public tasks through the local sandbox: their solution, then nothing.

    python -m t1jax.bench.shared_tasks [--tasks=../shared/tasks] [--only=NAME]

For each task directory the task's own solution must earn 1 from the task's
own tests and a do-nothing agent 0. Tests that fetch `uv` from the net get
stand-ins for `curl`, `apt-get`, `uv` and `uvx`; the Python packages that they
and the Dockerfile name come from the Python index into a cache on the host,
shown read-only. A table, then one JSON line; a task that cannot run says what
it lacks. Public tasks are for checking only and are never trained on.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Iterable

from t1jax.rewards.verifier import Verification, verify
from t1jax.sandbox import base, environment
from t1jax.sandbox.farm import Farm
from t1jax.sandbox.local import LocalSandbox
from t1jax.tasks.task import Task, TaskError, read_task

SITE = "/opt/site"
# Only the recorder of the tasks' first harness uses these.
UNNEEDED = ("asciinema", "tmux")
# Their agent leaves services that the tests talk to, or installs software.
SERVICES = (
  "endless__08f3a532", "endless__f3b41d88", "tb1__jupyter-notebook-server",
  "tb2__configure-git-webserver",
)  # fmt: skip

_INSTALL = re.compile(
  r"(?:\bpip3? install|\buv add)((?:[ \t]+(?:\\\n)?[^\s;&|<>]+)+)"
  r"|--with[ =]([^\s;&|<>]+)"
)
_PYTHON_IMAGE = re.compile(rb"^FROM .*\bpython\b", re.MULTILINE)
_REQUIREMENT = re.compile(r"[A-Za-z][\w.-]*(\[[\w,]+\])?([=~<>!]=[\w.]+)?")

# `curl ... | sh` of the installer becomes a script that makes the file which
# the tests source; anything else is the real curl's business.
_CURL = b"""#!/bin/sh
case "$*" in
  *astral.sh*) echo 'mkdir -p "$HOME/.local/bin"; : > "$HOME/.local/bin/env"';;
  *) exec /usr/bin/curl "$@";;
esac
"""
_NOTHING = b"#!/bin/sh\nexit 0\n"
# The packages are there already: installing does nothing, running sets the
# path. `-c` puts the working directory first, which is the agent's: drop it.
_PYTEST = b"""#!/bin/sh
export PYTHONPATH="$T1JAX_SITE"
exec /usr/bin/env python3 -c 'import sys; del sys.path[0]
sys.argv[0] = "pytest"
import runpy; runpy.run_module("pytest", run_name="__main__", alter_sys=True)
' "$@"
"""
_PYTHON = b"""#!/bin/sh
if [ "$1 $2" = "-m pytest" ]; then shift 2; exec /verifier/bin/pytest "$@"; fi
PATH=/usr/local/bin:/usr/bin:/bin
export PYTHONPATH="$T1JAX_SITE"
exec python3 "$@"
"""
_UV = b"""#!/bin/bash
run() {
  while [ $# -gt 0 ]; do
    case "$1" in
      --with | --python | -p) shift 2;;
      -*) shift;;
      *) break;;
    esac
  done
  case "$1" in
    pytest) shift; exec /verifier/bin/pytest "$@";;
    python | python3) shift; exec /verifier/bin/uv-python "$@";;
  esac
  export PYTHONPATH="$T1JAX_SITE"
  exec "$@"
}
case "$(basename "$0") $1" in
  "uv venv")
    place=${2:-.venv}; rm -rf "$place"; mkdir -p "$place/bin"
    for name in python python3; do
      cp /verifier/bin/uv-python "$place/bin/$name"
    done
    echo "PATH=\\"$(realpath "$place")/bin:\\$PATH\\"" > "$place/bin/activate";;
  "uv run") shift; run "$@";;
  "uvx "*) run "$@";;
esac
"""
STAND_INS: dict[str, base.FileSpec] = {
  "curl": (_CURL, 0o755),
  "apt-get": (_NOTHING, 0o755),
  "apt": (_NOTHING, 0o755),
  "pytest": (_PYTEST, 0o755),
  "uv": (_UV, 0o755),
  "uvx": (_UV, 0o755),
  "uv-python": (_PYTHON, 0o755),
}


@dataclasses.dataclass
class Row:
  """One task's line in the table."""

  task: str
  oracle: float | None = None
  nothing: float | None = None
  assertions: str = ""
  seconds: float = 0.0
  lacks: str = ""

  @property
  def good(self) -> bool:
    """Solution 1.0 and do-nothing 0.0."""
    return self.oracle == 1.0 and self.nothing == 0.0


def requirements(*scripts: bytes) -> tuple[str, ...]:
  """Python packages that shell scripts install with pip or uv."""
  found = set()
  for script in scripts:
    for match in _INSTALL.finditer(script.decode("utf-8", "replace")):
      for word in (match[1] or match[2]).replace("\\\n", " ").split():
        if _REQUIREMENT.fullmatch(word) and not word.endswith(".txt"):
          found.add(word)
  return tuple(sorted(found))


class Site:
  """Directories of Python packages, one per set of requirements."""

  def __init__(self, cache: pathlib.Path) -> None:
    self.cache = cache
    cache.mkdir(parents=True, exist_ok=True)
    text = subprocess.run(
      ["/usr/bin/env", "PATH=/usr/local/bin:/usr/bin:/bin", "python3", "-c",
       "import sys; print('%d.%d' % sys.version_info[:2])"],
      capture_output=True, text=True,
    ).stdout  # fmt: skip
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    self.version = text.strip() or here

  def install(self, wanted: Iterable[str]) -> str:
    """Fetches packages; returns the directory's path inside.

    Raises base.SandboxError with pip's last word when it cannot.
    """
    names = sorted(wanted)
    key = hashlib.sha256(repr((self.version, names)).encode()).hexdigest()[:16]
    place = self.cache / key
    if not (place / "complete").exists():
      place.mkdir(exist_ok=True)
      if names:
        done = subprocess.run(
          [sys.executable, "-m", "pip", "install", "--quiet", "--target",
           str(place), "--python-version", self.version,
           "--only-binary=:all:", "--upgrade", "--isolated", *names],
          capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode != 0:
          said = [x for x in done.stderr.splitlines() if "ERROR" in x]
          raise base.SandboxError(
            f"Python packages {' '.join(names)}: {said[-1:] or 'pip failed'}"
          )
      (place / "complete").touch()
    return f"{SITE}/{key}"


async def prepare(sandbox: LocalSandbox, task: Task, packages: str) -> None:
  """The task's environment, with its Python packages on the path."""
  asked = ["python3", "-c", "import site; print(site.getsitepackages()[0])"]
  where = (await sandbox.exec(asked, timeout_sec=60)).text.strip()
  files: dict[str, base.FileSpec] = {
    f"{where}/t1jax.pth": f"{packages}\n".encode()
  }
  if _PYTHON_IMAGE.search(task.environment["Dockerfile"]):
    # Such an image has it under this name, most hosts do not.
    files["/usr/local/bin/python"] = (b'#!/bin/sh\nexec python3 "$@"\n', 0o755)
  await sandbox.upload(files)
  await environment.install_environment(sandbox, task, unneeded=UNNEEDED)
  await sandbox.seal()


async def solve(sandbox: LocalSandbox, task: Task) -> base.ExecResult:
  """Runs the task's own solution."""
  files = {f"/solution/{p}": f for p, f in task.room("solution").items()}
  await sandbox.upload({**files, **environment.installers()})
  return await sandbox.exec(
    ["bash", "/solution/solve.sh"],
    timeout_sec=task.config.agent_timeout_sec,
    env={
      **task.config.solution_env,
      "PATH": f"{environment.TOOLS}:{sandbox.default_path}",
    },
  )


def reward(verdict: Verification) -> float:
  """What the harness would record: the claim, unless an assertion failed."""
  if verdict.infra:
    raise base.SandboxError(f"its verifier did not run: {verdict.error}")
  return 1.0 if verdict.strict else min(verdict.reward_file or 0.0, 0.99)


async def play(farm: Farm, site: Site, task: Task, row: Row) -> None:
  """Fills a row; raises what the task lacks."""
  scripts = [task.environment["Dockerfile"], task.solution.get("solve.sh", b"")]
  mine = await asyncio.to_thread(site.install, requirements(*scripts))
  tests = await asyncio.to_thread(
    site.install, requirements(task.tests["test.sh"])
  )
  if task.name in SERVICES:
    switches = {"verifier_keep_processes": True, "verifier_keep_system": True}
    task = dataclasses.replace(task, metadata={**task.metadata, **switches})
  limits = base.Limits(
    memory_mb=task.config.memory_mb,
    disk_mb=min(task.config.storage_mb, 2048),
    processes=256,
  )
  for oracle in (False, True):
    if oracle and "solve.sh" not in task.solution:
      raise base.SandboxError("a solution: its solution/ has no solve.sh")
    async with farm.sandbox(limits) as sandbox:
      await prepare(sandbox, task, mine)
      solved = await solve(sandbox, task) if oracle else None
      verdict = await verify(
        sandbox, task, tools=STAND_INS, env={"T1JAX_SITE": tests}
      )
      if solved is None:
        row.nothing = reward(verdict)
        continue
      row.oracle = reward(verdict)
      passed = sum(a.passed for a in verdict.assertions)
      row.assertions = f"{passed}/{len(verdict.assertions)}"
      if row.oracle < 1.0:
        row.lacks = await _asked_for(sandbox) or _last_words(solved, verdict)


def _last_words(solved: base.ExecResult, verdict: Verification) -> str:
  """Why a solution did not pass, as far as it and the tests say."""
  failed = [a.name for a in verdict.assertions if not a.passed]
  lines = solved.text.strip().splitlines()
  absent = [line for line in lines if "not found" in line or "Error" in line]
  return (
    f"its solution ended with {solved.exit_code} ({solved.outcome}): "
    f"{(absent or lines or ['no output'])[-1][:200]}; failed: "
    f"{', '.join(failed)}"
  )


async def _asked_for(sandbox: LocalSandbox) -> str:
  """What the solution wanted installed and the host lacks."""
  try:
    missing = await sandbox.download(f"{environment.TOOLS}/missing")
  except base.SandboxError:
    return ""
  return "; ".join(missing.decode("utf-8", "replace").splitlines())


async def run_all(
  directories: list[pathlib.Path], cache: pathlib.Path
) -> list[Row]:
  """Plays each task directory, one after the other."""
  site = Site(cache)
  rows = []
  async with Farm(max_sandboxes=2, binds={SITE: str(cache)}) as farm:
    for directory in directories:
      row = Row(directory.name)
      started = time.perf_counter()
      try:
        await play(farm, site, read_task(directory), row)
      except (TaskError, base.SandboxError) as error:
        row.lacks = str(error)
      row.seconds = time.perf_counter() - started
      rows.append(row)
      print(_line(row), file=sys.stderr, flush=True)
  return rows


def _line(row: Row) -> str:
  def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"

  return (
    f"{row.task:40} {shown(row.oracle):>6} {shown(row.nothing):>8} "
    f"{row.assertions:>7} {row.seconds:6.1f} s  {row.lacks}"
  )


def cache_directory() -> pathlib.Path:
  """Where fetched packages are kept between runs."""
  home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
  return pathlib.Path(home, "t1jax", "python-packages")


def main() -> None:
  """Entry point."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    "--tasks",
    default="../shared/tasks",
    help="directory of Harbor task directories (%(default)s)",
  )
  parser.add_argument("--only", default="", help="part of a task's name")
  options = parser.parse_args()
  root = pathlib.Path(options.tasks)
  if not root.is_dir():
    sys.exit(f"{root}: no such directory; give --tasks=DIRECTORY")
  directories = sorted(
    d for d in root.iterdir() if d.is_dir() and options.only in d.name
  )
  print(f"{'task':40} {'oracle':>6} {'nothing':>8}", file=sys.stderr)
  try:
    rows = asyncio.run(run_all(directories, cache_directory()))
  except base.SandboxError as error:
    sys.exit(str(error))
  print(
    json.dumps(
      {
        "tasks": len(rows),
        "oracle_1_nothing_0": sum(row.good for row in rows),
        "lacking": {row.task: row.lacks for row in rows if not row.good},
      }
    )
  )


if __name__ == "__main__":
  main()
