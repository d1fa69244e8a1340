"""Advantage estimators over one trajectory; `vmap` them for a batch.

Axes: T tokens of one stream, N turns.

A stream is a whole trajectory, prompt and observations included, and maybe
padding at its end. `action_mask_T` is True on the tokens that the policy
sampled: only these are transitions. `values_T[t]` is V of the state that
*predicts* token t, aligned as the log-probs are. A reward that sits on a token
which is not an action belongs to the action before it; it is never dropped.
All arithmetic is float32, all results are 0 outside `action_mask_T`.

Turn-boundary GAE (TB-GAE, Terminal-RSI) lets the clock tick only when one
turn gives way to the next. Over the action tokens i:

    b_i = 1 if action token i+1 belongs to a later turn than i else 0
    g_i = gamma_turn if b_i else 1      l_i = lambda_turn if b_i else 1
    delta_i = r_i + g_i V_{i+1} - V_i
    A_i = delta_i + g_i l_i A_{i+1}     return_i = A_i + V_i

Inside a turn g = l = 1, so V_{i+1} cancels and the return of token i is the
sum of the turn's rewards from i on, plus what the next turn is worth to this
one. With f the first action token of the next turn and C_n the return of the
first action token of turn n:

    C_n = R_n + gamma V_f + gamma lambda (C_{n+1} - V_f)

`tb_gae` runs this over N turns in place of T tokens. `token_gae` is the
recursion above as written, one token at a time.
"""

import chex
import jax
import jax.numpy as jnp

_BLOCK = 32


def tb_gae(
  rewards_T: jax.Array,
  values_T: jax.Array,
  turn_ids_T: jax.Array,
  action_mask_T: jax.Array,
  *,
  gamma_turn: float,
  lambda_turn: float,
  num_turns: int,
  bootstrap: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """TB-GAE by the recursion over turns.

  Args:
    rewards_T: float; integers are refused, they would truncate 0.7 to 0.
    values_T: float, V at each token. Read at action tokens alone.
    turn_ids_T: int, never decreasing: -1 for the prompt, then the turns,
      then `num_turns` on padding. Ids in [0, num_turns); a turn may be empty.
    action_mask_T: bool.
    gamma_turn: discount per crossed turn boundary, in [0, 1].
    lambda_turn: GAE's lambda per crossed turn boundary, in [0, 1].
    num_turns: static bound N on the number of turns.
    bootstrap: V of the state after the last action, the opening of a turn
      not yet taken. Only for a partial rollout that is not yet verified: an
      episode cut by a limit has its real reward and 0 here.

  Returns:
    advantages_T and returns_T, float32.
  """
  _check_stream(rewards_T, values_T, turn_ids_T, action_mask_T)
  num_tokens = rewards_T.shape[0]
  rewards_T = rewards_T.astype(jnp.float32)
  values_T = values_T.astype(jnp.float32)
  bootstrap = jnp.asarray(bootstrap, jnp.float32)
  gamma_turn = jnp.float32(gamma_turn)
  lambda_turn = jnp.float32(lambda_turn)

  # One more entry for the end of the stream: nothing is earned after it.
  suffix = jnp.append(_suffix_sums(rewards_T), 0.0)
  start = jnp.searchsorted(turn_ids_T, jnp.arange(num_turns + 1))
  first_N = _first_at_or_after(action_mask_T, start[:-1])
  some_N = first_N < start[1:]
  padded_values = jnp.append(values_T, 0.0)

  def step(carry, turn):
    later_return, later_first = carry
    first, some = turn
    later_value = padded_values[later_first]
    beyond = jnp.where(
      later_first < num_tokens,
      gamma_turn * later_value
      + gamma_turn * lambda_turn * (later_return - later_value),
      gamma_turn * bootstrap,
    )
    turn_return = suffix[first] - suffix[later_first] + beyond
    carry = (
      jnp.where(some, turn_return, later_return),
      jnp.where(some, first, later_first),
    )
    return carry, (beyond, suffix[later_first])

  end = (jnp.float32(0.0), jnp.asarray(num_tokens, first_N.dtype))
  _, (beyond_N, after_N) = jax.lax.scan(
    step, end, (first_N, some_N), reverse=True
  )

  turn_T = jnp.clip(turn_ids_T, 0, num_turns - 1)
  # The difference first: it is exactly 0 where a turn earns nothing more, and
  # a small `beyond` is not lost in the rewards of later turns.
  returns_T = (suffix[:-1] - after_N[turn_T]) + beyond_N[turn_T]
  return _masked(returns_T - values_T, returns_T, action_mask_T)


def token_gae(
  rewards_T: jax.Array,
  values_T: jax.Array,
  turn_ids_T: jax.Array,
  action_mask_T: jax.Array,
  *,
  gamma_turn: float,
  lambda_turn: float,
  gamma_token: float = 1.0,
  lambda_token: float = 1.0,
  bootstrap: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """GAE by the recursion over tokens, with a clock for each kind of step.

  A step into a later turn is discounted by `gamma_turn`, `lambda_turn`, any
  other by `gamma_token`, `lambda_token`. With the defaults this is TB-GAE at
  the cost of T dependent steps; arguments are those of `tb_gae`, but turn
  ids on padding are free.
  """
  _check_stream(rewards_T, values_T, turn_ids_T, action_mask_T)
  bootstrap = jnp.asarray(bootstrap, jnp.float32)

  def step(carry, token):
    reward_after, later_value, later_turn, later_advantage = carry
    reward, value, turn, action = token
    crosses = later_turn > turn
    gamma = jnp.where(crosses, gamma_turn, gamma_token).astype(jnp.float32)
    lam = jnp.where(crosses, lambda_turn, lambda_token).astype(jnp.float32)
    reward = reward + reward_after
    advantage = (
      reward + gamma * later_value - value + gamma * lam * later_advantage
    )
    moved = (jnp.float32(0.0), value, turn, advantage)
    waited = (reward, later_value, later_turn, later_advantage)
    carry = jax.tree.map(
      lambda new, old: jnp.where(action, new, old), moved, waited
    )
    return carry, advantage

  beyond_any_turn = jnp.asarray(jnp.iinfo(jnp.int32).max, jnp.int32)
  end = (jnp.float32(0.0), bootstrap, beyond_any_turn, jnp.float32(0.0))
  values_T = values_T.astype(jnp.float32)
  tokens = (
    rewards_T.astype(jnp.float32),
    values_T,
    turn_ids_T.astype(jnp.int32),
    action_mask_T,
  )
  _, advantages_T = jax.lax.scan(step, end, tokens, reverse=True)
  return _masked(advantages_T, advantages_T + values_T, action_mask_T)


def gae(
  rewards_T: jax.Array,
  values_T: jax.Array,
  mask_T: jax.Array,
  *,
  gamma: float,
  lam: float,
  bootstrap: float | jax.Array = 0.0,
) -> tuple[jax.Array, jax.Array]:
  """Plain GAE (Schulman et al. 2016, eq. 16): every step ticks.

  The steps are the tokens of `mask_T`: with the action mask, the ablation
  "token clock over action tokens"; with `through_last_action`, the ablation
  "token clock over all tokens", where credit decays with the length of logs.
  """
  return token_gae(
    rewards_T,
    values_T,
    jnp.zeros(rewards_T.shape, jnp.int32),
    mask_T,
    gamma_turn=gamma,
    lambda_turn=lam,
    gamma_token=gamma,
    lambda_token=lam,
    bootstrap=bootstrap,
  )


def through_last_action(action_mask_T: jax.Array) -> jax.Array:
  """True up to the last action token: no step follows the last action."""
  chex.assert_rank(action_mask_T, 1)
  left = jax.lax.cumsum(action_mask_T.astype(jnp.int32), reverse=True)
  return left > 0


def _suffix_sums(x_T):
  """Sums from each entry to the end, float32.

  Blocks against a triangular matrix, then the blocks' totals likewise: three
  passes over memory where a scan by doubling takes eighteen, and a sum of few
  terms at each level, so rounding stays near one ulp of the total.
  """
  length = x_T.shape[0]
  padded = jnp.pad(x_T, (0, -length % _BLOCK))
  triangle = jnp.tril(jnp.ones((_BLOCK, _BLOCK), jnp.float32))
  inner = jax.lax.dot(
    padded.reshape(-1, _BLOCK), triangle, precision=jax.lax.Precision.HIGHEST
  )
  if inner.shape[0] > 1:
    totals = inner[:, 0]
    inner = inner + (_suffix_sums(totals) - totals)[:, None]
  return inner.reshape(-1)[:length]


def _first_at_or_after(mask_T, start_N):
  """Position of the first True at or after each start; T where none is.

  Looks into the start's own block and else into the next block that holds a
  True: the whole mask is read once, without a running count over it.
  """
  length = mask_T.shape[0]
  mask_GxB = jnp.pad(mask_T, (0, _BLOCK - length % _BLOCK)).reshape(-1, _BLOCK)
  held = jnp.cumsum(jnp.any(mask_GxB, axis=1).astype(jnp.int32))
  own_N = start_N // _BLOCK
  own_NxB = mask_GxB[own_N] & (
    jnp.arange(_BLOCK)[None, :] >= (start_N % _BLOCK)[:, None]
  )
  here_N = jnp.any(own_NxB, axis=1)
  next_N = jnp.searchsorted(held, held[own_N] + 1)
  block_N = jnp.where(here_N, own_N, next_N)
  row_NxB = jnp.where(
    here_N[:, None], own_NxB, mask_GxB.at[next_N].get(mode="clip")
  )
  found_N = block_N * _BLOCK + jnp.argmax(row_NxB, axis=1)
  return jnp.minimum(
    jnp.where(block_N < held.shape[0], found_N, length), length
  )


def _check_stream(rewards_T, values_T, turn_ids_T, action_mask_T):
  chex.assert_rank([rewards_T, values_T, turn_ids_T, action_mask_T], 1)
  chex.assert_equal_shape([rewards_T, values_T, turn_ids_T, action_mask_T])
  chex.assert_type([rewards_T, values_T], float)
  chex.assert_type(turn_ids_T, int)
  chex.assert_type(action_mask_T, bool)


def _masked(advantages_T, returns_T, action_mask_T):
  zeros = jnp.zeros_like(returns_T)
  return (
    jnp.where(action_mask_T, advantages_T, zeros),
    jnp.where(action_mask_T, returns_T, zeros),
  )
