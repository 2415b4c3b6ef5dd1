// The geometry and the axes that the curves of a track share: of the device, of the host, and of an advice.

import { LINES, faded, phaseColour, readable } from "./colours.js";
import { isUsed, last } from "./data.js";
import { timeTicks } from "./format.js";
import { FONT, matches, page, selected, state } from "./state.js";

export const PLOT = { left: 62, right: 14, top: 22, bottom: 58, height: 360 };
const BAND = 9;
export const STEP = 17;

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

/** Returns the left edge of a pixel column, rounded to a screen pixel so that columns meet without a seam. */
export function edge(x) {
  const ratio = window.devicePixelRatio || 1;
  return Math.round((PLOT.left + x) * ratio) / ratio;
}

/** Returns the column of the detail that has the values of a line. */
export function detailName(line) {
  if (isUsed(line.name)) return "used";
  return line.name === "reserved" ? "reserved" : "allocated";
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
