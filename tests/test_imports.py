"""Imports go one way through the house, and the light rooms stay light."""

import ast
import dataclasses
import graphlib
import pathlib
import shutil
import subprocess
import sys

import pytest

import t1jax

ROOT = pathlib.Path(t1jax.__file__).parent
# A room may import itself, its neighbours on the same floor, and what is above.
HOUSE = (
  {"sharding", "paths"},
  {"models"},
  {"sampling"},
  {"tasks"},
  {"sandbox"},
  {"rollout"},
  {"rewards"},
  {"rl"},
  {"rsi"},
  {"smc"},
  {"bench"},
  {"checkpoint", "metrics", "config", "charts", "wandb_writer"},
  # The programs, the parts of the training program and of the report, and what
  # reads a run.
  {"train", "evaluate", "precompile", "serve", "report", "ablate"}
  | {"corpus", "stages", "recorded", "curves", "episodes"},
)
FLOOR = {room: i for i, rooms in enumerate(HOUSE) for room in rooms}
# What their workers start with must start in milliseconds, so never JAX.
LIGHT = ("tasks", "sandbox", "rewards")
# ... and these at least until they are asked for something.
LIGHT_AT_IMPORT = (*LIGHT, "rollout")
JAX = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}


@dataclasses.dataclass(frozen=True)
class Import:
  importer: str  # dotted module, e.g. "t1jax.rl.losses"
  target: str  # dotted module
  line: int
  typing_only: bool

  def __str__(self) -> str:
    path = self.importer.replace(".", "/")
    return f"{path}.py:{self.line} imports {self.target}"


def read_imports(root: pathlib.Path) -> list[Import]:
  """Every import in every module below `root`, also those inside functions."""
  paths = {p: _module(root, p) for p in sorted(root.rglob("*.py"))}
  known = set(paths.values())
  found = []
  for path, module in paths.items():
    package = module if path.name == "__init__.py" else _parent(module)
    tree = ast.parse(path.read_text(), str(path))
    for node, typing_only in _walk(tree, False):
      for target in _targets(node, package, known):
        found.append(Import(module, target, node.lineno, typing_only))
  return found


def _module(root: pathlib.Path, path: pathlib.Path) -> str:
  parts = path.relative_to(root.parent).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parent(module: str) -> str:
  return module.rpartition(".")[0]


def _walk(node: ast.AST, typing_only: bool):
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Import | ast.ImportFrom):
      yield child, typing_only
    elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
      for inner in child.body:
        yield from _walk(ast.Module([inner], []), True)
      for inner in child.orelse:
        yield from _walk(ast.Module([inner], []), typing_only)
    else:
      yield from _walk(child, typing_only)


def _targets(
  node: ast.Import | ast.ImportFrom, package: str, known: set[str]
) -> list[str]:
  if isinstance(node, ast.Import):
    return [alias.name for alias in node.names]
  base = node.module or ""
  if node.level:
    for _ in range(node.level - 1):
      package = _parent(package)
    base = f"{package}.{base}".rstrip(".")
  # `from t1jax.rl import losses` is about the module, if it is one.
  names = [f"{base}.{alias.name}" for alias in node.names]
  if base == "t1jax":
    return names
  return [name if name in known else base for name in names]


def _room(module: str) -> str:
  return module.split(".")[1] if module.startswith("t1jax.") else ""


def upward(imports: list[Import]) -> list[str]:
  return [
    f"{i}: {_room(i.target)} is below {_room(i.importer)}"
    for i in imports
    if _room(i.importer) in FLOOR
    and _room(i.target) in FLOOR
    and FLOOR[_room(i.target)] > FLOOR[_room(i.importer)]
  ]


def circle(imports: list[Import]) -> list[str]:
  """A circle of modules, each importing the next, or [].

  Two neighbours may name each other in annotations: nothing runs then.
  """
  graph = {}
  for i in imports:
    if i.typing_only:
      continue
    if i.target.startswith("t1jax.") and i.target != i.importer:
      graph.setdefault(i.importer, set()).add(i.target)
  try:
    tuple(graphlib.TopologicalSorter(graph).static_order())
  except graphlib.CycleError as error:
    return error.args[1][::-1]
  return []


def heavy(imports: list[Import]) -> list[str]:
  """Imports of JAX, anywhere, in a light room."""
  return [
    str(i)
    for i in imports
    if _room(i.importer) in LIGHT
    and i.target.split(".")[0] in JAX
    and not i.typing_only
  ]


def test_every_module_has_a_place_in_the_house():
  rooms = {_room(_module(ROOT, path)) for path in ROOT.rglob("*.py")}
  assert rooms - {""} <= FLOOR.keys()


def test_no_import_goes_up_and_none_in_a_circle():
  imports = read_imports(ROOT)
  assert len(imports) > 20
  assert upward(imports) == []
  assert circle(imports) == []


def test_light_rooms_have_no_jax():
  assert heavy(read_imports(ROOT)) == []


def test_light_rooms_load_without_jax():
  modules = [
    _module(ROOT, path)
    for room in LIGHT_AT_IMPORT
    for path in sorted((ROOT / room).rglob("*.py"))
  ]
  program = (
    "import importlib, sys\n"
    "for module in sys.argv[1:]:\n"
    "  importlib.import_module(module)\n"
    f"  got = {JAX!r} & set(sys.modules)\n"
    "  if got: sys.exit(f'{module} loads {sorted(got)}')\n"
  )
  ended = subprocess.run(
    [sys.executable, "-c", program, *modules], capture_output=True, text=True
  )
  assert ended.returncode == 0, ended.stderr


UPWARD = {
  "at the top": "from t1jax.rl import losses\n",
  "of a whole room": "import t1jax.rl\n",
  "from the package": "from t1jax import train\n",
  "in a function": "def f():\n  from t1jax.config import load_config\n",
  "relative": "from ..rewards import schemes\n",
  "for typing": (
    "from typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n"
    "  from t1jax.rl.losses import ppo\n"
  ),
}


@pytest.fixture(name="copy", scope="module")
def copy_of_the_package(tmp_path_factory):
  copy = tmp_path_factory.mktemp("planted") / "t1jax"
  shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
  return copy


@pytest.mark.parametrize("case", UPWARD)
def test_a_planted_upward_import_is_seen(copy, case):
  (copy / "tasks" / "planted.py").write_text(UPWARD[case])
  (seen,) = upward(read_imports(copy))
  assert seen.startswith("t1jax/tasks/planted.py:")


def test_a_planted_circle_is_seen(tmp_path):
  copy = tmp_path / "t1jax"
  (copy / "tasks").mkdir(parents=True)
  (copy / "tasks" / "a.py").write_text("from t1jax.tasks import b\n")
  (copy / "tasks" / "b.py").write_text("def f():\n  import t1jax.tasks.c\n")
  (copy / "tasks" / "c.py").write_text("from . import d\n")
  (copy / "tasks" / "d.py").write_text("")
  assert circle(read_imports(copy)) == []
  (copy / "tasks" / "c.py").write_text("from .a import name\n")
  names = ["t1jax.tasks.a", "t1jax.tasks.b", "t1jax.tasks.c"]
  assert set(circle(read_imports(copy))) == set(names)


def test_planted_jax_in_a_light_room_is_seen(tmp_path):
  copy = tmp_path / "t1jax"
  (copy / "sandbox").mkdir(parents=True)
  (copy / "sandbox" / "a.py").write_text(
    "def f():\n  import jax.numpy as jnp\n"
  )
  assert heavy(read_imports(copy)) == ["t1jax/sandbox/a.py:2 imports jax.numpy"]
