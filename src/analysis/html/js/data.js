// The data of the page: a deflated stream of JSON and columns, in base64.

/** An element of the page. */
const $ = (id) => document.getElementById(id);

/** Inflates what the page carries; gives the JSON and a function that reads a column. */
async function load() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "this browser is too old for this page: it has no DecompressionStream (Chrome 103, Firefox 113, Safari 16.4)",
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

/** A column: differences in zigzag, seven bits a byte, times their common divisor. */
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
    // Beyond 32 bits the low bit must be taken without the bit operators.
    last += value % 2 ? -(value + 1) / 2 : value / 2;
    numbers[i] = last * unit;
  }
  return numbers;
}

/** What is drawn of one device of one process, unpacked when it is first looked at. */
class Track {
  constructor(about, data, run) {
    // What comes in columns is unpacked when it is asked for.
    for (const [name, value] of Object.entries(about)) if (!(name in Track.prototype)) this[name] = value;
    this.raw = about;
    this.data = data;
    this.run = run;
    this.end_ns = this.start_ns + this.width_ns * this.buckets;
    this.peak = this.metric === "allocated" ? about.peak_allocated : about.peak_used;
    this.label = `rank ${this.rank}, GPU ${this.device}`;
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

  /** The line whose peak this is about. */
  get total() {
    return this.metric === "allocated"
      ? this.lines[0]
      : (this.lines.find((line) => line.name === "device used") ?? this.lines[1]);
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

  get phases() {
    return this.once("phases", () => this.table(this.raw.phases));
  }

  get steps() {
    return this.once("steps", () => this.table(this.raw.steps));
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

  /** The piece of time that a moment falls into. */
  bucket(ts) {
    return Math.max(0, Math.min(this.buckets - 1, Math.floor((ts - this.start_ns) / this.width_ns)));
  }

  /** What the page opens with. */
  get home() {
    return this.home_ns;
  }

  /** The step and the phase at a moment. */
  during(ts) {
    const phase = last(this.phases.ts, ts),
      step = last(this.steps.from, ts);
    return {
      phase: phase < 0 ? "(none)" : this.data.about.strings[this.phases.name[phase]],
      step: step < 0 || ts > this.steps.to[step] ? null : step,
    };
  }

  stepName(index) {
    const { first, last } = this.steps;
    return first[index] === last[index] ? `${first[index]}` : `${first[index]}–${last[index]}`;
  }
}

/** The last place in an ascending column whose value is at most `value`; -1 when there is none. */
function last(column, value) {
  let low = 0,
    high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
