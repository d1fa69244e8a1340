"""The capped collector against its slow twin."""

from hypothesis import given
from hypothesis import strategies as st

from t1jax.sandbox.output import Output


@given(st.lists(st.binary(max_size=50)), st.integers(1, 60))
def test_output_keeps_the_ends_of_the_whole(chunks, cap):
  output = Output(cap)
  for chunk in chunks:
    output.add(chunk)
  kept, dropped = output.result()
  whole, half = b"".join(chunks), max(1, cap // 2)
  assert dropped == max(0, len(whole) - 2 * half)
  if dropped:
    gap = b"\n[... %d bytes omitted ...]\n" % dropped
    assert kept == whole[:half] + gap + whole[-half:]
  else:
    assert kept == whole
