// Formats bytes, times and counts as the command does, and makes the small parts of the page.

import { $ } from "./data.js";

const UNITS = [
  ["GiB", 2 ** 30],
  ["MiB", 2 ** 20],
  ["KiB", 2 ** 10],
];

export function bytes(value) {
  // A size that two decimals would round up to 1024 has the next unit.
  for (const [name, size] of UNITS)
    if (Math.abs(value) >= size - Math.floor(size / 1024 / 200)) return `${rounded(value / size, 2)} ${name}`;
  return `${value} B`;
}

/** Formats a number with decimals, rounded half to even as in the command, unlike `toFixed`. */
function rounded(value, decimals) {
  const text = value.toFixed(decimals);
  // In binary, a number is halfway between two results only if it is an odd multiple of this power of two.
  const isHalf = Math.abs(value * 2 ** (decimals + 1)) % 2 === 1;
  return isHalf && text.at(-1) % 2 ? value.toFixed(decimals + 1).slice(0, -1) : text;
}

export function signedBytes(value) {
  return value > 0 ? "+" + bytes(value) : value < 0 ? "−" + bytes(-value) : "0";
}

export function duration(ns) {
  const size = Math.abs(ns);
  if (size < 1e3) return `${ns} ns`;
  if (size < 1e6) return `${rounded(ns / 1e3, 1)} µs`;
  if (size < 1e9) return `${rounded(ns / 1e6, 1)} ms`;
  if (size < 120e9) return `${rounded(ns / 1e9, 2)} s`;
  if (size < 3600e9) return `${Math.floor(ns / 60e9)} min ${pad(Math.floor(ns / 1e9) % 60)} s`;
  return `${Math.floor(ns / 3600e9)} h ${pad(Math.floor(ns / 60e9) % 60)} min`;
}

const pad = (value) => String(value).padStart(2, "0");
export const count = (value) => Math.round(value).toLocaleString("en-US");
export const percent = (share) => `${rounded(share * 100, 1)} %`;
/** Formats a count with its noun in the singular or the plural. */
export const counted = (number, noun) => `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
/** Formats a change as a percentage of `whole`, with its sign. */
export const signedPercent = (by, whole) =>
  whole ? `${by > 0 ? "+" : by < 0 ? "−" : ""}${percent(Math.abs(by) / whole)}` : "new";
export const shown = (text) => (text === "(none)" ? "–" : text);

/** Formats a moment with enough digits to distinguish it from moments that are `width` ns away. */
export function moment(ns, width) {
  if (Math.abs(ns) >= 120e9 && width >= 1e8) return duration(ns);
  const digits = Math.max(0, Math.min(9, Math.ceil(-Math.log10(width / 1e9))));
  return `${(ns / 1e9).toFixed(digits)} s`;
}

/** Returns a round step of at least `about`: 1, 2, 5 or 10 times a power of 10. */
export function roundStep(about) {
  const power = 10 ** Math.floor(Math.log10(about));
  const lead = about / power;
  return (lead <= 1 ? 1 : lead <= 2 ? 2 : lead <= 5 ? 5 : 10) * power;
}

/** Returns the marks of an axis of bytes from 0 to `most`, whose texts are in the same unit, and the unit. */
export function byteTicks(most, ticks) {
  const [name, size] = UNITS.find(([, size]) => most >= size) ?? ["B", 1];
  const step = Math.max(roundStep(most / size / ticks), size === 1 ? 1 : 0);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const marks = [];
  for (let value = 0; value * size <= most * 1.0001; value += step)
    marks.push({ at: value * size, text: `${value.toFixed(digits)}` });
  return { marks, unit: name };
}

/** Returns the marks of an axis of time, whose texts are in the same unit, and the unit. */
export function timeTicks(from, to, ticks) {
  const span = to - from;
  const [unit, size] =
    span >= 600e9
      ? ["min", 60e9]
      : span >= 2e9
        ? ["s", 1e9]
        : span >= 2e6
          ? ["ms", 1e6]
          : span >= 2e3
            ? ["µs", 1e3]
            : ["ns", 1];
  const step = Math.max(roundStep(span / size / ticks), unit === "ns" ? 1 : 0);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const marks = [];
  for (let i = Math.ceil(from / size / step); i * step * size <= to; i++) {
    const value = i * step;
    marks.push({
      at: value * size,
      text: value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }),
    });
  }
  return { marks, unit };
}

/** Returns a new element with a class and a text. A text from a trace never becomes markup. */
export function element(tag, name, text) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Returns a small square of a color, for a legend or a table. */
export function swatch(colour) {
  const made = element("i");
  made.style.background = colour;
  return made;
}

/** Returns an entry of a legend that is no button. */
export function legendEntry(name, colour) {
  const made = element("span", "entry still");
  made.append(swatch(colour), element("span", "", name));
  return made;
}

/** Places a tip beside the mouse, inside a picture of this width. `top` is the distance from the picture's top. */
export function placeTip(tip, x, width, top) {
  const left = x + 18 + tip.offsetWidth > width ? x - tip.offsetWidth - 18 : x + 18;
  tip.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
}

/** Shows a row of options, with the chosen one marked. */
export function choices(id, names, chosen, choose) {
  const it = $(id);
  it.replaceChildren();
  for (const [value, text] of names) {
    const one = element("button", "", text);
    one.type = "button";
    one.setAttribute("role", "radio");
    one.setAttribute("aria-checked", String(value === chosen));
    one.dataset.value = value;
    one.onclick = () => choose(value);
    it.append(one);
  }
}

/** Returns an element with a name in which lines may break after the separators. */
export function breakable(name) {
  const made = element("span");
  for (const part of name.split(/(?<=[._:/])/)) made.append(part, element("wbr"));
  return made;
}

/** Returns the head of a table column. Without a text, it is the head of a column of bars, which only screen
 * readers name. */
export function headCell(text, name) {
  const cell = element("th", text ? name : "bar-cell", text || undefined);
  cell.scope = "col";
  if (!text) cell.append(element("span", "hidden", "as a bar"));
  return cell;
}

/** Lets the keyboard scroll an area that may be wider than the page. */
export function makeScrollable(box, label) {
  box.tabIndex = 0;
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", label);
}

/** Returns a word, quoted for a shell if needed. */
export function quoted(word) {
  return /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
