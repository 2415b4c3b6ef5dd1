// Draws the frame and the axes of the small charts.

import { ink } from "./colours.js";
import { count, roundStep } from "./format.js";
import { canvas } from "./state.js";

/** Draws the axes of a chart, and returns the functions that scale a value. Each mark in `xs` has a text and
 * a position `at`, from 0 (left) to 1 (right). */
export function chart(id, height, most, unitOf, xs, xTitle, yTitle) {
  const colours = ink(),
    { c, width, it } = canvas(id, height);
  const left = 56,
    right = 10,
    top = 22,
    bottom = height - 36;
  const scale = unitOf(most, 4);
  const y = (value) => bottom - (value / (most || 1)) * (bottom - top);
  const x = (share) => left + share * (width - left - right);
  c.textBaseline = "middle";
  c.textAlign = "right";
  for (const mark of scale.marks) {
    const at = Math.round(y(mark.at)) + 0.5;
    c.strokeStyle = colours.faint;
    c.beginPath();
    c.moveTo(left, at);
    c.lineTo(width - right, at);
    c.stroke();
    c.fillStyle = colours.quiet;
    c.fillText(mark.text, left - 7, at);
  }
  c.textAlign = "left";
  c.fillText([scale.unit, yTitle].filter(Boolean).join(" "), 4, 8);
  c.textAlign = "center";
  c.textBaseline = "top";
  let free = -1e9;
  for (const mark of xs) {
    const half = c.measureText(mark.text).width / 2,
      at = Math.max(left - 10 + half, Math.min(width - half, x(mark.at)));
    if (at - half < free + 6) continue;
    free = at + half;
    c.fillText(mark.text, at, bottom + 6);
  }
  c.textAlign = "right";
  c.fillText(xTitle, width - right, bottom + 21);
  c.fillStyle = colours.line;
  c.fillRect(left, bottom, width - left - right, 1);
  return { c, x, y, left, right: width - right, bottom, top, colours, it };
}

/** Returns the marks of an axis of counts. */
export function countTicks(most, ticks) {
  const step = Math.max(1, roundStep(most / ticks)),
    marks = [];
  for (let value = 0; value <= most * 1.0001; value += step) marks.push({ at: value, text: count(value) });
  return { marks, unit: "" };
}
