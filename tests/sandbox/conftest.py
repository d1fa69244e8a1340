"""One farm for the tests of sandboxes; each test boots its own sandbox."""

import asyncio

import pytest

from t1jax.sandbox import base
from t1jax.sandbox.farm import Farm


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
