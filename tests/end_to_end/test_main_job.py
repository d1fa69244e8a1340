"""The programs as a user starts them: the whole job small, and mistakes."""

import json
import shutil
import subprocess

import pytest

from t1jax.rewards.schemes import SCHEMES
from t1jax.rollout import storage
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task
from t1jax.tasks.task import write_task


def test_the_job_runs_whole_and_says_what_it_found(finished):
  summary = json.loads((finished / "summary.json").read_text())
  assert set(summary["strict_success"]) == {"base", "sft", "rl", "control"}
  for stage, rate in summary["strict_success"].items():
    low, high = summary["interval"][stage]
    assert 0 <= low <= rate <= high <= 1
  assert summary["n_heldout"] == 2
  assert summary["replay_agreement"] == 1.0
  assert set(summary["explained_variance"]) == {
    "before", "after", "first_action", "within_task",
  }  # fmt: skip
  assert summary["wall_seconds"] > 0 and "rl_share_of_gain" in summary
  records = [
    json.loads(line)
    for line in (finished / "metrics.jsonl").read_text().splitlines()
  ]
  steps = [r["step"] for r in records]
  assert steps == sorted(steps)
  phases = {r["phase"] for r in records}
  assert {"sft", "warm_up", "ppo", "control", "evaluation"} <= phases
  (ppo,) = [r for r in records if r["phase"] == "ppo"]
  for name in (
    "success", "reward_spr", "explained_variance", "clip_fraction_low",
    "entropy", "k3", "logprob_gap", "f_tau2", "replayed_fraction",
    "fallback_fraction", "load_violation", "learner_tokens_per_second",
    "seconds_rollout", "seconds_actor", "episode_seconds_shell",
  ):  # fmt: skip
    assert name in ppo, name
  assert ppo["infra_failures"] == 0 and ppo["fallback_fraction"] == 0


def test_the_job_ends_with_its_report(finished):
  page = (finished / "report.html").read_text()
  assert "not finished" not in page
  for words in ("Success while learning", "paint-advantage", "data-tip="):
    assert words in page, words


def test_every_episode_is_recorded(finished):
  stages = ("base", "sft", "rl", "control")
  episodes = {  # of each file
    "rl-00000": 13,  # critic warm-up
    "rl-judged-00000": 12,  # ... and what it is judged on: six tasks, twice
    "rl-00001": 13,
    "control-00001": 13,
    **{f"evaluation-{stage}": 2 for stage in stages},
  }
  files = {p.stem: p for p in (finished / "trajectories").iterdir()}
  assert files.keys() == episodes.keys()
  for name, file in files.items():
    played = list(storage.read(file))
    assert len(played) == episodes[name], name
    for trajectory in played:
      assert trajectory.loss_mask.any() and trajectory.outcome.assertions
      assert trajectory.outcome.reward_parts.keys() == set(SCHEMES)
      version = 1 if name == "control-00001" else 0
      assert set(trajectory.weight_version) == {version}


def times(directory):
  return {p: p.stat().st_mtime_ns for p in directory.rglob("*")}


def test_a_finished_run_is_left_alone(finished, program, small):
  before = times(finished)
  again = program("train", *small, f"--workdir={finished}")
  assert again.returncode == 0 and "is finished" in again.stdout
  assert times(finished) == before


def test_evaluate_repeats_the_figure_of_the_summary(finished, program):
  before = times(finished)
  done = program("evaluate", f"--workdir={finished}", "--stage=sft")
  assert done.returncode == 0, done.stderr
  result = json.loads(done.stdout.splitlines()[-1])
  summary = json.loads((finished / "summary.json").read_text())
  assert result["strict_success"] == summary["strict_success"]["sft"]
  assert result["n_heldout"] == summary["n_heldout"]
  assert times(finished) == before


def broken_directory(tmp_path, kind):
  task = make_task(FAMILIES[0], "train", 3)
  path = write_task(task, tmp_path / kind)
  if kind == "toml":
    (path / "task.toml").write_text("version = [broken")
  elif kind == "tests":
    for file in (path / "tests").iterdir():
      file.unlink()
    (path / "tests").rmdir()
  elif kind == "command":
    commands = [": " + "word " * 30, *task.oracle]
    (path / "solution" / "commands.json").write_text(json.dumps(commands))
  else:
    (path / "solution" / "commands.json").write_text('["true"]')
    (path / "solution" / "solve.sh").write_text("#!/bin/sh\ntrue\n")
  return path


MISTAKES = [
  (["--config.rl.iteration=3"], "did you mean rl.iterations"),
  (["--config.rl.iterations=three"], "config field rl.iterations"),
  (["--config=configs/tiny.py:smok"], "unknown config argument 'smok'"),
  (["--config=configs/tin.py"], "no config file"),
  (["--config.ppo.ratio_high=0.5"], "ratio_high"),
  (["--config.model.top_k=9"], "top_k"),
  (["--config.model.d_model=64"], "of another model"),
  (["--config.sft.tolerance=nan"], "expected a finite number"),
  (["--config.limits.command_seconds=0.0"], "command_seconds is 0.0"),
  (["--config.families=('rename',)"], "unknown task family"),
  (["--config.base=/nowhere"], "base: /nowhere has no tokenizer.model"),
  (["--config.data.directories=('{toml}',)"], "task.toml"),
  (["--config.data.directories=('{tests}',)"], "tests"),
  (["--stepz=3"], "unknown flag --stepz"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES)
def test_a_mistake_is_one_line_before_any_work(
  args, message, tmp_path, program, small
):
  places = {k: broken_directory(tmp_path, k) for k in ("toml", "tests")}
  args = [a.format(**places) for a in args]
  workdir = tmp_path / "run"
  done = program("train", *small[:1], *args, f"--workdir={workdir}")
  assert done.returncode == 2, (done.stdout, done.stderr)
  last = done.stderr.strip().splitlines()
  assert len(last) == 1 and last[0].startswith("error: ")
  assert message in last[0]
  assert not workdir.exists()


def test_a_finished_run_makes_a_lost_policy_again(
  finished, program, small, tmp_path
):
  # What the message about a damaged policy says to do.
  workdir = tmp_path / "copy"
  shutil.copytree(finished, workdir)
  lost = workdir / "policies" / "rl"
  before = {p.name: p.read_bytes() for p in lost.iterdir()}
  shutil.rmtree(lost)
  done = program("train", *small, f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  assert {p.name: p.read_bytes() for p in lost.iterdir()} == before
  metrics = [(d / "metrics.jsonl").read_text() for d in (workdir, finished)]
  assert metrics[0] == metrics[1]


def test_the_control_plays_damaged_episodes_again(
  finished, program, small, tmp_path
):
  # As after a kill between PPO and the control.
  workdir = tmp_path / "copy"
  shutil.copytree(finished, workdir)
  (workdir / "summary.json").unlink()
  (workdir / "evaluations" / "control.json").unlink()
  shutil.rmtree(workdir / "checkpoints" / "control")
  shutil.rmtree(workdir / "policies" / "control")
  episodes = workdir / "trajectories" / "rl-00000.array_record"
  episodes.write_bytes(episodes.read_bytes()[:1000])
  done = program("train", *small, f"--workdir={workdir}")
  assert done.returncode == 0, done.stderr
  assert "episodes are played again" in done.stdout + done.stderr
  policies = [
    (d / "policies" / "control" / name).read_bytes()
    for name in ("params.msgpack", "base.json")
    for d in (workdir, finished)
  ]
  assert policies[0] == policies[1]
  assert policies[2] == policies[3]
  assert len(list(storage.read(episodes))) == 13


def test_a_workdir_of_another_config_is_refused(finished, program, small):
  done = program(
    "train", *small, f"--workdir={finished}", "--config.rl.iterations=7"
  )
  assert done.returncode == 2
  assert "rl.iterations (1 there, 7 here)" in done.stderr


@pytest.mark.parametrize(
  ("kind", "message"),
  [("oracle", "oracle does not pass"), ("command", "split the command")],
)
def test_an_oracle_that_cannot_be_imitated_is_named(
  kind, message, tmp_path, program, small
):
  path = broken_directory(tmp_path, kind)
  done = program(
    "train",
    *small,
    f"--config.data.directories=('{path}',)",
    f"--workdir={tmp_path / 'run'}",
  )
  assert done.returncode == 2, done.stderr
  (error,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
  assert make_task(FAMILIES[0], "train", 3).name in error
  assert message in error


def test_without_namespaces_one_line_says_what_to_do(tmp_path, program, small):
  forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
  prefix = ("unshare", "-Ur", "sh", "-c", f'{forbid} && exec "$@"', "sh")
  if subprocess.run([*prefix, "true"], check=False).returncode:
    pytest.skip("this machine has no user namespaces to forbid")
  workdir = tmp_path / "run"
  done = program("train", *small, f"--workdir={workdir}", prefix=prefix)
  assert done.returncode == 2, done.stderr
  (error,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
  assert "max_user_namespaces" in error


def test_a_full_disk_is_one_line(tmp_path, program, small):
  mount = 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'
  prefix = ("unshare", "-Urm", "sh", "-c", mount, str(tmp_path))
  if subprocess.run([*prefix, "true"], check=False).returncode:
    pytest.skip("this machine has no user namespaces to mount a small disk in")
  done = program("train", *small, f"--workdir={tmp_path / 'x'}", prefix=prefix)
  assert done.returncode == 2, done.stderr
  (error,) = [x for x in done.stderr.splitlines() if x.startswith("error:")]
  assert "MB free" in error
