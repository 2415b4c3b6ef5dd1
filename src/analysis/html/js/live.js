// Shows the live blocks at the pinned moment as an icicle chart and as a table.

import { valueAt } from "./axes.js";
import { categoryColour, readable } from "./colours.js";
import { $ } from "./data.js";
import {
  breakable,
  bytes,
  count,
  counted,
  duration,
  element,
  headCell,
  moment,
  percent,
  shown,
  swatch,
} from "./format.js";
import { TREES, tableColumns, draw, matches, page, painters, state, track } from "./state.js";

const NO_SHAPE = "(unknown shape)";

export function blockWords(t, i) {
  const b = t.blocks,
    { strings, categories } = page.about;
  const owner = [strings[b.module[i]], strings[b.op[i]], strings[b.phase[i]], categories[b.category[i]]];
  return [...owner, shapeWith(strings[b.dtype[i]], strings[b.shape[i]])];
}

/** Returns the texts of a live block that the search looks at. */
export function searchWords(block) {
  return [block.module, block.op, block.phase, block.category, block.shape];
}

/** Returns the type and shape of a tensor as one text. */
function shapeWith(dtype, shape) {
  return shape === NO_SHAPE ? shape : `${dtype} ${shape}`;
}

/** Returns the path of a module with `*` for the numbers of repeated layers, as in `memtrace peak`. */
function joined(t, path) {
  const levels = new Set(t.layers);
  let whole = "";
  for (const name of path.split(".")) {
    const level = /^\d+$/.test(name) && levels.has(whole) ? "*" : name;
    whole += (whole ? "." : "") + level;
  }
  return whole;
}

/** Returns the listed blocks that are live at a moment, and the bytes of live blocks that are not listed, with
 * what these are. */
export function liveAt(t, ts) {
  const b = t.blocks,
    { strings, categories } = page.about,
    live = [],
    joins = new Map();
  let sum = 0;
  for (let i = 0; i < b.length; i++) {
    if (b.born[i] > ts) continue;
    if (b.age[i] >= 0 && b.born[i] + b.age[i] <= ts) continue;
    sum += b.bytes[i];
    const module = strings[b.module[i]];
    if (!joins.has(module)) joins.set(module, joined(t, module));
    live.push({
      id: b.id[i],
      bytes: b.bytes[i],
      requested: b.requested[i],
      born: b.born[i],
      age: b.age[i],
      addr: b.addr[i],
      step: b.step[i],
      pool: b.pool[i],
      stream: b.stream[i],
      module,
      joined: joins.get(module),
      op: strings[b.op[i]],
      phase: strings[b.phase[i]],
      dtype: strings[b.dtype[i]],
      shape: shapeWith(strings[b.dtype[i]], strings[b.shape[i]]),
      category: categories[b.category[i]] + (b.inferred[i] ? " *" : ""),
    });
  }
  const total = valueAt(t, t.total, ts);
  // The total is the maximum of a time bucket, which can exceed the live bytes. If all
  // blocks are listed, use their exact sum instead. Blocks without detail are never listed.
  const others = [t.blocks.length < t.allocations ? "smaller" : "", t.brief ? "without detail" : ""];
  const whole = !others.some(Boolean);
  return {
    live,
    total: whole ? sum : Math.max(total, sum),
    sum,
    rest: whole ? 0 : Math.max(0, total - sum),
    others: others.filter(Boolean).join(" or "),
  };
}

/** Returns the name of the live blocks that are not listed. */
const restName = (at) => (at.others === "smaller" ? "(smaller blocks)" : `(${at.others})`);

/** Returns the live blocks at a moment by group. At the peak and the last OOM, unlisted blocks count, too. */
function groupsAt(t, ts, at, by) {
  const known =
    ts === t.peak.ts_ns
      ? t.at_peak
      : t.ooms.length && ts === t.ooms[t.ooms.length - 1].ts_ns
        ? t.at_oom
        : null;
  if (known) return known[by].map(([name, bytes, blocks]) => ({ name, bytes, blocks }));
  const groups = new Map();
  for (const block of at.live) {
    const key = by === "module" ? "joined" : by;
    const name = by === "step" ? (block.step < 0 ? "before the first" : String(block.step)) : block[key];
    const group = groups.get(name) ?? { name, bytes: 0, blocks: 0 };
    group.bytes += block.bytes;
    group.blocks++;
    groups.set(name, group);
  }
  if (by === "category" && at.rest) {
    // The curve by category includes the blocks that the page does not list.
    const stack = t.stack("category"),
      place = Math.max(0, Math.min(stack.sum.length - 1, Math.floor((ts - t.start_ns) / stack.width_ns)));
    return stack.bands
      .map((band) => ({
        name: band.name,
        bytes: band.bytes[place],
        blocks: (groups.get(band.name)?.blocks ?? 0) + (groups.get(`${band.name} *`)?.blocks ?? 0),
      }))
      .filter((group) => group.bytes > 0);
  }
  if (at.rest) {
    const name = restName(at);
    groups.set(name, { name, bytes: at.rest + (groups.get(name)?.bytes ?? 0), blocks: NaN });
  }
  return [...groups.values()];
}

/** The track and the moment for which `liveIs` was computed. */
let liveFor = null;
let liveIs = null;

/** Returns what `liveAt` returns for the pinned moment. */
export function liveNow() {
  const key = `${state.track} ${state.at}`;
  if (liveFor !== key) [liveFor, liveIs] = [key, liveAt(track(), state.at)];
  return liveIs;
}

painters.live = () => {
  const t = track(),
    ts = state.at,
    at = liveNow();
  const { step, phase } = t.during(ts);
  const isPeak = ts === t.peak.ts_ns,
    oom = t.ooms.find((one) => one.ts_ns === ts);
  const title = $("live-title");
  title.replaceChildren(
    element("span", "", "Live "),
    element("b", "", isPeak ? "at the peak" : oom ? "at the OOM" : `at ${moment(ts, t.width_ns)}`),
    element("span", "quiet", "  " + bytes(isPeak ? t.peak.bytes : at.total)),
  );
  const where = [step === null ? "" : `step ${t.stepName(step)}`, phase === "(no phase)" ? "" : phase]
    .filter(Boolean)
    .join(", ");
  const note = oom
    ? `${oom.requested_bytes >= 0 ? bytes(oom.requested_bytes) : "A request"} for ${shown(oom.op)} in ${shown(oom.module)} did not fit. `
    : "";
  $("live-note").textContent =
    note +
    (where ? where + ". " : "") +
    (at.rest > 0
      ? `${counted(at.live.length, "block")} listed, with ${percent(at.sum / Math.max(1, at.total))} of the bytes; the others are ${at.others}. `
      : `${counted(at.live.length, "block")}. `) +
    "Click the curve to pin another moment.";
  paintIcicle(at);
  paintTable(t, ts, at);
};

let zoomedInto = [];

/** Shows the whole icicle chart at its next drawing. */
export function zoomOut() {
  zoomedInto = [];
}

function paintIcicle(at) {
  const tree = { name: "everything", bytes: 0, below: new Map(), blocks: 0 };
  const { path } = TREES[state.tree];
  for (const block of at.live) {
    let node = tree;
    const found = matches(...searchWords(block));
    node.bytes += block.bytes;
    node.blocks++;
    for (const name of path(block)) {
      let next = node.below.get(name);
      if (!next) {
        next = { name, bytes: 0, below: new Map(), blocks: 0, mix: new Map() };
        node.below.set(name, next);
      }
      next.bytes += block.bytes;
      next.blocks++;
      next.found ||= found;
      next.mix.set(block.category, (next.mix.get(block.category) ?? 0) + block.bytes);
      node = next;
    }
  }
  if (at.rest > 0) {
    const name = restName(at),
      listed = tree.below.get(name);
    tree.bytes += at.rest;
    tree.below.set(name, {
      name,
      bytes: at.rest + (listed?.bytes ?? 0),
      below: listed?.below ?? new Map(),
      blocks: NaN,
      mix: new Map([["(no category)", at.rest]]),
    });
  }
  let root = tree;
  const trail = [];
  for (const name of zoomedInto) {
    const next = root.below.get(name);
    if (!next) break;
    trail.push(name);
    root = next;
  }
  zoomedInto = trail;
  const it = $("icicle"),
    focused = it.contains(document.activeElement);
  it.replaceChildren();
  const crumbs = element("div", "crumbs");
  const crumb = (text, depth) => {
    const one = element("button", "", text);
    one.type = "button";
    one.onclick = () => {
      zoomedInto = zoomedInto.slice(0, depth);
      draw("live");
    };
    crumbs.append(one);
  };
  crumb(`everything ${bytes(tree.bytes)}`, 0);
  trail.forEach((name, i) => {
    crumb(name, i + 1);
  });
  it.append(crumbs);
  const width = it.clientWidth,
    drawn = element("div", "levels"),
    cells = [];
  let depth = 0;
  const paint = (node, left, level, names) => {
    let x = left;
    for (const child of [...node.below.values()].sort((a, b) => b.bytes - a.bytes)) {
      const w = (child.bytes / root.bytes) * width;
      if (w < 1) break;
      const way = [...names, child.name];
      const full = way.join(" › ");
      // A cell with blocks of one category has the color of the category. Other cells are gray.
      const colour = child.mix.size === 1 ? categoryColour([...child.mix.keys()][0]) : null;
      const box = element("button", "cell" + (child.found || !state.search ? "" : " dim"));
      box.type = "button";
      // The Tab key stops at the first cell only; the arrow keys move between cells.
      box.tabIndex = cells.length ? -1 : 0;
      cells.push({ box, x, w, level });
      // Padding would make a narrow cell overlap its neighbours.
      box.style.cssText =
        `left:${x}px;top:${level * 24}px;width:${Math.max(1, w - 1)}px;padding:0 ${w > 34 ? 5 : 0}px` +
        (colour ? `;background:${colour};color:${readable(colour)}` : "");
      if (w > 34) box.textContent = w > 150 ? `${child.name}  ${bytes(child.bytes)}` : child.name;
      const label = `${bytes(child.bytes)}, ${percent(child.bytes / tree.bytes)}${child.blocks ? `, ${counted(child.blocks, "block")}` : ""}`;
      box.title = `${full}\n${label}`;
      box.setAttribute("aria-label", `${full}: ${label}`);
      box.onclick = () => {
        zoomedInto = [...trail, ...way];
        draw("live");
      };
      drawn.append(box);
      depth = Math.max(depth, level + 1);
      if (child.below.size) paint(child, x, level + 1, way);
      x += w;
    }
  };
  paint(root, 0, 0, []);
  drawn.style.height = `${Math.max(1, depth) * 24}px`;
  drawn.onkeydown = (event) => {
    const from = cells.find((cell) => cell.box === event.target),
      next = from && neighbour(cells, from, event.key);
    if (next === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    next?.box.focus();
  };
  it.append(drawn);
  if (focused) cells[0]?.box.focus();
  it.setAttribute(
    "aria-label",
    `Live blocks by ${TREES[state.tree].text}: ` +
      [...tree.below.values()]
        .sort((a, b) => b.bytes - a.bytes)
        .slice(0, 5)
        .map((node) => `${node.name} ${bytes(node.bytes)}`)
        .join(", "),
  );
}

/** Returns the next cell in the direction of an arrow key; `null` at an edge, `undefined` for other keys. */
function neighbour(cells, from, key) {
  const level = { ArrowLeft: 0, ArrowRight: 0, ArrowUp: -1, ArrowDown: 1 }[key];
  if (level === undefined) return undefined;
  const row = cells.filter((cell) => cell.level === from.level + level);
  if (key === "ArrowLeft") return row.findLast((cell) => cell.x < from.x) ?? null;
  if (key === "ArrowRight") return row.find((cell) => cell.x > from.x) ?? null;
  if (key === "ArrowUp") return row.findLast((cell) => cell.x <= from.x + 0.5) ?? null;
  return row.find((cell) => cell.x + cell.w > from.x + 0.5 && cell.x < from.x + from.w - 0.5) ?? null;
}

function paintTable(t, ts, at) {
  const by = state.by,
    single = by === "block";
  const rows = single ? at.live : groupsAt(t, ts, at, by);
  const sum = ts === t.peak.ts_ns ? t.peak.bytes : at.total;
  const key = state.sort === "share" ? "bytes" : state.sort;
  const value = (row) => (key === "age" && row.age < 0 ? Infinity : row[key]);
  rows.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : (x ?? 0) - (y ?? 0);
    return (state.down ? -order : order) || b.bytes - a.bytes;
  });
  const columns = tableColumns(by);
  const head = element("tr");
  for (const [name, text, number] of columns) {
    const cell = headCell(name ? " " : "", number ? "number" : "");
    const title = name === "name" ? by : text;
    if (name) {
      const sort = element("button", "", title);
      sort.type = "button";
      const own = state.sort === name;
      cell.setAttribute("aria-sort", own ? (state.down ? "descending" : "ascending") : "none");
      if (own) sort.append(element("span", "", state.down ? " ▾" : " ▴"));
      sort.onclick = () => {
        [state.sort, state.down] = [name, own ? !state.down : number];
        draw("live");
      };
      cell.replaceChildren(sort);
    }
    head.append(cell);
  }
  const thead = element("thead"),
    body = element("tbody");
  thead.append(head);
  const limit = 25 * state.more,
    most = rows.reduce((most, row) => Math.max(most, row.bytes), 1);
  // Rows that match the search come first. All other rows come after them, dimmed.
  const hit = (row) => matches(...(single ? searchWords(row) : [row.name]));
  const order = state.search ? [...rows.filter(hit), ...rows.filter((row) => !hit(row))] : rows;
  for (const row of order.slice(0, limit)) {
    const line = element("tr", hit(row) ? "" : "dim");
    for (const [name, , number] of columns) line.append(tableCell(row, name, number, sum, most));
    body.append(line);
  }
  const table = $("table");
  table.className = single ? "blocks" : "groups";
  table.replaceChildren(thead, body);
  $("table-count").textContent = `${count(Math.min(limit, rows.length))} of ${count(rows.length)}`;
  $("more").hidden = rows.length <= limit;
}

function tableCell(row, name, number, sum, most) {
  const cell = element("td", number ? "number" : "");
  if (name === "bytes") {
    cell.append(element("b", "", bytes(row.bytes)));
    cell.title = `${count(row.bytes)} B`;
  } else if (name === "share") cell.textContent = percent(row.bytes / sum);
  else if (name === "requested") cell.textContent = row.requested < 0 ? "–" : bytes(row.requested);
  else if (name === "born") cell.textContent = moment(row.born, 1e6);
  else if (name === "age") cell.textContent = row.age < 0 ? "to the end" : duration(row.age);
  else if (name === "blocks")
    cell.textContent = Number.isNaN(row.blocks) || !row.blocks ? "–" : count(row.blocks);
  else if (name === "step") cell.textContent = row.step < 0 ? "–" : row.step;
  else if (name === "") {
    const bar = element("span", "share");
    bar.style.width = `${(row.bytes / most) * 100}%`;
    if (state.by === "category") bar.style.background = categoryColour(row.name);
    cell.className = "bar-cell";
    cell.append(bar);
  } else if (name === "category") {
    cell.append(swatch(categoryColour(row.category)), row.category);
  } else {
    cell.append(breakable(String(row[name])));
    cell.title = row[name];
  }
  return cell;
}
