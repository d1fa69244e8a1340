"""Tasks and oracle demonstrations on disk: a TFDS dataset of ArrayRecords.

`build` materialises them once, without TensorFlow; `load` gives random access;
`batches` shuffles them into batches by grain, with a cursor that a checkpoint
can save.
"""

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from t1jax import paths

if TYPE_CHECKING:
  import grain


class DatasetError(ValueError):
  """A dataset that is missing, or examples that do not fit it."""


class Turn(TypedDict):
  command: str
  observation: bytes  # what the shell printed; any bytes
  exit_code: int


class Example(TypedDict):
  """A task, and the oracle's run of it (no turns: not demonstrated)."""

  name: str
  family: str
  domain: str
  split: str
  instruction: str
  task: bytes  # tasks.task.to_bytes
  turns: Sequence[Turn]


# Called only if the split has to be built: making examples runs sandboxes.
MakeExamples = Callable[[], Iterable[Example]]

# Epochs; grain's own "for ever" overflows when batches hold one example.
_FOREVER = 1_000_000
_INFO = "dataset_info.json"
_TEXTS = ("name", "family", "domain", "split", "instruction")


class _LocalInfo(tfds.core.DatasetInfo):
  """Facts that stand in the dataset's own directory alone."""

  def initialize_from_bucket(self) -> None:
    # TFDS would ask its public bucket, which cannot know this dataset, and
    # leave a temporary directory behind.
    pass


class TerminalTasks(tfds.core.GeneratorBasedBuilder):
  """The TFDS builder; its splits and examples are handed in."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(
    self, *, examples: Mapping[str, MakeExamples] | None = None, **kwargs: Any
  ):
    self._examples = dict(examples or {})
    super().__init__(**kwargs)

  def _info(self) -> tfds.core.DatasetInfo:
    any_bytes = tfds.features.Tensor(shape=(), dtype=np.bytes_)
    turn = {
      "command": tfds.features.Text(),
      "observation": any_bytes,
      "exit_code": tfds.features.Scalar(np.int32),
    }
    return _LocalInfo(
      builder=self,
      description="Terminal tasks with the oracle's runs of them.",
      features=tfds.features.FeaturesDict(
        {name: tfds.features.Text() for name in _TEXTS}
        | {"task": any_bytes, "turns": tfds.features.Sequence(turn)}
      ),
      disable_shuffling=True,  # the order made is the order read
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    return {split: self._generate_examples(split) for split in self._examples}

  def _generate_examples(self, split: str) -> Iterator[tuple[int, Example]]:
    for index, example in enumerate(self._examples[split]()):
      if example["split"] != split:
        raise DatasetError(
          f"example {example['name']} of split {example['split']!r} was made "
          f"for split {split!r}; hand it in under its own split"
        )
      yield index, {**example, "turns": list(example["turns"])}


def fingerprint(settings: Mapping[str, Any]) -> str:
  """A short stable name for whatever the examples depend on (JSON-able)."""
  text = json.dumps(settings, sort_keys=True, allow_nan=False)
  return hashlib.sha256(text.encode()).hexdigest()[:16]


def build(
  data_dir: epath.PathLike,
  *,
  fingerprint: str,
  examples: Mapping[str, MakeExamples],
) -> epath.Path:
  """Materialises a dataset, unless it is there already.

  Args:
    data_dir: where datasets live, local or gs://; each under its fingerprint.
    fingerprint: names everything that the examples depend on.
    examples: split -> function that makes its examples, in order.

  Returns: the dataset's own directory, for `load`. It appears there whole or
  not at all.
  """
  root = epath.Path(data_dir) / fingerprint
  if paths.is_remote(root):
    return _build_in_bucket(root, examples)
  builder = TerminalTasks(
    data_dir=root, file_format="array_record", examples=examples
  )
  for unfinished in root.glob("*/incomplete.*"):  # an earlier try was killed
    unfinished.rmtree()
  tfds.disable_progress_bar()
  with contextlib.redirect_stdout(io.StringIO()):  # "Downloading ..."
    builder.download_and_prepare()
  built = epath.Path(builder.data_path)
  if lacking := sorted(set(examples) - set(builder.info.splits)):
    raise DatasetError(
      f"the dataset in {built} lacks split {lacking[0]!r}; it was built with "
      "the same fingerprint and other splits: put the splits into it"
    )
  return built


def _build_in_bucket(
  root: epath.Path, examples: Mapping[str, MakeExamples]
) -> epath.Path:
  """Builds on the local disk, for want of a writer, and copies."""
  for info in root.glob(f"*/*/{_INFO}"):
    return info.parent
  with tempfile.TemporaryDirectory() as directory:
    local = build(directory, fingerprint=root.name, examples=examples)
    built = root / local.relative_to(epath.Path(directory) / root.name)
    # What says that the dataset is there comes last.
    for file in sorted(local.iterdir(), key=lambda file: file.name == _INFO):
      paths.upload(file, built / file.name)
  return built


class Source(Sequence[Example]):
  """Random access to the examples of one split, as they were handed in."""

  def __init__(self, records: Sequence[Mapping[str, Any]]):
    self._records = records

  def __len__(self) -> int:
    return len(self._records)

  def __iter__(self) -> Iterator[Example]:
    return (self[index] for index in range(len(self)))

  def __getitem__(self, index: int) -> Example:
    try:
      record = self._records[int(index)]
    except RuntimeError as error:  # of the ArrayRecord library
      raise DatasetError(
        f"example {index} of the dataset is damaged: {error}; delete the "
        "run's data directory so that it is built again"
      ) from error
    turns = record["turns"]
    example = {name: record[name].decode() for name in _TEXTS}
    example["task"] = bytes(record["task"])
    example["turns"] = [
      Turn(
        command=command.decode(),
        observation=bytes(observation),
        exit_code=int(exit_code),
      )
      for command, observation, exit_code in zip(
        turns["command"], turns["observation"], turns["exit_code"], strict=True
      )
    ]
    return example


def load(directory: epath.PathLike, split: str) -> Sequence[Example]:
  """Opens one split of what `build` made.

  Raises DatasetError when there is no dataset, no such split, or no file of it.
  """
  directory = epath.Path(directory)
  if not (directory / _INFO).exists():
    raise DatasetError(f"no dataset in {directory}: build it first")
  if paths.is_remote(directory):
    return _load_from_bucket(directory, split)
  builder = tfds.builder_from_directory(directory)
  if split not in builder.info.splits:
    raise DatasetError(
      f"the dataset in {directory} has no split {split!r}; it has "
      f"{', '.join(sorted(builder.info.splits))}"
    )
  lost = [f for f in builder.info.splits[split].filepaths if not f.exists()]
  if lost:
    raise DatasetError(
      f"{lost[0]} is missing; delete {directory} so that it is built again"
    )
  return Source(builder.as_data_source(split=split))


def _load_from_bucket(directory: epath.Path, split: str) -> list[Example]:
  """Reads the whole split into memory, for want of a reader."""
  with tempfile.TemporaryDirectory() as local:
    for file in directory.iterdir():
      if file.suffix == ".json" or f"-{split}." in file.name:
        file.copy(epath.Path(local) / file.name)
    return list(load(local, split))


def batches(
  source: Sequence[Example],
  *,
  batch_size: int,
  seed: int,
  epochs: int | None = None,
) -> "grain.DatasetIterator[list[Example]]":
  """Shuffled batches, each epoch in another order.

  Args:
    source: from `load`, or any sequence.
    batch_size: examples per batch; the very last one may be shorter.
    seed: of the order. The same seed gives the same batches.
    epochs: how often each example comes; None for ever.

  Returns: an iterator of lists of examples. Its `get_state()` is JSON-able and
  `set_state()` goes on right after the batch that was last returned then.
  """
  import grain  # brings JAX with it, which workers that read tasks do without

  if not len(source):
    raise DatasetError("no examples to batch: the split is empty")
  if not 0 <= seed < 2**32:
    raise ValueError(f"seed must be in [0, 2**32), got {seed}")
  dataset = (
    grain.MapDataset.source(source)
    .shuffle(seed=seed)
    .repeat(epochs or _FOREVER)
  )
  dataset = dataset.batch(batch_size, drop_remainder=False, batch_fn=list)
  # Reading takes microseconds: threads would only compete with training.
  read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
  return iter(dataset.to_iter_dataset(read))
