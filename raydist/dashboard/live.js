// Keeps a page of the dashboard up to date: the server sends the parts that have changed, and they are replaced; charts stay, and get
// the newer data.
// What it inserts was escaped by the server; scripts in it would not run, by the page's Content-Security-Policy.
"use strict";
(() => {
  const main = document.querySelector("main[data-version]");
  if (!main) return;
  const state = document.getElementById("live");
  let version = main.dataset.version, ended = "ended" in main.dataset;
  const say = (words) => {
    if (state.textContent !== words) state.textContent = words;  // a screen reader tells each change
  };

  const stops = "a, summary, input, select, button, [tabindex]";
  const replace = (old, fresh) => {
    const open = [...old.querySelectorAll("details")].map((one) => one.open);
    const moved = [...old.querySelectorAll(".wide, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
    const at = [...old.querySelectorAll(stops)].indexOf(document.activeElement);
    raydist.keep(old, fresh);
    old.replaceWith(fresh);
    raydist.all(fresh);
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
        raydist.all(fresh);
      }
    }
    for (const one of [...main.children]) if (!answer.order.includes(one.id)) one.remove();
    answer.order.forEach((id, i) => {
      const one = document.getElementById(id);
      if (main.children[i] !== one) main.insertBefore(one, main.children[i]);
    });
    document.title = answer.title;
    filter();
  };

  // While text is selected, nothing moves.
  let waiting = null;
  const settle = () => {
    if (!waiting || !getSelection().isCollapsed) return;
    draw(waiting);
    waiting = null;
  };
  document.addEventListener("selectionchange", settle);

  // One stream for a tab that is seen, none for a hidden one. The browser itself connects again, with the last version it got.
  let source = null;
  const stop = () => {
    source?.close();
    source = null;
  };
  const well = () => say(ended ? "" : "live");
  const refused = async () => {
    const {status} = await fetch(location.href, {method: "HEAD", cache: "no-store"}).catch(() => ({status: 0}));
    const why = {401: "This address has expired: open the one that raydist dashboard prints.", 404: "This is no longer in the storage."};
    say(why[status] || "The dashboard does not answer; trying again.");
    setTimeout(follow, 10000);
  };
  const follow = () => {
    if (document.hidden) return stop();
    if (source) return;
    const address = new URL(location.href);
    address.searchParams.set("since", version);
    source = new EventSource(address);
    source.onopen = well;
    source.onmessage = (event) => {
      const news = JSON.parse(event.data);
      version = main.dataset.version = event.lastEventId;
      ended = news.ended;
      waiting = {...news, parts: {...waiting?.parts, ...news.parts}};
      settle();
      well();
    };
    source.onerror = () => {
      if (source.readyState !== EventSource.CLOSED) return say("The dashboard does not answer; trying again.");
      stop();
      refused();
    };
  };
  document.addEventListener("visibilitychange", follow);

  // The steps that are seen are those of the form, which shows them in full detail, at an address that can be sent to others.
  document.addEventListener("raydist:zoom", ({detail: {name, range}}) => {
    const form = document.getElementById("view");
    if (name !== "step" || !form) return;
    const {first, last} = form.elements;
    first.value = range ? Math.max(Math.floor(range[0]), 1) : first.defaultValue;
    last.value = range ? Math.max(Math.ceil(range[1]), 1) : last.defaultValue;
  });

  // Actions, where the server allows them: asked twice, and sent with this page's Origin.
  main.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-act]");
    if (!button || !confirm(button.dataset.ask)) return;
    const answered = document.getElementById("action-answer");
    button.disabled = true;
    try {
      const answer = await fetch(`${location.pathname}/${button.dataset.act}`, {method: "POST", cache: "no-store"});
      const json = answer.headers.get("Content-Type")?.startsWith("application/json");
      answered.textContent = json ? (await answer.json()).message : `The dashboard has refused it (${answer.status}).`;
    } catch {
      answered.textContent = "The dashboard does not answer; nothing was asked.";
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
  follow();
})();
