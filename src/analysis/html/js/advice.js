// Lets the reader choose an advised change, and draws the predicted curve of the run with this change.

import { PLOT, plotWidth, toX } from "./axes.js";
import { isDark, readable } from "./colours.js";
import { $ } from "./data.js";
import { bytes, choices, element, percent } from "./format.js";
import { draw, painters, state, track } from "./state.js";

const ADVICE = { light: "#007A59", dark: "#2FD3A5" };
export const adviceColour = () => (isDark() ? ADVICE.dark : ADVICE.light);

/** Returns the advice whose curve is shown, or null if no advice is chosen. */
export const chosenAdvice = (t) => t.advices[state.advice] ?? null;

/** Returns the index of a moment's time bucket in the curve of an advice. */
export const adviceBucket = (t, advice, ts) =>
  Math.max(0, Math.min(advice.high.length - 1, Math.floor(t.bucket(ts) / t.advice_each)));

export function showAdvice(place) {
  state.advice = place;
  draw("curve", "advice");
}

/** Returns the highest value of the curve of an advice in each pixel column. */
export function adviceColumns(t, advice, pixels) {
  const high = new Float64Array(pixels),
    scale = (state.to - state.from) / pixels;
  for (let x = 0; x < pixels; x++) {
    const first = adviceBucket(t, advice, state.from + x * scale),
      end = Math.max(first, adviceBucket(t, advice, state.from + (x + 1) * scale - 1e-6));
    let most = advice.high[first];
    for (let i = first + 1; i <= end; i++) if (advice.high[i] > most) most = advice.high[i];
    high[x] = most;
  }
  return high;
}

/** Draws the curve of the chosen advice on top of the measured curve, and marks its peak. */
export function paintAdvice(c, t, y, width, colours) {
  const advice = chosenAdvice(t);
  if (!advice) return;
  const pixels = Math.max(1, Math.floor(plotWidth(width))),
    line = new Path2D();
  adviceColumns(t, advice, pixels).forEach((value, x) => {
    if (x) line.lineTo(PLOT.left + x, y(value));
    else line.moveTo(PLOT.left, y(value));
    line.lineTo(PLOT.left + x + 1, y(value));
  });
  // A wider line in the background color separates the curve from the lines that it crosses.
  for (const [colour, wide] of [
    [colours.panel, 4],
    [adviceColour(), 2],
  ]) {
    c.strokeStyle = colour;
    c.lineWidth = wide;
    c.stroke(line);
  }
  if (advice.peak.ts_ns < state.from || advice.peak.ts_ns > state.to) return;
  const x = toX(advice.peak.ts_ns, width),
    at = y(advice.peak.bytes),
    text = bytes(advice.peak.bytes),
    half = c.measureText(text).width / 2 + 6;
  const middle = Math.max(PLOT.left + half, Math.min(width - PLOT.right - half, x));
  c.fillStyle = adviceColour();
  c.beginPath();
  c.arc(x, at, 4, 0, 7);
  c.fill();
  c.strokeStyle = colours.panel;
  c.lineWidth = 1.5;
  c.stroke();
  c.fillStyle = adviceColour();
  c.beginPath();
  c.roundRect(middle - half, Math.max(PLOT.top, at - 24), half * 2, 16, 4);
  c.fill();
  c.fillStyle = readable(adviceColour());
  c.textAlign = "center";
  c.textBaseline = "middle";
  c.fillText(text, middle, Math.max(PLOT.top, at - 24) + 8.5);
}

painters.advice = () => {
  const t = track(),
    box = $("advice"),
    text = $("advice-text");
  // Without PyTorch's allocator, there is neither advice nor a reason for its absence, so hide the box.
  box.hidden = !t.raw.advice && !t.no_advice_because;
  $("advices").hidden = !t.advices.length;
  text.replaceChildren();
  if (!t.advices.length) {
    text.append(
      t.no_advice_because ? `no prediction: ${t.no_advice_because}` : "no known change lowers this peak",
    );
    return;
  }
  const save = (advice) => `${advice.change.replace(/^--/, "")} −${bytes(advice.saved_bytes)}`;
  choices(
    "advices",
    [[-1, "as it was"], ...t.advices.map((advice, place) => [place, save(advice)])],
    state.advice,
    showAdvice,
  );
  const advice = chosenAdvice(t);
  if (!advice) return;
  const { step, phase, op, module } = advice.peak;
  const where = [step >= 0 ? `step ${step}` : "", phase, op, module]
    .filter((text) => text && text !== "(none)")
    .join(", ");
  text.append(
    element("b", "", `${bytes(advice.peak.bytes)} with ${advice.change}`),
    ` instead of ${bytes(t.peak.bytes)}, ${bytes(advice.saved_bytes)} less (${percent(advice.saved_bytes / t.peak.bytes)})${where ? `, at ${where}` : ""}. `,
    `Sure: ${advice.sure}; assumes ${advice.assumes}. Costs: ${advice.costs}. The code: memtrace advise.`,
  );
};
