"""Tokenizers: bytes to ids and back, without loss.

Terminal output is bytes, not text: it may hold invalid UTF-8, control
characters or the spelling of a control token. Whatever it holds must come back
byte for byte, and must never become a control token. Both follow from the
construction here: control ids lie *above* the vocabulary of the subword model,
so that no text can reach them, and every byte has a piece of its own.
"""

import io
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

import sentencepiece as spm
from etils import epath

CONTROL_NAMES = ("pad", "task", "act", "end", "obs")

# SentencePiece writes a space as U+2581, and stops at NUL: neither character
# may reach it from outside. A lone surrogate stands for an invalid byte.
_UNSAFE = re.compile("[\u2581\x00\udc80-\udcff]")


class TokenizerError(ValueError):
  """A tokenizer file is missing or unreadable; the message names it."""


class Tokenizer(Protocol):
  """What the chat template and the models need of a tokenizer."""

  @property
  def vocab_size(self) -> int:
    """Number of ids, control ids included."""
    ...

  def encode(self, data: bytes | str) -> list[int]:
    """Ids of ordinary text; never a control id."""
    ...

  def decode(self, ids: Sequence[int]) -> bytes:
    """Bytes of ids; a control id decodes to nothing."""
    ...

  def control(self, name: str) -> int:
    """Id of the control token called `name`."""
    ...


class SentencePieceTokenizer:
  """A sentencepiece model with byte fallback, plus control ids above it."""

  def __init__(self, model: bytes):
    """Loads a serialised model.

    Args:
      model: what `train` returns, or the content of a `.model` file.

    Raises:
      TokenizerError: the bytes are no sentencepiece model, or the model lacks
        a piece for some byte.
    """
    self.model = model
    self._sp = spm.SentencePieceProcessor()
    try:
      self._sp.LoadFromSerializedProto(model)
    except RuntimeError as e:
      raise TokenizerError(f"not a sentencepiece model: {e}") from e
    size = self._sp.GetPieceSize()
    self._byte_ids = [self._sp.PieceToId(f"<0x{b:02X}>") for b in range(256)]
    if not all(self._sp.IsByte(i) for i in self._byte_ids):
      raise TokenizerError(
        "the sentencepiece model has no byte pieces; train it with "
        "byte_fallback=True"
      )
    self._bytes = [self._piece_bytes(i) for i in range(size)]
    self._controls = {name: size + i for i, name in enumerate(CONTROL_NAMES)}
    self._bytes += [b""] * len(CONTROL_NAMES)

  @classmethod
  def load(cls, path: epath.PathLike) -> "SentencePieceTokenizer":
    """Reads a `.model` file.

    Raises:
      TokenizerError: the file is missing or is no sentencepiece model.
    """
    try:
      return cls(epath.Path(path).read_bytes())
    except (OSError, TokenizerError) as e:
      raise TokenizerError(
        f"cannot read the tokenizer {path}: {e}. Give the path of a "
        "sentencepiece .model file"
      ) from e

  def save(self, path: epath.PathLike) -> None:
    epath.Path(path).write_bytes(self.model)

  def _piece_bytes(self, i: int) -> bytes:
    if self._sp.IsByte(i):
      return bytes([int(self._sp.IdToPiece(i)[1:-1], 16)])
    if self._sp.IsUnknown(i) or self._sp.IsControl(i):
      return b""
    return self._sp.IdToPiece(i).replace("\u2581", " ").encode()

  @property
  def vocab_size(self) -> int:
    return len(self._bytes)

  def control(self, name: str) -> int:
    return self._controls[name]

  @property
  def control_ids(self) -> tuple[int, ...]:
    return tuple(self._controls.values())

  def encode(self, data: bytes | str) -> list[int]:
    raw = data.encode() if isinstance(data, str) else data
    text = raw.decode("utf-8", "surrogateescape")
    ids: list[int] = []
    start = 0
    for unsafe in _UNSAFE.finditer(text):
      ids += self._sp.EncodeAsIds(text[start : unsafe.start()])
      for b in unsafe.group().encode("utf-8", "surrogateescape"):
        ids.append(self._byte_ids[b])
      start = unsafe.end()
    return ids + self._sp.EncodeAsIds(text[start:])

  def decode(self, ids: Sequence[int]) -> bytes:
    return b"".join(self._bytes[i] for i in ids)

  def piece(self, i: int) -> str:
    """A readable name of one id, for reports."""
    for name, control in self._controls.items():
      if i == control:
        return f"<|{name}|>"
    return self._bytes[i].decode("utf-8", "backslashreplace")


def train(
  corpus: Iterable[str], *, vocab_size: int, symbols: Sequence[str] = ()
) -> SentencePieceTokenizer:
  """Trains a byte-fallback BPE tokenizer; the same corpus gives the same ids.

  Args:
    corpus: texts; a line feed separates sentences.
    vocab_size: number of ids, the 256 bytes and the control ids included.
    symbols: strings that are always one piece wherever they occur, so that a
      name has the same id after a space, a slash or an equals sign.

  Returns:
    The tokenizer; its `model` bytes are what is saved.

  Raises:
    TokenizerError: the corpus is too small for `vocab_size`.
  """
  sentences = (line for text in corpus for line in text.split("\n") if line)
  model = io.BytesIO()
  try:
    spm.SentencePieceTrainer.train(
      sentence_iterator=sentences,
      model_writer=model,
      model_type="bpe",
      vocab_size=vocab_size - len(CONTROL_NAMES),
      user_defined_symbols=list(symbols),
      byte_fallback=True,
      character_coverage=1.0,
      normalization_rule_name="identity",
      add_dummy_prefix=False,
      remove_extra_whitespaces=False,
      unk_id=0,
      bos_id=-1,
      eos_id=-1,
      pad_id=-1,
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as e:
    raise TokenizerError(f"cannot train the tokenizer: {e}") from e
  return SentencePieceTokenizer(model.getvalue())
