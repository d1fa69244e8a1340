"""Episodes, many at once: tasks in, trajectories out.

Each episode is a coroutine that alternates between the policy and its own
sandbox, so a slow command or a long reply holds nobody else. What goes wrong
outside the agent's reach is an infra failure, told apart from a failed task.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Protocol

from t1jax.rollout import harness
from t1jax.rollout.chat import Chat
from t1jax.rollout.trajectory import (
  AssertionResult,
  Outcome,
  Trajectory,
  TrajectoryBuilder,
)
from t1jax.sandbox.base import Sandbox, SandboxError
from t1jax.tasks.task import Task

if TYPE_CHECKING:  # the engine behind the protocol imports JAX
  from t1jax.sampling.client import PolicyClient


class Verdict(Protocol):
  """What a verifier returns (`rewards.verifier.Verification` is one)."""

  assertions: tuple[AssertionResult, ...]
  strict: bool
  infra: bool
  error: str | None


# A context manager that boots a sandbox with the task's environment in it.
OpenSandbox = Callable[[Task], contextlib.AbstractAsyncContextManager[Sandbox]]
Verify = Callable[[Sandbox, Task], Awaitable[Verdict]]


class SamplerFailed(RuntimeError):
  """The policy that all episodes share is gone: no episode can go on."""


@dataclasses.dataclass(frozen=True)
class Attempt:
  """One try at a task.

  Attributes:
    task: what is tried.
    attempt: which try at this task.
    seed: (run seed, step, task number, attempt): keys every random draw of
      the episode, so that a draw does not depend on what else is running.
  """

  task: Task
  attempt: int
  seed: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Routing:
  """Shape of the policy's routes: experts, MoE layers, experts per token."""

  num_experts: int
  num_moe_layers: int
  top_k: int


@dataclasses.dataclass(frozen=True)
class Runner:
  """Everything that an episode needs besides its task."""

  client: "PolicyClient"
  chat: Chat
  routing: Routing
  limits: harness.Limits
  open_sandbox: OpenSandbox
  verify: Verify

  async def run(self, attempt: Attempt) -> Trajectory:
    """Runs one episode and verifies it, whatever ended it.

    Raises:
      SamplerFailed: the policy failed; everything else that goes wrong makes
        this one episode an infra failure with the reason in its outcome.
    """
    task = attempt.task
    builder = TrajectoryBuilder(
      self.routing.num_experts, self.routing.num_moe_layers, self.routing.top_k
    )
    clock = _Clock()
    try:
      session = await self.client.open(attempt.seed)
      try:
        outcome = await self._episode(task, session, builder, clock)
      finally:
        await self.client.close(session)
    except SamplerFailed:
      raise
    except Exception as e:  # one bad episode must not end the step
      kind = "" if isinstance(e, SandboxError) else f"{type(e).__name__}: "
      outcome = Outcome("infra_failure", error=f"{kind}{e}")
      if not len(builder):
        prompt = self.chat.prompt(task.instruction)
        builder.append(prompt, turn=-1, weight_version=0)
    return builder.finish(
      dataclasses.replace(outcome, seconds=dict(clock.seconds)),
      task=task.name,
      family=task.family,
      domain=task.domain,
      attempt=attempt.attempt,
      seed=attempt.seed,
    )

  async def _episode(self, task, session, builder, clock) -> Outcome:
    clock.start()
    async with self.open_sandbox(task) as sandbox:
      clock.stop("boot")
      deadline = time.monotonic() + min(
        self.limits.episode_seconds, task.config.agent_timeout_sec
      )
      status = await self._turns(
        task, session, builder, clock, sandbox, deadline
      )
      clock.start()
      verdict = await self.verify(sandbox, task)
      clock.stop("verify")
    if verdict.infra:
      return Outcome("infra_failure", error=verdict.error or "verifier failed")
    return Outcome(status, verdict.strict, verdict.assertions)

  async def _turns(
    self, task, session, builder, clock, sandbox, deadline
  ) -> str:
    limits, chat = self.limits, self.chat
    version = 0
    given = chat.prompt(task.instruction)
    turn = -1
    while True:
      if len(builder) + len(given) + 1 > limits.max_tokens:
        if turn < 0:
          raise ValueError(
            f"the instruction is {len(given)} tokens, limits.max_tokens is "
            f"{limits.max_tokens}"
          )
        return "truncated"
      room = limits.max_tokens - len(builder) - len(given)
      action_limit = min(limits.max_action_tokens, room)
      clock.start()
      try:
        reply = await self.client.generate(session, given, action_limit)
      except Exception as e:
        raise SamplerFailed(f"task {task.name}, turn {turn + 1}: {e}") from e
      clock.stop("model")
      version = reply.weight_version
      builder.append(given, turn=turn, weight_version=version)
      turn += 1
      builder.append(
        reply.tokens,
        turn=turn,
        weight_version=version,
        logprobs=reply.logprobs,
      )
      builder.append_routes(reply.input_routes)
      if time.monotonic() > deadline:
        return "timeout"
      given = []
      if reply.finish == "length":
        given = [chat.stop_id]  # the template closes the turn, once
        done = harness.Step(harness.too_long(action_limit))
      else:
        action = chat.tokenizer.decode(reply.tokens[:-1])
        done = await self._run_command(sandbox, action, clock, deadline)
      if done.done:
        return "completed"
      if time.monotonic() > deadline:
        return "timeout"
      if turn + 1 >= limits.max_turns:
        return "truncated"
      given += chat.observation(done.observation)

  async def _run_command(self, sandbox, action, clock, deadline):
    left = max(deadline - time.monotonic(), 0.1)
    limits = dataclasses.replace(
      self.limits, command_seconds=min(self.limits.command_seconds, left)
    )
    clock.start()
    try:
      return await harness.step(sandbox, action, limits)
    finally:
      clock.stop("shell")


class _Clock:
  """Seconds by phase."""

  def __init__(self):
    self.seconds: Counter[str] = Counter()
    self._since = 0.0

  def start(self) -> None:
    self._since = time.monotonic()

  def stop(self, phase: str) -> None:
    self.seconds[phase] += time.monotonic() - self._since


async def collect(
  attempts: Iterable[Attempt],
  run: Callable[[Attempt], Awaitable[Trajectory]],
  *,
  concurrency: int,
  keep: int | None = None,
  on_done: Callable[[Trajectory], None] = lambda trajectory: None,
) -> list[Trajectory]:
  """Runs attempts until enough episodes have ended.

  Args:
    attempts: what to run, in order of start.
    run: runs one (`Runner.run`).
    concurrency: episodes alive at once (no more than the sampler's slots).
    keep: how many healthy episodes are enough; the surplus is cancelled and
      never awaited for its result. None keeps all.
    on_done: called with each finished trajectory, for progress.

  Returns:
    Trajectories in the order of `attempts`, infra failures included.
  """
  attempts = list(attempts)
  keep = len(attempts) if keep is None else keep
  slots = asyncio.Semaphore(concurrency)

  async def one(i: int) -> tuple[int, Trajectory]:
    async with slots:
      return i, await run(attempts[i])

  tasks = [asyncio.create_task(one(i)) for i in range(len(attempts))]
  finished: dict[int, Trajectory] = {}
  healthy = 0
  try:
    for future in asyncio.as_completed(tasks):
      i, trajectory = await future
      finished[i] = trajectory
      healthy += trajectory.outcome.status != "infra_failure"
      on_done(trajectory)
      if healthy >= keep:
        break
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
  return [finished[i] for i in sorted(finished)]
