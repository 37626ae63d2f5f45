// Draws the figures that charts.py has written, with Apache ECharts: values under the pointer, zoom, logarithmic axes, PNG.
// Text of runs goes to the canvas, or is set as text; never as HTML.
"use strict";
(() => {
  const root = document.documentElement, charts = new Map();  // figure -> what is drawn in it

  // The colours of the page as it is now shown: light, dark or on paper.
  const palette = () => {
    const style = getComputedStyle(root), list = (name) => style.getPropertyValue(`--${name}`).trim().split(/\s+/);
    const found = {font: getComputedStyle(document.body).fontFamily};
    for (const name of ["ink", "quiet", "line", "sheet", "empty", "bad"]) [found[name]] = list(name);
    for (const name of ["series", "even", "thin", "middle"]) found[name] = list(name);
    return found;
  };

  const small = (v) => v !== 0 && Math.abs(v) < 1e-3;
  const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 4});
  const two = (n) => String(n).padStart(2, "0");
  const clock = (seconds) => {
    const total = Math.round(seconds), days = Math.floor(total / 86400), hours = Math.floor(total / 3600) % 24;
    const minutes = Math.floor(total / 60) % 60;
    if (total < 60) return total ? `${Number(seconds.toPrecision(3))} s` : "0";
    if (days) return hours || minutes ? `${days}d ${hours}:${two(minutes)}` : `${days}d`;
    return hours ? `${hours}:${two(minutes)}:${two(total % 60)}` : `${minutes}:${two(total % 60)}`;
  };
  const exact = (v) => small(v) ? v.toExponential() : v.toLocaleString("en", {maximumFractionDigits: 10});
  const forms = {
    number: exact, whole: exact, clock, percent: (v) => `${(100 * v).toFixed(0)}%`, power: (v) => `${(2 ** v).toFixed(2)} \u00d7`,
    mib: (v) => v < 1024 ? `${v.toFixed(1)} MiB` : `${(v / 1024).toFixed(1)} GiB`,
  };
  const ticks = {...forms, number: (v) => small(v) ? v.toExponential() : compact.format(v), whole: (v) => compact.format(v)};

  const text = (look) => ({color: look.quiet, fontFamily: look.font, fontSize: 12});
  const base = (look) => ({
    animation: false, textStyle: {fontFamily: look.font},
    tooltip: {
      confine: true, transitionDuration: 0, className: "tip", backgroundColor: look.sheet, borderColor: look.line, padding: [6, 10],
      textStyle: {...text(look), color: look.ink, fontSize: 13}, axisPointer: {lineStyle: {color: look.ink, width: 0.8, type: "solid"}},
    },
  });
  const tip = (head, rows) => [head, ...rows].filter(Boolean).map((words, i) => {
    const one = document.createElement("div");
    one.textContent = words;
    if (!i) one.className = "head";
    return one;
  });
  const axis = (look, more) => ({
    axisLine: {show: false}, axisTick: {show: false}, splitLine: {lineStyle: {color: look.line}}, nameTextStyle: text(look),
    ...more, axisLabel: {...text(look), hideOverlap: true, ...more.axisLabel},
  });
  const across = (x, look) => {
    const time = x.kind === "time", form = ticks[x.form], scale = time ? 1000 : 1;
    const own = x.ticks === null ? {} : {customValues: x.ticks.map((one) => one * scale)};
    return axis(look, {
      type: x.kind, logBase: x.base, min: x.ends[0] * scale, max: x.ends[1] * scale, name: x.name, nameLocation: "middle",
      nameGap: 26, splitLine: {show: false}, axisTick: {show: true, lineStyle: {color: look.quiet}, ...own},
      minInterval: x.form === "whole" && x.kind === "value" ? 1 : undefined,
      axisLabel: {formatter: (v) => form(v / scale), alignMinLabel: "left", alignMaxLabel: "right", ...own},
    });
  };
  // Vertical lines; a label only where the previous one leaves room.
  const marks = (chart, look, wide, top) => {
    const [low, high] = chart.x.ends, scale = chart.x.kind === "time" ? 1000 : 1;
    let free = -Infinity;
    const data = [...chart.marks].sort((a, b) => a[0] - b[0]).map(([x, words, bad]) => {
      const at = (x - low) / (high - low) * wide, shown = words && at >= free && at + 7 * words.length < wide + 40;
      if (shown) free = at + 7 * words.length + 8;
      const colour = bad ? look.bad : look.quiet;
      return {
        xAxis: x * scale, lineStyle: {color: colour, type: [3, 3]},
        label: {...text(look), show: Boolean(shown), formatter: () => words, position: top, align: "left", color: colour},
      };
    });
    return {silent: true, symbol: "none", animation: false, data};
  };
  const zoom = (look, axes) => ({
    dataZoom: [{
      type: "inside", xAxisIndex: axes, zoomOnMouseWheel: "shift", moveOnMouseWheel: false, moveOnMouseMove: false,
      filterMode: axes === 0 ? "filter" : "none",
    }],
    toolbox: {itemSize: 0, top: -50, feature: {dataZoom: {xAxisIndex: axes, yAxisIndex: "none", brushStyle: {color: look.series[0], opacity: 0.25}}}},
  });

  const lines = (one, look, wide) => {
    const {chart, log} = one, scale = chart.x.kind === "time" ? 1000 : 1;
    const series = (made, i, behind) => {
      const value = (j) => made.y[j] === null || log && !(made.y[j] > 0) ? null : made.y[j];
      const alone = (j) => value(j) !== null && !(j && value(j - 1) !== null) && !(j + 1 < made.x.length && value(j + 1) !== null);
      const dots = made.style === "dots", faint = made.style === "faint";
      const colour = behind ? look.quiet : look.series[i % look.series.length];
      const data = made.x.map((x, j) => {
        const at = [x * scale, value(j)];
        if (made.labels) return {value: at, label: {show: Boolean(made.labels[j]), formatter: () => made.labels[j]}};
        return !dots && alone(j) ? {value: at, symbol: "circle", symbolSize: 4} : at;
      });
      return {
        name: made.name, type: dots ? "scatter" : "line", data, color: colour, symbol: dots ? "circle" : "none", symbolSize: 6, itemStyle: {opacity: 1},
        lineStyle: {color: colour, width: faint ? 1 : 1.6, opacity: faint ? (behind ? 0.3 : 0.55) : 1}, silent: behind,
        emphasis: {disabled: true}, z: behind ? 1 : 2,
        label: {...text(look), color: look.ink, position: "top", textBorderColor: look.sheet, textBorderWidth: 3},
        labelLayout: {hideOverlap: true},
      };
    };
    const shown = [...chart.behind.map((made, i) => series(made, i, true)), ...chart.series.map((made, i) => series(made, i, false))];
    if (shown.length) shown[0].markLine = marks(chart, look, wide, "end");
    const names = [...new Set(chart.series.map((made) => made.name).filter(Boolean))];
    const long = names.some((name) => name.length > 30) ? {width: Math.max(wide / 2, 120), overflow: "truncate"} : {};
    const legend = {
      type: "scroll", show: names.length > 1, data: names, top: 0, left: 0, right: 0, itemWidth: 16, itemHeight: 8, icon: "roundRect", padding: [3, 0],
      textStyle: {...text(look), lineHeight: 18, ...long}, inactiveColor: look.line, pageTextStyle: text(look), pageIconColor: look.quiet,
    };
    const top = (names.length > 1 ? 26 : 0) + (chart.marks.length ? 22 : 8);
    const tell = (parameters) => {
      const x = parameters[0].axisValue / scale, unit = chart.x.name, at = (v) => `${unit} ${forms[chart.x.form](v)}`.trim();
      const near = one.points.filter((made) => one.selected[made.name] !== false).map((made) => {
        const i = nearest(made.x, x);
        return {made, i, x: made.x[i]};
      }).filter(({made, x: own}) => own !== undefined && (made.style !== "dots" || Math.abs(apart(one, own, x)) < 10));
      if (!near.length) return "";
      const head = near.reduce((best, next) => Math.abs(next.x - x) < Math.abs(best.x - x) ? next : best).x;
      const rows = near.map(({made, i, x: own}) =>
        `${made.name} ${exact(made.y[i])}${own === head ? "" : ` (${at(own)})`}`.trim());
      const marked = chart.marks.filter(([own, words]) => words && Math.abs(apart(one, own, x)) < 6).map(([, words]) => words);
      return tip(at(head), [...rows, ...marked]);
    };
    const made = base(look);
    return {
      ...made, ...zoom(look, 0), legend,
      tooltip: {...made.tooltip, trigger: "axis", formatter: tell},
      grid: {left: 4, right: 12, top, bottom: chart.x.name ? 22 : 4, outerBoundsMode: "same", outerBoundsContain: "axisLabel"},
      xAxis: across(chart.x, look),
      yAxis: axis(look, {
        type: log ? "log" : "value", scale: true, splitNumber: 4, axisLabel: {formatter: ticks.number},
        min: log ? null : (of) => of.min >= 0 && of.min < 0.4 * of.max ? 0 : null,
      }),
      series: shown,
    };
  };
  const nearest = (places, x) => {
    let low = 0, high = places.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (places[middle] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - places[low - 1] < places[low] - x ? low - 1 : low;
  };
  const apart = (one, a, b) => {
    const scale = one.chart.x.kind === "time" ? 1000 : 1, place = (v) => one.drawing.convertToPixel({xAxisIndex: 0}, v * scale);
    return place(a) - place(b);
  };

  const heat = ({chart, plot}, look, wide) => {
    const every = Math.ceil(15 * chart.rows.length / Math.max(parseFloat(plot.style.height) - 106, 15)) - 1;  // 15 pixels a label
    const [low, high] = chart.limits, form = forms[chart.form], made = base(look);
    const named = new Map(chart.named.map(([i, j, words]) => [`${i} ${j}`, words])), data = [];
    chart.values.forEach((row, i) => row.forEach((value, j) => {
      if (value === null) return;
      const at = [j, i, Math.min(Math.max(value, low), high)], words = named.get(`${i} ${j}`);
      data.push(words === undefined ? at : {
        value: at, itemStyle: {borderColor: "#fff", borderWidth: 2, shadowColor: "#000", shadowBlur: 3},
        label: {show: true, color: "#fff", textBorderColor: "#000", textBorderWidth: 3, formatter: () => words},
      });
    }));
    const whole = chart.x.ticks === null;
    return {
      ...made, ...zoom(look, [0, 1]),
      tooltip: {...made.tooltip, trigger: "item", formatter: ({data: found}) => {
        const [j, i] = found.value || found;
        return tip(`${chart.y} ${chart.rows[i]}, ${chart.columns[j]}`.trim(), [form(chart.values[i][j]), named.get(`${i} ${j}`)]);
      }},
      grid: {
        left: 4, right: 12, top: 22, bottom: 62, outerBoundsMode: "same", outerBoundsContain: "axisLabel", show: true,
        backgroundColor: look.empty, borderWidth: 0,
      },
      xAxis: [
        axis(look, {type: "category", data: chart.columns, splitLine: {show: false}, position: "bottom", name: whole ? "" : chart.x.name,
                    nameLocation: "middle", nameGap: 26, axisLabel: {
                      show: !whole, interval: chart.columns.length > 12 ? "auto" : 0, overflow: "truncate",
                      width: Math.max(wide / chart.columns.length - 8, 30),
                    }}),
        {...across(chart.x, look), ...(whole ? {} : {show: false}), position: "bottom", offset: 0},
      ],
      yAxis: axis(look, {type: "category", data: chart.rows, inverse: true, splitLine: {show: false}, name: chart.y, nameLocation: "start",
                         nameGap: 6, axisLabel: {interval: every, width: 150, overflow: "truncate"}}),
      visualMap: {
        type: "continuous", min: low, max: high > low ? high : low + 1, dimension: 2, seriesIndex: 0, calculable: true, orient: "horizontal",
        left: 0, bottom: 0, itemWidth: 10, itemHeight: Math.min(200, wide / 2), formatter: (v) => form(Number(v.toPrecision(5))), inRange: {color: look[chart.scale]},
        textStyle: text(look), precision: 6, handleStyle: {borderColor: look.quiet, color: look.sheet},
      },
      series: [
        {type: "heatmap", data, emphasis: {disabled: true}, progressive: 0},
        {type: "line", xAxisIndex: 1, data: [], markLine: marks(chart, look, wide, "start")},
      ],
    };
  };

  const parallel = ({chart}, look) => {
    const last = chart.rows.map((row) => row.at(-1)), low = Math.min(...last), high = Math.max(...last), made = base(look);
    const order = chart.rows.map((_, i) => i).sort((a, b) => (a === chart.best) - (b === chart.best));  // the best one is on top
    return {
      ...made, tooltip: {...made.tooltip, trigger: "item", formatter: ({name}) => tip(name, [])},
      parallel: {left: 90, right: 90, top: 44, bottom: 20},
      parallelAxis: chart.axes.map((one, dim) => axis(look, {
        dim, name: one.name, type: one.kind, ...(one.kind === "category" ? {data: one.words} : {scale: true}), axisLine: {lineStyle: {color: look.quiet}},
        nameGap: 18, nameTextStyle: {...text(look), color: look.ink}, areaSelectStyle: {color: look.series[0], opacity: 0.25},
        axisTick: one.ticks.length ? {customValues: one.ticks} : {},
        axisLabel: {
          formatter: one.kind === "category" ? (word) => word : exact, width: 130, overflow: "truncate", textBorderColor: look.sheet,
          textBorderWidth: 3, ...(one.ticks.length ? {customValues: one.ticks} : {}),
        },
      })),
      series: [{
        type: "parallel", inactiveOpacity: 0.06, activeOpacity: 1, emphasis: {disabled: true},
        data: order.map((i) => ({
          value: chart.rows[i], name: chart.names[i],
          lineStyle: {
            color: i === chart.best ? look.ink : color(look.thin, high > low ? (last[i] - low) / (high - low) : 0.5),
            width: i === chart.best ? 4 : 1.4, opacity: 1,
          },
        })),
      }],
    };
  };
  const color = (stops, share) => echarts.color.lerp(share, stops);
  const kinds = {lines, heat, parallel};

  // Data, as it is or changed: zoom, hidden series and values under the pointer stay.
  const take = (one, source) => {
    one.source = source;
    one.chart = JSON.parse(source);
    one.points = (one.chart.series || []).map((made) => {
      const known = made.y.map((y, i) => i).filter((i) => made.y[i] !== null);
      return {...made, x: known.map((i) => made.x[i]), y: known.map((i) => made.y[i])};
    });
    show(one);
    if (one.zoom) range(one, one.zoom);
  };
  const show = (one) => {
    one.drawing.setOption(kinds[one.chart.kind](one, palette(), one.wide - 60), {replaceMerge: ["series"]});
  };

  // Zoom: [from, to] in the unit of x, or null for all; charts of the same axis follow.
  const unit = ({x}) => x.kind === "log" ? [Math.log, Math.exp] : [Number, Number];
  const range = (one, wanted) => {
    const [to] = unit(one.chart), [low, high] = one.chart.x.ends.map(to);
    const [start, end] = (wanted || one.chart.x.ends).map((v) => 100 * (to(v) - low) / ((high - low) || 1));
    one.zoom = wanted;
    one.quiet = true;
    one.drawing.dispatchAction({type: "dataZoom", start, end});
    one.quiet = false;
    one.reset.hidden = !wanted;
  };
  const zoomed = (one) => {
    if (one.quiet) return;
    const {start, end} = one.drawing.getOption().dataZoom[0], [to, from] = unit(one.chart), [low, high] = one.chart.x.ends.map(to);
    const wanted = start <= 0 && end >= 100 ? null : [start, end].map((part) => from(low + part / 100 * (high - low)));
    together(one, wanted);
  };
  const together = (one, wanted) => {
    const key = ({chart}) => chart.x && JSON.stringify([chart.x.name, chart.x.ends]);
    for (const other of charts.values()) if (key(other) === key(one)) range(other, wanted);
    document.dispatchEvent(new CustomEvent("raydist:zoom", {detail: {name: one.chart.x.name, range: wanted}}));
  };

  const keys = (one, event) => {
    const {chart, drawing} = one;
    if (event.ctrlKey || event.altKey || event.metaKey || chart.kind === "parallel") return;
    const [low, high] = one.zoom || chart.x.ends, middle = (low + high) / 2, half = (high - low) / 2;
    const cut = (a, b) => {
      const [from, to] = [Math.max(a, chart.x.ends[0]), Math.min(b, chart.x.ends[1])];
      together(one, from <= chart.x.ends[0] && to >= chart.x.ends[1] ? null : [from, to]);
    };
    if (event.key === "+") cut(middle - half / 2, middle + half / 2);
    else if (event.key === "-") cut(middle - half * 2, middle + half * 2);
    else if (event.key === "Escape" || event.key === "0") together(one, null);
    else if (event.key === "PageUp" && one.zoom) cut(low - half, Math.max(high - half, chart.x.ends[0] + half));
    else if (event.key === "PageDown" && one.zoom) cut(Math.min(low + half, chart.x.ends[1] - half), high + half);
    else if (/^[1-9]$/.test(event.key) && chart.series?.[event.key - 1]) {
      drawing.dispatchAction({type: "legendToggleSelect", name: chart.series[event.key - 1].name});
    } else if (/^Arrow(Left|Right)$/.test(event.key) && one.points?.[0]?.x.length) {
      const {x} = one.points[0], step = event.key === "ArrowLeft" ? -1 : 1;
      one.cursor = Math.min(Math.max((one.cursor ?? nearest(x, middle)) + step, 0), x.length - 1);
      const scale = chart.x.kind === "time" ? 1000 : 1, at = drawing.convertToPixel({xAxisIndex: 0}, x[one.cursor] * scale);
      drawing.dispatchAction({type: "showTip", x: at, y: one.plot.clientHeight / 2});
      one.told.textContent = [...one.plot.querySelectorAll(".tip div")].map((line) => line.textContent).join(", ");
    } else return;
    event.preventDefault();
  };

  // The drawing with its title, as it is on the page; made in the browser, nothing is sent.
  const save = (one, name) => {
    const look = palette(), canvas = document.createElement("canvas"), brush = canvas.getContext("2d"), room = 64;
    const drawn = one.drawing.getRenderedCanvas({pixelRatio: 2, backgroundColor: look.sheet});
    canvas.width = drawn.width;
    canvas.height = drawn.height + room;
    brush.fillStyle = look.sheet;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.fillStyle = look.ink;
    brush.font = `600 28px ${look.font}`;
    brush.fillText(one.figure.querySelector("figcaption").innerText.replace(/\s+/g, " ").trim(), 12, 42, canvas.width - 24);
    brush.drawImage(drawn, 0, room);
    canvas.toBlob((blob) => {
      const link = document.createElement("a"), page = document.querySelector("h1")?.firstChild?.textContent || "chart";
      link.href = URL.createObjectURL(blob);
      link.download = `${page} ${name}.png`.replace(/[^\w.-]+/g, "-");
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    }, "image/png");
  };

  const sizes = new ResizeObserver((seen) => {
    for (const {target} of seen) {
      const one = charts.get(target.closest("figure"));
      if (one && target.clientWidth && target.clientWidth !== one.wide) {
        one.wide = target.clientWidth;
        one.drawing.resize();
        show(one);
      }
    }
  });
  const source = (figure) => figure.querySelector("script").textContent;
  const draw = (figure) => {
    const plot = figure.querySelector(".plot"), name = figure.dataset.name;
    plot.replaceChildren();
    const kind = JSON.parse(source(figure)), sharp = kind.kind === "heat" ? devicePixelRatio : Math.max(devicePixelRatio, 2);  // on paper
    const drawing = echarts.init(plot, null, {devicePixelRatio: sharp});
    const one = {figure, plot, drawing, wide: plot.clientWidth, zoom: null, selected: {}, log: false};
    const tools = document.createElement("div");
    const button = (label, words, press) => {
      const made = document.createElement("button");
      made.type = "button";
      made.textContent = label;
      made.setAttribute("aria-label", words);
      made.title = words;
      made.addEventListener("click", () => press(made));
      tools.append(made);
      return made;
    };
    tools.className = "tools";
    one.told = document.createElement("span");
    one.told.className = "told";
    one.told.setAttribute("role", "status");
    one.reset = button("all", `all of ${name}`, () => together(one, null));
    one.reset.hidden = true;
    if (kind.kind === "lines") {
      one.log = kind.log;
      button("log", `log axis of ${name}`, (made) => {
        one.log = !one.log;
        made.setAttribute("aria-pressed", one.log);
        show(one);
      }).setAttribute("aria-pressed", one.log);
    }
    button("PNG", `save ${name} as PNG`, () => save(one, name));
    tools.append(one.told);
    figure.prepend(tools);
    charts.set(figure, one);
    take(one, source(figure));
    drawing.on("datazoom", () => zoomed(one));
    drawing.on("legendselectchanged", ({selected}) => { one.selected = selected; });
    drawing.getZr().on("dblclick", () => { if (kind.x) together(one, null); });
    if (kind.x && !matchMedia("(pointer: coarse)").matches) {  // fingers scroll the page
      drawing.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true});
    }
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => keys(one, event));
    sizes.observe(plot);
  };

  // Of a page's part that is replaced by a newer one: charts that are in both stay, with the newer data.
  const keep = (old, fresh) => {
    const known = new Map([...old.querySelectorAll("figure[data-name]")].map((figure) => [figure.dataset.name, figure]));
    for (const next of fresh.querySelectorAll("figure[data-name]")) {
      const figure = known.get(next.dataset.name), one = charts.get(figure), newer = source(next);
      if (!one) continue;
      figure.querySelector("figcaption").replaceWith(next.querySelector("figcaption"));
      one.plot.setAttribute("aria-label", next.querySelector(".plot").getAttribute("aria-label"));
      one.plot.style.height = next.querySelector(".plot").style.height;
      next.replaceWith(figure);
      if (newer !== one.source) take(one, newer);
    }
  };
  // Each in a task of its own, so that the page can be read and scrolled meanwhile.
  const all = async (within) => {
    for (const [figure, one] of charts) {
      if (figure.isConnected) continue;
      one.drawing.dispose();
      sizes.unobserve(one.plot);
      charts.delete(figure);
    }
    for (const figure of within.querySelectorAll("figure[data-name]")) {
      if (charts.has(figure)) continue;
      draw(figure);
      await new Promise((go) => setTimeout(go));
    }
  };
  for (const media of ["(prefers-color-scheme: dark)", "print"]) {
    matchMedia(media).addEventListener("change", () => charts.forEach(show));
  }
  window.raydist = {all, keep, charts};
  all(document).then(() => { root.dataset.ready = "yes"; });
})();
