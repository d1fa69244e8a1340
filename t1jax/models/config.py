"""The frozen description of a model: everything that fixes its shapes."""

import dataclasses
import functools

_HEADS = ("lm", "value")
_DISPATCHES = ("dense", "capacity")
_DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shapes and numerics of a decoder; hashable, so a static jit argument.

  Layers are numbered from 0 over the whole stack. `moe_layers` names the
  sparse ones by that global number, so a dense layer before or between them
  shifts nothing; the l-th entry owns row l of every routes array.

  Raises:
    ValueError: from the constructor, naming the field, what it holds and what
      it must hold.
  """

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int  # inner width of the dense layers' MLP
  num_experts: int = 0
  top_k: int = 0
  d_expert: int = 0  # inner width of one expert
  d_shared: int = 0  # inner width of the shared expert; 0 means none
  moe_layers: tuple[int, ...] = ()
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  tie_embeddings: bool = True
  norm_topk_prob: bool = True
  qk_norm: bool = False
  critic_layers: int = 0  # the critic has the first so many; 0: all
  head: str = "lm"
  dispatch: str = "capacity"
  compute_dtype: str = "float32"
  param_dtype: str = "float32"
  remat: bool = False

  def __post_init__(self):
    if isinstance(self.moe_layers, list):  # a config read back from JSON
      object.__setattr__(self, "moe_layers", tuple(self.moe_layers))
    for name in ("vocab_size", "d_model", "num_layers", "num_heads",
                 "num_kv_heads", "head_dim"):  # fmt: skip
      self._at_least(name, 1)
    for name in ("d_ff", "num_experts", "top_k", "d_expert", "d_shared",
                 "critic_layers"):  # fmt: skip
      self._at_least(name, 0)
    if self.critic_layers > self.num_layers:
      self._bad("critic_layers", f"at most num_layers={self.num_layers}")
    for name, allowed in (
      ("head", _HEADS),
      ("dispatch", _DISPATCHES),
      ("compute_dtype", _DTYPES),
      ("param_dtype", _DTYPES),
    ):
      if getattr(self, name) not in allowed:
        self._bad(name, f"one of {', '.join(allowed)}")
    if self.num_heads % self.num_kv_heads:
      self._bad("num_heads", f"a multiple of num_kv_heads={self.num_kv_heads}")
    if self.head_dim % 2:
      self._bad("head_dim", "even, because rotary embedding pairs its halves")
    if list(self.moe_layers) != sorted(set(self.moe_layers)):
      self._bad("moe_layers", "strictly increasing layer numbers")
    if any(not 0 <= i < self.num_layers for i in self.moe_layers):
      self._bad("moe_layers", f"numbers in [0, num_layers={self.num_layers})")
    if self.moe_layers:
      for name in ("num_experts", "top_k", "d_expert"):
        self._at_least(name, 1)
      if self.top_k > self.num_experts:
        self._bad("top_k", f"at most num_experts={self.num_experts}")
    if len(self.moe_layers) < self.num_layers:
      self._at_least("d_ff", 1)

  @property
  def num_moe_layers(self) -> int:
    """L of every routes array; 0 for a dense model."""
    return len(self.moe_layers)

  def critic(self) -> "ModelConfig":
    """The same architecture, or its first layers, with a scalar value head."""
    layers = self.critic_layers or self.num_layers
    return dataclasses.replace(
      self,
      num_layers=layers,
      moe_layers=tuple(i for i in self.moe_layers if i < layers),
      critic_layers=0,
      head="value",
    )

  @functools.cached_property
  def moe_index(self) -> dict[int, int]:
    """Global layer number -> row of the routes array."""
    return {layer: row for row, layer in enumerate(self.moe_layers)}

  def _at_least(self, name, bound):
    value = getattr(self, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < bound:
      self._bad(name, f"an integer of at least {bound}")

  def _bad(self, name, expected):
    raise ValueError(
      f"ModelConfig.{name} is {getattr(self, name)!r}; it must be {expected}."
    )
