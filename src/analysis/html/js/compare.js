// Compares two runs: their curves in one chart, and the changes from peak to peak.

import { columnsOf } from "./axes.js";
import { chart } from "./charts.js";
import { highlightColour, lineColour } from "./colours.js";
import { $ } from "./data.js";
import {
  breakable,
  byteTicks,
  bytes,
  element,
  headCell,
  makeScrollable,
  signedBytes,
  signedPercent,
  swatch,
  timeTicks,
} from "./format.js";
import { page, painters, tracks } from "./state.js";

/** Returns the device with the highest peak of each run; null if the run is missing or used no GPU memory. */
export function comparedTracks() {
  if (page.about.runs.length !== 2) return [null, null];
  return [0, 1].map((run) =>
    tracks
      .filter((t) => t.run === run)
      .reduce((best, t) => (!best || t.peak.bytes > best.peak.bytes ? t : best), null),
  );
}

painters.compare = () => {
  const two = page.about.runs.length === 2;
  $("compare").hidden = !two;
  if (!two) return;
  const [a, b] = comparedTracks();
  // A reader of this page wants the difference, so it comes before the details of one run.
  if ($("compare").previousElementSibling !== $("badges")) $("badges").after($("compare"));
  const it = $("compare-body");
  it.replaceChildren();
  if (!a || !b) {
    it.append(element("p", "quiet", "One of the runs used no GPU memory."));
    return;
  }
  const by = b.peak.bytes - a.peak.bytes;
  const verdict = element("p", "verdict");
  verdict.append(
    "From ",
    element("b", "", bytes(a.peak.bytes)),
    " to ",
    element("b", "", bytes(b.peak.bytes)),
    ": ",
    element("b", by > 0 ? "more" : "less", `${signedBytes(by)} (${signedPercent(by, a.peak.bytes)})`),
  );
  it.append(verdict);
  const names = element("p", "quiet");
  for (const [t, colour, letter] of [
    [a, lineColour("allocated"), "A"],
    [b, highlightColour(), "B"],
  ]) {
    const ranks = new Set(tracks.filter((one) => one.run === t.run).map((one) => one.label)).size;
    const which = ranks > 1 ? `, ${t.label}, which has the highest peak` : "";
    names.append(swatch(colour), `${letter}: ${page.about.runs[t.run].path}${which}\u2003`);
  }
  it.append(names);
  const drawn = element("canvas");
  drawn.id = "both";
  drawn.setAttribute("role", "img");
  it.append(drawn);
  // The time before the first step varies. So each curve starts where the page of its run alone would open.
  const longest = Math.max(...[a, b].map(({ home }) => home[1] - home[0])),
    ticks = timeTicks(0, longest, 7);
  const most = Math.max(a.peak.bytes, b.peak.bytes) * 1.06;
  const plot = chart(
    "both",
    240,
    most,
    byteTicks,
    ticks.marks.map((mark) => ({ at: mark.at / longest, text: mark.text })),
    `${ticks.unit} since ${a.home[0] > a.start_ns ? "the steps began" : "the start"}`,
    "",
  );
  plot.it.setAttribute("aria-label", `Both curves. ${verdict.textContent}`);
  const pixels = Math.floor(plot.right - plot.left);
  for (const [t, colour] of [
    [a, lineColour("allocated")],
    [b, highlightColour()],
  ]) {
    const { high } = columnsOf(t, t.total, t.home[0], t.home[0] + longest, pixels);
    const end = ((t.home[1] - t.home[0]) / longest) * pixels;
    plot.c.strokeStyle = colour;
    plot.c.lineWidth = 1.5;
    plot.c.beginPath();
    for (let x = 0; x < end; x++) plot.c.lineTo(plot.left + x, plot.y(high[x]));
    plot.c.stroke();
  }
  const pair = element("div", "pair");
  it.append(pair);
  for (const key of ["category", "module"]) pair.append(differences(a, b, key));
};

/** Returns the owners by `key` with their bytes at both peaks, the largest change first. A long list of a run ends with
 * the sum of its smallest owners. An owner that only the other run lists may be among them, so such owners are one row. */
export function changesBetween(a, b, key) {
  const all = new Map(),
    rest = [0, 0],
    isCut = [false, false];
  for (const [place, t] of [a, b].entries()) {
    for (const [name, size, , modules] of t.at_peak[key]) {
      if (modules === undefined) {
        isCut[place] = true;
        rest[place] += size;
        continue;
      }
      const plain = name.replace(" *", "");
      if (!all.has(plain)) all.set(plain, [undefined, undefined]);
      all.get(plain)[place] = (all.get(plain)[place] ?? 0) + size;
    }
  }
  for (const [name, sizes] of all) {
    if (!sizes.some((size, place) => size === undefined && isCut[place])) continue;
    for (const place of [0, 1]) rest[place] += sizes[place] ?? 0;
    all.delete(name);
  }
  if (isCut.includes(true)) all.set("(all others)", rest);
  return [...all]
    .map(([name, [x = 0, y = 0]]) => ({ name, x, y, by: y - x }))
    .sort((a, b) => Math.abs(b.by) - Math.abs(a.by));
}

/** Returns a table of the changes from run A to run B. */
function differences(a, b, key) {
  const rows = changesBetween(a, b, key);
  const most = Math.max(1, ...rows.map((row) => Math.abs(row.by)));
  const box = element("div", "scroll"),
    table = element("table", "changes"),
    head = element("tr");
  makeScrollable(box, `Changes by ${key}`);
  for (const [text, number] of [
    ["A", true],
    ["B", true],
    ["change", true],
    ["", false],
    [key, false],
  ])
    head.append(headCell(text, number ? "number" : ""));
  table.append(head);
  for (const row of rows.slice(0, 14)) {
    const line = element("tr"),
      bar = element("td", "bar-cell"),
      piece = element("span", "share");
    piece.style.width = `${(Math.abs(row.by) / most) * 100}%`;
    piece.style.background = row.by > 0 ? highlightColour() : lineColour("allocated");
    bar.append(piece);
    line.append(
      element("td", "number", bytes(row.x)),
      element("td", "number", bytes(row.y)),
      element("td", "number", signedBytes(row.by)),
      bar,
      element("td"),
    );
    line.lastChild.append(breakable(row.name));
    table.append(line);
  }
  box.append(table);
  return box;
}
