"use strict";
// Draws what the page's JSON says; knows no figure of a run by name. Texts of the run become text nodes alone.
(() => {
  const LEFT = 60, RIGHT = 12, TOP = 10, BOTTOM = 22, LANE = 20;
  const root = document.documentElement;
  const panels = new Map();
  const toggled = new Map(); // "panel / series" -> true if the reader has it shown, false if hidden
  const logs = new Set();
  let data = null, steps = [], view = null, hover = null, drag = null;

  // Theme: the reader's, or ?theme=dark
  const wish = new URLSearchParams(location.search).get("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const setTheme = () => {
    root.dataset.theme = wish || (prefersDark.matches ? "dark" : "light");
    drawAll();
  };
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();

  // Elements
  function make(tag, className, text) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  }

  // Columns
  function numbers(column) {
    if (Array.isArray(column)) return column;
    const found = [];
    for (let i = 0; i < column.runs.length; i += 2)
      for (let left = column.runs[i + 1]; left > 0; left--) found.push(column.runs[i]);
    return found;
  }
  function stepsOf(column) {
    return Array.isArray(column) ? column : Array.from({ length: column.count }, (_, i) => column.first + i);
  }
  function firstAtLeast(step) {
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle] < step) low = middle + 1; else high = middle;
    }
    return low;
  }
  function meansAround(values, reach) {
    const sums = [0], counts = [0];
    values.forEach((value, i) => {
      sums.push(sums[i] + (value ?? 0));
      counts.push(counts[i] + (value === null ? 0 : 1));
    });
    return values.map((value, i) => {
      const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
      return value === null ? null : (sums[to] - sums[from]) / (counts[to] - counts[from]);
    });
  }
  function smoothed(values) {
    // Of about a hundredth of the run around each step; twice, so that a peak makes no stairs.
    const reach = Math.max(2, Math.round(values.length / 300));
    return meansAround(meansAround(values, reach), reach);
  }

  // Numbers in words
  const digits = (value, count = 4) => {
    if (value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)) return value.toExponential(Math.max(0, count - 2));
    return Number(value.toPrecision(count)).toLocaleString("en-US", { maximumFractionDigits: 12 });
  };
  const SCALES = {
    bytes: [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]],
    B: [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"], [1, "B"]],
    s: [[1, "s"], [1e-3, "ms"], [1e-6, "us"]],
  };
  function scaleOf(unit, value) {
    const scales = SCALES[unit];
    return scales ? scales.find(([size]) => Math.abs(value) >= size) || (value === 0 && unit === "s" ? scales[0] : scales[scales.length - 1]) : [1, unit === "%" ? "%" : ""];
  }
  function format(unit, value, scale = scaleOf(unit, value), count = 4) {
    const text = digits(value / scale[0], count);
    return scale[1] ? text + (scale[1] === "%" ? "%" : " " + scale[1]) : text;
  }

  // Axes
  function niceStep(span, count, base = 10) {
    const raw = span / Math.max(1, count), power = base ** Math.floor(Math.log(raw) / Math.log(base));
    return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw) || 10 * power;
  }
  function ticksOf(low, high, count) {
    const step = niceStep(high - low, count), found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }
  function logTicks(low, high) {
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const factor of high - low > 3 ? [1] : [1, 2, 5]) {
        const at = power + Math.log10(factor);
        if (at >= low && at <= high) found.push(10 ** at);
      }
    return found.length > 1 ? found : [10 ** low, 10 ** high];
  }
  function full() {
    const low = steps[0], high = steps[steps.length - 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }
  const shown = () => view || full();

  // Panels
  const isOn = (panel, series) => toggled.get(panel.spec.title + " / " + series.name) ?? !series.hidden;

  function makePanel(title) {
    const panel = { box: make("section", "panel"), legend: make("div", "legend"), plot: make("div", "plot"), note: make("p", "note") };
    const head = make("div", "head");
    panel.log = make("button", "", "log");
    panel.log.title = "logarithmic scale";
    panel.log.onclick = () => {
      logs.has(title) ? logs.delete(title) : logs.add(title);
      draw(panel);
    };
    head.append(make("h2", "", title), panel.log);
    panel.canvas = make("canvas");
    panel.cross = make("div", "cross");
    panel.pick = make("div", "pick");
    panel.plot.append(panel.canvas, panel.cross, panel.pick);
    panel.box.append(head, panel.legend, panel.plot, panel.note);
    listen(panel);
    return panel;
  }

  function fill(panel, spec) {
    panel.spec = spec;
    panel.box.classList.toggle("wide", !!spec.wide);
    panel.lines = (spec.series || []).map((series) => {
      const values = numbers(series.values);
      return { ...series, values, mean: series.smooth && values.length > 60 ? smoothed(values) : null };
    });
    panel.log.hidden = spec.kind === "stack" || spec.kind === "lanes" || !panel.lines.some((line) => line.values.some((value) => value > 0));
    panel.note.textContent = spec.note || "";
    panel.note.hidden = !spec.note;
    panel.canvas.setAttribute("role", "img");
    panel.canvas.setAttribute("aria-label", spec.title + ": " + (spec.series || spec.lanes).map((each) => each.name).join(", "));
    panel.legend.replaceChildren();
    panel.texts = [];
    const canToggle = panel.lines.length > 1;
    for (const line of panel.lines) {
      const item = make(canToggle ? "button" : "span", canToggle ? "" : "item");
      const key = make("i", spec.kind === "stack" ? "" : line.dash ? "line dash" : "line");
      key.style.background = key.style.borderColor = "var(--" + line.color + ")";
      const text = make("b");
      item.append(key, make("span", "", line.name), text);
      if (canToggle) {
        item.title = "click to show or hide";
        item.onclick = () => {
          toggled.set(spec.title + " / " + line.name, !isOn(panel, line));
          draw(panel);
        };
      }
      panel.legend.append(item);
      panel.texts.push({ line, item, text });
    }
    for (const level of spec.levels || []) {
      const item = make("span", "item"), key = make("i", "line dash");
      key.style.borderColor = "var(--" + level.color + ")";
      item.append(key, make("span", "", level.name));
      panel.legend.append(item);
    }
    for (const lane of spec.lanes || []) {
      const item = make("span", "item"), key = make("i");
      key.style.background = "var(--" + lane.color + ")";
      item.append(key, make("span", "", lane.name), make("b", "", lane.count.toLocaleString("en-US")));
      panel.legend.append(item);
    }
  }

  function rangeOf(panel, lines, columns, from, to, isLog) {
    const { spec } = panel;
    const tops = [];
    let low = Infinity, high = -Infinity;
    if (columns) {
      low = 0;
      for (const column of columns) tops.push(column.sums.reduce((sum, each) => sum + each, 0) / column.count);
    } else {
      for (const line of lines)
        for (let i = from; i < to; i++) {
          const value = line.values[i];
          if (value === null || (isLog && value <= 0)) continue;
          tops.push(value);
          if (value < low) low = value;
        }
    }
    for (const top of tops) if (top > high) high = top;
    if (spec.clips && !isLog && tops.length > 4) {
      // Few steps, as the first one, may be ten times the others: they leave the plot, and a mark says so.
      const usual = [...tops].sort((a, b) => a - b)[Math.floor(0.97 * (tops.length - 1))];
      if (usual > 0 && high > 2 * usual) high = 1.3 * usual;
    }
    for (const level of spec.levels || []) {
      if (isLog && level.value <= 0) continue;
      high = Math.max(high, level.value);
      low = Math.min(low, level.value);
    }
    if (!isFinite(low) || !isFinite(high)) return null;
    if (isLog) {
      low = Math.log10(low);
      high = Math.log10(high);
    } else if (spec.zero) low = Math.min(0, low);
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const floor = !isLog && (spec.zero || spec.kind === "stack") && low >= 0;
    return [floor ? 0 : low - room, high + room];
  }

  function draw(panel) {
    if (!data || !steps.length) return;
    const { spec, canvas, plot } = panel;
    if (spec.kind === "lanes") plot.style.height = TOP + BOTTOM + LANE * spec.lanes.length + "px";
    const width = plot.clientWidth, height = plot.clientHeight, dpr = window.devicePixelRatio || 1;
    if (!width) return;
    canvas.width = Math.round(width * dpr);
    canvas.height = Math.round(height * dpr);
    const ctx = canvas.getContext("2d");
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = "11px system-ui, sans-serif";
    const [from, to] = shown(), right = width - RIGHT, bottom = height - BOTTOM;
    const X = (step) => LEFT + ((step - from) / (to - from)) * (right - LEFT);
    panel.X = X;
    // A neighbour beyond each edge, so that lines run to the edge.
    const begin = Math.max(0, firstAtLeast(from) - 1), end = Math.min(steps.length, firstAtLeast(to + 1e-9) + 1);
    const inside = [firstAtLeast(from), Math.max(firstAtLeast(to + 1e-9), firstAtLeast(from) + 1)];
    const isLog = logs.has(spec.title);
    panel.log.classList.toggle("on", isLog);
    for (const { line, item } of panel.texts) item.classList.toggle("off", !isOn(panel, line));
    xAxis(ctx, X, from, to, width, bottom);
    if (spec.kind === "lanes") {
      drawLanes(ctx, X, spec.lanes, from, to);
      return showHover(panel);
    }
    const lines = panel.lines.filter((line) => isOn(panel, line));
    const columns = spec.kind === "stack" ? columnsOf(X, lines, begin, end) : null;
    const range = rangeOf(panel, lines, columns, inside[0], Math.min(inside[1], steps.length), isLog);
    if (range) {
      const [low, high] = range;
      const Y = (value) => bottom - (((isLog ? Math.log10(value) : value) - low) / (high - low)) * (bottom - TOP);
      yAxis(ctx, Y, spec.unit || "", low, high, width, isLog, bottom);
      ctx.save();
      ctx.beginPath();
      ctx.rect(LEFT, 0, right - LEFT + 1, bottom + 1);
      ctx.clip();
      marksOfEvents(ctx, X, from, to, bottom);
      if (columns) drawStack(ctx, Y, lines, columns);
      else for (const line of lines) drawLine(ctx, X, Y, line, begin, end, isLog);
      for (const level of spec.levels || []) if (!isLog || level.value > 0) drawLevel(ctx, Y(level.value), level, right);
      for (const mark of spec.marks || []) if (!isLog || mark.value > 0) drawMark(ctx, X(mark.step), Y(mark.value), mark, right);
      ctx.restore();
      if (!isLog) drawClipped(ctx, X, lines, columns, inside, high);
    }
    showHover(panel);
  }

  function xAxis(ctx, X, from, to, width, bottom) {
    ctx.strokeStyle = color("line");
    ctx.fillStyle = color("soft");
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(LEFT, bottom + 0.5);
    ctx.lineTo(width - RIGHT, bottom + 0.5);
    ctx.stroke();
    ctx.textBaseline = "top";
    for (const step of ticksOf(from, to, Math.max(2, (width - LEFT) / 90))) {
      if (step !== Math.round(step)) continue;
      const text = (step + 0).toLocaleString("en-US"), half = ctx.measureText(text).width / 2;
      ctx.textAlign = "center";
      ctx.fillText(text, Math.min(X(step), width - half - 2), bottom + 6);
    }
  }

  function yAxis(ctx, Y, unit, low, high, width, isLog, bottom) {
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    const peak = Math.max(Math.abs(isLog ? 10 ** high : high), Math.abs(isLog ? 0 : low)), scale = scaleOf(unit, peak);
    const count = Math.max(2, (bottom - TOP) / 42);
    const values = isLog ? logTicks(low, high) : ticksOf(low / scale[0], high / scale[0], count).map((tick) => tick * scale[0]);
    for (const value of values) {
      const y = Math.round(Y(value)) + 0.5;
      if (y < TOP - 4 || y > bottom + 1) continue;
      ctx.strokeStyle = color("grid");
      ctx.beginPath();
      ctx.moveTo(LEFT, y);
      ctx.lineTo(width - RIGHT, y);
      ctx.stroke();
      ctx.fillStyle = color("soft");
      const own = isLog ? scaleOf(unit, value) : scale;
      ctx.fillText(format(unit, Math.abs(value) < 1e-12 * peak ? 0 : value, own), LEFT - 6, y);
    }
  }

  function marksOfEvents(ctx, X, from, to, bottom) {
    for (const lane of data.lanes) {
      if (!lane.lines || lane.at.length > 200) continue;
      ctx.strokeStyle = color(lane.color);
      ctx.globalAlpha = 0.55;
      ctx.setLineDash([2, 3]);
      for (const step of lane.at) {
        if (step <= from || step >= to) continue;
        ctx.beginPath();
        ctx.moveTo(Math.round(X(step)) + 0.5, 0);
        ctx.lineTo(Math.round(X(step)) + 0.5, bottom);
        ctx.stroke();
      }
      ctx.setLineDash([]);
      ctx.globalAlpha = 1;
    }
  }

  function drawLine(ctx, X, Y, line, begin, end, isLog) {
    const width = line.width || 1.6;
    ctx.lineJoin = "round";
    ctx.strokeStyle = ctx.fillStyle = color(line.color);
    ctx.setLineDash(line.dash ? [6, 4] : []);
    if (line.mean && end - begin > 150) {
      ctx.globalAlpha = 0.35;
      drawPath(ctx, X, Y, line.values, begin, end, 1, isLog, line.sparse);
      ctx.globalAlpha = 1;
      drawPath(ctx, X, Y, line.mean, begin, end, 2, isLog, line.sparse);
    } else drawPath(ctx, X, Y, line.values, begin, end, width, isLog, line.sparse);
    ctx.setLineDash([]);
  }

  function drawPath(ctx, X, Y, values, begin, end, width, isLog, sparse) {
    // Of the points of one pixel the first, the least, the most and the last are drawn: no peak is lost.
    ctx.lineWidth = width;
    ctx.beginPath();
    const single = [];
    let pixel = null, isOpen = false, count = 0, first, low, high, last, length = 0, at = 0;
    const flush = () => {
      if (pixel === null) return;
      const x = count > 1 ? pixel : at;
      isOpen ? ctx.lineTo(x, Y(first)) : ctx.moveTo(x, Y(first));
      isOpen = true;
      if (count > 1) {
        ctx.lineTo(x, Y(low));
        ctx.lineTo(x, Y(high));
        ctx.lineTo(x, Y(last));
      }
      length += 1;
      pixel = null;
    };
    const close = () => {
      flush();
      if (length === 1) single.push([at, Y(last)]);
      isOpen = false;
      length = 0;
    };
    let points = 0;
    for (let i = begin; i < end; i++) {
      const value = values[i];
      if (value === null || value === undefined || (isLog && value <= 0)) {
        if (!sparse) close();
        continue;
      }
      points += 1;
      const x = X(steps[i]), here = Math.floor(x) + 0.5;
      if (here !== pixel) {
        flush();
        pixel = here;
        count = 0;
        first = low = high = value;
      }
      at = x;
      count += 1;
      if (value < low) low = value;
      if (value > high) high = value;
      last = value;
    }
    close();
    ctx.stroke();
    const dots = sparse && points <= 120;
    for (let i = begin; dots && i < end; i++)
      if (values[i] !== null && !(isLog && values[i] <= 0)) single.push([X(steps[i]), Y(values[i])]);
    for (const [x, y] of single) {
      ctx.beginPath();
      ctx.arc(x, y, 3, 0, 7);
      ctx.fill();
    }
  }

  function columnsOf(X, lines, begin, end) {
    // Points of one pixel are their mean.
    const columns = [];
    for (let i = begin; i < end; i++) {
      const x = X(steps[i]), pixel = Math.floor(x);
      let column = columns[columns.length - 1];
      if (!column || column.pixel !== pixel) {
        column = { pixel, x, count: 0, sums: lines.map(() => 0) };
        columns.push(column);
      }
      column.count += 1;
      lines.forEach((line, k) => (column.sums[k] += line.values[i] || 0));
    }
    if (columns.length === 1) columns.push({ ...columns[0], x: columns[0].x + 8 }, { ...columns[0], x: (columns[0].x -= 8) });
    return columns.sort((a, b) => a.x - b.x);
  }
  function drawStack(ctx, Y, lines, columns) {
    let floor = columns.map(() => 0);
    lines.forEach((line, k) => {
      const top = columns.map((column, i) => floor[i] + column.sums[k] / column.count);
      ctx.fillStyle = color(line.color);
      ctx.beginPath();
      columns.forEach((column, i) => (i ? ctx.lineTo(column.x, Y(top[i])) : ctx.moveTo(column.x, Y(top[i]))));
      for (let i = columns.length - 1; i >= 0; i--) ctx.lineTo(columns[i].x, Y(floor[i]));
      ctx.fill();
      floor = top;
    });
  }

  function drawLevel(ctx, y, level, right) {
    ctx.strokeStyle = color(level.color);
    ctx.lineWidth = 1.4;
    ctx.setLineDash([7, 4]);
    ctx.beginPath();
    ctx.moveTo(LEFT, Math.round(y) + 0.5);
    ctx.lineTo(right, Math.round(y) + 0.5);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  function drawMark(ctx, x, y, mark, right) {
    if (x < LEFT || x > right) return;
    ctx.strokeStyle = color(mark.color);
    ctx.lineWidth = 2;
    ctx.beginPath();
    ctx.arc(x, y, 6, 0, 7);
    ctx.stroke();
    ctx.fillStyle = color("ink");
    const wide = ctx.measureText(mark.text).width;
    ctx.textAlign = x + wide / 2 > right ? "right" : x - wide / 2 < LEFT ? "left" : "center";
    ctx.textBaseline = y > TOP + 24 ? "bottom" : "top";
    ctx.strokeStyle = color("card");
    ctx.lineWidth = 4;
    for (const write of ["strokeText", "fillText"]) ctx[write](mark.text, x, y > TOP + 24 ? y - 10 : y + 10);
  }

  function drawClipped(ctx, X, lines, columns, inside, high) {
    // A mark where a value leaves the plot.
    ctx.fillStyle = color("soft");
    let before = -10;
    const mark = (x, top) => {
      if (top <= high || x - before < 7) return;
      before = x;
      ctx.beginPath();
      ctx.moveTo(x, 1);
      ctx.lineTo(x - 4, 8);
      ctx.lineTo(x + 4, 8);
      ctx.fill();
    };
    if (columns) for (const column of columns) mark(column.x, column.sums.reduce((sum, each) => sum + each, 0) / column.count);
    else
      for (let i = inside[0]; i < Math.min(inside[1], steps.length); i++)
        mark(X(steps[i]), Math.max(...lines.map((line) => line.values[i] ?? -Infinity)));
  }

  function drawLanes(ctx, X, lanes, from, to) {
    lanes.forEach((lane, row) => {
      const y = TOP + row * LANE;
      ctx.fillStyle = color("grid");
      ctx.fillRect(LEFT, y + LANE - 3, X(to) - LEFT, 1);
      ctx.fillStyle = color(lane.color);
      let before = -1;
      for (const step of lane.at) {
        if (step < from || step > to) continue;
        const x = Math.round(X(step));
        if (x === before) continue;
        before = x;
        ctx.fillRect(x - 1, y + 3, 2, LANE - 7);
      }
    });
  }

  // Hover, zoom
  function valueAt(line, index) {
    let i = index;
    while (line.sparse && i >= 0 && line.values[i] === null) i -= 1;
    return i >= 0 ? line.values[i] : null;
  }
  function showHover(panel) {
    const index = hover === null ? null : Math.min(hover, steps.length - 1);
    const x = index === null ? -1 : panel.X(steps[index]);
    const width = panel.plot.clientWidth;
    const inside = index !== null && x >= LEFT - 1 && x <= width - RIGHT + 1;
    panel.cross.style.display = inside ? "block" : "none";
    if (inside) Object.assign(panel.cross.style, { left: Math.round(x) + "px", top: "0", height: panel.plot.clientHeight - BOTTOM + "px" });
    for (const { line, text } of panel.texts) {
      // Without a pointer: the last value.
      const value = valueAt(line, index === null ? steps.length - 1 : index);
      text.textContent = value === null || value === undefined ? "–" : format(panel.spec.unit || "", value);
    }
  }
  function hoverAll() {
    const index = hover === null ? steps.length - 1 : Math.min(hover, steps.length - 1);
    at.textContent = steps.length ? "step " + steps[index].toLocaleString("en-US") : "no step yet";
    for (const panel of panels.values()) showHover(panel);
  }
  function setView(next) {
    view = next;
    zoom.hidden = view === null;
    drawAll();
    hoverAll();
  }
  function stepAt(panel, event) {
    const box = panel.plot.getBoundingClientRect(), [from, to] = shown();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    return from + Math.min(1, Math.max(0, share)) * (to - from);
  }
  function listen(panel) {
    const { plot, pick } = panel;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !steps.length) return;
      drag = { panel, x: event.clientX, from: stepAt(panel, event) };
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (!steps.length) return;
      const step = stepAt(panel, event), after = firstAtLeast(step);
      hover = after > 0 && (after === steps.length || step - steps[after - 1] < steps[after] - step) ? after - 1 : after;
      if (drag && drag.panel === panel) {
        const [low, high] = [drag.from, step].sort((a, b) => a - b), left = panel.X(low);
        Object.assign(pick.style, { display: "block", left: left + "px", width: panel.X(high) - left + "px", top: "0", height: plot.clientHeight - BOTTOM + "px" });
      }
      hoverAll();
    });
    const end = (event) => {
      const was = drag;
      drag = null;
      pick.style.display = "none";
      if (!was || event.type !== "pointerup" || Math.abs(event.clientX - was.x) < 5) return;
      const [low, high] = [was.from, stepAt(panel, event)].sort((a, b) => a - b);
      if (firstAtLeast(high) - firstAtLeast(low) >= 1) setView([low, high]);
    };
    plot.addEventListener("pointerup", end);
    plot.addEventListener("pointercancel", end);
    plot.addEventListener("pointerleave", () => {
      if (drag) return;
      hover = null;
      hoverAll();
    });
    plot.addEventListener("dblclick", () => setView(null));
  }

  // The page
  const main = make("main"), header = make("header"), figures = make("div", "figures"), bar = make("div", "bar");
  const grid = make("div", "panels"), tables = make("div", "tables"), footer = make("footer");
  const title = make("h1"), path = make("span", "path"), state = make("span", "state");
  const at = make("b"), hint = make("span", "grow", "drag to zoom; double click for the whole run"), zoom = make("button", "", "whole run"), live = make("span");
  zoom.hidden = true;
  zoom.onclick = () => setView(null);
  header.append(title, state, path);
  bar.append(at, hint, live, zoom);
  main.append(header, figures, bar, grid, tables, footer);
  document.body.append(main);

  function drawAll() {
    for (const panel of panels.values()) draw(panel);
  }
  function table(key, name, rows, isOpen) {
    const box = tables.querySelector(`details[data-key="${CSS.escape(key)}"]`) || make("details");
    const content = JSON.stringify(rows);
    if (box.dataset.content === content) return box;
    if (!box.dataset.key) box.open = isOpen || innerWidth > 800;
    box.dataset.key = key;
    box.dataset.content = content;
    const scroll = make("div", "scroll"), body = make("table");
    for (const row of rows) {
      const line = make("tr");
      for (const cell of row) line.append(make("td", "", cell));
      if (row.length === 1) line.firstChild.colSpan = 9;
      body.append(line);
    }
    scroll.append(body);
    box.replaceChildren(make("summary", "", name), scroll);
    return box;
  }
  function show(found) {
    data = found;
    steps = stepsOf(data.steps);
    for (const lane of data.lanes) {
      let step = 0;
      lane.at = numbers(lane.steps).map((distance) => (step += distance));
    }
    document.title = data.title;
    title.textContent = data.title;
    path.textContent = data.path;
    state.textContent = data.state;
    state.className = "state " + data.state.split(" ")[0];
    figures.replaceChildren(
      ...data.headline.map(([label, value, about]) => {
        const box = make("div", "figure");
        box.append(make("div", "label", label), make("div", "value", value), make("div", "about", about));
        return box;
      }),
    );
    const specs = [...data.panels];
    if (data.lanes.length) specs.splice(1, 0, { title: "events", kind: "lanes", lanes: data.lanes, wide: true });
    const boxes = specs.map((spec) => {
      if (!panels.has(spec.title)) panels.set(spec.title, makePanel(spec.title));
      const panel = panels.get(spec.title);
      fill(panel, spec);
      return panel.box;
    });
    for (const known of [...panels.keys()]) if (!specs.some((spec) => spec.title === known)) panels.delete(known);
    if (boxes.length !== grid.children.length || boxes.some((box, i) => grid.children[i] !== box)) grid.replaceChildren(...boxes);
    const events = data.events.map((event) => ["step " + event.step.toLocaleString("en-US"), event.text, event.at]).reverse();
    const all = data.tables.map((each) => table(each.title, each.title, each.rows, !!each.open));
    if (events.length) all.splice(data.tables.filter((each) => each.open).length, 0, table("events", "events, the latest first", events, true));
    tables.replaceChildren(...all);
    const each = data.per_point > 1 ? ` Each point is the mean of about ${Math.round(data.per_point)} rows.` : "";
    footer.textContent = ["Written " + data.written_at + " by zero-offload report." + each, ...data.notes].join(" ");
    drawAll();
    hoverAll();
  }

  // Following a run: the page's server has newer data
  async function follow(every) {
    let tag = "";
    for (;;) {
      await new Promise((resolve) => setTimeout(resolve, every));
      try {
        const answer = await fetch("data", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
        if (answer.status === 200) {
          tag = answer.headers.get("ETag") || "";
          show(await answer.json());
        } else if (answer.status !== 304) throw new Error(answer.status);
        live.textContent = "following";
      } catch (error) {
        live.textContent = "no longer following: zero-offload report has ended";
        if (data && data.state !== "running") return;
      }
      if (data && data.state !== "running") {
        live.textContent = "";
        return;
      }
    }
  }

  prefersDark.addEventListener("change", setTheme);
  new ResizeObserver(drawAll).observe(grid);
  document.addEventListener("keydown", (event) => event.key === "Escape" && setView(null));
  setTheme();
  show(JSON.parse(document.getElementById("data").textContent));
  const every = Number(document.body.dataset.follow);
  if (every) follow(every);
})();
