// Draws the pins of peaks, out-of-memory errors and failed calls above the curve.

import { PLOT, STEP, toX } from "./axes.js";
import { LINES, readable } from "./colours.js";
import { bytes, shown } from "./format.js";
import { state } from "./state.js";

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

export function paintPins(c, t, y, bottom, width, colours) {
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
