"""Strict rules for every test, set before anything imports JAX.

Environment variables, not jax.config: most rooms' tests never import JAX and
must not pay for it. The fixtures boot sandboxes for the rooms that need some.
"""

import asyncio
import os
import pathlib

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
