"""The bench of sandboxes, small: its counts are facts at any size."""

import json
import os
import subprocess
import sys

import pytest


def test_nothing_is_mixed_up_and_nothing_is_left(tmp_path):
  bench = [sys.executable, "-m", "t1jax.bench.sandbox"]
  done = subprocess.run(
    [*bench, "--sandboxes=4", "--rounds=2"],
    capture_output=True,
    text=True,
    timeout=120,
    env={**os.environ, "T1JAX_RUN_DIR": str(tmp_path)},
  )  # fmt: skip
  if "cannot make sandboxes" in done.stderr:
    pytest.skip(done.stderr)
  assert done.returncode == 0, done.stderr
  (line,) = done.stdout.splitlines()
  figures = json.loads(line)
  assert figures["alive"] == 4 and figures["mixed_up"] == 0
  # The zygote, an init and a daemon each, and the spares.
  assert figures["killed_processes"] >= 9
  for what in ("processes", "mounts", "directories"):
    assert figures[f"leaked_{what}"] == 0
  for name in ("boot_ms", "exec_ms"):
    assert 0 < figures[f"{name}_p50"] <= figures[f"{name}_p95"]
  assert figures["boot_exec_close_ms_p50"] > figures["boot_ms_p50"]
  assert os.listdir(tmp_path) == []
