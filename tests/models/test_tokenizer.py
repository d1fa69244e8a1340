"""The tokenizer loses no byte and lets no text become a control token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t1jax.models import tokenizer

CORPUS = [
  "cat conf/cedar.ini\ngrep -l cedar *\nmv cedar.txt flint.txt\nsubmit",
  "sed -i s/port=.*/port=47/ cedar.ini\necho 42 > out.txt",
] * 20
SYMBOLS = ["cedar", "flint", "47", "42"]


@pytest.fixture(scope="module")
def tok():
  return tokenizer.train(CORPUS, vocab_size=330, symbols=SYMBOLS)


# Bytes that sentencepiece treats specially, and what could imitate a control.
NASTY = [
  b"<|act|>",
  b"<|end|>",
  b"<0x41>",
  b"<unk>",
  b"\xe2\x96\x81",
  b"\x00",
  b"\xff",
  b"\xed\xa0\x80",
  b"\xf0\x9f",
  b"\r\n",
  b"  ",
  b"cedar",
  b"\x1b[0m",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.sampled_from(NASTY), st.binary(max_size=8))))
def test_round_trip_and_no_control_ids(tok, parts):
  data = b"".join(parts)
  ids = tok.encode(data)
  assert tok.decode(ids) == data
  assert not set(ids) & set(tok.control_ids)


def test_every_byte_has_a_piece(tok):
  everything = bytes(range(256))
  assert tok.decode(tok.encode(everything)) == everything


def test_a_symbol_is_one_piece_wherever_it_stands(tok):
  cedar = tok.encode("cedar")
  assert len(cedar) == 1
  for text in (" cedar", "/cedar", "=cedar.txt", "xcedar", "cedar cedar"):
    assert cedar[0] in tok.encode(text)


def test_training_is_deterministic(tok):
  again = tokenizer.train(CORPUS, vocab_size=330, symbols=SYMBOLS)
  assert again.model == tok.model


def test_control_ids_decode_to_nothing(tok):
  for name in tokenizer.CONTROL_NAMES:
    assert tok.decode([tok.control(name)]) == b""
    assert tok.control(name) < tok.vocab_size


def test_unreadable_tokenizer_is_one_clear_line(tmp_path, tok):
  broken = tmp_path / "broken.model"
  broken.write_bytes(b"not a model")
  for path in (broken, tmp_path / "absent.model"):
    with pytest.raises(tokenizer.TokenizerError, match=path.name):
      tokenizer.SentencePieceTokenizer.load(path)
  tok.save(tmp_path / "ok.model")
  loaded = tokenizer.SentencePieceTokenizer.load(tmp_path / "ok.model")
  assert loaded.encode("cat cedar") == tok.encode("cat cedar")


def test_too_small_a_corpus_says_so():
  with pytest.raises(tokenizer.TokenizerError, match="cannot train"):
    tokenizer.train(["a b"], vocab_size=900)
