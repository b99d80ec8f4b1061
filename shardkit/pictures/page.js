"use strict";
// Draws the pictures of a page from its JSON. Names only ever become text: of a canvas, or of a node.
const data = JSON.parse(document.getElementById("data").textContent);
const fontFamily = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
const byId = (id) => document.getElementById(id);
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function size(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    bytes /= 1024;
    if (bytes < 1023.95) return `${bytes.toFixed(1)} ${unit}`;
  }
  return `${(bytes / 1024).toFixed(1)} PiB`;
}
const number = (n) => n.toLocaleString("en-US");
const share = (part, whole) => whole ? `${(100 * part / whole).toPrecision(3)}%` : "0%";

function mix(from, to, amount) {
  const parts = [from, to].map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  return `rgb(${[0, 1, 2].map((i) => Math.round(parts[0][i] + (parts[1][i] - parts[0][i]) * amount)).join(",")})`;
}
function ramp() {
  const low = colour("low"), high = colour("high"), steps = [];
  for (let i = 0; i <= 64; i++) steps.push(mix(low, high, i / 64));
  return (amount) => steps[Math.round(64 * clamp(amount, 0, 1))];
}
// Stripes for what is not there.
function hatch(context) {
  const tile = document.createElement("canvas"); tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.fillStyle = colour("none"); pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = colour("mark"); pen.lineWidth = 2; pen.beginPath();
  for (const x of [-4, 0, 4, 8, 12]) { pen.moveTo(x - 2, 10); pen.lineTo(x + 10, -2); }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
const dark = matchMedia("(prefers-color-scheme: dark)");
function ownerColour(at, count) {
  return `hsl(${Math.round(count > 1 ? 165 + 150 * at / count : 212)} 50% ${(dark.matches ? 46 : 62) + (at % 2 ? 6 : 0)}%)`;
}

// A picture: a canvas that is drawn again when its width or the colours change, and a line about what is pointed at.
// `make(context, width)` draws, and returns {height, at(x, y), describe(place), frame(place), move(place, dx, dy)}.
class Picture {
  constructor(element, make, onPick) {
    this.canvas = element.querySelector("canvas");
    this.detail = element.querySelector(".detail");
    this.make = make; this.onPick = onPick; this.place = null; this.kept = false;
    this.canvas.addEventListener("pointermove", (event) => this.point(event, false));
    this.canvas.addEventListener("pointerleave", () => { if (!this.kept) this.show(null); });
    this.canvas.addEventListener("click", (event) => this.point(event, true));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(element);
    dark.addEventListener("change", () => { this.width = 0; this.draw(); });
  }
  draw(force) {
    const width = Math.floor(this.canvas.parentElement.clientWidth);
    if (!width || (width === this.width && !force)) return;
    this.width = width;
    const scale = window.devicePixelRatio || 1, measured = this.make(null, width);
    this.canvas.width = Math.round(width * scale); this.canvas.height = Math.round(measured.height * scale);
    this.canvas.style.height = `${measured.height}px`;
    const context = this.canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.font = `12px ${fontFamily}`; context.textBaseline = "middle";
    this.drawn = this.make(context, width);
    this.image = null;
    if (this.place) this.frame();
    this.canvas.dataset.drawn = "yes";
  }
  point(event, pick) {
    if (!this.drawn || !this.drawn.at) return;
    if (this.kept && !pick) return;
    const box = this.canvas.getBoundingClientRect();
    const place = this.drawn.at(event.clientX - box.left, event.clientY - box.top);
    this.kept = pick && place !== null;
    this.show(place);
    if (pick && place !== null && this.onPick) this.onPick(place);
  }
  key(event) {
    const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-1e9, 0], End: [1e9, 0], PageUp: [0, -10], PageDown: [0, 10] };
    if (!this.drawn || !this.drawn.move) return;
    if (event.key === "Enter" && this.place !== null && this.onPick) return this.onPick(this.place);
    if (event.key === "Escape") { this.kept = false; return this.show(null); }
    if (!steps[event.key]) return;
    event.preventDefault();
    this.kept = true;
    this.show(this.place === null ? this.drawn.first : this.drawn.move(this.place, ...steps[event.key]));
  }
  show(place) {
    if (JSON.stringify(place) === JSON.stringify(this.place)) return;
    this.place = place;
    this.detail.textContent = place === null || place === undefined ? "" : this.drawn.describe(place);
    this.frame();
  }
  frame() {
    const context = this.canvas.getContext("2d");
    context.save(); context.setTransform(1, 0, 0, 1, 0, 0);
    if (this.image) context.drawImage(this.image, 0, 0);
    else { this.image = document.createElement("canvas"); this.image.width = this.canvas.width; this.image.height = this.canvas.height; this.image.getContext("2d").drawImage(this.canvas, 0, 0); }
    context.restore();
    if (this.place === null || this.place === undefined) return;
    const [x, y, w, h] = this.drawn.frame(this.place);
    context.strokeStyle = colour("card"); context.lineWidth = 4; context.strokeRect(x, y, Math.max(w, 2), Math.max(h, 2));
    context.strokeStyle = colour("text"); context.lineWidth = 2; context.strokeRect(x, y, Math.max(w, 2), Math.max(h, 2));
  }
}

function fit(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (context.measureText(text.slice(0, middle) + "\u2026").width <= width) low = middle; else high = middle - 1;
  }
  return low ? text.slice(0, low) + "\u2026" : "";
}
// The same, with the end of the text: names differ there.
function fitEnd(context, text, width) {
  let start = 0;
  while (start < text.length && context.measureText((start ? "\u2026" : "") + text.slice(start)).width > width) start++;
  return (start && start < text.length ? "\u2026" : "") + text.slice(start);
}

// Rows x columns, the value of a cell as its colour, and where rows have totals a bar for each.
function grid(spec) {
  return (context, width) => {
    const { rows, columns } = spec, narrow = width < 560;
    const left = Math.min(narrow ? 92 : spec.labelWidth || 92, width * 0.34);
    const bars = spec.total ? (narrow ? 64 : 190) : 0, top = 8, bottom = 40;
    const rowHeight = Math.min(22, Math.max(spec.maxHeight || 520, 520) / rows);
    const inner = width - left - bars - (bars ? 16 : 0), cell = Math.min(inner / columns, 64), wide = cell * columns;
    const height = Math.ceil(top + rows * rowHeight + bottom);
    if (context) {
      const shade = ramp(), mark = colour("mark"), none = colour("none"), text = colour("text"), soft = colour("soft"), gapX = cell > 5 ? 1 : 0, gapY = rowHeight > 5 ? 1 : 0;
      for (let r = 0, next; r < rows; r = next) {
        next = r + 1;
        if (!gapY && spec.kind) while (next < rows && spec.kind(next) === spec.kind(r)) next++;  // thousands of ranks hold alike
        for (let c = 0; c < columns; c++) {
          const amount = spec.amount(r, c);
          if (amount === null) continue;
          context.fillStyle = amount === "bad" ? mark : amount <= 0 ? none : shade(amount);
          context.fillRect(left + c * cell, top + r * rowHeight, Math.max(cell - gapX, 0.5), Math.max((next - r) * rowHeight - gapY, 1));
        }
      }
      context.fillStyle = soft; context.textAlign = "right";
      const every = Math.ceil(15 / rowHeight), label = (r) => context.fillText(fitEnd(context, spec.row(r), left - 8), left - 6, top + (r + 0.5) * rowHeight);
      for (let r = 0; r < rows; r += every) if (r === 0 || r + every < rows) label(r);
      if (rows > 1) label(rows - 1);
      context.textAlign = "left";
      const y = top + rows * rowHeight + 12; let free = 0;
      for (let c = 0; c < columns; c++) {
        const name = spec.columnTick(c);
        if (!name) continue;
        const half = context.measureText(name).width / 2, centre = left + (c + 0.5) * cell, from = clamp(centre - half, left, Math.max(left, left + inner - 2 * half));
        if (from < free) continue;
        context.fillText(name, from, y); context.fillRect(centre, y - 10, 1, 3); free = from + 2 * half + 10;
      }
      context.fillText(fit(context, spec.columnTitle, inner), left, y + 17);
      if (bars) {
        const start = left + wide + 16, room = width - start - (narrow ? 0 : 74), peak = Math.max(1, ...Array.from({ length: rows }, (_, r) => spec.total(r)));
        let sum = 0;
        for (let r = 0; r < rows; r++) {
          const total = spec.total(r); sum += total;
          context.fillStyle = colour("bar");
          context.fillRect(start, top + r * rowHeight, room * total / peak, Math.max(rowHeight - gapY, 1));
          if (!narrow && (r % every === 0 && (r === 0 || r + every < rows) || r === rows - 1)) { context.fillStyle = soft; context.fillText(size(total), start + room + 6, top + (r + 0.5) * rowHeight); }
        }
        context.fillStyle = text; context.fillRect(start + room * sum / rows / peak - 0.5, top - 4, 1.5, rows * rowHeight + 8);
        context.fillStyle = soft; context.fillText(narrow ? "all bytes" : "all bytes; the line: their mean", start, y + (narrow ? 17 : 0));
      }
    }
    return {
      height, first: [0, 0],
      at(x, y) { const c = Math.floor((x - left) / cell), r = Math.floor((y - top) / rowHeight); return r < 0 || r >= rows || c < 0 || (c >= columns && !bars) ? null : [r, Math.min(c, columns - 1)]; },
      describe: ([r, c]) => spec.describe(r, c),
      frame: ([r, c]) => [left + c * cell, top + r * rowHeight, cell, rowHeight],
      move: ([r, c], dx, dy) => [clamp(r + dy, 0, rows - 1), clamp(c + dx, 0, columns - 1)],
    };
  };
}

// Files as bars of bytes: records, the gaps between them, and damage.
function lanes(spec) {
  return (context, width) => {
    const narrow = width < 560, left = narrow ? 8 : Math.min(230, width * 0.28), lane = narrow ? 46 : 30, top = narrow ? 20 : 6, room = width - left - 10;
    const count = spec.lanes.length, peak = Math.max(1, ...spec.lanes.map((each) => each.bytes)), height = top + count * lane + 22;
    const x = (bytes) => left + room * bytes / peak;
    if (context) {
      const bar = colour("bar"), high = colour("high"), gap = colour("gap"), soft = colour("soft"), mark = colour("mark");
      spec.lanes.forEach((each, at) => {
        const y = top + at * lane;
        context.fillStyle = soft; context.textAlign = "left";
        if (narrow) context.fillText(fit(context, each.label, room), left, y - 9); else context.fillText(fit(context, each.label, left - 10), 4, y + 10);
        context.fillStyle = each.strip ? gap : colour("none"); context.fillRect(left, y, Math.max(x(each.bytes) - left, 1), 20);
        const strip = each.strip;
        if (strip) for (let i = 0; i < strip.starts.length; i++) {
          context.fillStyle = i % 2 ? high : bar; context.globalAlpha = i % 2 ? 0.75 : 0.85;
          const from = x(strip.starts[i]), to = x(strip.starts[i] + strip.nbytes[i]);
          context.fillRect(from, y, Math.max(to - from, 0.25), 20);
        }
        context.globalAlpha = 1;
        for (const [start, nbytes, , , tone] of each.damage || []) {
          const from = Math.min(x(start), left + room - 3), wide = Math.max(x(start + (nbytes || peak)) - x(start), 3);
          if (tone === "missing") { context.fillStyle = hatch(context); context.fillRect(from, y, wide, 20); }
          else if (tone === "somewhere") {
            context.globalAlpha = 0.8; context.fillStyle = colour("card"); context.fillRect(from, y - 3, wide, 26);
            context.globalAlpha = 0.4; context.fillStyle = mark; context.fillRect(from, y - 3, wide, 26); context.globalAlpha = 1;
            context.strokeStyle = mark; context.lineWidth = 1; context.strokeRect(from + 0.5, y - 2.5, Math.max(wide - 1, 2), 25);
          } else { context.fillStyle = mark; context.fillRect(from, y - 3, wide, 26); }
        }
        if (each.missing) {
          const bar = each.bytes ? x(each.bytes) - left : room, line = fit(context, `missing: ${each.missing}`, room - 24);
          const wide = context.measureText(line).width, from = bar < wide + 24 ? Math.min(left + bar, left + room - wide - 16) : left + 6;
          context.fillStyle = colour("card"); context.fillRect(from, y + 2, wide + 12, 16);
          context.fillStyle = colour("text"); context.fillText(line, from + 6, y + 10);
        }
      });
      context.fillStyle = soft; const y = top + count * lane + 6;
      if (peak > 1) {
        context.textAlign = "left"; context.fillText("byte 0", left, y);
        context.textAlign = "right"; context.fillText(size(peak), left + room, y);
      }
    }
    return {
      height, first: [0, count && spec.lanes[0].damage && spec.lanes[0].damage.length ? -1 : 0],
      at(px, py) {
        const at = Math.floor((py - top + 4) / lane); if (at < 0 || at >= count || px < left - 4) return null;
        const strip = spec.lanes[at].strip, byte = (px - left) / room * peak;
        const hit = (spec.lanes[at].damage || []).findIndex(([start, nbytes]) => px >= x(start) - 2 && px <= Math.max(x(start + (nbytes || peak)), x(start) + 3) + 1);
        if (hit >= 0) return [at, -1 - hit];
        if (!strip) return [at, 0];
        let low = 0, high = strip.starts.length - 1;
        while (low < high) { const middle = (low + high + 1) >> 1; if (strip.starts[middle] <= byte) low = middle; else high = middle - 1; }
        return [at, low];
      },
      describe: ([at, record]) => spec.describe(spec.lanes[at], record),
      frame([at, record]) {
        const each = spec.lanes[at], strip = each.strip, y = top + at * lane;
        if (record < 0) { const [start, nbytes] = each.damage[-1 - record]; return [x(start) - 1, y - 3, Math.max(x(start + (nbytes || peak)) - x(start), 3) + 2, 26]; }
        return strip ? [x(strip.starts[record]), y, x(strip.nbytes[record]) - left, 20] : [left, y, x(each.bytes) - left, 20];
      },
      move([at, record], dx, dy) {
        const next = clamp(at + dy, 0, count - 1), each = spec.lanes[next], strip = each.strip;
        if (each.damage && each.damage.length) { const order = dy ? 0 : clamp(-1 - record + dx, 0, each.damage.length - 1); return [next, -1 - order]; }
        return [next, clamp((dy ? Math.max(record, 0) : record + dx), 0, strip ? strip.starts.length - 1 : 0)];
      },
    };
  };
}

// A tensor as a rectangle, cut by its owners. More than two dims are drawn by the two that tell most.
function rectangle(get) {
  return (context, width) => {
    const { shape, boxes, owners, describe, numOwners, damage } = get(), dims = shape.length, pieces = dims ? boxes.length / (2 * dims) : 1;
    const isCut = (dim) => { for (let i = 0; i < pieces; i++) if (boxes[i * 2 * dims + dims + dim] !== shape[dim]) return true; return false; };
    const order = [...shape.keys()].sort((a, b) => (isCut(b) - isCut(a)) || shape[b] - shape[a] || a - b).slice(0, 2).sort((a, b) => a - b);
    const [down, across] = dims > 1 ? order : [null, dims ? 0 : null];
    const rows = down === null ? 1 : shape[down] || 1, columns = across === null ? 1 : shape[across] || 1;
    const room = width - 60, wide = dims < 2 ? room : clamp(260 * columns / rows, Math.min(120, room), room), tall = dims < 2 ? 56 : clamp(wide * rows / columns, 56, 260);
    const top = 22, left = 50, height = Math.ceil(top + tall + 26);
    const box = (at) => {
      const offset = (dim) => dim === null ? 0 : boxes[at * 2 * dims + dim], length = (dim) => dim === null ? 1 : boxes[at * 2 * dims + dims + dim];
      return [left + wide * offset(across) / columns, top + tall * offset(down) / rows, wide * length(across) / columns, tall * length(down) / rows];
    };
    if (context) {
      context.textAlign = "left"; context.fillStyle = colour("soft");
      context.fillText(dims ? `dim ${across}: ${number(columns)}` : "a single number", left, 10);
      if (down !== null) { context.save(); context.translate(12, top + tall); context.rotate(-Math.PI / 2); context.fillText(fit(context, `dim ${down}: ${number(rows)}`, Math.max(tall, 40)), 0, 0); context.restore(); }
      context.fillStyle = colour("none"); context.fillRect(left, top, wide, tall);
      for (let i = 0; i < owners.length; i++) {
        const [x, y, w, h] = box(i);
        if (!(w > 0) || !(h > 0)) continue;
        context.fillStyle = damage ? colour("none") : ownerColour(owners[i], numOwners);
        context.fillRect(x, y, w, h);
        if (pieces <= 128) { context.strokeStyle = colour("card"); context.lineWidth = 1; context.strokeRect(x, y, w, h); }
        const name = describe(i, true);
        if (w > context.measureText(name).width + 8 && h > 14) { context.fillStyle = dark.matches ? "#fff" : "#10223a"; context.textAlign = "center"; context.fillText(name, x + w / 2, y + h / 2); }
      }
      for (const each of damage || []) {
        const at = (dim, which) => dim === null ? which : each[which][dim];
        context.fillStyle = colour("mark"); context.globalAlpha = each[2] === "somewhere" ? 0.4 : 1;
        context.fillRect(left + wide * at(across, 0) / columns, top + tall * at(down, 0) / rows, Math.max(wide * at(across, 1) / columns, 3), Math.max(tall * at(down, 1) / rows, 3));
        context.globalAlpha = 1;
      }
      context.textAlign = "left"; context.fillStyle = colour("soft");
      if (dims > 2) context.fillText(fit(context, `dims ${down} and ${across} of [${shape.join(", ")}]`, room), left, top + tall + 14);
    }
    return {
      height, first: 0,
      at(x, y) { for (let i = owners.length - 1; i >= 0; i--) { const [bx, by, w, h] = box(i); if (w > 0 && h > 0 && x >= bx && x <= bx + w && y >= by && y <= by + h) return i; } return null; },
      describe: (at) => describe(at, false), frame: box,
      move: (at, dx, dy) => clamp(at + Math.sign(dx + dy) * Math.min(Math.abs(dx + dy), owners.length), 0, owners.length - 1),
    };
  };
}

// Who reads what: files on the left, readers on the right.
function flow(spec) {
  return (context, width) => {
    const most = Math.max(spec.left.length, spec.right.length), step = clamp(320 / most, 5, 26), height = Math.ceil(Math.min(most * step, 340) + 34);
    const left = Math.min(150, width * 0.36), right = width - Math.min(110, width * 0.28), room = height - 34;
    const y = (at, count) => 22 + room * (at + 0.5) / count;
    if (context) {
      context.fillStyle = colour("soft"); context.textAlign = "right"; context.fillText("files", left, 9); context.textAlign = "left"; context.fillText(spec.readers, right, 9);
      context.strokeStyle = colour(spec.tone); context.globalAlpha = clamp(12 / spec.links.length ** 0.5, 0.08, 0.9);
      const peak = Math.max(1, ...spec.links.map((each) => each[2]));
      for (const [from, to, bytes] of spec.links) {
        context.lineWidth = Math.max(0.75, (spec.thick || 2.5) * bytes / peak); context.beginPath(); const a = y(from, spec.left.length), b = y(to, spec.right.length), middle = (left + right) / 2;
        context.moveTo(left + 8, a); context.bezierCurveTo(middle, a, middle, b, right - 8, b); context.stroke();
      }
      context.globalAlpha = 1;
      const names = (items, x, align) => {
        const every = Math.ceil(14 / (room / items.length));
        items.forEach((name, at) => {
          context.fillStyle = colour("bar"); context.fillRect(align === "right" ? left + 2 : right - 8, y(at, items.length) - Math.min(room / items.length / 2 - 0.5, 6), 6, Math.max(Math.min(room / items.length - 1, 12), 1.5));
          if (at % every && at !== items.length - 1 || (at !== items.length - 1 && at + every > items.length - 1 && every > 1)) return;
          context.fillStyle = colour("soft"); context.textAlign = align; context.fillText(fit(context, name, align === "right" ? left - 6 : width - right - 4), x, y(at, items.length));
        });
      };
      names(spec.left, left - 4, "right"); names(spec.right, right + 4, "left");
    }
    return { height };
  };
}

// Squares, one for each file.
function squares(spec) {
  return (context, width) => {
    const count = spec.count, cell = clamp(Math.sqrt(width * 160 / count), 6, 22), columns = Math.max(1, Math.floor(width / cell)), height = Math.ceil(count / columns) * cell + 2;
    const box = (at) => [(at % columns) * cell, Math.floor(at / columns) * cell, cell - 2, cell - 2];
    if (context) for (let at = 0; at < count; at++) { const tone = spec.tone(at); context.fillStyle = tone === "missing" ? hatch(context) : colour(tone); context.fillRect(...box(at)); }
    return {
      height, first: 0,
      at(x, y) { const at = Math.floor(y / cell) * columns + Math.floor(x / cell); return x < columns * cell && at >= 0 && at < count ? at : null; },
      describe: spec.describe, frame: box, move: (at, dx, dy) => clamp(at + dx + dy * columns, 0, count - 1),
    };
  };
}

// Tables: click or press a head to sort, type to search.
function enhance(holder) {
  const table = holder.querySelector("table"), body = table.tBodies[0], rows = [...body.rows], search = holder.querySelector(".search");
  const texts = rows.map((row) => row.textContent.toLowerCase());
  rows.forEach((row, at) => { row.dataset.at = at; });
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button"; button.textContent = head.textContent; head.replaceChildren(button);
    button.addEventListener("click", () => {
      const isNumber = rows.some((row) => row.cells[column].dataset.v !== undefined);
      const was = head.getAttribute("aria-sort"), up = was === null ? !isNumber : was === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const collator = new Intl.Collator("en", { numeric: true }), key = (row) => isNumber ? Number(row.cells[column].dataset.v ?? -Infinity) : row.cells[column].textContent;
      const sorted = rows.map((row) => [key(row), row]).sort((a, b) => (up ? 1 : -1) * (isNumber ? a[0] - b[0] || 0 : collator.compare(a[0], b[0])));
      body.replaceChildren(...sorted.map((each) => each[1]));
    });
  });
  if (!search) return rows;
  search.hidden = false;
  const input = search.querySelector("input"), status = search.querySelector("span");
  input.addEventListener("input", () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean); let found = 0;
    rows.forEach((row, at) => { const hit = words.every((word) => texts[at].includes(word)); row.hidden = !hit; found += hit; });
    status.textContent = words.length ? `${number(found)} of ${number(rows.length)}` : "";
  });
  return rows;
}

function pickable(rows, onPick) {
  let chosen = null;
  const pick = (row) => { if (chosen) chosen.removeAttribute("aria-selected"); chosen = row; row.setAttribute("aria-selected", "true"); onPick(Number(row.dataset.at)); };
  rows.forEach((row) => {
    row.classList.add("pickable"); row.tabIndex = -1;
    row.addEventListener("click", () => pick(row));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") { event.preventDefault(); pick(row); }
      const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (!step) return;
      event.preventDefault();
      let next = row[step]; while (next && next.hidden) next = next[step];
      if (next) { row.tabIndex = -1; next.tabIndex = 0; next.focus(); pick(next); }
    });
  });
  if (rows.length) rows[0].tabIndex = 0;
  return pick;
}

const pictures = {};
function place(name, make, onPick) {
  const element = document.querySelector(`[data-picture="${name}"]`);
  if (element) { pictures[name] = new Picture(element, make, onPick); pictures[name].draw(); }
  return pictures[name];
}
const tables = Object.fromEntries([...document.querySelectorAll(".table")].map((holder) => [holder.id, enhance(holder)]));
const fileName = (at) => data.files && data.files[at] ? data.files[at].name : "a file";
const tensorName = (at) => data.tensors && data.tensors[at] !== undefined ? data.tensors[at] : "a tensor that is not listed";

function recordLine(lane, at) {
  const strip = lane.strip;
  if (!strip) return `${lane.label}: ${size(lane.bytes)}`;
  const before = at ? strip.starts[at - 1] + strip.nbytes[at - 1] : 0, gap = strip.starts[at] - before, many = strip.counts[at] > 1 ? `${strip.counts[at]} records from ` : "";
  return `${lane.label}, record ${number(at + 1)} of ${number(strip.starts.length)}: ${many}${tensorName(strip.tensors[at])}, ${size(strip.nbytes[at])} at byte ${number(strip.starts[at])}${gap > 0 ? `, ${size(gap)} of gap before it` : ""}`;
}

if (data.kind === "held") {
  const rowName = (r) => data.has_ranks ? `rank ${r}` : fileName(r), unitName = (c) => data.units[c];
  const cells = (r) => data.cells[data.holders[r][0]], peak = Math.max(1, ...data.cells.map((row) => Math.max(0, ...row)));
  const readsLine = (r) => { const reads = data.holders[r][2], many = data.holders[r][3]; return reads.length ? `; reads ${reads.slice(0, 3).map(([file, bytes]) => `${size(bytes)} of ${fileName(file)}`).join(", ")}${many > 3 ? ` and ${many - 3} more files` : ""}` : ""; };
  place("matrix", grid({
    rows: data.holders.length, columns: data.units.length, labelWidth: data.has_ranks ? 78 : 190, row: rowName, total: (r) => data.holders[r][1], kind: (r) => data.holders[r][0],
    amount: (r, c) => { const bytes = cells(r)[c]; return bytes ? 0.08 + 0.92 * Math.sqrt(bytes / peak) : 0; },
    columnTick: (c) => data.ticks[c], columnTitle: data.column_title,
    describe: (r, c) => `${rowName(r)}, ${unitName(c)}: ${size(cells(r)[c])}, ${share(cells(r)[c], data.holders[r][1])} of its ${size(data.holders[r][1])}${data.has_ranks ? readsLine(r) : ""}`,
  }));
  for (const side of ["naive", "ours"]) if (data.flow) place(side, flow(data.flow[side]));
  let chosen = 0;
  const cut = () => data.cuts[data.cut_of[chosen]] || { shape: [], files: [], boxes: [], num_pieces: 0 };
  const readers = (file) => data.has_ranks && data.readers[file] && data.readers[file].length ? `read by rank ${data.readers[file].slice(0, 4).join(", ")}${data.readers[file].length > 4 ? ` and ${data.readers[file].length - 4} more` : ""}` : "";
  const view = place("tensor", rectangle(() => {
    const { shape, files, boxes } = cut(), dims = shape.length;
    return { shape, boxes, owners: files, numOwners: data.files.length, describe(i, brief) {
      if (brief) {
        const ranks = data.has_ranks && data.readers[files[i]] || [];
        return ranks.length === 1 ? `rank ${ranks[0]}` : ranks.length > 1 ? `ranks ${ranks.slice(0, 3).join(", ")}${ranks.length > 3 ? ", ..." : ""}` : data.files.length > 1 ? fileName(files[i]) : "whole";
      }
      const ranges = shape.map((_, dim) => { const from = boxes[i * 2 * dims + dim]; return `${number(from)}:${number(from + boxes[i * 2 * dims + dims + dim])}`; });
      return `[${ranges.join(", ")}] lies in ${fileName(files[i])}${readers(files[i]) ? `, ${readers(files[i])}` : ""}`;
    } };
  }));
  const heading = byId("tensor-name");
  const pick = pickable(tables.tensors || [], (at) => {
    chosen = at;
    const { num_pieces, files, shape } = cut(), empty = num_pieces - files.length;
    heading.textContent = `${tensorName(at)} [${shape.join(", ")}]: ${number(num_pieces)} ${num_pieces === 1 ? "piece" : "pieces"}${empty > 0 ? ", too many to draw" : ""}`;
    if (view) { view.kept = false; view.place = null; view.detail.textContent = ""; view.draw(true); }
  });
  if (tables.tensors && tables.tensors.length) pick(tables.tensors[data.first_tensor]);
  place("strips", lanes({ lanes: data.lanes.map((lane) => ({ ...lane, strip: data.strips[lane.strip] })), describe: recordLine }));
}

if (data.kind === "damage") {
  const all = data.lanes.map((lane) => ({ ...lane, strip: lane.strip === null ? null : data.strips[lane.strip] }));
  place("strips", lanes({ lanes: all, describe: (lane, record) => {
    if (record >= 0) return recordLine(lane, record);
    const [start, nbytes, line, , tone] = lane.damage[-1 - record];
    if (tone === "missing" && start === 0) return `${lane.label}: ${line}`;
    return `${lane.label}, ${tone === "somewhere" ? "somewhere in " : ""}bytes ${number(start)} to ${number(start + nbytes)}: ${line}`;
  } }), ([lane, record]) => { if (record < 0 && tables.problems) select(tables.problems[all[lane].damage[-1 - record][3]]); });
  place("files", squares({ count: data.files.length, tone: (at) => data.files[at].tone, describe: (at) => `${data.files[at].name}: ${data.files[at].said}` }));
  let chosen = 0;
  const heading = byId("tensor-name"), view = place("tensor", rectangle(() => {
    const { shape, boxes, files, damage } = data.places[chosen] || { shape: [], boxes: [], files: [], damage: [] };
    return { shape, boxes, owners: files, numOwners: data.files.length, damage, describe: (i, brief) => brief ? "" : `this piece lies in ${fileName(files[i])}` };
  }));
  var select = pickable(tables.problems || [], (at) => {
    chosen = data.place_of[at];
    if (heading) heading.textContent = chosen === null ? "This problem is about no part of a tensor." : data.places[chosen].title;
    if (view) { view.canvas.parentElement.hidden = chosen === null; view.kept = false; view.place = null; view.detail.textContent = ""; view.draw(true); }
  });
  if (tables.problems && tables.problems.length) select(tables.problems[data.first_problem]);
}

if (data.kind === "changes") {
  const cell = (r, c) => data.cells[r * data.columns.length + c];
  const row = (name) => tables.tensors && name !== null ? tables.tensors[name] : null;
  place("changes", grid({
    rows: data.rows.length, columns: data.columns.length, labelWidth: 250, maxHeight: 900, row: (r) => data.rows[r],
    amount: (r, c) => { const each = cell(r, c); return each === null ? null : each[0] === "bad" ? "bad" : each[0] && 0.1 + 0.9 * Math.sqrt(each[0] / data.peak); },
    columnTick: (c) => data.columns[c], columnTitle: data.column_title,
    describe: (r, c) => { const each = cell(r, c); return `${data.rows[r]}, ${data.columns[c] === "-" ? "outside layers" : `layer ${data.columns[c]}`}: ${each === null ? "no such tensor" : each[1]}`; },
  }), ([r, c]) => { const each = cell(r, c), found = each && row(each[2]); if (found) { found.scrollIntoView({ block: "nearest" }); select(found); } });
  const { rows: layers, columns: numbers, cells, peak } = data.experts, expert = (r, c) => cells[r * numbers.length + c];
  // The step from identical to a little is what the map is for, so the least amount has a third of the strongest colour.
  place("experts", grid({
    rows: layers.length, columns: numbers.length, row: (r) => layers[r], columnTick: (c) => `${numbers[c]}`, columnTitle: "experts",
    amount: (r, c) => typeof expert(r, c) === "number" && expert(r, c) ? 0.35 + 0.65 * Math.sqrt(expert(r, c) / peak) : expert(r, c),
    describe: (r, c) => { const each = expert(r, c); return `${layers[r]}, expert ${numbers[c]}: ${each === null ? "no such expert" : each === "bad" ? "cannot be compared" : each ? `differs by ${each}` : "identical"}`; },
  }));
  var select = pickable(tables.tensors || [], () => {});
}
document.documentElement.dataset.ready = "yes";
