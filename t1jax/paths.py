"""Paths on the local disk or in a bucket (gs://…), through one door.

etils.epath reads and writes both. What only knows local files (ArrayRecord,
TensorBoard, W&B) works on a local copy that it gets here. An object appears in
a bucket when its upload ends, so a file is there whole or not at all, as on a
disk.
"""

import contextlib
import functools
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from etils import epath
from etils.epath import backend

BUCKETS = "gs://"
# A bucket that has not answered after so many seconds will not.
_PATIENCE = 15.0


class PathError(ValueError):
  """A path that cannot be used; one line says why, and what to do."""


def is_remote(path: epath.PathLike) -> bool:
  """Whether a path is in a bucket: only epath and this module reach it."""
  return "://" in os.fspath(path)


def parse(text: str) -> epath.Path:
  """What a user wrote, as an absolute path.

  Raises PathError for a URL that is not gs://BUCKET/…, or has a slash too few.
  """
  if not is_remote(text) and not text.startswith(BUCKETS[:-1]):
    return epath.Path(os.path.abspath(os.path.expanduser(text)))
  if not text.startswith(BUCKETS) or not text[len(BUCKETS) :].strip("/"):
    raise PathError(
      f"{text} is no path that can be used; expected a local one or "
      "gs://BUCKET/DIRECTORY"
    )
  return epath.Path(text)


def check_reachable(
  path: epath.PathLike, *, seconds: float = _PATIENCE
) -> None:
  """Returns when the path's bucket has answered; at once for a local path.

  Raises:
    PathError: there is no such bucket, it refuses these credentials, or it has
      not answered in so many seconds. The client library alone would try for
      minutes.
  """
  if is_remote(path):
    _ask(os.fspath(path).removeprefix(BUCKETS).split("/")[0], seconds)


@functools.cache
def _ask(bucket: str, seconds: float) -> None:
  result: list[Exception | None] = []

  def ask() -> None:
    try:
      # Needs the right to list objects alone; asking for the bucket itself
      # would need one that few accounts have.
      _filesystem().call("GET", "b/{}/o", bucket, maxResults=1, json_out=True)
      result.append(None)
    except Exception as error:
      result.append(error)

  import gcsfs  # noqa: F401  takes seconds on a busy machine, not the bucket's

  # The libraries print tracebacks and advice of their own.
  loggers = [logging.getLogger(n) for n in ("gcsfs", "google.auth._default")]
  for logger in loggers:
    logger.disabled = True
  thread = threading.Thread(target=ask, daemon=True)
  thread.start()
  thread.join(seconds)
  for logger in loggers:
    logger.disabled = False
  if not result:
    raise PathError(
      f"bucket {BUCKETS}{bucket} has not answered in {seconds:g} seconds; "
      f"check the network, and log in: {_LOG_IN}"
    )
  if result[0] is not None:
    raise _explain(bucket, result[0]) from result[0]


_LOG_IN = (
  "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
)


def _explain(bucket: str, error: Exception) -> PathError:
  said = " ".join(str(error).split())[:200]
  if isinstance(error, FileNotFoundError):
    return PathError(
      f"there is no bucket {BUCKETS}{bucket}; correct the path, or make it: "
      f"gcloud storage buckets create {BUCKETS}{bucket}"
    )
  refused = getattr(error, "code", None) in (401, 403)
  if refused or said.startswith("Forbidden"):
    return PathError(
      f"bucket {BUCKETS}{bucket} refuses access ({said}); log in: {_LOG_IN}"
    )
  return PathError(
    f"bucket {BUCKETS}{bucket} cannot be used ({type(error).__name__}: {said})"
  )


@contextlib.contextmanager
def refusals(path: epath.PathLike) -> Iterator[None]:
  """Turns a bucket's refusal inside, e.g. to write, into a PathError."""
  try:
    yield
  except (PathError, FileNotFoundError):
    raise
  except Exception as error:
    refused = getattr(error, "code", None) in (401, 403)
    if is_remote(path) and (refused or str(error).startswith("Forbidden")):
      bucket = os.fspath(path).removeprefix(BUCKETS).split("/")[0]
      raise _explain(bucket, error) from error
    raise


def _filesystem() -> Any:
  # The very one that epath uses: another would keep listings of its own.
  return backend.fsspec_backend.fs(BUCKETS)


def upload(file: epath.PathLike, path: epath.PathLike) -> None:
  """Copies a local file into a bucket, where it appears when it is whole."""
  # epath's own copy ends the upload also when it is interrupted.
  _filesystem().put_file(os.fspath(file), os.fspath(path))


@contextlib.contextmanager
def to_read(path: epath.PathLike) -> Iterator[epath.Path]:
  """A local file with the content of `path`, for as long as the block lasts."""
  path = epath.Path(path)
  if not is_remote(path):
    yield path
    return
  with tempfile.TemporaryDirectory() as directory:
    yield path.copy(epath.Path(directory) / path.name)


@contextlib.contextmanager
def to_write(path: epath.PathLike) -> Iterator[epath.Path]:
  """A local file to write, which takes the place of `path` after the block.

  Readers see the old file or the new one, never half; the old one also when the
  block raises. The directory must be there.
  """
  path = epath.Path(path)
  if is_remote(path):
    with tempfile.TemporaryDirectory() as directory:
      local = epath.Path(directory) / path.name
      yield local
      upload(local, path)
    return
  partial = path.with_name(f".{path.name}.partial")
  try:
    yield partial
    partial.replace(path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise


def write_atomically(path: epath.PathLike, content: str | bytes) -> None:
  """Writes a file whole or not at all; readers see the old one or the new."""
  with to_write(path) as file:
    file.write_bytes(content.encode() if isinstance(content, str) else content)


class Mirror:
  """A local directory for writers that append, copied to where it belongs.

  Objects cannot be appended to. For a local path `local` is that path, and
  there is nothing to copy.
  """

  def __init__(self, path: epath.PathLike):
    self._path = epath.Path(path)
    self._path.mkdir(parents=True, exist_ok=True)
    self._temporary = None
    self._pushed: dict[str, tuple[int, int]] = {}
    self.local = self._path
    if is_remote(self._path):
      self._temporary = tempfile.TemporaryDirectory(prefix="t1jax-")
      self.local = epath.Path(self._temporary.name)

  def push(self) -> None:
    """Copies the files that changed since the last time."""
    if self._temporary is None:
      return
    for folder, _, names in os.walk(self.local):
      for name in names:
        file = os.path.join(folder, name)
        if os.path.islink(file):
          continue
        try:
          stat = os.stat(file)
        except FileNotFoundError:  # W&B tidies up behind us
          continue
        state = (stat.st_size, stat.st_mtime_ns)
        if self._pushed.get(file) != state:
          target = self._path / os.path.relpath(file, self.local)
          upload(file, target)
          self._pushed[file] = state

  def close(self) -> None:
    """Copies what is left and removes the local directory, if there is one."""
    try:
      self.push()
    finally:
      self.drop()

  def drop(self) -> None:
    """Removes the local directory, if there is one, as it is."""
    if self._temporary is not None:
      self._temporary.cleanup()
