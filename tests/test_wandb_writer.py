import importlib.util
import json
import os
import subprocess
import sys

import pytest

from t1jax import config as configs
from t1jax import train, wandb_writer
from t1jax.evaluate import EXPECTED_ERRORS

needs_wandb = pytest.mark.skipif(
  not importlib.util.find_spec("wandb"), reason="wandb is not installed"
)

WRITE = """
import os, sys
from ml_collections import config_dict
from t1jax.metrics import MetricsWriter
from t1jax.wandb_writer import WandbWriter
workdir, resume, end = sys.argv[1], int(sys.argv[2]), sys.argv[3]
section = dict(project="p", entity="", mode="offline")
config = config_dict.create(wandb=section, rl=dict(buckets=(64, 128)))
with WandbWriter(workdir, config) as writer:
  with MetricsWriter(workdir, resume_step=resume, also=writer) as metrics:
    for step in (resume + 1, resume + 2):
      metrics.write(step, "rl", {"loss": 1 / step, "gap": float("nan")})
    writer.summarise({"success": {"rl": 0.5}})
    if end == "killed":
      os._exit(1)
"""


def write(workdir, *args):
  environment = {
    **os.environ,
    # No host to talk to, and nothing of the user's to read.
    "WANDB_BASE_URL": "http://127.0.0.1:1",
    "WANDB_CONFIG_DIR": str(workdir),
    "WANDB_CACHE_DIR": str(workdir),
  }
  return subprocess.run(
    [sys.executable, "-W", "error", "-c", WRITE, workdir, *args],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )


def records(path):
  """What a .wandb file holds: a LevelDB log of protocol buffers."""
  from wandb.proto.wandb_internal_pb2 import Record

  data, place, whole = path.read_bytes(), 7, b""
  assert data[:4] == b":W&B"
  while place + 7 <= len(data):
    left = 32768 - place % 32768
    if left < 7:  # too short for a header
      place += left
      continue
    size = int.from_bytes(data[place + 4 : place + 6], "little")
    kind = data[place + 6]  # 1 whole, 2 first, 3 middle, 4 last part
    whole += data[place + 7 : place + 7 + size]
    place += 7 + size
    if kind in (1, 4):
      yield Record.FromString(whole)
      whole = b""


def read(path):
  """The run's id, its config, its history and its summary."""
  run, history, summary = None, [], {}
  for record in records(path):
    if record.HasField("run"):
      run = run or record.run
    elif record.HasField("history"):
      history.append(values(record.history.item))
    elif record.HasField("summary"):
      summary |= values(record.summary.update)
  return run, history, summary


def values(items):
  return {
    "/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items
  }


@needs_wandb
def test_offline_a_resumed_run_is_the_same_run(tmp_path):
  assert write(tmp_path, "0", "whole").returncode == 0
  done = write(tmp_path, "1", "whole")
  assert done.returncode == 0, done.stderr
  assert done.stderr == f"W&B: offline, in {tmp_path}/wandb\n"
  files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
  assert len(files) == 2
  runs = []
  for file, first in zip(files, (1, 2), strict=True):
    run, history, summary = read(file)
    runs.append(run.run_id)
    assert run.project == "p"
    config = values(run.config.update)
    assert config["rl"] == {"buckets": [64, 128]}
    numbers = [
      {k: v for k, v in row.items() if not k.startswith("_")} for row in history
    ]
    assert numbers == [
      {"step": step, "rl/loss": 1 / step} for step in (first, first + 1)
    ]
    assert summary["success"] == {"rl": 0.5}
  assert runs == [json.loads((tmp_path / "wandb.json").read_text())["id"]] * 2
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def refused(tmp_path, capsys, *args):
  code = configs.run_program(
    train.main,
    expected=EXPECTED_ERRORS,
    argv=[
      "train",
      "--config=configs/tiny.py:smoke",
      f"--workdir={tmp_path / 'run'}",
      "--config.wandb.project=x",
      *args,
    ],
  )
  assert code == 2
  assert not (tmp_path / "run").exists()
  (line,) = capsys.readouterr().err.strip().splitlines()
  return line


def test_an_unknown_mode_is_one_line(tmp_path, capsys):
  line = refused(tmp_path, capsys, "--config.wandb.mode=offlin")
  assert "wandb.mode is 'offlin'" in line and "did you mean offline?" in line


def test_not_installed_is_one_line(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(
    wandb_writer.importlib.util, "find_spec", lambda name: None
  )
  line = refused(tmp_path, capsys, "--config.wandb.mode=offline")
  assert "wandb is not installed; pip install -e '.[wandb]'" in line


@needs_wandb
def test_not_logged_in_is_one_line(tmp_path):
  environment = {k: v for k, v in os.environ.items() if k != "WANDB_API_KEY"}
  done = subprocess.run(
    [
      sys.executable,
      "-c",
      "import sys\n"
      "from ml_collections import config_dict\n"
      "from t1jax import config, wandb_writer\n"
      "section = dict(project='p', entity='', mode='online')\n"
      "section = config_dict.create(**section)\n"
      "sys.exit(config.run_program(lambda _: wandb_writer.check(section)))\n",
    ],
    env={**environment, "HOME": str(tmp_path), "NETRC": str(tmp_path / "none")},
    capture_output=True,
    text=True,
  )
  assert done.returncode == 2, done.stderr
  (line,) = done.stderr.strip().splitlines()
  assert "nobody is logged in at W&B" in line and "mode=offline" in line
