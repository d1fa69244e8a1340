"""Runs a task's own tests on the state that an agent left, and reads them.

What the agent could have prepared must not count (LESSONS V1): its processes
are killed first, the tests arrive only then, in a mount namespace of their own
where system directories are pristine and `/tests`, `/logs` and HOME are new
and empty; the environment is clean; what the tests left running is killed
before any result is read. Results come from CTRF, else from pytest's own
words; `reward.json`, then `reward.txt`, only say what success was claimed.

A task may set two switches in task.toml [metadata]:
`verifier_keep_processes` (its services must still run; they stay unable to
see or trace the tests) and `verifier_keep_system` (it asks for changes to
system directories, so they stay in force, shims included).

A verifier without a result may lack its tools, or the agent may have seen to
it (no memory, no working directory, a device in place of a file). The same
tests in a new sandbox of the same task tell: if they give a result there, the
agent has failed; if not, the episode has no verdict (`infra`). So no agent can
turn its failure into ours, whatever it breaks.

What this cannot do: a test that itself runs the agent's program gives it the
test's rights for that long.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from t1jax.sandbox import base, environment
from t1jax.sandbox.local import LocalSandbox
from t1jax.tasks.task import Task, TaskError

_HOME, _TOOLS = "/verifier/home", "/verifier/bin"
# Variables of the image that make programs run what the agent may have
# written.
_WITHHELD = re.compile(
  r"PATH|HOME|ENV|BASH_ENV|SHELLOPTS|IFS|LD_.*|PYTHON.*|PERL.*|RUBY.*|NODE_.*"
  r"|GIT_.*|PYTEST_.*"
)
_CONFIGURATIONS = ("pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini",
                   "setup.cfg")  # fmt: skip
_MAX_RESULT = 4 << 20
_MAX_OUTPUT = 1 << 20
# `python3 -m pytest` would import from the working directory, the agent's.
_SAFE_PYTHON = b"""#!/bin/sh
PATH=%s
if [ "$1 $2" = "-m pytest" ]; then
  shift 2
  exec python3 -c 'import sys; del sys.path[0]; sys.argv[0] = "pytest"
import runpy; runpy.run_module("pytest", run_name="__main__", alter_sys=True)
' "$@"
fi
exec python3 "$@"
"""
_NO_TOOLS = (
  b"command not found", b"No module named pytest", b"pytest: not found",
  b"Could not resolve host", b"Temporary failure in name resolution",
  b"Network is unreachable",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Assertion:
  """One check of a verifier, read on its own.

  `kind` is "semantic", "hygiene" (a do-nothing agent passes it) or "gate"
  (decides success, earns nothing).
  """

  name: str
  kind: str
  passed: bool


@dataclasses.dataclass(frozen=True)
class Verification:
  """What a verifier found.

  Attributes:
    assertions: each check; empty when the tests only gave a reward.
    strict: every assertion passed and no claimed reward says otherwise; with
      no assertion, the claimed reward is 1.
    reward_file: the claimed reward (`reward.json`, then `reward.txt`), finite,
      or None.
    seconds: wall time of all of it.
    error: what went wrong, or None.
    infra: the verifier could not do its work; the episode has no verdict.
    output: what the tests printed (head and tail).
  """

  assertions: tuple[Assertion, ...]
  strict: bool
  reward_file: float | None
  seconds: float
  error: str | None = None
  infra: bool = False
  output: bytes = b""


async def verify(
  sandbox: LocalSandbox,
  task: Task,
  *,
  tools: Mapping[str, base.FileSpec] | None = None,
  env: Mapping[str, str] | None = None,
) -> Verification:
  """Runs `tests/test.sh` of a task against a sandbox's state.

  The sandbox can be used, and verified again, afterwards; the agent's
  processes are gone (unless the task keeps them: then after the tests).

  Args:
    sandbox: a started sandbox, as the agent left it.
    task: the task.
    tools: programs for the tests only (name -> content), first on their PATH.
    env: variables for the tests, over those of task.toml.

  Returns:
    A verdict in every case: a dead sandbox or a broken verifier is `infra`.
  """
  started = time.monotonic()
  tools, env = tools or {}, env or {}
  dead = False
  try:
    verdict = _judge(task, *await _run_tests(sandbox, task, tools, env))
  except (base.SandboxError, OSError) as error:
    dead = isinstance(error, base.SandboxDied)
    verdict = Verification((), False, None, 0.0, str(error), infra=True)
  doubtful = verdict.infra and not dead
  if doubtful and await _gives_a_result(sandbox, task, tools, env):
    error = f"{verdict.error}; where no agent has been it gives one"
    verdict = dataclasses.replace(verdict, infra=False, error=error)
  return dataclasses.replace(verdict, seconds=time.monotonic() - started)


async def _gives_a_result(
  used: LocalSandbox,
  task: Task,
  tools: Mapping[str, base.FileSpec],
  env: Mapping[str, str],
) -> bool:
  """Whether the tests can do their work where no agent has been."""
  sandbox = used.untouched()
  try:
    await sandbox.start()
    await environment.install_environment(sandbox, task)
    run = await _run_tests(sandbox, task, tools, env)
  except (base.SandboxError, TaskError, OSError):
    return False
  finally:
    await sandbox.close()
  return not _judge(task, *run).infra


async def _run_tests(
  sandbox: LocalSandbox,
  task: Task,
  tools: Mapping[str, base.FileSpec],
  env: Mapping[str, str],
) -> tuple[base.ExecResult, dict[str, bytes]]:
  """Runs the tests; returns how they ended and the result files there are."""
  await sandbox.open_verifier(
    keep_processes=task.metadata.get("verifier_keep_processes") is True,
    keep_system=task.metadata.get("verifier_keep_system") is True,
  )
  tests = task.room("tests")
  files: dict[str, base.FileSpec] = {f"/tests/{p}": f for p, f in tests.items()}
  if not any(name in tests for name in _CONFIGURATIONS):
    # The search for a configuration ends here, not in the agent's parents.
    files["/tests/pytest.ini"] = b"[pytest]\n"
  extra = dict(tools)
  if b"-m pytest" in task.tests["test.sh"] and "python3" not in extra:
    safe = _SAFE_PYTHON % sandbox.default_path.encode()
    extra |= {"python3": (safe, 0o755), "python": (safe, 0o755)}
  files |= {f"{_TOOLS}/{name}": spec for name, spec in extra.items()}
  await sandbox.upload(files, view="verifier")
  path = sandbox.default_path
  image = {k: v for k, v in sandbox.env.items() if not _WITHHELD.fullmatch(k)}
  result = await sandbox.exec_verifier(
    ["/bin/bash", "/tests/test.sh"],
    timeout_sec=task.config.verifier_timeout_sec,
    cwd=sandbox.workdir,
    env={
      "LANG": "C.UTF-8",
      "TERM": "dumb",
      "PYTHONNOUSERSITE": "1",
      "PYTHONDONTWRITEBYTECODE": "1",
      "PYTEST_ADDOPTS": "-p no:cacheprovider --rootdir=/tests",
      **image,
      "PATH": f"{_TOOLS}:{path}" if extra else path,
      "HOME": _HOME,
      **task.config.verifier_env,
      **env,
    },
    output_bytes=_MAX_OUTPUT,
  )
  await sandbox.kill_all()
  found = {}
  for name in ("ctrf.json", "reward.json", "reward.txt"):
    try:
      found[name] = await sandbox.download(
        f"/logs/verifier/{name}", _MAX_RESULT, view="verifier"
      )
    except base.SandboxDied:
      raise
    except base.SandboxError as error:
      if "No such file" not in str(error):
        found[name] = b""  # a directory, a pipe, too large: malformed
  await sandbox.close_verifier()
  return result, found


def _judge(
  task: Task, result: base.ExecResult, found: Mapping[str, bytes]
) -> Verification:
  """The verdict, from how the tests ended and what they wrote."""
  faults: list[str] = []
  statuses = _ctrf(found, faults)
  if not statuses:
    statuses = read_pytest(result.text)
  assertions = tuple(
    Assertion(name, task.kind(name), passed)
    for name, passed in statuses.items()
  )
  reward = _reward(found, faults)
  if result.timed_out:
    faults.insert(
      0, f"the verifier did not end within its {result.timeout_sec:g} s"
    )
  passed = all(a.passed for a in assertions)
  strict = passed and (reward is None or reward >= 1.0)
  if not assertions:
    strict = reward is not None and reward >= 1.0
  strict = strict and not result.timed_out
  infra = False
  if not assertions and not result.timed_out and not strict:
    says_pytest = any(b"pytest" in data for data in task.tests.values())
    lacks = [word for word in _NO_TOOLS if word in result.output]
    if reward is None or says_pytest or lacks:
      infra = True
      faults.insert(0, _no_result(result, lacks))
  error = "; ".join(faults) or None
  return Verification(
    assertions, strict, reward, 0.0, error, infra, result.output[-20_000:]
  )


def _no_result(result: base.ExecResult, lacks: list[bytes]) -> str:
  lines = result.text.strip().splitlines()
  if lacks:
    lines = [line for line in lines if lacks[0].decode() in line]
  last = lines[-1][:200] if lines else "it printed nothing"
  return (
    f"the verifier gave no result (exit code {result.exit_code}, "
    f"{result.outcome}): {last}"
  )


def _ctrf(found: Mapping[str, bytes], faults: list[str]) -> dict[str, bool]:
  """name -> passed from a CTRF report; {} when there is none to be read."""
  if "ctrf.json" not in found:
    return {}
  try:
    tests = json.loads(found["ctrf.json"])["results"]["tests"]
    statuses: dict[str, bool] = {}
    for test in tests:
      name, status = test["name"], test["status"]
      if not isinstance(name, str):
        raise TypeError(f"a test's name is {name!r}")
      if status not in ("skipped", "pending"):
        statuses[name] = statuses.get(name, True) and status == "passed"
    return statuses
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    faults.append(f"ctrf.json is malformed: {error!r}"[:300])
    return {}


def _reward(found: Mapping[str, bytes], faults: list[str]) -> float | None:
  """The claimed reward: reward.json, then reward.txt; finite only."""
  for name in ("reward.json", "reward.txt"):
    if name not in found:
      continue
    try:
      text = found[name].decode()
      value: Any = text.strip() if name == "reward.txt" else json.loads(text)
      if isinstance(value, dict):
        value = value["reward"]
      if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise TypeError(f"{value!r} is not a number")
      reward = float(value)
      if not math.isfinite(reward):
        raise ValueError(f"{reward} is not finite")
      return reward
    except (
      ValueError,
      KeyError,
      TypeError,
      RecursionError,
      OverflowError,
    ) as e:
      faults.append(f"{name} is malformed: {e!r}"[:300])
  return None


_STATUSES = frozenset({"PASSED", "FAILED", "ERROR", "XFAIL", "XPASS"})
_SUMMARY = "short test summary info"
_SECTIONS = frozenset({
  "FAILURES", "ERRORS", "PASSES", "warnings summary", _SUMMARY,
})  # fmt: skip


def read_pytest(text: str) -> dict[str, bool]:
  """name -> passed from what `pytest -rA` or `pytest -v` printed.

  Only pytest's own lines count: those of the last short summary, else the
  progress lines before the first section that repeats what tests (and the
  programs that they ran) printed. A name is "file.py::test". Takes time linear
  in the text, which the agent may have written: no backtracking.
  """
  statuses: dict[str, bool] = {}

  def note(node: str, status: str) -> None:
    path, colons, test = node.partition("::")
    name = path.rpartition("/")[2] + colons + test
    good = status in ("PASSED", "XPASS", "XFAIL")
    statuses[name] = statuses.get(name, True) and good

  lines = [line.rstrip() for line in text.splitlines()]
  titles = [(i, t) for i, line in enumerate(lines) if (t := _title(line))]
  first = titles[0][0] if titles else len(lines)
  for line in lines[:first]:
    before, bracket, percent = line.rpartition("[")
    if bracket and percent.rstrip("]").strip().rstrip("%").isdigit():
      line = before.rstrip()
    node, _, status = line.rpartition(" ")
    file, colons, test = node.partition("::")
    if status in _STATUSES and colons and test and " " not in file:
      note(node, status)
  summaries = [i for i, title in titles if title == _SUMMARY]
  for line in lines[summaries[-1] + 1 :] if summaries else ():
    status, _, rest = line.partition(" ")
    if status in _STATUSES and (node := _listed(rest)):
      note(node, status)
  return statuses


def _title(line: str) -> str:
  """The words of a line such as "==== FAILURES ====", if it parts sections."""
  if not (line.startswith("=") and line.endswith("=")):
    return ""
  title = line.strip("=")
  if not (title.startswith(" ") and title.endswith(" ")):
    return ""
  title = title.strip()
  final = title[:1].isdigit() and " in " in title
  return title if final or title in _SECTIONS else ""


def _listed(rest: str) -> str:
  """The node of "node" or "node - message"; only "[...]" may hold spaces."""
  start = rest.find("[")
  space = rest.find(" ")
  end = space if space >= 0 else len(rest)
  if "::" in rest[: max(start, 0)] and start < end:
    end = start
    while (end := rest.find("]", end) + 1) and end < len(rest):
      if rest.startswith(" - ", end):
        break
  if end == len(rest) or rest.startswith(" - ", end):
    return rest[:end]
  return ""
