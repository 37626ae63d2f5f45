// Adds to each chart a button that saves it as a PNG: the drawing with the colours and fonts that it has on the page, its title and
// its legend, twice as large. Made in the browser; nothing is sent.
"use strict";
(() => {
  const SCALE = 2, PAD = 12, LINE = 20;
  const LOOKS = [
    "display", "fill", "fill-opacity", "font-family", "font-size", "font-weight", "opacity", "paint-order", "shape-rendering",
    "stroke", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "stroke-opacity", "stroke-width", "text-anchor",
  ];

  // The drawing alone, as an image: its style sheet is not part of it, so each element gets its look as attributes.
  const image = async (svg, wide, high) => {
    const copy = svg.cloneNode(true), copies = [copy, ...copy.querySelectorAll("*")];
    [svg, ...svg.querySelectorAll("*")].forEach((one, i) => {
      const look = getComputedStyle(one);
      for (const name of LOOKS) copies[i].setAttribute(name, look.getPropertyValue(name));
    });
    copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
    copy.setAttribute("width", wide * SCALE);
    copy.setAttribute("height", high * SCALE);
    for (const name of ["data-lines", "data-cells"]) copy.removeAttribute(name);
    const made = new Image();
    made.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
    await made.decode();
    return made;
  };

  // (words, colour or null, x, y) of the title and the legend, and the height that they take.
  const head = (brush, figure, wide) => {
    const font = getComputedStyle(document.body).fontFamily;
    const caption = figure.querySelector("figcaption"), found = [];
    brush.font = `600 14px ${font}`;
    found.push({words: caption.innerText.replace(/\s+/g, " ").trim(), font: brush.font, x: 0, y: LINE});
    brush.font = `13px ${font}`;
    let x = 0, y = LINE;
    for (const one of figure.querySelectorAll(".legend > *")) {
      const words = one.innerText.trim(), room = brush.measureText(words).width + 40;
      if (y === LINE || x + room > wide) [x, y] = [0, y + LINE];
      const look = getComputedStyle(one.querySelector(".swatch") || one);
      const colour = look.borderTopStyle === "none" ? look.backgroundColor : look.borderTopColor;
      found.push({words, colour, font: brush.font, x, y});
      x += room;
    }
    return {found, high: y + 8};
  };

  const picture = async (figure) => {
    const svg = figure.querySelector("svg"), {width: wide, height: high} = svg.viewBox.baseVal;
    const canvas = document.createElement("canvas"), brush = canvas.getContext("2d");
    const top = head(brush, figure, wide);
    canvas.width = (wide + 2 * PAD) * SCALE;
    canvas.height = (top.high + high + 2 * PAD) * SCALE;
    const section = getComputedStyle(figure.closest("section") || document.body);
    brush.fillStyle = section.backgroundColor;
    brush.fillRect(0, 0, canvas.width, canvas.height);
    brush.drawImage(await image(svg, wide, high), PAD * SCALE, (PAD + top.high) * SCALE);
    brush.scale(SCALE, SCALE);
    brush.translate(PAD, PAD);
    for (const one of top.found) {
      if (one.colour) {
        brush.fillStyle = one.colour;
        brush.fillRect(one.x, one.y - 6, 16, 3);
      }
      brush.fillStyle = section.color;
      brush.font = one.font;
      brush.fillText(one.words, one.x + (one.colour ? 22 : 0), one.y, wide);
    }
    return new Promise((done) => canvas.toBlob(done, "image/png"));
  };

  const save = async (figure, name) => {
    const link = document.createElement("a"), page = document.querySelector("h1")?.firstChild?.textContent || "chart";
    link.href = URL.createObjectURL(await picture(figure));
    link.download = `${page} ${name}.png`.replace(/[^\w.-]+/g, "-");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  };

  const offer = (root) => {
    for (const figure of root.querySelectorAll("figure.chart:has(svg)")) {
      const caption = figure.querySelector("figcaption"), button = document.createElement("button");
      const name = caption.firstChild.textContent.trim();
      button.type = "button";
      button.className = "save";
      button.textContent = "PNG";
      button.setAttribute("aria-label", `save ${name} as PNG`);
      button.addEventListener("click", () => save(figure, name));
      figure.prepend(button);
    }
  };
  offer(document);
  document.addEventListener("raydist:drawn", (event) => offer(event.target));
})();
