"""A run that is killed goes on as if nothing had happened, bit for bit."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from t1jax.bench.sandbox import processes
from t1jax.rollout import storage
from t1jax.rollout.trajectory import TOKEN_FIELDS

ROOT = pathlib.Path(__file__).parents[2]
# Starts the training program, which kills itself at a given moment.
DRIVER = """
import json, os, pathlib, signal, sys, threading, time
from t1jax import checkpoint, config, evaluate, stages, train
from t1jax.bench.sandbox import descendants
from t1jax.rl import learner, supervised

moment, note, *args = sys.argv[1:]

def die():
  family = {p: v[1] for p, v in descendants(os.getpid()).items()}
  pathlib.Path(note).write_text(json.dumps(family))
  os.kill(os.getpid(), signal.SIGKILL)

def before_call(module, name, number):
  function, calls = getattr(module, name), []
  def counted(*args, **kwargs):
    calls.append(1)
    if len(calls) == number:
      die()
    return function(*args, **kwargs)
  setattr(module, name, counted)

def during_play(after, seconds):
  play = evaluate.Arena.play
  def doomed(self, params, version, *args, **kwargs):
    if version == after:
      threading.Timer(seconds, die).start()
    return play(self, params, version, *args, **kwargs)
  evaluate.Arena.play = doomed

def during_save(stage, step):
  save = checkpoint.Checkpoints.save
  def watch(directory):
    while not any(checkpoint._PARTIAL in p.name for p in directory.iterdir()):
      pass
    die()
  def doomed(self, at, *args):
    if self.directory.name == stage and at == step:
      threading.Thread(target=watch, args=[self.directory]).start()
    return save(self, at, *args)
  checkpoint.Checkpoints.save = doomed

{
  "supervised": lambda: before_call(supervised, "sft_step", 4),
  "warm-up": lambda: before_call(learner, "critic_step", 3),
  "rollout": lambda: during_play(2, 0.7),
  "update": lambda: before_call(learner, "actor_step", 6),
  "save": lambda: during_save("rl", 4),
  "control": lambda: before_call(stages, "imitate_batch", 3),
}[moment]()
sys.exit(
  config.run_program(
    train.main, expected=evaluate.EXPECTED_ERRORS, argv=["train", *args]
  )
)
"""
SMALL = (
  "--config=configs/tiny.py:smoke",
  "--config.families=('rename_by_content','fix_mode')",
  "--config.sft.max_epochs=5",
  "--config.rl.iterations=4",
  "--config.rl.checkpoint_every=2",
)
PRETRAINING = (
  "--config=configs/tiny.py:smoke,pretrain",
  "--config.families=('rename_by_content','fix_mode')",
  "--config.pretrain.vocab_size=640",
  "--config.pretrain.sessions=6",
  "--config.pretrain.drills=6",
  "--config.pretrain.validation=2",
  "--config.pretrain.batch_size=4",
  "--config.pretrain.steps=6",
  "--config.pretrain.evaluate_every=2",
)


def start(program, *args):
  environment = {
    key: value
    for key, value in os.environ.items()
    if not key.startswith("JAX_NUMPY_")
  }
  return subprocess.run(
    [sys.executable, *program, *args],
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    timeout=600,
    check=False,
  )


def run(*args):
  done = start(("-m", "t1jax.train"), *args)
  assert done.returncode == 0, done.stderr
  return done


def records(workdir):
  """What was measured, without what a clock says."""
  lines = (workdir / "metrics.jsonl").read_text().splitlines()
  timing = ("seconds", "per_second")
  return [
    {
      key: value
      for key, value in json.loads(line).items()
      if key != "time" and not any(word in key for word in timing)
    }
    for line in lines
  ]


def same_trajectories(one, other):
  files = sorted(p.name for p in (one / "trajectories").iterdir())
  assert files == sorted(p.name for p in (other / "trajectories").iterdir())
  for name in files:
    pairs = zip(
      storage.read(one / "trajectories" / name),
      storage.read(other / "trajectories" / name),
      strict=True,
    )
    for a, b in pairs:
      for field in TOKEN_FIELDS:
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
      assert a.outcome.assertions == b.outcome.assertions


def drill(workdir, moments, args):
  """Kills a run at each moment in turn, and lets it go on to its end."""
  for moment in moments:
    note = workdir.with_name(f"{workdir.name}-{moment}")
    done = start(("-c", DRIVER), moment, str(note), *args)
    assert done.returncode == -signal.SIGKILL, (moment, done.stderr)
    if moment == "save":
      saved = (workdir / "checkpoints" / "rl").iterdir()
      assert any("tmp" in path.name for path in saved)
    family = json.loads(note.read_text())
    assert family, f"{moment}: it had no sandboxes"
    yield moment, family


@pytest.mark.parametrize(
  ("moments", "args"),
  [
    (("supervised",), PRETRAINING),
    (("rollout",), SMALL),
    pytest.param(
      ("supervised", "warm-up", "rollout", "update", "save", "control"),
      SMALL,
      marks=pytest.mark.drill,
    ),
  ],
  ids=["pretraining", "training", "every-moment"],
)
def test_a_killed_run_goes_on_bit_for_bit(moments, args, tmp_path):
  whole, killed = tmp_path / "whole", tmp_path / "killed"
  run(*args, f"--workdir={whole}")
  families = dict(drill(killed, moments, (*args, f"--workdir={killed}")))
  done = run(*args, f"--workdir={killed}")
  assert records(killed) == records(whole), done.stderr
  same_trajectories(killed, whole)
  for policy in (whole / "policies").rglob("*"):
    if policy.is_file() and policy.suffix == ".msgpack":
      twin = killed / policy.relative_to(whole)
      assert twin.read_bytes() == policy.read_bytes(), policy
  living = processes()
  for moment, family in families.items():
    left = [
      pid
      for pid, since in family.items()
      if int(pid) in living and living[int(pid)][1] == since
    ]
    assert not left, (moment, left)
