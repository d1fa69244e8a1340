"""What a run learns from: its tokenizer, its dataset, its stream of tasks."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath
from ml_collections import config_dict

from t1jax.evaluate import Arena, Setting, family_tasks, read_families
from t1jax.metrics import LiveProgress
from t1jax.models import tokenizer as tokenizers
from t1jax.models.tokenizer import SentencePieceTokenizer
from t1jax.rewards import verifier
from t1jax.rollout import demonstrations
from t1jax.tasks import datasets
from t1jax.tasks.families.base import NUMBERS, WORDS, make_task
from t1jax.tasks.families.drills import copying
from t1jax.tasks.task import Task, TaskError, from_bytes, to_bytes

# Splits that the tasks of config.data.directories join.
_WITH_DIRECTORIES = ("demonstrations", "train")
# A name or number of the tasks in a command, and a file's suffix.
_TYPED = re.compile(rf"\b({'|'.join((*WORDS, *NUMBERS))})\b(\.[a-z]+)?")
# Split of the dataset -> (split of the task generator, its task numbers).
Plan = Mapping[str, tuple[str, Sequence[int]]]


def train_tokenizer(config: config_dict.ConfigDict) -> SentencePieceTokenizer:
  """A tokenizer from the text of pretraining tasks; deterministic."""
  tasks = [
    make_task(f, "pretrain", i)
    for i in range(min(200, config.pretrain.sessions))
    for f in read_families(config)
  ]
  texts = []
  for task in tasks:
    texts += [task.instruction, *task.oracle, "submit"]
    texts += [
      body.decode()
      for path, body in sorted(task.environment.items())
      if path.startswith("files/") and body.isascii()
    ]
  return tokenizers.train(
    texts, vocab_size=config.pretrain.vocab_size, symbols=[*WORDS, *NUMBERS]
  )


def build(
  workdir: epath.Path,
  config: config_dict.ConfigDict,
  setting: Setting,
  arena: Arena,
  progress: LiveProgress,
) -> epath.Path:
  """Materialises the run's tasks and demonstrations, once.

  Returns: the dataset's directory, for `tasks.datasets.load`.

  Raises:
    TaskError: an oracle does not pass its own verifier, or its run or a
      command of it is longer than an episode allows.
    SandboxError: the sandboxes do not work here.
  """
  demonstrated, listed = plan(config)
  splits = {**demonstrated, **listed}

  def tasks_of(split: str) -> list[Task]:
    made = family_tasks(setting.families, *splits[split])
    brought = setting.directory_tasks if split in _WITH_DIRECTORIES else ()
    practised = range(config.pretrain.drills if split == "pretrain" else 0)
    drills = (make_task(copying, "pretrain", i) for i in practised)
    return [*made, *brought, *drills]

  def record(split: str) -> list[datasets.Example]:
    tasks = tasks_of(split)
    progress.phase(f"record {split}", total=len(tasks))
    examples = arena.run(
      demonstrations.record(
        tasks,
        open_sandbox=arena.open_sandbox,
        verify=verifier.verify,
        limits=setting.limits,
        concurrency=config.sandboxes,
        on_done=progress.update,
      )
    )
    for example in examples:
      for turn in example["turns"]:
        size = len(setting.chat.tokenizer.encode(turn["command"])) + 1
        if size > setting.limits.max_action_tokens:
          raise TaskError(
            f"task {example['name']}: the oracle's command "
            f"{turn['command']!r} is {size} tokens with its stop, more than "
            f"limits.max_action_tokens = {setting.limits.max_action_tokens}; "
            "raise that, or split the command"
          )
      length = len(demonstrations.imitate(setting.chat, example))
      if length > setting.limits.max_tokens:
        raise TaskError(
          f"task {example['name']}: its oracle's run is {length} tokens, more "
          f"than limits.max_tokens = {setting.limits.max_tokens}; raise that, "
          "or shorten solution/commands.json or what the commands print"
        )
    return [{**example, "split": split} for example in examples]

  def undemonstrated(split: str) -> Iterator[datasets.Example]:
    for task in tasks_of(split):
      yield {
        "name": task.name,
        "family": task.family,
        "domain": task.domain,
        "split": split,
        "instruction": task.instruction,
        "task": to_bytes(task),
        "turns": [],
      }

  return datasets.build(
    workdir / "data",
    fingerprint=datasets.fingerprint(
      {
        "families": [f.name for f in setting.families],
        "splits": {
          s: [name, *map(int, ids)] for s, (name, ids) in splits.items()
        },
        "drills": config.pretrain.drills if "pretrain" in splits else 0,
        "limits": config.limits.to_dict(),
        "directories": [
          hashlib.sha256(to_bytes(t)).hexdigest()
          for t in setting.directory_tasks
        ],
      }
    ),
    examples={
      split: (
        lambda s=split: record(s) if s in demonstrated else undemonstrated(s)
      )
      for split in splits
    },
  )


def plan(config: config_dict.ConfigDict) -> tuple[Plan, Plan]:
  """Splits with an oracle's run of each task, and splits without."""
  if config.pretrain.enabled:
    pre = config.pretrain
    end = pre.sessions + pre.validation
    return {
      "pretrain": ("pretrain", range(pre.sessions)),
      "pretrain_validation": ("pretrain", range(pre.sessions, end)),
    }, {}
  sizes = config.data
  first = sizes.demonstrations + sizes.validation
  return {
    "demonstrations": ("train", range(sizes.demonstrations)),
    "validation": ("train", range(sizes.demonstrations, first)),
  }, {"train": ("train", range(first, first + sizes.train))}


class TaskStream:
  """Training tasks for ever, in shuffled epochs, with a cursor."""

  def __init__(self, data: epath.Path, seed: int):
    self._batches = datasets.batches(
      datasets.load(data, "train"), batch_size=1, seed=seed
    )

  def take(self, count: int) -> list[Task]:
    """The next `count` tasks."""
    return [from_bytes(next(self._batches)[0]["task"]) for _ in range(count)]

  @property
  def cursor(self) -> Any:
    """Where the stream stands (JSON); set it to go on from there."""
    return json.loads(json.dumps(self._batches.get_state()))

  @cursor.setter
  def cursor(self, state: Any) -> None:
    self._batches.set_state(state)


def family_scales(
  examples: Iterable[datasets.Example],
) -> dict[str, list[int]]:
  """Number of non-hygiene assertions of each task that was counted."""
  scales: dict[str, list[int]] = {}
  for example in examples:
    task = from_bytes(example["task"])
    if task.num_assertions:
      scale = task.num_assertions - len(task.hygiene)
      scales.setdefault(task.family, []).append(scale)
  return scales


def shown_names(
  example: datasets.Example, rng: np.random.Generator, others: int
) -> list[str]:
  """What a session types before it was printed, and words it never types.

  A file keeps its suffix ("amber.csv"), as an instruction would name it. A
  name that an output showed first is left out: a base model that found it
  among the hints would never learn to copy it from the output.
  """
  used: dict[str, None] = {}
  read = ""
  for turn in example["turns"]:
    for name, suffix in _TYPED.findall(turn["command"]):
      if name not in read:
        used[name + suffix] = None
    read += turn["command"] + turn["observation"].decode(errors="replace")
  unused = [w for w in WORDS if w not in read]
  extra = [unused[i] for i in rng.permutation(len(unused))[:others]]
  return [*used, *extra]
