// Defines colors that color-blind readers can distinguish, after Okabe and Ito, for light and dark themes.
// The pink is paler than theirs, so that its lightness differs from the green on which it is stacked.

import { $, isUsed } from "./data.js";
import { drawAll, state } from "./state.js";

const CATEGORY = {
  parameter: "#0072B2",
  buffer: "#7DB9DE",
  gradient: "#D55E00",
  activation: "#009E73",
  temporary: "#E69F00",
  optimizer_state: "#E3A5C7",
  input: "#56B4E9",
  autograd_detail: "#8A6D9B",
  kv_cache: "#4B6A9B",
  cuda_graph: "#6FBF9F",
  workspace: "#C8B400",
  other: "#8F8B66",
  script: "#B5A28C",
  loaded: "#9C755F",
  unsharded_param: "#4A9BD1",
  unsharded_grad: "#E58E57",
  all_gather: "#9C7BB5",
  reduce_scatter: "#A65B83",
  "(no category)": "#9AA0A6",
};

const MODULES = [
  "#0072B2",
  "#E69F00",
  "#009E73",
  "#CC79A7",
  "#56B4E9",
  "#D55E00",
  "#8F8B66",
  "#4B6A9B",
  "#C8B400",
  "#6FBF9F",
  "#A65B83",
  "#9FCBEA",
  "#9AA0A6",
];

export const LINES = { allocated: "#0072B2", reserved: "#D55E00" };

export const categoryColour = (name) => CATEGORY[name.replace(" *", "")] ?? "#9AA0A6";
export const moduleColour = (place, name) => (name === "(other)" ? "#9AA0A6" : MODULES[place % 12]);
/** The colors of LINES in the dark theme, which are bright enough for thin lines. */
const DARK_LINES = { allocated: "#56A9E8", reserved: "#F0884A" };

export const lineColour = (name) =>
  (isDark() ? DARK_LINES : LINES)[name] ?? (isUsed(name) ? "#8A6D9B" : "#8F8B66");
/** Returns the color of what stands out: the highest step, a rank's peak, run B, memory with child processes. */
export const highlightColour = () => lineColour("reserved");

const OTHER_PHASES = ["#8F8B66", "#4B6A9B", "#C8B400", "#6FBF9F", "#A65B83"];

/** Returns the color of a phase. Common phases have fixed colors; other colors follow from the name. */
export function phaseColour(name) {
  const known = {
    forward: "#56B4E9",
    backward: "#E69F00",
    optimizer: "#CC79A7",
    "optimizer.step": "#CC79A7",
    "(none)": "transparent",
    "(no phase)": "transparent",
    eval: "#009E73",
    dataloader: "#8F8B66",
    zero_grad: "#D55E00",
  };
  if (Object.hasOwn(known, name)) return known[name];
  let hash = 0;
  for (const c of name) hash = (hash * 31 + c.charCodeAt(0)) >>> 0;
  return OTHER_PHASES[hash % OTHER_PHASES.length];
}

/** Returns the colors of the page in the current theme, from the style sheet. */
export function ink() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return {
    text: get("--text"),
    quiet: get("--quiet"),
    line: get("--line"),
    faint: get("--faint"),
    panel: get("--panel"),
    alarm: get("--alarm"),
    accent: get("--accent"),
  };
}

/** Returns `colour` with the given opacity. */
export function faded(colour, opacity) {
  const n = parseInt(colour.slice(1), 16);
  return `rgba(${n >> 16},${(n >> 8) & 255},${n & 255},${opacity})`;
}

/** Returns a dark or a light text color, whichever has more contrast on `colour`. */
export function readable(colour) {
  const n = parseInt(colour.slice(1), 16);
  const light =
    0.2126 * ((n >> 16) / 255) ** 2.2 +
    0.7152 * (((n >> 8) & 255) / 255) ** 2.2 +
    0.0722 * ((n & 255) / 255) ** 2.2;
  return light > 0.22 ? "#10151c" : "#ffffff";
}

export function isDark() {
  // Reads the theme of the document, not the chosen theme, because a page is always
  // printed in the light theme.
  const { theme } = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

export function applyTheme() {
  document.documentElement.dataset.theme = state.theme;
  $("theme").textContent = isDark() ? "light" : "dark";
}

export function switchTheme() {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const wanted = isDark() ? "light" : "dark";
  state.theme = wanted === system ? "" : wanted;
  applyTheme();
  drawAll();
}
