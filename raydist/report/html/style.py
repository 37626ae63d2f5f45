"""The style and the script of a page, written by hand: light or dark as the reader's system, for paper and for phones.

Runs anywhere.
"""

from __future__ import annotations

from raydist.report.html import colours

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
.legend{display:flex;flex-wrap:wrap;gap:2px 16px;font-size:13px;color:var(--quiet)}
.swatch{display:inline-block;width:16px;height:0;border-top:2.5px solid var(--own);vertical-align:4px;margin-right:6px}
.swatch.dots{width:7px;height:7px;border:0;border-radius:50%;background:var(--own);vertical-align:1px}
.swatch.faint{opacity:.55}
svg{display:block;width:100%;height:auto;overflow:visible;touch-action:pan-y}
svg text{fill:var(--quiet);font-size:12px;font-variant-numeric:tabular-nums}
svg .grid{stroke:var(--line)}svg .tick{stroke:var(--quiet)}
svg .line{fill:none;stroke:var(--own);stroke-width:1.6;stroke-linejoin:round;stroke-linecap:round}
svg .faint{stroke-width:1;opacity:.55}svg .dots{stroke-width:6}
.behind{--own:var(--quiet)}svg .behind.faint{opacity:.3}

svg text.label,.parallel text{paint-order:stroke;stroke:var(--sheet);stroke-width:3px;stroke-linejoin:round}
svg text.label{fill:var(--ink)}
.parallel .wide{margin-top:0}.parallel svg{min-width:960px}.row{fill:none}svg .frame{fill:none;stroke:#fff;stroke-width:1.5}
svg .frame.behind{stroke:#000;stroke-width:3.5}
svg path.mark{stroke:var(--quiet);stroke-dasharray:3 3;fill:none}svg path.mark.bad{stroke:var(--bad)}
svg text.mark.bad{fill:var(--bad)}
svg .cross{stroke:var(--ink);stroke-width:.8;fill:none;pointer-events:none}
.cells{shape-rendering:crispEdges}.empty{fill:var(--empty)}
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
#tip{position:fixed;z-index:9;pointer-events:none;
background:var(--sheet);border:1px solid var(--line);border-radius:6px;padding:6px 10px;
font-size:13px;box-shadow:0 3px 12px #0003;font-variant-numeric:tabular-nums;max-width:280px}
#tip[hidden]{display:none}#tip div{white-space:nowrap}#tip .head{color:var(--quiet)}
footer{color:var(--quiet);font-size:12.5px;margin-top:18px}
@media (max-width:640px){main{padding:16px 10px 32px}section{padding:14px 12px}
svg text{font-size:17px}.parallel svg{min-width:680px}h1{font-size:22px}
.parts tr,.tall tr{display:grid;padding:5px 0;border-bottom:1px solid var(--line)}
.parts th,.parts td,.tall th,.tall td{border:0;padding:1px 0}
.parts tr{grid-template-columns:1fr 60px 64px}.parts .about{grid-column:1/-1;font-size:12.5px}
.tall thead{display:none}.tall tr{grid-template-columns:1fr 1fr}.tall .words{grid-column:1/-1}
.tall th,.tall td{text-align:left;white-space:normal}
.tall [data-label]::before{content:attr(data-label) " ";color:var(--quiet);font-size:12px}}
@media print{body{background:#fff;font-size:12px}
main{max-width:none;padding:0}section{break-inside:avoid;border-color:#ccc}#tip{display:none}
*{-webkit-print-color-adjust:exact;print-color-adjust:exact}.charts{grid-template-columns:1fr 1fr}pre{max-height:none}
.parallel svg{min-width:0}}
"""
_LIGHT = (
    "--page:#f5f6f8;--sheet:#fff;--ink:#1b1f24;--quiet:#5c6570;--line:#e2e5e9;--empty:#eef0f3;"
    "--good:#0b7a4b;--fair:#9a6a00;--bad:#bb3a0a;"
)
_DARK = (
    "--page:#14171b;--sheet:#1c2026;--ink:#e6e9ed;--quiet:#9aa4b0;--line:#30363e;--empty:#262b32;"
    "--good:#4cc38a;--fair:#e2b340;--bad:#ff8a5c;"
)

CSS = (
    f":root{{color-scheme:light dark;{_LIGHT}{colours.css('light')}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}{colours.css('dark')}}}}}{colours.rules()}{_LOOK}"
).replace("\n", "")
"""The whole style sheet. Paper has the colours of light."""

SCRIPT = """
"use strict";
(() => {
  const tip = document.getElementById("tip");
  const data = new WeakMap();
  const of = (svg, name) => {
    if (!data.has(svg)) data.set(svg, JSON.parse(svg.dataset[name]));
    return data.get(svg);
  };
  const line = (text, kind) => {
    const one = document.createElement("div");
    one.textContent = text;
    if (kind) one.className = kind;
    return one;
  };
  const hide = (svg) => {
    tip.hidden = true;
    svg.querySelector(".cross").setAttribute("d", "");
  };
  const show = (event, lines) => {
    tip.replaceChildren(...lines);
    tip.hidden = false;
    const room = document.documentElement, pad = 14;
    const right = event.clientX + pad, over = right + tip.offsetWidth > room.clientWidth;
    const left = over ? event.clientX - pad - tip.offsetWidth : right;
    const top = Math.min(event.clientY + pad, room.clientHeight - tip.offsetHeight - 4);
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  };
  const at = (svg, event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const nearest = (places, x) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - places[low - 1] < places[low] - x ? low - 1 : low;
  };
  const follow = (svg, look) => {
    const title = svg.querySelector("title");  // kept as its label, but removed so that the browser shows no second tip
    svg.setAttribute("aria-label", title.textContent);
    title.remove();
    const move = (event) => look(at(svg, event), event);
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", () => hide(svg));
  };
  const lines = (svg) => follow(svg, (point, event) => {
    const chart = of(svg, "lines"), [left, top, right, bottom] = chart.box;
    if (!chart.x.length || point.x < left - 4 || point.x > right + 4) return hide(svg);
    const i = nearest(chart.x, point.x);
    svg.querySelector(".cross").setAttribute("d", `M${chart.x[i]} ${top}V${bottom}`);
    const values = chart.series.filter((one) => one.values[i]).map((one) => line(`${one.name} ${one.values[i]}`));
    show(event, [line(chart.at[i], "head"), ...values]);
  });
  const cells = (svg) => follow(svg, (point, event) => {
    const chart = of(svg, "cells"), [left, top, right, bottom] = chart.box;
    const count = chart.rows.length, wide = chart.columns.length;
    const j = Math.floor((point.x - left) / (right - left) * wide), i = Math.floor((point.y - top) / (bottom - top) * count);
    if (i < 0 || j < 0 || i >= count || j >= wide) return hide(svg);
    const w = (right - left) / wide, h = (bottom - top) / count;
    svg.querySelector(".cross").setAttribute("d", `M${left + j * w} ${top + i * h}h${w}v${h}h${-w}z`);
    show(event, [line(`${chart.rows[i]}, ${chart.columns[j]}`, "head"), line(chart.values[i].split("|")[j] || "no data")]);
  });
  const bind = (root) => {
    root.querySelectorAll("svg[data-lines]").forEach(lines);
    root.querySelectorAll("svg[data-cells]").forEach(cells);
  };
  bind(document);
  document.addEventListener("raydist:drawn", (event) => bind(event.target));
  document.documentElement.dataset.ready = "yes";
})();
"""
"""Shows values under the pointer. What it shows is set as text, never as HTML."""
