"""A Harbor task: what it holds, and its directory, read and written.

    task.toml              times, sizes, environment variables, metadata
    instruction.md         what the agent is asked
    environment/           Dockerfile and the files that it copies
    tests/test.sh          the verifier's entry point
    solution/solve.sh      the oracle, where there is one
    solution/commands.json the oracle as one command per turn (ours only)

Whatever is wrong with a directory is one `TaskError` that names the file,
the field, what was expected and what to do.
"""

import base64
import dataclasses
import json
import math
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

_ROOMS = ("environment", "tests", "solution")
_COMMANDS = "commands.json"
_OWN = ("family", "domain", "slots", "num_assertions", "hygiene", "gates")
_SIZES_MB = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024 * 1024}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class TaskError(ValueError):
  """A task that can't be used: what, where, and what was expected."""


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """Limits and variables of task.toml; Harbor's defaults.

  Times are seconds of wall clock, sizes are MiB. `workdir` "" leaves it to
  the Dockerfile. `docker_image` is a prebuilt image, kept for the record.
  """

  agent_timeout_sec: float = 600.0
  verifier_timeout_sec: float = 600.0
  build_timeout_sec: float = 600.0
  cpus: int = 1
  memory_mb: int = 2048
  storage_mb: int = 10240
  workdir: str = ""
  allow_internet: bool = True
  docker_image: str = ""
  environment_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  verifier_env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  solution_env: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Task:
  """One task. File mappings go from a path relative to their room to bytes.

  Attributes:
    name: the directory's name, unique within a set of tasks.
    instruction: the text of instruction.md, its last newline included.
    family, domain: where the task comes from; "" where it doesn't say.
    environment: files under environment/, the Dockerfile among them.
    tests: files under tests/; test.sh is the entry point.
    solution: files under solution/, without commands.json; may be empty.
    executables: paths (room and all) that carry an executable bit.
    config: limits and variables.
    oracle: one command per turn, without the final submit; may be empty.
    slots: decisive names and values by role, for the overlap audit.
    num_assertions: how many assertions the verifier makes; 0 = unknown.
    hygiene, gates: names of assertions of these kinds; the rest is semantic.
    metadata: whatever else [metadata] holds (author, difficulty, tags).
  """

  name: str
  instruction: str
  environment: Mapping[str, bytes]
  tests: Mapping[str, bytes]
  solution: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
  executables: tuple[str, ...] = ()
  family: str = ""
  domain: str = ""
  config: TaskConfig = dataclasses.field(default_factory=TaskConfig)
  oracle: tuple[str, ...] = ()
  slots: Mapping[str, str] = dataclasses.field(default_factory=dict)
  num_assertions: int = 0
  hygiene: tuple[str, ...] = ()
  gates: tuple[str, ...] = ()
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    where = f"task {self.name!r}"
    if not _NAME.fullmatch(self.name):
      raise TaskError(
        f"{where}: a name is letters, digits, '.', '_' and '-', and starts "
        "with a letter or a digit"
      )
    if not self.instruction.strip():
      raise TaskError(f"{where}: instruction.md is empty; say what to do")
    if "test.sh" not in self.tests:
      raise TaskError(
        f"{where}: tests/test.sh is missing; it is the verifier's entry point"
      )
    if "Dockerfile" not in self.environment:
      raise TaskError(
        f"{where}: environment/Dockerfile is missing; it builds the "
        "environment (a task of a prebuilt image only is not supported)"
      )
    for room in _ROOMS:
      for path in getattr(self, room):
        parts = path.split("/")
        if any(part in ("", ".", "..") for part in parts) or "\0" in path:
          raise TaskError(
            f"{where}: {room}/ holds the path {path!r}; expected a relative "
            "path that stays inside"
          )

  def kind(self, assertion: str) -> str:
    """The kind of an assertion: "semantic", "hygiene" or "gate"."""
    if assertion in self.hygiene:
      return "hygiene"
    return "gate" if assertion in self.gates else "semantic"

  def room(self, name: str) -> dict[str, tuple[bytes, int]]:
    """Files of one room ("environment", ...) as path -> (bytes, mode)."""
    return {
      path: (data, 0o755 if f"{name}/{path}" in self.executables else 0o644)
      for path, data in getattr(self, name).items()
    }


def read_task(path: str | pathlib.Path) -> Task:
  """Reads a task directory.

  Raises:
    TaskError: the directory or a part of it is missing, unreadable,
      malformed, or asks for what is not supported (several steps, compose).
  """
  root = pathlib.Path(path).absolute()
  if not root.is_dir():
    raise TaskError(f"{root}: no such task directory")
  document = _toml(root / "task.toml")
  if "steps" in document:
    raise TaskError(
      f"{root / 'task.toml'}: [[steps]]: tasks of several steps are not "
      "supported; split it into one directory per step"
    )
  executables: list[str] = []
  rooms = {room: _files(root, room, executables) for room in _ROOMS}
  for name in ("docker-compose.yaml", "docker-compose.yml"):
    if name in rooms["environment"]:
      raise TaskError(
        f"{root / 'environment' / name}: compose files are not supported; "
        "use one Dockerfile"
      )
  oracle: tuple[str, ...] = ()
  solution = rooms["solution"]
  if _COMMANDS in solution:
    oracle = _oracle(root / "solution" / _COMMANDS, solution.pop(_COMMANDS))
  table = _Table(root / "task.toml", document)
  own = table.sub("metadata")
  return Task(
    name=root.name,
    instruction=_text(root / "instruction.md"),
    environment=rooms["environment"],
    tests=rooms["tests"],
    solution=solution,
    executables=tuple(sorted(executables)),
    family=own.string("family", ""),
    domain=own.string("domain", ""),
    config=_config(table),
    oracle=oracle,
    slots=own.strings("slots"),
    num_assertions=int(own.number("num_assertions", 0, low=0)),
    hygiene=own.names("hygiene"),
    gates=own.names("gates"),
    metadata={k: _plain(v) for k, v in own.values.items() if k not in _OWN},
  )


def write_task(task: Task, directory: str | pathlib.Path) -> pathlib.Path:
  """Writes `directory`/`task.name` and returns it.

  The same task is the same bytes every time. Raises TaskError when the
  place is taken or can't be written.
  """
  root = pathlib.Path(directory) / task.name
  outputs = {
    "task.toml": _document(task).encode(),
    "instruction.md": task.instruction.encode(),
  }
  for room in _ROOMS:
    for path, data in getattr(task, room).items():
      outputs[f"{room}/{path}"] = data
  if task.oracle:
    listed = json.dumps(list(task.oracle), indent=1, ensure_ascii=False)
    outputs[f"solution/{_COMMANDS}"] = f"{listed}\n".encode()
  try:
    root.mkdir(parents=True)
    for path, data in outputs.items():
      file = root / path
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_bytes(data)
      file.chmod(0o755 if path in task.executables else 0o644)
  except FileExistsError as error:
    raise TaskError(
      f"{error.filename}: already there; choose another directory or remove it"
    ) from None
  except OSError as error:
    raise TaskError(f"{error.filename}: {error.strerror}") from None
  return root


def to_bytes(task: Task) -> bytes:
  """The task as one line of JSON; what is not UTF-8 is base64."""
  record = dataclasses.asdict(task)
  for room in _ROOMS:
    record[room] = {k: _pack(v) for k, v in record[room].items()}
  text = json.dumps(record, sort_keys=True, separators=(",", ":"))
  return text.encode()


def from_bytes(data: bytes) -> Task:
  """The task that `to_bytes` wrote. Raises TaskError on anything else."""
  try:
    record = json.loads(data)
    for room in _ROOMS:
      record[room] = {k: _unpack(v) for k, v in record[room].items()}
    record["config"] = TaskConfig(**record["config"])
    for key in ("executables", "oracle", "hygiene", "gates"):
      record[key] = tuple(record[key])
    return Task(**record)
  except TaskError:
    raise
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise TaskError(
      f"task record of {len(data)} bytes: {error!r}; expected the JSON that "
      "to_bytes writes; build the data set again"
    ) from None


def _pack(data: bytes) -> str | dict[str, str]:
  try:
    return data.decode()
  except UnicodeDecodeError:
    return {"base64": base64.b64encode(data).decode()}


def _unpack(value: str | dict[str, str]) -> bytes:
  if isinstance(value, str):
    return value.encode()
  return base64.b64decode(value["base64"], validate=True)


def _plain(value: Any) -> Any:
  """A TOML value as JSON has it: dates become strings."""
  if isinstance(value, dict):
    return {k: _plain(v) for k, v in value.items()}
  if isinstance(value, list):
    return [_plain(item) for item in value]
  return value if isinstance(value, (str, bool, int, float)) else str(value)


class _Table:
  """A table of task.toml whose fields are read with their types checked."""

  def __init__(self, path: pathlib.Path, values: Any, prefix: str = "") -> None:
    self.path, self.prefix, self.values = path, prefix, values
    if not isinstance(values, dict):
      raise TaskError(
        f"{path}: {prefix.rstrip('.')}: expected a table, found {values!r}"
      )

  def sub(self, key: str) -> "_Table":
    return _Table(self.path, self.values.get(key, {}), f"{self.prefix}{key}.")

  def fail(self, key: str, expected: str) -> TaskError:
    return TaskError(
      f"{self.path}: {self.prefix}{key} is {self.values[key]!r}, "
      f"expected {expected}"
    )

  def number(self, key: str, default: float, low: float = 1e-3) -> float:
    value = self.values.get(key, default)
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not math.isfinite(value) or value < low:
      least = "above 0" if low > 0 else "of 0 or more"
      raise self.fail(key, f"a finite number {least}")
    return value

  def megabytes(self, key: str, old_key: str, default: int) -> int:
    # Before schema 1.0, sizes were strings with a unit: memory = "2G".
    old = self.values.get(old_key)
    if key in self.values or old is None:
      return int(self.number(key, default, low=1))
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", str(old), re.I)
    size = match and float(match[1]) * _SIZES_MB[match[2].lower()]
    if not size or size < 1:
      raise self.fail(old_key, f'a size of at least 1M such as "2G" (or {key})')
    return int(size)

  def boolean(self, key: str, default: bool) -> bool:
    value = self.values.get(key, default)
    if not isinstance(value, bool):
      raise self.fail(key, "true or false")
    return value

  def string(self, key: str, default: str) -> str:
    value = self.values.get(key, default)
    if not isinstance(value, str):
      raise self.fail(key, "a string")
    return value

  def strings(self, key: str) -> dict[str, str]:
    value = self.values.get(key, {})
    if not isinstance(value, dict) or not all(
      isinstance(item, str) for item in value.values()
    ):
      raise self.fail(key, "a table of strings")
    return dict(value)

  def names(self, key: str) -> tuple[str, ...]:
    value = self.values.get(key, [])
    if not isinstance(value, list) or not all(
      isinstance(item, str) for item in value
    ):
      raise self.fail(key, "a list of strings")
    return tuple(value)


def _config(table: _Table) -> TaskConfig:
  default = TaskConfig()
  agent, verifier = table.sub("agent"), table.sub("verifier")
  env = table.sub("environment")
  allow = env.boolean("allow_internet", default.allow_internet)
  if "network_mode" in env.values:
    mode = env.string("network_mode", "")
    if mode not in ("public", "none"):
      raise env.fail("network_mode", '"public" or "none"')
    allow = mode == "public"
  system = env.string("os", "linux")
  if system != "linux":
    raise env.fail("os", '"linux"; nothing else is supported')
  return TaskConfig(
    agent_timeout_sec=float(
      agent.number("timeout_sec", default.agent_timeout_sec)
    ),
    verifier_timeout_sec=float(
      verifier.number("timeout_sec", default.verifier_timeout_sec)
    ),
    build_timeout_sec=float(
      env.number("build_timeout_sec", default.build_timeout_sec)
    ),
    cpus=int(env.number("cpus", default.cpus, low=1)),
    memory_mb=env.megabytes("memory_mb", "memory", default.memory_mb),
    storage_mb=env.megabytes("storage_mb", "storage", default.storage_mb),
    workdir=env.string("workdir", ""),
    allow_internet=allow,
    docker_image=env.string("docker_image", ""),
    environment_env=env.strings("env"),
    verifier_env=verifier.strings("env"),
    solution_env=table.sub("solution").strings("env"),
  )


def _text(path: pathlib.Path) -> str:
  try:
    return path.read_bytes().decode()
  except UnicodeDecodeError as error:
    raise TaskError(
      f"{path}: byte {error.start} is not UTF-8; save it as UTF-8"
    ) from None
  except FileNotFoundError:
    raise TaskError(f"{path}: missing; every task directory has one") from None
  except OSError as error:
    raise TaskError(f"{path}: {error.strerror}") from None


def _toml(path: pathlib.Path) -> dict[str, Any]:
  text = _text(path)
  try:
    return tomllib.loads(text)
  except tomllib.TOMLDecodeError as error:
    raise TaskError(f"{path}: not valid TOML: {error}") from None


def _files(
  root: pathlib.Path, room: str, executables: list[str]
) -> dict[str, bytes]:
  base, found = root / room, {}
  if room == "tests" and not base.is_dir():
    raise TaskError(f"{base}: missing; the verifier is tests/test.sh")
  for file in sorted(base.rglob("*")):
    path = file.relative_to(base).as_posix()
    if file.is_symlink():
      raise TaskError(
        f"{file}: is a link; put a copy there, tasks hold plain files only"
      )
    if file.is_dir():
      continue
    try:
      found[path] = file.read_bytes()
      if file.stat().st_mode & 0o100:
        executables.append(f"{room}/{path}")
    except OSError as error:
      raise TaskError(f"{file}: {error.strerror}") from None
  return found


def _oracle(path: pathlib.Path, data: bytes) -> tuple[str, ...]:
  try:
    commands = json.loads(data)
  except ValueError as error:
    raise TaskError(f"{path}: not valid JSON: {error}") from None
  if not isinstance(commands, list) or not all(
    isinstance(command, str) and command.strip() for command in commands
  ):
    raise TaskError(f"{path}: expected a list of commands, one per turn")
  return tuple(commands)


def _document(task: Task) -> str:
  config = task.config
  environment: dict[str, Any] = {
    "build_timeout_sec": config.build_timeout_sec,
    "cpus": config.cpus,
    "memory_mb": config.memory_mb,
    "storage_mb": config.storage_mb,
    "allow_internet": config.allow_internet,
  }
  if config.workdir:
    environment["workdir"] = config.workdir
  if config.docker_image:
    environment["docker_image"] = config.docker_image
  if config.environment_env:
    environment["env"] = dict(config.environment_env)
  verifier: dict[str, Any] = {"timeout_sec": config.verifier_timeout_sec}
  if config.verifier_env:
    verifier["env"] = dict(config.verifier_env)
  own = {
    "family": task.family,
    "domain": task.domain,
    "num_assertions": task.num_assertions,
    "hygiene": list(task.hygiene),
    "gates": list(task.gates),
    "slots": dict(task.slots),
  }
  document: dict[str, Any] = {
    "version": "1.0",
    "metadata": {**task.metadata, **{k: v for k, v in own.items() if v}},
    "verifier": verifier,
    "agent": {"timeout_sec": config.agent_timeout_sec},
    "environment": environment,
  }
  if config.solution_env:
    document["solution"] = {"env": dict(config.solution_env)}
  return "\n".join(_emit(document, "")).lstrip("\n") + "\n"


def _emit(table: Mapping[str, Any], prefix: str) -> list[str]:
  plain = {k: v for k, v in table.items() if not isinstance(v, Mapping)}
  out = [f"{_key(k)} = {_value(v)}" for k, v in plain.items()]
  for key, value in table.items():
    if isinstance(value, Mapping):
      full = f"{prefix}{_key(key)}"
      out += ["", f"[{full}]", *_emit(value, f"{full}.")]
  return out


def _key(key: str) -> str:
  return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
  if isinstance(value, str):
    # JSON's escapes are TOML's, but TOML also wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
  if isinstance(value, bool):
    return "true" if value else "false"
  if isinstance(value, list):
    return "[" + ", ".join(_value(item) for item in value) + "]"
  if isinstance(value, Mapping):
    items = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
    return "{" + items + "}"
  return str(value)
