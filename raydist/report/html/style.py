"""The style of a page, written by hand: light or dark as the reader's system, for paper and for phones.

Runs anywhere.
"""

from __future__ import annotations

_LOOK = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1240px;margin:0 auto;padding:28px 24px 48px}
h1{font-size:26px;line-height:1.25;margin:0;overflow-wrap:anywhere}
h2{font-size:17px;margin:0 0 4px}
p{margin:0 0 12px;max-width:90ch}
a{color:inherit}
.quiet,.unit,.about,.note,section>p{color:var(--quiet)}
.path{overflow-wrap:anywhere;margin:4px 0 0}
.status{display:inline-block;vertical-align:4px;margin-left:10px;padding:1px 9px;border-radius:99px;font-size:13px;font-weight:600;
border:1px solid currentColor}
.good{color:var(--good)}.fair{color:var(--fair)}.bad{color:var(--bad)}
section{background:var(--sheet);border:1px solid var(--line);border-radius:8px;padding:18px 20px;margin-top:16px}
.cards{display:flex;flex-wrap:wrap;gap:1px;background:var(--line);border:1px solid var(--line);
border-radius:8px;overflow:hidden;margin-top:18px}
.cards div{background:var(--sheet);padding:10px 14px;min-width:0;flex:1 1 128px}
.cards dt{color:var(--quiet);font-size:12.5px}
.cards dd{margin:0;font-size:20px;line-height:1.35;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.cards small{display:block;color:var(--quiet);font-size:12px;line-height:1.3}
dl{margin:0}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:18px 28px}
figure{margin:0;min-width:0}
figcaption{font-weight:600;font-size:14px}
.unit{font-weight:400;font-size:13px}
.note{font-size:13px;margin:6px 0}
.plot{position:relative}.plot p{margin:0;font-size:13px;color:var(--quiet)}.parallel .plot{min-width:960px}
.tools{float:right;display:flex;gap:6px}.tools button{font:inherit;font-size:12px;color:var(--quiet);background:var(--sheet);
border:1px solid var(--line);border-radius:5px;padding:0 7px;cursor:pointer}.tools [aria-pressed=true]{color:var(--ink);
border-color:var(--quiet)}.tools [hidden]{display:none}.spoken{position:absolute;left:-9999px}
.tip{font-variant-numeric:tabular-nums}.tip .head{color:var(--quiet)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.bar,.timeline{display:flex;overflow:hidden;border-radius:5px;background:var(--empty)}
.bar{height:44px;margin-top:8px}.timeline{height:10px;margin-top:6px;border-radius:3px}
.bar span,.timeline span{flex:1 1 0;min-width:0;display:flex;align-items:center;justify-content:center;background:var(--fill)}
.bar b{font-size:13px;color:var(--on)}
.key{display:inline-block;width:11px;height:11px;border-radius:2px;background:var(--fill);margin-right:8px}
.compute{--fill:#009e73;--on:#00120c}.exposed{--fill:#e69f00;--on:#241900}.data{--fill:#f0e442;--on:#242200}
.eval{--fill:#56b4e9;--on:#06202f}.checkpoint{--fill:#0072b2;--on:#fff}.recovery{--fill:#d55e00;--on:#170a00}
.startup{--fill:#cc79a7;--on:#2b0d1d}.other{--fill:#8d939b;--on:#101214}.paused{--fill:transparent;--on:inherit}
.unknown{--fill:repeating-linear-gradient(45deg,#8d939b 0 3px,#d4d8dc 3px 6px);--on:#111}
.wide{overflow-x:auto;margin-top:10px}
table{border-collapse:collapse;font-size:13.5px;width:100%}
th,td{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;font-weight:400}
tr>:last-child{padding-right:0}
thead th{color:var(--quiet);font-size:12.5px;white-space:nowrap;vertical-align:bottom}
tbody tr:last-child>*{border-bottom:0}
tbody th{white-space:nowrap}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{white-space:nowrap}.about,.words{white-space:normal}.words{min-width:200px;overflow-wrap:anywhere}
details summary{cursor:pointer;color:var(--quiet)}
pre{margin:8px 0 0;padding:12px;background:var(--page);border-radius:6px;overflow:auto;
font:12.5px/1.45 ui-monospace,"DejaVu Sans Mono",monospace;
max-height:480px}
.missing{padding:10px 14px;border-left:3px solid var(--fair);background:var(--page);margin:0}
footer{color:var(--quiet);font-size:12.5px;margin-top:18px}
@media (max-width:640px){main{padding:16px 10px 32px}section{padding:14px 12px}
h1{font-size:22px}
.parts tr,.tall tr{display:grid;padding:5px 0;border-bottom:1px solid var(--line)}
.parts th,.parts td,.tall th,.tall td{border:0;padding:1px 0}
.parts tr{grid-template-columns:1fr 60px 64px}.parts .about{grid-column:1/-1;font-size:12.5px}
.tall thead{display:none}.tall tr{grid-template-columns:1fr 1fr}.tall .words{grid-column:1/-1}
.tall th,.tall td{text-align:left;white-space:normal}.tall td:empty{display:none}
.tall [data-label]::before{content:attr(data-label) " ";color:var(--quiet);font-size:12px}}
@media print{body{background:#fff;font-size:12px}
main{max-width:none;padding:0}section{break-inside:avoid;border-color:#ccc}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.charts{grid-template-columns:1fr 1fr}pre{max-height:none}
.tools,.tip{display:none!important}.parallel .plot{min-width:0}.plot,.plot>div{height:auto!important;width:100%!important}
.plot canvas{position:static!important;width:100%!important;height:auto!important}}
"""
_LIGHT = (
    "--page:#f5f6f8;--sheet:#fff;--ink:#1b1f24;--quiet:#5c6570;--line:#e2e5e9;--empty:#eef0f3;"
    "--good:#0b7a4b;--fair:#9a6a00;--bad:#bb3a0a;--accent:#0072b2;"
    "--series:#0072b2 #d55e00 #008f68 #b0568c #3a93c9 #8a7a00;"
    "--thin:#440154 #46327e #365c8d #277f8e #1fa187;--middle:#0b5fa5 #6fa8d6 #e4e6ea #eda15e #a63c06;"
)
_DARK = (
    "--page:#14171b;--sheet:#1c2026;--ink:#e6e9ed;--quiet:#9aa4b0;--line:#30363e;--empty:#262b32;"
    "--good:#4cc38a;--fair:#e2b340;--bad:#ff8a5c;--accent:#5ab4ec;"
    "--series:#5ab4ec #f08a3c #35c79b #dd92bd #9ad4f5 #d8c84a;"
    "--thin:#277f8e #1fa187 #4ac16d #a0da39 #fde725;--middle:#59a9e8 #3c6f99 #34383f #b8682b #ff9b52;"
)
# Series are distinct with most kinds of colour blindness (Okabe and Ito 2008). `even` is viridis (van der Walt and Smith 2015,
# CC0), whose lightness increases evenly; `thin` the part of it that thin lines can have: contrast of 3:1 (WCAG 1.4.11).
_EVEN = "--even:#440154 #46327e #365c8d #277f8e #1fa187 #4ac16d #a0da39 #fde725"

CSS = (
    f":root{{color-scheme:light dark;{_LIGHT}{_EVEN}}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}{_LOOK}"
).replace("\n", "")
"""The whole style sheet. Paper has the colours of light; chart.js reads them from here."""
