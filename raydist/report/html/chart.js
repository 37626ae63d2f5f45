// Draws the figures that charts.py has written, with Apache ECharts, when they come near the part of the page that is seen; zoom, keys,
// PNG and CSV. looks.js says what is drawn.
"use strict";
(() => {
  const root = document.documentElement, charts = new Map();  // figure -> its data, and what is drawn in it

  // Data, as it is or changed: zoom, hidden series and values under the pointer stay.
  const take = (one, source) => {
    one.source = source;
    one.chart = JSON.parse(source);
    one.stale = true;
    draw();
  };
  const show = (one) => {
    if (!one.plot.clientWidth) return;  // in a part that is folded
    const first = !one.drawing;
    if (first) begin(one);
    one.stale = false;
    one.drawing.setOption(looks.options(one), {replaceMerge: ["series"]});
    if (one.zoom) range(one, one.zoom);
    if (first && one.chart.x && !matchMedia("(pointer: coarse)").matches) {  // fingers scroll the page
      one.drawing.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true});
    }
  };
  const current = (one) => one.stale && show(one);

  // What is near: first what is seen, each in a task of its own, so that the page can be read and scrolled meanwhile.
  const seen = ({figure}) => {
    const {top, bottom} = figure.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  };
  let drawing = false;
  const draw = async () => {
    if (drawing) return;
    drawing = true;
    try {
      for (;;) {
        const due = [...charts.values()].filter((one) => one.near && one.stale && one.plot.clientWidth);
        if (!due.length) break;
        show(due.find(seen) || due[0]);
        await new Promise((go) => setTimeout(go));
      }
    } finally {
      drawing = false;
    }
    if ([...charts.values()].every((one) => "near" in one)) root.dataset.ready = "yes";
  };
  const near = new IntersectionObserver((found) => {
    for (const {target, isIntersecting} of found) if (charts.has(target)) charts.get(target).near = isIntersecting;
    draw();
  }, {rootMargin: "75% 0px"});

  // Zoom: [from, to] in the unit of x, or null for all; charts of the same axis follow.
  const unit = ({x}) => x.kind === "log" ? [Math.log, Math.exp] : [Number, Number];
  const range = (one, wanted) => {
    const [to] = unit(one.chart), [low, high] = one.chart.x.ends.map(to);
    const [start, end] = (wanted || one.chart.x.ends).map((v) => 100 * (to(v) - low) / ((high - low) || 1));
    one.zoom = wanted;
    one.quiet = true;
    one.drawing?.dispatchAction({type: "dataZoom", start, end});
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

  // Where the next point of the first line, or the next cell, is drawn. At first: the point in the middle, the cell in the corner.
  const ARROWS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};
  const next = (one, [right, down], middle) => {
    const {chart, drawing} = one, kept = (i, size) => Math.min(Math.max(i, 0), size - 1);
    if (chart.kind === "heat") {
      const [j, i] = one.cursor ?? [-right, -down];
      one.cursor = [kept(j + right, chart.columns.length), kept(i + down, chart.rows.length)];
      return drawing.convertToPixel({xAxisIndex: 0, yAxisIndex: 0}, one.cursor);
    }
    const x = looks.known(chart)[0]?.x;
    if (down || !x?.length) return null;
    one.cursor = kept((one.cursor ?? looks.nearest(x, middle)) + right, x.length);
    return [drawing.convertToPixel({xAxisIndex: 0}, x[one.cursor] * (chart.x.kind === "time" ? 1000 : 1)), one.plot.clientHeight / 2];
  };
  const keys = (one, event) => {
    current(one);
    const {chart, drawing} = one;
    if (!drawing || event.ctrlKey || event.altKey || event.metaKey || chart.kind === "parallel") return;
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
    } else if (event.key in ARROWS && (one.pointer = next(one, ARROWS[event.key], middle))) {
      drawing.dispatchAction({type: "showTip", x: one.pointer[0], y: one.pointer[1]});
      one.status.textContent = [...one.plot.querySelectorAll(".tip div")].map((line) => line.textContent).join(", ");
    } else return;
    event.preventDefault();
  };

  // Files are made in the browser, nothing is sent.
  const save = (blob, name) => {
    const link = document.createElement("a"), page = document.querySelector("h1")?.firstChild?.textContent || "chart";
    link.href = URL.createObjectURL(blob);
    link.download = `${page} ${name}`.replace(/[^\w.-]+/g, "-");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };
  // The drawing with its title, as it is on the page.
  const picture = (one, done) => {
    current(one);
    const look = looks.palette(), canvas = document.createElement("canvas"), brush = canvas.getContext("2d"), room = 64;
    const drawn = one.drawing.getRenderedCanvas({pixelRatio: 2, backgroundColor: look.sheet});
    canvas.width = drawn.width;
    canvas.height = drawn.height + room;
    brush.fillStyle = look.sheet;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.fillStyle = look.ink;
    brush.font = `600 28px ${look.font}`;
    brush.fillText(one.figure.querySelector("figcaption").innerText.replace(/\s+/g, " ").trim(), 12, 42, canvas.width - 24);
    brush.drawImage(drawn, 0, room);
    canvas.toBlob(done, "image/png");
  };

  const sizes = new ResizeObserver((found) => {
    for (const {target} of found) {
      const one = charts.get(target.closest("figure"));
      if (!one?.drawing || !target.clientWidth || target.clientWidth === one.wide && target.clientHeight === one.tall) continue;
      [one.wide, one.tall] = [target.clientWidth, target.clientHeight];
      one.drawing.resize();
      one.stale = true;
    }
    draw();
  });
  const source = (figure) => figure.querySelector("script").textContent;
  // Its buttons and keys; the drawing follows when it comes near.
  const prepare = (figure) => {
    const plot = figure.querySelector(".plot"), name = figure.dataset.name, tools = document.createElement("div");
    const one = {figure, plot, drawing: null, zoom: null, selected: {}, pointer: [0, 0]};
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
    one.status = document.createElement("span");
    one.status.className = "spoken";
    one.status.setAttribute("role", "status");
    one.reset = button("all", `all of ${name}`, () => together(one, null));
    one.reset.hidden = true;
    charts.set(figure, one);
    take(one, source(figure));
    one.log = one.chart.kind === "lines" && one.chart.log;
    if (one.chart.kind === "lines") {
      button("log", `log axis of ${name}`, (made) => {
        one.log = !one.log;
        made.setAttribute("aria-pressed", one.log);
        show(one);
      }).setAttribute("aria-pressed", one.log);
    }
    button("PNG", `save ${name} as PNG`, () => picture(one, (blob) => save(blob, `${name}.png`)));
    button("CSV", `save ${name} as CSV`, () => save(new Blob([looks.csv(one.chart)], {type: "text/csv"}), `${name}.csv`));
    tools.append(one.status);
    figure.prepend(tools);
    plot.tabIndex = 0;
    plot.addEventListener("keydown", (event) => keys(one, event));
    near.observe(figure);
  };
  const begin = (one) => {
    const {plot} = one;
    plot.replaceChildren();
    const drawing = one.drawing = echarts.init(plot, null, {devicePixelRatio: Math.max(devicePixelRatio, 2)});  // also on paper
    [one.wide, one.tall] = [plot.clientWidth, plot.clientHeight];
    drawing.on("datazoom", () => zoomed(one));
    drawing.on("legendselectchanged", ({selected}) => { one.selected = selected; });
    drawing.getZr().on("mousemove", ({offsetX, offsetY}) => { one.pointer = [offsetX, offsetY]; });
    drawing.getZr().on("dblclick", () => { if (one.chart.x) together(one, null); });
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
  const all = (within) => {
    for (const [figure, one] of charts) {
      if (figure.isConnected) continue;
      one.drawing?.dispose();
      sizes.unobserve(one.plot);
      near.unobserve(figure);
      charts.delete(figure);
    }
    for (const figure of within.querySelectorAll("figure[data-name]")) if (!charts.has(figure)) prepare(figure);
  };
  const whole = () => charts.forEach(current);
  const recolour = (then) => {
    charts.forEach((one) => { one.stale = true; });
    then();
  };
  addEventListener("beforeprint", whole);
  matchMedia("print").addEventListener("change", () => recolour(whole));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => recolour(draw));
  window.raydist = {all, keep, charts, seen, whole};
  all(document);
  draw();
})();
