// The live page: asks the server for what it has not had, and draws. It fetches from nowhere else, and puts every text in as text.
(() => {
  "use strict";
  const POLL = 2000, REST = 10000, AT_ONCE = 50;
  const MOST_SINGLE_LINES = 30, MOST_READ = 10, MOST_READ_BELOW = 6, NARROW = 520, START = 0.1, SMOOTH = 15;
  const find = (id) => document.getElementById(id);
  const make = (tag, words, css) => {
    const node = document.createElement(tag);
    if (words !== undefined) node.textContent = words;
    if (css) node.className = css;
    return node;
  };
  const draw = (tag, attributes, css) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    if (css) node.setAttribute("class", css);
    return node;
  };
  const put = (node, words) => { if (node.textContent !== words) node.textContent = words; };

  // How numbers look: as in the report, a true minus sign and no-break spaces before units.
  const NONE = "\u2013", SPACE = "\u00a0";
  const whole = (value) => value === null ? NONE : Math.round(value).toLocaleString("en-US");
  const nats = (value) => value === null || value === undefined ? NONE : value.toFixed(4).replace("-", "\u2212");
  const signed = (value) => value === null || value === undefined ? NONE : (value > 0 ? "+" : "") + nats(value);
  const gibibytes = (value) => (value / 2 ** 30).toFixed(1);
  const memory = (value) => value === null ? NONE : value < 2 ** 30 ? whole(value / 2 ** 20) + SPACE + "MiB" : gibibytes(value) + SPACE + "GiB";
  const duration = (seconds) => {
    if (seconds === null) return NONE;
    const total = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
    if (total < 60) return total + "s";
    if (total < 3600) return Math.floor(total / 60) + "m" + SPACE + two(total % 60) + "s";
    if (total < 172800) return Math.floor(total / 3600) + "h" + SPACE + two(Math.floor(total % 3600 / 60)) + "m";
    return Math.floor(total / 86400) + "d" + SPACE + Math.floor(total % 86400 / 3600) + "h";
  };
  const clock = (date) => date.toLocaleTimeString("en-GB");

  let study = null, plan = "", live = null, curves = [];

  // Markers of the arms, so that colour is never the only difference; the report's, in its order.
  const MARKERS = [
    "M0-4A4 4 0 1 1 0 4A4 4 0 1 1 0-4Z", "M-3.5-3.5H3.5V3.5H-3.5Z", "M0-4.4L4.2 3.2H-4.2Z", "M0-4.8L4.4 0L0 4.8L-4.4 0Z", "M0 4.4L4.2-3.2H-4.2Z",
    "M-1.5-4.2H1.5V-1.5H4.2V1.5H1.5V4.2H-1.5V1.5H-4.2V-1.5H-1.5Z", "M-4.2-2.2L-2.2-4.2L0-2L2.2-4.2L4.2-2.2L2 0L4.2 2.2L2.2 4.2L0 2L-2.2 4.2L-4.2 2.2L-2 0Z",
    "M-4.4 0L3.2-4.2V4.2Z", "M4.4 0L-3.2-4.2V4.2Z", "M0-5L1.3-1.6L4.8-1.5L2 .7L3 4.1L0 2.1L-3 4.1L-2 .7L-4.8-1.5L-1.3-1.6Z",
  ];
  const sample = (line) => {
    const picture = draw("svg", { width: 26, height: 12, viewBox: "0 0 26 12", "aria-hidden": "true" });
    picture.append(...strokes(line, "M0 6H26", "mean"), marker(line, 13, 6));
    return picture;
  };
  const strokes = (line, path, css) => {
    const node = draw("path", { d: path }, css);
    node.style.stroke = line.color;
    if (line.dashes) node.style.strokeDasharray = line.dashes;
    return [node];
  };
  const marker = (line, x, y) => {
    const node = draw("path", { d: MARKERS[line.marker % MARKERS.length], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` });
    node.style.fill = line.hollow ? "var(--paper)" : line.color;
    node.style.stroke = line.hollow ? line.color : "var(--paper)";
    return node;
  };

  // Means over seeds. A step counts with the seeds that have reached it.
  const mean = (series) => {
    if (series.length === 1) return series[0];
    const sums = new Map();
    for (const points of series) for (const [step, value] of points) {
      const sum = sums.get(step);
      if (sum) { sum[0] += value; sum[1] += 1; } else sums.set(step, [value, 1]);
    }
    return [...sums].map(([step, [sum, count]]) => [step, sum / count]).sort((a, b) => a[0] - b[0]);
  };
  // The mean of each point and the SMOOTH - 1 before it; the points lie close together, a three-hundredth of a run apart.
  const smooth = (points) => {
    let sum = 0;
    return points.map(([step, value], place) => {
      sum += value - (place >= SMOOTH ? points[place - SMOOTH][1] : 0);
      return [step, sum / Math.min(place + 1, SMOOTH)];
    });
  };
  const minus = (points, others) => {
    const there = new Map(others);
    return points.filter(([step]) => there.has(step)).map(([step, value]) => [step, value - there.get(step)]);
  };
  const cellsOf = (arm, seed) => study.cells.flatMap((cell, place) =>
    cell.arm === arm && (seed === "" || String(cell.seed) === seed) ? [{ ...cell, ...curves[place] }] : []);
  const lossLines = (seed) => study.arms.map((arm, place) => {
    const found = cellsOf(arm.name, seed).filter((cell) => cell.points.length || cell.validations.length);
    return line(arm.label, arm, place, found.map((cell) => cell.points), found.map((cell) => cell.validations));
  });
  const differenceLines = (seed) => study.comparisons.map(({ arm, parent }, place) => {
    const [ours, theirs] = [arm, parent].map((name) => study.arms.findIndex((one) => one.name === name));
    const parents = new Map(cellsOf(parent, seed).map((cell) => [cell.seed, cell]));
    const pairs = cellsOf(arm, seed).filter((cell) => parents.has(cell.seed)).map((cell) => [cell, parents.get(cell.seed)]);
    const parts = ["points", "validations"].map((kind) => pairs.map(([left, right]) => minus(left[kind], right[kind])).filter((points) => points.length));
    const label = study.arms[ours].label + " \u2212 " + study.arms[theirs].label;
    // An arm with several parents has its colour in each pair: dashes and hollow markers tell the second and later ones apart.
    const nth = study.comparisons.slice(0, place).filter((one) => one.arm === arm).length;
    const look = nth ? { ...study.arms[ours], dashes: ["6 3", "2 2", "8 3 2 3"][(nth - 1) % 3] } : study.arms[ours];
    return { ...line(label, look, ours, parts[0].map(smooth), parts[1]), hollow: nth > 0 };
  });
  const line = (label, arm, place, singles, validations) => ({
    label, color: arm.color, dashes: arm.dashes, marker: place, singles, mean: singles.length ? mean(singles) : [],
    dots: validations.length ? mean(validations) : [],
  });

  const ticks = (low, high, most) => {
    const rough = (high - low) / most, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * size).find((one) => one >= rough);
    const values = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick += 1) values.push(tick * step + 0);  // + 0: no minus zero
    return { values, decimals: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  };

  // One chart: title, legend, board. `lines` returns what to draw for a choice of seed.
  const chart = (root, title, remark, unit, lines, format, aroundZero) => {
    const heading = make("p", undefined, "chart-title");
    heading.append(title + " ", make("span", unit));
    const legend = make("div", undefined, "legend"), board = make("div", undefined, "board");
    legend.setAttribute("role", "group");
    legend.setAttribute("aria-label", "Show only some lines of: " + title);
    const readout = make("div", undefined, "readout");
    readout.hidden = true;
    readout.setAttribute("aria-hidden", "true");
    board.tabIndex = 0;
    board.setAttribute("role", "slider");
    board.setAttribute("aria-label", title + ": the values at a step; arrow keys move");
    board.append(readout);
    root.append(heading, legend, board, make("figcaption", remark));
    const chosen = new Set();
    let drawn = [], steps = [], at = null, near = null, scales = null, pressed = [];

    const isShown = (one) => !chosen.size || chosen.has(one.label);
    const paintLegend = () => {
      const names = drawn.map((one) => one.label);
      if (names.join("\n") !== pressed.map(([name]) => name).join("\n")) {
        pressed = drawn.map((one) => {
          const button = make("button");
          button.type = "button";
          button.append(sample(one), make("span", one.label));
          for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => emphasise(one.label));
          for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => emphasise(null));
          button.addEventListener("click", () => {
            if (!chosen.delete(one.label)) chosen.add(one.label);
            paint();
          });
          return [one.label, button];
        });
        legend.replaceChildren(...pressed.map(([, button]) => button));
      }
      for (const [name, button] of pressed) {
        button.setAttribute("aria-pressed", String(chosen.has(name)));
        button.classList.toggle("aside", chosen.size > 0 && !chosen.has(name));
      }
    };

    const emphasise = (label) => {
      const there = label !== null && drawn.some((one) => isShown(one) && one.label === label);
      for (const one of drawn) for (const node of one.nodes || []) node.classList.toggle("dim", there && one.label !== label);
    };

    const range = (shown, first, last) => {
      const from = first > 0 ? first : START * last, inside = ([step]) => step >= from && step <= last;
      let values = shown.flatMap((one) => [...one.mean, ...one.dots].filter(inside)).map(([, value]) => value);
      if (!values.length) values = shown.flatMap((one) => [...one.mean, ...one.dots]).map(([, value]) => value);
      if (!values.length) return null;
      let low = Math.min(...values), high = Math.max(...values);
      if (aroundZero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
      const room = (high - low) * 0.06 || Math.max(Math.abs(high) * 0.01, 1e-6);
      return [low - room, high + room];
    };

    const paint = () => {
      drawn = lines(find("seed").value).filter((one) => one.mean.length || one.dots.length);
      for (const name of [...chosen]) if (!drawn.some((one) => one.label === name)) chosen.delete(name);
      paintLegend();
      const shown = drawn.filter(isShown);
      const width = Math.max(260, board.clientWidth), height = width < NARROW ? 250 : 340;
      const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, height, "aria-hidden": "true" });
      const last = Math.max(1, ...shown.flatMap((one) => [...one.mean.slice(-1), ...one.dots.slice(-1)]).map(([step]) => step));
      const first = Number(find("view").value) * last, bounds = range(shown, first, last);
      board.querySelector("svg")?.remove();
      board.prepend(picture);
      if (!bounds) {
        scales = null;
        const words = draw("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "empty");
        words.textContent = aroundZero ? "No pair has two cells with a step in common yet." : "No cell has made enough steps yet.";
        picture.append(words);
        return select(null);
      }
      const edge = { left: 58, right: 12, top: 8, bottom: 28 };
      const x = (step) => edge.left + (step - first) / (last - first || 1) * (width - edge.left - edge.right);
      const y = (value) => edge.top + (bounds[1] - value) / (bounds[1] - bounds[0]) * (height - edge.top - edge.bottom);
      scales = { x, y, width, height, edge };
      const put = (words, attributes) => {
        const node = draw("text", attributes);
        node.textContent = words;
        picture.append(node);
      };
      const upright = ticks(bounds[0], bounds[1], 6);
      for (const value of upright.values) {
        const here = y(value), zero = aroundZero && Math.abs(value) < 1e-12;
        picture.append(draw("line", { x1: edge.left, x2: width - edge.right, y1: here, y2: here }, zero ? "zero" : "grid"));
        put((aroundZero && value > 1e-12 ? "+" : "") + Math.abs(value).toFixed(upright.decimals).replace(/^/, value < -1e-12 ? "\u2212" : ""),
          { x: edge.left - 8, y: here + 4, "text-anchor": "end" });
      }
      for (const step of ticks(first, last, width < NARROW ? 4 : 8).values) {
        if (step === Math.round(step)) put(whole(step), { x: x(step), y: height - 10, "text-anchor": x(step) > width - 30 ? "end" : "middle" });
      }
      const clip = draw("clipPath", { id: root.id + "-clip" });
      clip.append(draw("rect", { x: edge.left, y: edge.top, width: width - edge.left - edge.right, height: height - edge.top - edge.bottom }));
      const inside = draw("g", { "clip-path": `url(#${root.id}-clip)` }), dots = draw("g");
      picture.append(clip, inside, dots);
      const path = (points) => points.filter(([step]) => step >= first - 1).map(([step, value], place) =>
        (place ? "L" : "M") + x(step).toFixed(1) + " " + y(value).toFixed(1)).join("");
      const few = shown.reduce((sum, one) => sum + one.singles.length, 0) <= MOST_SINGLE_LINES;
      for (const one of shown) if (few && one.singles.length > 1) {
        one.nodes = one.singles.flatMap((points) => strokes({ ...one, dashes: "" }, path(points), "single"));
        inside.append(...one.nodes);
      }
      for (const one of shown) {
        const thick = strokes(one, path(one.mean), "mean");
        inside.append(...thick);
        one.nodes = [...one.nodes || [], ...thick];
        for (const [step, value] of one.dots) {
          if (step < first || value < bounds[0] || value > bounds[1]) continue;
          const node = marker(one, x(step), y(value));
          one.nodes.push(node);
          dots.append(node);
        }
      }
      steps = [...new Set(shown.flatMap((one) => [...one.mean, ...one.dots].map(([step]) => step)))].filter((step) => step >= first).sort((a, b) => a - b);
      board.setAttribute("aria-valuemin", steps[0]);
      board.setAttribute("aria-valuemax", steps[steps.length - 1]);
      select(at);
    };

    // The values at the step nearest to `step`; null hides them.
    const select = (step) => {
      board.querySelector(".cross")?.remove();
      at = step;
      if (step === null || !scales || !steps.length) {
        emphasise(null);
        readout.hidden = true;
        board.setAttribute("aria-valuenow", steps.length ? steps[steps.length - 1] : 0);
        board.setAttribute("aria-valuetext", "no step chosen");
        return;
      }
      at = steps.reduce((best, one) => Math.abs(one - step) < Math.abs(best - step) ? one : best, steps[0]);
      const before = (points) => {
        let found = null;
        for (const [one, value] of points) { if (one > at) break; found = [one, value]; }
        return found;
      };
      const entries = drawn.filter(isShown).map((one) => {
        const training = before(one.mean), dot = one.dots.find(([here]) => here === at);
        const ended = training && one.mean[one.mean.length - 1][0] < at;
        return { one, training: training && !ended ? training[1] : null, validation: dot ? dot[1] : null };
      }).filter((entry) => entry.training !== null || entry.validation !== null);
      const value = (entry) => entry.training ?? entry.validation;
      let read = entries.sort((a, b) => value(b) - value(a));
      const below = scales.width < NARROW, most = below ? MOST_READ_BELOW : MOST_READ;
      if (read.length > most) {
        const nearest = near === null ? read.slice(0, most) : [...read].sort((a, b) =>
          Math.abs(scales.y(value(a)) - near) - Math.abs(scales.y(value(b)) - near)).slice(0, most);
        read = read.filter((entry) => nearest.includes(entry));
      }
      const withDots = read.some((entry) => entry.validation !== null);
      const table = make("table"), head = make("tr"), body = make("tbody"), top = make("thead");
      head.append(make("th", "Step " + whole(at)), make("th", "training", "number"), ...(withDots ? [make("th", "validation", "number")] : []));
      top.append(head);
      for (const entry of read) {
        const row = make("tr"), name = make("th"), swatch = make("span", undefined, "swatch");
        swatch.style.background = entry.one.color;
        name.append(swatch, entry.one.label);
        row.append(name, make("td", format(entry.training), "number"), ...(withDots ? [make("td", format(entry.validation), "number")] : []));
        body.append(row);
      }
      table.append(top, body);
      const left = entries.length - read.length;
      emphasise(near !== null && left > 0 ? read.reduce((best, entry) =>
        Math.abs(scales.y(value(entry)) - near) < Math.abs(scales.y(value(best)) - near) ? entry : best).one.label : null);
      readout.replaceChildren(table, ...(left ? [make("div", left + " more")] : []));
      readout.classList.toggle("below", below);
      readout.style.left = "0";
      readout.hidden = false;
      const here = scales.x(at), room = readout.offsetWidth + 14;
      const place = here + room <= scales.width ? here + 14 : here - room >= 0 ? here - room : Math.max(0, (scales.width - room) / 2);
      readout.style.left = place + "px";
      board.querySelector("svg").append(draw("line", { x1: here, x2: here, y1: scales.edge.top, y2: scales.height - scales.edge.bottom }, "cross"));
      board.setAttribute("aria-valuenow", at);
      board.setAttribute("aria-valuetext", "step " + at + ": " + read.map((entry) => entry.one.label + " " +
        format(entry.training) + (entry.validation === null ? "" : ", validation " + format(entry.validation))).join("; "));
    };

    const point = (event) => {
      if (!scales || !steps.length) return;
      const box = board.getBoundingClientRect(), { edge, width, x } = scales;
      near = event.clientY - box.top;
      const share = (event.clientX - box.left - edge.left) / (width - edge.left - edge.right);
      const span = [steps[0], steps[steps.length - 1]], low = x(span[0]), high = x(span[1]);
      const here = edge.left + share * (width - edge.left - edge.right);
      select(high > low ? span[0] + (here - low) / (high - low) * (span[1] - span[0]) : span[0]);
    };
    board.addEventListener("pointermove", point);
    board.addEventListener("pointerdown", point);
    board.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") select(null); });
    board.addEventListener("blur", () => select(null));
    board.addEventListener("keydown", (event) => {
      const here = at === null ? steps.length : steps.indexOf(at), far = Math.max(1, Math.round(steps.length / 10));
      const moves = {
        ArrowLeft: here - 1, ArrowDown: here - 1, ArrowRight: here + 1, ArrowUp: here + 1, PageDown: here - far, PageUp: here + far,
        Home: 0, End: steps.length - 1,
      };
      if (event.key === "Escape") return select(null);
      if (!(event.key in moves) || event.ctrlKey || event.metaKey || event.altKey || !steps.length) return;
      event.preventDefault();
      near = null;
      select(steps[Math.max(0, Math.min(steps.length - 1, moves[event.key]))]);
    });
    let width = 0;
    new ResizeObserver(() => {
      if (board.clientWidth !== width && study) { width = board.clientWidth; paint(); }
    }).observe(board);
    return paint;
  };

  const paintLosses = chart(find("losses"), "Losses.", "Lines are training losses, each point the mean over a fiftieth of the run up to it; " +
    "markers are validation losses. A thick line is the mean over the seeds that have reached a step, thin lines are single seeds.",
    "nats per token", lossLines, nats, false);
  const paintDifferences = chart(find("differences"), "Paired differences.", "The arm minus its parent with the same seed, the same first weights and the " +
    "same batches, averaged over the seeds in which both have reached a step: below zero the arm is better. Lines: training loss, smoothed over a fifteenth of the run; markers: validation loss. " +
    "What a study concludes is in its report, at its planned end.",
    "nats per token, arm \u2212 parent", differenceLines, signed, true);

  const numbers = ["Cells", "Steps", "Time left", "Memory of this machine"].map((label) => {
    const box = make("div"), value = make("dd", NONE, "value"), remark = make("dd", "", "remark");
    box.append(make("dt", label), value, remark);
    find("numbers").append(box);
    return (words, more) => { put(value, words); put(remark, more); };
  });

  const paintNumbers = () => {
    const count = (state) => live.cells.filter((cell) => cell.state === state).length;
    const others = ["running", "failed", "stopped", "waiting"].filter(count).map((state) => count(state) + " " + state);
    const share = live.steps_total ? live.steps_done / live.steps_total : 0;
    find("bar").value = share;
    numbers[0](count("complete") + " of " + live.cells.length, others.join(", ") || "all complete");
    numbers[1](Math.floor(100 * share) + SPACE + "%", whole(live.steps_done) + " of " + whole(live.steps_total));
    const end = new Date(Date.now() + 1000 * (live.seconds_left || 0));
    const day = end.toDateString() === new Date().toDateString() ? "" : end.toLocaleDateString("en-GB", { day: "numeric", month: "short" }) + ", ";
    const ended = count("complete") === live.cells.length;
    numbers[2](ended ? "none" : duration(live.seconds_left),
      ended ? "" : live.seconds_left !== null ? "until about " + day + clock(end).slice(0, 5) : live.running ? "not known yet" : "nothing runs");
    if (live.memory_total_bytes !== null) {
      const used = live.memory_total_bytes - live.memory_available_bytes;
      numbers[3](gibibytes(used) + SPACE + "GiB", "in use of " + gibibytes(live.memory_total_bytes) + SPACE + "GiB");
    }
    document.title = Math.floor(100 * share) + " % \u00b7 " + study.name;
  };

  let rows = [];
  const buildRows = () => {
    const labels = new Map(study.arms.map((arm) => [arm.name, arm.label]));
    rows = study.cells.map((cell) => {
      const row = make("tr"), name = make("th", labels.get(cell.arm)), bar = make("progress");
      name.scope = "row";
      bar.max = cell.steps;
      bar.setAttribute("aria-hidden", "true");
      const columns = ["text", "number steps", "number", "number", "number", "number", "number"].map((css) => make("td", undefined, css));
      const state = make("span"), reason = make("small"), step = make("span");
      columns[0].append(state, reason);
      columns[1].append(step, bar);
      row.append(name, make("td", cell.seed, "number"), ...columns);
      return { row, state, reason, step, bar, columns };
    });
    find("cells").tBodies[0].replaceChildren(...rows.map((one) => one.row));
  };
  const paintRows = () => live.cells.forEach((cell, place) => {
    const { row, state, reason, step, bar, columns } = rows[place];
    if (row.className !== cell.state) row.className = cell.state;
    put(state, cell.state);
    put(reason, cell.reason);
    bar.hidden = cell.state === "complete" || cell.state === "waiting";
    put(step, whole(cell.step) + "/" + whole(study.cells[place].steps));
    bar.value = cell.step;
    put(columns[2], nats(cell.loss));
    put(columns[3], nats(cell.nll));
    put(columns[4], whole(cell.tokens_per_second));
    put(columns[5], memory(cell.peak_memory_bytes));
    put(columns[6], cell.state === "complete" || cell.state === "failed" ? NONE : duration(cell.seconds_left));
  });

  const take = (answer) => {
    if (answer.study) {
      study = answer.study;
      curves = study.cells.map(() => ({ reading: 0, points: [], validations: [] }));
      put(find("name"), study.name);
      put(find("question"), study.question);
      const seed = find("seed"), before = seed.value;
      seed.replaceChildren(...["", ...study.seeds.map(String)].map((value) => {
        const option = make("option", value || "mean over all");
        option.value = value;
        return option;
      }));
      seed.value = study.seeds.map(String).includes(before) ? before : "";
      buildRows();
    }
    plan = answer.plan;
    live = answer.live;
    let changed = Boolean(answer.study);
    answer.curves.forEach(([reading, from, points, first, validations], place) => {
      const curve = curves[place];
      if (reading !== curve.reading || points.length || validations.length) changed = true;
      curve.reading = reading;
      curve.points = curve.points.slice(0, from).concat(points);
      curve.validations = curve.validations.slice(0, first).concat(validations);
    });
    paintNumbers();
    paintRows();
    if (changed) { paintLosses(); paintDifferences(); }
  };

  const trouble = (words) => {
    find("trouble").hidden = !words;
    put(find("trouble"), words || "");
  };
  let timer = 0;
  const poll = async () => {
    clearTimeout(timer);
    let wait = POLL;
    try {
      const have = curves.map((curve) => [curve.reading, curve.points.length, curve.validations.length].join(".")).join(",");
      const response = await fetch("/data?" + new URLSearchParams({ plan, have }), { cache: "no-store" });
      const answer = await response.json();
      if (answer.error) throw new Error(answer.error);
      take(answer);
      trouble("");
      const ended = live.cells.every((cell) => cell.state === "complete");
      put(find("when"), (ended ? "Complete" : live.running ? "Live" : "Nothing runs now") + " \u00b7 read at " + clock(new Date(1000 * live.read_at)));
      find("dot").className = "dot" + (live.running ? " live" : "");
      wait = answer.more ? AT_ONCE : ended ? REST : POLL;
    } catch (error) {
      const gone = error instanceof TypeError;
      trouble(gone ? "depthroute watch has ended or cannot be reached. The page shows what was there last, and goes on when it is started again at " +
        "this address." : error.message);
      put(find("when"), "Not live");
      find("dot").className = "dot lost";
    }
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(poll, wait);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
  for (const name of ["view", "seed"]) find(name).addEventListener("change", () => { if (study) { paintLosses(); paintDifferences(); } });
  poll();
})();
