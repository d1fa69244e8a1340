"""TB-GAE: is it right, and what does the recursion over turns save?

    python -m t1jax.bench.tb_gae

One stream of 262,144 tokens in 60 turns, the size of Terminal-RSI's context.
Compared are `tb_gae`, a reverse scan over turns; the same recursion token by
token in NumPy (a Python loop, as trainers have it) and in a jitted
`lax.scan`. Prints one JSON line:

  max_abs_error      against the float64 recursion, over the largest return
  speedup_vs_numpy   NumPy loop / tb_gae, medians over rounds
  speedup_vs_scan    token-wise lax.scan / tb_gae, medians over rounds
  identities         largest violation of each, over the return's scale:
    plain_gae          gamma = lambda = 1 equals GAE with gamma = lambda = 1
    boundary_decay     V = 0, one terminal reward: return (gamma lambda)^B
    observations       inserting observation tokens changes nothing
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.rl import advantages

NUM_TOKENS = 262_144
NUM_TURNS = 60
MAX_TURNS = 64
GAMMA_TURN = 0.97
LAMBDA_TURN = 0.9
ROUNDS = 15


def recursion_by_token(
  rewards_T: np.ndarray,
  values_T: np.ndarray,
  turn_ids_T: np.ndarray,
  action_mask_T: np.ndarray,
  gamma_turn: float,
  lambda_turn: float,
) -> tuple[np.ndarray, np.ndarray]:
  """The slow twin: float64, one token at a time, as the equation reads."""
  actions = np.flatnonzero(action_mask_T)
  # A reward past an action, on what answers it, is that action's.
  owner = np.searchsorted(actions, np.arange(len(rewards_T)), "right") - 1
  owned = owner >= 0
  rewards = np.bincount(
    owner[owned],
    weights=rewards_T[owned].astype(np.float64),
    minlength=len(actions),
  )
  values = values_T[actions].astype(np.float64)
  turns = turn_ids_T[actions]
  found = np.zeros(len(actions), np.float64)
  later = 0.0
  for i in reversed(range(len(actions))):
    last = i + 1 == len(actions)
    boundary = not last and turns[i + 1] > turns[i]
    gamma = gamma_turn if boundary else 1.0
    lam = lambda_turn if boundary else 1.0
    later_value = 0.0 if last else values[i + 1]
    later = rewards[i] + gamma * later_value - values[i] + gamma * lam * later
    found[i] = later
  advantages_T = np.zeros(len(rewards_T), np.float64)
  returns_T = np.zeros(len(rewards_T), np.float64)
  advantages_T[actions] = found
  returns_T[actions] = found + values
  return advantages_T, returns_T


def make_stream(
  rng: np.random.Generator, num_tokens: int, num_turns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Rewards, values, turn ids, action mask of a made-up episode.

  A prompt, then turns of uneven length, about two fifths of each sampled and
  the rest observation. A small reward on some actions, a terminal one.
  """
  cuts = np.sort(rng.choice(num_tokens - 1, num_turns, replace=False) + 1)
  turn_ids = np.searchsorted(cuts, np.arange(num_tokens), "right") - 1
  lengths = np.diff(np.append(cuts, num_tokens))
  within = np.arange(num_tokens) - cuts[np.maximum(turn_ids, 0)]
  sampled = np.maximum(1, (0.4 * lengths).astype(int))
  mask = (turn_ids >= 0) & (within < sampled[np.maximum(turn_ids, 0)])
  rewards = np.where(
    mask & (rng.random(num_tokens) < 1e-3), rng.normal(size=num_tokens), 0.0
  )
  rewards[np.flatnonzero(mask)[-1]] += 1.0
  values = rng.normal(size=num_tokens)
  return (
    rewards.astype(np.float32),
    values.astype(np.float32),
    turn_ids.astype(np.int32),
    mask,
  )


def insert_observations(stream, rng: np.random.Generator, count: int):
  """The stream with `count` more observation tokens, at random places."""
  rewards, values, turn_ids, mask = stream
  places = np.sort(rng.integers(1, len(rewards) + 1, count))
  return (
    np.insert(rewards, places, np.float32(0.0)),
    np.insert(values, places, rng.normal(size=count).astype(np.float32)),
    np.insert(turn_ids, places, turn_ids[places - 1]),
    np.insert(mask, places, False),
  )


def identities(num_tokens: int = 4096, num_turns: int = 60) -> dict:
  """Largest violation of each identity, relative to the return's scale."""
  rng = np.random.default_rng(1)
  stream = make_stream(rng, num_tokens, num_turns)
  rewards, values, turn_ids, mask = stream
  run = jax.jit(
    functools.partial(advantages.tb_gae, num_turns=MAX_TURNS),
  )
  clock = dict(gamma_turn=GAMMA_TURN, lambda_turn=LAMBDA_TURN)

  undiscounted, _ = run(*stream, gamma_turn=1.0, lambda_turn=1.0)
  plain, plain_returns = jax.jit(
    functools.partial(advantages.gae, gamma=1.0, lam=1.0)
  )(rewards, values, mask)

  terminal = np.zeros_like(rewards)
  terminal[np.flatnonzero(mask)[-1]] = 1.0
  _, decayed = run(terminal, 0 * values, turn_ids, mask, **clock)
  crossed = turn_ids.max() - turn_ids
  expected = np.where(mask, (GAMMA_TURN * LAMBDA_TURN) ** crossed, 0.0)

  compact, compact_returns = run(*stream, **clock)
  longer = insert_observations(stream, rng, num_tokens)
  expanded, _ = run(*longer, **clock)

  return {
    "plain_gae": _gap(undiscounted, plain, plain_returns),
    "boundary_decay": _gap(decayed, expected, expected),
    "observations": _gap(
      np.asarray(expanded)[longer[3]],
      np.asarray(compact)[mask],
      compact_returns,
    ),
  }


def measure() -> dict:
  """All figures of the module's docstring."""
  stream = make_stream(np.random.default_rng(0), NUM_TOKENS, NUM_TURNS)
  clock = dict(gamma_turn=GAMMA_TURN, lambda_turn=LAMBDA_TURN)
  on_device = tuple(map(jnp.asarray, stream))
  by_turn = jax.jit(
    functools.partial(advantages.tb_gae, **clock, num_turns=MAX_TURNS)
  )
  by_token = jax.jit(functools.partial(advantages.token_gae, **clock))
  by_loop = functools.partial(recursion_by_token, *stream, **clock)

  expected, expected_returns = by_loop()
  fast, scan, loop = _median_seconds(
    lambda: by_turn(*on_device), lambda: by_token(*on_device), by_loop
  )
  return {
    "bench": "tb_gae",
    "num_tokens": NUM_TOKENS,
    "num_turns": NUM_TURNS,
    "max_abs_error": max(
      _gap(found, wanted, expected_returns)
      for found, wanted in zip(
        by_turn(*on_device), (expected, expected_returns), strict=True
      )
    ),
    "speedup_vs_numpy": round(loop / fast, 1),
    "speedup_vs_scan": round(scan / fast, 1),
    "milliseconds": round(1e3 * fast, 3),
    "milliseconds_numpy": round(1e3 * loop, 1),
    "milliseconds_scan": round(1e3 * scan, 1),
    "rounds": ROUNDS,
    "device": jax.devices()[0].platform,
    "identities": identities(),
  }


def _gap(found, expected, scale) -> float:
  found = np.asarray(found, np.float64)
  expected = np.asarray(expected, np.float64)
  return float(np.abs(found - expected).max() / np.abs(scale).max())


def _median_seconds(*functions: Callable[[], object]) -> list[float]:
  """Interleaved, so that a busy moment of the machine hits all alike."""
  seconds = [[] for _ in functions]
  for function in functions:
    jax.block_until_ready(function())
  for _ in range(ROUNDS):
    for function, found in zip(functions, seconds, strict=True):
      start = time.perf_counter()
      jax.block_until_ready(function())
      found.append(time.perf_counter() - start)
  return [statistics.median(found) for found in seconds]


def main() -> None:
  """Entry point; there is nothing to choose but --help."""
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  print(json.dumps(measure()))


if __name__ == "__main__":
  main()
