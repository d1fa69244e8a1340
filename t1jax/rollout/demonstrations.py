"""Oracle demonstrations: real commands, real outputs, verified.

A task's oracle is run in a real sandbox through the same harness as the
policy, so that what a demonstration shows is what an episode will see.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from t1jax.rollout import harness
from t1jax.rollout.chat import Chat
from t1jax.rollout.collect import OpenSandbox, Verify
from t1jax.rollout.trajectory import Demonstration
from t1jax.sandbox.base import SandboxError
from t1jax.tasks.task import Task, TaskError, to_bytes


async def record(
  tasks: Sequence[Task],
  *,
  open_sandbox: OpenSandbox,
  verify: Verify,
  limits: harness.Limits,
  concurrency: int,
  on_done: Callable[[int], None] = lambda count: None,
) -> list[dict]:
  """Runs each task's oracle; one example a task, in the tasks' order.

  Args:
    tasks: what is demonstrated.
    open_sandbox: boots a sandbox with a task's environment.
    verify: reads a task's assertions.
    limits: of commands and observations.
    concurrency: sandboxes alive at once.
    on_done: called with the number of finished runs, for progress.

  Returns:
    Examples as `tasks.datasets` stores them, without their split: name,
    family, domain, instruction, task (bytes), turns (command, observation,
    exit_code; `submit` is the last).

  Raises:
    TaskError: an oracle fails an assertion of its own verifier; the message
      names the task and the assertions.
    SandboxError: a sandbox failed twice.
  """
  slots = asyncio.Semaphore(concurrency)
  done = 0

  async def one(task: Task) -> dict:
    nonlocal done
    async with slots:
      try:
        example = await _oracle(task, open_sandbox, verify, limits)
      except SandboxError:
        example = await _oracle(task, open_sandbox, verify, limits)
    done += 1
    on_done(done)
    return example

  running = [asyncio.create_task(one(task)) for task in tasks]
  try:
    return await asyncio.gather(*running)
  finally:
    for future in running:
      future.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def _oracle(task, open_sandbox, verify, limits) -> dict:
  if not task.oracle:
    raise TaskError(
      f"task {task.name} has no oracle commands; a demonstration needs "
      "solution/commands.json, one command a turn"
    )
  turns = []
  async with open_sandbox(task) as sandbox:
    for command in (*task.oracle, harness.SUBMIT):
      done = await harness.step(sandbox, command.encode(), limits)
      turns.append(
        {
          "command": command,
          "observation": done.observation,
          "exit_code": done.exit_code or 0,
        }
      )
    verdict = await verify(sandbox, task)
  if verdict.infra:
    raise SandboxError(f"task {task.name}: {verdict.error}")
  if not verdict.strict:
    failed = [a.name for a in verdict.assertions if not a.passed]
    raise TaskError(
      f"task {task.name}: its oracle does not pass its own verifier "
      f"(failed: {', '.join(failed) or 'no assertion was read'}; reward file: "
      f"{verdict.reward_file}); mend solution/ or tests/"
    )
  return {
    "name": task.name,
    "family": task.family,
    "domain": task.domain,
    "instruction": task.instruction,
    "task": to_bytes(task),
    "turns": turns,
  }


def imitate(chat: Chat, example: dict) -> Demonstration:
  """The supervised example of a recorded oracle run."""
  turns = [(t["command"], t["observation"]) for t in example["turns"]]
  return chat.demonstration(
    example["instruction"], turns, {"task": example["name"]}
  )


def session(
  chat: Chat, example: dict, hints: Sequence[str], rng: np.random.Generator
) -> Demonstration:
  """A shell session without its task, for pretraining a base model.

  In place of the instruction stand the session's names in random order among
  others that it does not use: the base can learn the shell and to copy, but
  not what any instruction asks for.

  Args:
    chat: the template.
    example: a recorded oracle run.
    hints: names to show.
    rng: orders the names.
  """
  shown = " ".join(hints[i] for i in rng.permutation(len(hints)))
  turns = [(t["command"], t["observation"]) for t in example["turns"]]
  return chat.demonstration(shown, turns, {"task": example["name"]})
