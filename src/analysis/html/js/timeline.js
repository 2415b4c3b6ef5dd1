// Draws the curve of totals or of stacked owners, with phases and steps below it, pins above it, and an
// overview of the whole run.

import { adviceColumns, chosenAdvice, paintAdvice } from "./advice.js";
import {
  LINES,
  categoryColour,
  faded,
  ink,
  lineColour,
  moduleColour,
  phaseColour,
  readable,
} from "./colours.js";
import { $, isUsed, last } from "./data.js";
import {
  byteTicks,
  bytes,
  duration,
  element,
  legendEntry,
  moment,
  quoted,
  shown,
  swatch,
  timeTicks,
} from "./format.js";
import { paintHost } from "./host.js";
import { selected } from "./input.js";
import { blockWords } from "./live.js";
import { FONT, canvas, draw, matches, page, painters, state, track, tracks } from "./state.js";

export const PLOT = { left: 62, right: 14, top: 22, bottom: 58, height: 360 };
const BAND = 9;
const STEP = 17;

export const plotWidth = (width) => width - PLOT.left - PLOT.right;
export const toX = (ts, width) =>
  PLOT.left + ((ts - state.from) / (state.to - state.from)) * plotWidth(width);
export const toTs = (x, width) => state.from + ((x - PLOT.left) / plotWidth(width)) * (state.to - state.from);

/** Returns the lowest and the highest value of a line in each pixel column of a view. */
export function columnsOf(t, line, from, to, pixels) {
  const low = new Float64Array(pixels),
    high = new Float64Array(pixels);
  const scale = (to - from) / pixels;
  for (let x = 0; x < pixels; x++) {
    const first = t.bucket(from + x * scale),
      end = Math.max(first, t.bucket(from + (x + 1) * scale - 1e-6));
    let l = Infinity,
      h = -Infinity;
    for (let i = first; i <= end; i++) {
      if (line.low[i] < l) l = line.low[i];
      if (line.high[i] > h) h = line.high[i];
    }
    low[x] = l;
    high[x] = h;
  }
  return { low, high };
}

/** Returns the column of the detail that has the values of a line. */
function detailName(line) {
  if (isUsed(line.name)) return "used";
  return line.name === "reserved" ? "reserved" : "allocated";
}

/** Returns the detailed rows of a view that is finer than the time buckets; null if the
 * detail lacks the view. */
function detailOf(t, from, to, pixels) {
  const { ts } = t.detail;
  if (!ts.length || (to - from) / pixels > t.width_ns * 2 || from < ts[0] || to > ts[ts.length - 1])
    return null;
  const first = Math.max(0, last(ts, from)),
    end = Math.min(ts.length - 1, last(ts, to) + 1);
  // Detail exists only near the peak and near the OOM. A view with the gap between both has no detail.
  for (let i = first; i < end; i++) if (ts[i + 1] - ts[i] > t.width_ns * 64) return null;
  return { first, end };
}

painters.curve = () => {
  const t = track(),
    colours = ink();
  const { c, width, it } = canvas("curve", PLOT.height);
  const pixels = Math.max(1, Math.floor(plotWidth(width)));
  const bottom = PLOT.height - PLOT.bottom,
    high = bottom - PLOT.top;
  const drawn = t.lines.map((line) => ({ line, ...columnsOf(t, line, state.from, state.to, pixels) }));
  let most = 1;
  const counted =
    state.mode === "lines"
      ? drawn.filter(({ line }) => !hiddenLines.has(line.name))
      : [drawn[t.lines.indexOf(t.total)]];
  if (chosenAdvice(t)) counted.push({ high: adviceColumns(t, chosenAdvice(t), pixels) });
  for (const { high } of counted) for (const value of high) if (value > most) most = value;
  const capacityShown = t.capacity && most > t.capacity * 0.6;
  most = Math.max(most, capacityShown ? t.capacity : 0) * 1.06;
  const y = (value) => bottom - (value / most) * high;

  paintBytes(c, byteTicks(most, 5), y, width, colours);

  c.save();
  c.beginPath();
  c.rect(PLOT.left, 0, pixels, PLOT.height);
  c.clip();
  const detail = detailOf(t, state.from, state.to, pixels);
  if (state.mode === "lines") {
    for (const one of [...drawn].reverse()) {
      if (hiddenLines.has(one.line.name)) continue;
      const colour = lineColour(one.line.name);
      const name = detailName(one.line);
      const exact = detail && t.detail[name] ? detail : null;
      paintLine(c, t, one, exact, name, y, bottom, colour, one.line === t.total, width);
    }
  } else {
    paintStack(c, t, y, bottom, pixels, drawn[t.lines.indexOf(t.total)]);
  }
  if (capacityShown) paintLimit(c, y(t.capacity), width, colours, `device memory, ${bytes(t.capacity)}`);
  paintFound(c, t, y, width, colours);
  paintAdvice(c, t, y, width, colours);
  paintBands(c, t, bottom, width, colours);
  c.restore();
  paintTime(c, bottom, width, colours);
  paintPins(c, t, y, bottom, width, colours);
  paintSelection(c, high);
  paintHost(t, colours);
  paintOverview(t, colours);
  describeCurve(t, it);
  offerDetails(t, pixels);
};

/** Draws a dashed line at a limit of memory, with its name. */
export function paintLimit(c, y, width, colours, name) {
  const at = Math.round(y) + 0.5;
  c.setLineDash([6, 4]);
  c.strokeStyle = colours.alarm;
  c.lineWidth = 1;
  c.beginPath();
  c.moveTo(PLOT.left, at);
  c.lineTo(width, at);
  c.stroke();
  c.setLineDash([]);
  c.fillStyle = colours.alarm;
  c.textBaseline = "bottom";
  c.fillText(name, PLOT.left + 6, at - 2);
}

/** Marks the range that is being selected, if there is one, in a curve of this height. */
export function paintSelection(c, height) {
  if (!selected) return;
  c.fillStyle = faded(LINES.allocated, 0.2);
  c.fillRect(Math.min(...selected), PLOT.top, Math.abs(selected[0] - selected[1]), height);
}

export const hiddenLines = new Set();

/** Hides the line of the device's memory in use if it is more than twice as high as all other lines, because
 * those would then look flat. The legend can show the line again. */
export function hideTallLines(t) {
  hiddenLines.clear();
  const most = (line) => line.high.reduce((a, b) => Math.max(a, b), 0);
  // The line of the total that the page is about is always shown.
  const others = t.lines.filter((line) => line.name !== "device used" || line === t.total);
  const highest = Math.max(1, ...others.map(most));
  for (const line of t.lines)
    if (!others.includes(line) && most(line) > highest * 2) hiddenLines.add(line.name);
}

/** Returns the left edge of a pixel column, rounded to a screen pixel so that columns meet without a seam. */
function edge(x) {
  const ratio = window.devicePixelRatio || 1;
  return Math.round((PLOT.left + x) * ratio) / ratio;
}

/** Returns true if a line rises and falls so often that drawing its outline is slow. A rectangle for each
 * column then looks the same, and is fast. */
function isRough(low, high, y) {
  let travelled = 0;
  for (let x = 0; x < high.length; x++) travelled += y(low[x]) - y(high[x]);
  return travelled > high.length * 5;
}

function paintRough(c, one, y, bottom, colour, filled) {
  const pixels = one.high.length;
  for (const [style, area] of [
    [faded(colour, 0.16), true],
    [colour, false],
  ]) {
    if (area && !filled) continue;
    c.fillStyle = style;
    for (let x = 0; x < pixels; x++) {
      // The rectangle of a column also covers the step from the previous column.
      const from = Math.min(y(one.high[x]), x ? y(one.low[x - 1]) : Infinity),
        to = Math.max(y(one.low[x]), x ? y(one.high[x - 1]) : -Infinity);
      const top = edge(x),
        w = edge(x + 1) - top;
      if (area) c.fillRect(top, from, w, bottom - from);
      else c.fillRect(top, from - 0.6, w, Math.max(1.4, to - from + 1));
    }
  }
}

function paintLine(c, t, one, detail, name, y, bottom, colour, filled, width) {
  const pixels = one.high.length;
  if (!detail && isRough(one.low, one.high, y)) {
    paintRough(c, one, y, bottom, colour, filled);
    return;
  }
  const upper = new Path2D();
  if (detail) {
    const { ts } = t.detail,
      values = t.detail[name];
    let before = null;
    for (let i = detail.first; i <= detail.end; i++) {
      const x = Math.max(-1e4, Math.min(1e5, toX(ts[i], width)));
      if (before !== null) upper.lineTo(x, y(before));
      else upper.moveTo(x, y(values[i]));
      upper.lineTo(x, y(values[i]));
      before = values[i];
    }
    upper.lineTo(PLOT.left + pixels, y(before));
  } else {
    for (let x = 0; x < pixels; x++) {
      // The outline also goes to the lowest value of the column.
      const at = PLOT.left + x + 0.5;
      if (x === 0) upper.moveTo(at, y(one.high[x]));
      upper.lineTo(at, y(one.low[x]));
      upper.lineTo(at, y(one.high[x]));
    }
  }
  if (filled) {
    const area = new Path2D();
    area.moveTo(PLOT.left, bottom);
    for (let x = 0; x < pixels; x++) area.lineTo(PLOT.left + x + 0.5, y(one.high[x]));
    area.lineTo(PLOT.left + pixels, bottom);
    c.fillStyle = faded(colour, detail ? 0.08 : 0.16);
    c.fill(area);
  }
  c.strokeStyle = colour;
  c.lineWidth = filled ? 1.6 : 1.3;
  if (name === "reserved" || !filled) c.setLineDash(one.line.name === "reserved" ? [] : [4, 3]);
  c.stroke(upper);
  c.setLineDash([]);
}

/** Draws the stacked owners. Each pixel column shows its highest moment. */
function paintStack(c, t, y, bottom, pixels, line) {
  const stack = t.stack(state.mode),
    { bands, sum } = stack;
  const place = (ts) => Math.max(0, Math.min(sum.length - 1, Math.floor((ts - t.start_ns) / stack.width_ns)));
  const scale = (state.to - state.from) / pixels;
  const at = new Int32Array(pixels),
    shrink = new Float64Array(pixels);
  for (let x = 0; x < pixels; x++) {
    const first = place(state.from + x * scale),
      end = Math.max(first, place(state.from + (x + 1) * scale - 1e-6));
    let best = first;
    for (let i = first + 1; i <= end; i++) if (sum[i] > sum[best]) best = i;
    at[x] = best;
    // The stack has wider time buckets than the line, so only its shares are used; the line gives the total.
    shrink[x] = sum[best] > 0 ? line.high[x] / sum[best] : 0;
  }
  const base = new Float64Array(pixels).fill(bottom);
  for (const [index, band] of bands.entries()) {
    const colour = state.mode === "category" ? categoryColour(band.name) : moduleColour(index, band.name);
    const upper = new Float64Array(pixels);
    let travelled = 0;
    for (let x = 0; x < pixels; x++) {
      upper[x] = base[x] - (bottom - y(band.bytes[at[x]] * shrink[x]));
      if (x) travelled += Math.abs(upper[x] - upper[x - 1]);
    }
    c.fillStyle =
      matches(band.name) && !hiddenLines.has(band.name) ? faded(colour, 0.9) : faded(colour, 0.13);
    if (travelled > pixels * 2) {
      for (let x = 0; x < pixels; x++) {
        const left = edge(x);
        if (base[x] - upper[x] > 0.05) c.fillRect(left, upper[x], edge(x + 1) - left, base[x] - upper[x]);
      }
    } else {
      const area = new Path2D();
      area.moveTo(PLOT.left, upper[0]);
      for (let x = 0; x < pixels; x++) area.lineTo(PLOT.left + x + 0.5, upper[x]);
      area.lineTo(PLOT.left + pixels, upper[pixels - 1]);
      area.lineTo(PLOT.left + pixels, base[pixels - 1]);
      for (let x = pixels - 1; x >= 0; x--) area.lineTo(PLOT.left + x + 0.5, base[x]);
      c.fill(area);
    }
    base.set(upper);
  }
}

/** Draws the sum of the listed allocations that match the search, as a line. */
function paintFound(c, t, y, width, colours) {
  const found = foundCurve(t);
  if (!found?.ts.length) return;
  c.strokeStyle = colours.text;
  c.lineWidth = 1.6;
  c.beginPath();
  let i = Math.max(0, last(found.ts, state.from)),
    level = i < found.ts.length && found.ts[i] <= state.from ? found.level[i] : 0;
  c.moveTo(PLOT.left, y(level));
  let column = -1,
    low = 0,
    high = 0;
  for (; i < found.ts.length && found.ts[i] <= state.to; i++) {
    const x = Math.round(toX(found.ts[i], width));
    if (x === column) {
      low = Math.min(low, found.level[i]);
      high = Math.max(high, found.level[i]);
      level = found.level[i];
      continue;
    }
    if (column >= 0) {
      c.lineTo(column, y(low));
      c.lineTo(column, y(high));
      c.lineTo(column, y(level));
    }
    c.lineTo(x, y(level));
    c.lineTo(x, y(found.level[i]));
    column = x;
    low = high = level = found.level[i];
  }
  if (column >= 0) {
    c.lineTo(column, y(low));
    c.lineTo(column, y(high));
    c.lineTo(column, y(level));
  }
  c.lineTo(width, y(level));
  c.stroke();
}

let foundFor = "";
let foundTrack = null;
let foundIs = null;
function foundCurve(t) {
  if (!state.search) return null;
  if (foundFor === state.search && foundTrack === t) return foundIs;
  const changes = [],
    b = t.blocks;
  for (let i = 0; i < b.length; i++) {
    if (!matches(...blockWords(t, i))) continue;
    changes.push([b.born[i], b.bytes[i]]);
    if (b.age[i] >= 0) changes.push([b.born[i] + b.age[i], -b.bytes[i]]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  const ts = new Float64Array(changes.length),
    level = new Float64Array(changes.length);
  let sum = 0;
  changes.forEach(([at, by], i) => {
    ts[i] = at;
    level[i] = sum += by;
  });
  [foundFor, foundTrack, foundIs] = [state.search, t, { ts, level }];
  return foundIs;
}

export function paintBands(c, t, bottom, width, colours) {
  const { ts, name } = t.phases;
  c.textBaseline = "middle";
  c.textAlign = "left";
  let i = Math.max(0, last(ts, state.from));
  let drawnTo = -1;
  for (; i < ts.length && ts[i] < state.to; i++) {
    const from = Math.max(PLOT.left, toX(ts[i], width)),
      to = Math.min(width, i + 1 < ts.length ? toX(ts[i + 1], width) : toX(t.end_ns, width));
    if (to - drawnTo < 0.5) continue;
    drawnTo = to;
    const text = page.about.strings[name[i]],
      colour = phaseColour(text);
    if (colour === "transparent") continue;
    c.fillStyle = matches(text) ? colour : faded(colour, 0.25);
    c.fillRect(from, bottom + 5, Math.max(0.7, to - from), BAND);
    if (to - from > c.measureText(text).width + 8) {
      c.fillStyle = readable(colour);
      c.font = FONT.replace("12px", "9px");
      c.fillText(text, from + 4, bottom + 5 + BAND / 2 + 0.5);
      c.font = FONT;
    }
  }
  const steps = t.steps;
  i = Math.max(0, last(steps.from, state.from));
  let labelled = -1e9;
  drawnTo = -1e9;
  for (; i < steps.length && steps.from[i] < state.to; i++) {
    const from = toX(steps.from[i], width),
      to = toX(steps.to[i], width);
    if (to - drawnTo < 1) continue;
    drawnTo = to;
    c.fillStyle = i % 2 ? colours.faint : colours.line;
    const left = Math.max(PLOT.left, from),
      right = Math.min(width - PLOT.right, to);
    c.fillRect(left, bottom + STEP, Math.max(0.7, right - left - 1), 13);
    const text = (right - left > 46 ? "step " : "") + t.stepName(i);
    if (right - left > c.measureText(text).width + 6 && left > labelled + 4) {
      c.fillStyle = colours.text;
      c.font = FONT.replace("12px", "10px");
      c.fillText(text, left + 4, bottom + STEP + 7);
      c.font = FONT;
      labelled = left + c.measureText(text).width;
    }
  }
}

/** Draws the axis of bytes, with a line across the plot at each mark. */
export function paintBytes(c, scale, y, width, colours) {
  c.lineWidth = 1;
  c.textAlign = "right";
  c.textBaseline = "middle";
  for (const mark of scale.marks) {
    const at = Math.round(y(mark.at)) + 0.5;
    c.strokeStyle = colours.faint;
    c.beginPath();
    c.moveTo(PLOT.left, at);
    c.lineTo(width - PLOT.right, at);
    c.stroke();
    c.fillStyle = colours.quiet;
    c.fillText(mark.text, PLOT.left - 8, at);
  }
  c.textAlign = "left";
  c.fillText(scale.unit, 6, PLOT.top - 10);
}

export function paintTime(c, bottom, width, colours) {
  const scale = timeTicks(state.from, state.to, Math.max(3, plotWidth(width) / 110));
  c.textAlign = "center";
  c.textBaseline = "top";
  for (const mark of scale.marks) {
    const x = toX(mark.at, width);
    if (x < PLOT.left - 1 || x > width - PLOT.right + 1) continue;
    c.fillStyle = colours.line;
    c.fillRect(Math.round(x), bottom, 1, 4);
    c.fillStyle = colours.quiet;
    const half = c.measureText(mark.text).width / 2;
    c.fillText(mark.text, Math.min(width - half - 22, Math.max(x, half)), bottom + 35);
  }
  c.textAlign = "right";
  c.fillStyle = colours.quiet;
  c.fillText(scale.unit, width - 2, bottom + 35);
  c.fillStyle = colours.line;
  c.fillRect(PLOT.left, bottom, plotWidth(width), 1);
}

/** Returns the pins of failed calls, peaks and OOMs. The last pins get their labels first. */
export function pinsOf(t) {
  return t.once("pins", () => [
    ...t.failed.map((m) => ({
      ts: m.ts_ns,
      kind: "retry",
      text: "retry",
      title: `cudaMalloc failed (status ${m.status}): the allocator empties its cache and retries`,
    })),
    ...(t.isHost
      ? []
      : [
          {
            ts: t.peak_reserved.ts_ns,
            kind: "reserved",
            text: "reserved",
            title: `peak of reserved memory: ${bytes(t.peak_reserved.bytes)}`,
          },
        ]),
    ...t.ooms.map((m) => ({
      ts: m.ts_ns,
      kind: "oom",
      text: "OOM",
      title: `out of memory: ${m.requested_bytes >= 0 ? bytes(m.requested_bytes) : "a request"} for ${shown(m.op)} in ${shown(m.module)}`,
    })),
    { ts: t.peak.ts_ns, kind: "peak", text: "peak", title: `peak: ${bytes(t.peak.bytes)}` },
  ]);
}

function paintPins(c, t, y, bottom, width, colours) {
  const taken = [];
  const colourOf = { peak: colours.text, reserved: LINES.reserved, oom: colours.alarm, retry: "#E69F00" };
  c.textBaseline = "middle";
  for (const pin of [...pinsOf(t)].reverse()) {
    if (pin.ts < state.from || pin.ts > state.to || (pin.kind === "reserved" && state.mode !== "lines"))
      continue;
    const x = Math.round(toX(pin.ts, width)) + 0.5,
      colour = colourOf[pin.kind];
    c.strokeStyle = colour;
    c.globalAlpha = pin.kind === "reserved" || pin.kind === "retry" ? 0.5 : 0.8;
    c.setLineDash(pin.kind === "peak" || pin.kind === "oom" ? [] : [2, 3]);
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(x, PLOT.top - 6);
    c.lineTo(x, bottom);
    c.stroke();
    c.setLineDash([]);
    c.globalAlpha = 1;
    const text = pin.kind === "peak" ? `peak ${bytes(t.peak.bytes)}` : pin.text;
    const w = c.measureText(text).width + 12;
    // Put the label above its pin or, if that space is taken, next to another label. Without space within 140
    // pixels, the pin gets no label.
    const free = (left) =>
      left >= PLOT.left &&
      left + w <= width - 2 &&
      !taken.some(([from, to]) => left < to + 3 && left + w > from - 3);
    const beside = taken
      .flatMap(([from, to]) => [to + 4, from - w - 4])
      .sort((a, b) => Math.abs(a + w / 2 - x) - Math.abs(b + w / 2 - x));
    const left = [Math.max(PLOT.left, Math.min(width - w - 2, x - w / 2)), ...beside].find(free);
    if (left === undefined || Math.abs(left + w / 2 - x) > 140) continue;
    taken.push([left, left + w]);
    c.fillStyle = colour;
    c.beginPath();
    c.roundRect(left, 1, w, 16, 4);
    c.fill();
    c.textAlign = "center";
    c.fillStyle = pin.kind === "peak" ? colours.panel : readable(colour.startsWith("#") ? colour : "#c0392b");
    c.fillText(text, left + w / 2, 9.5);
  }
  if (t.peak.ts_ns >= state.from && t.peak.ts_ns <= state.to) {
    c.fillStyle = colours.text;
    c.beginPath();
    c.arc(toX(t.peak.ts_ns, width), y(t.peak.bytes), 4, 0, 7);
    c.fill();
    c.strokeStyle = colours.panel;
    c.lineWidth = 1.5;
    c.stroke();
  }
  if (state.at !== null && state.at >= state.from && state.at <= state.to) {
    const x = Math.round(toX(state.at, width)) + 0.5;
    c.strokeStyle = colours.accent;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(x, PLOT.top - 4);
    c.lineTo(x, bottom + STEP + 14);
    c.stroke();
    c.fillStyle = colours.accent;
    c.beginPath();
    c.moveTo(x - 5, bottom + STEP + 20);
    c.lineTo(x + 5, bottom + STEP + 20);
    c.lineTo(x, bottom + STEP + 13);
    c.fill();
  }
}

const OVERVIEW = 44;

/** The track, width, theme and screen resolution for which `overviewImage` was computed. */
let overviewFor = "";
let overviewImage = null;
function paintOverview(t, colours) {
  const { c, width, height } = canvas("overview", OVERVIEW);
  const pixels = Math.max(1, Math.floor(plotWidth(width)));
  const key = [state.track, pixels, colours.text, window.devicePixelRatio].join();
  if (overviewFor !== key) {
    overviewFor = key;
    overviewImage = columnsOf(t, t.total, t.start_ns, t.end_ns, pixels).high;
  }
  const most = t.peak.bytes * 1.05 || 1;
  c.fillStyle = faded(LINES.allocated, 0.35);
  overviewImage.forEach((value, x) => {
    const left = edge(x),
      top = (value / most) * (height - 4);
    c.fillRect(left, height - top, edge(x + 1) - left, top);
  });
  const span = t.end_ns - t.start_ns,
    x = (ts) => PLOT.left + ((ts - t.start_ns) / span) * pixels;
  c.fillStyle = colours.panel;
  c.globalAlpha = 0.72;
  c.fillRect(PLOT.left, 0, x(state.from) - PLOT.left, height);
  c.fillRect(x(state.to), 0, PLOT.left + pixels - x(state.to), height);
  c.globalAlpha = 1;
  c.strokeStyle = colours.accent;
  c.lineWidth = 1.5;
  c.strokeRect(x(state.from) + 0.5, 1, Math.max(2, x(state.to) - x(state.from) - 1), height - 2);
  c.fillStyle = colours.alarm;
  for (const oom of t.ooms) c.fillRect(x(oom.ts_ns) - 0.5, 0, 1.5, height);
  c.fillStyle = colours.text;
  c.fillRect(x(t.peak.ts_ns) - 0.5, 0, 1.5, height);
}

function describeCurve(t, it) {
  const text =
    `Memory from ${moment(state.from, state.to - state.from)} to ${moment(state.to, state.to - state.from)}. Peak ${bytes(t.peak.bytes)} at ${duration(t.peak.ts_ns)}` +
    (t.peak.step >= 0 ? `, step ${t.peak.step}` : "") +
    ". " +
    (state.at === null
      ? ""
      : `Pinned at ${moment(state.at, t.width_ns)}: ${bytes(valueAt(t, t.total, state.at))}.`);
  it.setAttribute("aria-label", text);
  clearTimeout(describeCurve.timer);
  // Change the text for screen readers only when the view has stopped moving, not at every frame of a drag.
  describeCurve.timer = setTimeout(() => ($("curve-text").textContent = text), 600);
}

/** Returns the value of a line at a moment: exact in the detail, or else the maximum of the time bucket. */
export function valueAt(t, line, ts) {
  if (line === t.total && ts === t.peak.ts_ns) return t.peak.bytes;
  const rows = t.detail,
    at = last(rows.ts, ts);
  const name = detailName(line);
  if (rows[name] && at >= 0 && at + 1 < rows.length && rows.ts[at + 1] - rows.ts[at] < t.width_ns * 64)
    return rows[name][at];
  return line.high[t.bucket(ts)];
}

/** Offers a command for details if the view is finer than the time buckets and not in the detail. */
function offerDetails(t, pixels) {
  const it = $("finer"),
    fine = (state.to - state.from) / pixels < t.width_ns && !detailOf(t, state.from, state.to, pixels);
  it.hidden = !fine;
  if (!fine) return;
  const seconds = (ns, up) =>
    `${((up ? Math.ceil(ns) : Math.floor(ns)) / 1e9).toFixed(9).replace(/0+$/, "").replace(/\.$/, "")}s`;
  const ofRank = tracks.filter((one) => one.run === t.run && one.rank === t.rank);
  const isAlone = ofRank.every((one) => one.file === t.file);
  const path = quoted(isAlone ? page.about.runs[t.run].path : t.file);
  const command = `memtrace report ${path} --window ${seconds(state.from)}:${seconds(state.to, true)}${tracks.length > 1 && isAlone ? ` --rank ${t.rank}` : ""} -o window.html`;
  const copy = element("button", "", "Copy");
  copy.type = "button";
  copy.onclick = () => navigator.clipboard?.writeText(command).then(() => (copy.textContent = "Copied"));
  it.replaceChildren(
    `This page resolves ${duration(t.width_ns)}. For every row in this view: `,
    element("code", "", command),
    " ",
    copy,
  );
}

painters.legend = () => {
  const t = track(),
    it = $("legend");
  it.replaceChildren();
  const entry = (name, colour, value, title) => {
    const one = element("button", "entry");
    one.type = "button";
    one.title = title;
    one.setAttribute("aria-pressed", String(!hiddenLines.has(name)));
    one.append(swatch(colour), element("span", "", name));
    if (value) one.append(element("span", "quiet", value));
    one.onclick = () => {
      if (!hiddenLines.delete(name)) hiddenLines.add(name);
      draw("legend", "curve");
    };
    it.append(one);
  };
  if (state.mode === "lines") {
    for (const line of t.lines)
      entry(
        line.name,
        lineColour(line.name),
        `peak ${bytes(line.high.reduce((a, b) => Math.max(a, b), 0))}`,
        "Show or hide this line",
      );
  } else {
    const { bands } = t.stack(state.mode);
    const share = new Map(
      (state.mode === "category" ? t.at_peak.category : []).map(([name, size]) => [
        name.replace(" *", ""),
        size,
      ]),
    );
    bands.forEach((band, i) => {
      entry(
        band.name,
        state.mode === "category" ? categoryColour(band.name) : moduleColour(i, band.name),
        share.has(band.name) ? `${bytes(share.get(band.name))} at the peak` : "",
        "Dim this band",
      );
    });
  }
  if (state.search) {
    const found = foundCurve(t),
      one = legendEntry(`matches of “${state.search}”`, "var(--text)");
    one.title = "The sum of the listed blocks whose module, op, phase, category or shape matches the search";
    const most = found.level.reduce((a, b) => Math.max(a, b), 0);
    one.append(element("span", "quiet", found.ts.length ? `peak ${bytes(most)}` : "none"));
    it.append(one);
  }
  const phases = [...new Set(t.phases.name)]
    .map((place) => page.about.strings[place])
    .filter((name) => phaseColour(name) !== "transparent");
  if (phases.length) {
    const group = element("span", "phases");
    group.append(element("span", "quiet", "phases:"));
    for (const name of phases.slice(0, 8)) group.append(legendEntry(name, phaseColour(name)));
    it.append(group);
  }
};
