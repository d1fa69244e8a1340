"""Do learner and sampler agree? Experts, log-probs and the k3 estimate.

Rollout routing replay (T1, arXiv 2609.11042) makes the learner use the
experts that the sampler used. It does not make the two distributions equal:
weights, dtype and kernels still differ, so the gap is measured, not assumed.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from t1jax.models import heads, transformer
from t1jax.models.config import ModelConfig
from t1jax.rl import batching, losses
from t1jax.rl.programs import predictions_of
from t1jax.rl.settings import RLConfig
from t1jax.rollout.trajectory import Trajectory


@dataclasses.dataclass(frozen=True)
class Comparison:
  """What the learner's forward pass found, beside what the sampler recorded.

  Attributes:
    same_L: [L] int, recorded tokens whose set of experts is the sampler's.
    pairs_L: [L] int, recorded tokens.
    log_ratio_N: [N] float32, log p_learner - log p_sampler of action tokens.
  """

  same_L: np.ndarray
  pairs_L: np.ndarray
  log_ratio_N: np.ndarray

  @property
  def agreement_L(self) -> np.ndarray:
    """[L] share of the recorded tokens that agree; 1 where none is recorded."""
    recorded_L = np.maximum(self.pairs_L, 1)
    return np.where(self.pairs_L > 0, self.same_L / recorded_L, 1.0)

  @property
  def agreement(self) -> float:
    """The share over all layers; 1 for a dense model."""
    pairs = int(self.pairs_L.sum())
    return int(self.same_L.sum()) / pairs if pairs else 1.0

  @property
  def logprob_gap(self) -> float:
    """Mean absolute difference of the log-probs, nats."""
    change = self.log_ratio_N
    return float(np.abs(change).mean()) if change.size else 0.0

  @property
  def k3(self) -> float:
    """Mean of r - 1 - log r, r the learner's probability over the sampler's."""
    change = self.log_ratio_N
    return float(losses.k3(change).mean()) if change.size else 0.0


def agreement(
  params: dict,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  replay: bool,
) -> dict[str, float]:
  """`compare` in four numbers.

  Returns:
    `agreement`, over all layers; `logprob_gap`; `k3`; and `pairs`, how many
    recorded (token, layer) pairs there were.
  """
  found = compare(params, trajectories, cfg, rl, replay=replay)
  return {
    "agreement": found.agreement,
    "logprob_gap": found.logprob_gap,
    "k3": found.k3,
    "pairs": float(found.pairs_L.sum()),
  }


def compare(
  params: dict,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  replay: bool,
) -> Comparison:
  """Runs the learner's forward pass over trajectories and compares.

  Args:
    params: the learner's policy.
    trajectories: with the sampler's log-probs and routes.
    cfg: the policy's model.
    rl: buckets, token budget, temperature and forbidden ids.
    replay: whether the learner replays the recorded routes.
  """
  same_L = np.zeros(cfg.num_moe_layers, np.int64)
  pairs_L = np.zeros(cfg.num_moe_layers, np.int64)
  ratios = [np.zeros(0, np.float32)]
  for micro in batching.pack(
    trajectories,
    buckets=rl.buckets,
    token_budget=rl.token_budget,
    num_moe_layers=cfg.num_moe_layers,
    top_k=cfg.top_k,
  ):
    batch = micro.batch
    routes, logprobs = _forward(
      params,
      batch,
      cfg=cfg,
      temperature=rl.temperature,
      forbidden_ids=rl.forbidden_ids,
      replay=replay,
    )
    # Against the trajectories, not the batch: packing is under test as well.
    used_LxBxSxK = np.asarray(routes)
    for span in micro.spans:
      recorded = np.sort(trajectories[span.index].routes[:-1], -1)
      row, where = span.where
      used = used_LxBxSxK[:, row, where][:, :-1].transpose(1, 0, 2)
      known = (recorded >= 0).all(-1)
      same_L += ((np.sort(used, -1) == recorded).all(-1) & known).sum(0)
      pairs_L += known.sum(0)
    change = np.asarray(logprobs) - np.asarray(batch.behaviour_logprobs)
    ratios.append(change[np.asarray(batch.loss_mask)])
  return Comparison(same_L, pairs_L, np.concatenate(ratios))


@functools.partial(
  jax.jit, static_argnames=("cfg", "temperature", "forbidden_ids", "replay")
)
def _forward(params, batch, *, cfg, temperature, forbidden_ids, replay):
  outputs = transformer.apply(
    params,
    cfg,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    routes_LxBxSxK=batch.routes if replay else None,
  )
  targets_BxS = jax.numpy.pad(batch.tokens[:, 1:], ((0, 0), (0, 1)))
  logprobs, _ = heads.token_logprobs(
    params,
    cfg,
    outputs.hidden_BxSxD,
    targets_BxS,
    temperature=temperature,
    forbidden_ids=forbidden_ids,
  )
  return outputs.routes_LxBxSxK, predictions_of(logprobs)
