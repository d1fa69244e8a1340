"""Trajectories on disk: an ArrayRecord file per batch, a record per episode.

A record is one msgpack map from field to value; an array is its dtype, shape
and bytes, so what is read equals what was written bit for bit. ArrayRecord
compresses each record and keeps a hash of it.
"""

import dataclasses
import errno
import functools
import math
import os
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgpack
import numpy as np
from array_record.python.array_record_module import (
  ArrayRecordReader,
  ArrayRecordWriter,
)
from etils import epath

from t1jax import paths
from t1jax.rollout.trajectory import TOKEN_FIELDS, Trajectory, TrajectoryError

_DTYPES = dict(
  zip(TOKEN_FIELDS, ("<i4", "|b1", "<f4", "<i4", "<i4", "<i2"), strict=True)
)
_WRITER = "group_size:1"  # to read one record, decompress one
_READER = "readahead_buffer_size:0,max_parallelism:0"  # random access
# An error message may quote any bytes that an agent printed.
_pack = functools.partial(msgpack.packb, unicode_errors="surrogatepass")
_unpack = functools.partial(msgpack.unpackb, unicode_errors="surrogatepass")


def write(path: epath.PathLike, trajectories: Iterable[Trajectory]) -> None:
  """Writes a batch to a file, local or gs://; it takes the place of an old one.

  The file appears whole or not at all.

  Raises:
    TrajectoryError: a field that is not what `Trajectory` says of it.
    OSError: the disk is full.
  """
  path = epath.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  records = (
    _encode(trajectory, f"{path}, record {number}")
    for number, trajectory in enumerate(trajectories)
  )
  with paths.to_write(path) as local:
    _write_records(local, records)


def read(path: epath.PathLike) -> "Recorded":
  """Opens what `write` wrote; raises TrajectoryError unless it is whole."""
  return Recorded(epath.Path(path))


class Recorded:
  """Random access to the trajectories of one file; their arrays are read-only.

  Access raises TrajectoryError, naming file, record and field, when a record
  is damaged.
  """

  def __init__(self, path: epath.Path):
    self._path = path
    if not path.exists():
      raise TrajectoryError(f"no trajectories at {path}")
    with paths.to_read(path) as local:  # a copy goes, the reader keeps it open
      self._reader = ArrayRecordReader(str(local), _READER)
    if not self._reader.ok():  # it would pass for an empty file
      raise TrajectoryError(
        f"{path} is not a whole ArrayRecord file: it was cut short, or "
        "something else wrote it"
      )

  def __len__(self) -> int:
    return self._reader.num_records()

  def __iter__(self) -> Iterator[Trajectory]:
    return (self[number] for number in range(len(self)))

  def __getitem__(self, index: int) -> Trajectory:
    number = range(len(self))[int(index)]
    where = f"{self._path}, record {number}"
    try:
      (record,) = self._reader.read([number])
      fields = _unpack(record)
    except (RuntimeError, ValueError) as error:
      raise TrajectoryError(f"{where} is damaged: {error}") from error
    trajectory = _value(Trajectory, fields, where)
    _check(trajectory, where)
    return trajectory


def _write_records(path: epath.Path, records: Iterable[bytes]) -> None:
  try:
    writer = ArrayRecordWriter(str(path), _WRITER)
    for record in records:
      writer.write(record)
    writer.close()
  except RuntimeError as error:  # whatever is wrong
    if "No space left" not in str(error):
      raise
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def _encode(trajectory: Trajectory, where: str) -> bytes:
  _check(trajectory, where)
  return _pack(trajectory, default=_plain)


def _plain(value: Any) -> Any:
  """What msgpack does not know, in what it knows; all fields, also new ones."""
  if dataclasses.is_dataclass(value):
    return vars(value)
  if isinstance(value, np.ndarray):
    return value.dtype.str, value.shape, value.tobytes()
  if isinstance(value, Mapping):
    return dict(value)
  raise TrajectoryError(f"a trajectory cannot hold {value!r} of {type(value)}")


def _check(trajectory: Trajectory, where: str) -> None:
  """Raises TrajectoryError unless arrays have their dtype, rank and length."""
  length = trajectory.tokens.size
  for field, dtype in _DTYPES.items():
    array = getattr(trajectory, field)
    rank, axes = (3, "[T, L, K]") if field == "routes" else (1, "[T]")
    if (array.dtype, array.ndim, *array.shape[:1]) != (dtype, rank, length):
      raise TrajectoryError(
        f"{where}, {field}: {array.dtype} of shape {list(array.shape)}; "
        f"expected {axes} {np.dtype(dtype)} with T = {length}"
      )


_type_hints = functools.cache(typing.get_type_hints)


def _value(hint: Any, value: Any, where: str) -> Any:
  """A value of the type `hint`, from what a record holds of it.

  Raises TrajectoryError when it holds something else; `where` names the place.
  """
  kind = typing.get_origin(hint) or hint
  if kind is np.ndarray:
    return _array(value, where)
  if dataclasses.is_dataclass(kind):
    fields, hints = _expect(dict, value, where), _type_hints(kind)
    for field in sorted(hints.keys() ^ fields.keys(), key=str):
      what = "is missing" if field in hints else "is not a field"
      raise TrajectoryError(f"{where}, {field}: {what} of {kind.__name__}")
    known = {
      field: _value(of, fields[field], f"{where}, {field}")
      for field, of in hints.items()
    }
    try:
      return kind(**known)
    except TrajectoryError as error:
      raise TrajectoryError(f"{where}: {error}") from error
  if kind is tuple:
    of, _ = typing.get_args(hint)  # tuple[of, ...]
    items = enumerate(_expect(list, value, where))
    return tuple(_value(of, item, f"{where}[{i}]") for i, item in items)
  if kind is Mapping:
    _, of = typing.get_args(hint)  # Mapping[str, of]
    items = _expect(dict, value, where).items()
    return {key: _value(of, item, f"{where}[{key!r}]") for key, item in items}
  return _expect(float | int if kind is float else kind, value, where)


def _array(value: Any, where: str) -> np.ndarray:
  try:
    dtype, shape, data = value
    taken = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) != taken:
      raise ValueError(
        f"{len(data)} bytes; {dtype} of shape {shape} takes {taken}"
      )
    return np.frombuffer(data, dtype).reshape(shape)
  except (TypeError, ValueError) as error:
    raise TrajectoryError(f"{where}: {error}") from error


def _expect(kind: Any, value: Any, where: str) -> Any:
  if not isinstance(value, kind):
    raise TrajectoryError(
      f"{where}: holds a {type(value).__name__}; expected "
      f"{getattr(kind, '__name__', kind)}"
    )
  return value
