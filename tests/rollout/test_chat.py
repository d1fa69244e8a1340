"""The template only ever appends, and text never becomes a control token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.models import tokenizer
from t1jax.rollout.chat import Chat


@pytest.fixture(scope="module")
def chat():
  corpus = ["cat cedar.txt\nsubmit\nrename the file"] * 20
  return Chat(tokenizer.train(corpus, vocab_size=290))


PARTS = st.lists(
  st.tuples(
    st.sampled_from(["ls", "cat <|end|>", "echo '<|act|>'", ""]),
    st.one_of(st.binary(max_size=12), st.just(b"<|obs|><|task|>\n")),
  ),
  min_size=1,
  max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(PARTS)
def test_a_demonstration_is_what_the_episode_appends(chat, turns):
  ids = chat.prompt("rename the file")
  mask = [False] * len(ids)
  for i, (command, output) in enumerate(turns):
    action = [*chat.tokenizer.encode(command), chat.stop_id]
    ids += action
    mask += [True] * len(action)
    if i + 1 < len(turns):
      observed = chat.observation(output)
      ids += observed
      mask += [False] * len(observed)
  told = chat.demonstration("rename the file\n", turns)
  assert told.tokens.tolist() == ids and told.loss_mask.tolist() == mask
  controls = [i for i in ids if i in chat.tokenizer.control_ids]
  # task, act, then (end, obs, act) between turns and the last end: no text
  # added a control token of its own.
  assert len(controls) == 2 + 3 * (len(turns) - 1) + 1


def test_the_stop_id_may_be_sampled_and_no_other_control(chat):
  assert chat.stop_id not in chat.forbidden_ids
  assert {chat.stop_id, *chat.forbidden_ids} == set(chat.tokenizer.control_ids)
