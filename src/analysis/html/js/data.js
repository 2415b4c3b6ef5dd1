// Decodes the data of the page: a deflated stream of JSON and columns, in base64.

/** Returns the element with this id. */
export const $ = (id) => document.getElementById(id);

/** The device number of CPU tensors. Pinned memory has -1. */
export const CPU = -2;

/** Returns true if a line with this name shows all memory in use. Without samples of the device, the line has
 * the second name, because other memory is unknown. */
export const isUsed = (name) => name === "device used" || name === "torch and libraries";

/** Inflates the data. Returns the JSON and a function that decodes a column. */
export async function load() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "this browser is too old: it lacks DecompressionStream (needs Chrome 103, Firefox 113 or Safari 16.4)",
    );
  }
  const text = atob($("data").textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const columns = bytes.subarray(4 + length);
  $("data").remove();
  return { about, column: (place) => column(columns, place) };
}

/** Decodes a column: differences divided by `unit`, as zigzag values with seven bits per byte. */
function column(bytes, [start, count, unit]) {
  const numbers = new Float64Array(count);
  let at = start,
    last = 0;
  for (let i = 0; i < count; i++) {
    let byte = bytes[at++],
      value = byte & 127,
      scale = 128;
    while (byte > 127) {
      byte = bytes[at++];
      value += (byte & 127) * scale;
      scale *= 128;
    }
    // JavaScript's bit operators are limited to 32 bits, so test the low bit with `%`.
    last += value % 2 ? -(value + 1) / 2 : value / 2;
    numbers[i] = last * unit;
  }
  return numbers;
}

/** One device of one process. Its columns are decoded on first use. */
export class Track {
  constructor(about, data, run) {
    // The getters below decode the fields that are columns.
    for (const [name, value] of Object.entries(about)) if (!(name in Track.prototype)) this[name] = value;
    this.raw = about;
    this.data = data;
    this.run = run;
    this.end_ns = this.start_ns + this.width_ns * this.buckets;
    this.peak = this.metric === "allocated" ? about.peak_allocated : about.peak_used;
    // A program without a GPU has one track: its CPU tensors, or its pinned memory.
    this.isHost = this.device < 0;
    this.kind = this.device === CPU ? "CPU tensors" : "pinned memory";
    this.label = `${this.process}, ${this.isHost ? "host" : `GPU ${this.device}`}`;
  }

  get lines() {
    return this.once("lines", () =>
      this.raw.series.map((line) => {
        const high = this.data.column(line.high),
          height = this.data.column(line.height);
        const low = high.map((value, i) => value - height[i]);
        return { name: line.name, high, low };
      }),
    );
  }

  /** The line of this track's metric: allocated memory, or all memory in use. */
  get total() {
    return this.metric === "allocated"
      ? this.lines[0]
      : (this.lines.find((line) => isUsed(line.name)) ?? this.lines[1]);
  }

  stack(by) {
    return this.once("stack " + by, () => {
      const bands = this.raw[by === "module" ? "by_module" : "by_category"].map((band) => ({
        name: band.name,
        bytes: this.data.column(band.bytes),
      }));
      const buckets = bands.length ? bands[0].bytes.length : 0;
      const sum = new Float64Array(buckets);
      for (const band of bands) for (let i = 0; i < buckets; i++) sum[i] += band.bytes[i];
      return { bands, sum, width_ns: this.width_ns * this.stack_each };
    });
  }

  /** The changes that lower the peak most, each with the predicted maximum of each time bucket. */
  get advices() {
    return this.once("advices", () =>
      (this.raw.advice ?? []).map((advice) => ({ ...advice, high: this.data.column(advice.high) })),
    );
  }

  get phases() {
    return this.once("phases", () => this.table(this.raw.phases));
  }

  get steps() {
    return this.once("steps", () => this.table(this.raw.steps));
  }

  /** The memory in use after each step, in four parts, or null if there are too few steps. */
  get growth() {
    return this.once("growth", () => {
      const { step, parts } = this.raw.growth ?? {};
      if (!step) return null;
      return {
        step: this.data.column(step),
        parts: parts.map((part) => ({ name: part.name, bytes: this.data.column(part.bytes) })),
      };
    });
  }

  get detail() {
    return this.once("detail", () => this.table(this.raw.detail));
  }

  get segmentRows() {
    return this.once("segments", () => this.table(this.raw.segments));
  }

  get blocks() {
    return this.once("blocks", () => this.table(this.raw.blocks));
  }

  table(columns) {
    const table = {};
    for (const [name, place] of Object.entries(columns)) {
      table[name] = Array.isArray(place) ? this.data.column(place) : place;
    }
    table.length = Object.values(table).find((value) => value instanceof Float64Array)?.length ?? 0;
    return table;
  }

  once(name, make) {
    this.kept ??= new Map();
    if (!this.kept.has(name)) this.kept.set(name, make());
    return this.kept.get(name);
  }

  /** Returns the index of a moment's time bucket. */
  bucket(ts) {
    return Math.max(0, Math.min(this.buckets - 1, Math.floor((ts - this.start_ns) / this.width_ns)));
  }

  /** The last out-of-memory error, or null. */
  get oom() {
    return this.ooms[this.ooms.length - 1] ?? null;
  }

  /** The moment that is pinned when the page opens: the last OOM, or else the peak. */
  get opening() {
    return this.oom ? this.oom.ts_ns : this.peak.ts_ns;
  }

  /** The groups of the live blocks at the opening moment. */
  get atOpening() {
    return (this.oom && this.at_oom) || this.at_peak;
  }

  /** The view in which the page opens. It contains the opening moment. */
  get home() {
    const [from, to] = this.home_ns;
    return [Math.min(from, this.opening), Math.max(to, this.opening)];
  }

  /** Returns the phase at a moment, and the index of the step, which is null between steps. */
  during(ts) {
    const phase = last(this.phases.ts, ts),
      step = last(this.steps.from, ts);
    return {
      phase: phase < 0 ? "(no phase)" : this.data.about.strings[this.phases.name[phase]],
      step: step < 0 || ts > this.steps.to[step] ? null : step,
    };
  }

  stepName(index) {
    const { first, last } = this.steps;
    return first[index] === last[index] ? `${first[index]}` : `${first[index]}–${last[index]}`;
  }
}

/** Returns the last index of an ascending column whose value is at most `value`, or -1. */
export function last(column, value) {
  let low = 0,
    high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
