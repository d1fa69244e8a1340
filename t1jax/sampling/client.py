"""The asynchronous front of a sampler: what an episode talks to."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Protocol

from t1jax.sampling.engine import Engine, EngineError, Generation


class PolicyClient(Protocol):
  """A policy that many episodes sample from at once."""

  async def open(
    self, seed: Sequence[int], *, temperature: float | None = None
  ) -> int:
    """Opens a session; waits while every slot is taken."""

  async def generate(
    self, session: int, new_ids: Sequence[int], max_new_tokens: int
  ) -> Generation:
    """Appends `new_ids` to the session's history and samples one turn.

    Cancelling it closes the session: its turn is lost half-way, and a history
    that nobody recorded cannot be continued.
    """

  async def close(self, session: int) -> None:
    """Ends the session and frees its slot; closing twice is harmless."""


class EngineClient:
  """Drives an in-process `Engine` from one thread of its own.

  Use it as an async context manager, inside one event loop:

    async with EngineClient(engine) as client:
      session = await client.open((seed, task, attempt))
      turn = await client.generate(session, prompt_ids, 64)

  Requests join at the engine's next step and each resolves when its own turn
  ends. An exception in a step reaches every request, waiting and later ones,
  and closes the sessions opened through this client, as leaving the context
  does.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    self._futures: dict[int, asyncio.Future[Generation]] = {}
    self._sessions: set[int] = set()
    self._slots: asyncio.Semaphore
    self._loop: asyncio.AbstractEventLoop
    self._wake = threading.Event()
    self._closing = False
    self._error: Exception | None = None
    self._thread = threading.Thread(
      target=self._drive, name="t1jax-sampler", daemon=True
    )

  async def __aenter__(self) -> "EngineClient":
    self._loop = asyncio.get_running_loop()
    # Slots that others hold already may never come free: not counted.
    self._slots = asyncio.Semaphore(self._engine.free_slots)
    self._thread.start()
    return self

  async def __aexit__(self, *exc_info) -> None:
    await self.aclose()

  async def aclose(self) -> None:
    """Stops the thread after its running step; waiting requests are failed."""
    self._closing = True
    self._wake.set()
    await asyncio.to_thread(self._thread.join)
    self._fail(EngineError("the sampling client was closed"))

  async def open(
    self, seed: Sequence[int], *, temperature: float | None = None
  ) -> int:
    await self._slots.acquire()
    try:
      self._check()
      session = self._engine.open(seed, temperature=temperature)
    except BaseException:
      self._slots.release()
      raise
    self._sessions.add(session)
    return session

  async def generate(
    self, session: int, new_ids: Sequence[int], max_new_tokens: int
  ) -> Generation:
    self._check()
    self._engine.submit(session, new_ids, max_new_tokens)
    future = self._loop.create_future()
    self._futures[session] = future
    self._wake.set()
    try:
      return await future
    except asyncio.CancelledError:
      self._close(session)
      raise
    finally:
      self._futures.pop(session, None)

  async def close(self, session: int) -> None:
    self._close(session)

  def _close(self, session: int) -> None:
    if session in self._sessions:
      self._sessions.discard(session)
      self._engine.close(session)
      self._slots.release()

  def _check(self) -> None:
    if self._error is not None:
      raise EngineError(
        f"the sampler has stopped: {self._error}"
      ) from self._error

  def _drive(self) -> None:
    """The thread: steps while there is work, sleeps while there is none."""
    while True:
      self._wake.wait()
      self._wake.clear()
      try:
        while not self._closing and self._engine.has_work:
          generations = self._engine.step()
          if generations:
            self._loop.call_soon_threadsafe(self._deliver, generations)
      except Exception as error:
        self._loop.call_soon_threadsafe(self._fail, error)
        return
      if self._closing:
        return

  def _deliver(self, generations: list[Generation]) -> None:
    for generation in generations:
      future = self._futures.get(generation.session)
      if future is not None and not future.done():
        future.set_result(generation)

  def _fail(self, error: Exception) -> None:
    if self._error is None:
      self._error = error
    for future in self._futures.values():
      if not future.done():
        failure = EngineError(f"the sampler has stopped: {error}")
        failure.__cause__ = error
        future.set_exception(failure)
    # Wakes those that wait for a slot, one after the other, to see the error.
    for session in tuple(self._sessions):
      self._close(session)
