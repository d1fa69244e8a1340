"""Every number of the RL room, frozen and checked before anything runs."""

import dataclasses
import difflib
import typing
from collections.abc import Mapping

ALGORITHMS = ("adamw", "muon")
ADVANTAGES = ("tb_gae", "token_clock_actions", "token_clock_all")


def _from_dict(cls, fields):
  known = [field.name for field in dataclasses.fields(cls)]
  for name in fields:
    if name not in known:
      near = difflib.get_close_matches(name, known, n=1)
      hint = f" Did you mean {near[0]!r}?" if near else ""
      raise ValueError(
        f"{cls.__name__} has no field {name!r}.{hint} Known fields:"
        f" {', '.join(known)}."
      )
  return cls(**fields)


def _check_types(config):
  """Ints pass for floats; nothing else is converted."""
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if field.type is float and type(value) is int:
      object.__setattr__(config, field.name, float(value))
      continue
    wanted = typing.get_origin(field.type) or field.type
    if not isinstance(value, wanted) or (
      isinstance(value, bool) and wanted is not bool
    ):
      raise ValueError(
        f"{type(config).__name__}.{field.name} is {value!r}; expected"
        f" {getattr(field.type, '__name__', field.type)}."
      )


def _require(config, name, holds, expected):
  if not holds:
    raise ValueError(
      f"{type(config).__name__}.{name} is {getattr(config, name)!r}; expected"
      f" {expected}."
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW or Muon with global-norm clipping, warm-up, optional cosine decay.

  Muon (Jordan et al. 2024) orthogonalises the updates of the matrices between
  layers, scaled to the size of Adam's (Moonlight, arXiv 2502.16982), so that
  one learning rate serves both; embeddings, heads, routers and norms stay
  with Adam.
  """

  learning_rate: float = 1e-6
  algorithm: str = "adamw"  # or "muon"
  warmup_steps: int = 0
  decay_steps: int = 0  # cosine after the warm-up, in steps; 0: constant
  final_fraction: float = 0.1  # of the learning rate, where the decay ends
  b1: float = 0.9
  b2: float = 0.95
  eps: float = 1e-8
  weight_decay: float = 0.0  # on matrices alone; Muon: on those it moves
  max_grad_norm: float = 1.0

  def __post_init__(self):
    _check_types(self)
    _require(self, "learning_rate", self.learning_rate > 0, "> 0")
    _require(
      self,
      "algorithm",
      self.algorithm in ALGORITHMS,
      f"one of {', '.join(ALGORITHMS)}",
    )
    _require(self, "max_grad_norm", self.max_grad_norm > 0, "> 0")
    _require(self, "warmup_steps", self.warmup_steps >= 0, ">= 0")
    _require(self, "decay_steps", self.decay_steps >= 0, ">= 0")
    for name in ("b1", "b2"):
      _require(self, name, 0 <= getattr(self, name) < 1, "in [0, 1)")

  @classmethod
  def from_dict(cls, fields: Mapping[str, typing.Any]) -> "OptimizerConfig":
    """From a mapping or ConfigDict; an unknown name is an error."""
    return _from_dict(cls, fields)


class PolicyTerms(typing.NamedTuple):
  """What the compiled policy gradient depends on, and nothing else.

  A static argument: a change of learning rate or seed compiles nothing.
  """

  ratio_low: float
  ratio_high: float
  tis_cap: float
  entropy_coefficient: float
  kl_coefficient: float
  temperature: float
  forbidden_ids: tuple[int, ...]
  logprob_chunk: int


@dataclasses.dataclass(frozen=True)
class RLConfig:
  """Actor-critic PPO over packed trajectories. Hashable: a static argument.

  Attributes:
    gamma_turn, lambda_turn: discount and GAE lambda per turn boundary.
    advantage: one of ADVANTAGES; the token clocks are ablations and use
      gamma_token and lambda_token.
    max_turns: static bound on the turns of an episode.
    ratio_low, ratio_high: bounds of the PPO ratio, not epsilons.
    tis_cap: truncation of the importance weight learner / sampler; 0: none.
    entropy_coefficient, kl_coefficient: 0 means not computed. The KL is to a
      reference policy that `ppo_update` is given.
    whiten: advantages to mean 0, variance 1 over the whole rollout batch.
    value_clip: > 0 turns PPO2's value clipping on.
    replay: the actor replays the sampler's routes; a trajectory without any
      is then an error.
    temperature: the sampler's; log-probs are taken under it, values never.
    forbidden_ids: the sampler's; log-probs are normalised over the others.
    actor_minibatches, critic_minibatches: optimiser updates per epoch over a
      rollout batch. One divides the other.
    warmup_minibatches, warmup_epochs: the same for `warm_up_critic`; with 0
      epochs the critic starts cold.
    warmup_lambda: lambda of the warm-up's targets. 1: they do not
      lean on the values of a critic that knows nothing yet.
    buckets: row lengths of packed batches, increasing.
    token_budget: tokens per micro-batch.
    logprob_chunk: tokens whose logits exist at a time.
    seed: of the split into minibatches.
  """

  gamma_turn: float = 1.0
  lambda_turn: float = 0.95
  advantage: str = "tb_gae"
  gamma_token: float = 1.0
  lambda_token: float = 1.0
  max_turns: int = 64
  ratio_low: float = 0.70
  ratio_high: float = 6.00
  tis_cap: float = 2.0
  entropy_coefficient: float = 0.0
  kl_coefficient: float = 0.0
  whiten: bool = False
  value_clip: float = 0.0
  replay: bool = True
  temperature: float = 1.0
  forbidden_ids: tuple[int, ...] = ()
  actor: OptimizerConfig = OptimizerConfig(learning_rate=1e-6)
  critic: OptimizerConfig = OptimizerConfig(learning_rate=5e-6)
  actor_minibatches: int = 1
  critic_minibatches: int = 1
  actor_epochs: int = 1
  critic_epochs: int = 1
  warmup_minibatches: int = 1
  warmup_epochs: int = 1
  warmup_lambda: float = 1.0
  buckets: tuple[int, ...] = (128, 256)
  token_budget: int = 8192
  logprob_chunk: int = 1024
  seed: int = 0

  def __post_init__(self):
    if isinstance(self.buckets, list):
      object.__setattr__(self, "buckets", tuple(self.buckets))
    _check_types(self)
    for name in (
      "gamma_turn",
      "lambda_turn",
      "gamma_token",
      "lambda_token",
      "warmup_lambda",
    ):
      _require(self, name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
    for name in (
      "max_turns",
      "actor_minibatches",
      "critic_minibatches",
      "actor_epochs",
      "critic_epochs",
      "warmup_minibatches",
      "token_budget",
      "logprob_chunk",
    ):
      _require(self, name, getattr(self, name) >= 1, ">= 1")
    for name in (
      "warmup_epochs",
      "tis_cap",
      "entropy_coefficient",
      "kl_coefficient",
      "value_clip",
    ):
      _require(self, name, getattr(self, name) >= 0, ">= 0")
    _require(self, "temperature", self.temperature > 0, "> 0")
    _require(self, "ratio_low", 0 < self.ratio_low <= 1, "in (0, 1]")
    _require(
      self,
      "ratio_high",
      self.ratio_high >= 1,
      ">= 1: the bound of the ratio, 1 + epsilon_high",
    )
    _require(
      self,
      "advantage",
      self.advantage in ADVANTAGES,
      f"one of {', '.join(ADVANTAGES)}",
    )
    _require(
      self,
      "buckets",
      bool(self.buckets)
      and all(isinstance(b, int) and b > 1 for b in self.buckets)
      and list(self.buckets) == sorted(set(self.buckets)),
      "row lengths > 1, strictly increasing",
    )
    few, many = sorted((self.actor_minibatches, self.critic_minibatches))
    _require(
      self,
      "critic_minibatches",
      many % few == 0,
      f"a multiple or divisor of actor_minibatches={self.actor_minibatches}",
    )

  @property
  def policy_terms(self) -> PolicyTerms:
    return PolicyTerms(*(getattr(self, n) for n in PolicyTerms._fields))

  @classmethod
  def from_dict(cls, fields: Mapping[str, typing.Any]) -> "RLConfig":
    """From a mapping or ConfigDict; `actor` and `critic` may be mappings.

    Raises:
      ValueError: an unknown field (with the nearest known one), a wrong type
        or a value out of range.
    """
    fields = dict(fields)
    for name in ("actor", "critic"):
      if name in fields and not isinstance(fields[name], OptimizerConfig):
        fields[name] = OptimizerConfig.from_dict(fields[name])
    return _from_dict(cls, fields)
