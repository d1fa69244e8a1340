"""One description of the parameters, and a config that refuses nonsense."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t1jax.models import params
from t1jax.models.config import ModelConfig

CFG = ModelConfig(
  vocab_size=32, d_model=8, num_layers=3, num_heads=4, num_kv_heads=2,
  head_dim=4, d_ff=12, num_experts=4, top_k=2, d_expert=6, d_shared=5,
  moe_layers=(1,), tie_embeddings=False, qk_norm=True,
)  # fmt: skip


def test_abstract_and_init_agree():
  for cfg in (
    CFG,
    CFG.critic(),
    dataclasses.replace(CFG, param_dtype="bfloat16"),
  ):
    tree, shapes = params.init(jax.random.key(0), cfg), params.abstract(cfg)
    assert jax.tree.structure(tree) == jax.tree.structure(shapes)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(shapes)):
      assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert params.count(cfg) == sum(x.size for x in jax.tree.leaves(tree))


def test_count_by_hand():
  attention = 8 * (4 * 4 + 2 * 2 * 4) + 4 * 4 * 8 + 2 * 4
  moe = 8 * 4 + 4 * 3 * 8 * 6 + 3 * 8 * 5
  want = 2 * 32 * 8 + 8 + 3 * (attention + 16) + 2 * 3 * 8 * 12 + moe
  assert params.count(CFG) == want
  assert params.count(CFG.critic()) == want - 32 * 8 + 8


def test_t1_size():
  # DESIGN: 116.0B of the parameters are experts.
  cfg = ModelConfig(
    vocab_size=248_320, d_model=3072, num_layers=48, num_heads=32,
    num_kv_heads=2, head_dim=256, d_ff=0, num_experts=256, top_k=8,
    d_expert=1024, d_shared=1024, moe_layers=tuple(range(48)),
  )  # fmt: skip
  layer = params.abstract(cfg)["layers"][0]["moe"]
  experts = sum(layer[n].size for n in ("gate", "up", "down")) * 48
  assert round(experts / 1e9, 1) == 116.0


def test_critic_shares_the_trunk_s_initial_values():
  actor = params.init(jax.random.key(3), CFG)
  critic = params.init(jax.random.key(3), CFG.critic())
  assert actor.keys() == critic.keys()
  for name in ("embed", "layers", "final_norm"):
    for a, b in zip(
      jax.tree.leaves(actor[name]), jax.tree.leaves(critic[name])
    ):
      np.testing.assert_array_equal(a, b)
  assert critic["head"].shape == (8,) and not critic["head"].any()


def test_no_two_parameters_start_alike():
  tree = params.init(jax.random.key(0), CFG)
  gate, up = (tree["layers"][1]["moe"][n] for n in ("gate", "up"))
  assert not jnp.array_equal(gate, up) and not jnp.array_equal(gate[0], gate[1])
  q = [layer["attn"]["q"] for layer in tree["layers"]]
  assert not jnp.array_equal(q[0], q[1])


def test_every_axis_has_a_name():
  with pytest.raises(ValueError, match="logical axes"):
    params.ParamSpec((2, 3), "float32", ("embed",), lambda *a: None)


def test_config_is_hashable_and_reads_back_from_json():
  fields = dataclasses.asdict(CFG) | {"moe_layers": [1]}
  assert ModelConfig(**fields) == CFG
  assert hash(ModelConfig(**fields)) == hash(CFG)
  assert CFG.num_moe_layers == 1 and CFG.moe_index == {1: 0}
  assert CFG.critic().head == "value"


@pytest.mark.parametrize(
  ("change", "field", "hint"),
  [
    ({"num_kv_heads": 3}, "num_heads", "multiple of num_kv_heads=3"),
    ({"head_dim": 5}, "head_dim", "even"),
    ({"top_k": 5}, "top_k", "at most num_experts=4"),
    ({"moe_layers": (3,)}, "moe_layers", "num_layers=3"),
    ({"moe_layers": (1, 1)}, "moe_layers", "increasing"),
    ({"d_expert": 0}, "d_expert", "at least 1"),
    ({"d_ff": 0}, "d_ff", "at least 1"),
    ({"vocab_size": 2.5}, "vocab_size", "integer"),
    ({"dispatch": "ragged"}, "dispatch", "dense, capacity"),
    ({"compute_dtype": "fp8"}, "compute_dtype", "bfloat16"),
  ],
)
def test_config_refuses(change, field, hint):
  with pytest.raises(ValueError, match=rf"ModelConfig\.{field} is .*{hint}"):
    dataclasses.replace(CFG, **change)
