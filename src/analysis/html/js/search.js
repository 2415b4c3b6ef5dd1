// Draws the sum of the listed blocks that match the search.

import { PLOT, toX } from "./axes.js";
import { last } from "./data.js";
import { blockWords } from "./live.js";
import { matches, state } from "./state.js";

/** Draws the sum of the listed allocations that match the search, as a line. */
export function paintFound(c, t, y, width, colours) {
  const found = foundCurve(t);
  if (!found?.ts.length) return;
  c.strokeStyle = colours.text;
  c.lineWidth = 1.6;
  c.beginPath();
  let i = Math.max(0, last(found.ts, state.from)),
    level = i < found.ts.length && found.ts[i] <= state.from ? found.level[i] : 0;
  c.moveTo(PLOT.left, y(level));
  let column = -1,
    low = 0,
    high = 0;
  for (; i < found.ts.length && found.ts[i] <= state.to; i++) {
    const x = Math.round(toX(found.ts[i], width));
    if (x === column) {
      low = Math.min(low, found.level[i]);
      high = Math.max(high, found.level[i]);
      level = found.level[i];
      continue;
    }
    if (column >= 0) {
      c.lineTo(column, y(low));
      c.lineTo(column, y(high));
      c.lineTo(column, y(level));
    }
    c.lineTo(x, y(level));
    c.lineTo(x, y(found.level[i]));
    column = x;
    low = high = level = found.level[i];
  }
  if (column >= 0) {
    c.lineTo(column, y(low));
    c.lineTo(column, y(high));
    c.lineTo(column, y(level));
  }
  c.lineTo(width, y(level));
  c.stroke();
}

let foundFor = "";
let foundTrack = null;
let foundIs = null;
export function foundCurve(t) {
  if (!state.search) return null;
  if (foundFor === state.search && foundTrack === t) return foundIs;
  const changes = [],
    b = t.blocks;
  for (let i = 0; i < b.length; i++) {
    if (!matches(...blockWords(t, i))) continue;
    changes.push([b.born[i], b.bytes[i]]);
    if (b.age[i] >= 0) changes.push([b.born[i] + b.age[i], -b.bytes[i]]);
  }
  changes.sort((a, b) => a[0] - b[0]);
  const ts = new Float64Array(changes.length),
    level = new Float64Array(changes.length);
  let sum = 0;
  changes.forEach(([at, by], i) => {
    ts[i] = at;
    level[i] = sum += by;
  });
  [foundFor, foundTrack, foundIs] = [state.search, t, { ts, level }];
  return foundIs;
}
