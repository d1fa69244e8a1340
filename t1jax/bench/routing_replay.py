"""Rollout routing replay: what the learner loses without it.

    python -m t1jax.bench.routing_replay

Sampler and learner differ as in production: the sampler runs in bfloat16 with
dense dispatch on weights that are a few updates old, the learner in float32
with capacity dispatch on the newest. A small sparse model first learns the
task families' commands, so that its router has preferences to disagree about.
Prints one JSON line:

  agreement_on/off    share of recorded (token, layer) pairs where the learner's
                      experts are the sampler's, with and without replay
  logprob_gap_on/off  mean |log p_learner - log p_sampler| of sampled tokens
  k3_on/off           mean of r - 1 - log r, r = p_learner / p_sampler
  router_grad_norm    gradient norm of the routers under replay
  router_grad_norm_outside  the same when every replayed expert lies outside
                      the live top-k
  outside_top_k       share of recorded pairs with an expert that is outside
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t1jax.models import params as model_params
from t1jax.models import tokenizer, transformer
from t1jax.models.config import ModelConfig
from t1jax.rl import batching, programs, supervised
from t1jax.rl.agreement import agreement
from t1jax.rl.settings import OptimizerConfig, RLConfig
from t1jax.rollout.chat import Chat
from t1jax.rollout.trajectory import Outcome, Trajectory, TrajectoryBuilder
from t1jax.sampling.engine import Engine
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import NUMBERS, WORDS, make_task
from t1jax.tasks.task import Task

VOCAB_SIZE = 640
LEARNING_STEPS = 80
STALE_UPDATES = 4
TASKS_PER_FAMILY = 6
TURNS = 3
MAX_LEN = 256
OPTIMIZER = OptimizerConfig(learning_rate=2e-3, warmup_steps=10)
RL = RLConfig(buckets=(MAX_LEN,), token_budget=16 * MAX_LEN)


def main() -> None:
  """Entry point; there is nothing to choose but --help."""
  argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  ).parse_args()
  print(json.dumps(measure()))


def measure(
  learning_steps: int = LEARNING_STEPS, per_family: int = TASKS_PER_FAMILY
) -> dict[str, float]:
  """All figures of the JSON line."""
  tasks = [
    make_task(f, "train", i) for i in range(per_family) for f in FAMILIES
  ]
  chat, cfg = small_model(tasks)
  old, new = learn(cfg, chat, tasks, learning_steps)
  engine = Engine(
    dataclasses.replace(cfg, dispatch="dense"),
    num_slots=len(tasks), max_len=MAX_LEN, stop_id=chat.stop_id,
    forbidden_ids=chat.forbidden_ids, dtype="bfloat16",
  )  # fmt: skip
  engine.load(old, 0)
  played = sample(engine, chat, tasks, 0)

  rl = dataclasses.replace(RL, forbidden_ids=chat.forbidden_ids)
  on = agreement(new, played, cfg, rl, replay=True)
  off = agreement(new, played, cfg, rl, replay=False)
  outside, share = _outside_top_k(new, played, cfg)
  return {
    "agreement_on": on["agreement"],
    "agreement_off": off["agreement"],
    "logprob_gap_on": on["logprob_gap"],
    "logprob_gap_off": off["logprob_gap"],
    "k3_on": on["k3"],
    "k3_off": off["k3"],
    "router_grad_norm": _router_grad_norm(new, played, cfg),
    "router_grad_norm_outside": _router_grad_norm(new, outside, cfg),
    "outside_top_k": share,
    "pairs": on["pairs"],
    "trajectories": len(played),
  }


def small_model(tasks: Sequence[Task]) -> tuple[Chat, ModelConfig]:
  """A tokenizer of the tasks' texts and a sparse model that fits it."""
  lines = [task.instruction for task in tasks]
  lines += [command for task in tasks for command in task.oracle]
  chat = Chat(
    tokenizer.train(lines, vocab_size=VOCAB_SIZE, symbols=[*WORDS, *NUMBERS])
  )
  cfg = ModelConfig(
    vocab_size=chat.tokenizer.vocab_size, d_model=96, num_layers=4,
    num_heads=4, num_kv_heads=2, head_dim=24, d_ff=192, num_experts=8,
    top_k=2, d_expert=96, moe_layers=(1, 2, 3), dispatch="capacity",
  )  # fmt: skip
  return chat, cfg


def learn(
  cfg: ModelConfig, chat: Chat, tasks: Sequence[Task], steps: int
) -> tuple[dict, dict]:
  """Supervised updates; the weights before and after the last few."""
  told = [
    chat.demonstration(t.instruction, [(c, b"") for c in t.oracle])
    for t in tasks
  ]
  state = supervised.init_supervised(
    model_params.init(jax.random.key(0), cfg), OPTIMIZER
  )
  rng = np.random.default_rng(0)
  for step in range(steps):
    if step == steps - STALE_UPDATES:
      old = jax.tree.map(jnp.array, state.params)
    picked = [told[i] for i in rng.choice(len(told), 32)]
    batch = batching.pack_demonstrations(
      picked, buckets=RL.buckets, token_budget=RL.token_budget
    )
    state, _ = supervised.sft_step(state, batch, cfg, OPTIMIZER)
  return old, state.params


def sample(
  engine: Engine, chat: Chat, tasks: Sequence[Task], step: int
) -> list[Trajectory]:
  """One multi-turn episode per task; the engine has a slot for each.

  Observations are lines of the task's own files: what matters here is that
  given tokens come between sampled ones, boundary rows included.
  """
  cfg = engine.cfg
  seeds = {}
  builders = {}
  for number, task in enumerate(tasks):
    session = engine.open((step, number))
    seeds[session] = (step, number)
    builders[session] = (
      task, TrajectoryBuilder(cfg.num_experts, cfg.num_moe_layers, cfg.top_k)
    )  # fmt: skip
  for turn in range(TURNS):
    for session, (task, builder) in builders.items():
      given = (
        chat.prompt(task.instruction)
        if turn == 0
        else chat.observation(_shown(task, turn))
      )
      builder.append(given, turn=turn - 1, weight_version=0)
      engine.submit(session, given, 16)
    while engine.has_work:
      for reply in engine.step():
        builder = builders[reply.session][1]
        builder.append(
          reply.tokens, turn=turn, weight_version=0, logprobs=reply.logprobs
        )
        builder.append_routes(reply.input_routes)
  for session in builders:
    engine.close(session)
  return [
    builder.finish(Outcome("completed"), task=task.name, seed=seeds[session])
    for session, (task, builder) in builders.items()
  ]


def _shown(task, turn) -> bytes:
  files = sorted(task.environment.items())
  texts = [body for _, body in files if b"\0" not in body]
  return texts[turn % len(texts)][:40]


def _router_grad_norm(params, trajectories, cfg) -> float:
  gradient = programs.zero_gradient(params)
  for micro in _pack(trajectories, cfg):
    gradient, *_ = programs.supervised_gradient(
      params,
      gradient,
      micro.batch,
      jnp.float32(max(1, micro.num_actions)),
      cfg=cfg,
      chunk=RL.logprob_chunk,
    )
  return float(programs.router_norm(gradient))


def _outside_top_k(params, trajectories, cfg):
  """The trajectories with their *least* liked experts as routes.

  Also the share of the truly recorded pairs that hold an expert outside the
  learner's own top-k.
  """
  outside, pairs, missed = [], 0, 0
  for trajectory in trajectories:
    (micro,) = _pack([trajectory], cfg)
    batch = micro.batch
    free = transformer.apply(
      params, cfg, batch.tokens, batch.positions, batch.segment_ids
    )
    span = micro.spans[0]
    live = np.moveaxis(np.asarray(free.routes_LxBxSxK)[:, *span.where], 0, 1)
    known = (trajectory.routes >= 0).all((1, 2))
    inside = (trajectory.routes[..., None] == live[:, :, None, :]).any(-1)
    pairs += int(known.sum()) * cfg.num_moe_layers
    missed += int((~inside.all(-1))[known].sum())
    chosen = np.zeros((*live.shape[:2], cfg.num_experts), bool)
    np.put_along_axis(chosen, live, True, -1)
    others = np.argsort(chosen, -1, kind="stable")[..., : cfg.top_k]
    routes = np.where(known[:, None, None], others, -1).astype(np.int16)
    outside.append(dataclasses.replace(trajectory, routes=routes))
  return outside, missed / max(1, pairs)


def _pack(trajectories, cfg):
  return batching.pack(
    trajectories,
    buckets=RL.buckets,
    token_budget=RL.token_budget,
    num_moe_layers=cfg.num_moe_layers,
    top_k=cfg.top_k,
  )


if __name__ == "__main__":
  main()
