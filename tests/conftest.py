"""Strict rules for every test, set before anything imports JAX.

Environment variables, not jax.config: most rooms' tests never import JAX and
must not pay for it. The fixtures boot sandboxes for the rooms that need some,
and make one small run of the main job for all who look at one.
"""

import asyncio
import fcntl
import os
import pathlib
import subprocess
import sys

import pytest

from t1jax.sandbox import base
from t1jax.sandbox.farm import Farm

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
_CACHE = pathlib.Path(
  os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
)
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR", str(_CACHE / "t1jax" / "jax-tests")
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")


@pytest.fixture(scope="module")
def loop():
  with asyncio.Runner() as runner:
    yield runner


@pytest.fixture(scope="module")
def farm(loop):
  farm = Farm()
  try:
    loop.run(farm.__aenter__())
  except base.SandboxUnavailable as error:
    pytest.skip(str(error))
  yield farm
  loop.run(farm.close())


@pytest.fixture
def in_sandbox(loop, farm):
  """Runs an async function on a fresh sandbox: `in_sandbox(test, limits)`."""

  def run(test, limits=None):
    async def whole():
      async with farm.sandbox(limits) as sandbox:
        return await test(sandbox)

    return loop.run(asyncio.wait_for(whole(), 60))

  return run


_ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="session")
def users_environment():
  """The environment of programs: as users run them, not by strict rules."""
  return {k: v for k, v in os.environ.items() if not k.startswith("JAX_NUMPY_")}


@pytest.fixture(scope="session")
def program(users_environment):
  """Runs a program to its end: `program("train", "--config=...", ...)`."""

  def run(name, *args, timeout=600, prefix=()):
    return subprocess.run(
      [*prefix, sys.executable, "-m", f"t1jax.{name}", *args],
      cwd=_ROOT,
      env=users_environment,
      capture_output=True,
      text=True,
      timeout=timeout,
      check=False,
    )

  return run


@pytest.fixture(scope="session")
def small():
  """Flags of the smallest main job: everything once, two task families."""
  return (
    "--config=configs/tiny.py:smoke",
    "--config.families=('rename_by_content','merge_branch')",
  )


@pytest.fixture(scope="session")
def finished(tmp_path_factory, program, small):
  """The directory of a finished small run, made once for all workers.

  Nobody may write into it.
  """
  shared = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    shared = shared.parent  # each worker has a directory of its own in there
  workdir = shared / "finished"
  with open(shared / "finished.lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Where it is finished already, this only says so.
    done = program("train", *small, f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  return workdir
