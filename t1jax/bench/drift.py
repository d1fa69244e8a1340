"""Drift: is what is trained on what was sampled? And through text?

    python -m t1jax.bench.drift

Plays multi-turn episodes with a small sparse model and holds what the learner
packs against the log that the engine writes by itself (`rollout.drift`). Then
does the same with a pipeline that hands text on, as most do: each action is
decoded and encoded again. Prints one JSON line:

  drift_trajectories     with two turns or more (T1 audits 1,402 of them)
  drift_positions        in the loss region
  drift_rate             share of them that drifted, tokens in, tokens out
  drift_rate_outside     share of all other positions
  reencoded_drift_rate   share of the loss region's positions that drift when
                         actions are decoded and encoded again
  reencoded_trajectories share of the trajectories in which any does
"""

import argparse
import json

import numpy as np

from t1jax.bench import routing_replay as small
from t1jax.rl import batching
from t1jax.rollout import drift
from t1jax.rollout.chat import Chat
from t1jax.rollout.trajectory import Trajectory
from t1jax.sampling.engine import Engine
from t1jax.sampling.log import Log
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task

TRAJECTORIES = 1402


def main() -> None:
  """Entry point; there is nothing to choose but --help."""
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  print(json.dumps(measure()))


def measure(
  count: int = TRAJECTORIES, learning_steps: int = small.LEARNING_STEPS
) -> dict[str, float]:
  """All figures of the JSON line."""
  tasks = [
    make_task(family, "train", index)
    for index in range(small.TASKS_PER_FAMILY)
    for family in FAMILIES
  ]
  chat, cfg = small.small_model(tasks)
  params, _ = small.learn(cfg, chat, tasks, learning_steps)
  log = Log(small.MAX_LEN)
  engine = Engine(
    cfg,
    num_slots=len(tasks),
    max_len=small.MAX_LEN,
    stop_id=chat.stop_id,
    forbidden_ids=chat.forbidden_ids,
    log=log,
  )
  engine.load(params, 0)
  kept = through_text = drift.Drift()
  drifting = 0
  step = 0
  while kept.multi_turn < count:
    played = small.sample(engine, chat, tasks, step)
    logs = log.take()
    packed = batching.pack(
      played,
      buckets=small.RL.buckets,
      token_budget=small.RL.token_budget,
      num_moe_layers=cfg.num_moe_layers,
      top_k=cfg.top_k,
    )
    kept += drift.audit(packed, [t.seed for t in played], logs)
    for trajectory in played:
      found = drift.compare(*reencode(trajectory, chat), logs[trajectory.seed])
      drifting += found.loss_drifted > 0
      through_text += found
    step += 1
  return {
    **kept.facts(),
    "reencoded_drift_rate": through_text.facts()["drift_rate"],
    "reencoded_trajectories": drifting / through_text.trajectories,
  }


def reencode(
  trajectory: Trajectory, chat: Chat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Tokens, loss mask and turn ids after every action went through text."""
  tokens, mask, turns = [], [], []
  for turn, sampled, part in trajectory.segments():
    ids = trajectory.tokens[part].tolist()
    if sampled:
      stop = [chat.stop_id] if ids[-1] == chat.stop_id else []
      text = chat.tokenizer.decode(ids[: len(ids) - len(stop)])
      ids = [*chat.tokenizer.encode(text), *stop]
    tokens += ids
    mask += [sampled] * len(ids)
    turns += [turn] * len(ids)
  return np.array(tokens), np.array(mask), np.array(turns)


if __name__ == "__main__":
  main()
