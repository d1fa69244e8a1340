"""Checkpoints of a run, and the base checkpoint that the package ships.

A run saves everything that its next step depends on: device state (actor,
critic, both optimisers, step, weight version) by Orbax, and host state (data
cursor, seeds, phase) as JSON beside it, in one atomic step directory.

The base checkpoint is one small file for version control: parameters only, in
bfloat16, with the settings that they were made with.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import flax.serialization
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from t1jax import paths

_PARTIAL = ".orbax-checkpoint-tmp"
_COMMITTED = "commit_success.txt"  # where a directory cannot be renamed
_BASE_PARAMS = "params.msgpack"
_BASE_CARD = "base.json"


class CheckpointError(ValueError):
  """A checkpoint that is missing, damaged, or of another model."""


@dataclasses.dataclass(frozen=True)
class Restored:
  step: int
  state: Any  # the structure, dtypes and shardings that were asked for
  host: dict[str, Any]


def abstract(tree: Any) -> Any:
  """Shapes, dtypes and shardings of `tree`: what `restore` wants to know."""
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=getattr(x, "sharding", None)
    ),
    tree,
  )


class Checkpoints:
  """The checkpoints of one run directory; local or gs://.

  `save` copies the state off the device and returns; the files are written
  behind the next steps. The state may be donated at once. Close it (or leave
  its `with` block) before the program ends.
  """

  def __init__(
    self,
    directory: epath.PathLike,
    *,
    keep: int = 2,
    read_only: bool = False,
    notify: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
  ):
    """Opens the directory and drops what an interrupted save left there.

    Args:
      directory: made when missing.
      keep: how many of the latest steps stay.
      read_only: change nothing there. What looks half-written may be a save
        that another program is busy with.
      notify: is told, one line each, of half-written steps that are skipped.

    Raises:
      CheckpointError: `read_only`, and there is no such directory.
    """
    self.directory = epath.Path(directory)
    self._read_only = read_only
    if read_only and not self.directory.exists():
      raise CheckpointError(f"there are no checkpoints in {self.directory}")
    if self.directory.exists() and not read_only:
      for path in sorted(self.directory.iterdir()):
        if _PARTIAL in path.name or (
          paths.is_remote(path)
          and path.name.isdigit()
          and not (path / _COMMITTED).exists()
        ):
          notify(
            f"skipping half-written checkpoint {path}: the program that wrote "
            "it was stopped"
          )
    self._manager = ocp.CheckpointManager(
      self.directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=ocp.checkpoint_managers.LatestN(n=keep),
        cleanup_tmp_directories=not read_only,
        create=not read_only,
      ),
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "host": ocp.JsonCheckpointHandler(),
      },
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  @property
  def steps(self) -> tuple[int, ...]:
    """Finished steps, oldest first."""
    return tuple(sorted(self._manager.all_steps()))

  @property
  def latest(self) -> int | None:
    return self._manager.latest_step()

  def save(self, step: int, state: Any, host: Mapping[str, Any]) -> None:
    """Starts saving `state` (a pytree of arrays) and `host` (JSON) as `step`.

    Waits for the save before it, if that is still being written, and raises
    what went wrong with it: OSError ENOSPC when the disk is full. Raises
    CheckpointError when the step is there already, or all is read-only.
    """
    if self._read_only:
      raise CheckpointError(f"{self.directory} was opened to be read only")
    json.dumps(host, allow_nan=False)  # raises here, not in the background
    if step in self._manager.all_steps():
      raise CheckpointError(f"{self.directory}: step {step} is there already")
    with _disk_errors(self.directory):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(state),
          host=ocp.args.JsonSave(
            {"host": dict(host), "digests": digests(state)}
          ),
        ),
        force=True,
      )

  def wait(self) -> None:
    """Blocks until the save is on disk; raises what went wrong with it."""
    with _disk_errors(self.directory):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  def close(self) -> None:
    try:
      self.wait()
    finally:
      self._manager.close()

  def restore(self, abstract_state: Any, step: int | None = None) -> Restored:
    """Reads one step, bit by bit what was saved.

    Args:
      abstract_state: a tree of jax.ShapeDtypeStruct (see `abstract`), or of
        arrays; leaves without a sharding go to the first device.
      step: which; default the latest finished one.

    Raises:
      CheckpointError: there is none, it is damaged, or the tree, a shape or a
        dtype differs from what is asked for. The message names the place.
    """
    step = self.latest if step is None else step
    if step not in self.steps:
      have = ", ".join(map(str, self.steps)) or "none"
      raise CheckpointError(
        f"no checkpoint of step {step} in {self.directory} (there: {have})"
      )
    wanted = jax.tree.map(_placed, abstract_state)
    try:
      stored = self._manager.item_metadata(step)["state"]
      differs = _difference(stored.tree, wanted)
    except Exception as error:
      raise self._damaged(step, error) from error
    if differs:
      raise CheckpointError(
        f"checkpoint {self.directory / str(step)} is of another model: "
        f"{differs}; restore it with the config that it was saved with"
      )
    # Whatever Orbax and TensorStore raise here (five types were seen for one
    # flipped byte) means the same: these files are not what was written.
    try:
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(wanted),
          host=ocp.args.JsonRestore(),
        ),
      )
    except Exception as error:
      raise self._damaged(step, error) from error
    state, record = restored["state"], restored["host"]
    if digests(state) != record["digests"]:
      raise self._damaged(step, ValueError("values are not what was saved"))
    return Restored(step, state, record["host"])

  def _damaged(self, step: int, error: Exception) -> CheckpointError:
    first = str(error).strip().split("\n")[0]
    first = first.split(". See full TensorStore details")[0][:200]
    left = [s for s in self.steps if s != step]
    then = f" to go on from step {left[-1]}" if left else " and start anew"
    return CheckpointError(
      f"checkpoint {self.directory / str(step)} is damaged "
      f"({type(error).__name__}: {first}); delete that directory{then}"
    )


@contextlib.contextmanager
def _disk_errors(path: epath.Path) -> Iterator[None]:
  """Gives a full disk its OSError, whatever the storage library made of it."""
  try:
    yield
  except Exception as error:
    if "No space left" not in str(error):
      raise
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path)) from error


def digests(tree: Any) -> list[int]:
  """One number per leaf that changes when any bit of it does.

  The storage format checks its indices but not the numbers themselves. The sum
  wraps around, so that order and sharding do not matter to it, and weighs each
  element by its place, so that exchanged ones do.
  """
  return [int(x) for x in jax.device_get(_digests(jax.tree.leaves(tree)))]


@jax.jit
def _digests(leaves: list[jax.Array]) -> list[jax.Array]:
  def digest(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
      x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    weight = jnp.ones(x.shape, jnp.uint32)
    for axis in range(x.ndim):
      place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
      weight += place * jnp.uint32(2 * 7919**axis % 2**32)
    return jnp.sum(bits * weight, dtype=jnp.uint32)

  return [digest(x) for x in leaves]


def _placed(leaf: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(leaf, "sharding", None)
  if sharding is None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _difference(stored: Any, wanted: Any) -> str:
  """The first place where two trees of shapes and dtypes differ, or ''."""
  there = ocp.tree.to_flat_dict(stored, sep="/")
  here = ocp.tree.to_flat_dict(wanted, sep="/")
  for name in sorted({*there, *here}):
    if name not in here:
      return f"it also holds {name}"
    if name not in there:
      return f"it has no {name}"
    theirs, ours = _describe(there[name]), _describe(here[name])
    if theirs != ours:
      return f"{name} is {theirs}, expected {ours}"
  return ""


def _describe(leaf: Any) -> str:
  if getattr(leaf, "shape", None) is None:
    return type(leaf).__name__
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.eval_shape(jax.random.key_data, leaf)  # as it is stored
  return f"{leaf.dtype}{list(leaf.shape)}"


def export_base(
  params: Any,
  card: Mapping[str, Any],
  directory: epath.PathLike,
  *,
  dtype: Any = jnp.bfloat16,
) -> int:
  """Writes parameters for shipping: params.msgpack, and last base.json.

  Each file appears whole or not at all: where base.json is, all is.

  Args:
    params: pytree of arrays; floating ones are rounded to `dtype`.
    card: JSON-able: the model's config and how it was made.
    directory: made when missing.
    dtype: what floating parameters are stored in.

  Returns: the size of params.msgpack in bytes.
  """
  directory = epath.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)

  def store(x):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.device_get(x.astype(dtype) if floating else x)

  data = flax.serialization.to_bytes(jax.tree.map(store, params))
  record = {
    "card": dict(card),
    "bytes": len(data),
    "sha256": hashlib.sha256(data).hexdigest(),
  }
  for name, content in (
    (_BASE_PARAMS, data),
    (_BASE_CARD, json.dumps(record, indent=2).encode() + b"\n"),
  ):
    paths.write_atomically(directory / name, content)
  return len(data)


def has_base(directory: epath.PathLike) -> bool:
  """Whether `export_base` came to its end there."""
  return (epath.Path(directory) / _BASE_CARD).exists()


def load_base(
  directory: epath.PathLike, abstract_params: Any
) -> tuple[Any, dict[str, Any]]:
  """Reads what `export_base` wrote.

  Args:
    directory: of the two files.
    abstract_params: tree of jax.ShapeDtypeStruct or arrays. Floating parameters
      are cast to its dtypes; structure and shapes must be equal.

  Returns: (params, card).

  Raises:
    CheckpointError: missing, damaged, or the parameters of another model.
  """
  directory = epath.Path(directory)
  try:
    record = json.loads((directory / _BASE_CARD).read_text())
    data = (directory / _BASE_PARAMS).read_bytes()
  except (OSError, ValueError) as error:
    raise CheckpointError(
      f"no base checkpoint in {directory} ({error}); expected {_BASE_CARD} and "
      f"{_BASE_PARAMS}, as --config=configs/tiny.py:pretrain makes them"
    ) from error
  if hashlib.sha256(data).hexdigest() != record.get("sha256"):
    raise CheckpointError(
      f"{directory / _BASE_PARAMS} is damaged: it has {len(data)} bytes and "
      f"not the sha256 that {_BASE_CARD} records for {record.get('bytes')} "
      "bytes; fetch it again"
    )
  stored = flax.serialization.msgpack_restore(data)
  wanted = flax.serialization.to_state_dict(abstract_params)
  shapes = [
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), tree)
    for tree in (stored, wanted)
  ]
  if differs := _difference(*shapes):
    raise CheckpointError(
      f"the base checkpoint in {directory} is of another model: {differs}; "
      "use the model fields that base.json records, or make a base with these: "
      "--config=configs/tiny.py:pretrain, then --config.base=WORKDIR/base"
    )
  params = flax.serialization.from_state_dict(abstract_params, stored)
  params = jax.tree.map(
    lambda x, a: jnp.asarray(x).astype(a.dtype), params, abstract_params
  )
  return params, record["card"]
