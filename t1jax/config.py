"""Configs, run directories, and how a program ends on a user's mistake.

A config is a Python file with `get_config(arg=None)` that returns a
`ConfigDict`. `--config=configs/tiny.py:smoke` loads it with "smoke" as `arg`;
`--config.rl.lr=1e-4` sets one field of what it returned, checked by type. All
of it happens before anything is allocated, and what is wrong is one line.
"""

import contextlib
import dataclasses
import difflib
import errno
import fcntl
import importlib.util
import inspect
import json
import math
import os
import re
import shutil
import socket
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags
from etils import epath
from ml_collections import config_dict, config_flags

from t1jax import paths

CONFIG_FILE = "config.json"
# A directory with one of these holds a run, whether or not it says which.
_RUN_FILES = ("checkpoints", "metrics.jsonl", "summary.json")
# What the user can do where the disk refuses.
_DISK_ADVICE = {
  errno.ENOSPC: "free some space, then run the same command",
  errno.EDQUOT: "free some space, then run the same command",
  errno.EROFS: "choose a --workdir that is not mounted read-only",
  errno.EACCES: "run as the owner of it, or choose another --workdir",
  errno.EPERM: "run as the owner of it, or choose another --workdir",
}


class UserError(ValueError):
  """Something that whoever started the program can put right.

  The message is all that they see: what was wrong, where, what was expected and
  what to do, on one line.
  """

  def _render_traceback_(self) -> list[str]:
    """What a notebook shows (IPython's protocol); programs: `run_program`."""
    return [f"error: {' '.join(str(self).split())}"]


@contextlib.contextmanager
def user_errors(where: str, *types: type[Exception]) -> Iterator[None]:
  """Turns `types` (default ValueError) inside into UserErrors about `where`.

  For checks that live in rooms which know no programs, such as ModelConfig's:
  `with user_errors("config section model"): ModelConfig(**config.model)`.
  """
  try:
    yield
  except UserError:
    raise
  except Exception as error:
    if not isinstance(error, types or ValueError):
      raise
    raise UserError(f"{where}: {error}") from error


def run_program(
  main: Callable[[Sequence[str]], int | None],
  *,
  expected: tuple[type[Exception], ...] = (),
  argv: Sequence[str] | None = None,
) -> int:
  """Runs `main(argv)` and returns the exit code for `sys.exit`.

  Args:
    main: the program; returns None or an exit code.
    expected: exceptions of other rooms that speak to the user, e.g. TaskError.
      They, UserError and a disk that is full or refuses become one line on
      stderr and exit code 2. Every other exception is a fault of ours: it
      keeps its traceback.
    argv: the command line, program name first; default sys.argv.
  """
  argv = sys.argv if argv is None else argv
  try:
    return main(argv) or 0
  except KeyboardInterrupt:
    line = "interrupted; the same command goes on from the last checkpoint"
    code = 130
  except (UserError, paths.PathError, *expected) as error:
    line, code = str(error), 2
  except OSError as error:
    if error.errno not in _DISK_ADVICE:
      raise
    line = f"cannot write {error.filename or 'the run'}: {error.strerror}; "
    line += _DISK_ADVICE[error.errno]
    code = 2
  print(f"error: {' '.join(line.split())}", file=sys.stderr, flush=True)
  return code


def suggest(word: str, known: Iterable[str]) -> str:
  """'; did you mean X?' when `word` is nearly X, else a list of `known`."""
  known = sorted(known)
  near = difflib.get_close_matches(word, known, n=1)
  if not near:  # right name, wrong section: lr -> rl.lr
    near = [k for k in known if k.split(".")[-1] == word.split(".")[-1]][:1]
  if near:
    return f"; did you mean {near[0]}?"
  more = ", ..." if len(known) > 20 else ""
  return f"; known: {', '.join(known[:20]) or 'none'}{more}"


def parse_arg(arg: str | None, known: Sequence[str]) -> tuple[str, ...]:
  """Splits a config's argument, `file.py:a,b`, into names out of `known`.

  Returns an empty tuple for no argument. Raises UserError for an unknown name,
  and for a name given twice.
  """
  names = tuple(arg.split(",")) if arg else ()
  for i, name in enumerate(names):
    if name not in known:
      raise UserError(
        f"unknown config argument {name!r}; valid: {', '.join(known) or 'none'}"
      )
    if name in names[:i]:
      raise UserError(f"config argument {name!r} is given twice")
  return names


def load_config(spec: str) -> config_dict.ConfigDict:
  """Loads `path/to/config.py` or `path/to/config.py:argument`.

  Returns the config, locked. Raises UserError when there is no such file, it
  does not parse, or it refuses the argument.
  """
  name, _, arg = spec.partition(".py:")
  path = epath.Path(name + ".py" if arg else spec)
  get_config = getattr(load_module(path), "get_config", None)
  if get_config is None:
    raise UserError(f"{path} has no get_config(arg=None); it is not a config")
  if arg and not inspect.signature(get_config).parameters:
    raise UserError(f"{path} takes no argument, but was given {arg!r}")
  try:
    config = get_config(arg) if arg else get_config()
  except UserError as error:
    raise UserError(f"{path}: {error}") from error
  if not isinstance(config, config_dict.ConfigDict):
    raise UserError(
      f"{path}: get_config returned {type(config).__name__}, not a ConfigDict"
    )
  return config.lock()


def load_module(path: epath.PathLike) -> types.ModuleType:
  """Runs a config file; UserError when there is none, or it is broken."""
  path = epath.Path(path)
  if path.suffix != ".py" or not path.is_file():
    folder = path.parent
    there = [str(p) for p in folder.glob("*.py")] if folder.is_dir() else []
    raise UserError(
      f"no config file {path} (expected FILE.py or FILE.py:ARGUMENT)"
      + suggest(str(path), there)
    )
  module_spec = importlib.util.spec_from_file_location(
    "t1jax_config_" + re.sub(r"\W", "_", str(path)), path
  )
  module = importlib.util.module_from_spec(module_spec)
  try:
    module_spec.loader.exec_module(module)
  except SyntaxError as error:
    raise UserError(
      f"{path}, line {error.lineno}: {error.msg}; mend the config file"
    ) from error
  return module


@dataclasses.dataclass(frozen=True)
class Invocation:
  """What a command line said."""

  config: config_dict.ConfigDict  # loaded, overridden, locked
  source: str  # the value of --config, e.g. "configs/tiny.py:smoke"
  workdir: epath.Path | None  # absolute or gs://; None when not given
  flags: flags.FlagValues  # the program's own flags
  # Fields that the command line set: (in the file, here).
  changed: Mapping[str, tuple[Any, Any]] = dataclasses.field(
    default_factory=dict
  )


def parse_command_line(
  argv: Sequence[str],
  *,
  description: str,
  flag_values: flags.FlagValues | None = None,
  resume_config: bool = False,
) -> Invocation:
  """Parses `--config=FILE.py[:ARG] --config.FIELD=VALUE --workdir=DIR ...`.

  Given twice, the last --config and --workdir count, and overrides apply to it
  wherever they stand.

  Args:
    argv: the command line, program name first.
    description: the help text, usually the program's docstring.
    flag_values: the program's further flags, defined but not parsed.
    resume_config: without --config, take the config of the run in --workdir.

  Raises:
    UserError: one line about the first thing that is wrong.
    PathError: --workdir is in a bucket that is not there or does not answer.
    SystemExit: after --help.
  """
  values = flags.FlagValues() if flag_values is None else flag_values
  if any(a in ("--help", "-help", "-h") for a in argv[1:]):
    print(_help_text(description, values))
    raise SystemExit(0)
  source, rest = _take_last("config", argv[1:])
  workdir, rest = _take_last("workdir", rest)
  if workdir is not None:
    workdir = paths.parse(workdir)
    if resume_config:
      paths.check_reachable(workdir)
  if source is not None:
    config = load_config(source)
  elif resume_config and workdir is not None:
    config, source = read_config(workdir), str(workdir / CONFIG_FILE)
  elif resume_config:
    raise UserError("--workdir is missing: give a run's directory")
  else:
    raise UserError("--config is missing: say --config=configs/tiny.py")
  before = config.copy_and_resolve_references()
  _check_names(rest, config, {"workdir", *values})
  rest = [argv[0], *rest]
  try:
    config_flags.DEFINE_config_dict(
      "config", config, flag_values=values, sys_argv=rest
    )
    positional = values(rest)[1:]
    config = values.config
  except flags.Error as error:
    raise UserError(_explain(str(error), before)) from error
  if positional:
    raise UserError(
      f"unexpected argument {positional[0]!r}; expected --FLAG=VALUE"
    )
  _check_tuples(before, config)
  _check_finite(config)
  old, new = flatten(_as_json(before)), flatten(_as_json(config))
  changed = {
    name: (old[name], new[name]) for name in old if old[name] != new[name]
  }
  return Invocation(config.lock(), source, workdir, values, changed)


def _help_text(description: str, values: flags.FlagValues) -> str:
  lines = [inspect.cleandoc(description), "", "Flags:"]
  lines += [
    "  --config=FILE.py[:ARG]: the experiment",
    "  --config.FIELD=VALUE: sets one field of it",
    "  --workdir=DIR: the run directory; local, or gs://BUCKET/DIR",
  ]
  for name in sorted(values):
    flag = values[name]
    default = "" if flag.default is None else f" (default {flag.default})"
    lines.append(f"  --{name}: {flag.help}{default}")
  return "\n".join(lines)


def _take_last(name: str, args: Sequence[str]) -> tuple[str | None, list[str]]:
  """The last value of --NAME, and the arguments without any of them."""
  found, rest, args = None, [], list(args)
  while args:
    arg = args.pop(0)
    flag, equals, value = arg.partition("=")
    if flag not in (f"--{name}", f"-{name}"):
      rest.append(arg)
      continue
    found = value if equals else args.pop(0) if args else ""
    if not found:
      raise UserError(f"--{name} has no value; expected --{name}=VALUE")
  return found, rest


def _check_names(
  args: Sequence[str], config: config_dict.ConfigDict, known: set[str]
) -> None:
  """Raises UserError for the first flag that names nothing."""
  fields = flatten(config.to_dict())
  for arg in args:
    match = re.match(r"--?(no)?config\.([^=]*)", arg)
    if match:
      name = match[2]
      if name in fields:
        continue
      below = [f for f in fields if f.startswith(name + ".")]
      if below:
        raise UserError(
          f"--config.{name} is a section, not a field; set one of its fields: "
          + ", ".join(below)
        )
      raise UserError(f"unknown config field {name!r}{suggest(name, fields)}")
    match = re.match(r"--?([A-Za-z][\w.]*)", arg)
    if match:
      name = match[1]
      if name not in known and name.removeprefix("no") not in known:
        names = {"config", *known} | {f"config.{f}" for f in fields}
        near = difflib.get_close_matches(name, names, n=1)
        near += [f"config.{name}"] if name in fields else []
        hint = f"; did you mean --{near[-1]}?" if near else "; see --help"
        raise UserError(f"unknown flag --{name}{hint}")


def _explain(message: str, config: config_dict.ConfigDict) -> str:
  """absl's refusal of a value as field, expected type, and what was given."""
  match = re.match(r"flag --([\w.]+)=(.*?): (.*)", message, re.DOTALL)
  if not match:
    return message
  name, given, reason = match.groups()
  fields = flatten(config.to_dict())
  field = name.removeprefix("config.")
  if not name.startswith("config.") or field not in fields:
    return f"--{name}: {reason}; got {given!r}"
  value = fields[field]
  return (
    f"config field {field}: expected {type(value).__name__} (like {value!r}), "
    f"got {given!r}"
  )


def _check_tuples(
  before: config_dict.ConfigDict, after: config_dict.ConfigDict
) -> None:
  """ConfigDict checks that a tuple is a tuple; this checks what is in it."""
  new = flatten(after.to_dict())
  for field, old in flatten(before.to_dict()).items():
    kinds = {type(v) for v in old} if isinstance(old, tuple) else set()
    if len(kinds) != 1:
      continue
    (kind,) = kinds
    for value in new[field]:
      if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(
          f"config field {field}: expected a tuple of {kind.__name__} (like "
          f"{old!r}), got {new[field]!r}"
        )


def _check_finite(config: config_dict.ConfigDict) -> None:
  """No setting is infinite, and NaN is not even equal to itself."""
  for field, value in flatten(config.to_dict()).items():
    for number in value if isinstance(value, tuple) else (value,):
      if isinstance(number, float) and not math.isfinite(number):
        raise UserError(
          f"config field {field} is {value}; expected a finite number"
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """{"a": {"b": 1}} -> {"a.b": 1}."""
  flat = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      flat.update(flatten(value, f"{prefix}{key}."))
    else:
      flat[prefix + key] = value
  return flat


def claim_workdir(
  workdir: epath.PathLike,
  config: config_dict.ConfigDict,
  *,
  source: str = "",
  changed: Mapping[str, tuple[Any, Any]] | None = None,
  free_mb: int = 64,
) -> epath.Path:
  """Makes `workdir` the run directory of `config`, or finds that it is already.

  Writes config.json on the first call. A second call with the same config
  changes nothing: the run resumes. Its section `wandb` may differ.

  Args:
    workdir: local or gs:// directory, made when it is missing.
    config: the whole config of the run.
    source: where the config came from; recorded only.
    changed: what the command line set: (in the file, here); recorded only.
    free_mb: space, in MB, that the run will need at least (local disks only).

  Raises:
    UserError: the directory holds the run of another config (the message lists
      what differs) or of an unknown one, cannot be written, or has no room.
    PathError: its bucket is not there, refuses access or does not answer.
  """
  workdir = epath.Path(workdir)
  record = workdir / CONFIG_FILE
  mine = _as_json(config)
  paths.check_reachable(workdir)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    if record.exists():
      _check_same(workdir, _read_record(record)["config"], mine)
    elif held := [f for f in _RUN_FILES if (workdir / f).exists()]:
      raise UserError(
        f"workdir {workdir} holds a run ({held[0]}) but no {CONFIG_FILE} that "
        "says of what; choose another --workdir, or delete it"
      )
    if not paths.is_remote(workdir):
      free = shutil.disk_usage(workdir).free / 1e6
      if free < free_mb:
        raise UserError(
          f"workdir {workdir}: the run needs {free_mb} MB, its disk has "
          f"{free:.0f} MB free; free some space or choose another --workdir"
        )
    if not record.exists():
      text = json.dumps(
        {"source": source, "changed": changed or {}, "config": mine}, indent=2
      )
      with paths.refusals(workdir):
        paths.write_atomically(record, text + "\n")
  except OSError as error:
    raise UserError(
      f"workdir {workdir} cannot be used: {error.strerror or error}; choose "
      "another --workdir"
    ) from error
  return workdir


@contextlib.contextmanager
def hold_workdir(workdir: epath.Path) -> Iterator[Callable[[], None]]:
  """Keeps two processes from working in one run directory.

  On a local disk the first holds it until it ends, however it ends, and a
  second is refused. In a bucket nobody can tell a holder that was killed from
  one that is silent. There the last one to start holds it, so that a run that
  lost its machine goes on elsewhere at once, and the one before notices.

  Yields: a function that raises UserError when the directory was taken over;
    to be called before anything is recorded.

  Raises:
    UserError: another process works in it (local disks); the message says
      which.
  """
  lock = workdir / ".lock"
  if paths.is_remote(workdir):
    with _last_one(lock) as check:
      yield check
    return
  # The file stays: were it deleted, two could hold two files of one name.
  with open(lock, "a+") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
      file.seek(0)
      raise UserError(
        f"workdir {workdir} is in use by process {file.read().strip() or '?'}; "
        "wait for it, stop it, or choose another --workdir"
      ) from error
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    yield lambda: None


@contextlib.contextmanager
def _last_one(lock: epath.Path) -> Iterator[Callable[[], None]]:
  """Holds an object by having written it last."""
  me = f"process {os.getpid()} of {socket.gethostname()}"
  mine = f"{me}\n{uuid.uuid4()}\n"

  def holder() -> str:
    try:
      return lock.read_text()
    except FileNotFoundError:
      return ""

  def check() -> None:
    if (now := holder()) != mine:
      raise UserError(
        f"workdir {lock.parent} was taken over by "
        f"{now.split(chr(10))[0] or 'someone who deleted it'}; this process "
        "stops, and its run goes on there"
      )

  if before := holder().split("\n")[0]:
    print(
      f"{before} did not leave {lock.parent} in order; {me} takes it over",
      file=sys.stderr,
    )
  paths.write_atomically(lock, mine)
  try:
    yield check
  finally:
    if holder() == mine:
      lock.unlink()


def read_config(workdir: epath.PathLike) -> config_dict.ConfigDict:
  """The config of the run in `workdir`, locked. Raises UserError if none."""
  record = epath.Path(workdir) / CONFIG_FILE
  if not record.exists():
    raise UserError(
      f"{workdir} is not a run directory: it has no {CONFIG_FILE}; "
      "point --workdir at one that the training program made"
    )
  restored = _tuples(_read_record(record)["config"])
  return config_dict.ConfigDict(restored).lock()


def _read_record(record: epath.Path) -> dict[str, Any]:
  try:
    loaded = json.loads(record.read_text())
    loaded["config"].items()
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise UserError(
      f"{record} is damaged ({error}); delete the run directory, or restore "
      "that file"
    ) from error
  return loaded


def holds_run(workdir: epath.PathLike, config: config_dict.ConfigDict) -> bool:
  """Whether the directory holds a run; UserError if it is of another config."""
  workdir = epath.Path(workdir)
  record = workdir / CONFIG_FILE
  if not record.exists():
    return False
  _check_same(workdir, _read_record(record)["config"], _as_json(config))
  return True


def read_json(path: epath.Path) -> dict[str, Any]:
  """A file's JSON object; UserError when it holds none."""
  try:
    loaded = json.loads(path.read_text())
    if not isinstance(loaded, dict):
      raise ValueError(f"a {type(loaded).__name__}, expected an object")
  except ValueError as error:
    raise UserError(
      f"{path} is damaged ({error}); restore it, or delete it"
    ) from error
  return loaded


def _check_same(
  workdir: epath.Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]
) -> None:
  there, here = flatten(theirs), flatten(mine)
  absent = object()
  changed = [
    f"{name} ({_shown(there, name)} there, {_shown(here, name)} here)"
    for name in sorted({*there, *here})
    # Where the numbers are shown changes none of them.
    if not name.startswith("wandb.")
    and there.get(name, absent) != here.get(name, absent)
  ]
  if changed:
    more = f" and {len(changed) - 6} more" if len(changed) > 6 else ""
    raise UserError(
      f"workdir {workdir} holds the run of another config; it differs in "
      f"{', '.join(changed[:6])}{more}; choose another --workdir, or delete it"
    )


def _shown(fields: Mapping[str, Any], name: str) -> str:
  return json.dumps(fields[name]) if name in fields else "absent"


def _as_json(config: config_dict.ConfigDict) -> dict[str, Any]:
  """The config as JSON would give it back (tuples are lists)."""
  return json.loads(json.dumps(config.to_dict()))


def _tuples(value: Any) -> Any:
  """JSON has no tuples and configs have no lists: undoes the difference."""
  if isinstance(value, dict):
    return {k: _tuples(v) for k, v in value.items()}
  if isinstance(value, list):
    return tuple(_tuples(v) for v in value)
  return value
