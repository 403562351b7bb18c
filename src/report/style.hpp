// What: the style sheet of the report.
// Why: light, dark and print from one set of variables.
// Never: names a font or picture that would have to be fetched.
#pragma once

namespace talea::report {

inline constexpr const char* style_sheet = R"css(
:root { color-scheme: light dark; --ink: #1b1f24; --quiet: #59626d; --paper: #ffffff;
  --panel: #f5f6f8; --rule: #d5d9de; --good: #0a6b3d; --good-bg: #e0f3e8; --bad: #a31621;
  --bad-bg: #fbe4e5; --c0: #0062a3; --c1: #b84a00; --c2: #00785a; --c3: #9a3a80; --c4: #7a5c00;
  --c5: #444c56; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --quiet: #9aa5b1; --paper: #14181d;
  --panel: #1d2329; --rule: #39424c; --good: #6fdba2; --good-bg: #12331f; --bad: #ff9aa0;
  --bad-bg: #451a1d; --c0: #6cb8f5; --c1: #ff9d5c; --c2: #4fd1ae; --c3: #e28fcb; --c4: #e3c355;
  --c5: #b6c0cb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.3rem; margin: 2.4rem 0 .4rem;
  padding-top: 1rem; border-top: 2px solid var(--rule); } h3 { font-size: 1.05rem; margin: 1.6rem 0 .3rem; }
p { margin: .3rem 0 .8rem; } a { color: var(--c0); } .quiet { color: var(--quiet); }
p.quiet, td .quiet { font-size: .9em; }
code, pre, td, th { unicode-bidi: isolate; } code, pre { font: .86em/1.5 ui-monospace, monospace; }
pre { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: .7rem;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .92rem; } caption { text-align: left;
  color: var(--quiet); padding: .2rem 0; white-space: nowrap; }
th, td { text-align: left; vertical-align: top; padding: .28rem .7rem; border-bottom: 1px solid var(--rule);
  overflow-wrap: break-word; max-width: 28rem; }
td { overflow-wrap: anywhere; min-width: 5rem; }
thead th { border-bottom: 2px solid var(--rule); white-space: nowrap; } tbody th { font-weight: 600; }
.num { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
table.facts { font-size: .9rem; width: 100%; } table.facts th { width: 13rem; font-weight: 500;
  color: var(--quiet); overflow-wrap: normal; } table.facts table.facts th { width: 10rem; }
table.facts td { max-width: none; overflow-wrap: anywhere; }
table.facts table.facts tr:last-child > * { border-bottom: 0; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .7rem;
  margin: .8rem 0; padding: 0; list-style: none; }
.cards li { background: var(--panel); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem .8rem; }
.cards b { display: block; font-size: 1.15rem; overflow-wrap: anywhere; } .cards span { color: var(--quiet);
  font-size: .86rem; }
.badge { display: inline-block; border-radius: 1rem; padding: 0 .6rem; font-size: .86rem; font-weight: 600;
  white-space: nowrap; border: 1px solid currentColor; }
.good { color: var(--good); background: var(--good-bg); } .bad { color: var(--bad); background: var(--bad-bg); }
.none { color: var(--quiet); background: var(--panel); }
details { margin: .5rem 0; } summary { cursor: pointer; color: var(--c0); }
figure { margin: 1rem 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; max-width: 46rem; display: block; }
svg text { fill: var(--ink); font-size: 12px; } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 2; } .frontier { stroke: var(--quiet); stroke-width: 1.5; }
.line.c0 { stroke: var(--c0); } .line.c1 { stroke: var(--c1); } .line.c2 { stroke: var(--c2); }
.line.c3 { stroke: var(--c3); } .line.c4 { stroke: var(--c4); } .line.c5 { stroke: var(--c5); }
.bar.c0 { fill: var(--c0); } .bar.c1 { fill: var(--c1); } .bar.c2 { fill: var(--c2); }
.bar.c3 { fill: var(--c3); } .bar.c4 { fill: var(--c4); } .bar.c5 { fill: var(--c5); }
.spot { fill: var(--c0); fill-opacity: .75; stroke: var(--paper); } .miss { stroke: var(--bad); stroke-width: 2.5; }
.whisker { stroke: var(--ink); stroke-width: 2; } .legend { list-style: none; display: flex; flex-wrap: wrap;
  gap: .2rem 1.2rem; padding: 0; margin: .3rem 0; font-size: .9rem; }
.legend svg { display: inline-block; width: 30px; margin-right: .4rem; }
td.hit { text-align: center; }
@media print { :root { --ink: #000; --quiet: #444; --paper: #fff; --panel: #fff; --rule: #bbb;
  --good: #000; --good-bg: #fff; --bad: #000; --bad-bg: #ddd; }
  body { max-width: none; font-size: 10.5pt; padding: 0; } a { color: inherit; text-decoration: none; }
  .scroll { overflow: visible; } caption { white-space: normal; }
  figure, tr, li { break-inside: avoid; }}
)css";

}  // namespace talea::report
