// What the figures of charts.py show, as options of Apache ECharts: axes, marks, legends, values under the pointer. chart.js draws them.
// Text of runs goes to the canvas, or is set as text; never as HTML.
"use strict";
const looks = (() => {
  // The colours of the page as it is now shown: light, dark or on paper.
  const palette = () => {
    const style = getComputedStyle(document.documentElement), list = (name) => style.getPropertyValue(`--${name}`).trim().split(/\s+/);
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
    if (seconds < 0.5) return seconds > 1e-6 ? `${Number((1000 * seconds).toPrecision(3))} ms` : "0";
    if (total < 60) return `${Number(seconds.toPrecision(3))} s`;
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
  // Vertical lines; a label only where there is room, first for the bad ones: on the right of its line, or near the end on the left.
  const marks = (chart, look, wide, top) => {
    const to = chart.x.kind === "log" ? Math.log : Number, scale = chart.x.kind === "time" ? 1000 : 1;
    const [low, high] = chart.x.ends.map(to), taken = [];
    const data = [...chart.marks].sort((a, b) => b[2] - a[2] || a[0] - b[0]).map(([x, words, bad]) => {
      const at = (to(x) - low) / (high - low) * wide, length = 7 * words.length + 8, left = at + length > wide + 20;
      const begin = left ? at - length : at, end = begin + length;
      const shown = words && begin >= 0 && !taken.some(([from, to]) => begin < to && end > from);
      if (shown) taken.push([begin, end]);
      const colour = bad ? look.bad : look.quiet;
      return {
        xAxis: x * scale, lineStyle: {color: colour, type: [3, 3]},
        label: {...text(look), show: Boolean(shown), formatter: () => words, position: top, align: left ? "right" : "left", color: colour},
      };
    }).reverse();  // the bad ones are on top
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
    const {chart, log} = one, points = known(chart), scale = chart.x.kind === "time" ? 1000 : 1;
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
      const near = points.filter((made) => one.selected[made.name] !== false).map((made) => {
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
  // The series without their gaps: what can be pointed at.
  const known = ({series}) => series.map((made) => {
    const at = made.y.map((y, i) => i).filter((i) => made.y[i] !== null);
    return {...made, x: at.map((i) => made.x[i]), y: at.map((i) => made.y[i])};
  });
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

  // All cells in one picture: as elements of the library, 25,000 cells would take thirty times as long, and so would each move of
  // the pointer over them. Twice as large as it is shown, for sharp screens and for paper.
  const picture = ({rows, columns, values, limits: [low, high], scale}, look, [from, to], {width, height}, [x, y, wide, tall]) => {
    const stops = look[scale].map((one) => echarts.color.parse(one));
    const cells = document.createElement("canvas"), shown = document.createElement("canvas");
    [cells.width, cells.height, shown.width, shown.height] = [columns.length, rows.length, 2 * width, 2 * height];
    const brush = cells.getContext("2d"), pixels = brush.createImageData(cells.width, cells.height);
    values.forEach((row, i) => row.forEach((value, j) => {
      const kept = Math.min(Math.max(value, low), high);
      if (value === null || kept < from || kept > to) return;
      const [red, green, blue] = echarts.color.fastLerp(high > low ? (kept - low) / (high - low) : 0, stops);
      pixels.data.set([red, green, blue, 255], 4 * (i * cells.width + j));
    }));
    brush.putImageData(pixels, 0, 0);
    const large = shown.getContext("2d");
    large.imageSmoothingEnabled = false;
    large.drawImage(cells, 2 * x, 2 * y, 2 * wide * columns.length, 2 * tall * rows.length);
    return shown;
  };
  const heat = (one, look, wide) => {
    const {chart, plot} = one, room = Math.max(parseFloat(plot.style.height) - 106, 15);
    const every = Math.ceil(15 * chart.rows.length / room) - 1;  // 15 pixels a label
    const [low, high] = chart.limits, form = forms[chart.form], made = base(look);
    const draw = ({coordSys: area}, api) => {
      const [wide, tall] = api.size([1, 1]), middle = (i, j) => api.coord([j, i]), [x, y] = middle(0, 0);
      const place = [x - wide / 2 - area.x, y - tall / 2 - area.y, wide, tall], {range} = one.drawing.getOption().visualMap[0];
      const frames = chart.named.map(([i, j, words]) => [middle(i, j), words])
        .filter(([[x, y]]) => x > area.x && x < area.x + area.width && y > area.y && y < area.y + area.height)
        .flatMap(([[x, y], words]) => [
          {type: "rect", shape: {x: x - wide / 2, y: y - tall / 2, width: wide, height: tall},
           style: {fill: "none", stroke: "#fff", lineWidth: 2, shadowColor: "#000", shadowBlur: 3}},
          {type: "text", style: {
            ...text(look), text: words, x, y, align: "center", verticalAlign: "middle", fill: "#fff", stroke: "#000", lineWidth: 3,
          }},
        ]);
      const {x: left, y: top, width, height} = area;
      return {type: "group", children: [
        {type: "image", style: {image: picture(chart, look, range, area, place), x: left, y: top, width, height}}, ...frames,
      ]};
    };
    const whole = chart.x.ticks === null;
    return {
      ...made, ...zoom(look, [0, 1]),
      tooltip: {...made.tooltip, trigger: "item", formatter: () => {
        const [j, i] = one.drawing.convertFromPixel({xAxisIndex: 0, yAxisIndex: 0}, one.pointer), value = chart.values[i]?.[j];
        const words = chart.named.find(([row, column]) => row === i && column === j)?.[2];
        if (value === undefined) return "";
        return tip(`${chart.y} ${chart.rows[i]}, ${chart.columns[j]}`.trim(), [value === null ? "no value" : form(value), words]);
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
        type: "continuous", min: low, max: high > low ? high : low + 1, dimension: 2, seriesIndex: 0, hoverLink: false,
        calculable: true, orient: "horizontal", left: 0, bottom: 0, itemWidth: 10, itemHeight: Math.min(200, wide / 2), formatter: (v) => form(Number(v.toPrecision(5))), inRange: {color: look[chart.scale]},
        textStyle: text(look), precision: 6, handleStyle: {borderColor: look.quiet, color: look.sheet},
      },
      series: [
        {type: "custom", data: [[0, 0, low]], renderItem: draw, emphasis: {disabled: true}},
        {type: "line", xAxisIndex: 1, data: [], markLine: marks(chart, look, wide, "start")},
      ],
    };
  };

  const parallel = ({chart}, look) => {
    const last = chart.rows.map((row) => row.at(-1)), low = Math.min(...last), high = Math.max(...last), made = base(look);
    // 0.01 is no whole power of ten in floating point: a logarithmic axis would go on to the next one.
    const range = (one, dim) => ({
      category: {data: one.words}, value: {scale: true},
      log: {min: Math.min(...chart.rows.map((row) => row[dim])), max: Math.max(...chart.rows.map((row) => row[dim]))},
    })[one.kind];
    const order = chart.rows.map((_, i) => i).sort((a, b) => (a === chart.best) - (b === chart.best));  // the best one is on top
    return {
      ...made, tooltip: {...made.tooltip, trigger: "item", formatter: ({name}) => tip(name, [])},
      parallel: {left: 90, right: 90, top: 44, bottom: 20},
      parallelAxis: chart.axes.map((one, dim) => axis(look, {
        dim, name: one.name, type: one.kind, ...range(one, dim), axisLine: {lineStyle: {color: look.quiet}},
        nameGap: 18, nameTextStyle: {...text(look), color: look.ink}, areaSelectStyle: {color: look.series[0], opacity: 0.25},
        axisTick: one.ticks.length ? {customValues: one.ticks} : {},
        axisLabel: {
          formatter: one.kind === "category" ? (word) => word : exact, width: 130, overflow: "truncate", textBorderColor: look.sheet,
          textBorderWidth: 3, ...(one.ticks.length ? {customValues: one.ticks} : {}),
          ...(dim || one.kind === "category" ? {} : {margin: -8, align: "right"}),  // left of the first axis there are no lines
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

  // The same as a table.
  const table = {
    lines: ({x, series}) => [
      ["series", x.name || "x", "value"], ...series.flatMap((made) => made.x.map((at, i) => [made.name, at, made.y[i]])),
    ],
    heat: ({x, y, rows, columns, values, form}) => [
      [y || "row", x.name || "column", {mib: "MiB", percent: "share", power: "factor"}[form] || "value"],
      ...values.flatMap((row, i) => row.map((value, j) => [rows[i], columns[j], form === "power" && value !== null ? 2 ** value : value])),
    ],
    parallel: ({axes, rows, names}) => [
      ["name", ...axes.map((one) => one.name)],
      ...rows.map((row, i) => [names[i], ...row.map((value, j) => axes[j].words[value] ?? value)]),
    ],
  };
  // A spreadsheet takes text that begins so for a formula.
  const word = (text) => `"${(/^[=+@\t\r-]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
  const cell = (value) => typeof value === "string" ? word(value) : value ?? "";
  const csv = (chart) => table[chart.kind](chart).map((row) => `${row.map(cell).join()}\n`).join("");

  const options = (one) => ({lines, heat, parallel})[one.chart.kind](one, palette(), one.wide - 60);
  return {csv, known, nearest, options, palette};
})();
