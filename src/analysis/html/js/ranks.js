// Draws a small curve for each rank and device, all on one scale.

import { columnsOf } from "./axes.js";
import { faded, highlightColour, lineColour } from "./colours.js";
import { $ } from "./data.js";
import { bytes, element, moment, percent, shown } from "./format.js";
import { choose, painters, state, tracks } from "./state.js";

painters.ranks = () => {
  const own = tracks.filter((t) => t.run === 0),
    it = $("ranks-body");
  $("ranks").hidden = own.length < 2;
  if (own.length < 2) return;
  it.replaceChildren();
  const most = Math.max(...own.map((t) => t.peak.bytes));
  const least = own.reduce((least, t) => (t.peak.bytes < least.peak.bytes ? t : least)),
    top = own.reduce((top, t) => (t.peak.bytes > top.peak.bytes ? t : top));
  it.append(
    element(
      "p",
      "quiet",
      `Peaks from ${bytes(least.peak.bytes)} (${least.label}) to ${bytes(top.peak.bytes)} (${top.label}): a skew of ${bytes(top.peak.bytes - least.peak.bytes)}, ${percent((top.peak.bytes - least.peak.bytes) / (top.peak.bytes || 1))}. Click a rank to show it above.`,
    ),
  );
  const list = element("div", "rank-list");
  it.append(list);
  const from = Math.min(...own.map((t) => t.home[0])),
    to = Math.max(...own.map((t) => t.home[1]));
  for (const [i, t] of tracks.entries()) {
    if (t.run !== 0) continue;
    const row = element("button", "rank" + (i === state.track ? " chosen" : ""));
    row.type = "button";
    row.setAttribute("aria-pressed", String(i === state.track));
    const name = element("span", "rank-name", t.label),
      peak = element("span", "number", bytes(t.peak.bytes));
    const share = element(
      "span",
      "quiet",
      [t.peak.step >= 0 ? `step ${t.peak.step}` : "", shown(t.peak.phase)].filter(Boolean).join(", ") +
        (t.oom_count ? `  OOM ${t.oom_count}` : ""),
    );
    const drawn = element("canvas", "spark");
    row.append(name, drawn, peak, share);
    row.onclick = () => choose(i);
    list.append(row);
    const ratio = window.devicePixelRatio || 1,
      width = drawn.clientWidth || 300,
      height = 30;
    drawn.width = width * ratio;
    drawn.height = height * ratio;
    const c = drawn.getContext("2d");
    c.scale(ratio, ratio);
    const { high } = columnsOf(t, t.total, from, to, Math.floor(width));
    c.fillStyle = faded(lineColour("allocated"), 0.55);
    c.beginPath();
    c.moveTo(0, height);
    high.forEach((value, x) => {
      if (from + (x / width) * (to - from) <= t.end_ns)
        c.lineTo(x, height - (value / (most || 1)) * (height - 2));
    });
    c.lineTo(Math.min(1, (t.end_ns - from) / (to - from)) * width, height);
    c.fill();
    c.fillStyle = highlightColour();
    c.fillRect(((t.peak.ts_ns - from) / (to - from)) * width - 1, 0, 2, height);
  }
  const axis = element("div", "rank-axis");
  axis.append(
    element("span", "", moment(from, to - from)),
    element("span", "", "orange-red: the peak; times are since the start of each process"),
    element("span", "", moment(to, to - from)),
  );
  list.append(axis);
};
