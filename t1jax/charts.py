"""Line charts and bars as inline SVG and HTML, for pages that must stand alone.

A chart is a `<figure>`: caption, legend with the last value of each line, the
drawing, and the same numbers as a table behind a fold. Colours and fonts are
the page's (`assets/report.css`): lines have the classes line0, line1, ..., each
a colour *and* a dash pattern, so that neither print nor colour-blindness makes
two of them one. Nothing here knows what the numbers mean.
"""

import dataclasses
import html
import itertools
import math
import unicodedata
from collections.abc import Callable, Iterable, Sequence

from etils import epath

_ASSETS = epath.resource_path("t1jax") / "assets"

# As wide as a column of the page on a telephone, so that text in the drawing
# is about as large as text around it.
_WIDTH, _HEIGHT = 360, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 8, 8, 34
_LINES = 6  # that the style sheet tells apart
_PICTURES = {"\n": "↵", "\t": "⇥"}  # that every font has
_TABLE_ROWS = 50  # of a chart's table; more are thinned out


@dataclasses.dataclass(frozen=True)
class Series:
  """One line: (x, y) in order of x; y is None where there is no number."""

  name: str
  points: Sequence[tuple[float, float | None]]

  @property
  def numbers(self) -> list[float]:
    return [y for _, y in self.points if y is not None]


def plain(text: object) -> str:
  """Any text as HTML that shows it, and does nothing else.

  Markup is escaped. What would be invisible, or would change how the text
  around it looks (control characters, lone surrogates, marks that turn the
  direction of writing), is spelled out.
  """
  return "".join(_shown(c) for c in str(text))


def _shown(character: str) -> str:
  if character in _PICTURES:
    return _PICTURES[character]
  if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
    return f"\\u{{{ord(character):x}}}"
  return html.escape(character)


def number(value: float) -> str:
  """A number in about three digits."""
  if isinstance(value, int) or (value == int(value) and abs(value) < 1e6):
    return str(int(value))
  if abs(value) < 1e-3 or abs(value) >= 1e6:
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
  return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(value: float) -> str:
  """A share of one as a percentage, with more digits near 0 and 1."""
  near = 0 < abs(value) < 1e-3 or 0 < abs(1 - value) < 1e-3
  digits = 3 if near else 1
  shown = f"{100 * value:.{digits}f}".removesuffix(f".{'0' * digits}")
  return f"{shown}\N{NO-BREAK SPACE}%"


def interval(low: float, high: float) -> str:
  """A range of shares as percentages."""
  return f"{100 * low:.1f} to {100 * high:.1f}\N{NO-BREAK SPACE}%"


def duration(seconds: float) -> str:
  """Seconds as a person says them."""
  whole = round(seconds)
  if whole < 120:
    words = f"{whole} s"
  elif whole < 7200:
    words = f"{whole // 60} min {whole % 60} s"
  else:
    words = f"{whole // 3600} h {whole % 3600 // 60} min"
  return words.replace(" ", "\N{NO-BREAK SPACE}")


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
  """A whole page of (heading, HTML), in ASCII: the same in any encoding."""
  body = "".join(
    f"<section><h2>{heading}</h2>{content}</section>"
    for heading, content in sections
  )
  style = (_ASSETS / "report.css").read_text()
  script = (_ASSETS / "report.js").read_text()
  whole = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    f"<title>{plain(title)}</title><style>{style}</style></head>"
    f"<body><main><h1>{plain(title)}</h1>{body}</main>"
    f"<script>{script}</script></body></html>\n"
  )
  return whole.encode("ascii", "xmlcharrefreplace").decode()


def line_chart(
  title: str,
  series: Sequence[Series],
  *,
  x_label: str,
  unit: str = "",
  note: str = "",
  bounds: tuple[float | None, float | None] = (None, None),
  log: bool = False,
  show: Callable[[float], str] = number,
) -> str:
  """A figure of lines over a common axis; '' when no line has a number.

  Args:
    title: what is drawn.
    series: lines; those without a number are left out.
    x_label: what the horizontal axis counts.
    unit: of the vertical axis, said in the caption.
    note: a sentence for the caption.
    bounds: the vertical axis reaches at least from and to here.
    log: logarithmic; numbers that are not positive are left out.
    show: how a number is written.
  """
  if log:
    series = [Series(s.name, [_positive(p) for p in s.points]) for s in series]
  series = [s for s in series if s.numbers]
  if not series:
    return ""
  if len(series) > _LINES:
    raise ValueError(f"{title}: {len(series)} lines; expected up to {_LINES}")
  y_axis = _Axis.vertical([y for s in series for y in s.numbers], bounds, log)
  x_axis = _Axis.horizontal([x for s in series for x, _ in s.points])
  parts = [
    f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
    f"<title>{plain(title)}</title>",
    f"<desc>{plain(_in_words(series, x_label, show))}</desc>",
  ]
  for tick in y_axis.ticks:
    y = y_axis.at(tick)
    parts.append(
      f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" '
      f'y2="{y:.1f}"/><text x="{_LEFT - 6}" y="{y + 4:.1f}" '
      f'text-anchor="end">{plain(_tick(tick, show, log))}</text>'
    )
  floor = _HEIGHT - _BOTTOM
  for tick in x_axis.ticks:
    x = x_axis.at(tick)
    parts.append(
      f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{floor}" '
      f'y2="{floor + 4}"/><text x="{x:.1f}" y="{floor + 16}" '
      f'text-anchor="middle">{number(tick)}</text>'
    )
  parts.append(
    f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{floor}" '
    f'y2="{floor}"/><text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" '
    f'y="{_HEIGHT - 4}" text-anchor="middle">{plain(x_label)}</text>'
  )
  for i, line in enumerate(series):
    parts.append(_drawn(line, f"line{i}", x_axis, y_axis))
  parts.append("</svg>")
  caption = f"<b>{plain(title)}</b>"
  caption += f" ({plain(unit)})" if unit else ""
  caption += f"<small>{plain(note)}</small>" if note else ""
  return (
    f"<figure><figcaption>{caption}</figcaption>{_legend(series, show)}"
    f"{''.join(parts)}{_numbers(title, series, x_label, show)}</figure>"
  )


@dataclasses.dataclass(frozen=True)
class _Axis:
  """Where a number lies between two pixels."""

  low: float
  high: float
  start: float  # pixel of `low`
  end: float  # pixel of `high`
  ticks: Sequence[float]
  log: bool = False

  @classmethod
  def vertical(cls, numbers, bounds, log) -> "_Axis":
    pixels = (_HEIGHT - _BOTTOM, _TOP)
    low, high = min(numbers), max(numbers)
    low = low if bounds[0] is None else min(low, bounds[0])
    high = high if bounds[1] is None else max(high, bounds[1])
    if log:
      first = math.floor(math.log10(low))
      last = max(math.ceil(math.log10(high)), first + 1)
      stride = -(-(last - first) // 5)
      last += -(last - first) % stride  # the axis ends on a tick
      ticks = [10.0**e for e in range(first, last + 1, stride)]
      return cls(10.0**first, 10.0**last, *pixels, ticks, log)
    if high - low <= 1e-9 * max(abs(high), abs(low)):  # a level line
      low, high = low - 0.5 * (abs(low) or 1), high + 0.5 * (abs(high) or 1)
      low = low if bounds[0] is None else max(low, bounds[0])
    ticks = _round_ticks(low, high, 5)
    return cls(min(low, ticks[0]), max(high, ticks[-1]), *pixels, ticks)

  @classmethod
  def horizontal(cls, numbers) -> "_Axis":
    low, high = min(numbers), max(numbers)
    if low == high:
      low, high = low - 1, high + 1
    inside = [t for t in _round_ticks(low, high, 6) if low <= t <= high]
    ticks = [t for t in inside if t == int(t)]
    return cls(low, high, _LEFT + 6, _WIDTH - _RIGHT - 8, ticks)

  def at(self, value: float) -> float:
    low, high = self.low, self.high
    if self.log:
      low, high, value = (math.log10(v) for v in (low, high, value))
    return self.start + (value - low) / (high - low) * (self.end - self.start)


def _round_ticks(low: float, high: float, count: int) -> list[float]:
  """About `count` multiples of 1, 2 or 5 times a power of ten, around both."""
  rough = (high - low) / count
  power = 10.0 ** math.floor(math.log10(rough))
  step = power * next(m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
  first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
  return [round(i * step, 12) for i in range(first, last + 1)]


def _positive(point):
  x, y = point
  return x, y if y is not None and y > 0 else None


def _tick(value: float, show: Callable[[float], str], log: bool) -> str:
  return f"1e{round(math.log10(value))}" if log else show(value)


def _drawn(series: Series, css: str, x_axis: _Axis, y_axis: _Axis) -> str:
  """The line, broken where a number is missing; a dot where it is alone."""
  runs = [
    [(x_axis.at(x), y_axis.at(y)) for x, y in group]
    for there, group in itertools.groupby(
      series.points, key=lambda p: p[1] is not None
    )
    if there
  ]
  path = " ".join(
    "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in run) for run in runs
  )
  dots = [run[0] for run in runs if len(run) == 1]
  return f'<path class="line {css}" d="{path}"/>' + "".join(
    f'<circle class="dot {css}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>'
    for x, y in dots
  )


def _in_words(series, x_label, show) -> str:
  return "; ".join(
    f"{s.name}: from {show(s.numbers[0])} to {show(s.numbers[-1])}, lowest "
    f"{show(min(s.numbers))}, highest {show(max(s.numbers))}"
    for s in series
  ) + f"; by {x_label}"  # fmt: skip


def _legend(series: Sequence[Series], show: Callable[[float], str]) -> str:
  items = "".join(
    f'<li><svg class="swatch" viewBox="0 0 24 8" aria-hidden="true"><path '
    f'class="line line{i}" d="M0,4 L24,4"/></svg>{plain(s.name)} '
    f"<b>{plain(show(s.numbers[-1]))}</b></li>"
    for i, s in enumerate(series)
  )
  return f'<ul class="legend" title="with the last value of each">{items}</ul>'


def _numbers(title, series, x_label, show) -> str:
  """The same numbers as a table, thinned out if there are many."""
  lines = [dict(s.points) for s in series]
  xs = sorted({x for line in lines for x in line})
  stride = -(-len(xs) // _TABLE_ROWS)
  shown = sorted({*xs[::stride], *xs[-1:]})
  rows = [
    [number(x), *(_cell(line.get(x), show) for line in lines)] for x in shown
  ]
  every = f", every {stride}th row" if stride > 1 else ""
  return (
    f"<details><summary>The numbers{every}</summary>"
    + table([x_label, *(s.name for s in series)], rows, caption=title)
    + "</details>"
  )


def _cell(value: float | None, show: Callable[[float], str]) -> str:
  return "–" if value is None else show(value)


def table(
  head: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str
) -> str:
  """A table; the first cell of a row is its heading. A cell made by `bar`
  stays as it is, any other is text.
  """
  columns = "".join(f'<th scope="col">{plain(h)}</th>' for h in head)
  body = "".join(
    f'<tr><th scope="row">{_content(first)}</th>'
    + "".join(f"<td>{_content(cell)}</td>" for cell in rest)
    + "</tr>"
    for first, *rest in rows
  )
  return (
    f'<div class="scroll"><table><caption>{plain(caption)}</caption><thead><tr>'
    f"{columns}</tr></thead><tbody>{body}</tbody></table></div>"
  )


class Html(str):
  """Text that is HTML already."""


def _content(cell: str) -> str:
  if isinstance(cell, Html):
    return cell
  return plain(cell).replace("_", "_<wbr>")  # names are long on telephones


def bar(
  share: float,
  text: str,
  *,
  line: int = 0,
  interval: tuple[float, float] | None = None,
) -> Html:
  """A cell with a bar of `share` of its width, and the number on it.

  Args:
    share: in [0, 1].
    text: the number as it is to be read.
    line: the colour, as that of the line of this number.
    interval: in [0, 1]; drawn as a whisker.
  """
  whisker = ""
  if interval:
    low, high = (100 * min(1.0, max(0.0, x)) for x in interval)
    whisker = (
      f'<span class="whisker" style="left:{low:.1f}%;'
      f'width:{high - low:.1f}%"></span>'
    )
  width = 100 * min(1.0, max(0.0, share))
  return Html(
    f'<span class="bar"><span class="fill fill{line}" '
    f'style="width:{width:.1f}%"></span>{whisker}</span>'
    f'<span class="amount">{plain(text)}</span>'
  )
