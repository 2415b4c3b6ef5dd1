// Draws histograms of the sizes and lifetimes of blocks.

import { chart, countTicks } from "./charts.js";
import { lineColour } from "./colours.js";
import { $ } from "./data.js";
import { byteTicks, bytes, count, duration, percent } from "./format.js";
import { canvas, painters, state, track } from "./state.js";

const HEIGHT = 220;

painters.histograms = () => {
  const t = track();
  bars("sizes", t.sizes, "block size", lineColour("allocated"), (power) => bytes(2 ** power));
  bars("lifetimes", t.lifetimes, "lifetime", "#009E73", (power) => duration(2 ** power));
};

function bars(id, bins, title, colour, name) {
  const column = state.weigh === "bytes" ? 2 : 1;
  if (!bins.length) {
    canvas(id, HEIGHT);
    $(id + "-text").textContent = "No blocks.";
    return;
  }
  const from = bins[0][0],
    to = bins[bins.length - 1][0] + 1,
    n = to - from;
  const most = bins.reduce((most, bin) => Math.max(most, bin[column]), 1) * 1.05;
  const sum = bins.reduce((sum, bin) => sum + bin[column], 0);
  const ticks = Array.from({ length: n + 1 }, (_, i) => ({
    at: i / n,
    text: name(from + i)
      .replace(/\.0+(?= )/, "")
      .replace(/ (\w)iB/, " $1iB"),
  }));
  const plot = chart(
    id,
    HEIGHT,
    most,
    state.weigh === "bytes" ? byteTicks : countTicks,
    ticks,
    title,
    state.weigh === "bytes" ? "" : "allocations",
  );
  const w = (plot.right - plot.left) / n,
    { c } = plot;
  c.fillStyle = colour;
  for (const bin of bins)
    c.fillRect(
      plot.left + (bin[0] - from) * w + 1,
      plot.y(bin[column]),
      Math.max(1, w - 2),
      plot.bottom - plot.y(bin[column]),
    );
  const top = bins.reduce((best, bin) => (bin[column] > best[column] ? bin : best));
  const text = `${state.weigh === "bytes" ? bytes(sum) : count(sum) + " blocks"} in all; most between ${name(top[0])} and ${name(top[0] + 1)}: ${percent(top[column] / sum)}.`;
  $(id + "-text").textContent = text;
  plot.it.setAttribute("aria-label", `${title}: ${text}`);
  plot.it.title = text;
}
