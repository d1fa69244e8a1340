"""Trajectories on disk: what is read is what was written, or an error."""

import dataclasses
import os
import subprocess
import sys

import fsspec.implementations.memory
import msgpack
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from etils.epath import backend
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.rollout import storage
from t1jax.rollout.trajectory import (
  KINDS,
  STATUSES,
  TOKEN_FIELDS,
  AssertionResult,
  Outcome,
  Trajectory,
  TrajectoryError,
)

E = 300  # more experts than a byte counts
numbers = st.floats(allow_nan=False)
texts = st.text(st.characters(), max_size=12)  # lone surrogates, too


@st.composite
def trajectories(draw):
  length = draw(st.integers(1, 60))
  layers, top_k = draw(st.integers(0, 3)), draw(st.integers(1, 4))
  rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
  routes = rng.random((length, layers, E)).argsort(axis=2)[..., :top_k]
  routes[rng.random(length) < 0.2] = -1
  mask = rng.random(length) < 0.5
  words = rng.integers(0, 2**32, length, np.uint32)
  assertions = draw(
    st.lists(
      st.builds(AssertionResult, texts, st.sampled_from(KINDS), st.booleans()),
      max_size=4,
    )
  )
  return Trajectory(
    tokens=rng.integers(0, 2**31, length, np.int32),
    loss_mask=mask,
    logprobs=words.view(np.float32),  # any bits: tiny ones, -0, NaN
    turn_ids=rng.integers(-1, 60, length, np.int32),
    weight_version=rng.integers(0, 2**31, length, np.int32),
    routes=routes.astype(np.int16),
    outcome=Outcome(
      status=draw(st.sampled_from(STATUSES)),
      success=all(a.passed for a in assertions),
      assertions=tuple(assertions),
      reward=draw(numbers),
      reward_parts=draw(st.dictionaries(texts, numbers, max_size=3)),
      seconds=draw(st.dictionaries(texts, numbers, max_size=3)),
      error=draw(texts),
    ),
    task=draw(texts),
    family=draw(texts),
    domain=draw(texts),
    attempt=draw(st.integers(0, 2**40)),
  )


def example(length=4, **fields):
  """A small trajectory with two MoE layers and top-2."""
  routes = np.tile(np.int16([[0, 1], [2, 3]]), (length, 1, 1))
  arrays = {
    "tokens": np.arange(length, dtype=np.int32),
    "loss_mask": np.ones(length, bool),
    "logprobs": np.full(length, -0.5, np.float32),
    "turn_ids": np.zeros(length, np.int32),
    "weight_version": np.zeros(length, np.int32),
    "routes": routes,
  }
  given_ok = AssertionResult("a", "semantic", True)
  outcome = Outcome("completed", True, (given_ok,), 1.5, {"S": 1.0})
  return Trajectory(**{**arrays, "outcome": outcome, "task": "t", **fields})


def assert_equal(got, expected):
  for field in dataclasses.fields(Trajectory):
    one, other = getattr(got, field.name), getattr(expected, field.name)
    if field.name in TOKEN_FIELDS:
      assert (one.dtype, one.shape) == (other.dtype, other.shape), field.name
      assert one.tobytes() == other.tobytes(), field.name
    else:
      assert one == other, field.name


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), max_size=4))
def test_what_is_read_equals_what_was_written(tmp_path_factory, batch):
  path = tmp_path_factory.mktemp("batch") / "sub" / "rl-00001.array_record"
  storage.write(path, batch)
  recorded = storage.read(path)
  assert len(recorded) == len(batch)
  for got, expected in zip(recorded, batch, strict=True):
    assert_equal(got, expected)
  assert list(path.parent.iterdir()) == [path]


def test_access_is_random_and_files_are_replaced(tmp_path):
  path = tmp_path / "rl-00000.array_record"
  storage.write(path, [example(attempt=n) for n in range(9)])
  recorded = storage.read(path)
  assert [recorded[n].attempt for n in (7, 0, -1)] == [7, 0, 8]
  with pytest.raises(IndexError):
    recorded[9]
  storage.write(path, [example(attempt=11)])
  assert [t.attempt for t in storage.read(path)] == [11]


def test_a_bucket_will_do(monkeypatch):
  """Through the same calls as gs://, with memory instead of the network."""
  memory = fsspec.implementations.memory.MemoryFileSystem(skip_instance_cache=1)
  local = backend.fsspec_backend._get_filesystem("file")
  monkeypatch.setattr(
    type(backend.fsspec_backend),
    "_get_filesystem",
    lambda self, name: {"gcs": memory, "file": local}[name],
  )
  path = epath.Path("gs://bucket/run/trajectories/rl-00000.array_record")
  for attempt in (1, 2):
    storage.write(path, [example(attempt=attempt), example(7)])
  first, second = storage.read(path)
  assert_equal(first, example(attempt=2))
  assert_equal(second, example(7))
  assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"logprobs": np.zeros(4)}, "logprobs: float64 .*expected .*float32"),
    ({"turn_ids": np.zeros(3, np.int32)}, r"turn_ids: .*\[3\].*T = 4"),
    ({"routes": np.zeros((4, 2), np.int16)}, r"routes: .*\[T, L, K\]"),
  ],
)
def test_what_breaks_the_contract_is_not_written(tmp_path, fields, message):
  path = tmp_path / "x.array_record"
  bad = example(**fields)
  with pytest.raises(TrajectoryError, match=f"record 1, {message}"):
    storage.write(path, [example(), bad])
  assert not list(tmp_path.iterdir())


def cut(values, field, count):
  dtype, shape, data = values[field]
  return {**values, field: [dtype, shape, data[:-count]]}


def shorter(values, field):
  (dtype, shape, data), rows = values[field], values[field][1][0]
  kept = data[: len(data) // rows * (rows - 1)]
  return {**values, field: [dtype, [rows - 1, *shape[1:]], kept]}


def other_outcome(**fields):
  return lambda v: {**v, "outcome": {**v["outcome"], **fields}}


def no_routes(values):
  return {k: v for k, v in values.items() if k != "routes"}


DAMAGE = {
  **{
    f"{field} cut": (lambda v, f=field: cut(v, f, 1), f"{field}: .* bytes")
    for field in TOKEN_FIELDS
  },
  **{
    f"{field} shorter": (lambda v, f=field: shorter(v, f), f"{field}: .*T = 4")
    for field in TOKEN_FIELDS[1:]
  },
  "tokens shorter": (lambda v: shorter(v, "tokens"), ".*T = 3"),
  "no routes": (no_routes, "routes: is missing of Trajectory"),
  "a field too many": (lambda v: {**v, "x": 1}, "x: is not a field"),
  "another dtype": (
    lambda v: {**v, "logprobs": ["<f8", [4], bytes(32)]},
    "logprobs: float64",
  ),
  "no dtype": (lambda v: {**v, "tokens": ["?!", [4], bytes(16)]}, "tokens: "),
  "no array": (lambda v: {**v, "tokens": 3}, "tokens: "),
  "no shape": (lambda v: {**v, "tokens": ["<i4", "ab", bytes(8)]}, "tokens: "),
  "no text": (lambda v: {**v, "task": 3}, "task: holds a int; expected str"),
  "no outcome": (lambda v: {**v, "outcome": []}, "outcome: holds a list"),
  "a status unknown": (other_outcome(status="?"), "outcome: outcome.status"),
  "no reward": (other_outcome(reward="?"), "outcome, reward: holds a str"),
  "a part": (other_outcome(reward_parts={"S": ""}), r"reward_parts\['S'\]: "),
  "an assertion": (other_outcome(assertions=[{}]), r"assertions\[0\], kind: "),
  "a list": (lambda v: [1, 2], ": holds a list; expected dict"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_field_is_named(tmp_path, case):
  damage, message = DAMAGE[case]
  whole = storage._encode(example(), "")
  write_raw(tmp_path / "x", [whole, msgpack.packb(damage(unpack(whole)))])
  recorded = storage.read(tmp_path / "x")
  assert_equal(recorded[0], example())
  separator = "" if message.startswith((".", ":")) else ", .*"
  with pytest.raises(TrajectoryError, match=f"x, record 1{separator}{message}"):
    recorded[1]


def unpack(record):
  return msgpack.unpackb(record)


def write_raw(path, records):
  writer = ArrayRecordWriter(str(path), "group_size:1")
  for record in records:
    writer.write(record)
  writer.close()


@pytest.mark.parametrize("length", [0, 1, 50, -1])
def test_a_record_of_garbage_is_named(tmp_path, length):
  whole = storage._encode(example(), "")
  noise = whole[:length] if length < 0 else os.urandom(length)
  write_raw(tmp_path / "x", [whole, noise])
  with pytest.raises(TrajectoryError, match="x, record 1"):
    storage.read(tmp_path / "x")[1]


def test_a_file_cut_short_or_of_garbage_is_no_empty_batch(tmp_path):
  path = tmp_path / "x"
  storage.write(path, [example(200)] * 9)
  whole = path.read_bytes()
  for data in (whole[:-1], whole[: len(whole) // 2], b"", os.urandom(70_000)):
    path.write_bytes(data)
    with pytest.raises(TrajectoryError, match="x is not a whole ArrayRecord"):
      storage.read(path)
  with pytest.raises(TrajectoryError, match="no trajectories at "):
    storage.read(tmp_path / "y")


def test_a_flipped_bit_is_seen(tmp_path):
  path = tmp_path / "x"
  noise = np.frombuffer(os.urandom(4000), np.int32)
  long = example(1000, tokens=noise)
  storage.write(path, [long, long])
  data = bytearray(path.read_bytes())
  data[data.index(noise[300:304].tobytes())] ^= 1  # noise is not compressed
  path.write_bytes(data)
  recorded = storage.read(path)
  with pytest.raises(TrajectoryError, match=r"x, record 0 is damaged: .*hash"):
    recorded[0]
  assert_equal(recorded[1], long)


HALF = """
import sys, time
from t1jax.rollout import storage
one = storage.read(sys.argv[1])[0]
def half():
  yield from [one] * 1000
  print("half", flush=True)
  time.sleep(600)
storage.write(sys.argv[1], half())
"""


def test_killed_half_way_the_old_file_stays(tmp_path):
  path = tmp_path / "x"
  storage.write(path, [example()])
  before = path.read_bytes()
  command = [sys.executable, "-c", HALF, str(path)]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
    assert program.stdout.readline() == b"half\n"
    program.kill()
  assert (tmp_path / ".x.partial").exists()
  assert path.read_bytes() == before
  storage.write(path, [example(5)])  # what was left is in nobody's way
  assert len(storage.read(path)[0]) == 5
  assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_has_its_own_error(tmp_path):
  (tmp_path / ".x.partial").symlink_to("/dev/full")
  with pytest.raises(OSError, match="No space left"):
    storage.write(tmp_path / "x", [example()])
  assert not list(tmp_path.iterdir())
