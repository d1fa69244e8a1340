"""Splits do not meet, the task stream resumes, the tokenizer repeats."""

import numpy as np
import pytest

from t1jax import config as configs
from t1jax import corpus
from t1jax.tasks import datasets
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task
from t1jax.tasks.families.drills import copying
from t1jax.tasks.overlap import overlaps
from t1jax.tasks.task import to_bytes


@pytest.fixture(scope="module")
def tiny():
  return configs.load_config("configs/tiny.py")


def test_splits_take_different_task_numbers(tiny):
  demonstrated, listed = corpus.plan(tiny)
  taken = {}
  for name, (split, numbers) in {**demonstrated, **listed}.items():
    assert split == "train"
    taken[name] = set(numbers)
  assert set(taken) == {"demonstrations", "validation", "train"}
  assert len(set.union(*taken.values())) == sum(map(len, taken.values()))


def test_pretraining_sees_no_training_or_heldout_task(tiny):
  config = configs.load_config("configs/tiny.py:pretrain")
  demonstrated, listed = corpus.plan(config)
  assert {split for split, _ in demonstrated.values()} == {"pretrain"}
  assert not listed
  heldout = [make_task(f, "heldout", i) for f in FAMILIES for i in range(8)]
  seen = [make_task(f, "pretrain", i) for f in FAMILIES for i in range(40)]
  assert not overlaps(heldout, seen)


def test_the_stream_goes_on_where_its_cursor_says(tmp_path):
  def examples():
    for i in range(7):
      task = make_task(FAMILIES[i % 3], "train", i)
      yield {
        "name": task.name, "family": task.family, "domain": task.domain,
        "split": "train", "instruction": task.instruction,
        "task": to_bytes(task), "turns": [],
      }  # fmt: skip

  data = datasets.build(tmp_path, fingerprint="x", examples={"train": examples})
  whole = corpus.TaskStream(data, seed=3)
  names = [t.name for t in whole.take(20)]
  assert len(set(names[:7])) == 7 and names[:7] != names[7:14]
  first = corpus.TaskStream(data, seed=3)
  assert [t.name for t in first.take(9)] == names[:9]
  second = corpus.TaskStream(data, seed=3)
  second.cursor = first.cursor
  assert [t.name for t in second.take(11)] == names[9:]


def test_the_tokenizer_is_made_of_the_pretraining_split_alone(tiny):
  small = tiny.copy_and_resolve_references()
  small.pretrain.sessions = 8
  one, two = (corpus.train_tokenizer(small) for _ in range(2))
  assert one.model == two.model
  assert one.vocab_size == tiny.pretrain.vocab_size
  for name in ("amber", "47"):
    assert len(one.encode(name)) == 1


def test_hints_are_what_no_output_showed_before_it_was_typed():
  turns = (
    ("grep amber basil.csv", b"amber,cedar.txt\n"),
    ("cp cedar.txt delta.txt", b""),
    ("sed -i s/amber/47/ basil.csv", b""),
    ("sed -i 5d delta.txt", b""),
  )
  example = {"turns": [{"command": c, "observation": o} for c, o in turns]}
  rng = np.random.default_rng(0)
  shown = corpus.shown_names(example, rng, 3)
  assert shown[:4] == ["amber", "basil.csv", "delta.txt", "47"]
  assert len(shown) == 7
  # The others are in no command and no output.
  assert not {"amber", "basil", "cedar", "delta"} & set(shown[4:])


def test_drills_are_no_task_family():
  assert copying.name not in {f.name for f in FAMILIES}
  for i in range(30):
    task = make_task(copying, "pretrain", i)
    assert len(task.oracle) >= 5
