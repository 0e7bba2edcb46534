// How a reader moves a figure: fields, the numbers and the picture that follow them, and the table.
"use strict";

window.moved = (() => {
  const make = (create) => (tag, attributes = {}, ...children) => {
    const node = create(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };
  const html = make((tag) => document.createElement(tag));
  const svg = make((tag) => document.createElementNS("http://www.w3.org/2000/svg", tag));

  // Fields: native controls, so that keys and screen readers work.
  const range = (label, min, max, step, value, say = String) =>
    Object.assign(html("input", { type: "range", min, max, step, value }), { label, say });
  const choice = (label, names, value = names[0]) => {
    const field = html("select", {}, ...names.map((name) => new Option(name, name)));
    return Object.assign(field, { value, label });
  };
  const tick = (label, checked) =>
    Object.assign(html("input", { type: "checkbox" }), { checked, label });
  const read = (field) =>
    ({ checkbox: field.checked, range: Number(field.value) })[field.type] ?? field.value;

  let count = 0;
  function control(field) {
    field.id = `moe-move-${++count}`;
    const label = html("label", { for: field.id }, field.label);
    if (field.type === "checkbox") return html("div", { class: "tick" }, field, label);
    if (field.type !== "range") return html("div", {}, label, field);
    return html("div", {}, label, html("output", { for: field.id, "aria-live": "off" }), field);
  }

  // Put the fields, the numbers and the picture before the table. `show` gets the fields' values and
  // the width in pixels, and returns the numbers by label and the picture's [height, ...marks].
  function stage(box, title, fields, show, changed = () => {}) {
    const panel = html("div", { class: "moe-fields", role: "group", "aria-label": title });
    const told = html("dl", { "aria-live": "polite" });
    const picture = svg("svg", { role: "img", "aria-label": title });
    const frame = html("div", { class: "moe-picture" }, picture);
    // On paper there are no fields: the caption says where they stand.
    const caption = html("figcaption", { class: "moe-paper" });
    const stands = (field) => {
      if (field.type === "checkbox") return `${field.label}: ${field.checked ? "yes" : "no"}`;
      return `${field.label}: ${field.type === "range" ? field.say(Number(field.value)) : field.value}`;
    };
    const render = () => {
      for (const field of Object.values(fields)) {
        if (field.type !== "range") continue;
        field.previousSibling.textContent = field.say(Number(field.value));
        field.setAttribute("aria-valuetext", field.say(Number(field.value)));
      }
      const values = Object.fromEntries(Object.entries(fields).map(([k, f]) => [k, read(f)]));
      const width = Math.max(280, frame.clientWidth);
      const [numbers, [height, ...marks]] = show(values, width);
      told.replaceChildren(...Object.entries(numbers).map(([label, text]) =>
        html("div", {}, html("dt", {}, label), html("dd", {}, ...[text].flat()))));
      const size = { width, height, viewBox: `0 0 ${width} ${height}` };
      for (const [name, value] of Object.entries(size)) picture.setAttribute(name, value);
      picture.replaceChildren(...marks);
      caption.textContent = `${title}. Shown with ${Object.values(fields).map(stands).join("; ")}.`;
    };
    panel.append(...Object.values(fields).map(control));
    panel.addEventListener("input", (event) => {
      changed(Object.keys(fields).find((name) => fields[name] === event.target));
      render();
    });
    const table = box.querySelector("table");
    const folded = html("details", {}, html("summary", {}, "The numbers as a table"));
    (table.closest(".pst-scrollable-table-container") ?? table).replaceWith(folded);
    folded.append(table);
    folded.before(panel, told, frame, caption);
    new ResizeObserver(render).observe(frame);
    render();
  }

  // Parts of pictures.
  const text = (x, y, words, attributes = {}) => svg("text", { x, y, ...attributes }, words);
  const bar = (x, y, width, height, kind) =>
    svg("rect", { x, y, width: Math.max(0, width), height, class: kind });
  const line = (x1, y1, x2, y2, kind) => svg("line", { x1, y1, x2, y2, class: kind });

  // Bring the figures of a name to life: <figure data-move="name"> holds a table and its numbers.
  const start = (name, figure) => {
    for (const box of document.querySelectorAll(`[data-move="${name}"]`)) {
      const numbers = box.querySelector('script[type="application/json"]');
      figure(box, numbers && JSON.parse(numbers.textContent));
    }
  };

  return { html, svg, text, bar, line, range, choice, tick, read, stage, start };
})();
