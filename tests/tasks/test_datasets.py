import importlib.util
import json
import subprocess
import sys

import hypothesis
import pytest
from hypothesis import strategies as st

from t1jax.tasks import datasets
from t1jax.tasks.datasets import DatasetError


def example(index, split="train", turns=None):
  if turns is None:
    turns = [
      {"command": f"cat {j}", "observation": b"\xff\0" * j, "exit_code": j}
      for j in range(index % 4)
    ]
  return {
    "name": f"count-{split}-{index:05d}",
    "family": "count",
    "domain": "files",
    "split": split,
    "instruction": f"Count the lines of é{index}.",
    "task": b'{"files": "\xff\x00"}',
    "turns": turns,
  }


@pytest.fixture(name="directory", scope="module")
def built(tmp_path_factory):
  return datasets.build(
    tmp_path_factory.mktemp("data"),
    fingerprint="a",
    examples={
      "train": lambda: (example(i) for i in range(23)),
      "heldout": lambda: [example(0, "heldout")],
    },
  )


def test_examples_come_back_in_order(directory):
  source = datasets.load(directory, "train")
  assert [source[i] for i in range(len(source))] == [
    example(i) for i in range(23)
  ]
  assert len(datasets.load(directory, "heldout")) == 1
  assert list(directory.glob("*.array_record-*"))


@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
  st.lists(
    st.fixed_dictionaries(
      {
        "command": st.text(st.characters(codec="utf-8"), max_size=20),
        "observation": st.binary(max_size=20),
        "exit_code": st.integers(-1, 255),
      }
    ),
    max_size=4,
  )
)
def test_any_text_and_bytes_survive(tmp_path_factory, turns):
  directory = datasets.build(
    tmp_path_factory.mktemp("any"),
    fingerprint="a",
    examples={"train": lambda: [example(0, turns=turns)]},
  )
  assert datasets.load(directory, "train")[0]["turns"] == turns


def test_neither_tensorflow_nor_jax_is_loaded(directory):
  assert importlib.util.find_spec("tensorflow") is None
  program = f"""
import sys
from t1jax.tasks import datasets
assert len(datasets.load({str(directory)!r}, "train")) == 23
print(*sorted({{"jax", "tensorflow", "grain"}} & set(sys.modules)))
"""
  out = subprocess.check_output([sys.executable, "-c", program], text=True)
  assert out.strip() == ""


def test_builds_once_per_fingerprint(tmp_path, capfd):
  made = []

  def make(count):
    made.append(count)
    return [example(i) for i in range(count)]

  def build(name, count):
    return datasets.build(
      tmp_path, fingerprint=name, examples={"train": lambda: make(count)}
    )

  first = build(datasets.fingerprint({"count": 3}), 3)
  assert build(datasets.fingerprint({"count": 3}), 3) == first
  other = build(datasets.fingerprint({"count": 4}), 4)
  assert made == [3, 4]
  assert len(datasets.load(first, "train")) == 3
  assert len(datasets.load(other, "train")) == 4
  assert capfd.readouterr() == ("", "")


def test_an_interrupted_build_leaves_nothing_to_mistake_for_one(tmp_path):
  def interrupted():
    yield example(0)
    raise KeyboardInterrupt

  def build(make):
    return datasets.build(tmp_path, fingerprint="a", examples={"train": make})

  with pytest.raises(KeyboardInterrupt):
    build(interrupted)
  directory = build(lambda: [example(0), example(1)])
  assert len(datasets.load(directory, "train")) == 2


def test_refusals(tmp_path, directory):
  with pytest.raises(DatasetError, match="no dataset in"):
    datasets.load(tmp_path, "train")
  with pytest.raises(DatasetError, match=r"no split 'test'; it has heldout, t"):
    datasets.load(directory, "test")
  with pytest.raises(DatasetError, match="lacks split 'pretrain'"):
    datasets.build(
      directory.parent.parent.parent,
      fingerprint="a",
      examples={"pretrain": lambda: []},
    )
  with pytest.raises(DatasetError, match="made for split 'heldout'"):
    datasets.build(
      tmp_path, fingerprint="b", examples={"heldout": lambda: [example(0)]}
    )
  with pytest.raises(DatasetError, match="empty"):
    datasets.batches([], batch_size=2, seed=0)
  whole = datasets.build(
    tmp_path, fingerprint="c", examples={"train": lambda: [example(0)]}
  )
  next(iter(whole.glob("*.array_record-*"))).unlink()
  with pytest.raises(DatasetError, match="is missing; delete"):
    datasets.load(whole, "train")


def names(batch):
  return [e["name"] for e in batch]


def test_an_epoch_holds_each_example_once_in_another_order(directory):
  source = datasets.load(directory, "train")
  got = list(datasets.batches(source, batch_size=5, seed=0, epochs=2))
  assert [len(b) for b in got] == [5] * 9 + [1]
  flat = [n for b in got for n in names(b)]
  everything = [example(i)["name"] for i in range(23)]
  assert sorted(flat[:23]) == sorted(flat[23:]) == everything
  assert flat[:23] != flat[23:]
  other = next(datasets.batches(source, batch_size=23, seed=1))
  assert names(other) != flat[:23]


def test_an_interrupted_reader_goes_on_as_if_it_never_was(directory):
  source = datasets.load(directory, "train")

  def reader():
    return datasets.batches(source, batch_size=4, seed=3)

  through = reader()
  uninterrupted = [names(next(through)) for _ in range(20)]
  for stop in (0, 1, 5, 6, 13):
    first = reader()
    seen = [names(next(first)) for _ in range(stop)]
    cursor = json.loads(json.dumps(first.get_state()))
    second = reader()
    second.set_state(cursor)
    seen += [names(next(second)) for _ in range(20 - stop)]
    assert seen == uninterrupted


def test_building_leaves_nothing_elsewhere(tmp_path, monkeypatch):
  elsewhere = tmp_path / "temporary"
  elsewhere.mkdir()
  monkeypatch.setattr("tempfile.tempdir", str(elsewhere))
  built = datasets.build(
    tmp_path / "data",
    fingerprint="a",
    examples={"train": lambda: [example(0)]},
  )
  assert len(datasets.load(built, "train")) == 1
  assert not list(elsewhere.iterdir())
