// What a reader moves: PESC's sizes, ESFT's threshold, Rocket's selection, a toy router, the ledger's forest.
"use strict";

(() => {
  const { html, svg, text, bar, line, range, choice, tick, read, stage, start } = window.moved;
  const sum = (numbers) => numbers.reduce((total, x) => total + x, 0);
  const whole = (x) => x.toLocaleString("en");
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const billions = (x, digits = 3) => `${(x / 1e9).toFixed(digits)} billion`;
  const places = (list) => [...list.keys()];
  const bytes = (x) => {
    const power = Math.max(0, Math.min(4, Math.floor(Math.log10(Math.max(1, x)) / 3)));
    return `${(x / 1000 ** power).toFixed(power ? 2 : 0)} ${["bytes", "kB", "MB", "GB", "TB"][power]}`;
  };

  // PESC: how many parameters adapters and routers have, and what a host grows to.
  function sizes(box, { hosts, start }) {
    const own = "another host";
    const find = (name) => hosts.find((host) => host.name === name);
    const [first] = hosts;
    const fields = {
      host: choice("host", [...hosts.map((host) => host.name), own]),
      L: range("layers L", 1, 80, 1, first.num_hidden_layers),
      D: range("model width D", 256, 8192, 64, first.hidden_size, whole),
      E: range("experts E", 1, 64, 1, start.E),
      K: range("experts per token K", 1, 64, 1, start.K),
      R: range("adapter width R", 1, 1024, 1, start.R, whole),
    };
    const changed = (name) => {
      const host = find(fields.host.value);
      if (name === "host" && host) {
        fields.L.value = host.num_hidden_layers;
        fields.D.value = host.hidden_size;
      }
      if (name === "L" || name === "D") {
        const same = hosts.find((one) =>
          one.num_hidden_layers === read(fields.L) && one.hidden_size === read(fields.D));
        fields.host.value = same?.name ?? own;
      }
      if (name === "K" && read(fields.K) > read(fields.E)) fields.E.value = fields.K.value;
      if (read(fields.K) > read(fields.E)) fields.K.value = fields.E.value;
    };
    const show = ({ host: name, L, D, E, K, R }, width) => {
      const routers = L * E * D;
      const adapters = 2 * L * E * D * R;
      const used = 2 * L * K * D * R;
      const host = find(name);
      const dense = host?.dense ?? 0;
      const numbers = {
        "adapters, 2LEDR": whole(adapters),
        "routers, LED": whole(routers),
        "both, stored in 16 bits": bytes(2 * (adapters + routers)),
        "used by a token, 2LKDR + LED": whole(used + routers),
      };
      const rows = [
        ["total", host ? "whole model" : "adapters and routers", adapters],
        ["activated", host ? "used by a token, with the host" : "used by a token", used],
      ];
      for (const [key, label, extra] of host ? rows : []) {
        const total = dense + routers + extra;
        const printed = host.printed[key] / 1e9;
        const fits = Math.round(total / 1e9) === printed;
        numbers[label] = [billions(total),
          html("span", { class: "note" }, `${fits ? "✔ rounds" : "✘ does not round"} to the printed ${printed}`)];
      }
      const most = 1.02 * Math.max(dense + adapters + routers, host ? host.printed.total + 5e8 : 1);
      const scale = (x) => (width * x) / most;
      const marks = rows.flatMap(([key, label, extra], place) => {
        const y = 22 + 74 * place;
        const parts = [[dense, "host"], [routers + extra, "accent"]];
        const ends = host ? [host.printed[key] - 5e8, host.printed[key] + 5e8].map(scale) : [];
        return [
          text(0, y - 7, label),
          ...parts.map(([x, kind], i) => bar(scale(i * dense), y, scale(x), 26, kind)),
          ...(host ? [bar(ends[0], y - 3, ends[1] - ends[0], 32, "band"),
            text(ends[1], y + 44, `rounds to ${host.printed[key] / 1e9} billion`, { class: "note", "text-anchor": "end" })] : []),
        ];
      });
      const key = host ? [bar(0, 152, 12, 12, "host"), text(18, 162, "host"),
        bar(70, 152, 12, 12, "accent"), text(88, 162, "adapters and routers")] : [];
      return [numbers, [host ? 170 : 125, ...marks, ...key]];
    };
    stage(box, "PESC: sizes", fields, show, changed);
  }

  // ESFT: in each layer the best experts are taken until their scores reach p.
  function experts(box, { tasks }) {
    const find = (name) => tasks.find((task) => task.name === name);
    const fields = {
      task: choice("task", tasks.map((task) => task.name)),
      score: choice("score", ["token", "gate"]),
      p: range("threshold p", 0.01, 1, 0.01, tasks[0].p.token, (x) => x.toFixed(2)),
      layer: range("layer to read", 0, 1, 1, 0, (x) => Object.keys(find(fields.task.value).scores.token)[x]),
      total: tick("p is a share of the layer's total", false),
    };
    const changed = (name) => {
      const { p, scores } = find(fields.task.value);
      if (name === "score" || name === "task") fields.p.value = p[fields.score.value];
      fields.layer.max = Object.keys(scores.token).length - 1;
    };
    const choose = (row, p) => {
      const order = places(row).sort((one, other) => row[other] - row[one]);
      let reached = 0;
      const taken = order.findIndex((expert) => (reached += row[expert]) >= p - 1e-9);
      return { order, taken: taken < 0 ? order.length : taken + 1, short: taken < 0 };
    };
    const show = ({ task: name, score, p, layer, total }, width) => {
      const { scores, parameters } = find(name);
      const layers = Object.entries(scores[score]).map(([number, row]) => {
        const one = total ? sum(row) : 1;
        const shares = row.map((x) => x / one);
        return { number, shares, ...choose(shares, p) };
      });
      const taken = layers.map((one) => one.taken);
      const all = sum(layers.map((one) => one.shares.length));
      const short = layers.filter((one) => one.short).length;
      const read = layers[layer];
      const trained = sum(taken);
      const numbers = {
        "experts that train": `${whole(trained)} of ${whole(all)} (${percent(trained / all)})`,
        "in a layer": `${Math.min(...taken)} to ${Math.max(...taken)}`,
        "trained and stored": `${whole(trained * parameters)} parameters`,
        "in 16 bits": `${bytes(2 * trained * parameters)} of ${bytes(2 * all * parameters)}`,
        [`layer ${read.number} trains`]: read.order.slice(0, read.taken).join(", "),
        "layers that do not reach p": short ? `${short}: all their experts train` : "none",
      };
      const [left, right, high] = [26, 34, layers.length > 8 ? 15 : 26];
      const across = width - left - right;
      const bottom = 20 + high * layers.length;
      const marks = layers.flatMap(({ number, shares, order, taken }, place) => {
        const y = 20 + high * place;
        let x = left;
        const parts = order.map((expert, rank) => {
          const part = bar(x, y + 1, across * shares[expert] - 0.6, high - 3, rank < taken ? "accent" : "host");
          x += across * shares[expert];
          return part;
        });
        const mark = place === layer ? { class: "chosen" } : {};
        return [text(left - 6, y + high - 4, number, { "text-anchor": "end", ...mark }), ...parts,
          text(width, y + high - 4, taken, { "text-anchor": "end", ...mark })];
      });
      const at = left + across * p;
      return [numbers, [bottom + 40,
        text(0, 10, "layer", { class: "note" }),
        text(width, 10, "experts", { class: "note", "text-anchor": "end" }), ...marks,
        line(at, 14, at, bottom + 6, "border"),
        text(at, bottom + 19, `p = ${p.toFixed(2)}`, { "text-anchor": p > 0.9 ? "end" : p < 0.1 ? "start" : "middle" }),
        text(left, bottom + 36, "scores added up, the best expert first", { class: "note" })]];
    };
    changed("task");
    stage(box, "ESFT: which experts train", fields, show, changed);
  }

  // Rocket: rank the bank on K shots, keep M candidates, take the group of N with the least total.
  const rank = (values) => values.map((x) => 1 + values.filter((y) => y < x).length);
  const logsumexp = (values) => {
    const most = Math.max(...values);
    return most + Math.log(sum(values.map((x) => Math.exp(x - most))));
  };
  const groups = (items, size) => size === 0 ? [[]] : items.flatMap((item, place) =>
    groups(items.slice(place + 1), size - 1).map((group) => [item, ...group]));

  function selection(box, { targets }) {
    const find = (name) => targets.find((target) => target.name === name);
    const [first] = targets;
    const fields = {
      target: choice("target", targets.map((target) => target.name)),
      K: range("shots K", 1, first.nats[first.loras[0]].length, 1, first.start.shots),
      M: range("candidates M", 1, first.loras.length, 1, first.start.candidates),
      N: range("experts N", 1, Math.min(6, first.loras.length), 1, first.start.experts),
      P: tick("rank by perplexity", true),
      A: tick("rank by shots solved", true),
      D: tick("rank groups by diversity", true),
      normalised: tick("bring each ranking to 0 to 1", false),
    };
    const changed = (name) => {
      if (read(fields.N) <= read(fields.M)) return;
      if (name === "N") fields.M.value = fields.N.value;
      else fields.N.value = fields.M.value;
    };
    const show = ({ target, K, M, N, P, A, D, normalised }, width) => {
      const { loras, nats, share, correlation } = find(target);
      const bank = loras.map((name, column) => ({ name, column,
        perplexity: logsumexp(nats[name].slice(0, K)), solved: sum(share[name].slice(0, K)) }));
      const perplexities = rank(bank.map((one) => one.perplexity));
      const solved = rank(bank.map((one) => -one.solved));
      bank.forEach((one, i) => Object.assign(one, { R_P: perplexities[i], R_A: solved[i] }));
      bank.sort((one, other) => (one.name < other.name ? -1 : 1));
      const worth = (one) => P * one.R_P + A * one.R_A;
      const ranked = [...bank].sort((one, other) => worth(one) - worth(other));
      const every = groups(bank.filter((one) => ranked.indexOf(one) < M), N);
      const alike = every.map((group) => groups(group, 2).map(([one, other]) =>
        correlation[one.name][other.column]));
      const means = alike.map((pairs) => Number((sum(pairs) / Math.max(1, pairs.length)).toFixed(9)));
      const different = rank(means);
      let terms = every.map((group, i) => [P * sum(group.map((one) => one.R_P)),
        A * sum(group.map((one) => one.R_A)), D * different[i]]);
      if (normalised) {
        const ends = [0, 1, 2].map((i) => terms.map((term) => term[i]))
          .map((column) => [Math.min(...column), Math.max(...column)]);
        terms = terms.map((term) => term.map((x, i) => (x - ends[i][0]) / (ends[i][1] - ends[i][0] || 1)));
      }
      const totals = terms.map((term) => Number(sum(term).toFixed(9)));
      const best = totals.indexOf(Math.min(...totals));
      const chosen = P || A || D ? every[best] : [];
      const say = (x) => (normalised ? x.toFixed(2) : String(x));
      const numbers = {
        "chosen experts": ranked.filter((one) => chosen.includes(one)).map((one) => one.name).join(", ") || "none: turn a ranking on",
        "groups compared": whole(every.length),
        "the group's ranks: perplexity + solved + diversity": `${terms[best].map(say).join(" + ")} = ${say(totals[best])}`,
        "mean cosine in the group": means[best].toFixed(3),
      };
      const longest = Math.max(...loras.map((name) => name.length));
      const left = Math.min(width / 2, 8 * (longest + 2) + 6);
      const scale = (width - left - 8) / (2 * bank.length);
      const marks = ranked.flatMap((one, place) => {
        const y = 20 + 22 * place + (place < M ? 0 : 26);
        const kind = chosen.includes(one) ? "accent" : "host";
        const parts = [[P, one.R_P], [A, one.R_A]].filter(([used]) => used);
        let x = left;
        return [text(0, y + 13, `${chosen.includes(one) ? "✔ " : ""}${one.name}`,
          chosen.includes(one) ? { class: "chosen" } : {}), ...parts.flatMap(([, size]) => {
          const part = [bar(x, y, scale * size - 1, 17, kind)];
          // A number that has no room in its bar stands in the table alone.
          if (scale * size >= 8 * String(size).length + 4) {
            part.push(text(x + (scale * size) / 2, y + 13, size,
              { class: chosen.includes(one) ? "inside" : "", "text-anchor": "middle" }));
          }
          x += scale * size;
          return part;
        })];
      });
      const border = 20 + 22 * M + 5;
      return [numbers, [50 + 22 * bank.length, ...marks,
        text(0, 12, P && A ? "rank by perplexity, then by shots solved: small is good" : "rank: small is good", { class: "note" }),
        line(0, border, width, border, "border"),
        text(width, border + 13, `${M} candidates above`, { class: "note", "text-anchor": "end" })]];
    };
    stage(box, "Rocket: which LoRAs become experts", fields, show, changed);
  }

  // The toy router: what a token and all tokens have in common are learnt; experts get better by use.
  const RATE = 0.1;
  function train(start, { K, temperature, balance, steps }) {
    const [tokens, experts] = [start.length, start[0].length];
    let logits = start;
    let skill = start[0].map(() => 0);
    for (let step = 0; ; step++) {
      const chances = logits.map((row) => {
        const powers = row.map((x) => Math.exp(x / temperature));
        return powers.map((x) => x / sum(powers));
      });
      const used = logits.map((row) => {
        const best = places(row).sort((i, j) => row[j] - row[i]).slice(0, K);
        return row.map((_, i) => Number(best.includes(i)));
      });
      const loads = skill.map((_, i) => sum(used.map((row) => row[i])) / (tokens * K));
      const means = skill.map((_, i) => sum(chances.map((row) => row[i])) / tokens);
      if (step === steps)
        return { chances, used, loads, loss: experts * sum(loads.map((load, i) => load * means[i])) };
      skill = skill.map((x, i) => x + RATE * loads[i]);
      const slopes = chances.map((p, token) => {
        const gain = skill.map((x, i) => used[token][i] * x - balance * experts * loads[i]);
        const mean = sum(gain.map((x, i) => p[i] * x));
        return p.map((x, i) => (x * (gain[i] - mean)) / temperature);
      });
      const shared = skill.map((_, i) => sum(slopes.map((row) => row[i])));
      logits = logits.map((row, t) => row.map((x, i) => x + RATE * (slopes[t][i] + shared[i])));
    }
  }

  function router(box) {
    const rows = [...box.querySelectorAll("tbody tr")].map((row) => [...row.cells].map((x) => x.textContent));
    const start = rows.map((row) => row.slice(1).map(Number));
    const experts = start[0].length;
    const fields = {
      K: range("experts per token K", 1, experts, 1, 1),
      temperature: range("temperature", 0.5, 2, 0.1, 1, (x) => x.toFixed(1)),
      balance: range("strength of the balance loss", 0, 1, 0.05, 0, (x) => x.toFixed(2)),
      steps: range("steps of training", 0, 200, 1, 0),
    };
    const show = (values, width) => {
      const { chances, used, loads, loss } = train(start, values);
      const idle = loads.filter((load) => !load).length;
      const numbers = {
        "load of experts 1 to 4": loads.map(percent).join(", "),
        "experts without a token": String(idle),
        "balance loss (1 is even)": loss.toFixed(2),
      };
      const [left, top] = [74, 108];
      const wide = (width - left) / experts;
      const even = 92 - 80 / experts;
      // A number stands on its bar, or on the line of an even load where it would lie across that.
      const above = (y) => (y > even - 3 && y - 12 < even + 3 ? even - 4 : y);
      const marks = loads.flatMap((load, i) => {
        const [x, height] = [left + wide * i, 80 * load];
        return [bar(x + wide * 0.2, 92 - height, wide * 0.6, height, "accent"),
          text(x + wide / 2, above(86 - height), percent(load), { "text-anchor": "middle" }),
          text(x + wide / 2, top, String(i + 1), { class: "note", "text-anchor": "middle" }),
          ...chances.map((row, token) => svg("circle", { cx: x + wide / 2, cy: top + 20 + 26 * token,
            r: 1.5 + 10 * Math.sqrt(row[i]), class: used[token][i] ? "accent" : "ring" }))];
      });
      const last = top + 26 + 26 * rows.length;
      return [numbers, [last + 16, text(0, 24, "load", { class: "note" }),
        line(left, even, width, even, "border"), text(0, even + 4, "if even", { class: "note" }), text(0, top, "expert", { class: "note" }), ...marks,
        ...rows.map(([token], i) => text(0, top + 24 + 26 * i, token)),
        text(0, last + 8, "A circle is a probability, a filled one is used.", { class: "note" })]];
    };
    stage(box, "A toy router", fields, show);
  }

  // The ledger's forest: the intervals of the claims that its filters show.
  function forest(table) {
    const frame = html("div", { class: "moe-forest", role: "region", tabindex: 0,
      "aria-label": "Effects of the claims below, with 95 % intervals" });
    const told = html("p", { role: "status" });
    const axis = (low, high) => {
      const step = [1, 2, 5, 10].map((x) => x * 10 ** Math.floor(Math.log10((high - low) / 4)))
        .find((x) => (high - low) / x <= 5);
      const first = Math.ceil(low / step);
      return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, i) => (first + i) * step);
    };
    const panel = (unit, points, width) => {
      const narrow = width < 560;
      const [left, high] = narrow ? [0, 36] : [Math.min(430, width / 2), 20];
      const right = width - 74;
      // The axis shows every effect; an interval that is much wider is cut at its end.
      const edge = 1.2 * Math.max(...points.map((point) => Math.abs(point.value)));
      const low = Math.max(-edge, Math.min(0, ...points.map((point) => point.low)));
      const most = Math.min(edge, Math.max(0, ...points.map((point) => point.high)));
      const within = (x) => Math.min(most, Math.max(low, x));
      const scale = (x) => left + 8 + ((right - left - 16) * (within(x) - low)) / (most - low || 1);
      const bottom = 40 + high * points.length;
      const short = (said, most) => (said.length > most ? `${said.slice(0, most - 1).trimEnd()}…` : said);
      const marks = points.flatMap(({ id, said, scale: where, value, low, high: top, sure }, place) => {
        const y = 40 + high * place + (narrow ? 26 : 10);
        const kind = sure ? (value > 0 ? "holds" : "fails") : "open";
        const label = text(0, narrow ? y - 10 : y + 4, short(said, Math.floor(narrow ? width / 8 : left / 6.8)));
        return [svg("a", { href: `#${id}`, "aria-label": said }, label),
          line(scale(low), y, scale(top), y, kind),
          svg("circle", { cx: scale(value), cy: y, r: 4, class: kind, "data-value": value }),
          text(width, y + 4, where, { class: "note", "text-anchor": "end" })];
      });
      const ticks = axis(low, most || 1).flatMap((x) => [
        line(scale(x), 36, scale(x), bottom, x ? "grid" : "zero"),
        text(scale(x), 30, Number(x.toPrecision(3)), { class: "note", "text-anchor": "middle" })]);
      return [svg("svg", { width, height: bottom + 16, role: "group", "aria-label": unit }, ...ticks, ...marks,
        text((left + right) / 2, 12, `effect, as claimed to the right (${unit})`,
          { class: "note", "text-anchor": "middle" }))];
    };
    const draw = () => {
      const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden && row.dataset.points);
      const points = rows.flatMap((row) => JSON.parse(row.dataset.points)
        .map(([unit, , scale, value, low, high, sure]) =>
          ({ unit, id: row.id, said: row.cells[0].firstChild.textContent.trim(), scale, value, low, high, sure })));
      const units = [...new Set(points.map((point) => point.unit))];
      const count = (side) => points.filter((point) => point.sure && point.value * side > 0).length;
      told.textContent = `${points.length} interval${points.length === 1 ? "" : "s"}: ${count(1)} as claimed, ${count(-1)} against it, ` +
        `${points.length - count(1) - count(-1)} undecided (drawn hollow).`;
      frame.replaceChildren(...units.flatMap((unit) =>
        panel(unit, points.filter((point) => point.unit === unit), Math.max(280, frame.clientWidth - 24))));
    };
    const long = table.closest(".pst-scrollable-table-container") ?? table.closest(".moe-long");
    const fold = html("details", { class: "moe-drawn" }, html("summary", {}, "Draw these effects"), frame);
    (long ?? table).before(told, fold);
    table.addEventListener("filtered", draw);
    new ResizeObserver(draw).observe(frame);
    draw();
  }

  for (const [name, figure] of Object.entries({ sizes, experts, selection, router })) start(name, figure);
  document.querySelectorAll('table[data-filters]:has(tr[data-points])').forEach(forest);
})();
