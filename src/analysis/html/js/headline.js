// The headline: the peak, its place and its largest categories.

painters.headline = () => {
  const t = track(),
    peak = t.peak,
    head = $("headline");
  const about = [];
  const part = (text, strong) => about.push(element(strong ? "b" : "span", "", text));
  const word = t.metric === "allocated" ? "Peak " : "Peak of device memory ";
  part(word);
  part(bytes(peak.bytes), true);
  if (t.capacity) part(` of ${bytes(t.capacity)} (${percent(peak.bytes / t.capacity)})`);
  if (peak.step >= 0) {
    part(", at ");
    part(`step ${peak.step}`, true);
  }
  if (peak.phase !== "(none)") {
    part(", in ");
    part(peak.phase, true);
  }
  if (peak.module !== "(none)") {
    part(", ");
    part(peak.module, true);
  }
  const largest = t.at_peak.category
    .slice(0, 2)
    .map(([name, held]) => `${name} ${percent(held / total(t.at_peak.category))}`);
  if (largest.length) {
    part(". Held by ");
    part(largest.join(" and "), true);
  }
  part(".");
  head.replaceChildren(...about);

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
  if (t.oom_count) badge(`ran out of memory ${t.oom_count === 1 ? "once" : `${t.oom_count} times`}`, "alarm");
  if (!t.finished) badge("no end row: the process was killed or still runs", "alarm");
  if (run.lost) badge(`${count(run.lost)} events lost`, "alarm");

  // The categories at the peak, as one bar.
  const held = t.at_peak.category,
    sum = total(held),
    bar = $("holders");
  bar.replaceChildren();
  for (const [name, size, blocks] of held) {
    if (size / sum < 0.002) continue;
    const piece = element("span", "piece");
    const colour = categoryColour(name);
    piece.style.cssText = `flex:${size} 1 0;background:${colour};color:${readable(colour)}`;
    piece.title = `${name}: ${bytes(size)}, ${percent(size / sum)}, ${count(blocks)} blocks`;
    piece.append(element("b", "", name), element("span", "", `${bytes(size)}  ${percent(size / sum)}`));
    bar.append(piece);
    piece.shorter = bytes(size);
  }
  // A name that does not fit is left out; the tooltip has it.
  for (const piece of bar.children) {
    const [name, size] = piece.children,
      room = piece.clientWidth;
    if (size.scrollWidth > room) size.textContent = piece.shorter;
    if (name.scrollWidth > room || size.scrollWidth > room) piece.replaceChildren();
  }
  bar.setAttribute(
    "aria-label",
    `Live at the peak: ${held.map(([name, size]) => `${name} ${bytes(size)}`).join(", ")}`,
  );

  // The most important numbers.
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
  fact(
    "peak reserved",
    bytes(t.peak_reserved.bytes),
    `${duration(t.peak_reserved.ts_ns)} ${when(t.peak_reserved)}`,
  );
  if (t.peak_used.bytes !== t.peak_reserved.bytes)
    fact(
      `peak ${t.used_name}`,
      bytes(t.peak_used.bytes),
      `${duration(t.peak_used.ts_ns)} ${when(t.peak_used)}`,
    );
  const top = t.at_peak.module[0];
  if (top) fact("largest module at the peak", top[0], `${bytes(top[1])}, ${percent(top[1] / sum)}`);
  const op = peak.op;
  if (op && op !== "(none)") fact("op at the peak", op, "");
  const steps = t.steps.length ? t.steps.last[t.steps.length - 1] - t.steps.first[0] + 1 : 0;
  fact(
    "duration",
    duration(t.duration_ns),
    `${count(steps)} ${steps === 1 ? "step" : "steps"}, ${count(t.rows)} events`,
  );
  document.title = `${bytes(peak.bytes)} peak, ${words}`;
};

const total = (groups) => groups.reduce((sum, group) => sum + group[1], 0) || 1;

/** Notes on how far the page can be trusted. */
painters.footer = () => {
  const foot = $("footer"),
    t = track(),
    run = page.about.runs[t.run];
  foot.replaceChildren();
  const line = (text, alarm) => foot.append(element("p", alarm ? "alarm" : "", text));
  line(
    `${count(run.lost)} events lost; without any owner: ${percent(run.unattributed_share)} of the peak, ${percent(run.unattributed_share_ever)} of all bytes allocated`,
    run.lost > 0,
  );
  if (t.phantom)
    line(
      "Simulated GPU: PyTorch's allocator ran without a device. Allocated memory is exact; reserved memory is an estimate.",
    );
  const kept = t.blocks.length;
  line(
    kept < t.allocations
      ? `This page lists ${count(kept)} of ${count(t.allocations)} allocations: the largest, and those live at the peak and at the OOM. Curves and shares count all.`
      : `This page lists all ${count(t.allocations)} allocations.`,
  );
  if (t.pinned_peak) line(`Pinned host memory: peak ${bytes(t.pinned_peak)}.`);
  for (const note of run.notes) line(note);
  const p = element("p", "next");
  p.append(
    "In a terminal: ",
    element("code", "", `memtrace peak ${quoted(run.path)} --by module`),
    " · ",
    element("code", "", `memtrace frag ${quoted(run.path)}`),
  );
  if (t.oom_count) p.append(" · ", element("code", "", `memtrace oom ${quoted(run.path)}`));
  foot.append(p);
  line(`memtrace ${page.about.memtrace}, ${t.file}`);
};
