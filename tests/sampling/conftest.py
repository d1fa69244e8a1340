"""A small model and one engine that the room's tests share."""

import jax
import pytest

from t1jax.models import params as model_params
from t1jax.models.config import ModelConfig
from t1jax.sampling.engine import Engine

CFG = ModelConfig(
  vocab_size=48,
  d_model=32,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  d_ff=32,
  num_experts=4,
  top_k=2,
  d_expert=16,
  moe_layers=(0, 2),
  dispatch="dense",
)
STOP = 1
FORBIDDEN = (0, 2, 3)
# Every shape the shared engine may compile.
PREFILL_BUCKETS = (4, 8)
DECODE_ROWS = 4
COLUMNS = (32, 64)


@pytest.fixture(scope="session")
def cfg():
  return CFG


@pytest.fixture(scope="session")
def params():
  drawn = jax.jit(model_params.init, static_argnums=1)(jax.random.key(7), CFG)
  # A fresh model predicts close to uniformly: what it reads would hardly
  # matter. Larger embeddings make it opinionated.
  return {**drawn, "embed": drawn["embed"] * 15}


@pytest.fixture(scope="session")
def shared_engine(params):
  engine = Engine(
    CFG,
    num_slots=6,
    max_len=64,
    stop_id=STOP,
    forbidden_ids=FORBIDDEN,
    prefill_rows=3,
    prefill_buckets=PREFILL_BUCKETS,
    decode_rows=DECODE_ROWS,
    decode_steps=4,
    columns=COLUMNS,
  )
  engine.load(params, 5)
  return engine


@pytest.fixture
def engine(shared_engine):
  """The shared engine, handed over and back with every slot free."""
  assert shared_engine.free_slots == shared_engine.num_slots
  yield shared_engine
  for session in list(shared_engine._sessions):
    shared_engine.close(session)
