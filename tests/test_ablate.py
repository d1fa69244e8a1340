"""Ablations: names, shared warm starts, what a comparison may say."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from t1jax import ablate
from t1jax.config import (
  UserError,
  claim_workdir,
  flatten,
  load_config,
  load_module,
)

ROOT = pathlib.Path(__file__).parents[1]
FILE = str(ROOT / "configs" / "ablations.py")
ASKED = (
  "no_replay", "no_warmup", "token_gae", "binary_reward", "fraction_reward",
  "t1_dense", "fdr", "spr", "critic_small", "no_tis", "literal_clip",
)  # fmt: skip


def result(rl, learning=(0.2, 0.4)):
  return ablate.Result(
    sft=0.5, rl=rl, explained_variance=0.5, learning=learning
  )


def planned(tmp_path, *args):
  options, overrides = ablate._options(
    ["ablate", f"--workdir={tmp_path}", f"--config={FILE}", *args]
  )
  return ablate.plan(tmp_path, options, overrides)


@pytest.mark.parametrize("name", ASKED)
def test_an_ablation_changes_a_few_fields(name):
  base, changed = (load_config(f"{FILE}:{n}") for n in ("baseline", name))
  a, b = flatten(base.to_dict()), flatten(changed.to_dict())
  differ = {field for field in a.keys() | b.keys() if a[field] != b[field]}
  assert differ == {
    field
    for field, value in load_module(FILE).CHANGES[name].items()
    if a[field] != value
  }
  assert len(differ) <= 3 and (differ or name == "spr")


def test_what_begins_from_the_baselines_warm_start(tmp_path):
  runs = planned(tmp_path, "--seeds=0,1")
  assert set(runs) == {"baseline", *ASKED} - {"spr"}  # that is the baseline
  for by_seed in runs.values():
    for seed, run in by_seed.items():
      assert ablate.shares_warm_start(run, runs["baseline"][seed])
      assert not ablate.shares_warm_start(run, runs["baseline"][1 - seed])
  for field in ("model.d_model=64", "ppo.token_budget=2048"):
    (other,) = planned(tmp_path, "--seeds=0", "--names=fdr",
                       f"--config.{field}")["fdr"].values()  # fmt: skip
    assert not ablate.shares_warm_start(other, runs["baseline"][0])


def test_a_directory_of_another_config_is_refused(tmp_path):
  run = planned(tmp_path, "--seeds=0", "--names=baseline")["baseline"][0]
  claim_workdir(run.directory, run.config)
  planned(tmp_path, "--seeds=0")
  for more in (["--smoke"], ["--config.rl.iterations=3"]):
    with pytest.raises(UserError, match="another config"):
      planned(tmp_path, "--seeds=0", *more)


def test_differences_are_paired_by_seed():
  # By hand: differences .1, .2, .3; t(.975, 2) = 4.3027, s/sqrt(3) = .057735.
  mean, low, high = ablate.difference(
    {0: 0.6, 1: 0.9, 2: 0.5, 3: 0.1}, {0: 0.5, 1: 0.7, 2: 0.2, 9: 1.0}
  )
  assert mean == pytest.approx(0.2)
  assert (low, high) == pytest.approx((-0.04841, 0.44841), abs=1e-4)
  assert ablate.difference({0: 0.5}, {0: 0.4})[1:] == (-np.inf, np.inf)


def test_words_say_no_more_than_the_interval():
  assert "matters" in ablate.verdict((-0.2, -0.3, -0.1), 3)
  assert "better" in ablate.verdict((0.2, 0.1, 0.3), 3)
  assert "no difference can be shown" in ablate.verdict((0.1, -0.1, 0.3), 3)
  assert "cannot tell" in ablate.verdict((0.1, 0.05, 0.15), 2)
  assert "cannot tell" in ablate.verdict((-0.01, -0.01, -0.01), 3)  # by chance


def test_the_page_tells_of_what_is_finished(tmp_path):
  results = {
    "baseline": {0: result(0.8), 1: result(0.82), 2: result(0.81)},
    "no_replay": {0: result(0.5), 1: result(0.521), 2: result(0.5)},
    "fdr": {},
  }
  ablate.write(tmp_path, results, (0, 1, 2))
  page = (tmp_path / "ablations.html").read_text()
  assert "6 runs of 9" in page and "no_<wbr>replay" in page
  assert "it matters here" in page and "http" not in page.replace(
    "http://www.w3.org/2000/svg", ""
  )
  record = json.loads((tmp_path / "ablations.json").read_text())
  assert record["no_replay"]["interval"][1] < 0
  assert "fdr" not in record


def test_a_warm_start_is_lent_once(tmp_path):
  source, target = tmp_path / "baseline-0", tmp_path / "fdr-0"
  for name in ablate._WARM_START:
    file = source / name
    if not file.suffix:
      file = file / "part"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(name)
  ablate.lend_warm_start(source, target)
  names = {p.relative_to(source) for p in source.rglob("*")}
  assert {p.relative_to(target) for p in target.rglob("*")} == names
  (target / "config.json").write_text("{}")  # it has begun
  (source / "evaluations" / "sft.json").write_text("newer")
  ablate.lend_warm_start(source, target)
  assert (target / "evaluations" / "sft.json").read_text() != "newer"


@pytest.mark.parametrize(
  "args, message",
  [
    (["--names=no_reply"], "unknown config argument 'no_reply'"),
    (["--seeds=a"], "expected numbers"),
    (["--config.seed=3"], "--seeds"),
    (["extra"], "unexpected extra"),
    (["--config=configs/nothing.py"], "no config file"),
    (["--config=configs/tiny.py"], "has no CHANGES"),
    (["--config.bogus=3"], "unknown config field"),
  ],
)
def test_a_mistake_is_said_before_any_run(args, message, tmp_path):
  done = subprocess.run(
    [
      sys.executable, "-m", "t1jax.ablate", f"--workdir={tmp_path / 'x'}",
      *args,
    ],
    cwd=ROOT, capture_output=True, text=True, check=False,
  )  # fmt: skip
  assert done.returncode == 2 and message in done.stderr, done.stderr
  assert not (tmp_path / "x").exists()
