// Starts the page: loads the data, and connects the controls.

import { applyTheme, switchTheme } from "./colours.js";
import { $, load } from "./data.js";
import { choices, element } from "./format.js";
import { jump, jumpToOom, listenToCurves, listenToKeys, search, setMode, zoom } from "./input.js";
import { liveAt, zoomOut } from "./live.js";
import { listenToSegments } from "./segments.js";
import {
  TABLES,
  TREES,
  choose,
  draw,
  drawAll,
  frames,
  hideTallLines,
  isColumn,
  page,
  painters,
  readHash,
  setPage,
  setView,
  state,
  track,
  tracks,
} from "./state.js";

async function main() {
  setPage(await load());
  if (!tracks.length) {
    $("headline").textContent = "No GPU memory was used.";
    for (const section of document.querySelectorAll("section")) section.hidden = true;
    const run = page.about.runs[0];
    $("footer").append(...[run?.path ?? "", ...(run?.notes ?? [])].map((text) => element("p", "", text)));
    return;
  }
  readHash();
  hideTallLines(track());
  for (const [i, t] of tracks.entries()) {
    const one = element("option", "", (page.about.runs.length > 1 ? "AB"[t.run] + ": " : "") + t.label);
    one.value = String(i);
    $("tracks").append(one);
  }
  $("tracks").hidden = tracks.length < 2;
  $("tracks").value = String(state.track);
  $("tracks").onchange = (event) => choose(Number(event.target.value));
  for (const [name, tree] of Object.entries(TREES)) {
    const one = element("option", "", tree.text);
    one.value = name;
    $("tree").append(one);
  }
  $("tree").value = state.tree;
  $("tree").onchange = (event) => {
    state.tree = event.target.value;
    zoomOut();
    draw("live");
  };
  $("search").value = state.search;
  $("search").oninput = (event) => search(event.target.value);
  $("to-peak").onclick = () => jump(track().peak.ts_ns);
  $("to-oom").onclick = jumpToOom;
  $("zoom-in").onclick = () => zoom(0.6, (state.from + state.to) / 2);
  $("zoom-out").onclick = () => zoom(1 / 0.6, (state.from + state.to) / 2);
  $("fit").onclick = () => setView(track().start_ns, track().end_ns);
  $("theme").onclick = switchTheme;
  $("help").onclick = () => $("keys").showModal();
  $("more").onclick = () => {
    state.more *= 4;
    draw("live");
  };
  listenToCurves();
  listenToKeys();
  listenToSegments();
  applyTheme();
  addEventListener("hashchange", () => {
    readHash();
    $("tracks").value = String(state.track);
    $("search").value = state.search;
    $("tree").value = state.tree;
    applyTheme();
    drawAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    applyTheme();
    drawAll();
  });
  let seen = 0;
  new ResizeObserver(() => {
    if (seen !== document.body.clientWidth) {
      seen = document.body.clientWidth;
      drawAll();
    }
  }).observe(document.body);
  // Print in the light theme, at the width of the paper.
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    for (const name of Object.keys(painters)) painters[name]();
  });
  addEventListener("afterprint", () => {
    applyTheme();
    drawAll();
  });
  drawAll();
}

painters.choices = () => {
  choices(
    "modes",
    [
      ["lines", "Totals"],
      ["category", "By category"],
      ["module", "By module"],
    ],
    state.mode,
    setMode,
  );
  choices(
    "by",
    TABLES.map((name) => [name, name === "block" ? "blocks" : name]),
    state.by,
    (by) => {
      state.by = by;
      state.more = 1;
      if (!isColumn(by, state.sort)) [state.sort, state.down] = ["bytes", true];
      draw("choices", "live");
    },
  );
  choices(
    "count-by",
    [
      ["bytes", "bytes"],
      ["count", "allocations"],
    ],
    state.weigh,
    (weigh) => {
      state.weigh = weigh;
      draw("choices", "histograms");
    },
  );
  $("to-oom").hidden = !track().ooms.length;
};

/** Gives tests and debuggers access to the page. `memtrace.frames` has the drawing times in ms. */
globalThis.memtrace = {
  state,
  frames,
  get tracks() {
    return tracks;
  },
  liveAt: (ts) => liveAt(track(), ts),
  ready: null,
};
globalThis.memtrace.ready = main().catch((error) => {
  const it = $("problem");
  it.hidden = false;
  it.textContent = `This page could not be shown: ${error.message}`;
  throw error;
});
