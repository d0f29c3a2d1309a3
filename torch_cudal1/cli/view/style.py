"""The style sheet of the HTML page: colours for light and dark with contrast of at least 4.5:1,
tables that scroll, a print form.

Text only; the page includes it as it is.
"""

__all__ = ["CSS"]

CSS = """
:root { color-scheme: light dark; --font: system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --paper: #fff; --ink: #1a1d21; --muted: #565d66; --grid: #d5d9de; --panel: #f5f6f8; --first: #2b6cb0; --second: #c05621;
  --good: #1b6e3c; --bad: #b3261e; --link: #1a56a0; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e6e8eb; --muted: #a3abb5; --grid: #3a4149; --panel: #1e2328;
  --first: #63a4e8; --second: #f0945a; --good: #6cc991; --bad: #ff8a80; --link: #8ab8f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 74rem; padding: 1.5rem; background: var(--paper); color: var(--ink); font: 1rem/1.5 var(--font); }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .6rem; border-bottom: 1px solid var(--grid); padding-bottom: .2rem; }
h3 { font-size: 1.08rem; margin: 1.6rem 0 .3rem; }
header p { max-width: 46rem; color: var(--muted); margin: 0; }
a { color: var(--link); }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; min-width: 46rem; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--muted); font-size: .85rem; padding: .2rem 0 .4rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--grid);
  overflow-wrap: break-word; }
thead th { color: var(--muted); font-weight: 600; overflow-wrap: normal; }
tbody th { font-weight: 600; min-width: 8rem; overflow-wrap: break-word; }
tbody th a { white-space: nowrap; }
article { margin-bottom: 1.5rem; }
article > p { margin: .2rem 0 .6rem; max-width: 60rem; }
details { background: var(--panel); border-radius: .4rem; padding: .5rem .9rem; margin: .5rem 0; }
summary { cursor: pointer; padding: .15rem 0; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(17rem, 1fr)); gap: .4rem 1.5rem; margin: .6rem 0; }
dl div:first-child:not(.times div) { grid-column: 1 / -1; }
dl.times { grid-template-columns: repeat(3, max-content); gap: .2rem 2.2rem; }
dt { color: var(--muted); font-size: .82rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.num { white-space: nowrap; }
.tag { display: inline-block; vertical-align: .08rem; padding: 0 .55rem;
  font-size: .78rem; font-weight: 600; border: 1px solid currentColor; border-radius: .8rem; }
.tag.swapped, .good { color: var(--good); }
.tag.baseline, .tag.undone { color: var(--muted); }
.bad { color: var(--bad); }
.note { color: var(--muted); }
.note.bad { color: var(--bad); }
figure { margin: 1rem 0; }
figcaption { font-weight: 600; margin-bottom: .3rem; }
.legend span { white-space: nowrap; }
.legend { font-weight: 400; color: var(--muted); font-size: .88rem; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .9rem; vertical-align: -.05rem; }
.key.first { background: var(--first); } .key.second { background: var(--second); }
figure svg { display: block; width: 100%; max-width: 58rem; height: auto; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } details { background: none; border: 1px solid var(--grid);
  break-inside: avoid-page; } h2, h3 { break-after: avoid; } tr, figure { break-inside: avoid; }
  .scroll { overflow: visible; } table { min-width: 0; }
  a { color: inherit; text-decoration: none; } }
"""
