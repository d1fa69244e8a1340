"""Episodes in real sandboxes, played by policies whose moves are known."""

import asyncio
import contextlib
import time

import numpy as np
import pytest

from t1jax.models import tokenizer
from t1jax.rewards import verifier
from t1jax.rollout import collect, demonstrations, harness
from t1jax.rollout.chat import Chat
from t1jax.sandbox.base import SandboxError
from t1jax.sandbox.environment import install_environment
from t1jax.sandbox.farm import Farm
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task
from t1jax.tasks.task import TaskError, from_bytes

LIMITS = harness.Limits(
  max_turns=6, max_tokens=600, max_action_tokens=60, command_seconds=5.0
)


class Reply:
  """What a sampler returns for one turn (see sampling.engine.Generation)."""

  def __init__(self, tokens, inputs, finish):
    self.tokens = np.asarray(tokens, np.int32)
    self.logprobs = np.full(len(tokens), -0.25, np.float32)
    self.input_routes = np.tile(np.arange(2), (inputs, 1, 1)).astype(np.int16)
    self.finish, self.weight_version = finish, 3


class Script:
  """A policy that types a list of commands: a PolicyClient without a model."""

  def __init__(self, chat, commands):
    self.chat, self.commands = chat, list(commands)
    self.seen, self.turn, self.closed = [], 0, False

  async def open(self, seed):
    return 0

  async def close(self, session):
    self.closed = True

  async def generate(self, session, new_ids, max_new_tokens):
    command = self.commands[min(self.turn, len(self.commands) - 1)]
    pending = 1 if self.turn else 0
    self.turn += 1
    self.seen.append(list(new_ids))
    ids = [*self.chat.tokenizer.encode(command), self.chat.stop_id]
    finish = "stop" if len(ids) <= max_new_tokens else "length"
    ids = ids[:max_new_tokens]
    return Reply(ids, pending + len(new_ids) + len(ids) - 1, finish)


@pytest.fixture(scope="module")
def chat():
  corpus = ["grep mv cat sed echo submit .txt"] * 20
  return Chat(tokenizer.train(corpus, vocab_size=285))


def play(chat, cases, *, limits=LIMITS, keep=None, concurrency=8, verify=None):
  """Plays (task, client) pairs in one farm; returns trajectories."""

  async def main():
    async with Farm(max_sandboxes=8) as farm:

      @contextlib.asynccontextmanager
      async def open_sandbox(task):
        async with farm.sandbox() as sandbox:
          await install_environment(sandbox, task)
          yield sandbox

      clients = {id(task): client for task, client in cases}

      async def run(attempt):
        runner = collect.Runner(
          client=clients[id(attempt.task)],
          chat=chat,
          routing=collect.Routing(2, 1, 2),
          limits=limits,
          open_sandbox=open_sandbox,
          verify=verify or verifier.verify,
        )
        return await runner.run(attempt)

      attempts = [
        collect.Attempt(task, 0, (0, 0, i, 0))
        for i, (task, _) in enumerate(cases)
      ]
      return await collect.collect(
        attempts, run, concurrency=concurrency, keep=keep
      )

  return asyncio.run(main())


def tasks(count, split="train"):
  return [
    make_task(FAMILIES[i % len(FAMILIES)], split, i) for i in range(count)
  ]


def test_the_oracle_succeeds_and_a_policy_that_submits_at_once_fails(chat):
  good, lazy = tasks(4), tasks(4)
  cases = [(t, Script(chat, [*t.oracle, "submit"])) for t in good]
  cases += [(t, Script(chat, ["submit"])) for t in lazy]
  done = play(chat, cases)
  assert [t.outcome.success for t in done] == [True] * 4 + [False] * 4
  for trajectory, (task, client) in zip(done, cases, strict=True):
    assert trajectory.outcome.status == "completed"
    assert len(trajectory.outcome.assertions) == task.num_assertions
    assert client.closed and trajectory.family == task.family
    kinds = {a.name: a.kind for a in trajectory.outcome.assertions}
    assert {n for n, k in kinds.items() if k == "gate"} == set(task.gates)
    assert {"boot", "model", "verify"} <= set(trajectory.outcome.seconds)
  for trajectory in done[4:]:
    passed = {a.name for a in trajectory.outcome.assertions if a.passed}
    assert passed  # hygiene holds for a policy that does nothing ...
    assert not trajectory.outcome.success  # ... and is no success


def test_tokens_are_what_the_policy_saw_and_typed(chat):
  task = make_task(FAMILIES[0], "train", 5)
  client = Script(chat, [*task.oracle, "submit"])
  (done,) = play(chat, [(task, client)])
  expected, mask, turns = [], [], []
  for turn, given in enumerate(client.seen):
    typed = [*task.oracle, "submit"][turn]
    ids = [*chat.tokenizer.encode(typed), chat.stop_id]
    expected += given + ids
    mask += [False] * len(given) + [True] * len(ids)
    turns += [turn - 1] * len(given) + [turn] * len(ids)
  assert done.tokens.tolist() == expected
  assert done.loss_mask.tolist() == mask
  assert done.turn_ids.tolist() == turns
  assert (done.routes[:-1] >= 0).all() and (done.routes[-1] == -1).all()
  assert (done.weight_version == 3).all()


def test_a_slow_command_holds_nobody_and_ends_at_its_limit(chat):
  slow, quick = tasks(2)
  limits = harness.Limits(max_turns=6, max_tokens=600, command_seconds=6.0)
  ended = {}

  async def verify(sandbox, task):
    ended[task.name] = time.monotonic()
    return await verifier.verify(sandbox, task)

  cases = [
    (slow, Script(chat, ["sleep 60", "submit"])),
    (quick, Script(chat, [*quick.oracle, "submit"])),
  ]
  done = play(chat, cases, limits=limits, verify=verify)
  assert ended[quick.name] < ended[slow.name]
  assert done[1].outcome.success and done[0].outcome.status == "completed"
  seen = chat.tokenizer.decode(done[0].tokens)
  assert b"[stopped after 6 s]" in seen


def test_limits_cut_an_episode_that_is_still_verified(chat):
  turns, length, total = tasks(3)
  limits = harness.Limits(max_turns=3, max_tokens=400, max_action_tokens=12)
  cases = [
    (turns, Script(chat, ["true"])),
    (length, Script(chat, ["echo " + "x" * 40, "submit"])),
    (total, Script(chat, ["seq 400"])),
  ]
  done = play(chat, cases, limits=limits)
  assert [t.outcome.status for t in done] == [
    "truncated",
    "completed",
    "truncated",
  ]
  assert all(t.outcome.assertions for t in done)
  assert done[0].num_turns == 3
  # The template closes a cut action once, and that stop is not trained on.
  stops = np.flatnonzero(done[1].tokens == chat.stop_id)
  assert not done[1].loss_mask[stops[0]] and done[1].loss_mask[stops[1]]
  assert done[1].loss_mask[: stops[0]].sum() == 12
  assert len(done[2]) <= 400


def test_an_infra_fault_is_told_apart_from_a_failure(chat):
  sick, broken, well = tasks(3)

  async def verify(sandbox, task):
    if task is sick:
      raise SandboxError("the sandbox vanished")
    if task is broken:
      raise KeyError("a fault of ours")
    return await verifier.verify(sandbox, task)

  cases = [(t, Script(chat, ["submit"])) for t in (sick, broken, well)]
  done = play(chat, cases, verify=verify)
  assert [t.outcome.status for t in done] == [
    "infra_failure",
    "infra_failure",
    "completed",
  ]
  assert done[0].outcome.error == "the sandbox vanished"
  assert done[1].outcome.error.startswith("KeyError")
  assert not done[0].outcome.assertions


def test_a_dead_sampler_ends_the_collection(chat):
  class Dead(Script):
    async def generate(self, session, new_ids, max_new_tokens):
      raise RuntimeError("out of memory")

  (task,) = tasks(1)
  with pytest.raises(collect.SamplerFailed, match="out of memory"):
    play(chat, [(task, Dead(chat, ["submit"]))])


def test_the_surplus_is_cancelled_and_not_awaited(chat):
  cases = [(t, Script(chat, ["submit"])) for t in tasks(3)]
  stuck = make_task(FAMILIES[0], "train", 77)
  cases.append((stuck, Script(chat, ["sleep 4", "sleep 4", "submit"])))
  done = play(chat, cases, keep=3)
  assert len(done) == 3 and stuck.name not in {t.task for t in done}
  assert cases[-1][1].turn < 2


def record(items, **changes):
  async def main():
    async with Farm(max_sandboxes=4) as farm:

      @contextlib.asynccontextmanager
      async def open_sandbox(task):
        async with farm.sandbox() as sandbox:
          await install_environment(sandbox, task)
          yield sandbox

      arguments = {
        "open_sandbox": open_sandbox,
        "verify": verifier.verify,
        "limits": LIMITS,
        "concurrency": 4,
      }
      return await demonstrations.record(items, **{**arguments, **changes})

  return asyncio.run(main())


def test_demonstrations_hold_what_an_episode_would_see(chat):
  items = tasks(5)
  for example, task in zip(record(items), items, strict=True):
    assert from_bytes(example["task"]) == task
    told = demonstrations.imitate(chat, example)
    client = Script(chat, [*task.oracle, "submit"])
    (episode,) = play(chat, [(task, client)])
    assert told.tokens.tolist() == episode.tokens.tolist()
    assert told.loss_mask.tolist() == episode.loss_mask.tolist()


def test_a_failing_oracle_is_named(chat):
  import dataclasses

  bad = dataclasses.replace(tasks(1)[0], oracle=("true",))
  with pytest.raises(TaskError, match=rf"{bad.name}.*failed: "):
    record([bad])


def test_a_session_hides_the_task_and_shows_names(chat):
  (example,) = record(tasks(1))
  rng = np.random.default_rng(0)
  told = demonstrations.session(chat, example, ["amber", "cedar"], rng)
  text = chat.tokenizer.decode(told.tokens)
  assert example["instruction"].strip().encode() not in text
  assert b"amber" in text and example["turns"][0]["command"].encode() in text
  typed = chat.tokenizer.decode(told.tokens[told.loss_mask]).decode()
  assert typed == "".join(turn["command"] for turn in example["turns"])
