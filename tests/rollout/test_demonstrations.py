"""Oracles in real sandboxes: what is recorded, and what is refused."""

import contextlib
import dataclasses

import pytest

from t1jax.rewards import verifier
from t1jax.rollout import demonstrations
from t1jax.rollout.harness import Limits
from t1jax.sandbox.environment import install_environment
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task
from t1jax.tasks.task import TaskError

LIMITS = Limits(max_turns=6, max_tokens=256, max_action_tokens=20)


@pytest.fixture
def record(loop, farm):
  @contextlib.asynccontextmanager
  async def open_sandbox(task):
    async with farm.sandbox() as sandbox:
      await install_environment(sandbox, task)
      yield sandbox

  def run(*tasks):
    return loop.run(
      demonstrations.record(
        tasks,
        open_sandbox=open_sandbox,
        verify=verifier.verify,
        limits=LIMITS,
        concurrency=4,
      )
    )

  return run


def test_an_oracles_run_is_recorded_as_it_happened(record):
  tasks = [make_task(f, "train", 3) for f in FAMILIES[:3]]
  examples = record(*tasks)
  assert [e["name"] for e in examples] == [t.name for t in tasks]
  for task, example in zip(tasks, examples, strict=True):
    commands = [turn["command"] for turn in example["turns"]]
    assert commands == [*task.oracle, "submit"]
    assert any(turn["observation"] for turn in example["turns"])


def test_a_task_that_only_writes_a_reward_may_demonstrate(record):
  task = make_task(FAMILIES[0], "train", 3)
  for reward in ("1", "0"):
    script = f"#!/bin/sh\necho {reward} > /logs/verifier/reward.txt\n"
    own = dataclasses.replace(task, tests={"test.sh": script.encode()})
    if reward == "1":
      assert len(record(own)) == 1
    else:
      with pytest.raises(TaskError, match="reward file: 0"):
        record(own)


def test_an_oracle_that_fails_is_named_with_its_assertions(record):
  task = make_task(FAMILIES[0], "train", 3)
  with pytest.raises(TaskError, match=rf"{task.name}.*failed: \w+"):
    record(dataclasses.replace(task, oracle=("true",)))
