// Draws the allocator's segments at the pinned moment with their blocks, as one tape.

import { categoryColour, faded, ink } from "./colours.js";
import { $ } from "./data.js";
import { bytes, count, element, placeTip, shown } from "./format.js";
import { liveNow, searchWords } from "./live.js";
import { canvas, matches, painters, state, track } from "./state.js";

/** Returns the segments at a moment by address. Adjacent expandable pieces are one segment. */
function segmentsAt(t, ts) {
  const rows = t.segmentRows,
    pieces = new Map();
  for (let i = 0; i < rows.length && rows.ts[i] <= ts; i++) {
    const addr = rows.addr[i],
      size = rows.bytes[i];
    if (!addr) continue;
    if (size > 0) pieces.set(addr, { addr, bytes: size, expandable: rows.expandable[i] === 1 });
    else if (pieces.get(addr)?.bytes === -size) pieces.delete(addr);
    else cutOut(pieces, addr, addr - size);
  }
  const all = [...pieces.values()].sort((a, b) => a.addr - b.addr),
    segments = [];
  for (const piece of all) {
    const before = segments[segments.length - 1];
    if (before?.expandable && piece.expandable && before.addr + before.bytes === piece.addr)
      before.bytes += piece.bytes;
    else segments.push({ ...piece });
  }
  return segments;
}

/** Removes an unmapped range from the pieces that it overlaps. */
function cutOut(pieces, from, to) {
  for (const piece of [...pieces.values()]) {
    const end = piece.addr + piece.bytes;
    if (end <= from || piece.addr >= to) continue;
    pieces.delete(piece.addr);
    if (piece.addr < from) pieces.set(piece.addr, { ...piece, bytes: from - piece.addr });
    if (end > to) pieces.set(to, { ...piece, addr: to, bytes: end - to });
  }
}

let tape = [];
const TAPE = { row: 20, gap: 4 };

painters.segments = () => {
  const t = track(),
    ts = state.at,
    colours = ink();
  const segments = segmentsAt(t, ts),
    at = liveNow();
  const reserved = segments.reduce((sum, one) => sum + one.bytes, 0);
  const blocks = at.live.filter((block) => block.addr).sort((a, b) => a.addr - b.addr);
  $("segments").hidden = !t.segmentRows.length;
  if (!t.segmentRows.length) return;
  // The blocks that the page does not list may be in any segment, even in one that looks empty.
  const grey = at.rest > 0 ? "free, or in blocks that this page does not list" : "free";
  let used = 0,
    empty = 0;
  tape = [];
  const width = $("segment-map").clientWidth || 600;
  const rows = Math.max(1, Math.min(16, segments.length, Math.ceil(reserved / 2 ** 21)));
  // Each segment is followed by a gap of 3 pixels.
  const scale = (width * rows - segments.length * 3) / Math.max(1, reserved);
  let place = 0,
    next = 0;
  for (const segment of segments) {
    while (next < blocks.length && blocks[next].addr < segment.addr) next++;
    let inside = 0;
    tape.push({ from: place, to: place + segment.bytes * scale, segment, grey });
    while (next < blocks.length && blocks[next].addr < segment.addr + segment.bytes) {
      const block = blocks[next++];
      const from = place + (block.addr - segment.addr) * scale;
      tape.push({ from, to: from + block.bytes * scale, block, segment });
      inside += block.bytes;
    }
    used += inside;
    if (!inside) empty += segment.bytes;
    place += segment.bytes * scale + 3;
  }
  const lines = Math.max(1, Math.ceil(place / width - 1e-6));
  const { c, it } = canvas("segment-map", lines * (TAPE.row + TAPE.gap));
  const piece = (from, to, paint) => {
    for (let row = Math.floor(from / width); row <= Math.floor((to - 1e-9) / width); row++) {
      const left = Math.max(0, from - row * width),
        right = Math.min(width, to - row * width);
      if (right > left) paint(left, row * (TAPE.row + TAPE.gap), right - left);
    }
  };
  for (const one of tape) {
    if (one.block) {
      const colour = categoryColour(one.block.category);
      c.fillStyle = matches(...searchWords(one.block)) ? colour : faded(colour, 0.2);
      piece(one.from, one.to, (x, y, w) =>
        c.fillRect(x, y + 1, Math.max(0.6, w - (w > 3 ? 0.7 : 0)), TAPE.row - 2),
      );
    } else {
      c.fillStyle = colours.faint;
      piece(one.from, one.to, (x, y, w) => c.fillRect(x, y, w, TAPE.row));
      c.strokeStyle = colours.line;
      c.lineWidth = 1;
      piece(one.from, one.to, (x, y, w) => c.strokeRect(x + 0.5, y + 0.5, Math.max(0, w - 1), TAPE.row - 1));
    }
  }
  const free = Math.max(0, reserved - used - at.rest);
  const parts =
    at.rest > 0
      ? `${bytes(used)} in blocks that this page lists, ${bytes(at.rest)} in other blocks, ${bytes(free)} free`
      : `${bytes(used)} in blocks, ${bytes(Math.max(0, free - empty))} in holes beside them, ${bytes(empty)} in segments with no block`;
  const text = `${count(segments.length)} segments, ${bytes(reserved)} reserved: ${parts}. Each outline is a segment, in address order; colours are categories, grey is ${grey}.`;
  $("segments-note").textContent =
    text +
    (t.segmentRows.left_out
      ? ` ${count(t.segmentRows.left_out)} later segment changes are not on this page.`
      : "");
  it.setAttribute("aria-label", text);
};

export function listenToSegments() {
  const it = $("segment-map"),
    tip = $("segment-tip");
  it.addEventListener("pointermove", (event) => {
    const box = it.getBoundingClientRect(),
      x = event.clientX - box.left,
      y = event.clientY - box.top;
    const at = Math.floor(y / (TAPE.row + TAPE.gap)) * box.width + x;
    const found = tape.findLast((one) => at >= one.from && at < Math.max(one.to, one.from + 1));
    tip.hidden = !found;
    if (!found) return;
    const { block, segment, grey } = found;
    tip.replaceChildren();
    if (block) {
      tip.append(
        element("b", "", `${bytes(block.bytes)} ${block.category}`),
        element("div", "", block.module),
        element("div", "", block.op),
        element("div", "", block.shape),
        element(
          "div",
          "quiet",
          `step ${block.step < 0 ? "–" : block.step}, ${shown(block.phase)}, alloc_id ${block.id}`,
        ),
      );
    } else tip.append(element("b", "", grey));
    tip.append(
      element(
        "div",
        "quiet",
        `in a segment of ${bytes(segment.bytes)} at 0x${segment.addr.toString(16)}${segment.expandable ? ", expandable" : ""}`,
      ),
    );
    placeTip(tip, x, box.width, y + 18);
  });
  it.addEventListener("pointerleave", () => (tip.hidden = true));
}
