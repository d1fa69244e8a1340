"""Reads a Dockerfile into steps; nothing is run here.

The part of the language that task environments use: one stage of FROM,
WORKDIR, COPY, ENV, USER and RUN (shell form, exec form, heredocs, line
continuations). CMD, ENTRYPOINT, EXPOSE and LABEL do not touch the file
system and are passed over. Whatever else stands there is an error with its
line, never silently skipped.
"""

import dataclasses
import fnmatch
import json
import posixpath
import re
from collections.abc import Mapping

from t1jax.tasks.task import TaskError

_PASSED_OVER = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER")
_HEREDOC = re.compile(r"(?<!<)<<(?!<)(-?)\s*(['\"]?)([A-Za-z_][\w.]*)\2")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})", re.ASCII)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class DockerfileError(TaskError):
  """A Dockerfile that can't be used: the line and what was expected."""


@dataclasses.dataclass(frozen=True)
class Step:
  """One instruction; paths are absolute and variables are expanded.

  kind and args:
    "from"     (image,)
    "workdir"  (directory,)
    "copy"     (source, ..., target); sources lie under environment/, a
               target that ends in "/" is a directory
    "env"      (name, value); one step for each name
    "run"      (script,); to be fed to a shell, heredocs included
    "exec"     (program, argument, ...); the exec form of RUN
    "user"     (name,)
  `line` counts from 1. `mode` is COPY's --chmod.
  """

  kind: str
  args: tuple[str, ...]
  line: int
  mode: int | None = None


def parse(text: str) -> list[Step]:
  """The steps of a Dockerfile, in order.

  Raises:
    DockerfileError: an unknown or unsupported instruction or flag, a second
      stage, a heredoc without an end, or no FROM at the top.
  """
  steps: list[Step] = []
  env, workdir = {"PATH": _PATH}, "/"
  rows = text.split("\n")
  at = 0
  while at < len(rows):
    line = at + 1
    if not rows[at].strip() or rows[at].lstrip().startswith("#"):
      at += 1
      continue
    joined, at = _logical_line(rows, at)
    word, _, rest = joined.strip().partition(" ")
    word, rest = word.upper(), rest.strip()
    if word in _PASSED_OVER:
      continue
    if not rest:
      raise DockerfileError(f"Dockerfile line {line}: {word} needs arguments")
    if (word == "FROM") != (not steps):
      fault = "a second FROM" if steps else f"{word} before FROM"
      raise DockerfileError(
        f"Dockerfile line {line}: {fault}; expected one stage that starts "
        "with FROM"
      )
    if word == "RUN":
      step, at = _run(rest, rows, at, line)
      steps.append(step)
    elif word == "FROM":
      if rest.startswith("--"):
        rest = rest.partition(" ")[2].strip()
      steps.append(Step("from", (rest.split()[0],), line))
    elif word == "WORKDIR":
      target = " ".join(_words(rest, env, line))
      workdir = posixpath.normpath(posixpath.join(workdir, target))
      steps.append(Step("workdir", (workdir,), line))
    elif word == "USER":
      steps.append(Step("user", (" ".join(_words(rest, env, line)),), line))
    elif word == "ENV":
      # Docker expands all pairs of a line against what stood before it.
      pairs = _pairs(rest, env, line)
      env.update(pairs)
      steps += [Step("env", pair, line) for pair in pairs]
    elif word == "COPY":
      steps.append(_copy(rest, env, workdir, line))
    else:
      raise DockerfileError(
        f"Dockerfile line {line}: {word} is not supported; expected FROM, "
        "WORKDIR, COPY, ENV, USER or RUN"
      )
  if not steps:
    raise DockerfileError("Dockerfile: empty; expected FROM at the top")
  return steps


def copied_files(
  step: Step, environment: Mapping[str, tuple[bytes, int]]
) -> dict[str, tuple[bytes, int]]:
  """What a "copy" step puts where: absolute path -> (bytes, mode).

  Args:
    step: a step of kind "copy".
    environment: the build context, as `Task.room("environment")` gives it.

  Raises:
    DockerfileError: a source matches nothing.
  """
  *sources, target = step.args
  placed: dict[str, tuple[bytes, int]] = {}
  for source in sources:
    pattern = posixpath.normpath(source.lstrip("/") or ".")
    found: dict[str, str] = {}
    for path in environment:
      if fnmatch.fnmatchcase(path, pattern) and pattern.count(
        "/"
      ) == path.count("/"):
        into = len(sources) > 1 or target.endswith("/") or pattern != path
        found[path] = posixpath.basename(path) if into else ""
        continue
      depth = 0 if pattern == "." else pattern.count("/") + 1
      parts = path.split("/")
      folder = "/".join(parts[:depth]) or "."
      if depth < len(parts) and fnmatch.fnmatchcase(folder, pattern):
        found[path] = "/".join(parts[depth:])
    if not found:
      raise DockerfileError(
        f"Dockerfile line {step.line}: COPY {source}: nothing of this name "
        "under environment/"
      )
    for path, below in found.items():
      data, mode = environment[path]
      full = posixpath.join(target, below) if below else target
      placed[posixpath.normpath(full)] = (
        data,
        mode if step.mode is None else step.mode,
      )
  return placed


def _logical_line(rows: list[str], at: int) -> tuple[str, int]:
  """Joins continuations; comments and blank lines between them fall out."""
  parts: list[str] = []
  while at < len(rows):
    row = rows[at].rstrip("\r")
    at += 1
    if parts and (not row.strip() or row.lstrip().startswith("#")):
      continue
    bare = row.rstrip(" \t")
    if not bare.endswith("\\"):
      parts.append(row)
      break
    parts.append(bare[:-1])
  return "".join(parts), at


def _run(rest: str, rows: list[str], at: int, line: int) -> tuple[Step, int]:
  if rest.startswith("--"):
    raise DockerfileError(
      f"Dockerfile line {line}: RUN {rest.split()[0]}: flags are not "
      "supported; leave it out"
    )
  if rest.startswith("["):
    return Step("exec", _json_words(rest, line), line), at
  script = rest
  for dash, _, end in _HEREDOC.findall(rest):
    body: list[str] = []
    while True:
      if at >= len(rows):
        raise DockerfileError(
          f"Dockerfile line {line}: the heredoc {end} has no end; expected a "
          f"line that holds {end} alone"
        )
      row = rows[at].rstrip("\r")
      at += 1
      if (row.lstrip("\t") if dash else row) == end:
        break
      body.append(row)
    if _HEREDOC.fullmatch(rest):
      if body and body[0].startswith("#!"):
        raise DockerfileError(
          f"Dockerfile line {line}: a heredoc with its own interpreter is "
          "not supported; write RUN python3 <<EOF"
        )
      indent = "\t" if dash else ""
      return Step("run", ("\n".join(r.lstrip(indent) for r in body),), line), at
    script += "\n" + "\n".join([*body, end])
  return Step("run", (script,), line), at


def _copy(rest: str, env: Mapping[str, str], workdir: str, line: int) -> Step:
  mode = None
  while rest.startswith("--"):
    flag, _, rest = rest.partition(" ")
    rest = rest.strip()
    match = re.fullmatch(r"--chmod=([0-7]{3,4})", flag)
    if not match:
      raise DockerfileError(
        f"Dockerfile line {line}: COPY {flag} is not supported; only "
        "--chmod=MODE is"
      )
    mode = int(match[1], 8)
  if "<<" in rest:
    raise DockerfileError(
      f"Dockerfile line {line}: COPY of a heredoc is not supported; put the "
      "file under environment/"
    )
  if rest.startswith("["):
    paths = list(_json_words(rest, line))
  else:
    paths = _words(rest, env, line)
  if len(paths) < 2:
    raise DockerfileError(
      f"Dockerfile line {line}: COPY needs a source and a target"
    )
  target = paths[-1]
  full = posixpath.normpath(posixpath.join(workdir, target))
  if target.endswith(("/", "/.")) or target in (".", ".."):
    full = full.rstrip("/") + "/"
  return Step("copy", (*paths[:-1], full), line, mode)


def _pairs(
  rest: str, env: Mapping[str, str], line: int
) -> list[tuple[str, str]]:
  if "=" not in rest.split()[0]:
    name, _, value = rest.partition(" ")
    value = " ".join(_words(value, env, line))
    if not value:
      raise DockerfileError(
        f"Dockerfile line {line}: ENV {name} has no value; write {name}=VALUE"
      )
    return [(name, value)]
  pairs = []
  for part in _words(rest, env, line):
    name, equals, value = part.partition("=")
    if not equals or not name:
      raise DockerfileError(
        f"Dockerfile line {line}: ENV {part!r}; expected NAME=VALUE"
      )
    pairs.append((name, value))
  return pairs


def _words(text: str, env: Mapping[str, str], line: int) -> list[str]:
  """Splits at white space, takes quotes off and expands variables.

  $NAME, ${NAME} and ${NAME:-default}, but not between single quotes; a name
  that is not set is "".
  """
  words: list[str] = []
  word, quote, at = None, "", 0
  while at < len(text):
    char, step = text[at], 1
    add: str | None = char
    variable = _VARIABLE.match(text, at) if quote != "'" else None
    if variable:
      name = variable[1] or variable[2]
      add, step = env.get(name, "") or variable[3] or "", len(variable[0])
    elif char == "\\" and quote != "'" and at + 1 < len(text):
      # Between double quotes a backslash protects only these three.
      literal = quote and text[at + 1] not in '"$\\'
      add, step = text[at : at + 2] if literal else text[at + 1], 2
    elif char == quote:
      add, quote = "", ""
    elif not quote and char in "'\"":
      add, quote = "", char
    elif not quote and char.isspace():
      add = None
    if add is not None:
      word = (word or "") + add
    elif word is not None:
      words.append(word)
      word = None
    at += step
  if quote:
    raise DockerfileError(
      f"Dockerfile line {line}: no closing quote; check the quotes"
    )
  return words if word is None else [*words, word]


def _json_words(text: str, line: int) -> tuple[str, ...]:
  try:
    found = json.loads(text)
  except ValueError:
    found = None
  if (
    not isinstance(found, list)
    or not found
    or not all(isinstance(item, str) for item in found)
  ):
    raise DockerfileError(
      f'Dockerfile line {line}: {text!r}; expected ["word", "word"]'
    )
  return tuple(found)
