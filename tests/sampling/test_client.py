"""The asynchronous client: many episodes, errors, cancellation, shutdown."""

import asyncio
import random
import threading

import numpy as np
import pytest

from t1jax.sampling.client import EngineClient
from t1jax.sampling.engine import EngineError


async def episode(client, seed, turns=3, delay=None):
  """Plays a few turns; everything that was sampled."""
  session = await client.open((seed,))
  tokens = []
  for turn in range(turns):
    if delay is not None:
      await asyncio.sleep(delay.random() * 0.02)
    generation = await client.generate(session, [4 + turn, 5 + seed % 30], 5)
    tokens.append(generation.tokens.tolist())
  await client.close(session)
  return tokens


def test_many_episodes_with_random_delays(engine):
  async def run(count, jitter):
    async with EngineClient(engine) as client:
      delays = [random.Random(jitter + i) for i in range(count)]
      return await asyncio.gather(
        *(episode(client, i, delay=delays[i]) for i in range(count))
      )

  # More episodes than slots: the surplus waits in `open`.
  first = asyncio.run(run(14, 0))
  second = asyncio.run(run(14, 1000))
  assert first == second  # whoever ran beside whom
  assert engine.free_slots == engine.num_slots


def test_the_event_loop_runs_while_the_engine_steps(engine):
  step, loop_ran = engine.step, threading.Event()

  def step_that_needs_the_loop():
    # Deadlocks, up to the timeout, if a step held the event loop.
    assert loop_ran.wait(30), "the event loop stood still during a step"
    return step()

  async def run():
    async with EngineClient(engine) as client:
      task = asyncio.create_task(episode(client, 0))
      await asyncio.sleep(0.05)
      assert not task.done()
      loop_ran.set()
      return await task

  engine.step = step_that_needs_the_loop
  try:
    assert len(asyncio.run(run())) == 3
  finally:
    del engine.step


def test_an_error_reaches_every_waiter_and_later_calls(engine):
  async def run():
    async with EngineClient(engine) as client:
      sessions = [await client.open((i,)) for i in range(engine.num_slots)]
      engine.step = broken
      results = await asyncio.wait_for(
        asyncio.gather(
          client.open((7,)),  # wait for a slot
          client.open((8,)),
          *(client.generate(s, [4], 3) for s in sessions),
          return_exceptions=True,
        ),
        timeout=10,
      )
      with pytest.raises(EngineError, match="device on fire"):
        await client.generate(sessions[0], [4], 3)
      with pytest.raises(EngineError, match="device on fire"):
        await client.open((9,))
      return results

  def broken():
    raise RuntimeError("device on fire")

  try:
    results = asyncio.run(run())
  finally:
    del engine.step
  assert [type(r) for r in results] == [EngineError] * (2 + engine.num_slots)
  assert all("device on fire" in str(r) for r in results)
  assert all(isinstance(r.__cause__, RuntimeError) for r in results)
  assert engine.free_slots == engine.num_slots
  assert not engine.has_work


def test_a_bad_request_fails_alone(engine):
  async def run():
    async with EngineClient(engine) as client:
      good, bad = await client.open((0,)), await client.open((1,))
      results = await asyncio.gather(
        client.generate(good, [4], 3),
        client.generate(bad, [4000], 3),
        return_exceptions=True,
      )
      assert isinstance(results[1], ValueError)
      # The session is unharmed.
      return results[0], await client.generate(bad, [4], 3)

  for generation in asyncio.run(run()):
    assert len(generation.tokens) >= 1


def test_cancellation_frees_the_slot(engine):
  async def run():
    async with EngineClient(engine) as client:
      session = await client.open((0,))
      task = asyncio.create_task(client.generate(session, [4] * 20, 40))
      await asyncio.sleep(0)
      task.cancel()
      with pytest.raises(asyncio.CancelledError):
        await task
      assert engine.free_slots == engine.num_slots
      await client.close(session)  # the episode's own clean-up: harmless
      return await episode(client, 1)

  assert len(asyncio.run(run())) == 3


def test_cancelling_the_wait_for_a_slot_loses_none(engine):
  async def run():
    async with EngineClient(engine) as client:
      held = [await client.open((i,)) for i in range(engine.num_slots)]
      impatient = asyncio.create_task(client.open((90,)))
      patient = asyncio.create_task(client.open((91,)))
      await asyncio.sleep(0.01)
      assert not impatient.done() and not patient.done()
      impatient.cancel()
      await client.close(held[0])
      session = await asyncio.wait_for(patient, 5)
      with pytest.raises(asyncio.CancelledError):
        await impatient
      generation = await client.generate(session, [4], 2)
      assert isinstance(generation.tokens, np.ndarray)

  asyncio.run(run())
  assert engine.free_slots == engine.num_slots


def test_leaving_early_fails_what_still_waits(engine):
  async def run():
    client = EngineClient(engine)
    async with client:
      session = await client.open((0,))
      task = asyncio.create_task(client.generate(session, [4] * 20, 40))
      await asyncio.sleep(0)
    assert not client._thread.is_alive()
    with pytest.raises(EngineError, match="closed"):
      await task
    with pytest.raises(EngineError, match="closed"):
      await client.open((1,))

  asyncio.run(run())
  assert engine.free_slots == engine.num_slots
  assert not engine.has_work
