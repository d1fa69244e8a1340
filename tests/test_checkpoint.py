import json
import os
import pathlib
import signal
import subprocess
import sys

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from t1jax import checkpoint
from t1jax.checkpoint import CheckpointError, Checkpoints


@flax.struct.dataclass
class State:
  actor: dict
  actor_opt: tuple
  rng: jax.Array
  step: jax.Array


def make_state(seed=0, width=8):
  keys = jax.random.split(jax.random.key(seed), 3)
  actor = {
    "embed": jax.random.normal(keys[0], (5, width)),
    "layers": [
      {"w": jax.random.normal(k, (width, width), jnp.bfloat16)} for k in keys
    ],
  }
  return State(actor, optax.adamw(1e-3).init(actor), keys[1], jnp.int32(seed))


def assert_same(a, b):
  def equal(x, y):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(
      np.asarray(x).view(np.uint8), np.asarray(y).view(np.uint8)
    )

  assert jax.tree.structure(a) == jax.tree.structure(b)
  jax.tree.map(equal, a, b)


def one(tree):
  """Leaves as arrays of rank 1 or more, so that bytes can be viewed."""
  return jax.tree.map(lambda x: x if x.ndim else x[None], tree)


def test_a_step_comes_back_bit_by_bit(tmp_path):
  state = make_state()
  host = {"phase": "rl", "cursor": {"next": 12}, "seeds": [1, 2**40]}
  with Checkpoints(tmp_path / "c") as saved:
    assert saved.latest is None
    saved.save(3, state, host)
  with Checkpoints(tmp_path / "c") as saved:
    got = saved.restore(checkpoint.abstract(make_state(seed=1)))
  assert (got.step, got.host) == (3, host)
  assert_same(one(got.state), one(state))


def test_only_the_latest_stay(tmp_path):
  with Checkpoints(tmp_path, keep=2) as saved:
    for step in (1, 2, 5):
      saved.save(step, {"x": jnp.full((3,), step)}, {"step": step})
    saved.wait()
    assert saved.steps == (2, 5)
    got = saved.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)}, step=2)
    assert (int(got.state["x"][0]), got.host) == (2, {"step": 2})
    with pytest.raises(CheckpointError, match=r"step 1 .*there: 2, 5"):
      saved.restore({"x": jax.ShapeDtypeStruct((3,), jnp.int32)}, step=1)
    with pytest.raises(CheckpointError, match="step 5 is there already"):
      saved.save(5, {"x": jnp.zeros((3,))}, {})


def test_the_saved_state_may_be_donated_at_once(tmp_path):
  count = jax.jit(lambda x: x + 1.0, donate_argnums=0)
  x = count(jnp.zeros((2000, 2000)))
  with Checkpoints(tmp_path) as saved:
    for step in range(1, 4):
      saved.save(step, {"x": x}, {})
      for _ in range(3):
        x = count(x)
      jax.block_until_ready(x)
      saved.wait()
      got = saved.restore({"x": x}, step)
      np.testing.assert_array_equal(got.state["x"], 1.0 + 3 * (step - 1))


def test_host_state_that_is_not_json_raises_at_once(tmp_path):
  with Checkpoints(tmp_path) as saved:
    with pytest.raises(TypeError):
      saved.save(1, {"x": jnp.zeros((3,))}, {"rng": np.arange(3)})
    with pytest.raises(ValueError, match="JSON"):
      saved.save(1, {"x": jnp.zeros((3,))}, {"best": float("nan")})


def test_a_killed_save_is_skipped_with_a_message(tmp_path):
  program = f"""
import os, pathlib, signal, threading
import jax.numpy as jnp
from t1jax.checkpoint import Checkpoints
directory = pathlib.Path({str(tmp_path)!r})
saved = Checkpoints(directory)
saved.save(1, {{"x": jnp.ones((3,))}}, {{}})
saved.wait()
def die_at_once():
  while not any("tmp" in path.name for path in directory.iterdir()):
    pass
  os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=die_at_once).start()
saved.save(2, {{"x": jnp.ones((6000, 2000))}}, {{}})
saved.wait()
"""
  ended = subprocess.run([sys.executable, "-c", program], env=os.environ)
  assert ended.returncode == -signal.SIGKILL
  lines = []
  wanted = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
  with Checkpoints(tmp_path, notify=lines.append) as saved:
    assert saved.restore(wanted).step == 1
  assert len(lines) == 1
  assert "half-written checkpoint" in lines[0]
  assert f"{tmp_path}/2" in lines[0]
  with Checkpoints(tmp_path, notify=lines.append) as saved:
    saved.save(2, {"x": jnp.ones((3,))}, {})
  with Checkpoints(tmp_path, notify=lines.append) as saved:
    assert saved.restore(wanted).step == 2
  assert len(lines) == 1  # the first opening cleared it away


def test_reading_alone_changes_nothing(tmp_path):
  with Checkpoints(tmp_path / "c") as saved:
    saved.save(1, {"x": jnp.ones((3,))}, {})
  # What a save that another program is busy with looks like.
  busy = tmp_path / "c" / "2.orbax-checkpoint-tmp"
  busy.mkdir()
  before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
  lines = []
  with Checkpoints(
    tmp_path / "c", read_only=True, notify=lines.append
  ) as saved:
    assert saved.steps == (1,) and lines == []
    assert saved.restore({"x": jnp.zeros((3,))}).step == 1
    with pytest.raises(CheckpointError, match="read only"):
      saved.save(3, {"x": jnp.ones((3,))}, {})
  assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before
  with pytest.raises(CheckpointError, match="no checkpoints in"):
    Checkpoints(tmp_path / "none", read_only=True)
  assert not (tmp_path / "none").exists()


def _largest(folder: pathlib.Path) -> pathlib.Path:
  files = [f for f in folder.rglob("*") if f.is_file()]
  return max(files, key=lambda f: f.stat().st_size)


def _flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 0xFF
  path.write_bytes(data)


def _halve(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
  ("where", "damage"),
  [
    ("state/ocdbt.process_0/d", _flip),
    ("state/ocdbt.process_0/d", _halve),
    ("state/ocdbt.process_0/d", pathlib.Path.unlink),
    ("state/_METADATA", _halve),
    ("state/manifest.ocdbt", _flip),
    ("host/metadata", _halve),
  ],
)
def test_damage_is_one_clear_line(tmp_path, where, damage):
  x = jax.random.normal(jax.random.key(0), (100, 100))
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"x": x}, {"a": 1})
    saved.save(2, {"x": x}, {"a": 1})
  damaged = tmp_path / "2" / where
  damage(_largest(damaged) if damaged.is_dir() else damaged)
  with Checkpoints(tmp_path) as saved:
    with pytest.raises(CheckpointError) as error:
      saved.restore({"x": x})
    assert saved.restore({"x": x}, step=1).host == {"a": 1}
  line = str(error.value)
  assert f"{tmp_path}/2 is damaged" in line
  assert line.endswith("delete that directory to go on from step 1")
  assert "\n" not in line


def test_an_older_step_that_is_damaged_leaves_the_newest(tmp_path):
  x = jax.random.normal(jax.random.key(0), (100, 100))
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"x": x}, {})
    saved.save(2, {"x": x}, {})
  _flip(_largest(tmp_path / "1" / "state/ocdbt.process_0/d"))
  with (
    Checkpoints(tmp_path) as saved,
    pytest.raises(CheckpointError, match="to go on from step 2"),
  ):
    saved.restore({"x": x}, step=1)


@pytest.mark.parametrize(
  ("wanted", "line"),
  [
    ({"x": (3,)}, "it also holds y"),
    ({"x": (3,), "y": (2,), "z": (1,)}, "it has no z"),
    ({"x": (4,), "y": (2,)}, r"x is float32\[3\], expected float32\[4\]"),
  ],
)
def test_another_models_checkpoint_is_refused(tmp_path, wanted, line):
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"x": jnp.zeros((3,)), "y": jnp.zeros((2,))}, {})
    saved.wait()
    tree = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in wanted.items()}
    with pytest.raises(CheckpointError, match=f"another model: {line};"):
      saved.restore(tree)


def test_another_dtype_is_refused_not_cast(tmp_path):
  with Checkpoints(tmp_path) as saved:
    saved.save(1, {"x": jnp.zeros((3,))}, {})
    saved.wait()
    with pytest.raises(CheckpointError, match=r"expected bfloat16\[3\]"):
      saved.restore({"x": jax.ShapeDtypeStruct((3,), jnp.bfloat16)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
def test_digests_notice_a_changed_and_an_exchanged_element(dtype):
  x = jax.random.bernoulli(jax.random.key(0), 0.5, (7, 5)).astype(dtype)
  (before,) = checkpoint.digests({"x": x})
  assert checkpoint.digests({"x": x}) == [before]
  i, j = np.argwhere(np.asarray(x).astype(bool))[0]
  k, m = np.argwhere(~np.asarray(x).astype(bool))[0]
  changed = x.at[i, j].set(x[k, m])
  exchanged = changed.at[k, m].set(x[i, j])
  for other in (changed, exchanged):
    assert checkpoint.digests({"x": other}) != [before]


def test_a_full_disk_is_an_oserror_that_says_so(tmp_path):
  mount = f"mount -t tmpfs -o size=400k tmpfs {tmp_path}"
  probe = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
  if subprocess.run([*probe, mount], capture_output=True).returncode:
    pytest.skip("this kernel lets nobody mount a small disk")
  program = f"""
import sys
import jax, jax.numpy as jnp
from t1jax import checkpoint, config
def main(argv):
  x = jax.random.normal(jax.random.key(0), (1000, 1000))
  with checkpoint.Checkpoints({str(tmp_path)!r}) as saved:
    saved.save(1, {{"x": x}}, {{}})
sys.exit(config.run_program(main))
"""
  ended = subprocess.run(
    [*probe, f'{mount} && exec "$0" -c "$1"', sys.executable, program],
    capture_output=True,
    text=True,
  )
  assert ended.returncode == 2, ended.stderr
  line = ended.stderr.splitlines()[-1]
  assert line.startswith(f"error: cannot write {tmp_path}: No space left")


def test_base_comes_back_rounded_once(tmp_path):
  params = make_state().actor
  card = {"model": {"d_model": 8}, "score": 0.5}
  size = checkpoint.export_base(params, card, tmp_path / "base")
  assert size == (tmp_path / "base" / "params.msgpack").stat().st_size
  assert size < 2 * (5 * 8 + 3 * 8 * 8) + 400
  got, got_card = checkpoint.load_base(
    tmp_path / "base", checkpoint.abstract(params)
  )
  assert got_card == card
  rounded = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16).astype(x.dtype), params
  )
  assert_same(got, rounded)


def test_base_refusals(tmp_path):
  params = {"a": [jnp.zeros((2, 3)), jnp.zeros((4,))]}
  with pytest.raises(CheckpointError, match="no base checkpoint in"):
    checkpoint.load_base(tmp_path, params)
  checkpoint.export_base(params, {}, tmp_path)
  other = {"a": [jnp.zeros((2, 3)), jnp.zeros((5,))]}
  with pytest.raises(CheckpointError, match=r"a/1 is .*\[4\], expected .*\[5"):
    checkpoint.load_base(tmp_path, other)
  with pytest.raises(CheckpointError, match="it also holds a/1"):
    checkpoint.load_base(tmp_path, {"a": other["a"][:1]})
  _flip(tmp_path / "params.msgpack")
  with pytest.raises(CheckpointError, match="is damaged"):
    checkpoint.load_base(tmp_path, params)
  assert json.loads((tmp_path / "base.json").read_text())["bytes"] > 0
