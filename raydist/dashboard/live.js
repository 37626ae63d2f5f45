// Keeps a page of the dashboard up to date: asks for the parts that have changed, and replaces them.
// What it inserts was escaped by the server; scripts in it would not run, by the page's Content-Security-Policy.
"use strict";
(() => {
  const main = document.querySelector("main[data-version]");
  if (!main) return;
  const state = document.getElementById("live"), tip = document.getElementById("tip");
  let version = main.dataset.version, wait = 2000;
  const say = (words) => {
    if (state.textContent !== words) state.textContent = words;  // a screen reader tells each change
  };

  const stops = "a, summary, input, select, button, [tabindex]";
  const drawn = (fresh) => fresh.dispatchEvent(new CustomEvent("raydist:drawn", {bubbles: true}));
  const replace = (old, fresh) => {
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    const moved = [...old.querySelectorAll(".wide, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
    const at = [...old.querySelectorAll(stops)].indexOf(document.activeElement);
    old.replaceWith(fresh);
    drawn(fresh);  // before the focus is counted: charts get their buttons
    fresh.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
    fresh.querySelectorAll(".wide, pre").forEach((one, i) => {
      if (moved[i]) [one.scrollLeft, one.scrollTop] = moved[i];
    });
    if (at >= 0) fresh.querySelectorAll(stops)[at]?.focus({preventScroll: true});
  };
  const draw = (answer) => {
    for (const [id, text] of Object.entries(answer.parts)) {
      const box = document.createElement("template");
      box.innerHTML = text;
      const fresh = box.content.firstElementChild, old = document.getElementById(id);
      if (old) {
        replace(old, fresh);
      } else {
        main.append(fresh);
        drawn(fresh);
      }
    }
    for (const one of [...main.children]) if (!answer.order.includes(one.id)) one.remove();
    answer.order.forEach((id, i) => {
      const one = document.getElementById(id);
      if (main.children[i] !== one) main.insertBefore(one, main.children[i]);
    });
    version = main.dataset.version = answer.version;
    document.title = answer.title;
    filter();
  };

  // While values are shown under the pointer, or text is selected, nothing moves.
  const busy = () => document.hidden || drag || !tip.hidden || !getSelection().isCollapsed;
  const ask = async () => {
    if (busy()) return;
    const address = new URL(location.href);
    address.searchParams.set("since", version);
    const answer = await fetch(address, {headers: {Accept: "application/json"}, cache: "no-store"});
    if (answer.status === 401) return say("This address has expired: open the one that raydist dashboard prints.");
    if (answer.status === 404) return say("This is no longer in the storage.");
    if (!answer.ok) throw new Error(answer.status);
    const told = await answer.json();
    wait = told.again_s * 1000;
    if (told.version !== version) draw(told);
    say(told.ended ? "" : "live");
  };
  const turn = async () => {
    try {
      await ask();
    } catch {
      wait = Math.min(wait * 2, 30000);
      say("The dashboard does not answer; trying again.");
    }
    setTimeout(turn, wait);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask().catch(() => {}); });

  // Dragging over a chart of steps chooses these steps, as the fields of the form do.
  let drag = null;
  const place = (event) => {
    const {svg, chart} = drag, [left, , right] = chart.box, [low, high] = chart.ends;
    const x = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    const share = Math.min(Math.max((x - left) / (right - left), 0), 1);
    return {x: left + share * (right - left), step: Math.round(low + share * (high - low))};
  };
  const drop = () => {
    drag?.mark.remove();
    drag = null;
  };
  main.addEventListener("pointerdown", (event) => {
    const svg = event.target.closest("svg[data-lines]");
    if (!svg || event.pointerType !== "mouse" || event.button !== 0 || !document.getElementById("view")) return;
    const chart = JSON.parse(svg.dataset.lines);
    if (chart.of !== "step") return;
    event.preventDefault();  // no text is selected
    const mark = document.createElementNS("http://www.w3.org/2000/svg", "path");
    mark.setAttribute("class", "zoom");
    svg.append(mark);
    drag = {svg, chart, mark};
    drag.from = place(event);
  });
  document.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [, top, , bottom] = drag.chart.box;
    drag.mark.setAttribute("d", `M${drag.from.x} ${top}H${place(event).x}V${bottom}H${drag.from.x}z`);
  });
  document.addEventListener("pointerup", (event) => {
    if (!drag) return;
    const from = drag.from, to = place(event), form = document.getElementById("view");
    drop();
    if (Math.abs(to.x - from.x) < 8) return;
    form.elements.first.value = Math.max(Math.min(from.step, to.step), 1);
    form.elements.last.value = Math.max(from.step, to.step, 1);
    form.submit();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") drop(); });

  // Actions, where the server allows them: asked twice, and sent with this page's Origin.
  main.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-act]");
    if (!button || !confirm(button.dataset.ask)) return;
    const told = document.getElementById("told");
    button.disabled = true;
    try {
      const answer = await fetch(`${location.pathname}/${button.dataset.act}`, {method: "POST", cache: "no-store"});
      const json = answer.headers.get("Content-Type")?.startsWith("application/json");
      told.textContent = json ? (await answer.json()).told : `The dashboard has refused it (${answer.status}).`;
    } catch {
      told.textContent = "The dashboard does not answer; nothing was asked.";
    }
    button.disabled = false;
  });

  // The list's filter: rows that contain every word. It is kept in the address, so that it can be sent to others.
  const words = document.getElementById("filter");
  const filter = () => {
    if (!words) return;
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of document.querySelectorAll("tr:has([data-filter])")) {
      const text = row.innerText.toLowerCase();
      row.hidden = !wanted.every((word) => text.includes(word));
    }
  };
  words?.addEventListener("input", () => {
    const address = new URL(location.href);
    if (words.value) address.searchParams.set("q", words.value); else address.searchParams.delete("q");
    history.replaceState(null, "", address);
    filter();
  });
  if (words) words.value = new URL(location.href).searchParams.get("q") || "";
  words?.form.addEventListener("submit", (event) => event.preventDefault());
  filter();
  setTimeout(turn, wait);
})();
