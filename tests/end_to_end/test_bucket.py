"""A run that lives in a bucket, from a start that was killed to its end."""

import importlib.util
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from t1jax.rollout import storage

ROOT = pathlib.Path(__file__).parents[2]
SMALL = (
  "--config=configs/tiny.py:smoke",
  "--config.families=('rename_by_content','merge_branch')",
  "--config.control.enabled=False",
)
RUN = "gs://bucket/run"
OFFLINE = ("--config.wandb.project=t1jax", "--config.wandb.mode=offline")


def start(bucket, *args):
  return subprocess.Popen(
    [sys.executable, *args],
    cwd=ROOT,
    env=bucket.environment,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
  )


def ended(bucket, *args, **environment):
  return subprocess.run(
    [sys.executable, *args],
    cwd=ROOT,
    env=bucket.environment | environment,
    capture_output=True,
    text=True,
    timeout=1800,
    check=False,
  )


@pytest.fixture(scope="module")
def killed_and_finished(bucket):
  """A run that was killed once it had a checkpoint, and what the next said."""
  train = ["-m", "t1jax.train", *SMALL, f"--workdir={RUN}"]
  if importlib.util.find_spec("wandb"):
    train += OFFLINE
  first = start(bucket, *train)
  try:
    while "run/checkpoints/sft/1/commit_success.txt" not in bucket.generations:
      assert first.poll() is None, "it ended before it had a checkpoint"
      time.sleep(0.05)
  finally:
    first.kill()
    first.wait()
  return first, ended(bucket, *train)


def test_a_killed_run_goes_on(bucket, killed_and_finished):
  killed, done = killed_and_finished
  assert killed.returncode == -signal.SIGKILL
  assert done.returncode == 0, done.stderr
  assert (
    f"process {killed.pid} of {socket.gethostname()} did not" in done.stderr
  )
  assert "record demonstrations" not in done.stderr  # they were there
  summary = json.loads(bucket.read("run/summary.json"))
  assert set(summary["strict_success"]) == {"base", "sft", "rl"}
  records = [
    json.loads(line) for line in bucket.read("run/metrics.jsonl").splitlines()
  ]
  steps = [r["step"] for r in records]
  assert steps == sorted(set(steps))
  phases = [r["phase"] for r in records]
  assert {"sft", "warm_up", "ppo"} <= set(phases)
  assert phases.count("evaluation") == 3
  assert "run/.lock" not in bucket.generations


def test_what_a_run_leaves_can_be_read(bucket, killed_and_finished, tmp_path):
  names = bucket.generations
  assert not [n for n in names if ".partial" in n]
  events = [n for n in names if n.startswith("run/tensorboard/events.out")]
  assert len(events) == 2  # of the start that was killed, too
  for stage in ("base", "sft", "rl"):
    name = f"run/trajectories/evaluation-{stage}.array_record"
    (tmp_path / stage).write_bytes(bucket.read(name))
    assert len(storage.read(tmp_path / stage)) == 2
  read = (
    "from t1jax.rollout import storage\n"
    f"print(len(storage.read('{RUN}/trajectories/rl-00001.array_record')))"
  )
  assert ended(bucket, "-c", read).stdout == "13\n"


@pytest.mark.skipif(
  not importlib.util.find_spec("wandb"), reason="wandb is not installed"
)
def test_both_starts_are_one_wandb_run(bucket, killed_and_finished):
  run = json.loads(bucket.read("run/wandb.json"))["id"]
  logs = [n for n in bucket.generations if n.endswith(f"/run-{run}.wandb")]
  assert len(logs) == 2
  assert all(n.startswith("run/wandb/offline-run-") for n in logs)


def test_a_finished_run_is_left_alone(bucket, killed_and_finished):
  before = bucket.generations
  again = ended(bucket, "-m", "t1jax.train", *SMALL, f"--workdir={RUN}")
  assert again.returncode == 0 and "is finished" in again.stdout
  assert bucket.generations == before


def test_evaluate_repeats_the_figure_of_the_summary(
  bucket, killed_and_finished
):
  before = bucket.generations
  done = ended(bucket, "-m", "t1jax.evaluate", f"--workdir={RUN}")
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  summary = json.loads(bucket.read("run/summary.json"))
  assert result["strict_success"] == summary["strict_success"]["rl"]
  assert bucket.generations == before


def test_the_last_to_start_holds_the_run(bucket):
  program = """
from etils import epath
from t1jax import config
workdir = epath.Path("gs://bucket/held")
with config.hold_workdir(workdir) as first:
  first()
  with config.hold_workdir(workdir) as second:
    second()
    try:
      first()
    except config.UserError as error:
      print(error)
"""
  done = ended(bucket, "-c", program)
  assert done.returncode == 0, done.stderr
  assert "gs://bucket/held was taken over by process" in done.stdout
  assert "takes it over" in done.stderr
  assert "held/.lock" not in bucket.generations


def test_a_half_written_checkpoint_is_skipped_with_a_message(bucket):
  program = """
import jax.numpy as jnp
from etils import epath
from t1jax.checkpoint import Checkpoints
directory = epath.Path("gs://bucket/checkpoints")
with Checkpoints(directory) as saved:
  saved.save(1, {"x": jnp.ones((3,))}, {"a": 1})
(directory / "2" / "state" / "d").write_text("half")
with Checkpoints(directory, notify=print) as saved:
  got = saved.restore({"x": jnp.zeros((3,))})
  print(got.step, got.host, got.state["x"].sum())
"""
  done = ended(bucket, "-c", program)
  assert done.returncode == 0, done.stderr
  said, restored = done.stdout.splitlines()
  assert "half-written checkpoint gs://bucket/checkpoints/2" in said
  assert restored == "1 {'a': 1} 3.0"


MISTAKES = [
  ("train", "gs://bukcet/run", "there is no bucket gs://bukcet"),
  ("evaluate", "gs://bukcet/run", "there is no bucket gs://bukcet"),
  ("evaluate", "gs://bucket/nothing", "is not a run directory"),
  ("train", "gs://locked/run", "bucket gs://locked refuses access"),
  ("train", "gs:/bucket/run", "expected a local one or gs://BUCKET"),
  ("train", "s3://bucket/run", "expected a local one or gs://BUCKET"),
]


@pytest.mark.parametrize(("program", "workdir", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_work(
  bucket, program, workdir, message
):
  before = bucket.generations
  config = SMALL if program == "train" else ()
  done = ended(
    bucket, "-m", f"t1jax.{program}", *config, f"--workdir={workdir}"
  )
  assert_one_line(done, message)
  assert bucket.generations == before


def test_a_host_that_does_not_answer_is_one_line(bucket):
  with socket.create_server(("127.0.0.1", 0)) as silent:
    host = f"http://127.0.0.1:{silent.getsockname()[1]}"
    program = """
import sys
from t1jax import config, paths
main = lambda argv: paths.check_reachable("gs://bucket/run", seconds=0.5)
sys.exit(config.run_program(main))
"""
    for url in (host, "http://127.0.0.1:1"):
      done = ended(bucket, "-c", program, STORAGE_EMULATOR_HOST=url)
      assert_one_line(
        done, "has not answered in 0.5 seconds; check the network"
      )


def assert_one_line(done, message):
  assert done.returncode == 2, (done.stdout, done.stderr)
  lines = done.stderr.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
  assert message in lines[0]
