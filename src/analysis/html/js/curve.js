// Draws the curve of totals or of stacked owners, with phases and steps below it, and its legend.

import { adviceColumns, chosenAdvice, paintAdvice } from "./advice.js";
import {
  PLOT,
  columnsOf,
  detailName,
  edge,
  paintBands,
  paintBytes,
  paintLimit,
  paintSelection,
  paintTime,
  plotWidth,
  toX,
  valueAt,
} from "./axes.js";
import { categoryColour, faded, ink, lineColour, moduleColour, phaseColour } from "./colours.js";
import { $, last } from "./data.js";
import { byteTicks, bytes, duration, element, legendEntry, moment, quoted, swatch } from "./format.js";
import { paintHost } from "./host.js";
import { paintOverview } from "./overview.js";
import { paintPins } from "./pins.js";
import { foundCurve, paintFound } from "./search.js";
import { canvas, draw, hiddenLines, matches, page, painters, state, track, tracks } from "./state.js";

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
  if (!filled && name !== "reserved") c.setLineDash([4, 3]);
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
