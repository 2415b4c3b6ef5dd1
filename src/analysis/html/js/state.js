// Keeps the state of the view, which is also stored in the page's address, and schedules drawing.

import { $, Track, isUsed } from "./data.js";

/** The keys by which the table of live blocks groups. */
export const TABLES = ["module", "category", "op", "phase", "step", "dtype", "shape", "block"];
/** The columns of the table of live blocks, for groups and for single blocks: the field, the heading, and whether
 * it is a number. */
const COLUMNS = {
  group: [
    ["bytes", "bytes", true],
    ["share", "share", true],
    ["", "", false],
    ["blocks", "blocks", true],
    ["name", "", false],
  ],
  block: [
    ["bytes", "bytes", true],
    ["share", "share", true],
    ["requested", "requested", true],
    ["born", "allocated at", true],
    ["age", "lived", true],
    ["step", "step", true],
    ["category", "category", false],
    ["shape", "tensor", false],
    ["module", "module", false],
    ["op", "op", false],
    ["phase", "phase", false],
    ["id", "alloc_id", true],
  ],
};
/** Returns the columns of the table that groups by this key. */
export const tableColumns = (by) => COLUMNS[by === "block" ? "block" : "group"];
/** Returns true if that table can be sorted by a field. */
export const isColumn = (by, field) => field !== "" && tableColumns(by).some(([name]) => name === field);
/** The orders of the levels of the icicle chart. */
export const TREES = {
  module: { text: "module, then category", path: (b) => [...b.joined.split("."), b.category] },
  apart: { text: "module, layers apart, then category", path: (b) => [...b.module.split("."), b.category] },
  category: { text: "category, then module", path: (b) => [b.category, ...b.joined.split(".")] },
  phase: { text: "phase, then op", path: (b) => [b.phase, b.op, b.category] },
};

export const state = {
  track: 0,
  from: 0,
  to: 1,
  at: null,
  mode: "lines",
  advice: -1, // the index of the advice whose curve is shown, or -1
  oom: -1, // the index of the out-of-memory error that `jumpToOom` showed last
  search: "",
  by: "module",
  tree: "module",
  sort: "bytes",
  down: true,
  more: 1,
  weigh: "bytes",
  theme: "",
};
export let page = null; // the result of load()
export const tracks = [];

/** Shows the result of load(): its runs, with a track for each device. */
export function setPage(loaded) {
  page = loaded;
  page.about.runs.forEach((run, i) => {
    for (const about of run.tracks) tracks.push(new Track(about, page, i));
  });
}

export const track = () => tracks[state.track];

/** Shows another track, in the view in which its page would open. */
export function choose(place) {
  state.track = place;
  const t = track();
  [state.from, state.to] = t.home;
  [state.at, state.more, state.advice, state.oom] = [t.opening, 1, -1, -1];
  hideTallLines(t);
  $("tracks").value = String(place);
  drawAll();
}

export const hiddenLines = new Set();

/** Hides the line of the device's memory in use if it is more than twice as high as all other lines, because
 * those would then look flat. The legend can show the line again. */
export function hideTallLines(t) {
  hiddenLines.clear();
  const most = (line) => line.high.reduce((a, b) => Math.max(a, b), 0);
  // The line of the total that the page is about is always shown.
  const others = t.lines.filter((line) => !isUsed(line.name) || line === t.total);
  const highest = Math.max(1, ...others.map(most));
  for (const line of t.lines)
    if (!others.includes(line) && most(line) > highest * 2) hiddenLines.add(line.name);
}

/** The range being selected with Shift, in pixels. */
export let selected = null;

export function select(range) {
  selected = range;
}

/** Writes the state to the address, such as `#at=1819...&view=from:to`, with times in ns. */
function writeHash() {
  const t = track();
  const params = new URLSearchParams();
  if (state.track !== firstTrack()) params.set("track", state.track);
  if (state.from !== t.home[0] || state.to !== t.home[1])
    params.set("view", `${Math.round(state.from)}:${Math.round(state.to)}`);
  if (state.at !== null) params.set("at", Math.round(state.at));
  if (state.mode !== "lines") params.set("show", state.mode);
  if (state.advice >= 0) params.set("advice", state.advice);
  if (state.search) params.set("search", state.search);
  if (state.by !== "module") params.set("by", state.by);
  if (state.tree !== "module") params.set("tree", state.tree);
  if (state.sort !== "bytes" || !state.down) params.set("sort", (state.down ? "" : "-") + state.sort);
  if (state.theme) params.set("theme", state.theme);
  // In a notebook, the page is in a frame with the address `about:`, which cannot store the state.
  if (location.protocol === "about:") return;
  const hash = "#" + params;
  if (hash !== location.hash && !(hash === "#" && !location.hash))
    history.replaceState(null, "", hash === "#" ? location.pathname + location.search : hash);
}

/** Reads the state from the address. Invalid values are ignored. */
export function readHash() {
  const params = new URLSearchParams(location.hash.slice(1));
  const number = (text) =>
    text !== null && text !== "" && Number.isFinite(Number(text)) ? Number(text) : null;
  const chosen = number(params.get("track"));
  state.track = chosen !== null && tracks[chosen] ? chosen : firstTrack();
  const t = track();
  const [from, to] = (params.get("view") ?? "").split(":").map(number);
  const sound = from !== null && to !== null && from !== undefined && to !== undefined && to > from;
  [state.from, state.to] = sound ? clampView(from, to) : t.home;
  const at = number(params.get("at"));
  state.at = at === null ? t.opening : Math.max(t.start_ns, Math.min(t.end_ns, at));
  const one = (name, all, otherwise) => (all.includes(params.get(name)) ? params.get(name) : otherwise);
  state.mode = one("show", ["lines", "category", "module"], "lines");
  const advice = number(params.get("advice"));
  state.advice = advice !== null && t.advices[advice] ? advice : -1;
  state.search = params.get("search") ?? "";
  state.by = one("by", TABLES, "module");
  state.tree = one("tree", Object.keys(TREES), "module");
  const sort = params.get("sort") ?? "bytes";
  const column = sort.replace(/^-/, "");
  [state.sort, state.down] = isColumn(state.by, column) ? [column, !sort.startsWith("-")] : ["bytes", true];
  state.theme = one("theme", ["light", "dark"], "");
}

/** Returns the index of the first run's track with the highest peak. */
function firstTrack() {
  let best = 0;
  tracks.forEach((t, i) => {
    if (t.run === 0 && t.peak.bytes > tracks[best].peak.bytes) best = i;
  });
  return best;
}

/** Returns a view inside the trace that is at least 16 ns long, or the whole trace if that is shorter. */
function clampView(from, to) {
  const t = track();
  const span = Math.max(Math.min(to - from, t.end_ns - t.start_ns), Math.min(16, t.end_ns - t.start_ns));
  from = Math.max(t.start_ns, Math.min(from, t.end_ns - span));
  return [from, from + span];
}

export function setView(from, to) {
  [state.from, state.to] = clampView(from, to);
  draw("curve");
}

export function pin(at) {
  const t = track();
  state.at = Math.max(t.start_ns, Math.min(t.end_ns, at));
  state.more = 1;
  draw("curve", "live", "segments");
}

/** Returns true if a name matches the search. Every name matches an empty search. */
export const matches = (...names) =>
  !state.search || names.some((name) => name.toLowerCase().includes(state.search.toLowerCase()));

export const painters = {};
const waiting = new Set();
/** The script time of the last 2,000 frames, in ms, for the tests. */
export const frames = [];

/** Schedules parts of the page for drawing at the next frame, each once. */
export function draw(...parts) {
  if (!waiting.size) requestAnimationFrame(paint);
  for (const part of parts) waiting.add(part);
}

let hashTimer = 0;
function paint() {
  const start = performance.now();
  const parts = [...waiting];
  waiting.clear();
  for (const part of parts) painters[part]();
  // Browsers limit how often a page may change its address, so change it only after a pause of 150 ms.
  clearTimeout(hashTimer);
  hashTimer = setTimeout(writeHash, 150);
  frames.push(performance.now() - start);
  if (frames.length > 2000) frames.shift();
}

export function drawAll() {
  draw(...Object.keys(painters));
}

/** Clears a canvas, sizes it to `height` CSS pixels at the screen's resolution, and returns its context. */
export function canvas(id, height) {
  const it = $(id),
    ratio = window.devicePixelRatio || 1,
    width = it.clientWidth;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (it.width !== w || it.height !== h) {
    it.width = w;
    it.height = h;
    it.style.height = `${height}px`;
  }
  const c = it.getContext("2d");
  c.setTransform(ratio, 0, 0, ratio, 0, 0);
  c.clearRect(0, 0, width, height);
  c.font = FONT;
  c.lineJoin = "round";
  return { c, width, height, it };
}

export const FONT =
  '12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif';
