"""Whole episodes for the report: every token as the learner saw it.

Which ones is a rule, not a taste: the same run shows the same episodes. Values
and advantages are those of `learner.estimate_credit`, with the critic that a
checkpoint holds, over the whole batch that the episode was learned in.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from t1jax.charts import Html, number, plain, table
from t1jax.config import user_errors
from t1jax.models.config import ModelConfig
from t1jax.models.tokenizer import SentencePieceTokenizer
from t1jax.recorded import Recorded
from t1jax.rl import batching, credit, learner
from t1jax.rollout.trajectory import Trajectory, TrajectoryError

# Shades on either side of an advantage of zero, and of values.
_SIDE, _VALUES = 4, 8
# Tokens of an episode that are shown: a page must stay one that opens.
_LONGEST = 2000


@dataclasses.dataclass(frozen=True)
class Batch:
  """A recorded batch, and what a critic made of it (nothing: not credited)."""

  name: str  # of its file
  trajectories: Sequence[Trajectory]
  values: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
  advantages: Mapping[int, np.ndarray] = dataclasses.field(default_factory=dict)
  critic: str = ""  # which, as a clause

  def flat(self, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
    return credit.at_actions(arrays, self.trajectories)


@dataclasses.dataclass(frozen=True)
class Choice:
  """An episode to show, and why this one."""

  batch: Batch
  index: int
  why: str


def load(run: Recorded) -> tuple[Batch | None, Batch | None]:
  """PPO's newest batch that a critic is saved for, and the last evaluation.

  That critic gives credit to both; to the evaluation only if it is of PPO's
  policy. None: the run has not come that far.
  """
  evaluation = None
  for stage in ("rl", "sft", "base"):
    if not evaluation and stage in run.evaluated:
      evaluation = Batch(f"evaluation-{stage}", run.evaluated[stage])
  if not run.phase("ppo"):
    return None, evaluation
  if run.reproducible:
    iteration = run.last_reproducible()
    step = iteration - 1
    how = (
      f"the critic of the checkpoint after iteration {step}, so that the "
      f"numbers are those that the update of iteration {iteration} had"
    )
  else:
    iteration = step = run.checkpoints[-1]
    how = (
      f"the critic from after the update of iteration {step}, for none from "
      "before it is kept: it has seen these episodes"
    )
  critic = run.learner_after(step).critic
  name = f"rl-{iteration:05d}"
  batch = give_credit(Batch(name, run.episodes(name)), critic, how, run)
  if "rl" in run.evaluated:
    how = (
      f"the critic of the checkpoint after iteration {step}, as though the "
      "evaluation had been a batch; nothing was learned from it"
    )
    evaluation = give_credit(evaluation, critic, how, run)
  return batch, evaluation


def give_credit(batch: Batch, critic: dict, how: str, run: Recorded) -> Batch:
  """Values and advantages of a batch; whitening is over all of it."""
  with user_errors(
    f"trajectories/{batch.name}.array_record does not fit the run's config",
    batching.BatchingError,
    credit.CreditError,
  ):
    values, advantages, _ = learner.estimate_credit(
      critic, batch.trajectories, run.setting.model, run.rl
    )
  return dataclasses.replace(
    batch, values=values, advantages=advantages, critic=how
  )


def choose(batch: Batch | None, evaluation: Batch | None) -> list[Choice]:
  """Up to two episodes of a training batch, and two of an evaluation."""
  choices = []
  if batch and batch.values:
    values = {  # at the actions
      index: array[batch.trajectories[index].loss_mask]
      for index, array in batch.values.items()
      if batch.trajectories[index].loss_mask.any()
    }
    wins = [i for i in values if batch.trajectories[i].outcome.success]
    losses = [i for i in values if i not in wins]
    if wins:
      index = min(wins, key=lambda i: values[i].min())
      choices.append(Choice(batch, index, (
        "the success that once looked worst: the critic's value fell to "
        f"{number(float(values[index].min()))}, the lowest of the {len(wins)} "
        "successful episodes of this batch"
      )))  # fmt: skip
    if losses:
      index = max(losses, key=lambda i: values[i].max())
      choices.append(Choice(batch, index, (
        "the failure that once looked best: the critic's value rose to "
        f"{number(float(values[index].max()))}, the highest of the "
        f"{len(losses)} failed episodes of this batch"
      )))  # fmt: skip
  if evaluation:
    verdicts: dict[str, list[bool]] = {}
    played = [
      (index, t)
      for index, t in enumerate(evaluation.trajectories)
      if t.outcome.status != "infra_failure"
    ]
    for _, t in played:
      verdicts.setdefault(t.family, []).append(t.outcome.success)
    rates = {f: sum(v) / len(v) for f, v in sorted(verdicts.items())}
    hardest = sorted(rates, key=rates.__getitem__)
    for success in (True, False):
      families = [f for f in hardest if success in verdicts[f]]
      if not families:
        continue
      family, word = families[0], "success" if success else "failure"
      index = next(
        i
        for i, t in played
        if t.family == family and t.outcome.success == success
      )
      choices.append(Choice(evaluation, index, (
        f"the first {word} in {family}, the hardest family that has one: "
        f"{sum(verdicts[family])} of {len(verdicts[family])} of its held-out "
        "tasks succeeded"
      )))  # fmt: skip
  return choices


def section(
  choices: Sequence[Choice], tokenizer: SentencePieceTokenizer, cfg: ModelConfig
) -> str:
  """The episodes as HTML, with a switch for what the colours say.

  The switch is three radio buttons and the style sheet; no script is needed.
  """
  names = {
    "advantage": "advantage",
    "value": "value",
    "mask": "who wrote it",
  }
  credited = any(choice.batch.values for choice in choices)
  modes = names if credited else {"mask": names["mask"]}
  # The buttons stand before what they colour; their labels stay in sight.
  buttons = "".join(
    f'<input type="radio" name="paint" id="paint-{mode}"'
    f"{' checked' if mode == next(iter(modes)) else ''}>"
    for mode in modes
  )
  labels = "".join(
    f'<label for="paint-{mode}">{name}</label>' for mode, name in modes.items()
  )
  articles = "".join(
    _article(place, choice, tokenizer, cfg)
    for place, choice in enumerate(choices, start=1)
  )
  return (
    f'{buttons}<div class="switch"><b>Colour by</b>{labels}{_keys()}</div>'
    f'<div class="episodes">{articles}</div>'
  )


def _keys() -> str:
  """What the shades mean, for each position of the switch."""
  sides = "".join(
    f'<span class="t m a{i}">&#160;&#160;</span>' for i in range(2 * _SIDE + 1)
  )
  values = "".join(
    f'<span class="t m v{i}">&#160;&#160;</span>' for i in range(_VALUES)
  )
  return (
    f'<span class="key key-advantage">made less likely {sides} more likely'
    "</span>"
    f'<span class="key key-value">low {values} high expected reward</span>'
    '<span class="key key-mask"><span class="t m">sampled by the policy</span>'
    ' <span class="t">given to it</span></span>'
  )


def _article(
  place: int,
  choice: Choice,
  tokenizer: SentencePieceTokenizer,
  cfg: ModelConfig,
) -> str:
  batch, index = choice.batch, choice.index
  trajectory = batch.trajectories[index]
  outcome = trajectory.outcome
  verdict = "success" if outcome.success else "failure"
  about = [
    f"{batch.name}, episode {index}",
    f"status {outcome.status}",
    f"reward {number(outcome.reward)}",
    f"{trajectory.num_turns} turns",
    f"{len(trajectory)} tokens, {int(trajectory.loss_mask.sum())} sampled",
  ]
  seconds = ", ".join(f"{k} {v:.1f}" for k, v in outcome.seconds.items())
  about += [f"seconds: {seconds}"] if seconds else []
  about += [f"error: {outcome.error}"] if outcome.error else []
  scale = _scale_words(batch)
  checks = table(
    ["assertion", "kind", "verdict"],
    [
      [a.name, a.kind, _verdict(a.passed)] for a in outcome.assertions
    ],
    caption=f"Assertions of episode {place}",
  )  # fmt: skip
  return (
    f'<article><h3>{place}. {plain(trajectory.family or trajectory.task)}: '
    f'<span class="{verdict}">{verdict}</span> '
    f"<small>{plain(trajectory.task)}</small></h3>"
    f"<p>Why this one: {plain(choice.why)}.</p>"
    f"<p class='about'>{plain(' · '.join(about))}</p>"
    f"<p class='about'>{plain(scale)}</p>"
    f"{_tokens(choice, place, tokenizer, cfg)}"
    f"{checks if outcome.assertions else ''}</article>"
  )  # fmt: skip


def _verdict(passed: bool) -> Html:
  word = "passed" if passed else "failed"
  sign = "✓" if passed else "✗"
  return Html(f'<span class="{word}">{sign} {word}</span>')


def _scale_words(batch: Batch) -> str:
  if not batch.values:
    return "Not credited: there is no critic for it."
  low, high = _value_range(batch)
  return (
    f"Credit by {batch.critic}. Values: {number(low)} (lightest) to "
    f"{number(high)} (darkest), the range of the batch. Advantages: full "
    f"colour from {number(_advantage_unit(batch) * _SIDE)} on, either side."
  )


def _value_range(batch: Batch) -> tuple[float, float]:
  flat = batch.flat(batch.values)
  return (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)


def _advantage_unit(batch: Batch) -> float:
  """What one shade stands for: four are three standard deviations."""
  flat = batch.flat(batch.advantages)
  return 3 * float(flat.std()) / _SIDE if flat.size else 0.0


def _tokens(
  choice: Choice,
  place: int,
  tokenizer: SentencePieceTokenizer,
  cfg: ModelConfig,
) -> str:
  """Every token in a span of its own, one paragraph per writer and turn."""
  trajectory = choice.batch.trajectories[choice.index]
  size = tokenizer.vocab_size
  wrong = np.flatnonzero((trajectory.tokens < 0) | (trajectory.tokens >= size))
  if wrong.size:
    raise TrajectoryError(
      f"trajectories/{choice.batch.name}, record {choice.index}, token "
      f"{wrong[0]}: id {trajectory.tokens[wrong[0]]} is none of the "
      f"{size} ids of the run's tokenizer"
    )
  length = len(trajectory)
  half = _LONGEST // 2
  cut = range(half, length - half) if length > _LONGEST else range(0)
  shades = _shades(choice)
  parts, before = [], None
  for t in range(length):
    if t in cut:
      if t == cut.start:
        parts.append(f"<i>… {len(cut)} tokens are left out …</i>")
      continue
    turn, sampled = int(trajectory.turn_ids[t]), bool(trajectory.loss_mask[t])
    if (turn, sampled) != before:
      who = "task" if turn < 0 else "action" if sampled else "output"
      label = who if turn < 0 else f"turn {turn} {who}"
      parts.append(f'{"</p>" if before else ""}<p class="{who}"><b>{label}</b>')
      before = turn, sampled
    token = int(trajectory.tokens[t])
    kind = "t m" if sampled else "t"
    kind += " control" if token in tokenizer.control_ids else ""
    piece = tokenizer.piece(token)
    shown = plain(piece) or "∅"
    shown += "<br>" if piece.endswith("\n") else ""
    parts.append(
      f'<span class="{kind}{shades[t]}" tabindex="{-1 if t else 0}" '
      f'data-tip="{_tip(choice, t, cfg)}">{shown}</span>'
    )
  name = f"Tokens of episode {place}; the arrow keys move along them"
  return (
    f'<div class="tokens" role="group" aria-label="{name}">'
    f"{''.join(parts)}</p></div>"
  )


def _shades(choice: Choice) -> list[str]:
  """The classes that colour each token; only what was sampled has any."""
  batch, index = choice.batch, choice.index
  mask = batch.trajectories[index].loss_mask
  if index not in batch.values:
    return [""] * len(mask)
  low, high = _value_range(batch)
  unit = _advantage_unit(batch)
  values, advantages = batch.values[index], batch.advantages[index]
  steps = np.rint(advantages / (unit or 1.0)).clip(-_SIDE, _SIDE) + _SIDE
  span = (high - low) or 1.0
  levels = ((values - low) / span * _VALUES).clip(0, _VALUES - 1)
  return [
    f" a{int(step)} v{int(level)}" if sampled else ""
    for step, level, sampled in zip(steps, levels, mask, strict=True)
  ]


def _tip(choice: Choice, t: int, cfg: ModelConfig) -> str:
  """One line with all that is recorded of a token."""
  batch, index = choice.batch, choice.index
  trajectory = batch.trajectories[index]
  parts = [f"id {trajectory.tokens[t]}"]
  if trajectory.loss_mask[t]:
    parts.append(f"log-prob {trajectory.logprobs[t]:.3f}")
    if index in batch.values:
      parts.append(f"value {batch.values[index][t]:.3f}")
      parts.append(f"advantage {batch.advantages[index][t]:+.3f}")
  else:
    parts.append("not sampled")
  turn = int(trajectory.turn_ids[t])
  parts.append("task" if turn < 0 else f"turn {turn}")
  routes = trajectory.routes[t]
  if not routes.size:
    parts.append("no routed layers")
  elif (routes < 0).all():
    parts.append("no experts recorded")
  else:
    layers = cfg.moe_layers or range(len(routes))
    parts.append(
      "experts by layer: "
      + ", ".join(
        f"{layer}: {'+'.join(map(str, row))}"
        for layer, row in zip(layers, routes.tolist(), strict=True)
      )
    )
  return plain(" · ".join(parts))
