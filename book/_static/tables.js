// Filters for tables marked <table data-filters="paper verdict">, and a text where they have data-words.
// Without JavaScript every row shows.
"use strict";

function select(name, values, chosen, onchange) {
  const label = document.createElement("label");
  const field = document.createElement("select");
  label.append(name, field);
  for (const value of ["all", ...values]) field.append(new Option(value, value));
  field.value = values.includes(chosen) ? chosen : "all";
  field.addEventListener("change", onchange);
  return [label, field];
}

// What a claim says, without its fold, and what it is called.
function sentence(row) {
  const said = [...row.cells[0].childNodes].filter((node) => node.nodeName !== "DETAILS");
  return [row.id, ...said.map((node) => node.textContent)].join(" ").toLowerCase();
}

// A row may be of several kinds, such as a claim with a verdict at each scale: "holds|fails".
const told = (row, name) => row.dataset[name].split("|");

function filtered(table) {
  const names = table.dataset.filters.split(" ");
  const rows = [...table.tBodies[0].rows];
  const bar = document.createElement("div");
  const count = document.createElement("output");
  const box = table.closest(".moe-long");
  const fields = {};
  const asked = new URLSearchParams(location.search);
  const search = document.createElement("input");
  search.type = "search";
  search.value = (table.dataset.words && asked.get("words")) ?? "";

  const show = () => {
    let shown = 0;
    const words = search.value.toLowerCase().split(/\s+/);
    for (const row of rows) {
      const said = words.every((word) => sentence(row).includes(word));
      const chosen = names.every((name) => ["all", ...told(row, name)].includes(fields[name].value));
      row.hidden = !said || !chosen;
      shown += !row.hidden;
    }
    const more = box && box.scrollHeight > box.clientHeight + 1;
    count.textContent = `${shown} of ${rows.length} ${table.dataset.rows} shown${more ? "; scroll the table for more" : ""}`;
    table.dispatchEvent(new Event("filtered"));
  };

  // What is chosen stands in the address, so that a way back leads to the same rows.
  const choose = () => {
    const address = new URL(location);
    for (const name of names) {
      if (fields[name].value === "all") address.searchParams.delete(name);
      else address.searchParams.set(name, fields[name].value);
    }
    if (search.value) address.searchParams.set("words", search.value);
    else address.searchParams.delete("words");
    history.replaceState(null, "", address);
    show();
  };

  bar.className = "moe-filters";
  for (const name of names) {
    const values = [...new Set(rows.flatMap((row) => told(row, name)))];
    const [label, field] = select(name, values, asked.get(name), choose);
    fields[name] = field;
    bar.append(label);
  }
  if (table.dataset.words) {
    const label = document.createElement("label");
    label.append(table.dataset.words, search);
    search.addEventListener("input", choose);
    bar.append(label);
  }
  bar.append(count);
  const unknown = names.find((name) => asked.has(name) && fields[name].value !== asked.get(name));
  if (unknown) {
    const told = document.createElement("output");
    told.textContent = `no ${unknown} '${asked.get(unknown)}': all are shown`;
    bar.append(told);
  }
  // The table stands in a scrolling box, and that perhaps in one of the theme's: filters come before.
  (table.closest(".pst-scrollable-table-container") ?? table.closest(".moe-long") ?? table).before(bar);
  show();
  // A browser may set the menus to what was chosen before, after this.
  window.addEventListener("pageshow", show);
  // A link to a row that the address's filters hide would lead nowhere.
  const target = rows.find((row) => row.id && `#${row.id}` === location.hash);
  if (target?.hidden) {
    for (const name of names) fields[name].value = "all";
    search.value = "";
    show();
    target.scrollIntoView();
  }
}

document.querySelectorAll("table[data-filters]").forEach(filtered);

// A link to what a fold hides opens it.
const unfold = () => document.getElementById(location.hash.slice(1))?.closest("details")?.setAttribute("open", "");
window.addEventListener("hashchange", unfold);
unfold();

// One button folds all code of a notebook's page away, or shows it again.
const article = document.querySelector(".bd-article");
const cell = article?.querySelector(".cell_input")?.closest(".cell");
if (cell) {
  const button = document.createElement("button");
  button.className = "moe-fold";
  button.textContent = "Fold all code";
  button.addEventListener("click", () => {
    const folded = article.classList.toggle("moe-folded");
    button.textContent = folded ? "Show all code" : "Fold all code";
  });
  cell.before(button);
}

// The name of an option does not break behind its dashes.
for (const code of document.querySelectorAll(".highlight-console pre, .bd-article code .pre, table.moe code")) {
  const texts = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) found.push(texts.currentNode);
  for (const text of found) {
    const pieces = text.data.split(/(?<!\S)(--?[a-z][\w-]*)/);
    if (pieces.length === 1) continue;
    // Every second piece is an option.
    text.replaceWith(...pieces.map((piece, place) => {
      if (place % 2 === 0) return piece;
      const option = document.createElement("span");
      option.className = "moe-option";
      option.textContent = piece;
      return option;
    }));
  }
}

// A long name breaks behind a dot, a dash or an underscore, but no number does: in a table, a fold's title, a signature, or beside the page.
const narrow = [
  ".bd-article :is(table code, summary code) .pre:not(:has(*))",
  "dt.sig :is(.sig-prename, .sig-name, .n, .default_value) .pre:not(:has(*))",
  ":is(.bd-sidenav, .bd-sidebar-secondary) :is(a:not(:has(*)), .pre)",
].join();
for (const name of document.querySelectorAll(narrow)) {
  const pieces = name.textContent.split(/(?<=[._/-])(?<!\d[.]|\de-)(?=.)/);
  name.replaceChildren(...pieces.flatMap((piece, place) => (place ? [document.createElement("wbr"), piece] : [piece])));
}

// What a cell prints as a table, for a phone: a head of words has a least width, a long name breaks
// behind a mark, an estimate stands above its interval. Settings leave their width to what they do.
for (const head of document.querySelectorAll(".cell_output table.dataframe thead th:nth-child(3):last-child")) {
  if (head.textContent === "what it does") head.closest("table").classList.add("moe-settings");
}
for (const cell of document.querySelectorAll(".cell_output table.dataframe :is(th, td):not(:has(*))")) {
  const text = cell.textContent;
  if (text.length <= 12) continue;
  if (cell.tagName === "TH" && text.includes(" ")) cell.classList.add("moe-words");
  const estimate = text.match(/^([^a-z()]+) (\(\S+ to \S+\))$/i);
  if (estimate) {
    const [value, interval] = estimate.slice(1).map((whole) => {
      const span = document.createElement("span");
      span.className = "moe-whole";
      span.textContent = whole;
      return span;
    });
    cell.replaceChildren(value, " ", interval);
    continue;
  }
  const pieces = text.split(/(?<=[_@/])(?=\w)/);
  if (pieces.length > 1) cell.replaceChildren(...pieces.flatMap((piece) => [document.createElement("wbr"), piece]).slice(1));
}

// A formula that is wider than its line scrolls, with a shadow. What is drawn counts, not MathJax's unseen
// text below it, and a fraction of a pixel is no width.
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const drawn = target.firstElementChild?.getBoundingClientRect().width ?? 0;
    target.classList.toggle("moe-wide", drawn > target.clientWidth + 2);
  }
});
for (const formula of document.querySelectorAll(".bd-article span.math")) {
  widths.observe(formula);
  // A line does not begin with what closes a formula.
  const text = formula.nextSibling;
  if (text?.nodeType !== Node.TEXT_NODE || !/^[,.;:)]/.test(text.data)) continue;
  const closed = document.createElement("span");
  closed.className = "moe-closed";
  formula.before(closed);
  text.splitText(1);
  closed.append(formula, text);
}

// A table of many columns is wider than a small window: it scrolls in a box, as the theme's tables do.
for (const table of document.querySelectorAll("table.moe:has(th:nth-child(7)):not([data-filters], .moe-move *)")) {
  const box = document.createElement("div");
  box.className = "pst-scrollable-table-container";
  table.replaceWith(box);
  box.append(table);
}

// A cell's table may be wider than its box.
for (const box of document.querySelectorAll(".cell_output .output.text_html")) {
  if (box.scrollWidth > box.clientWidth + 1) box.classList.add("moe-scrolls");
}

// A table of prose is stacked on a phone, a row's cells one below the other: each says its column.
for (const table of document.querySelectorAll(".bd-article table.table:not(.autosummary, .moe-stacked *)")) {
  const heads = [...(table.tHead?.rows[0]?.cells ?? [])];
  const cells = [...table.tBodies].flatMap((body) => [...body.rows]).flatMap((row) => [...row.cells]);
  if (heads.length < 3 || !cells.some((cell) => cell.textContent.length > 30)) continue;
  table.classList.add("moe-cells");
  for (const cell of cells) {
    const head = heads[cell.cellIndex];
    if (!head || !cell.cellIndex || !cell.textContent.trim()) continue;
    const column = document.createElement("span");
    column.className = "moe-column";
    column.append(...head.cloneNode(true).childNodes, ": ");
    cell.prepend(column);
  }
}

// The arrows that unfold a chapter in the sidebar show no word: they are called by their chapter.
for (const arrow of document.querySelectorAll(".bd-sidenav details > summary")) {
  const chapter = arrow.closest("li").querySelector("a")?.textContent.trim();
  arrow.setAttribute("aria-label", `Pages of ${chapter}`);
}

// The theme calls these buttons other than they read: "Search" where it shows "Search Ctrl+K".
for (const button of document.querySelectorAll(".search-button-field, .theme-switch-button")) {
  button.removeAttribute("aria-label");
}
