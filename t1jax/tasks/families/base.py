"""How a family makes tasks: vocabulary, drafts, splits, the verifier.

A family is one kind of job ("rename the file that holds a word"). Its
`generate` draws names and values from a generator and returns a `Draft`;
`make_task` turns the draft into a Harbor task. Which split an instance
belongs to is decided by its slots, not by its index: the combination of
decisive names and values hashes into one of five parts, the first part is
held out, and training draws from the other four only.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from t1jax.tasks.task import Task, TaskConfig, TaskError

# Short common nouns. None is a part of another, so that `grep amber` never
# matches a longer name and each becomes one piece of the tokenizer.
_VOCABULARY = """
  acorn amber anchor basil birch bison candle cedar coral daisy delta dragon
  eagle ember falcon fjord flint garnet ginger grove harbor hazel heron indigo
  island ivory jasper kettle koala ladder lemon lotus magnet mango maple needle
  nectar ocean olive orchid panda pearl pepper quartz raven river rocket saddle
  sable sugar tiger tulip urchin velvet violet walnut willow yarrow yucca zebra
  quail north bamboo cactus
"""
WORDS: tuple[str, ...] = tuple(_VOCABULARY.split())
NUMBERS: tuple[str, ...] = tuple(str(n) for n in range(10, 100))
SPLITS: tuple[str, ...] = ("train", "heldout", "pretrain")
KINDS: tuple[str, ...] = ("semantic", "hygiene", "gate")

_FIFTHS = 5
_MAX_DRAWS = 200


@dataclasses.dataclass(frozen=True)
class Check:
  """One assertion of the verifier.

  Attributes:
    name: unique within the task; what the report shows.
    kind: "semantic"; "hygiene" (a do-nothing agent passes it already);
      "gate" (decides success, earns nothing).
    code: a Python expression, or lines that `return` a truth value. It runs
      in /app and may call what `VERIFIER` defines: read, text, exists,
      names, executable, unchanged, tree, ORIGINAL. An exception is a fail.
  """

  name: str
  kind: str
  code: str

  def __post_init__(self) -> None:
    if self.kind not in KINDS:
      raise TaskError(
        f"check {self.name!r}: kind is {self.kind!r}, expected one of {KINDS}"
      )


@dataclasses.dataclass(frozen=True)
class Draft:
  """What `generate` returns: a task before it becomes a directory.

  Attributes:
    instruction: one sentence or two, as the agent reads it.
    files: path relative to /app -> bytes, or (bytes, mode). Only the
      executable bit of a mode is kept.
    oracle: one command per turn, without the final submit.
    checks: at least four, of all three kinds.
    slots: decisive names and values by role. A value that the instruction
      does not show must be found by looking.
    choices: for each slot found by looking, the values that a guess without
      looking would draw from, the right one included. The benchmark's
      strongest blind policy uses them.
    setup: shell lines that run once in /app when the environment is built
      (a process: leave it empty where files are enough).
  """

  instruction: str
  files: Mapping[str, bytes | tuple[bytes, int]]
  oracle: tuple[str, ...]
  checks: tuple[Check, ...]
  slots: Mapping[str, str]
  choices: Mapping[str, tuple[str, ...]] = dataclasses.field(
    default_factory=dict
  )
  setup: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
  """A kind of task. `generate` must draw only from the generator it gets."""

  name: str
  domain: str
  generate: Callable[[np.random.Generator], Draft]


def words(rng: np.random.Generator, count: int) -> list[str]:
  """`count` different words, in random order."""
  return [WORDS[i] for i in rng.permutation(len(WORDS))[:count]]


def numbers(rng: np.random.Generator, count: int) -> list[str]:
  """`count` different two-digit numbers, in random order."""
  return [NUMBERS[i] for i in rng.permutation(len(NUMBERS))[:count]]


def pick(rng: np.random.Generator, options: Sequence[str]) -> str:
  """One of `options`, all alike."""
  return options[int(rng.integers(len(options)))]


def lines(*rows: str) -> bytes:
  """The rows as a text file, each ended by a newline."""
  return "".join(row + "\n" for row in rows).encode()


def slot_key(family: str, slots: Mapping[str, str]) -> str:
  """The family and its decisive combination, written in one way only."""
  return json.dumps([family, sorted(slots.items())])


def is_heldout(family: str, slots: Mapping[str, str]) -> bool:
  """True for the fifth of all slot combinations that training never sees."""
  digest = hashlib.blake2b(slot_key(family, slots).encode(), digest_size=8)
  return int.from_bytes(digest.digest(), "little") % _FIFTHS == 0


def make_draft(family: Family, split: str, index: int) -> Draft:
  """The draft of instance `index`: the same on every machine and every time.

  Raises:
    TaskError: an unknown split, a negative index, or a family whose slots
      never fall into the split's part (too few combinations).
  """
  if split not in SPLITS:
    raise TaskError(f"unknown split {split!r}, expected one of {SPLITS}")
  if index < 0:
    raise TaskError(f"task index is {index}, expected 0 or more")
  # The split is part of the seed, so pretrain and train differ although
  # both draw from the same four fifths.
  label = f"{family.name}/{split}/{index}".encode()
  seed = int.from_bytes(hashlib.blake2b(label, digest_size=16).digest())
  rng = np.random.default_rng(seed)
  for _ in range(_MAX_DRAWS):
    draft = family.generate(rng)
    if is_heldout(family.name, draft.slots) == (split == "heldout"):
      return draft
  raise TaskError(
    f"family {family.name!r}: none of {_MAX_DRAWS} draws fits split "
    f"{split!r}; give its slots more combinations"
  )


def make_task(family: Family, split: str, index: int) -> Task:
  """Instance `index` of a family as a Harbor task; see `make_draft`."""
  draft = make_draft(family, split, index)
  name = f"{family.name}-{split}-{index:05d}"
  kinds = {kind: [] for kind in KINDS}
  for check in draft.checks:
    kinds[check.kind].append(check.name)
  count = len(draft.checks)
  if count < 4 or not all(kinds.values()):
    raise TaskError(
      f"task {name}: {count} checks of kinds "
      f"{[k for k, v in kinds.items() if v]}, expected at least 4 checks "
      "and all three kinds"
    )
  if len({check.name for check in draft.checks}) != count:
    raise TaskError(f"task {name}: two checks have the same name")

  environment = {"Dockerfile": _dockerfile(draft)}
  executables = ["tests/test.sh", "solution/solve.sh"]
  original = {}
  for path, content in draft.files.items():
    content, mode = content if isinstance(content, tuple) else (content, 0o644)
    environment[f"files/{path}"] = original[path] = content
    if mode & 0o100:
      executables.append(f"environment/files/{path}")
  return Task(
    name=name,
    instruction=draft.instruction + "\n",
    family=family.name,
    domain=family.domain,
    environment=environment,
    tests={
      "test.sh": b"#!/bin/sh\nexec python3 -I -S /tests/verify.py\n",
      "verify.py": _verifier(draft.checks, original).encode(),
    },
    solution={
      "solve.sh": lines("#!/bin/sh", "cd /app", *draft.oracle),
    },
    executables=tuple(sorted(executables)),
    config=TaskConfig(
      agent_timeout_sec=120.0,
      verifier_timeout_sec=30.0,
      memory_mb=256,
      storage_mb=64,
      workdir="/app",
      allow_internet=False,
    ),
    oracle=tuple(draft.oracle),
    slots=dict(draft.slots),
    num_assertions=count,
    hygiene=tuple(kinds["hygiene"]),
    gates=tuple(kinds["gate"]),
  )


def _dockerfile(draft: Draft) -> bytes:
  # An image that has both python3, for the verifier, and git.
  text = "FROM python:3.12-bookworm\nWORKDIR /app\n"
  if draft.files:
    text += "COPY files/ /app/\n"
  if draft.setup:
    text += f"RUN <<'SETUP'\nset -e\n{draft.setup.strip()}\nSETUP\n"
  return text.encode()


# The verifier is a program of its own: it may import neither this package
# nor anything outside json and os, which is what keeps it to a few
# milliseconds. Agents choose what lies at a path, so a file is opened
# without following a link and without waiting for a pipe's writer.
VERIFIER = '''\
"""Checks the state that the agent left in /app."""

import json
import os

APP = "/app"
LOGS = "/logs/verifier"
LIMIT = 1 << 20
ORIGINAL = {original}


def read(path):
  """The bytes of a regular file, at most LIMIT of them."""
  fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
  with open(fd, "rb") as file:
    return file.read(LIMIT)


def text(path):
  """A file as text, without white space at its end."""
  return read(path).decode().rstrip()


def exists(path):
  return os.path.lexists(path)


def names(path="."):
  """Sorted names in a directory."""
  return sorted(os.listdir(path))


def executable(path):
  return bool(os.lstat(path).st_mode & 0o100)


def unchanged(*paths):
  """True when each of these files of the environment is as it was."""
  return all(read(path) == ORIGINAL[path] for path in paths)


def tree(path="."):
  """Every file below a directory: path -> text without trailing space.

  A link shows as "-> TARGET"; what starts with ".git" is left out.
  """
  found = {{}}
  for folder, folders, files in os.walk(path):
    folders[:] = [name for name in folders if name != ".git"]
    for name in files + folders:
      full = os.path.normpath(os.path.join(folder, name))
      if os.path.islink(full):
        found[full] = "-> " + os.readlink(full)
      elif name in files:
        found[full] = text(full)
  return found


{functions}

CHECKS = [
{table}]


def main():
  try:
    os.chdir(APP)
    present = True
  except OSError:
    # The agent removed or locked the directory: every check has failed.
    present = False
  tests = []
  for name, kind, function in CHECKS:
    try:
      passed = present and bool(function())
    except Exception:
      passed = False
    status = "passed" if passed else "failed"
    tests.append(
      {{"name": name, "status": status, "duration": 0, "type": kind}}
    )
  count = sum(test["status"] == "passed" for test in tests)
  summary = {{
    "tests": len(tests),
    "passed": count,
    "failed": len(tests) - count,
    "pending": 0,
    "skipped": 0,
    "other": 0,
    "start": 0,
    "stop": 0,
  }}
  results = {{"tool": {{"name": "t1jax"}}, "summary": summary, "tests": tests}}
  os.makedirs(LOGS, exist_ok=True)
  with open(LOGS + "/ctrf.json", "w") as file:
    json.dump({{"results": results}}, file)
  with open(LOGS + "/reward.txt", "w") as file:
    file.write("1\\n" if count == len(tests) else "0\\n")


if __name__ == "__main__":
  main()
'''


def _verifier(checks: Sequence[Check], original: Mapping[str, bytes]) -> str:
  functions, table = [], []
  for index, check in enumerate(checks):
    try:
      compile(check.code, check.name, "eval")
      body = f"  return {check.code.strip()}"
    except SyntaxError:
      body = "\n".join(f"  {line}" for line in check.code.strip().split("\n"))
    functions.append(f"def check_{index}():\n{body}\n")
    table.append(f"  ({check.name!r}, {check.kind!r}, check_{index}),\n")
  source = VERIFIER.format(
    original=repr(dict(original)),
    functions="\n\n".join(functions),
    table="".join(table),
  )
  compile(source, "verify.py", "exec")
  return source
