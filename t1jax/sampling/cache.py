"""The sampler's memory: one key/value cache row per episode.

Axes: B slots, R rows of one program, C columns, H kv heads, D head width.

A token at position p of its episode lives in column p of its slot, for as
long as the episode lasts. Columns at or past an episode's length hold stale
numbers. That is harmless: attention at position p reads columns <= p only, and
each of them was written by the same episode before it is read.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t1jax.models.config import ModelConfig

Cache = tuple[Mapping[str, jax.Array], ...]


def allocate(cfg: ModelConfig, slots: int, columns: int) -> Cache:
  """Returns a zeroed cache: per layer `k` and `v`, each [slots, C, H, D].

  Zeroed, not empty: a masked column still enters attention as 0 * v, and
  0 * nan would poison the row.
  """
  shape = (slots, columns, cfg.num_kv_heads, cfg.head_dim)
  dtype = jnp.dtype(cfg.compute_dtype)
  # Separate buffers: a donated tree may not hold one buffer twice.
  return tuple(
    {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}
    for _ in range(cfg.num_layers)
  )


def slots(cache: Cache) -> int:
  """Returns B."""
  return jax.tree.leaves(cache)[0].shape[0]


def take(cache: Cache, slots_R: jax.Array, columns: int) -> Cache:
  """Copies rows `slots_R` and the first `columns` columns: [R, columns, H, D].

  The copy is paid once per chunk of steps and is what lets a chunk attend
  over the rows and columns in use, not over all that exist.
  """
  return jax.tree.map(
    lambda x: x[:, :columns].at[slots_R].get(mode="promise_in_bounds"),
    cache,
  )


def put(
  cache: Cache,
  work: Cache,
  slots_R: jax.Array,
  starts_R: jax.Array,
  width: int,
) -> Cache:
  """Writes columns [start, start + width) of each working row back.

  Args:
    cache: the persistent cache, [B, C, H, D] leaves.
    work: what `take` gave, after the model ran on it, [R, columns, H, D].
    slots_R: int32, distinct: where each working row belongs.
    starts_R: int32, first column that may have changed.
    width: columns to write; never more than the working rows have.

  Returns:
    The cache with the blocks in place. A block that would pass the last
    working column is moved left: what it then covers besides is unchanged.
  """
  (rows, columns, heads, width_D) = jax.tree.leaves(work)[0].shape
  if width > columns:
    raise ValueError(
      f"put writes {width} columns of working rows that have {columns}"
    )
  starts_R = jnp.minimum(starts_R, columns - width)
  zero = jnp.int32(0)

  def write_row(row: jax.Array, cache: Cache) -> Cache:
    def write(x: jax.Array, y: jax.Array) -> jax.Array:
      block = jax.lax.dynamic_slice(
        y, (row, starts_R[row], zero, zero), (1, width, heads, width_D)
      )
      return jax.lax.dynamic_update_slice(
        x, block, (slots_R[row], starts_R[row], zero, zero)
      )

    return jax.tree.map(write, cache, work)

  # A loop of block copies, in place on the donated cache: the equivalent
  # scatter took twice as long on XLA:CPU.
  return jax.lax.fori_loop(0, rows, write_row, cache)
