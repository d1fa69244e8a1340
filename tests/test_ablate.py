"""Ablations: names, shared warm starts, what a comparison may say."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from t1jax import ablate
from t1jax.config import flatten, load_config, load_module

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


@pytest.mark.parametrize("name", ASKED)
def test_an_ablation_changes_a_few_fields_after_the_warm_start(name):
  base, changed = (load_config(f"{FILE}:{n}") for n in ("baseline", name))
  a, b = flatten(base.to_dict()), flatten(changed.to_dict())
  differ = {field for field in a.keys() | b.keys() if a[field] != b[field]}
  assert differ == {
    field
    for field, value in load_module(FILE).CHANGES[name].items()
    if a[field] != value
  }
  assert len(differ) <= 3 and (differ or name == "spr")
  assert ablate.shares_warm_start(base, changed)


def test_another_seed_or_model_needs_its_own_warm_start():
  base = load_config(f"{FILE}:baseline")
  for field, value in (("seed", 7), ("model.d_model", 64)):
    other = load_config(f"{FILE}:baseline").unlock()
    other.update_from_flattened_dict({field: value})
    assert not ablate.shares_warm_start(other, base)


def test_differences_are_paired_by_seed():
  # By hand: differences .1, .2, .3; t(.975, 2) = 4.3027, s/sqrt(3) = .057735.
  mean, low, high = ablate.difference(
    {0: 0.6, 1: 0.9, 2: 0.5, 3: 0.1}, {0: 0.5, 1: 0.7, 2: 0.2, 9: 1.0}
  )
  assert mean == pytest.approx(0.2)
  assert (low, high) == pytest.approx((-0.04841, 0.44841), abs=1e-4)
  assert ablate.difference({0: 0.5}, {0: 0.4})[1:] == (-np.inf, np.inf)


def test_words_say_no_more_than_the_interval():
  assert "matters" in ablate.verdict("x", (-0.2, -0.3, -0.1), 3)
  assert "better" in ablate.verdict("x", (0.2, 0.1, 0.3), 3)
  assert "no difference can be shown" in ablate.verdict(
    "x", (0.1, -0.1, 0.3), 3
  )
  assert "shows nothing" in ablate.verdict("x", (0.1, -np.inf, np.inf), 1)


def test_the_page_tells_of_what_is_finished(tmp_path):
  results = {
    "baseline": {0: result(0.8), 1: result(0.82)},
    "no_replay": {0: result(0.5), 1: result(0.521)},
    "fdr": {},
  }
  ablate.write(tmp_path, results, (0, 1))
  page = (tmp_path / "ablations.html").read_text()
  assert "4 runs of 6" in page and "no_<wbr>replay" in page
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
