"""The bench's own parts: its identities hold, its speed-up is measured."""

import numpy as np

from t1jax.bench import tb_gae


def test_identities_hold():
  found = tb_gae.identities(num_tokens=512, num_turns=20)
  assert set(found) == {"plain_gae", "boundary_decay", "observations"}
  assert max(found.values()) <= 1e-5


def test_the_stream_is_what_the_docstring_says():
  rewards, values, turn_ids, mask = tb_gae.make_stream(
    np.random.default_rng(0), 4096, 60
  )
  assert turn_ids[0] == -1
  assert set(turn_ids[turn_ids >= 0]) == set(range(60))
  assert (np.diff(turn_ids) >= 0).all()
  assert not mask[turn_ids < 0].any()
  assert set(turn_ids[mask]) == set(range(60))
  assert rewards.dtype == values.dtype == np.float32
