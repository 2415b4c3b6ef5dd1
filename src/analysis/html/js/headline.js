// Writes the headline (the difference of two runs; or the OOM and the peak; or the peak), the most important
// figures, the notes and the footer.

import { categoryColour, readable } from "./colours.js";
import { changesBetween, comparedTracks } from "./compare.js";
import { $, CPU } from "./data.js";
import {
  bytes,
  count,
  counted,
  duration,
  element,
  percent,
  quoted,
  shown,
  signedBytes,
  signedPercent,
} from "./format.js";
import { hostOf } from "./host.js";
import { page, painters, track } from "./state.js";

/** Returns an empty sentence, and the functions that append plain and emphasized text to it. */
function sentence(kind) {
  const it = element("span", kind);
  const part = (text) => it.append(text);
  const strong = (text, kind) => it.append(element("b", kind ?? "", text));
  return { it, part, strong };
}

/** Returns a sentence about the request that ran out of memory, and the memory in use at that moment. */
function oomSentence(t) {
  const { it, part, strong } = sentence("lead"),
    { oom } = t;
  strong(t.oom_count > 1 ? `Out of memory ${count(t.oom_count)} times` : "Out of memory", "alarm");
  if (t.oom_count > 1) part(", last");
  if (oom.step >= 0) part(` at step ${oom.step}`);
  if (oom.phase !== "(none)") part(` in ${oom.phase}`);
  part(": ");
  if (oom.module !== "(none)") {
    strong(oom.module);
    part(", ");
  }
  strong(oom.op === "(none)" ? "an allocation" : oom.op);
  part(" requested ");
  strong(oom.requested_bytes >= 0 ? bytes(oom.requested_bytes) : "an unknown size");
  if (t.at_oom) {
    part(" beside ");
    strong(bytes(total(t.at_oom.category)));
    part(" in live blocks");
  }
  if (t.capacity) part(` on a device of ${bytes(t.capacity)}`);
  part(". ");
  return it;
}

/** Returns a sentence about the change of the peak from run A to run B. */
function differenceSentence(a, b) {
  const { it, part, strong } = sentence("lead"),
    by = b.peak.bytes - a.peak.bytes;
  if (by === 0) part("Runs A and B have the same peak: ");
  else {
    part("The peak of run B is ");
    strong(`${bytes(Math.abs(by))} ${by > 0 ? "higher" : "lower"}`, by > 0 ? "more" : "less");
    part(` than that of run A (${signedPercent(by, a.peak.bytes)}): from ${bytes(a.peak.bytes)} to `);
  }
  strong(bytes(b.peak.bytes));
  const [largest] = changesBetween(a, b, "category").filter((row) => row.by !== 0);
  if (largest) {
    part(". The largest change is ");
    strong(`${largest.name} ${signedBytes(largest.by)}`);
  }
  part(".");
  return it;
}

/** Returns sentences about the peak, its step, phase and module, and the categories that hold most of it. */
function peakSentence(t, kind) {
  const { it, part, strong } = sentence(kind),
    { peak } = t;
  if (t.isHost && !peak.bytes) {
    part("No CPU tensor and no pinned memory was recorded.");
    return it;
  }
  if (t.isHost) part(`Peak of ${t.kind} `);
  else part(t.metric === "allocated" ? "Peak " : "Peak of device memory ");
  strong(bytes(peak.bytes));
  if (t.capacity) part(` of ${bytes(t.capacity)} (${percent(peak.bytes / t.capacity)})`);
  if (peak.step >= 0) {
    part(", at ");
    strong(`step ${peak.step}`);
  }
  if (peak.phase !== "(none)") {
    part(", in ");
    strong(peak.phase);
  }
  if (peak.module !== "(none)") {
    part(", ");
    strong(peak.module);
  }
  const largest = t.at_peak.category
    .slice(0, 2)
    .map(([name, held]) => `${name} ${percent(held / total(t.at_peak.category))}`);
  if (largest.length) {
    part(". Held by ");
    strong(largest.join(" and "));
  }
  part(".");
  return it;
}

painters.headline = () => {
  const t = track(),
    peak = t.peak,
    [a, b] = comparedTracks();
  if (a && b) $("headline").replaceChildren(differenceSentence(a, b));
  else if (t.oom) $("headline").replaceChildren(oomSentence(t), peakSentence(t, "second"));
  else $("headline").replaceChildren(peakSentence(t, ""));

  const run = page.about.runs[t.run];
  const words = t.argv.length
    ? t.argv
        .map((word, i) => (i < 2 ? word.split("/").pop() : word))
        .map(quoted)
        .join(" ")
    : run.path;
  $("run").textContent = words;
  $("run").title = words;

  const badges = $("badges");
  badges.replaceChildren();
  const badge = (text, kind) => badges.append(element("span", "badge" + (kind ? " " + kind : ""), text));
  if (t.phantom) badge("simulated GPU: reserved memory is an estimate", "phantom");
  if (t.gpu) badge(t.gpu);
  if (t.versions.torch) badge(`torch ${t.versions.torch}`);
  if (t.world_size > 1) badge(`${t.world_size} ranks`);
  if (t.oom_count)
    badge(`ran out of memory ${t.oom_count === 1 ? "once" : `${count(t.oom_count)} times`}`, "alarm");
  if (!t.finished) badge("no end row: killed, still running, or an incomplete copy", "alarm");
  if (run.lost) badge(`${counted(run.lost, "event")} lost`, "alarm");
  if (run.notes.some((note) => note.startsWith("damaged:")))
    badge("damaged trace: see the notes below", "alarm");

  // Shows the categories at the opening moment as one bar.
  const atOom = t.atOpening === t.at_oom,
    held = t.atOpening.category,
    sum = total(held),
    bar = $("holders");
  const moment = atOom ? "at the OOM" : "at the peak";
  $("holders-title").textContent =
    `${page.about.runs.length > 1 ? `Run ${"AB"[t.run]}: ` : ""}live blocks ${moment} by category, ${bytes(sum)}`;
  bar.replaceChildren();
  for (const [name, size, blocks] of held) {
    if (size / sum < 0.002) continue;
    const piece = element("span", "piece");
    const colour = categoryColour(name);
    piece.style.cssText = `flex:${size} 1 0;background:${colour};color:${readable(colour)}`;
    piece.title = `${name}: ${bytes(size)}, ${percent(size / sum)}, ${counted(blocks, "block")}`;
    piece.append(element("b", "", name), element("span", "", `${bytes(size)}  ${percent(size / sum)}`));
    bar.append(piece);
    piece.shorter = bytes(size);
  }
  // If the name and the size do not fit, leave both out. The tooltip still shows them.
  for (const piece of bar.children) {
    const [name, size] = piece.children,
      room = piece.clientWidth;
    if (size.scrollWidth > room) size.textContent = piece.shorter;
    if (name.scrollWidth > room || size.scrollWidth > room) piece.replaceChildren();
  }
  bar.setAttribute(
    "aria-label",
    `Live ${moment}: ${held.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}`,
  );

  // Shows the most important figures.
  const facts = $("facts");
  facts.replaceChildren();
  const fact = (name, value, more) => {
    const box = element("div", "fact");
    box.append(element("span", "quiet", name), element("b", "", value), element("span", "quiet", more ?? ""));
    facts.append(box);
  };
  const when = (m) =>
    [m.step >= 0 ? `step ${m.step}` : "", shown(m.phase)].filter((word) => word && word !== "–").join(", ");
  fact(
    "peak allocated",
    bytes(t.peak_allocated.bytes),
    `${duration(t.peak_allocated.ts_ns)} ${when(t.peak_allocated)}`,
  );
  if (!t.isHost)
    fact(
      "peak reserved",
      bytes(t.peak_reserved.bytes),
      `${duration(t.peak_reserved.ts_ns)} ${when(t.peak_reserved)}`,
    );
  const host = hostOf(t);
  if (host)
    fact(
      "peak of the host, resident",
      bytes(host.peak.bytes),
      `${duration(host.peak.ts_ns)} ${when(host.peak)}`,
    );
  if (!t.isHost && t.peak_used.bytes !== t.peak_reserved.bytes)
    fact(
      `peak ${t.used_name}`,
      bytes(t.peak_used.bytes),
      `${duration(t.peak_used.ts_ns)} ${when(t.peak_used)}`,
    );
  if (t.oom && t.oom.requested_bytes >= 0)
    fact("requested at the OOM", bytes(t.oom.requested_bytes), `${duration(t.oom.ts_ns)} ${when(t.oom)}`);
  const top = t.atOpening.module[0];
  if (top) {
    const layers = top[3] > 1 ? `, ${count(top[3])} modules` : "";
    fact(`largest module ${moment}`, top[0], `own ${bytes(top[1])}, ${percent(top[1] / sum)}${layers}`);
  }
  const op = peak.op;
  if (op && op !== "(none)") fact("op at the peak", op, "");
  const steps = t.steps.length ? t.steps.last[t.steps.length - 1] - t.steps.first[0] + 1 : 0;
  fact("duration", duration(t.duration_ns), `${counted(steps, "step")}, ${counted(t.rows, "event")}`);
  paintVerdict(t.verdict);
  paintNote(
    "retained",
    t.retained ? `Retained (${t.retained.moment})` : "",
    t.retained?.lines,
    t.retained?.gap,
  );
  paintNote("killed", "Killed", t.killed);
  document.title = `${t.oom ? "out of memory" : `${bytes(peak.bytes)} peak`}, ${words}`;
};

/** Shows the verdict of `memtrace oom`: why a request ran out of memory, and what to change first. */
function paintVerdict(found) {
  const box = $("verdict");
  box.hidden = !found;
  if (!found) return;
  const list = element("ul", "");
  for (const line of found.try) list.append(element("li", "", line));
  const why = element("p", "");
  why.append(element("b", "", found.verdict), found.because);
  box.replaceChildren(why, list, element("p", "quiet", "The full report: memtrace oom"));
}

/** Shows a note with a list: the memory that earlier steps left behind, as in `memtrace leaks --holders`, or
 * who killed the process, as in `memtrace summary`. */
function paintNote(id, title, lines, more) {
  const box = $(id);
  box.hidden = !lines;
  if (!lines) return;
  const list = element("ul", "");
  for (const line of lines) list.append(element("li", "", line));
  box.replaceChildren(element("b", "", title), list);
  if (more) box.append(element("p", "quiet", more));
}

const total = (groups) => groups.reduce((sum, group) => sum + group[1], 0) || 1;

/** Shows notes on the accuracy and completeness of the page, and commands for further questions. */
painters.footer = () => {
  const foot = $("footer"),
    t = track(),
    run = page.about.runs[t.run];
  foot.replaceChildren();
  const line = (text, alarm) => foot.append(element("p", alarm ? "alarm" : "", text));
  line(
    `${counted(run.lost, "event")} lost; without any owner: ${percent(run.unattributed_share)} of the peak, ${percent(run.unattributed_share_ever)} of all bytes allocated`,
    run.lost > 0,
  );
  if (t.phantom)
    line(
      "Simulated GPU: PyTorch's allocator ran without a device. Allocated memory is exact; reserved memory is an estimate.",
    );
  const kept = t.blocks.length;
  line(
    (kept < t.allocations
      ? `This page lists ${count(kept)} of ${count(t.allocations)} allocations: the largest, and the largest of those live at the peak and at the OOM. Curves and shares count all.`
      : `This page lists all ${count(t.allocations)} allocations.`) +
      (t.brief ? " Blocks without detail are not listed; curves and shares count them." : ""),
  );
  if (!hostOf(t)) line("Host memory is unknown: the trace has no sample of it.");
  if (t.pinned_peak && !t.isHost) line(`Pinned host memory: peak ${bytes(t.pinned_peak)}.`);
  for (const note of run.notes) line(note, note.startsWith("damaged:"));
  const p = element("p", "next");
  p.append(
    "In a terminal: ",
    element(
      "code",
      "",
      `memtrace peak ${quoted(run.path)} --by module${t.isHost ? ` --device ${t.device === CPU ? "cpu" : t.device}` : ""}`,
    ),
    " · ",
    element(
      "code",
      "",
      t.isHost ? `memtrace ledger --host ${quoted(run.path)}` : `memtrace frag ${quoted(run.path)}`,
    ),
  );
  if (t.oom_count) p.append(" · ", element("code", "", `memtrace oom ${quoted(run.path)}`));
  foot.append(p);
  line(`memtrace ${page.about.memtrace}, ${t.file}`);
};
