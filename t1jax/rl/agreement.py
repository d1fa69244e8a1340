"""Do learner and sampler agree? Experts, log-probs and the k3 estimate.

Rollout routing replay (T1, arXiv 2609.11042) makes the learner use the
experts that the sampler used. It does not make the two distributions equal:
weights, dtype and kernels still differ, so the gap is measured, not assumed.
"""

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


def agreement(
  params: dict,
  trajectories: Sequence[Trajectory],
  cfg: ModelConfig,
  rl: RLConfig,
  *,
  replay: bool,
) -> dict[str, float]:
  """Runs the learner's forward pass over trajectories and compares.

  Args:
    params: the learner's policy.
    trajectories: with the sampler's log-probs and routes.
    cfg: the policy's model.
    rl: buckets, token budget, temperature and forbidden ids.
    replay: whether the learner replays the recorded routes.

  Returns:
    `agreement`: share of recorded (token, layer) pairs whose set of experts
    is the sampler's (1.0 for a dense model); `logprob_gap`: mean absolute
    difference over action tokens, nats; `k3`: mean of r - 1 - log r with r
    the learner's probability over the sampler's; `pairs`: how many pairs.
  """
  same = pairs = 0
  ratios = []
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
      same += int(((np.sort(used, -1) == recorded).all(-1) & known).sum())
      pairs += int(known.sum())
    change = np.asarray(logprobs) - np.asarray(batch.behaviour_logprobs)
    ratios.append(change[np.asarray(batch.loss_mask)])
  log_ratio = np.concatenate(ratios) if ratios else np.zeros(0, np.float32)
  return {
    "agreement": same / pairs if pairs else 1.0,
    "logprob_gap": float(np.abs(log_ratio).mean()) if log_ratio.size else 0.0,
    "k3": float(losses.k3(log_ratio).mean()) if log_ratio.size else 0.0,
    "pairs": float(pairs),
  }


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
