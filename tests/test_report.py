"""The page of a run: whole, escaped, and exact about credit."""

import html.parser
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest

from t1jax import charts, episodes, evaluate, report, stages
from t1jax import config as configs
from t1jax.checkpoint import Checkpoints
from t1jax.metrics import MetricsWriter, wilson_interval, write_summary
from t1jax.models import params as model_params
from t1jax.models.tokenizer import SentencePieceTokenizer
from t1jax.rl import learner
from t1jax.rollout import storage
from t1jax.rollout.chat import Chat
from t1jax.rollout.trajectory import (
  AssertionResult,
  Outcome,
  TrajectoryBuilder,
)

TOKENIZER = SentencePieceTokenizer.load(
  evaluate.ASSETS / "tiny" / evaluate.TOKENIZER_FILE
)
CHAT = Chat(TOKENIZER)
HOSTILE = (
  "<script>alert('x')</script>\x1b[31m\u202e<|act|>\tłódź & \"q\"\n"
).encode() + b"\xff\xfe"


def episode(rng, success, *, task, output=b"ok\n"):
  builder = TrajectoryBuilder(num_experts=4, num_moe_layers=1, top_k=2)
  builder.append(CHAT.prompt("Do it."), turn=-1, weight_version=0)
  for turn, command in enumerate(("ls", "cat a.txt")):
    ids = [*TOKENIZER.encode(command), CHAT.stop_id]
    logprobs = -rng.exponential(1.0, len(ids))
    builder.append(ids, turn=turn, weight_version=1, logprobs=logprobs)
    if not turn:
      builder.append(CHAT.observation(output), turn=turn, weight_version=1)
  rows = [[rng.permutation(4)[:2]] for _ in range(len(builder) - 1)]
  builder.append_routes(np.asarray(rows))
  outcome = Outcome(
    "completed",
    success=success,
    assertions=(AssertionResult("<b>there</b>", "semantic", success),),
    reward=1.5 if success else 0.25,
    reward_parts={"spr": 1.5 if success else 0.25},
    seconds={"boot": 0.5, "model": 1.0},
  )
  return builder.finish(
    outcome,
    task=f"{task}\u202e",
    family=("rename_by_content", "merge_branch")[rng.integers(2)],
    domain='files"><img src=x onerror=alert(2)>',
  )


def batch(seed, name, output=b"ok\n"):
  rng = np.random.default_rng(seed)
  return [
    episode(rng, bool(i % 2), task=f"{name}-{i}", output=output)
    for i in range(6)
  ]


def small_config():
  config = configs.load_config("configs/tiny.py:smoke")
  with config.unlocked():
    config.model.update(
      d_model=8, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=8, d_ff=8,
      num_experts=4, top_k=2, d_expert=8, moe_layers=(1,), dispatch="dense",
    )  # fmt: skip
    config.ppo.update(buckets=(128,), token_budget=512)
    config.limits.max_tokens = 128
    config.rl.iterations = 2
  return config.lock()


def setting_of(config):
  setting = evaluate.read_setting(config, TOKENIZER)
  return setting, evaluate.learner_settings(config, setting)


def make_state(config):
  setting, rl = setting_of(config)
  cfg = setting.model
  return learner.init_state(
    model_params.init(jax.random.key(0), cfg),
    model_params.init(jax.random.key(1), cfg.critic()),
    rl,
  )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A finished run, written as training writes one."""
  config = small_config()
  workdir = configs.claim_workdir(
    tmp_path_factory.mktemp("runs") / "whole",
    config,
    source="configs/tiny.py:smoke",
  )
  first = {s: stages.first_step(config, s) for s in ("sft", "rl", "control")}
  with MetricsWriter(workdir) as metrics:
    metrics.write(1, "evaluation", {"success_base": 0.5})
    metrics.write(first["sft"] + 1, "sft", {"loss": 2.0, "validation_loss": 3})
    metrics.write(first["rl"], "warm_up", {"explained_variance_after": 0.5})
    for i in (1, 2):
      metrics.write(
        first["rl"] + i,
        "ppo",
        {
          "success": 0.25 * i,
          "reward_spr": 0.75,
          "explained_variance": float("nan") if i == 1 else 0.625,
          "logprob_gap": 1e-7,
          "k3": 0.0,
          "fallback_fraction": 0.0,
          "episodes": 6,
          "seconds_step": 4.0,
          "seconds_rollout": 3.0,
          "episode_seconds_shell": 12.0,
        },
      )
    metrics.write(first["control"] + 1, "control", {"success": 0.375})
  trajectories = workdir / "trajectories"
  for i in (1, 2):
    storage.write(
      trajectories / f"rl-{i:05d}.array_record",
      batch(i, f"train-{i}", HOSTILE),
    )
  rates = {}
  for stage in ("base", "sft", "rl", "control"):
    played = batch(10, "heldout", HOSTILE)
    storage.write(trajectories / f"evaluation-{stage}.array_record", played)
    rates[stage] = 0.5
    result = {
      "strict_success": 0.5,
      "interval": wilson_interval(3, 6),
      "n_heldout": 6,
      "by_family": {},
    }
    (workdir / "evaluations").mkdir(exist_ok=True)
    (workdir / "evaluations" / f"{stage}.json").write_text(json.dumps(result))
  with Checkpoints(workdir / "checkpoints" / "rl") as checkpoints:
    checkpoints.save(1, make_state(config), {"iteration": 1})
  write_summary(
    workdir,
    {
      "strict_success": rates,
      "explained_variance": {"before": -0.4, "after": 0.8125},
      "replay_agreement": 1.0,
      "drift_rate": 0.0,
      "something_new": 12.5,
      "wall_seconds": 3723.0,
    },
  )
  return pathlib.Path(workdir)


@pytest.fixture
def run(whole, tmp_path):
  """A copy to break."""
  return pathlib.Path(shutil.copytree(whole, tmp_path / "run"))


def make(workdir, *args):
  return configs.run_program(
    report.main,
    expected=evaluate.EXPECTED_ERRORS,
    argv=["report", f"--workdir={workdir}", *args],
  )


def page_of(workdir):
  assert make(workdir) == 0
  return (pathlib.Path(workdir) / report.REPORT_FILE).read_text()


@pytest.fixture(scope="module")
def page(whole, tmp_path_factory):
  copy = shutil.copytree(whole, tmp_path_factory.mktemp("page") / "run")
  return page_of(copy)


class Reader(html.parser.HTMLParser):
  """Checks that tags are closed in order; keeps what it met."""

  VOID = ("meta", "br", "input", "wbr", "img")

  def __init__(self, text):
    super().__init__()
    self.open, self.tags, self.texts, self.tips = [], [], [], []
    self.attributes = set()
    self.feed(text)
    self.close()
    assert self.open == []

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    attrs = dict(attrs)
    assert not any(name.startswith("on") for name in attrs)
    self.attributes |= attrs.keys()
    if "data-tip" in attrs:
      self.tips.append(attrs["data-tip"])
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)

  def handle_endtag(self, tag):
    assert self.open and self.open.pop() == tag, (tag, self.getpos())

  def handle_data(self, data):
    self.texts.append(data)


def test_the_page_is_well_formed_and_stands_alone(page):
  reader = Reader(page)
  assert page.isascii()  # whatever encoding it is taken for
  assert "http" not in page and "url(" not in page and "@import" not in page
  assert not {"src", "href", "srcset"} & reader.attributes
  assert reader.tags.count("script") == 1
  assert not {"img", "link", "iframe", "base", "form"} & set(reader.tags)
  ids = re.findall(r' id="([^"]+)"', page)
  assert sorted(ids) == ["paint-advantage", "paint-mask", "paint-value"]


def test_the_page_says_what_the_run_reached(page):
  text = " ".join("".join(Reader(page).texts).split())
  for words in (
    "configs/tiny.py:smoke",
    "iterations",  # a field that differs from the file's
    "50 %",
    "18.8 to 81.2 %",
    "PPO's gain over the warm start+0.0 points",
    "0.812-0.4 before",
    "equal to the sampler's, with replay100 %",
    "something new12.5something_new",
    "62 min 3 s",
    "Success while learning",
    "Learner against sampler",
    "rename_by_content",
    "rollouts: episodes in sandboxes75 %3.00 s",
    "its commands100 %2.00 s",
    "the update of iteration 2 had",
  ):
    assert words in text, words
  assert "not finished" not in text


def test_hostile_text_is_shown_and_does_nothing(page):
  reader = Reader(page)
  text = "".join(reader.texts)
  assert "script>alert" in text and "<script>alert" not in page
  assert "<b>there</b>" in text and "<b>there</b>" not in page
  assert "onerror=alert(2)>" in text
  for shown in (r"\u{1b}", r"\u{202e}", r"\xff", r"\xc5", "⇥", "↵"):
    assert shown in text, shown
  assert "\x1b" not in text and "\u202e" not in text


def test_credit_is_what_the_update_had(whole, page):
  """Checked token by token against the learner itself."""
  config = small_config()
  setting, rl = setting_of(config)
  played = list(storage.read(whole / "trajectories/rl-00002.array_record"))
  values, advantages, _ = learner.estimate_credit(
    make_state(config).critic, played, setting.model, rl
  )
  lowest = {
    i: values[i][t.loss_mask].min()
    for i, t in enumerate(played)
    if t.outcome.success
  }
  chosen = min(lowest, key=lowest.get)
  expected = []
  for t, token in enumerate(played[chosen].tokens):
    parts = [f"id {token}"]
    if played[chosen].loss_mask[t]:
      parts += [
        f"log-prob {played[chosen].logprobs[t]:.3f}",
        f"value {values[chosen][t]:.3f}",
        f"advantage {advantages[chosen][t]:+.3f}",
      ]
    else:
      parts.append("not sampled")
    turn = played[chosen].turn_ids[t]
    parts.append("task" if turn < 0 else f"turn {turn}")
    row = played[chosen].routes[t, 0]
    parts.append(
      "no experts recorded"
      if row[0] < 0
      else f"experts by layer: 1: {row[0]}+{row[1]}"
    )
    expected.append(" · ".join(parts))
  assert Reader(page).tips[: len(expected)] == expected
  assert f"rl-00002, episode {chosen}" in page


def test_a_critic_from_after_the_update_is_called_that(run):
  (run / "trajectories" / "rl-00002.array_record").unlink()
  text = "".join(Reader(page_of(run)).texts)
  assert "after the update of iteration 1" in text
  assert "it has seen these episodes" in text


def test_the_same_run_gives_the_same_page_and_touches_nothing(run):
  def times():
    return {
      path: path.stat().st_mtime_ns
      for path in run.rglob("*")
      if path.is_file() and path.name != report.REPORT_FILE
    }

  before = times()
  first = page_of(run)
  assert page_of(run) == first
  assert times() == before


def test_a_run_that_is_not_finished_shows_what_there_is(run):
  (run / "summary.json").unlink()
  for stage in ("rl", "control"):
    (run / "evaluations" / f"{stage}.json").unlink()
  lines = (run / "metrics.jsonl").read_text().splitlines()[:-1]
  (run / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9')
  text = "".join(Reader(page_of(run)).texts)
  assert "This run is not finished: the last record is step" in text
  assert "the failure that once looked best" in text


def test_a_run_before_ppo_has_no_critic(run):
  (run / "summary.json").unlink()
  shutil.rmtree(run / "checkpoints")
  records = [
    json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()
  ]
  kept = [r for r in records if r["phase"] not in ("ppo", "control")]
  (run / "metrics.jsonl").write_text(
    "".join(json.dumps(r) + "\n" for r in kept)
  )
  for stage in ("rl", "control"):
    (run / "evaluations" / f"{stage}.json").unlink()
  page = page_of(run)
  assert "paint-mask" in page and 'id="paint-value"' not in page
  assert "there is no critic for it" in page


def test_a_pretraining_run_has_a_page(tmp_path):
  config = configs.load_config("configs/tiny.py:smoke,pretrain")
  workdir = configs.claim_workdir(tmp_path / "run", config)
  with MetricsWriter(workdir) as metrics:
    metrics.write(
      stages.first_step(config, "pretrain") + 200,
      "pretrain",
      {"loss": 1.0, "validation_loss": 2.0},
    )
  assert "Making the base" in page_of(workdir)
  storage.write(
    workdir / "trajectories" / "evaluation-base.array_record",
    batch(0, "heldout"),
  )
  (workdir / "evaluations").mkdir()
  (workdir / "evaluations" / "base.json").write_text(
    json.dumps({"strict_success": 0.5, "interval": [0, 1], "n_heldout": 6})
  )
  assert "once the base and its tokenizer are made" in page_of(workdir)


def test_a_run_without_a_record_has_a_page(tmp_path):
  workdir = configs.claim_workdir(tmp_path / "run", small_config())
  (workdir / "metrics.jsonl").write_text("")
  assert "nothing is recorded yet" in page_of(workdir)


def cut_in_half(path):
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = [
  ("config.json", pathlib.Path.unlink, "not a run directory"),
  ("config.json", cut_in_half, "config.json is damaged"),
  ("metrics.jsonl", pathlib.Path.unlink, "no metrics.jsonl"),
  ("metrics.jsonl", lambda p: p.write_text('{"a\n{}\n'), "line 1"),
  ("summary.json", cut_in_half, "summary.json is damaged"),
  ("evaluations/sft.json", cut_in_half, "sft.json is damaged"),
  ("evaluations/sft.json", lambda p: p.write_text("{}"), "sft.json is damaged"),
  (
    "trajectories/evaluation-rl.array_record",
    pathlib.Path.unlink,
    "no trajectories at",
  ),
  ("trajectories/rl-00002.array_record", cut_in_half, "rl-00002"),
  ("checkpoints", shutil.rmtree, "no checkpoint in"),
  ("checkpoints/rl/1/state", shutil.rmtree, "is damaged"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGE)
def test_damage_is_one_line_and_the_old_page_stays(
  run, capsys, name, damage, message
):
  (run / report.REPORT_FILE).write_text("old")
  damage(run / name)
  assert make(run) == 2
  (line,) = capsys.readouterr().err.strip().splitlines()
  assert line.startswith("error: ") and message in line
  assert (run / report.REPORT_FILE).read_text() == "old"
  assert not list(run.glob(".*.partial"))


def test_a_strange_token_is_named(run, capsys):
  path = run / "trajectories" / "rl-00002.array_record"
  played = list(storage.read(path))
  for t in played:
    t.tokens.flags.writeable or object.__setattr__(t, "tokens", t.tokens.copy())
    t.tokens[0] = TOKENIZER.vocab_size
  storage.write(path, played)
  assert make(run) == 2
  assert f"id {TOKENIZER.vocab_size} is none of" in capsys.readouterr().err


def test_another_config_is_refused(whole, capsys):
  assert make(whole, "--config.seed=3") == 2
  assert "--config has no place here" in capsys.readouterr().err


def test_help_teaches(capsys):
  with pytest.raises(SystemExit):
    report.main(["report", "--help"])
  assert "python -m t1jax.report --workdir=" in capsys.readouterr().out


def test_training_outlives_its_report(run, capsys):
  report.write_or_say_why_not(run)
  assert capsys.readouterr().err == f"report: {run / 'report.html'}\n"
  (run / "metrics.jsonl").unlink()
  report.write_or_say_why_not(run)
  (line,) = capsys.readouterr().err.splitlines()
  assert "the run is whole, but not its report (UserError: " in line
  assert f"python -m t1jax.report --workdir={run}" in line


def test_long_episodes_are_shown_in_part(monkeypatch):
  monkeypatch.setattr(episodes, "_LONGEST", 6)
  played = episodes.Batch("rl-00001", batch(0, "train"))
  setting, _ = setting_of(small_config())
  section = episodes.section(
    [episodes.Choice(played, 0, "it is the first")], TOKENIZER, setting.model
  )
  length = len(played.trajectories[0])
  assert len(Reader(section).tips) == 6
  assert f"{length - 6} tokens are left out" in section


def test_a_chart_draws_gaps_alone_points_and_level_lines():
  chart = charts.line_chart(
    "T",
    [
      charts.Series("gap", [(1, 1.0), (2, 2.0), (3, None), (4, 3.0)]),
      charts.Series("level", [(1, 5), (4, 5)]),
      charts.Series("nothing", [(1, None)]),
    ],
    x_label="update",
  )
  Reader(chart)
  first, second = re.findall(r'<path class="line line\d" d="(M[^"]*\.[^"]*)"',
                             chart)  # fmt: skip
  assert first.count("M") == 2 and second.count("M") == 1
  assert chart.count("<circle") == 1 and "nothing" not in chart
  assert charts.line_chart("T", [charts.Series("n", [])], x_label="x") == ""


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
  "numbers", [(0.0, 0.0), (1e-13, 2e-4), (-3.0, 7.0), (1e9, 1e9), (5.0,)]
)
def test_what_is_drawn_lies_inside_and_between_ticks(numbers, log):
  points = list(enumerate(numbers))
  chart = charts.line_chart(
    "T", [charts.Series("s", points)], x_label="x", log=log
  )
  if log and max(numbers) <= 0:
    assert chart == ""
    return
  Reader(chart)
  drawn = re.search(r'class="line line0" d="(M\d[^"]*\.[^"]*)"', chart)[1]
  for x, y in re.findall(r"([-\d.]+),([-\d.]+)", drawn):
    assert 0 <= float(x) <= 360 and 0 <= float(y) <= 200


def test_numbers_are_short():
  assert [charts.number(x) for x in (0, 0.6101, 7.7e-13, 1608.8, 2e7)] == [
    "0", "0.61", "7.7e-13", "1,609", "2.0e7",
  ]  # fmt: skip
  shown = [charts.percent(x) for x in (0.0, 1.0, 0.85, 1e-5, 0.99999)]
  assert shown == [
    f"{x}\N{NO-BREAK SPACE}%" for x in ("0", "100", "85", "0.001", "99.999")
  ]
