// Draws the whole run below the curve, and which part of it the curve shows.

import { PLOT, columnsOf, edge, plotWidth } from "./axes.js";
import { LINES, faded } from "./colours.js";
import { canvas, state } from "./state.js";

const OVERVIEW = 44;

/** The track, width, theme and screen resolution for which `overviewImage` was computed. */
let overviewFor = "";
let overviewImage = null;
export function paintOverview(t, colours) {
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
