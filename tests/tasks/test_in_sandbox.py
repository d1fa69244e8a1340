"""Every family in the real sandbox, judged by the real verifier."""

import asyncio

import pytest

from t1jax.rewards import verifier
from t1jax.sandbox import base as sandboxes
from t1jax.sandbox import environment, farm
from t1jax.tasks.families import FAMILIES, base


async def _run(made, commands, house):
  async with house.sandbox() as sandbox:
    await environment.install_environment(sandbox, made)
    printed = [await sandbox.exec(command) for command in commands]
    return printed, await verifier.verify(sandbox, made)


async def _all(index):
  async with farm.Farm(max_sandboxes=4) as house:
    tasks = [base.make_task(one, "heldout", index) for one in FAMILIES]
    solved = [_run(made, made.oracle, house) for made in tasks]
    idle = [_run(made, (), house) for made in tasks]
    return tasks, await asyncio.gather(*solved), await asyncio.gather(*idle)


def test_oracle_passes_and_doing_nothing_fails():
  try:
    tasks, solved, idle = asyncio.run(_all(index=1))
  except sandboxes.SandboxUnavailable as error:
    pytest.skip(str(error))
  for made, (printed, done), (_, nothing) in zip(
    tasks, solved, idle, strict=True
  ):
    assert done.error is None and done.strict, (made.name, printed, done)
    assert done.reward_file == 1.0
    assert len(done.assertions) == made.num_assertions
    passed = {a.name for a in nothing.assertions if a.passed}
    assert not nothing.strict and passed == set(made.hygiene), made.name
    # Short enough for a small model to read, and the same on every machine.
    assert all(len(result.output.split()) <= 12 for result in printed)
