"""The training part of a report: curves over updates, and where time went."""

from t1jax.charts import Series, bar, duration, line_chart, percent, table
from t1jax.recorded import Recorded
from t1jax.rewards.schemes import SCHEMES


def draw(run: Recorded) -> str:
  """The small multiples."""
  scheme = run.config.get("rl", {}).get("reward", "")

  def ppo(key: str, name: str) -> Series:
    return Series(name, run.points("ppo", key))

  per_iteration = {"x_label": "PPO iteration"}
  share = {"bounds": (0.0, None), "show": percent}
  figures = (
    line_chart(
      "Success while learning",
      [
        ppo("success", "PPO"),
        Series("control", run.points("control", "success")),
      ],
      note="on training tasks, by the policy before each update",
      unit="share of episodes",
      bounds=(0.0, 1.0),
      show=percent,
      **per_iteration,
    ),
    line_chart(
      "Reward by scheme",
      [
        ppo(f"reward_{part}", part + (" (trained)" if part == scheme else ""))
        for part in SCHEMES
      ],
      note="mean per episode",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Explained variance of the critic",
      [ppo("explained_variance", "before each update")],
      note="1 is perfect, 0 no better than a constant",
      bounds=(0.0, 1.0),
      **per_iteration,
    ),
    line_chart(
      "Learner against sampler",
      [
        ppo("logprob_gap_max", "largest log-prob gap"),
        ppo("logprob_gap", "mean log-prob gap"),
        ppo("k3", "k3 divergence"),
      ],
      note="the same weights and tokens, scored by two programs",
      unit="nats, logarithmic",
      log=True,
      **per_iteration,
    ),
    line_chart(
      "Clipped by PPO",
      [
        ppo("clip_fraction_low", "ratio below the range"),
        ppo("clip_fraction_high", "above it"),
      ],
      unit="share of sampled tokens",
      **share,
      **per_iteration,
    ),
    line_chart(
      "Entropy of the policy",
      [ppo("entropy", "mean over sampled tokens")],
      unit="nats",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Expert load",
      [ppo("load_violation", "busiest expert")],
      note="of the busiest expert of the worst layer; 1 is balanced",
      unit="times the mean",
      bounds=(0.0, None),
      **per_iteration,
    ),
    line_chart(
      "Routes that were not replayed",
      [ppo("fallback_fraction", "chosen anew by the learner")],
      unit="share of tokens",
      bounds=(0.0, 0.01),
      show=percent,
      **per_iteration,
    ),
    line_chart(
      "Warm start",
      [
        Series("validation", run.points("sft", "validation_loss")),
        Series("training batch", run.points("sft", "loss")),
      ],
      unit="cross-entropy, nats per token",
      bounds=(0.0, None),
      x_label="update",
    ),
    line_chart(
      "Making the base",
      [
        Series("validation", run.points("pretrain", "validation_loss")),
        Series("training batch", run.points("pretrain", "loss")),
      ],
      unit="cross-entropy, nats per token",
      bounds=(0.0, None),
      x_label="update",
    ),
  )
  drawn = "".join(figures)
  return f'<div class="charts">{drawn}</div>' if drawn else ""


def time_spent(run: Recorded) -> str:
  """Seconds of the run by phase, of an iteration and of an episode by part."""
  if not run.records:
    return ""
  spent: dict[str, float] = {}
  before = 0.0
  for record in run.records:
    now = record.get("wall_seconds", before)
    phase = record.get("phase", "")
    spent[phase] = spent.get(phase, 0.0) + max(0.0, now - before)
    before = now
  names = {
    "evaluation": "evaluations, with the data",
    "sft": "warm start",
    "warm_up": "critic warm-up",
    "ppo": "PPO",
    "control": "control",
    "pretrain": "base model and its data",
  }
  parts = [
    _seconds_table(
      {names.get(p, p): s for p, s in spent.items()},
      "The run, by phase",
      "phase",
      duration,
    )
  ]
  iterations = run.phase("ppo")
  means = _means(iterations, "seconds_")
  step = means.get("step", 0.0)
  if step:
    work = {
      "rollout": "rollouts: episodes in sandboxes",
      "values": "critic: values",
      "logprobs": "actor: log-probs before the update",
      "critic": "critic: update",
      "actor": "actor: update",
    }
    shown = {words: means.get(key, 0.0) for key, words in work.items()}
    shown["the rest"] = max(0.0, step - sum(shown.values()))
    parts.append(
      _seconds_table(
        shown,
        f"A PPO iteration: {step:.1f} s, mean of {len(iterations)}",
        "part",
        _precise,
      )
    )
  waits = _means(iterations, "episode_seconds_")
  played = sum(r.get("episodes", 0) for r in iterations)
  if waits and played:
    scale = len(iterations) / played
    words = {
      "boot": "its sandbox to boot",
      "model": "the sampler, shared with other episodes",
      "shell": "its commands",
      "verify": "its verdict",
    }
    parts.append(
      _seconds_table(
        {words.get(k, k): s * scale for k, s in waits.items()},
        "An episode of PPO, by what it waited for",
        "waiting for",
        _precise,
      )
    )
  return f'<div class="charts">{"".join(parts)}</div>'


def _precise(seconds: float) -> str:
  return f"{seconds:.2f}\N{NO-BREAK SPACE}s"


def _seconds_table(seconds, caption, heading, show) -> str:
  whole = sum(seconds.values()) or 1.0
  rows = [
    (name, bar(s / whole, percent(s / whole)), show(s))
    for name, s in seconds.items()
  ]
  return table([heading, "share", "time"], rows, caption=caption)


def _means(records, prefix) -> dict[str, float]:
  found: dict[str, list[float]] = {}
  for record in records:
    for key, value in record.items():
      if key.startswith(prefix) and value is not None:
        found.setdefault(key.removeprefix(prefix), []).append(value)
  return {key: sum(v) / len(v) for key, v in found.items()}
