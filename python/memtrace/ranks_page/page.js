// Draws the page of many ranks. Its grid of levels is in typed arrays, so that zooming stays smooth
// even with five million cells.

const $ = (id) => document.getElementById(id);
const MISSING = -128;
/** The number of lines of the grid that one line of its coarse copy combines. */
const COARSE = 4;

/** Inflates the data: the length of a JSON text, the text, and the levels of the grid. */
async function load() {
  if (typeof DecompressionStream === "undefined") {
    throw new Error(
      "this browser is too old: it lacks DecompressionStream (needs Chrome 103, Firefox 113 or Safari 16.4)",
    );
  }
  const text = atob($("data").textContent.trim());
  const packed = Uint8Array.from(text, (char) => char.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const about = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  $("data").remove();
  return { about, cells: new Int8Array(bytes.buffer, 4 + length) };
}

function size(bytes) {
  let value = Math.abs(bytes);
  for (const unit of ["B", "KiB", "MiB"]) {
    // A size that two decimals would round up to 1024 has the next unit.
    if (value < (unit === "B" ? 1024 : 1023.995)) return `${value.toFixed(unit === "B" ? 0 : 2)} ${unit}`;
    value /= 1024;
  }
  return `${value.toFixed(2)} GiB`;
}

const percent = (share) => `${Number((share * 100).toPrecision(2))} %`;

const stepsBetween = (first, last) => (first === last ? `step ${first}` : `steps ${first} to ${last}`);

const weight = (level) => (level === MISSING ? -1 : Math.abs(level));

/** The grid with its lines in a given order, and a coarse copy of it. */
class Ordered {
  constructor(about, cells, order) {
    this.order = order;
    this.place = new Uint32Array(order.length);
    order.forEach((line, place) => {
      this.place[line] = place;
    });
    this.columns = about.columns;
    this.fine = new Int8Array(cells.length);
    order.forEach((line, place) => {
      this.fine.set(cells.subarray(line * this.columns, (line + 1) * this.columns), place * this.columns);
    });
    this.coarseLines = Math.ceil(order.length / COARSE);
    this.coarse = new Int8Array(this.coarseLines * this.columns).fill(MISSING);
    for (let place = 0; place < order.length; place++) {
      const to = Math.floor(place / COARSE) * this.columns;
      for (let column = 0; column < this.columns; column++) {
        const level = this.fine[place * this.columns + column];
        if (weight(level) > weight(this.coarse[to + column])) this.coarse[to + column] = level;
      }
    }
  }

  /**
   * Returns the level furthest from 0 in the lines from `y0` to `y1` and the columns from `x0` to `x1`, ends
   * excluded. A range of many lines is extended to whole lines of the coarse copy.
   */
  furthest(y0, y1, x0, x1) {
    const coarse = y1 - y0 >= 2 * COARSE;
    const cells = coarse ? this.coarse : this.fine;
    const [from, to] = coarse ? [Math.floor(y0 / COARSE), Math.ceil(y1 / COARSE)] : [y0, y1];
    let found = MISSING;
    let most = -1;
    for (let y = from; y < to; y++) {
      for (let at = y * this.columns + x0; at < y * this.columns + x1; at++) {
        const level = cells[at];
        const far = weight(level);
        if (far > most) {
          most = far;
          found = level;
        }
      }
    }
    return found;
  }
}

/** Returns the lines, those with the furthest levels first. Among equals, a larger sum
 * of levels comes first. */
function outliersFirst(about, cells) {
  const scores = new Float64Array(about.lines);
  for (let line = 0; line < about.lines; line++) {
    let most = 0;
    let sum = 0;
    for (let at = line * about.columns; at < (line + 1) * about.columns; at++) {
      const far = Math.max(0, weight(cells[at]));
      most = Math.max(most, far);
      sum += far;
    }
    scores[line] = most * 1e6 + sum;
  }
  return Uint32Array.from(scores.keys()).sort((a, b) => scores[b] - scores[a] || a - b);
}

/** Returns the colors of the levels from -last to last and the color of a missing cell, as 32-bit pixels. */
function palette(last, dark) {
  const ground = dark ? [30, 37, 46] : [240, 243, 246];
  // Orange is above the median and blue is below, because these differ with every kind of color vision.
  const ends = dark
    ? {
        more: [
          [122, 62, 20],
          [255, 190, 120],
        ],
        less: [
          [20, 70, 110],
          [130, 205, 255],
        ],
      }
    : {
        more: [
          [253, 208, 162],
          [127, 39, 4],
        ],
        less: [
          [198, 219, 239],
          [8, 48, 107],
        ],
      };
  const pixel = ([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r;
  const colours = new Int32Array(2 * last + 2);
  for (let level = -last; level <= last; level++) {
    if (level === 0) {
      colours[last] = pixel(ground);
      continue;
    }
    const [from, to] = level > 0 ? ends.more : ends.less;
    const share = (Math.abs(level) - 1) / Math.max(1, last - 1);
    colours[level + last] = pixel(from.map((value, i) => Math.round(value + (to[i] - value) * share)));
  }
  colours[2 * last + 1] = pixel(dark ? [70, 70, 70] : [190, 190, 190]);
  return colours;
}

class HeatMap {
  constructor(about, cells) {
    Object.assign(this, { about, cells, canvas: $("map"), chosen: -1, waiting: false });
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.dark.addEventListener("change", () => this.colour());
    this.orders = {
      ranks: () => Uint32Array.from({ length: about.lines }, (_, line) => line),
      outliers: () => outliersFirst(about, cells),
    };
    this.setOrder("outliers");
    this.colour();
    this.listen();
  }

  setOrder(name) {
    this.grid = new Ordered(this.about, this.cells, this.orders[name]());
    this.all();
    // With ten thousand lines, a pixel shows about twenty of them, so at first the view
    // has the lines that differ.
    if (name === "outliers") {
      this.view.y1 = Math.min(this.about.lines, Math.max(48, Math.ceil(this.about.differing_devices * 1.5)));
    }
  }

  colour() {
    this.colours = palette(this.about.last, this.dark.matches);
    const css = (pixel) => `rgb(${pixel & 255} ${(pixel >> 8) & 255} ${(pixel >> 16) & 255})`;
    const of = (level) => css(this.colours[level + this.about.last]);
    const { decade, last } = this.about;
    // `bound` is the upper bound of a level, so a level begins at the bound of the level before it.
    const entry = (level, where) => [of(level), `${this.bound(Math.abs(level) - 1)} ${where}`];
    const entries = [
      entry(-2 * decade - 1, "below"),
      entry(-decade - 1, "below"),
      [of(0), `within ${this.bound(0)} of the median`],
      entry(decade + 1, "above"),
      entry(2 * decade + 1, "above"),
      entry(last, "above and more"),
      [css(this.colours[2 * last + 1]), "no row"],
    ];
    $("legend").replaceChildren(
      ...entries.map(([colour, name]) => {
        const entry = document.createElement("span");
        const mark = document.createElement("i");
        mark.style.background = colour;
        entry.append(mark, name);
        return entry;
      }),
    );
    this.later();
  }

  all() {
    this.view = { x0: 0, x1: this.about.columns, y0: 0, y1: this.about.lines };
    this.later();
  }

  /** Schedules a drawing before the next frame, unless one is scheduled already. */
  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    const started = performance.now();
    const { canvas, grid, view } = this;
    const scale = Math.min(2, devicePixelRatio || 1);
    const width = Math.max(1, Math.round(canvas.clientWidth * scale));
    const height = Math.max(1, Math.round(canvas.clientHeight * scale));
    if (canvas.width !== width) canvas.width = width;
    if (canvas.height !== height) canvas.height = height;
    const image = new ImageData(width, height);
    const pixels = new Int32Array(image.data.buffer);
    const { columns, lines, last } = this.about;
    const edges = (from, to, count, most) => {
      const places = new Int32Array(count + 1);
      for (let i = 0; i <= count; i++) {
        places[i] = Math.min(most, Math.floor(from + ((to - from) * i) / count + 1e-9));
      }
      return places;
    };
    const xs = edges(view.x0, view.x1, width, columns);
    const ys = edges(view.y0, view.y1, height, lines);
    for (let py = 0; py < height; py++) {
      const y0 = Math.min(ys[py], lines - 1);
      const y1 = Math.max(y0 + 1, ys[py + 1]);
      // If a line of the grid is higher than a pixel, its first row of pixels is copied to the other rows.
      if (py > 0 && ys[py - 1] === y0 && y1 === y0 + 1 && ys[py] === y0) {
        pixels.copyWithin(py * width, (py - 1) * width, py * width);
        continue;
      }
      for (let px = 0; px < width; px++) {
        const x0 = Math.min(xs[px], columns - 1);
        const x1 = Math.max(x0 + 1, xs[px + 1]);
        if (px > 0 && xs[px - 1] === x0 && x1 === x0 + 1) {
          pixels[py * width + px] = pixels[py * width + px - 1];
          continue;
        }
        const level = grid.furthest(y0, y1, x0, x1);
        pixels[py * width + px] = this.colours[level === MISSING ? 2 * last + 1 : level + last];
      }
    }
    const context = canvas.getContext("2d");
    context.putImageData(image, 0, 0);
    if (this.chosen >= 0) {
      const to = (place) => ((place - view.y0) / (view.y1 - view.y0)) * height;
      const top = to(grid.place[this.chosen]);
      const tall = Math.max(3, to(grid.place[this.chosen] + 1) - top);
      context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
      context.lineWidth = 2;
      context.strokeRect(1, top - 1, width - 2, tall + 2);
    }
    const { from, to } = this.about;
    $("from").textContent = `step ${from[Math.floor(view.x0)]}`;
    $("to").textContent = `step ${to[Math.max(Math.floor(view.x0), Math.ceil(view.x1) - 1)]}`;
    const shown = [Math.floor(view.y0) + 1, Math.min(lines, Math.ceil(view.y1))];
    $("shown").textContent =
      shown[1] - shown[0] + 1 < lines ? `lines ${shown[0]} to ${shown[1]} of ${lines}` : `all ${lines} lines`;
    // For the tests: the time that this drawing took, in ms.
    canvas.dataset.drawn = (performance.now() - started).toFixed(1);
  }

  stepsOf(column) {
    return stepsBetween(this.about.from[column], this.about.to[column]);
  }

  /** Returns the upper bound of a level, as a percentage of the median. */
  bound(level) {
    return percent(this.about.least * 10 ** (level / this.about.decade));
  }

  ranksOf(line) {
    const { ranks, devices, hosts, names } = this.about;
    const from = line * this.about.devices_per_line;
    const to = Math.min(ranks.length, from + this.about.devices_per_line) - 1;
    if (to > from) return `ranks ${ranks[from]} to ${ranks[to]}`;
    return `rank ${ranks[from]}, GPU ${devices[from]}, ${names[hosts[from]]}`;
  }

  /** Zooms around a point of the canvas, whose coordinates are from 0 to 1. A `factor` below 1 zooms in. */
  zoom(factor, x = 0.5, y = 0.5) {
    const part = (from, to, at, most) => {
      const length = Math.min(most, Math.max(Math.min(most, 4), (to - from) * factor));
      const start = Math.max(0, Math.min(most - length, from + (to - from) * at - length * at));
      return [start, start + length];
    };
    const { view } = this;
    [view.x0, view.x1] = part(view.x0, view.x1, x, this.about.columns);
    [view.y0, view.y1] = part(view.y0, view.y1, y, this.about.lines);
    this.later();
  }

  /** Moves the view by these shares of its width and height. */
  pan(x, y) {
    const { view } = this;
    const part = (from, to, by, most) => {
      const start = Math.max(0, Math.min(most - (to - from), from + by * (to - from)));
      return [start, start + (to - from)];
    };
    [view.x0, view.x1] = part(view.x0, view.x1, x, this.about.columns);
    [view.y0, view.y1] = part(view.y0, view.y1, y, this.about.lines);
    this.later();
  }

  choose(line) {
    this.chosen = line;
    const around = Math.min(this.about.lines, 24);
    const place = this.grid.place[line];
    const start = Math.max(0, Math.min(this.about.lines - around, place - around / 2));
    Object.assign(this.view, { x0: 0, x1: this.about.columns, y0: start, y1: start + around });
    for (const row of $("differing").querySelectorAll("tr[data-line]")) {
      row.classList.toggle("chosen", Number(row.dataset.line) === line);
    }
    this.later();
  }

  /** Shows a description of the cell at a point of the canvas, whose coordinates are from 0 to 1. */
  describe(x, y) {
    const { view, about } = this;
    const column = Math.min(about.columns - 1, Math.floor(view.x0 + (view.x1 - view.x0) * x));
    const line = this.grid.order[Math.min(about.lines - 1, Math.floor(view.y0 + (view.y1 - view.y0) * y))];
    const level = this.cells[line * about.columns + column];
    let found = "no row";
    if (level === 0) found = `within ${this.bound(0)} of the median`;
    else if (level !== MISSING) {
      const far = Math.abs(level);
      const range =
        far === about.last
          ? `${this.bound(far - 1)} or more`
          : `${this.bound(far - 1)} to ${this.bound(far)}`;
      found = `${range} ${level > 0 ? "above" : "below"} the median`;
    }
    const known = about.differing.find((row) => row.line === line);
    const where = known
      ? `; different since ${stepsBetween(known.since_step, known.since_step_at_latest)}, most at step ${known.step}`
      : "";
    $("cell").textContent =
      `${this.ranksOf(line)}, ${this.stepsOf(column)}: ${found} of ${size(about.medians[column])}${where}`;
  }

  listen() {
    const { canvas } = this;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      const share = (value) => Math.max(0, Math.min(0.999999, value));
      return [share((event.clientX - box.left) / box.width), share((event.clientY - box.top) / box.height)];
    };
    let last = null;
    canvas.addEventListener("pointerdown", (event) => {
      last = place(event);
      canvas.setPointerCapture(event.pointerId);
      this.describe(...last);
    });
    canvas.addEventListener("pointermove", (event) => {
      const now = place(event);
      if (last) {
        this.pan(last[0] - now[0], last[1] - now[1]);
        last = now;
      }
      this.describe(...now);
    });
    const end = () => {
      last = null;
    };
    canvas.addEventListener("pointerup", end);
    canvas.addEventListener("pointercancel", end);
    canvas.addEventListener(
      "wheel",
      (event) => {
        event.preventDefault();
        this.zoom(event.deltaY < 0 ? 0.8 : 1.25, ...place(event));
      },
      { passive: false },
    );
    const keys = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.all(),
      ArrowLeft: () => this.pan(-0.2, 0),
      ArrowRight: () => this.pan(0.2, 0),
      ArrowUp: () => this.pan(0, -0.2),
      ArrowDown: () => this.pan(0, 0.2),
    };
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    $("zoom-in").addEventListener("click", keys["+"]);
    $("zoom-out").addEventListener("click", keys["-"]);
    $("all").addEventListener("click", keys[0]);
    $("order").addEventListener("change", () => this.setOrder($("order").value));
    new ResizeObserver(() => this.later()).observe(canvas);
  }
}

/** Fills the table of the ranks that differ from their peers. */
function table(map) {
  const { about } = map;
  $("differing-title").textContent = about.differing.length
    ? `Ranks that differ from the others, furthest first${about.differing.length === about.differing_devices ? "" : ` (${about.differing.length} of ${about.differing_devices})`}`
    : "No rank differs from the others";
  const row = (cells, tag, numbers) => {
    const line = document.createElement("tr");
    cells.forEach((content, i) => {
      const cell = document.createElement(tag);
      if (numbers.includes(i)) cell.className = "number";
      cell.append(content);
      line.append(cell);
    });
    return line;
  };
  if (!about.differing.length) return;
  const numbers = [1, 4];
  const count = about.steps === 1 ? "steps" : "steps, at most";
  const names = ["rank", "difference", "since", "most at", count, "phase", "module", "host"];
  $("differing").append(row(names, "th", numbers));
  for (const device of about.differing) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = device.rank;
    button.title = "Show it on the map";
    button.addEventListener("click", () => {
      map.choose(device.line);
      $("map").scrollIntoView({ block: "nearest" });
    });
    const difference = `${device.difference_bytes < 0 ? "−" : "+"}${size(device.difference_bytes)}`;
    const since = stepsBetween(device.since_step, device.since_step_at_latest);
    const texts = [device.phase, device.module, device.host].map(
      (text, i) => text || ["no phase", "no module", "no host"][i],
    );
    const line = row(
      [button, difference, since, `step ${device.step}`, device.steps, ...texts],
      "td",
      numbers,
    );
    line.dataset.line = device.line;
    $("differing").append(line);
  }
}

async function main() {
  const { about, cells } = await load();
  const [headline, ...facts] = about.facts;
  $("headline").textContent = headline;
  $("facts").append(
    ...facts.map((fact) => {
      const item = document.createElement("li");
      item.textContent = fact;
      return item;
    }),
  );
  const what =
    about.devices_per_line === 1
      ? "one GPU of one rank"
      : `${about.devices_per_line} GPUs of neighbouring ranks, the furthest of them`;
  const when = about.steps === 1 ? "one step" : `up to ${about.steps} neighbouring steps`;
  $("cell-is").textContent =
    `A cell is ${what} and ${when}: how far the highest allocated memory of these steps is from the median of all GPUs.`;
  if (!about.lines || !about.columns) throw new Error("the digests have no steps");
  table(new HeatMap(about, cells));
}

main().catch((error) => {
  $("problem").textContent = error.message;
  $("problem").hidden = false;
});
