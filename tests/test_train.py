"""What the training program refuses before it makes or allocates anything."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from t1jax import config as configs
from t1jax import corpus, evaluate, stages, train
from t1jax.checkpoint import export_base
from t1jax.evaluate import EXPECTED_ERRORS
from t1jax.tasks.families import FAMILIES
from t1jax.tasks.families.base import make_task
from t1jax.tasks.task import to_bytes, write_task

SMOKE = "--config=configs/tiny.py:smoke"


def run(workdir, *args):
  return configs.run_program(
    train.main,
    expected=EXPECTED_ERRORS,
    argv=["train", SMOKE, f"--workdir={workdir}", *args],
  )


def error_line(capsys):
  lines = capsys.readouterr().err.strip().splitlines()
  assert len(lines) == 1 and lines[0].startswith("error: "), lines
  return lines[0]


@pytest.mark.parametrize(
  ("args", "message"),
  [
    (["--config.seed=-1"], "seed is -1; expected 0 to"),
    (["--config.rl.reward=sprr"], "'sprr'; expected one of t1_dense"),
    (["--config.rl.max_assertions=0.0"], "max_assertions is 0.0"),
    (["--config.ppo.buckets=(128,)"], "add a bucket of 256"),
    (["--config.control.learning_rate=0.0"], "learning_rate is 0.0"),
    (["--config.sampler.temperature=0.0"], "temperature is 0.0; expected"),
    (["--config.sampler.num_slots=0"], "config section sampler"),
    (["--config.families=('fix_mode','fix_mode')"], "names one twice"),
    *(
      ([f"--config.{name}=0"], f"{name} is 0; expected at least 1")
      for name in train._AT_LEAST_ONE
      if not name.startswith("pretrain")
    ),
  ],
)
def test_a_number_that_cannot_work_is_one_line(args, message, tmp_path, capsys):
  assert run(tmp_path / "run", *args) == 2
  assert message in error_line(capsys)
  assert not (tmp_path / "run").exists()


def test_a_task_that_does_not_fit_an_episode_is_named(tmp_path, capsys):
  task = make_task(FAMILIES[0], "train", 3)
  path = write_task(task, tmp_path / task.name)
  (path / "instruction.md").write_text("Find the file. " * 100)
  args = [f"--config.data.directories=('{path}',)"]
  assert run(tmp_path / "run", *args) == 2
  line = error_line(capsys)
  assert path.name in line and "shorten instruction.md" in line
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["families", "data.directories"])
def test_what_is_no_text_is_one_line(name, tmp_path, capsys):
  assert run(tmp_path / "run", f"--config.{name}=(1,)") == 2
  assert f"config field {name}: expected texts" in error_line(capsys)


def test_another_models_base_is_refused_before_anything_is_recorded(
  tmp_path, capsys
):
  assert run(tmp_path / "run", "--config.model.d_model=64") == 2
  line = error_line(capsys)
  assert "embed is float32[768, 128]" in line and "--config.base=" in line
  assert not (tmp_path / "run" / "data").exists()


def test_a_stage_that_is_not_finished_is_said_so(tmp_path, capsys):
  config = configs.load_config("configs/tiny.py:smoke")
  workdir = configs.claim_workdir(tmp_path / "run", config)
  export_base({}, {}, stages.stage_directory(workdir, "sft"))
  code = configs.run_program(
    evaluate.main,
    expected=EXPECTED_ERRORS,
    argv=["evaluate", f"--workdir={workdir}", "--stage=rl"],
  )
  assert code == 2
  assert "is not finished (finished: sft)" in error_line(capsys)


def test_two_processes_do_not_share_a_workdir(tmp_path, capsys):
  config = configs.load_config("configs/tiny.py:smoke")
  workdir = configs.claim_workdir(tmp_path / "run", config)
  program = (
    "import sys; from etils import epath; from t1jax import config\n"
    "with config.hold_workdir(epath.Path(sys.argv[1])):\n"
    "  print('held', flush=True); sys.stdin.read()"
  )
  other = subprocess.Popen(
    [sys.executable, "-c", program, str(workdir)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  try:
    assert other.stdout.readline() == "held\n"
    assert run(workdir) == 2
    assert f"in use by process {other.pid}" in error_line(capsys)
  finally:
    other.kill()
    other.communicate()
  with configs.hold_workdir(workdir):  # a killed process holds nothing
    pass


def test_a_damaged_metrics_file_is_one_line(tmp_path, capsys):
  config = configs.load_config("configs/tiny.py:smoke")
  workdir = configs.claim_workdir(tmp_path / "run", config)
  record = workdir / "evaluations" / "base.json"
  record.parent.mkdir()
  record.write_text("{}")  # the run has come so far
  for damage in ('{"step": 1}\n{"st\n{"step": 3}\n', '{"step": 1}\n{}\n'):
    (workdir / "metrics.jsonl").write_text(damage)
    assert run(workdir) == 2
    assert "line 2" in error_line(capsys)


def test_a_stage_that_was_killed_at_its_end_is_not_finished(tmp_path):
  directory = stages.stage_directory(tmp_path, "sft")
  export_base({"w": np.zeros(2, np.float32)}, {}, directory)
  assert stages.has_base(directory)
  (directory / "base.json").unlink()
  assert not stages.has_base(directory)


def test_steps_of_stages_do_not_meet():
  config = configs.load_config("configs/tiny.py").copy_and_resolve_references()
  for directories in ((), ("a",) * 50):
    config.data.directories = directories
    epochs, epoch = config.sft.max_epochs, stages.sft_epoch(config)
    last = {
      "evaluate base": 0,
      "sft": epochs * epoch,
      "evaluate sft": 0,
      "rl": config.rl.iterations,
      "evaluate rl": 0,
      "control": config.rl.iterations,
      "evaluate control": 0,
    }
    reached = 0
    for stage, steps in last.items():
      assert stages.first_step(config, stage) > reached, stage
      reached = stages.first_step(config, stage) + steps


def test_an_uncounted_task_has_no_part_in_the_scale():
  task = make_task(FAMILIES[0], "train", 3)
  counted = task.num_assertions - len(task.hygiene)
  unknown = dataclasses.replace(
    task, num_assertions=0, family="own", hygiene=()
  )
  examples = [{"task": to_bytes(t)} for t in (task, task, unknown)]
  assert corpus.family_scales(examples) == {task.family: [counted, counted]}
