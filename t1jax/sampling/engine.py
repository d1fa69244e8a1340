"""Continuous batching: many episodes, each with its own cache, one decode loop.

A session is an episode. Its history stays in its cache slot between turns; a
turn appends the new observation to it and samples until the stop token. The
sessions that have something to do, whatever their turns, share each program.

Two locks, always taken in this order: `_device` is held through a whole step
and guards the cache and the weights; `_host` is held only while sessions are
read or written, so `submit` and `close` never wait for the device.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models.config import ModelConfig
from t1jax.sampling import cache as kv
from t1jax.sampling import decode as programs
from t1jax.sampling.log import Log
from t1jax.sampling.shapes import check_at_least, fit, ladder, place

_prefill = functools.partial(
  jax.jit, static_argnames=("cfg", "columns"), donate_argnames="cache"
)(programs.prefill)
_decode = functools.partial(
  jax.jit, static_argnames=("cfg", "steps", "columns"), donate_argnames="cache"
)(programs.decode)


class EngineError(RuntimeError):
  """The engine cannot do what was asked in its present state."""


class ContextOverflow(EngineError):
  """A session has no room left for its new input and one sampled token."""


@dataclasses.dataclass(frozen=True)
class Generation:
  """One turn's sampled tokens and what was recorded on the way.

  Over an episode of T tokens the `input_routes` of its generations have T - 1
  rows together, in token order: the last token was never an input.
  """

  session: int
  tokens: np.ndarray  # [n] int32, n >= 1; the stop id is last when sampled
  logprobs: np.ndarray  # [n] float32, of the distribution sampled from
  input_routes: np.ndarray  # [m, L, K] int16, every input run for this turn:
  # the last turn's final token, the new ids, and tokens[:-1]
  finish: str  # "stop" | "length" (its budget or the session's room ended)
  weight_version: int


@dataclasses.dataclass
class _Session:
  id: int
  slot: int
  seed: tuple[int, ...]
  key: np.ndarray  # [2] uint32
  temperature: float
  length: int = 0  # tokens in the cache
  pending: list[int] = dataclasses.field(default_factory=list)
  budget: int = 0  # tokens still to sample in this turn; 0 = no turn running
  turn: int = 0  # the engine-wide number of this turn, by time of submission
  tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
  logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
  routes: list[np.ndarray] = dataclasses.field(default_factory=list)


class Engine:
  """Samples for up to `num_slots` episodes at once.

  The same seed, weights and inputs give the same tokens, log-probs and routes,
  bit for bit, in any slot, beside any neighbours and whenever they arrive: a
  program of another shape adds up in another order, so a session's own state
  alone picks the shape of each program that it runs in.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    *,
    num_slots: int,
    max_len: int,
    stop_id: int,
    forbidden_ids: Sequence[int] = (),
    temperature: float = 1.0,
    dtype: str | None = None,
    prefill_rows: int = 8,
    prefill_buckets: Sequence[int] = (16, 64),
    decode_rows: int | None = None,
    decode_steps: int = 8,
    columns: Sequence[int] | None = None,
    log: Log | None = None,
  ):
    """Builds an engine without weights; `load` them before the first step.

    Args:
      cfg: the model; its `dispatch` is used as it is.
      num_slots: sessions that can be open at once.
      max_len: most tokens T of one session.
      stop_id: sampling it ends a turn.
      forbidden_ids: never sampled (control tokens of the template).
      temperature: default of `open`; 0 = greedy.
      dtype: "float32" or "bfloat16": weights, cache and compute while
        sampling; None keeps the model's compute dtype.
      prefill_rows: sessions in one prefill program.
      prefill_buckets: token widths of prefill; an append runs in the smallest
        that holds it, a longer one in several chunks, one a step.
      decode_rows: sessions in one decode program. With more active ones of
        one width, the turns submitted first run first. None: num_slots.
      decode_steps: steps per chunk; new requests join between chunks.
      columns: cache widths that programs attend over; a session runs in the
        smallest that holds it. None: max_len and half of it.
      log: where to note what the programs take in and give out.

    Every combination that occurs compiles once, at most
    len(columns) * (len(prefill_buckets) + 1) programs.

    Raises:
      ValueError: naming the argument.
    """
    if dtype is not None:
      cfg = dataclasses.replace(cfg, compute_dtype=dtype, param_dtype=dtype)
    check_at_least("num_slots", num_slots, 1)
    check_at_least("max_len", max_len, 2)
    check_at_least("prefill_rows", prefill_rows, 1)
    check_at_least("decode_steps", decode_steps, 1)
    if decode_rows is not None:
      check_at_least("decode_rows", decode_rows, 1)
    _check_temperature(temperature)
    for name, ids in (
      ("stop_id", (stop_id,)),
      ("forbidden_ids", forbidden_ids),
    ):
      for token in ids:
        if not 0 <= token < cfg.vocab_size:
          raise ValueError(
            f"Engine {name} holds {token}; ids are in "
            f"[0, vocab_size={cfg.vocab_size})."
          )
    if stop_id in forbidden_ids:
      raise ValueError(
        f"Engine stop_id={stop_id} is also in forbidden_ids: no turn could "
        "end by itself. Remove it there."
      )
    self.cfg = cfg
    self.num_slots = num_slots
    self.max_len = max_len
    self.temperature = temperature
    self._stop_id = np.int32(stop_id)
    self._allowed_V = np.ones(cfg.vocab_size, bool)
    self._allowed_V[list(forbidden_ids)] = False
    self._steps = min(decode_steps, max_len)
    self._prefill_rows = min(prefill_rows, num_slots)
    self._columns = ladder(
      "columns", columns or (max_len, -(-max_len // 2)), max_len
    )
    narrowest = self._columns[0]
    self._buckets = ladder(
      "prefill_buckets", prefill_buckets, min(max(prefill_buckets), narrowest)
    )
    if self._steps > narrowest:
      raise ValueError(
        f"Engine decode_steps={self._steps} exceeds the narrowest of "
        f"columns={self._columns}; lower decode_steps or widen columns."
      )
    self._decode_rows = min(decode_rows or num_slots, num_slots)
    self._log = log
    self._device = threading.Lock()
    self._host = threading.Lock()
    self._sessions: dict[int, _Session] = {}
    self._free = list(range(num_slots))[::-1]
    self._next_id = 0
    self._next_turn = 0
    self._params = None
    self._cache: kv.Cache | None = None
    self._weight_version = -1

  @property
  def free_slots(self) -> int:
    """Sessions that can be opened now."""
    with self._host:
      return len(self._free)

  @property
  def has_work(self) -> bool:
    """Whether `step` would run anything."""
    with self._host:
      return any(s.budget for s in self._sessions.values())

  @property
  def weight_version(self) -> int:
    """The version of the last `load`; -1 before it."""
    return self._weight_version

  def load(self, params, weight_version: int) -> None:
    """Takes a copy of `params`, cast to the sampling dtype.

    Only between episodes: keys and values of old weights do not fit new ones,
    and a session records one weight version.

    Raises:
      EngineError: while sessions are open.
    """
    dtype = jnp.dtype(self.cfg.compute_dtype)
    with self._device, self._host:
      if self._sessions:
        raise EngineError(
          f"load of weight version {weight_version} with sessions still "
          f"open: {len(self._sessions)} open under version "
          f"{self._weight_version}, whose keys their caches hold. Close them."
        )
      # A copy even when the dtype is right: the learner donates its buffers.
      self._params = jax.tree.map(
        lambda x: jnp.array(
          x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
        ),
        params,
      )
      self._cache = kv.allocate(self.cfg, self.num_slots, self._columns[-1])
      self._weight_version = weight_version

  def open(
    self, seed: Sequence[int], *, temperature: float | None = None
  ) -> int:
    """Opens a session and returns its id.

    Args:
      seed: integers in [0, 2**32); equal seeds draw equal noise.
      temperature: overrides the engine's; 0 = greedy.

    Raises:
      EngineError: when no slot is free.
      ValueError: for a bad seed or temperature.
    """
    temperature = self.temperature if temperature is None else temperature
    _check_temperature(temperature)
    key = _session_key(seed)
    with self._host:
      if not self._free:
        raise EngineError(
          f"open: all {self.num_slots} slots hold open sessions; close one "
          "or build the engine with more num_slots."
        )
      session = _Session(
        self._next_id, self._free.pop(), tuple(seed), key, temperature
      )
      if self._log:
        self._log.open(session.seed)
      self._next_id += 1
      self._sessions[session.id] = session
      return session.id

  def room(self, session: int) -> int:
    """Tokens the session can still take, new ids and sampled ones together."""
    with self._host:
      known = self._session(session)
      return self.max_len - known.length - len(known.pending)

  def submit(
    self, session: int, new_ids: Sequence[int], max_new_tokens: int
  ) -> None:
    """Appends `new_ids` to the session and asks for a turn.

    Raises:
      ContextOverflow: when not even one token can be sampled after `new_ids`;
        the session is unchanged.
      EngineError: unknown session, or one whose turn still runs.
      ValueError: for ids outside the vocabulary or max_new_tokens < 1.
    """
    check_at_least("max_new_tokens", max_new_tokens, 1)
    new_ids = [int(i) for i in new_ids]
    for at, token in enumerate(new_ids):
      if not 0 <= token < self.cfg.vocab_size:
        raise ValueError(
          f"submit: new_ids[{at}] is {token}; ids are in "
          f"[0, vocab_size={self.cfg.vocab_size})."
        )
    with self._host:
      known = self._session(session)
      if known.budget:
        raise EngineError(
          f"submit: session {session} still runs its last request; wait for "
          "its Generation or close it."
        )
      held = known.length + len(known.pending)
      if not held and not new_ids:
        raise ValueError(f"submit: session {session} has no token to start at.")
      room = self.max_len - held - len(new_ids)
      if room < 1:
        raise ContextOverflow(
          f"submit: session {session} holds {held} tokens and {len(new_ids)} "
          f"new ones leave no room to sample within max_len={self.max_len}. "
          "End the episode or shorten the observation."
        )
      known.pending.extend(new_ids)
      known.budget = min(max_new_tokens, room)
      known.turn = self._next_turn
      self._next_turn += 1

  def close(self, session: int) -> None:
    """Frees the session's slot; a running turn is dropped whole.

    Raises:
      EngineError: for a session that is not open.
    """
    with self._host:
      self._free.append(self._session(session).slot)
      del self._sessions[session]

  def step(self) -> list[Generation]:
    """Runs one round: a prefill chunk of each waiting session, then decoding.

    Blocks until the device is done. Safe to call while other threads submit,
    open and close.

    Returns:
      The turns that ended.

    Raises:
      EngineError: without weights (never loaded, or lost in a failed step).
      FloatingPointError: when the weights give non-finite log-probs.
    """
    with self._device:
      if self._cache is None:
        raise EngineError(
          "step: the engine has no weights; call load(params, version) first "
          "(after a step that failed, close the sessions and load again)."
        )
      with self._host:
        waiting = [
          s for s in self._sessions.values() if s.budget and len(s.pending) > 1
        ]
      for (width, columns), group in _by(self._prefill_shape, waiting):
        for first in range(0, len(group), self._prefill_rows):
          part = group[first : first + self._prefill_rows]
          self._run_prefill(part, width, columns)
      with self._host:
        ready = [
          s for s in self._sessions.values() if s.budget and len(s.pending) == 1
        ]
      # First come, first served: no turn waits for ever for a row.
      ready.sort(key=lambda s: s.turn)
      generations = []
      for columns, group in _by(self._decode_shape, ready):
        generations += self._run_decode(group[: self._decode_rows], columns)
      return generations

  def _prefill_shape(self, session: _Session) -> tuple[int, int]:
    """Tokens and columns of the session's next prefill program."""
    width = fit(self._buckets, len(session.pending) - 1)
    end = session.length + min(width, len(session.pending) - 1)
    return width, fit(self._columns, end)

  def _decode_shape(self, session: _Session) -> int:
    """Columns of the session's next decode program."""
    return fit(self._columns, session.length + min(session.budget, self._steps))

  def _run_prefill(
    self, sessions: list[_Session], width: int, columns: int
  ) -> None:
    rows = self._prefill_rows
    tokens_RxS = np.zeros((rows, width), np.int32)
    starts_R, lengths_R = np.zeros((2, rows), np.int32)
    slots_R, placed = place([s.slot for s in sessions], rows, self.num_slots)
    for row, session in zip(placed, sessions):
      # The last pending token is left for decode, which samples after it.
      chunk = session.pending[: min(width, len(session.pending) - 1)]
      tokens_RxS[row, : len(chunk)] = chunk
      starts_R[row], lengths_R[row] = session.length, len(chunk)
    cache, self._cache = self._cache, None
    cache, routes_RxSxLxK = _prefill(
      self._params,
      cache,
      slots_R,
      tokens_RxS,
      starts_R,
      lengths_R,
      cfg=self.cfg,
      columns=columns,
    )
    routes_RxSxLxK = np.asarray(routes_RxSxLxK)
    self._cache = cache
    with self._host:
      for row, session in zip(placed, sessions):
        length = lengths_R[row]
        if self._log:
          ids = tokens_RxS[row, :length]
          self._log.inputs(session.seed, int(starts_R[row]), ids)
        session.routes.append(routes_RxSxLxK[row, :length])
        session.length += int(length)
        del session.pending[:length]

  def _run_decode(
    self, sessions: list[_Session], columns: int
  ) -> list[Generation]:
    num_rows = self._decode_rows
    slots_R, placed = place(
      [s.slot for s in sessions], num_rows, self.num_slots
    )
    rows = programs.Rows(
      slots=slots_R,
      tokens=np.zeros(num_rows, np.int32),
      positions=np.zeros(num_rows, np.int32),
      budgets=np.zeros(num_rows, np.int32),
      keys=np.zeros((num_rows, 2), np.uint32),
      temperatures=np.ones(num_rows, np.float32),
    )
    for row, session in zip(placed, sessions):
      rows.tokens[row] = session.pending[0]
      rows.positions[row] = session.length
      rows.budgets[row] = session.budget
      rows.keys[row] = session.key
      rows.temperatures[row] = session.temperature
    cache, self._cache = self._cache, None
    cache, chunk = _decode(
      self._params,
      cache,
      rows,
      self._allowed_V,
      self._stop_id,
      cfg=self.cfg,
      steps=self._steps,
      columns=columns,
    )
    chunk = jax.tree.map(np.asarray, chunk)
    self._cache = cache
    with self._host:
      if self._log:
        for row, session in zip(placed, sessions):
          first = int(rows.positions[row])
          drawn = chunk.tokens[row, : chunk.counts[row]]
          fed = np.append(rows.tokens[row], drawn[:-1])
          self._log.inputs(session.seed, first, fed)
          self._log.samples(session.seed, first + 1, drawn)
      generations = [
        self._extend(
          session,
          chunk.tokens[row, : chunk.counts[row]],
          chunk.logprobs[row, : chunk.counts[row]],
          chunk.routes[row, : chunk.counts[row]],
        )
        for row, session in zip(placed, sessions)
        # Closed while the program ran: nobody waits for it.
        if self._sessions.get(session.id) is session
      ]
    return [g for g in generations if g is not None]

  def _extend(self, session, tokens, logprobs, routes) -> Generation | None:
    """Adds a chunk's results to a session; its turn, if that ended it."""
    if not np.isfinite(logprobs).all():
      at = session.length + 1 + int(np.argmin(np.isfinite(logprobs)))
      raise FloatingPointError(
        f"step: session {session.id} sampled position {at} at log-prob "
        f"{logprobs[~np.isfinite(logprobs)][0]}: weight version "
        f"{self._weight_version} gives non-finite logits. Check the update "
        "that made it."
      )
    session.tokens.append(tokens)
    session.logprobs.append(logprobs)
    session.routes.append(routes)
    session.length += len(tokens)
    session.pending = [int(tokens[-1])]
    session.budget -= len(tokens)
    stopped = tokens[-1] == self._stop_id
    if session.budget and not stopped:
      return None
    generation = Generation(
      session=session.id,
      tokens=np.concatenate(session.tokens),
      logprobs=np.concatenate(session.logprobs),
      input_routes=np.concatenate(session.routes),
      finish="stop" if stopped else "length",
      weight_version=self._weight_version,
    )
    session.budget = 0
    session.tokens, session.logprobs, session.routes = [], [], []
    return generation

  def _session(self, session: int) -> _Session:
    if session not in self._sessions:
      raise EngineError(
        f"session {session} is not open (closed, or never opened here)."
      )
    return self._sessions[session]


def _by(shape: Callable[[_Session], Any], sessions: list[_Session]):
  """(shape, its sessions in their order), from the smallest shape up."""
  groups: dict[Any, list[_Session]] = {}
  for session in sessions:
    groups.setdefault(shape(session), []).append(session)
  return sorted(groups.items())


def _session_key(seed: Sequence[int]) -> np.ndarray:
  key = jax.random.key(0)
  for at, part in enumerate(seed):
    if not 0 <= part < 2**32:
      raise ValueError(
        f"open: seed[{at}] is {part}; each part must be in [0, 2**32)."
      )
    key = jax.random.fold_in(key, np.uint32(part))
  return np.asarray(jax.random.key_data(key))


def _check_temperature(value: float) -> None:
  if not 0.0 <= value < float("inf"):
    raise ValueError(
      f"temperature is {value}; it must be finite and >= 0 (0 = greedy)."
    )
