import io
import json
import os
import pty
import select

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from t1jax import metrics
from t1jax.metrics import LiveProgress, MetricsWriter


def steps(workdir):
  return [r["step"] for r in metrics.read_metrics(workdir)]


def test_records_come_back(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    writer.write(1, "sft", {"loss": np.float32(0.5), "tokens": 10})
    # Each line is on disk at once: a crash now loses nothing.
    assert steps(tmp_path) == [1]
    writer.write(2, "rl", {"loss": float("nan"), "reward": np.array(1.0)})
  first, second = metrics.read_metrics(tmp_path)
  assert first == {
    "step": 1,
    "phase": "sft",
    "time": pytest.approx(first["time"]),
    "wall_seconds": pytest.approx(first["wall_seconds"]),
    "loss": 0.5,
    "tokens": 10,
  }
  assert second["loss"] is None
  assert second["reward"] == 1.0
  assert any((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_resuming_trims_half_a_line_and_later_steps(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    for step in range(5):
      writer.write(step, "rl", {"loss": 1.0})
  path = tmp_path / "metrics.jsonl"
  path.write_bytes(path.read_bytes()[:-9])
  assert steps(tmp_path) == [0, 1, 2, 3]
  with MetricsWriter(tmp_path, resume_step=2) as writer:
    assert steps(tmp_path) == [0, 1, 2]
    writer.write(3, "rl", {"loss": 2.0})
  assert steps(tmp_path) == [0, 1, 2, 3]
  with MetricsWriter(tmp_path):
    assert steps(tmp_path) == []


def test_wall_seconds_go_on_over_resumes(tmp_path, monkeypatch):
  now = 100.0
  monkeypatch.setattr(metrics.time, "monotonic", lambda: now)
  with MetricsWriter(tmp_path) as writer:
    now += 5
    writer.write(1, "rl", {})
    now += 7
    writer.write(2, "rl", {})
  now += 1000  # stopped; step 2 is done again
  with MetricsWriter(tmp_path, resume_step=1) as writer:
    now += 2
    writer.write(2, "rl", {})
    assert writer.wall_seconds == 7
  seconds = [r["wall_seconds"] for r in metrics.read_metrics(tmp_path)]
  assert seconds == [5, 7]


@pytest.mark.parametrize("cut", range(0, 70, 7))
def test_any_cut_keeps_the_whole_lines(tmp_path, cut):
  with MetricsWriter(tmp_path) as writer:
    for step in range(3):
      writer.write(step, "rl", {"loss": 1.0})
  path = tmp_path / "metrics.jsonl"
  data = path.read_bytes()[: path.stat().st_size - cut]
  path.write_bytes(data)
  assert len(steps(tmp_path)) == data.count(b"\n")


def test_damage_in_the_middle_is_told(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2 is not JSON"):
    metrics.read_metrics(tmp_path)


def test_refuses_what_is_no_number_and_taken_names(tmp_path):
  with MetricsWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match="metric loss is not a number"):
      writer.write(1, "rl", {"loss": np.zeros(3)})
    with pytest.raises(ValueError, match="taken"):
      writer.write(1, "rl", {"step": 3})
  assert metrics.read_metrics(tmp_path) == []


def test_summary_is_whole_or_the_one_before(tmp_path):
  metrics.write_summary(tmp_path, {"strict_success": {"rl": 0.5}})
  with pytest.raises(TypeError):
    metrics.write_summary(tmp_path, {"bad": object()})
  summary = json.loads((tmp_path / "summary.json").read_text())
  assert summary == {"strict_success": {"rl": 0.5}}
  assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_wilson_interval_against_published_values():
  # Newcombe (1998), Statistics in Medicine 17, table I, method 3.
  for successes, trials, low, high in [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
  ]:
    got = metrics.wilson_interval(successes, trials)
    assert got == pytest.approx((low, high), abs=5e-5)
  assert metrics.wilson_interval(0, 0) == (0.0, 1.0)
  with pytest.raises(ValueError, match="3 of 2"):
    metrics.wilson_interval(3, 2)


@hypothesis.given(st.integers(1, 500), st.data())
def test_wilson_interval_holds_the_rate_and_mirrors(trials, data):
  successes = data.draw(st.integers(0, trials))
  low, high = metrics.wilson_interval(successes, trials)
  assert 0 <= low <= successes / trials <= high <= 1
  mirrored = metrics.wilson_interval(trials - successes, trials)
  assert mirrored == pytest.approx((1 - high, 1 - low), abs=1e-12)


def test_without_a_terminal_progress_is_plain_lines():
  stream = io.StringIO()
  with LiveProgress(stream, seconds_between_lines=3600) as progress:
    progress.phase("sft", total=3)
    for done in (1, 2, 3):
      progress.update(done, loss=1 / 3, tokens=7)
    progress.say("[bold] is text")
    progress.phase("rl", total=9)
    progress.update(1, reward=0.5)
    progress.update(2, reward=0.25)
  assert stream.getvalue().splitlines() == [
    "sft 1/3 loss 0.3333 tokens 7 (0 s)",
    "sft 3/3 loss 0.3333 tokens 7 (0 s)",
    "[bold] is text",
    "rl 1/9 reward 0.5 (0 s)",
    "rl 2/9 reward 0.25 (0 s)",
  ]


def test_on_a_terminal_progress_is_live():
  parent, child = pty.openpty()
  with os.fdopen(child, "w") as stream:
    with LiveProgress(stream) as progress:
      progress.phase("sft", total=3)
      progress.update(2, loss=0.25)
      progress.say("[bold] is text")
    wanted = {"2/3", "loss 0.25", "[bold] is text"}
    shown = ""  # a terminal hands over what it has got so far
    while not all(text in shown for text in wanted):
      assert select.select([parent], [], [], 10)[0], shown
      shown += os.read(parent, 65536).decode()
  os.close(parent)
