"""One description of every parameter: abstract tree, initial values, count.

Logical axes name what a dimension means ("embed", "heads", "experts"); where
it lives on a mesh is decided elsewhere, from these names alone.
"""

import dataclasses
import math
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp

from t1jax.models.config import ModelConfig

Init = Callable[[jax.Array, tuple[int, ...], jnp.dtype], jax.Array]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape, dtype, the meaning of each axis, and how to draw it."""

  shape: tuple[int, ...]
  dtype: str
  logical_axes: tuple[str | None, ...]
  init: Init

  def __post_init__(self):
    if len(self.shape) != len(self.logical_axes):
      raise ValueError(
        f"ParamSpec of shape {self.shape} has {len(self.logical_axes)} "
        f"logical axes {self.logical_axes}; name each dimension once."
      )


def _normal(std: float) -> Init:
  return lambda rng, shape, dtype: (
    jax.random.truncated_normal(rng, -3.0, 3.0, shape, jnp.float32) * std
  ).astype(dtype)


def _zeros(rng, shape, dtype):
  del rng
  return jnp.zeros(shape, dtype)


def _ones(rng, shape, dtype):
  del rng
  return jnp.ones(shape, dtype)


def specs(cfg: ModelConfig) -> dict:
  """Returns the tree of ParamSpec for `cfg`; its structure is the model's.

  {"embed": [V, D], "layers": (layer, ...), "final_norm": [D],
   "head": [D, V] (lm, untied) | [D] (value)}; a layer is {"attn_norm",
  "attn": {q, k, v, o[, q_norm, k_norm]}, "mlp_norm", "mlp" | "moe"}.
  """
  d, dtype = cfg.d_model, cfg.param_dtype

  def spec(shape, axes, init):
    return ParamSpec(shape, dtype, axes, init)

  def matrix(shape, axes, fan_in, scale=1.0):
    return spec(shape, axes, _normal(scale / math.sqrt(fan_in)))

  # Projections that write to the residual stream shrink with depth, so that
  # its variance does not grow with the number of layers.
  out_scale = 1.0 / math.sqrt(2 * cfg.num_layers)

  def swiglu(width, axis):
    return {
      "gate": matrix((d, width), ("embed", axis), d),
      "up": matrix((d, width), ("embed", axis), d),
      "down": matrix((width, d), (axis, "embed"), width, out_scale),
    }

  def moe():
    e, f = cfg.num_experts, cfg.d_expert
    wide, tall = ("experts", "embed", "expert"), ("experts", "expert", "embed")
    tree = {
      "router": spec((d, e), ("embed", "experts"), _normal(0.02)),
      "gate": matrix((e, d, f), wide, d),
      "up": matrix((e, d, f), wide, d),
      "down": matrix((e, f, d), tall, f, out_scale),
    }
    if cfg.d_shared:
      tree["shared"] = swiglu(cfg.d_shared, "mlp")
    return tree

  def attention():
    h, j, c = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    tree = {
      "q": matrix((d, h, c), ("embed", "heads", "head_dim"), d),
      "k": matrix((d, j, c), ("embed", "kv_heads", "head_dim"), d),
      "v": matrix((d, j, c), ("embed", "kv_heads", "head_dim"), d),
      "o": matrix((h, c, d), ("heads", "head_dim", "embed"), h * c, out_scale),
    }
    if cfg.qk_norm:
      tree["q_norm"] = spec((c,), ("head_dim",), _ones)
      tree["k_norm"] = spec((c,), ("head_dim",), _ones)
    return tree

  def layer(index):
    tree = {
      "attn_norm": spec((d,), ("embed",), _ones),
      "attn": attention(),
      "mlp_norm": spec((d,), ("embed",), _ones),
    }
    if index in cfg.moe_index:
      tree["moe"] = moe()
    else:
      tree["mlp"] = swiglu(cfg.d_ff, "mlp")
    return tree

  tree = {
    "embed": spec((cfg.vocab_size, d), ("vocab", "embed"), _normal(0.02)),
    "layers": tuple(layer(i) for i in range(cfg.num_layers)),
    "final_norm": spec((d,), ("embed",), _ones),
  }
  if cfg.head == "value":
    # Zero: an untrained critic says 0 everywhere, not noise.
    tree["head"] = spec((d,), ("embed",), _zeros)
  elif not cfg.tie_embeddings:
    tree["head"] = matrix((d, cfg.vocab_size), ("embed", "vocab"), d)
  return tree


def _is_spec(leaf):
  return isinstance(leaf, ParamSpec)


def abstract(cfg: ModelConfig) -> dict:
  """Returns the tree of jax.ShapeDtypeStruct, without allocating anything."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)),
    specs(cfg),
    is_leaf=_is_spec,
  )


def init(rng: jax.Array, cfg: ModelConfig) -> dict:
  """Draws the initial parameters.

  Each leaf's key comes from its path, so that a critic's trunk and an actor's
  drawn from one `rng` are equal, whatever heads or layers the other lacks.
  """
  leaves, treedef = jax.tree_util.tree_flatten_with_path(
    specs(cfg), is_leaf=_is_spec
  )
  return jax.tree.unflatten(
    treedef,
    [
      s.init(_path_key(rng, path), s.shape, jnp.dtype(s.dtype))
      for path, s in leaves
    ],
  )


def _path_key(rng, path):
  # Python's hash() is salted per process; crc32 is the same everywhere.
  return jax.random.fold_in(
    rng, zlib.crc32(jax.tree_util.keystr(path).encode())
  )


def count(cfg: ModelConfig) -> int:
  """Returns the number of parameters."""
  leaves = jax.tree.leaves(specs(cfg), is_leaf=_is_spec)
  return sum(math.prod(s.shape) for s in leaves)
