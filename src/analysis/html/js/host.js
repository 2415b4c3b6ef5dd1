// Draws host memory over time, from samples of the kernel's counts, below the curve of a GPU. Both curves
// have the same time axis, phases and steps.

import {
  PLOT,
  paintBands,
  paintBytes,
  paintLimit,
  paintSelection,
  paintTime,
  plotWidth,
  toTs,
  toX,
} from "./axes.js";
import { faded, highlightColour } from "./colours.js";
import { $, last } from "./data.js";
import { byteTicks, bytes, duration, element, legendEntry, moment, placeTip } from "./format.js";
import { canvas, state, track } from "./state.js";

const HOST_HEIGHT = 238;
const HOST_PARTS = [
  ["anonymous", "without a file", "#0072B2"],
  ["shared", "shared memory", "#CC79A7"],
  ["files", "files", "#8F8B66"],
];

/** Returns the highest known value of a column, or -1 if no value is known. */
const highest = (values) => values.reduce((a, b) => Math.max(a, b), -1);

/** Formats a value of a sample. A negative value is unknown. */
const knownBytes = (value) => (value < 0 ? "unknown" : bytes(value));

/** Returns the columns of the samples, or null if there are no samples. */
export function hostOf(t) {
  return t.once("host", () => {
    if (!t.host_memory) return null;
    const host = t.table(t.host_memory);
    // Resident memory including child processes; -1 if it is unknown or there are no children.
    host.whole = host.resident.map((value, i) =>
      value < 0 || host.children[i] <= 0 ? -1 : value + host.children[i],
    );
    return host;
  });
}

/** Draws the samples in view. Between two samples, the values of the earlier one are drawn. */
export function paintHost(t, colours) {
  const host = hostOf(t);
  $("host-memory").hidden = !host;
  if (!host) return;
  const { c, width, it } = canvas("host-curve", HOST_HEIGHT);
  const bottom = HOST_HEIGHT - PLOT.bottom,
    high = bottom - PLOT.top;
  const from = Math.max(0, last(host.ts, state.from)),
    end = Math.min(host.length - 1, last(host.ts, state.to));
  let most = 1;
  for (let i = from; i <= end; i++)
    for (const values of [host.resident, host.whole]) most = Math.max(most, values[i]);
  const limit = highest(host.limit),
    limitShown = limit > 0 && Math.max(most, highest(host.container)) > limit * 0.6;
  if (limitShown) for (let i = from; i <= end; i++) most = Math.max(most, limit, host.container[i]);
  most *= 1.06;
  const y = (value) => bottom - (value / most) * high;

  paintBytes(c, byteTicks(most, 4), y, width, colours);

  c.save();
  c.beginPath();
  c.rect(PLOT.left, 0, plotWidth(width), HOST_HEIGHT);
  c.clip();
  const x = (i) => Math.max(-1e4, Math.min(1e5, toX(host.ts[i], width)));
  // After the last sample, draw its values to the end of the trace.
  const right = (i) => (i + 1 < host.length ? x(i + 1) : toX(t.end_ns, width));
  const base = new Float64Array(host.length).fill(0);
  for (const [name, , colour] of HOST_PARTS) {
    c.fillStyle = faded(colour, 0.55);
    for (let i = from; i <= end; i++) {
      const value = Math.max(0, host[name][i]);
      if (value) {
        const top = y(base[i] + value);
        c.fillRect(x(i), top, Math.max(0.7, right(i) - x(i)), y(base[i]) - top);
      }
      base[i] += value;
    }
  }
  const line = (values, colour, dash) => {
    c.strokeStyle = colour;
    c.lineWidth = 1.6;
    c.setLineDash(dash);
    c.beginPath();
    let drawn = false;
    for (let i = from; i <= end; i++) {
      // An unknown value leaves a gap in the line.
      if (values[i] < 0) {
        drawn = false;
        continue;
      }
      if (drawn) c.lineTo(x(i), y(values[i]));
      else c.moveTo(x(i), y(values[i]));
      c.lineTo(right(i), y(values[i]));
      drawn = true;
    }
    c.stroke();
    c.setLineDash([]);
  };
  line(host.resident, colours.text, []);
  line(host.whole, highlightColour(), [5, 3]);
  if (limitShown) {
    line(host.container, colours.alarm, [2, 3]);
    paintLimit(c, y(limit), width, colours, `limit of the container, ${bytes(limit)}`);
  }
  paintBands(c, t, bottom, width, colours);
  paintSelection(c, high);
  if (state.at !== null) {
    c.strokeStyle = colours.accent;
    c.lineWidth = 2;
    c.beginPath();
    c.moveTo(Math.round(toX(state.at, width)) + 0.5, PLOT.top - 4);
    c.lineTo(Math.round(toX(state.at, width)) + 0.5, bottom);
    c.stroke();
  }
  c.restore();
  paintTime(c, bottom, width, colours);

  const { peak } = host,
    when = [
      duration(peak.ts_ns),
      peak.step >= 0 ? `step ${peak.step}` : "",
      peak.phase === "(none)" ? "" : peak.phase,
    ];
  const text =
    `peak ${bytes(peak.bytes)} resident at ${when.filter(Boolean).join(", ")}. ` +
    (limit > 0 ? `The container has a limit of ${bytes(limit)}.` : "No limit of a container is known.");
  $("host-text").textContent = text;
  it.setAttribute("aria-label", `Host memory: ${text}`);
  paintHostLegend(host, limitShown, colours);
}

function paintHostLegend(host, limitShown, colours) {
  const it = $("host-legend");
  it.replaceChildren();
  const entry = (name, colour) => it.append(legendEntry(name, colour));
  entry("resident", colours.text);
  for (const [name, text, colour] of HOST_PARTS)
    if (highest(host[name]) > 0) entry(text, faded(colour, 0.55));
  if (highest(host.whole) > 0) entry("with child processes", highlightColour());
  if (limitShown) entry("container, without page cache", colours.alarm);
}

/** Shows the sample under the mouse. */
export function hoverHost(event) {
  const it = $("host-curve"),
    t = track(),
    tip = $("host-tip"),
    host = hostOf(t),
    width = it.clientWidth;
  const x = event.clientX - it.getBoundingClientRect().left;
  const at = last(host.ts, toTs(x, width));
  tip.hidden = x < PLOT.left || x > width - PLOT.right || at < 0;
  if (tip.hidden) return;
  const { step, phase } = t.during(host.ts[at]);
  const where = [step === null ? "" : `step ${t.stepName(step)}`, phase === "(no phase)" ? "" : phase];
  const list = element("table");
  const row = (name, value) => {
    const line = element("tr");
    line.append(element("td", "", name), element("td", "", knownBytes(value)));
    list.append(line);
  };
  row("resident", host.resident[at]);
  for (const [name, text] of HOST_PARTS) row(text, host[name][at]);
  row("child processes", host.children[at]);
  row("container, without page cache", host.container[at]);
  row("limit of the container", host.limit[at]);
  tip.replaceChildren(
    element("b", "", `sample at ${moment(host.ts[at], t.width_ns)}`),
    element("div", "quiet", where.filter(Boolean).join(", ")),
    list,
  );
  placeTip(tip, x, width, Math.min(HOST_HEIGHT - tip.offsetHeight - 60, Math.max(10, event.offsetY - 20)));
}
