"""The engine against a naive loop, and the promises of its interface."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import heads, transformer
from t1jax.sampling import decode as programs
from t1jax.sampling import engine as engine_module
from t1jax.sampling.engine import ContextOverflow, Engine, EngineError

STOP, FORBIDDEN = 1, (0, 2, 3)


def drain(engine, generations=None):
  """Steps until nothing is left to do; {session: generation}."""
  generations = {} if generations is None else generations
  while engine.has_work:
    for generation in engine.step():
      assert generation.session not in generations
      generations[generation.session] = generation
  return generations


def ask(engine, session, new_ids, budget):
  engine.submit(session, new_ids, budget)
  return drain(engine)[session]


class Naive:
  """The meaning of the engine: the whole history through the model, no cache,
  for every single token.
  """

  def __init__(self, params, cfg, max_len, temperature=1.0):
    self.temperature, self.max_len = temperature, max_len

    @jax.jit
    def forward(tokens, length):
      at = jnp.arange(max_len, dtype=jnp.int32)
      outputs = transformer.apply(
        params,
        cfg,
        tokens[None],
        at[None],
        (at < length).astype(jnp.int32)[None],
      )
      last = outputs.hidden_BxSxD[0, length - 1]
      return heads.logits(params, cfg, last), outputs.routes_LxBxSxK[:, 0]

    self.forward = forward

  def turn(self, history, seed, budget):
    """Returns (tokens, logprobs, routes of history and tokens but the last)."""
    key = jax.random.key(0)
    for part in seed:
      key = jax.random.fold_in(key, part)
    history, sampled, logprobs = list(history), [], []
    while len(sampled) < budget and len(history) < self.max_len:
      padded = np.zeros(self.max_len, np.int32)
      padded[: len(history)] = history
      logits, routes = self.forward(padded, np.int32(len(history)))
      logits = np.array(logits)
      logits[list(FORBIDDEN)] = -np.inf
      noise = jax.random.gumbel(
        jax.random.fold_in(key, len(history)), logits.shape, jnp.float32
      )
      scaled = logits / (self.temperature or 1.0)
      draw = scaled + (np.asarray(noise) if self.temperature else 0.0)
      token = int(np.argmax(draw))
      logprobs.append(scaled[token] - np.log(np.exp(scaled).sum()))
      history.append(token)
      sampled.append(token)
      if token == STOP:
        break
    routes = np.asarray(routes)[:, : len(history) - 1].transpose(1, 0, 2)
    return sampled, np.array(logprobs), routes


def test_interleaved_sessions_equal_the_naive_loop(engine, params, cfg):
  naive = Naive(params, cfg, engine.max_len)
  rng = np.random.default_rng(0)
  histories, routes, sessions = {}, {}, {}
  turns = {}
  # Sessions start at different times, so that every program mixes fresh
  # prompts, continued turns, long chunked appends and one-token appends.
  for round_ in range(6):
    if round_ < 4:
      seed = (3, round_)
      session = engine.open(seed)
      sessions[session] = seed
      histories[session], routes[session] = [], []
      turns[session] = []
    for session in sessions:
      width = (11, 3, 1, 5, 2)[(session + round_) % 5]
      new_ids = rng.integers(4, cfg.vocab_size, width).tolist()
      if len(histories[session]) + width < engine.max_len:
        turns[session].append((new_ids, len(histories[session])))
        engine.submit(session, new_ids, 3 + round_)
        histories[session] += new_ids
    for session, generation in drain(engine).items():
      expected = naive.turn(histories[session], sessions[session], 3 + round_)
      np.testing.assert_array_equal(generation.tokens, expected[0])
      np.testing.assert_allclose(
        generation.logprobs, expected[1], atol=1e-5, rtol=0
      )
      histories[session] += generation.tokens.tolist()
      routes[session].append(generation.input_routes)
      recorded = np.concatenate(routes[session])
      # T tokens, T - 1 rows, the boundary rows of earlier turns included.
      assert recorded.shape == (
        len(histories[session]) - 1,
        cfg.num_moe_layers,
        cfg.top_k,
      )
      assert recorded.dtype == np.int16
      np.testing.assert_array_equal(recorded, expected[2])
      assert generation.weight_version == 5
  assert max(len(t) for t in turns.values()) >= 4


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_temperature_of_a_session(engine, params, cfg, temperature):
  naive = Naive(params, cfg, engine.max_len, temperature)
  session = engine.open((1, 2, 3), temperature=temperature)
  generation = ask(engine, session, [5, 6, 7], 6)
  tokens, logprobs, _ = naive.turn([5, 6, 7], (1, 2, 3), 6)
  np.testing.assert_array_equal(generation.tokens, tokens)
  np.testing.assert_allclose(generation.logprobs, logprobs, atol=1e-5, rtol=0)


def test_tokens_do_not_depend_on_slot_or_neighbours(engine):
  prompt = [9, 8, 7, 6, 5, 4, 9]
  alone = ask(engine, engine.open((42,)), prompt, 20)
  # Another slot, neighbours at other turns and lengths.
  crowd = [engine.open((i,)) for i in range(4)]
  for i, session in enumerate(crowd):
    engine.submit(session, list(range(4, 6 + 5 * i)), 9 + i)
  engine.step()
  twin = engine.open((42,))
  engine.submit(twin, prompt, 20)
  beside = drain(engine)[twin]
  np.testing.assert_array_equal(alone.tokens, beside.tokens)
  np.testing.assert_array_equal(alone.input_routes, beside.input_routes)
  np.testing.assert_array_equal(alone.logprobs, beside.logprobs)
  engine.close(twin)
  other = ask(engine, engine.open((43,)), prompt, 20)
  assert other.tokens.tolist() != alone.tokens.tolist()


@pytest.mark.parametrize("dispatch", ["dense", "capacity"])
def test_nothing_depends_on_who_arrives_when(params, cfg, dispatch):
  """Episodes of several turns, in four orders and rhythms, bit for bit."""
  engine = Engine(
    dataclasses.replace(cfg, dispatch=dispatch), num_slots=12, max_len=64,
    stop_id=STOP, forbidden_ids=FORBIDDEN, decode_steps=4, columns=(32, 64),
    # More tokens than are worth sorting: the programs do take that dispatch.
    prefill_rows=12, prefill_buckets=(8,), decode_rows=12,
  )  # fmt: skip
  engine.load(params, 0)

  def play(order: int) -> dict[int, list]:
    rng = np.random.default_rng(order)
    todo, live, found = list(rng.permutation(12)), {}, {}
    while todo or live:
      for _ in range(min(len(todo), engine.free_slots, int(rng.integers(7)))):
        episode = int(todo.pop())
        session = engine.open((9, episode))
        live[session], found[episode] = episode, []
        engine.submit(session, list(range(4, 7 + episode)), 5 + episode)
      for reply in engine.step():
        episode = live[reply.session]
        found[episode].append(reply)
        if len(found[episode]) < 3:
          engine.submit(reply.session, [30 + episode] * (episode % 5), 7)
        else:
          engine.close(reply.session)
          del live[reply.session]
    return found

  first, *others = (play(order) for order in range(4))
  for other in others:
    for episode, replies in first.items():
      for a, b in zip(replies, other[episode], strict=True):
        for field in ("tokens", "logprobs", "input_routes"):
          np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_a_reused_slot_forgets_its_last_session(engine):
  first = engine.open((1,))
  fresh = ask(engine, first, [4, 5, 6], 8)
  engine.close(first)
  dirty = engine.open((2,))
  ask(engine, dirty, list(range(4, 44)), 20)
  engine.close(dirty)
  again = ask(engine, engine.open((1,)), [4, 5, 6], 8)
  np.testing.assert_array_equal(fresh.tokens, again.tokens)
  np.testing.assert_allclose(fresh.logprobs, again.logprobs, atol=1e-6)


def test_forbidden_ids_are_never_sampled_and_carry_no_mass():
  logits = jnp.zeros((2000, 6), jnp.float32).at[:, 2].set(50.0)
  allowed = jnp.array([True, True, False, True, False, True])
  keys = jnp.zeros((2000, 2), jnp.uint32)
  tokens, logprobs = programs.sample(
    logits,
    allowed,
    keys,
    jnp.arange(2000, dtype=jnp.int32),
    jnp.ones(2000, jnp.float32),
  )
  counts = np.bincount(np.asarray(tokens), minlength=6)
  assert counts[2] == counts[4] == 0
  # Four equally likely ids: 500 each, standard deviation 19.
  assert np.abs(counts[[0, 1, 3, 5]] - 500).max() < 100
  np.testing.assert_allclose(logprobs, np.log(0.25), atol=1e-6)


def test_stop_and_length(engine):
  lengths = set()
  for seed in range(12):
    session = engine.open((seed,))
    generation = ask(engine, session, [7, 8], 30)
    body = generation.tokens[:-1]
    assert STOP not in body
    assert not set(body.tolist()) & set(FORBIDDEN)
    if generation.finish == "stop":
      assert generation.tokens[-1] == STOP
    else:
      assert generation.finish == "length"
      assert len(generation.tokens) == 30 and generation.tokens[-1] != STOP
    lengths.add((generation.finish, len(generation.tokens)))
    engine.close(session)
  assert {finish for finish, _ in lengths} == {"stop", "length"}


def test_max_len_ends_the_turn_and_then_refuses(engine, params, cfg):
  history, session = list(range(4, 44)), engine.open((0,))
  naive = Naive(params, cfg, engine.max_len)
  expected = naive.turn(history, (0,), 1000)
  generation = ask(engine, session, history, 1000)
  np.testing.assert_array_equal(generation.tokens, expected[0])
  room = engine.room(session)
  assert room == engine.max_len - len(history) - len(generation.tokens)
  # Fill what is left: one token of room still samples one.
  if room:
    last = ask(engine, session, [5] * (room - 1), 1000)
    assert len(last.tokens) == 1
    assert last.finish in ("length", "stop")
  assert engine.room(session) == 0
  with pytest.raises(ContextOverflow, match=r"64 tokens.*max_len=64"):
    engine.submit(session, [], 1)
  with pytest.raises(ContextOverflow):
    engine.submit(session, [4], 1)
  assert not engine.has_work


def test_a_length_cut_turn_continues(engine, params, cfg):
  naive = Naive(params, cfg, engine.max_len)
  session = engine.open((11,))
  first = ask(engine, session, [4, 5], 2)
  assert first.finish == "length"
  second = ask(engine, session, [STOP, 9], 4)
  history = [4, 5, *first.tokens.tolist(), STOP, 9]
  tokens, _, routes = naive.turn(history, (11,), 4)
  np.testing.assert_array_equal(second.tokens, tokens)
  recorded = np.concatenate([first.input_routes, second.input_routes])
  np.testing.assert_array_equal(recorded, routes)


def test_abort_frees_the_slot_and_leaves_the_others_alone(engine):
  reference = ask(engine, engine.open((1,)), [4, 5, 6], 12)
  victim, survivor = engine.open((2,)), engine.open((1,))
  engine.submit(victim, list(range(4, 24)), 40)
  engine.submit(survivor, [4, 5, 6], 12)
  engine.step()
  free = engine.free_slots
  engine.close(victim)
  assert engine.free_slots == free + 1
  heir = engine.open((1,))  # takes the victim's slot, half filled
  engine.submit(heir, [4, 5, 6], 12)
  done = drain(engine)
  assert set(done) <= {survivor, heir}
  assert victim not in done
  np.testing.assert_array_equal(done[heir].tokens, reference.tokens)
  with pytest.raises(EngineError, match="not open"):
    engine.close(victim)


def test_more_turns_than_rows_run_first_come_first_served(params, cfg):
  settings = dict(num_slots=6, max_len=64, stop_id=STOP, prefill_rows=3)
  settings |= dict(prefill_buckets=(4, 8), decode_steps=4, columns=(32, 64))
  settings |= dict(forbidden_ids=FORBIDDEN)
  narrow = Engine(cfg, **settings, decode_rows=2)
  wide = Engine(cfg, **settings, decode_rows=6)
  tokens = {}
  for engine in (narrow, wide):
    engine.load(params, 1)
    for i in reversed(range(6)):
      engine.submit(engine.open((i,)), [4, 5 + i, 6], 4)
    tokens[engine] = {k: v.tokens.tolist() for k, v in drain(engine).items()}
  assert list(tokens[narrow]) == sorted(tokens[narrow])
  assert tokens[narrow] == tokens[wide]


def test_load_waits_for_open_sessions(engine, params):
  session = engine.open((0,))
  with pytest.raises(EngineError, match="1 open under version 5"):
    engine.load(params, 6)
  before = ask(engine, session, [4, 5], 5)
  engine.close(session)
  try:
    engine.load(jax.tree.map(lambda x: x * 0.5, params), 6)
    changed = ask(engine, engine.open((0,)), [4, 5], 5)
    assert changed.weight_version == 6
    assert changed.tokens.tolist() != before.tokens.tolist()
  finally:
    for open_session in list(engine._sessions):
      engine.close(open_session)
    engine.load(params, 5)


def test_load_copies_what_the_learner_may_donate(engine, params):
  mine = jax.tree.map(jnp.copy, params)
  engine.load(mine, 5)
  jax.tree.map(lambda x: x.delete(), mine)
  assert len(ask(engine, engine.open((0,)), [4], 2).tokens) >= 1


def test_non_finite_weights_are_named(engine, params):
  broken = jax.tree.map(lambda x: x * jnp.nan, params)
  try:
    engine.load(broken, 8)
    engine.submit(engine.open((0,)), [4, 5], 3)
    with pytest.raises(FloatingPointError, match="weight version 8"):
      engine.step()
  finally:
    for session in list(engine._sessions):
      engine.close(session)
    engine.load(params, 5)


def test_bfloat16_sampling(params, cfg):
  engine = Engine(
    cfg,
    num_slots=2,
    max_len=16,
    stop_id=STOP,
    dtype="bfloat16",
    prefill_buckets=(4,),
    decode_steps=4,
    decode_rows=2,
    columns=(16,),
  )
  engine.load(params, 1)
  kinds = {x.dtype for x in jax.tree.leaves((engine._params, engine._cache))}
  assert kinds == {jnp.dtype("bfloat16")}
  generation = ask(engine, engine.open((0,)), [4, 5, 6], 6)
  assert generation.logprobs.dtype == np.float32
  assert np.isfinite(generation.logprobs).all()


@pytest.mark.parametrize(
  "call, error, message",
  [
    (lambda e: e.submit(999, [4], 1), EngineError, "session 999 is not open"),
    (lambda e: e.submit(e.open((0,)), [], 1), ValueError, "no token"),
    (lambda e: e.submit(e.open((0,)), [4, 48], 1), ValueError, r"new_ids\[1\]"),
    (lambda e: e.submit(e.open((0,)), [4], 0), ValueError, "max_new_tokens"),
    (lambda e: e.open((-1,)), ValueError, r"seed\[0\]"),
    (lambda e: e.open((0,), temperature=-1.0), ValueError, "temperature"),
    (lambda e: [e.open((i,)) for i in range(7)], EngineError, "all 6 slots"),
  ],
)
def test_bad_requests_say_what_is_wrong(engine, call, error, message):
  with pytest.raises(error, match=message):
    call(engine)
  assert not engine.has_work


def test_submitting_twice_is_refused(engine):
  session = engine.open((0,))
  engine.submit(session, [4], 3)
  with pytest.raises(EngineError, match="still runs"):
    engine.submit(session, [5], 3)


@pytest.mark.parametrize(
  "field, value",
  [
    ("num_slots", 0),
    ("max_len", 1),
    ("stop_id", 48),
    ("forbidden_ids", (STOP,)),
    ("forbidden_ids", (-1,)),
    ("decode_steps", 9),
    ("decode_rows", 0),
    ("temperature", float("nan")),
    ("prefill_buckets", (0,)),
  ],
)
def test_bad_settings_fail_before_anything_is_built(cfg, field, value):
  settings = dict(num_slots=2, max_len=16, stop_id=STOP, columns=(8, 16))
  with pytest.raises(ValueError, match=field):
    Engine(cfg, **{**settings, field: value})


def test_step_without_weights_says_load(cfg):
  engine = Engine(cfg, num_slots=2, max_len=16, stop_id=STOP)
  with pytest.raises(EngineError, match="load"):
    engine.step()


def test_compile_count_is_bounded(engine, cfg, monkeypatch):
  """One trace a shape: widths x buckets to prefill, widths to decode."""
  chex.clear_trace_counter()
  shapes = {"_prefill": 2 * 2, "_decode": 2}
  for name, function in (
    ("_prefill", programs.prefill),
    ("_decode", programs.decode),
  ):
    bounded = jax.jit(
      chex.assert_max_traces(function, n=shapes[name]),
      static_argnames=("cfg", "steps", "columns")
      if name == "_decode"
      else ("cfg", "columns"),
      donate_argnames="cache",
    )
    monkeypatch.setattr(engine_module, name, bounded)
  rng = np.random.default_rng(1)
  for count in (1, 2, 5, 6):
    sessions = [engine.open((i,)) for i in range(count)]
    for _ in range(4):
      for session in sessions:
        width = min(int(rng.integers(1, 15)), engine.room(session) - 1)
        if width >= 0:
          budget = int(rng.integers(1, 8))
          engine.submit(session, [4] * width, budget)
      drain(engine)
    for session in sessions:
      engine.close(session)
