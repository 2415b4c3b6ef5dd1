// Handles input from the mouse, the wheel, touch and the keyboard.

import { adviceBucket, adviceColour, chosenAdvice, showAdvice } from "./advice.js";
import { PLOT, plotWidth, toTs, toX, valueAt } from "./axes.js";
import { categoryColour, lineColour, moduleColour, switchTheme } from "./colours.js";
import { $, last } from "./data.js";
import { bytes, element, moment, placeTip } from "./format.js";
import { hoverHost } from "./host.js";
import { pinsOf } from "./pins.js";
import { draw, hiddenLines, hideTallLines, pin, select, selected, setView, state, track } from "./state.js";

/** Multiplies the time span of the view by `factor`. The moment `around` keeps its place on the screen. */
export function zoom(factor, around) {
  const span = (state.to - state.from) * factor;
  const share = (around - state.from) / (state.to - state.from);
  setView(around - span * share, around - span * share + span);
}

/** Centers the view on a moment, zooms in far enough to separate it from other moments, and pins it. */
export function jump(ts) {
  const t = track(),
    all = t.end_ns - t.start_ns;
  const span = Math.min(state.to - state.from, Math.max(all / 20, t.width_ns * 400));
  setView(ts - span / 2, ts + span / 2);
  pin(ts);
}

export function jumpToOom() {
  const { ooms } = track();
  if (!ooms.length) return;
  state.oom = (state.oom + 1) % ooms.length;
  jump(ooms[state.oom].ts_ns);
}

export function setMode(mode) {
  state.mode = mode;
  hideTallLines(track());
  draw("curve", "legend", "choices");
}

/** Returns the moment that a click at `x` pins. This is a peak or an OOM within 5 pixels, if there is one.
 * Otherwise it is the highest time bucket of the pixel column or, if the column is narrower than a bucket,
 * the exact moment. */
function momentAt(t, x, width) {
  const from = toTs(x - 0.5, width),
    to = toTs(x + 0.5, width);
  for (const pin of pinsOf(t)) {
    if (Math.abs(toX(pin.ts, width) - x) < 5 && (pin.kind === "peak" || pin.kind === "oom")) return pin.ts;
  }
  if (to - from < t.width_ns) return toTs(x, width);
  let best = t.bucket(from);
  for (let i = best; i <= t.bucket(to); i++) if (t.total.high[i] > t.total.high[best]) best = i;
  return t.start_ns + (best + 0.5) * t.width_ns;
}

/** Lets the mouse pin a moment and show its values on both curves, and move the view in the overview. */
export function listenToCurves() {
  listenToCurve("curve", "tip", hover);
  listenToCurve("host-curve", "host-tip", hoverHost);
  listenToOverview();
}

function listenToCurve(id, tip, hover) {
  const it = $(id);
  const pointers = new Map();
  let drag = null;
  const x = (event) => event.clientX - it.getBoundingClientRect().left;
  it.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
        const by = (event.deltaX / plotWidth(it.clientWidth)) * (state.to - state.from);
        setView(state.from + by, state.to + by);
        return;
      }
      const lines = event.deltaMode === 1 ? 33 : 1;
      zoom(
        Math.exp(Math.max(-200, Math.min(200, event.deltaY * lines)) * 0.0022),
        toTs(x(event), it.clientWidth),
      );
    },
    { passive: false },
  );
  it.addEventListener("pointerdown", (event) => {
    it.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, x(event));
    drag = { x: x(event), from: state.from, to: state.to, moved: false, select: event.shiftKey };
    if (pointers.size === 2)
      drag = { pinch: [...pointers.values()], from: state.from, to: state.to, moved: true };
  });
  it.addEventListener("pointermove", (event) => {
    const at = x(event),
      width = it.clientWidth;
    if (!pointers.has(event.pointerId) || !drag) {
      hover(event);
      return;
    }
    pointers.set(event.pointerId, at);
    if (drag.pinch && pointers.size === 2) {
      const [a, b] = drag.pinch,
        [c, d] = pointers.values(),
        span = drag.to - drag.from;
      const ts = (x) => drag.from + ((x - PLOT.left) / plotWidth(width)) * span;
      const factor = Math.abs(a - b) / Math.max(8, Math.abs(c - d)),
        middle = ts((a + b) / 2);
      const from = middle - (((c + d) / 2 - PLOT.left) / plotWidth(width)) * span * factor;
      setView(from, from + span * factor);
      return;
    }
    if (Math.abs(at - drag.x) > 3) drag.moved = true;
    if (!drag.moved) return;
    $(tip).hidden = true;
    if (drag.select) {
      select([drag.x, at]);
      draw("curve");
      return;
    }
    const by = ((drag.x - at) / plotWidth(width)) * (drag.to - drag.from);
    setView(drag.from + by, drag.to + by);
  });
  const up = (event) => {
    pointers.delete(event.pointerId);
    const width = it.clientWidth;
    if (drag && !drag.moved && event.type === "pointerup") pin(momentAt(track(), x(event), width));
    if (drag?.select && drag.moved) {
      const [from, to] = [drag.x, x(event)].sort((a, b) => a - b).map((x) => toTs(x, width));
      setView(from, to);
    }
    drag = null;
    if (selected) {
      select(null);
      draw("curve");
    }
  };
  it.addEventListener("pointerup", up);
  it.addEventListener("pointercancel", up);
  it.addEventListener("pointerleave", () => ($(tip).hidden = true));
  it.addEventListener("dblclick", () => setView(track().start_ns, track().end_ns));
}

function listenToOverview() {
  const overview = $("overview");
  let grabbed = false;
  const to = (event) => {
    const t = track(),
      box = overview.getBoundingClientRect();
    const ts =
      t.start_ns + ((event.clientX - box.left - PLOT.left) / plotWidth(box.width)) * (t.end_ns - t.start_ns);
    const half = (state.to - state.from) / 2;
    setView(ts - half, ts + half);
  };
  overview.addEventListener("pointerdown", (event) => {
    grabbed = true;
    overview.setPointerCapture(event.pointerId);
    to(event);
  });
  overview.addEventListener("pointermove", (event) => {
    if (grabbed) to(event);
  });
  for (const end of ["pointerup", "pointercancel"]) overview.addEventListener(end, () => (grabbed = false));
}

/** Shows the values under the mouse. */
function hover(event) {
  const it = $("curve"),
    t = track(),
    tip = $("tip"),
    width = it.clientWidth;
  const x = event.clientX - it.getBoundingClientRect().left;
  if (x < PLOT.left || x > width - PLOT.right) {
    tip.hidden = true;
    return;
  }
  const near = pinsOf(t).filter((pin) => Math.abs(toX(pin.ts, width) - x) < 5);
  const ts = near.length ? near[near.length - 1].ts : momentAt(t, x, width);
  const { step, phase } = t.during(ts);
  tip.replaceChildren();
  tip.append(
    element("b", "", moment(ts, (state.to - state.from) / width)),
    element(
      "div",
      "quiet",
      [step === null ? "" : `step ${t.stepName(step)}`, phase === "(no phase)" ? "" : phase]
        .filter(Boolean)
        .join(", "),
    ),
  );
  for (const pin of near) tip.append(element("div", pin.kind === "oom" ? "alarm" : "", pin.title));
  const list = element("table");
  const row = (name, value, colour) => {
    const line = element("tr"),
      head = element("td"),
      swatch = element("i");
    swatch.style.background = colour;
    head.append(swatch, name);
    line.append(head, element("td", "", bytes(value)));
    list.append(line);
  };
  if (state.mode === "lines") {
    for (const line of t.lines)
      if (!hiddenLines.has(line.name)) row(line.name, valueAt(t, line, ts), lineColour(line.name));
  } else {
    const stack = t.stack(state.mode);
    const at = Math.max(0, Math.min(stack.sum.length - 1, Math.floor((ts - t.start_ns) / stack.width_ns)));
    row(t.metric, valueAt(t, t.total, ts), "transparent");
    [...stack.bands.entries()]
      .map(([i, band]) => [
        band.name,
        band.bytes[at],
        state.mode === "category" ? categoryColour(band.name) : moduleColour(i, band.name),
      ])
      .filter((one) => one[1] > 0)
      .sort((a, b) => b[1] - a[1])
      .slice(0, 8)
      .forEach((one) => {
        row(...one);
      });
  }
  const advice = chosenAdvice(t);
  if (advice) row("with the change", advice.high[adviceBucket(t, advice, ts)], adviceColour());
  tip.append(list);
  tip.hidden = false;
  placeTip(tip, x, width, Math.min(PLOT.height - tip.offsetHeight - 60, Math.max(10, event.offsetY - 20)));
}

export function listenToKeys() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.key === "Escape" && event.target === $("search")) {
      $("search").value = "";
      search("");
      $("search").blur();
      return;
    }
    if (typing || $("keys").open) return;
    const t = track(),
      span = state.to - state.from,
      middle = (state.from + state.to) / 2;
    const stepBy = (by) => {
      const { steps } = t,
        at = last(steps.from, state.at ?? t.peak.ts_ns) + by;
      if (at < 0 || at >= steps.length) return;
      const margin = (steps.to[at] - steps.from[at]) * 0.08;
      setView(steps.from[at] - margin, steps.to[at] + margin);
      pin(steps.high_ts[at]);
    };
    const keys = {
      p: () => jump(t.peak.ts_ns),
      o: jumpToOom,
      ArrowLeft: () =>
        event.shiftKey
          ? pin(state.at - span / 400)
          : setView(state.from - span * 0.12, state.to - span * 0.12),
      ArrowRight: () =>
        event.shiftKey
          ? pin(state.at + span / 400)
          : setView(state.from + span * 0.12, state.to + span * 0.12),
      "+": () => zoom(0.7, middle),
      "=": () => zoom(0.7, middle),
      "-": () => zoom(1 / 0.7, middle),
      0: () => setView(t.start_ns, t.end_ns),
      f: () => setView(t.start_ns, t.end_ns),
      "[": () => stepBy(-1),
      "]": () => stepBy(1),
      1: () => setMode("lines"),
      2: () => setMode("category"),
      3: () => setMode("module"),
      w: () => showAdvice(state.advice + 1 < t.advices.length ? state.advice + 1 : -1),
      "/": () => $("search").focus(),
      d: switchTheme,
      "?": () => $("keys").showModal(),
    };
    const act = keys[event.key] ?? keys[event.key.toLowerCase()];
    if (!act) return;
    // Prevent the arrow keys from scrolling the page.
    event.preventDefault();
    act();
  });
}

export function search(text) {
  state.search = text.trim();
  draw("legend", "curve", "live", "segments");
}
