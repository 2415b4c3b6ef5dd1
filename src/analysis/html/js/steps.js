// Compares steps: draws their curves in one chart, the peak of each, and the memory in use after each.

import { columnsOf } from "./axes.js";
import { chart } from "./charts.js";
import { faded, highlightColour, lineColour } from "./colours.js";
import { $, last } from "./data.js";
import { byteTicks, bytes, count, timeTicks } from "./format.js";
import { painters, pin, setView, state, track } from "./state.js";

/** The maximum number of evenly spaced steps in the chart. The highest and the pinned step are added. */
const OVERLAID = 40;

painters.steps = () => {
  const t = track(),
    steps = t.steps;
  $("steps").hidden = steps.length < 2;
  if (steps.length < 2) return;
  const each = Math.max(1, Math.ceil(steps.length / OVERLAID)),
    chosen = [];
  for (let i = 0; i < steps.length; i += each) chosen.push(i);
  let highest = 0;
  for (let i = 0; i < steps.length; i++) if (steps.high[i] > steps.high[highest]) highest = i;
  if (!chosen.includes(highest)) chosen.push(highest);
  const pinned = state.at === null ? -1 : last(steps.from, state.at);
  // A long first step (compilation, warm-up) would squeeze the others, so the axis has the usual length.
  const lengths = chosen.map((i) => steps.to[i] - steps.from[i]).sort((a, b) => a - b);
  const longest = Math.max(
    lengths[Math.floor(lengths.length * 0.75)] * 1.5,
    steps.to[highest] - steps.from[highest],
    1,
  );
  const most = steps.high[highest] * 1.06;
  const ticks = timeTicks(0, longest, 5);
  const plot = chart(
    "overlay",
    260,
    most,
    byteTicks,
    ticks.marks.map((mark) => ({ at: mark.at / longest, text: mark.text })),
    `${ticks.unit} since the start of the step`,
    "",
  );
  const { c } = plot;
  c.save();
  c.beginPath();
  c.rect(plot.left, 0, plot.right - plot.left, plot.bottom + 1);
  c.clip();
  const pixels = Math.floor(plot.right - plot.left);
  const curve = (i, colour, width) => {
    const from = steps.from[i],
      { high } = columnsOf(t, t.total, from, from + longest, pixels);
    const end = Math.min(pixels, ((steps.to[i] - from) / longest) * pixels);
    c.strokeStyle = colour;
    c.lineWidth = width;
    c.beginPath();
    for (let x = 0; x < end; x++) c.lineTo(plot.left + x, plot.y(high[x]));
    c.stroke();
  };
  for (const [order, i] of chosen.entries()) {
    // Later steps are darker.
    if (i !== highest && i !== pinned)
      curve(i, faded(lineColour("allocated"), 0.18 + (0.5 * order) / chosen.length), 1);
  }
  if (pinned >= 0 && pinned !== highest) curve(pinned, plot.colours.accent, 2);
  curve(highest, highlightColour(), 2);
  c.restore();
  $("overlay-text").textContent =
    `${count(chosen.length)} of ${count(steps.length)} steps, later ones darker. Orange-red: step ${t.stepName(highest)}, the highest` +
    (pinned >= 0 && pinned !== highest ? `; pin colour: step ${t.stepName(pinned)}, the pinned one.` : ".");
  plot.it.setAttribute(
    "aria-label",
    `The curves of the steps. The highest is step ${t.stepName(highest)} with ${bytes(steps.high[highest])}.`,
  );
  paintStepPeaks(t, highest, pinned);
  paintGrowth(t);
};

function paintStepPeaks(t, highest, pinned) {
  const steps = t.steps,
    n = steps.length;
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => ({
    at: share,
    text: t.stepName(Math.round(share * (n - 1))),
  }));
  const plot = chart(
    "step-peaks",
    260,
    steps.high[highest] * 1.06,
    byteTicks,
    n < 5 ? Array.from({ length: n }, (_, i) => ({ at: (i + 0.5) / n, text: t.stepName(i) })) : marks,
    "step",
    "",
  );
  const { c } = plot,
    room = plot.right - plot.left,
    w = room / n;
  if (w >= 2) {
    for (let i = 0; i < n; i++) {
      c.fillStyle =
        i === highest
          ? highlightColour()
          : i === pinned
            ? plot.colours.accent
            : faded(lineColour("allocated"), 0.7);
      c.fillRect(
        plot.left + i * w + (w > 6 ? 1 : 0),
        plot.y(steps.high[i]),
        Math.max(1, w - (w > 6 ? 2 : 0.5)),
        plot.bottom - plot.y(steps.high[i]),
      );
    }
  } else {
    c.strokeStyle = lineColour("allocated");
    c.beginPath();
    for (let x = 0; x < room; x++) {
      let high = 0;
      for (let i = Math.floor(x / w); i < Math.max((x + 1) / w, Math.floor(x / w) + 1) && i < n; i++)
        high = Math.max(high, steps.high[i]);
      c.lineTo(plot.left + x, plot.y(high));
    }
    c.stroke();
  }
  const largest = steps.input.reduce((a, b) => Math.max(a, b), 0),
    varies = steps.input.some((size) => size > 0 && size < largest);
  if (varies) {
    const tall = plot.bottom - plot.y(steps.high[highest]);
    c.strokeStyle = plot.colours.quiet;
    c.setLineDash([3, 3]);
    c.beginPath();
    for (let i = 0; i < n; i++)
      c.lineTo(plot.left + (i + 0.5) * w, plot.bottom - (tall * steps.input[i]) / largest);
    c.stroke();
    c.setLineDash([]);
  }
  plot.it.onclick = (event) => {
    const share = (event.clientX - plot.it.getBoundingClientRect().left - plot.left) / room;
    const i = Math.floor(share * n);
    if (i >= 0 && i < n) {
      setView(steps.from[i], steps.to[i]);
      pin(steps.high_ts[i]);
    }
  };
  const first = steps.high[0],
    end = steps.high[n - 1];
  $("step-peaks-text").textContent =
    `The peak of each step: ${bytes(first)} in the first, ${bytes(end)} in the last. Click a step to show it.` +
    (varies
      ? ` Dashed: the size of its largest input${t.raw.largest_input ? ` (${t.raw.largest_input})` : ""}.`
      : "");
  plot.it.setAttribute("aria-label", $("step-peaks-text").textContent);
}

/** The colours of the parts of the memory in use: kept, larger steps, cached, outside PyTorch. */
const PARTS = ["#0072B2", "#E69F00", "#56B4E9", "#999999"];

/** Draws the memory in use after each step as stacked areas. nvidia-smi shows their sum. */
function paintGrowth(t) {
  const growth = t.growth;
  $("growth-figure").hidden = !growth;
  if (!growth) return;
  const n = growth.step.length,
    sums = new Float64Array(n);
  for (const { bytes: part } of growth.parts) for (let i = 0; i < n; i++) sums[i] += part[i];
  const most = sums.reduce((a, b) => Math.max(a, b), 1);
  const marks = [0, 0.25, 0.5, 0.75, 1].map((share) => ({
    at: share,
    text: count(growth.step[Math.round(share * (n - 1))]),
  }));
  const plot = chart("growth", 260, most * 1.06, byteTicks, marks, "step", "");
  const { c } = plot,
    x = (i) => plot.left + (i / (n - 1)) * (plot.right - plot.left);
  const below = new Float64Array(n);
  growth.parts.forEach(({ bytes: part }, order) => {
    c.fillStyle = faded(PARTS[order], 0.75);
    c.beginPath();
    for (let i = 0; i < n; i++) c.lineTo(x(i), plot.y(below[i] + part[i]));
    for (let i = n - 1; i >= 0; i--) c.lineTo(x(i), plot.y(below[i]));
    c.fill();
    for (let i = 0; i < n; i++) below[i] += part[i];
  });
  // The legend is a text above the chart, which wraps with the page.
  const legend = growth.parts.map(({ name, bytes: part }, order) => {
    const more = part[n - 1] - part[Math.min(1, n - 1)];
    const entry = document.createElement("span");
    entry.className = "part";
    entry.style.setProperty("--part", PARTS[order]);
    entry.textContent = `${name} ${bytes(part[n - 1])} (${more < 0 ? "-" : "+"}${bytes(Math.abs(more))})`;
    return entry;
  });
  $("growth-text").replaceChildren(
    `Memory in use after each step, and its growth since step ${count(growth.step[Math.min(1, n - 1)])}: `,
    ...legend.flatMap((entry) => [entry, " "]),
  );
  plot.it.setAttribute("aria-label", $("growth-text").textContent);
}
