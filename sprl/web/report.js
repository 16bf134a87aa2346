// Draws the charts and the timeline of a report (sprl/io/html_report.py), and the charts of a comparison (sprl/io/comparison.py),
// from the JSON in the page.
// All text goes through textContent, so nothing that a model wrote can become markup.
'use strict';
window.addEventListener('error', event => { document.documentElement.dataset.error = event.message; });

const DATA = JSON.parse(document.getElementById('data').textContent);
const SVG = 'http://www.w3.org/2000/svg';

// --- elements ---------------------------------------------------------------------------------------------------------

function svg(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function html(name, className, parent, text) {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

const color = number => `var(--c${number % 11})`;

function short(value) {
  const size = Math.abs(value);
  if (value === 0) return '0';
  if (size >= 1e6 || size < 1e-3) return value.toExponential(1).replace('e+', 'e').replace('.0e', 'e');
  return size >= 1000 ? Math.round(value).toLocaleString('en') : String(+value.toPrecision(size >= 100 ? 4 : 3));
}

// Round values at equal distances that cover low to high.
function ticks(low, high, most) {
  const rough = (high - low) / Math.max(1, most) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = [1, 2, 5, 10].map(factor => factor * power).find(d => d >= rough * 0.999);
  const first = Math.ceil(low / distance - 1e-9), last = Math.floor(high / distance + 1e-9);
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => +((first + i) * distance).toPrecision(12));
}

function powers(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  for (let p = first; p <= last; p += Math.max(1, Math.ceil((last - first) / 6))) found.push(10 ** p);
  return found.filter(value => value >= low * 0.999 && value <= high * 1.001);
}

// A box beside the pointer. `lines` are [colour or null, text].
function showTip(box, x, y, lines) {
  let tip = box.querySelector('.tip');
  if (!tip) tip = html('div', 'tip', box);
  tip.replaceChildren(...lines.map(([fill, text]) => {
    const line = html('div');
    if (fill) html('i', '', line).style.background = fill;
    line.append(text);
    return line;
  }));
  const width = tip.offsetWidth, room = box.clientWidth;
  tip.style.left = `${Math.max(4, x + 14 + width > room ? x - width - 14 : x + 14)}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight / 2)}px`;
}

const hideTip = box => box.querySelector('.tip')?.remove();

// --- charts -----------------------------------------------------------------------------------------------------------

function chart(figure) {
  const spec = DATA[figure.dataset.chart];
  const hidden = new Set();
  const caption = html('figcaption', '', figure);
  html('b', '', caption, spec.title);
  html('span', 'unit', caption, [spec.unit, spec.cut].filter(Boolean).join(' · '));
  if (spec.about) figure.title = spec.about;
  if (spec.series.length > 1) {
    const legend = html('div', 'legend', figure);
    spec.series.forEach((curve, i) => {
      const button = html('button', '', legend);
      button.type = 'button';
      button.setAttribute('aria-pressed', 'true');
      const mark = html('i', curve.kind === 'points' ? 'dot' : spec.stacked ? 'block' : '', button);
      mark.style.background = color(curve.color);
      if (curve.kind === 'faint') mark.style.opacity = 0.35;
      button.append(curve.label);
      button.addEventListener('click', () => {
        if (!hidden.delete(i)) hidden.add(i);
        button.setAttribute('aria-pressed', String(!hidden.has(i)));
        draw();
      });
    });
  }
  const place = svg('svg', { role: 'img', 'aria-label': `${spec.title}, ${spec.unit}` }, figure);
  let width = 0;

  function draw() {
    width = place.clientWidth || figure.clientWidth - 24;
    if (width <= 0) return;
    const height = spec.small ? 120 : figure.classList.contains('wide') ? Math.min(300, Math.max(210, width * 0.3)) : 200;
    place.replaceChildren();
    place.setAttribute('viewBox', `0 0 ${width} ${height}`);
    place.setAttribute('height', height);
    const shown = spec.series.filter((_, i) => !hidden.has(i));
    const area = { left: 46, right: width - 10, top: 8, bottom: height - (spec.categories ? 68 : 22) };
    const x = horizontal(spec, shown, area), stack = spec.stacked ? stacked(shown) : null, y = vertical(spec, shown, stack, area);

    for (const value of y.ticks) {
      svg('line', { class: 'grid-line', x1: area.left, x2: area.right, y1: y(value), y2: y(value) }, place);
      svg('text', { x: area.left - 6, y: y(value) + 4, 'text-anchor': 'end' }, place, short(value));
    }
    svg('line', { class: 'axis', x1: area.left, x2: area.right, y1: area.bottom, y2: area.bottom }, place);
    if (!spec.categories) svg('text', { x: area.left - 6, y: area.bottom + 16, 'text-anchor': 'end' }, place, spec.across ?? 'step');
    for (const value of x.ticks) {
      const label = spec.categories ? spec.categories[value] : String(value);
      const at = spec.categories
        ? { transform: `translate(${x(value) + 3} ${area.bottom + 12}) rotate(-38)`, 'text-anchor': 'end' }
        : { x: x(value), y: area.bottom + 16, 'text-anchor': 'middle' };
      svg('text', at, place, label);
    }
    const clip = `clip-${figure.dataset.chart}`;
    svg('rect', { x: area.left - 5, y: area.top - 6, width: area.right - area.left + 10, height: area.bottom - area.top + 6 },
      svg('clipPath', { id: clip }, place));
    const marks = svg('g', { 'clip-path': `url(#${clip})` }, place);
    for (const curve of shown) {
      if (spec.stacked && curve.kind !== 'points') bars(marks, curve, stack.get(curve), x, y, area);
      else if (curve.kind === 'points') points(marks, curve, x, y);
      else line(marks, curve, x, y);
    }
    hover(place, figure, spec, shown, x, y, area);
  }
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 1) draw(); }).observe(figure);
  draw();
}

function horizontal(spec, shown, area) {
  const values = (shown.length ? shown : spec.series).flatMap(curve => curve.x);
  let low = Math.min(...values), high = Math.max(...values);
  if (spec.stacked || spec.categories || low === high) {
    const room = 0.6 * distance([...new Set(values)]);
    low -= room;
    high += room;
  }
  const scale = value => area.left + 6 + (value - low) / (high - low) * (area.right - area.left - 12);
  const every = Math.ceil((spec.categories?.length ?? 0) * 26 / (area.right - area.left)) || 1;
  scale.ticks = spec.categories ? spec.categories.map((_, i) => i).filter(i => i % every === 0)
    : ticks(low, high, (area.right - area.left) / 70).filter(value => spec.across || Number.isInteger(value));
  scale.step = (area.right - area.left - 12) / (high - low);
  return scale;
}

function vertical(spec, shown, stack, area) {
  let values = shown.flatMap(curve => [curve.y, curve.low ?? [], curve.high ?? []].flat()).filter(value => value !== null);
  if (stack) values = values.concat([...stack.values()].flatMap(pairs => pairs.map(pair => pair[1])));
  if (spec.log) values = values.filter(value => value > 0);
  let low = Math.min(...values), high = Math.max(...values);
  if (!values.length) { low = spec.log ? 0.1 : 0; high = 1; }
  if (spec.limit) high = Math.min(high, spec.limit);
  if (spec.log) {
    low = spec.categories ? 0.7 : low / 1.3;
    high *= 1.3;
    const scale = value => value <= 0 ? area.bottom + 4
      : area.bottom - (Math.log(value) - Math.log(low)) / (Math.log(high) - Math.log(low)) * (area.bottom - area.top);
    scale.ticks = powers(low, high);
    return scale;
  }
  if (low > 0 && (low < 0.6 * high || stack)) low = 0;
  if (low === high) { const room = Math.abs(low) * 0.1 || 1; low -= low === 0 ? 0 : room; high += room; }
  if (low !== 0) low -= (high - low) * 0.04;
  high += (high - low) * 0.05;
  const scale = value => area.bottom - (value - low) / (high - low) * (area.bottom - area.top);
  scale.ticks = ticks(low, high, (area.bottom - area.top) / 30);
  return scale;
}

// The smallest distance of two steps; 1 for one step.
function distance(xs) {
  const sorted = xs.toSorted((a, b) => a - b);
  return sorted.length > 1 ? Math.min(...sorted.slice(1).map((value, i) => value - sorted[i])) : 1;
}

// Bottom and top of each bar, by curve.
function stacked(shown) {
  const sums = new Map(), found = new Map();
  for (const curve of shown) {
    if (curve.kind === 'points') continue;
    found.set(curve, curve.x.map((x, i) => {
      const bottom = sums.get(x) ?? 0;
      sums.set(x, bottom + (curve.y[i] ?? 0));
      return [bottom, sums.get(x)];
    }));
  }
  return found;
}

function bars(parent, curve, pairs, x, y, area) {
  const width = Math.max(1, Math.min(40, x.step * 0.8 * distance([...new Set(curve.x)])));
  pairs.forEach(([bottom, top], i) => {
    if (top > bottom) {
      const high = Math.max(y(top), area.top - 6);
      const height = Math.max(0, y(bottom) - high);
      svg('rect', { x: x(curve.x[i]) - width / 2, width, y: high, height, fill: color(curve.color) }, parent);
    }
  });
}

function line(parent, curve, x, y) {
  const drawn = curve.x.map((value, i) => [x(value), y(curve.y[i])]);
  const half = curve.kind === 'steps' ? x.step / 2 : 0;  // a step is flat from half a category before its point to half one after
  const path = drawn.map(([a, b], i) => {
    const flat = half ? `H${(a + half).toFixed(1)}` : '';
    return `${i ? 'L' : 'M'}${(a - half).toFixed(1)} ${b.toFixed(1)}${flat}`;
  }).join('');
  if (curve.low) band(parent, curve, x, y);
  const faint = curve.kind === 'faint';
  const look = { d: path, fill: 'none', stroke: color(curve.color), 'stroke-width': faint ? 1.2 : 2, 'stroke-linejoin': 'round' };
  svg('path', { ...look, opacity: faint ? 0.4 : 1 }, parent);
  if (drawn.length < 8 && curve.kind !== 'steps') {
    for (const [a, b] of drawn) {
      svg('circle', { cx: a, cy: b, r: 2.6, fill: color(curve.color), opacity: faint ? 0.4 : 1 }, parent);
    }
  }
}

// The area between the least and the largest values of a curve.
function band(parent, curve, x, y) {
  const edge = (values, i) => `${x(curve.x[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
  const there = curve.x.map((_, i) => edge(curve.high, i)), back = curve.x.map((_, i) => edge(curve.low, i)).reverse();
  svg('path', { d: `M${[...there, ...back].join('L')}Z`, fill: color(curve.color), opacity: 0.15 }, parent);
}

function points(parent, curve, x, y) {
  curve.x.forEach((value, i) => {
    const [a, b, stroke] = [x(value), y(curve.y[i]), color(curve.color)];
    if (curve.low?.[i] != null && curve.high?.[i] != null) {
      const [low, high] = [y(curve.low[i]), y(curve.high[i])];
      const d = `M${a} ${low}V${high}M${a - 4} ${low}h8M${a - 4} ${high}h8`;
      svg('path', { d, stroke, 'stroke-width': 1.5, fill: 'none' }, parent);
    }
    svg('circle', { cx: a, cy: b, r: 4.5, fill: stroke, stroke: 'var(--card)', 'stroke-width': 1.5 }, parent);
  });
}

function hover(place, figure, spec, shown, x, y, area) {
  const cursor = svg('line', { class: 'cursor', y1: area.top, y2: area.bottom, visibility: 'hidden' }, place);
  const xs = [...new Set(shown.flatMap(curve => curve.x))].sort((a, b) => a - b);
  place.onpointermove = event => {
    const box = place.getBoundingClientRect(), at = event.clientX - box.left;
    if (!xs.length) return;
    const nearest = xs.reduce((best, value) => Math.abs(x(value) - at) < Math.abs(x(best) - at) ? value : best);
    cursor.setAttribute('x1', x(nearest));
    cursor.setAttribute('x2', x(nearest));
    cursor.setAttribute('visibility', 'visible');
    const where = spec.across ? `${short(nearest)} ${spec.across}` : `step ${nearest}`;
    const lines = [[null, spec.categories ? spec.categories[nearest] : where]];
    for (const curve of shown) {
      const i = curve.x.indexOf(nearest);
      if (i < 0 || curve.y[i] === null) continue;
      const range = curve.low?.[i] != null ? ` (${short(curve.low[i])} to ${short(curve.high[i])})` : '';
      lines.push([color(curve.color), `${curve.label}  ${short(curve.y[i])}${range}`]);
    }
    const outer = figure.getBoundingClientRect();
    showTip(figure, x(nearest) + box.left - outer.left, event.clientY - outer.top, lines);
  };
  place.onpointerleave = () => { cursor.setAttribute('visibility', 'hidden'); hideTip(figure); };
}

// --- timeline ---------------------------------------------------------------------------------------------------------

function timeline(box, data) {
  const whole = [0, Math.max(1, ...data.spans.map(span => span[2] + span[3]))];
  let view = [...whole];
  const compiled = new Set(data.compiled);
  const used = [...new Set(data.spans.map(span => span[1]))].sort((a, b) => a - b);
  const legend = html('div', 'legend', box);
  for (const kind of used) {
    const item = html('span', 'fact', legend);
    const mark = html('i', 'block', item);
    mark.style.background = color(kind);
    mark.style.marginRight = '5px';
    item.append(data.kinds[kind]);
  }
  const place = svg('svg', { role: 'img', 'aria-label': 'Timeline' }, box);
  const isGroup = data.rows.map(name => name.startsWith('groups'));
  const byRow = data.rows.map((_, row) => data.spans.map((span, i) => [span, i]).filter(([span]) => span[0] === row));
  let width = 0, tops = [], heights = [];
  const seconds = ms => `${short(ms / 1000)} s`;

  function layout() {
    let y = 20;
    tops = []; heights = [];
    data.rows.forEach((_, row) => {
      heights.push(isGroup[row] ? 5 : 22);
      tops.push(y);
      y += heights[row] + (isGroup[row] ? 1.5 : 6);
    });
    return y;
  }

  function draw() {
    width = place.clientWidth;
    if (width <= 0) return;
    const bottom = layout(), left = width < 500 ? 78 : 110, right = width - 6;
    const x = ms => left + (ms - view[0]) / (view[1] - view[0]) * (right - left);
    place.replaceChildren();
    place.setAttribute('viewBox', `0 0 ${width} ${bottom + 24}`);
    place.setAttribute('height', bottom + 24);
    for (const value of ticks(view[0] / 1000, view[1] / 1000, (right - left) / 90)) {
      svg('line', { class: 'grid-line', x1: x(value * 1000), x2: x(value * 1000), y1: 18, y2: bottom }, place);
      svg('text', { x: x(value * 1000), y: bottom + 16, 'text-anchor': 'middle' }, place, `${value} s`);
    }
    let free = -Infinity;
    for (const [at, step] of data.steps) {
      if (at < view[0] || at > view[1]) continue;
      svg('line', { class: 'cursor', x1: x(at), x2: x(at), y1: 16, y2: bottom }, place);
      const label = `step ${step}`, half = label.length * 3.2;
      if (x(at) - half > free) {
        svg('text', { x: Math.min(x(at), right - half), y: 11, 'text-anchor': 'middle' }, place, label);
        free = x(at) + half + 6;
      }
    }
    let named = false;
    data.rows.forEach((name, row) => {
      if (!isGroup[row] || !named) {
        svg('text', { x: left - 8, y: tops[row] + (isGroup[row] ? 8 : 15), 'text-anchor': 'end' }, place, name);
      }
      named ||= isGroup[row];
      let drawnTo = -Infinity;
      for (const [span, i] of byRow[row]) {
        const [, kind, start, length, number] = span;
        if (start + length < view[0] || start > view[1]) continue;
        const a = Math.max(left, x(start)), b = Math.min(right, x(start + length));
        if (b - drawnTo < 0.6) continue;  // hidden by the bar before it
        const bar = svg('rect', {
          x: a, y: tops[row], width: Math.max(0.8, b - a - (b - a > 3 ? 0.6 : 0)), height: heights[row],
          fill: color(kind), rx: 1.5, 'data-span': i,
        }, place);
        if (isGroup[row]) bar.setAttribute('opacity', 0.85);
        drawnTo = Math.max(drawnTo, b);
        const text = compiled.has(i) ? 'compiles' : number !== null ? String(number) : '';
        if (!isGroup[row] && text && b - a > text.length * 6.5 + 6) {
          svg('text', { class: 'name', x: (a + b) / 2, y: tops[row] + 15, 'text-anchor': 'middle' }, place, text);
        }
      }
    });
    const band = svg('rect', { y: 16, height: bottom - 16, fill: 'var(--accent)', opacity: 0.18, visibility: 'hidden' }, place);
    const time = event => {
      const at = event.clientX - place.getBoundingClientRect().left - left;
      return view[0] + at / (right - left) * (view[1] - view[0]);
    };
    let from = null;
    place.onpointerdown = event => { from = time(event); };
    place.onpointerup = event => {
      const to = time(event);
      if (from !== null && Math.abs(x(to) - x(from)) > 6) show(Math.min(from, to), Math.max(from, to));
      from = null;
      band.setAttribute('visibility', 'hidden');
    };
    place.ondblclick = () => show(...whole);
    place.onpointerleave = () => { from = null; band.setAttribute('visibility', 'hidden'); hideTip(box); };
    place.onpointermove = event => {
      if (from !== null) {
        band.setAttribute('x', Math.min(x(from), x(time(event))));
        band.setAttribute('width', Math.abs(x(time(event)) - x(from)));
        band.setAttribute('visibility', 'visible');
      }
      const span = data.spans[event.target.dataset?.span];
      if (!span) return hideTip(box);
      const outer = box.getBoundingClientRect(), name = data.kinds[span[1]] + (span[4] !== null ? `, ${span[4]}` : '');
      const when = `${data.rows[span[0]]}: ${seconds(span[2])} to ${seconds(span[2] + span[3])}`;
      showTip(box, event.clientX - outer.left, event.clientY - outer.top,
        [[color(span[1]), name], [null, when], [null, `takes ${seconds(span[3])}`]]);
    };
  }

  function show(low, high) {
    const length = Math.min(whole[1] - whole[0], Math.max(1, high - low));
    const start = Math.min(Math.max(whole[0], low), whole[1] - length);
    view = [start, start + length];
    draw();
  }
  const moves = {
    in: (a, b) => [a + (b - a) / 4, b - (b - a) / 4],
    out: (a, b) => [a - (b - a) / 2, b + (b - a) / 2],
    left: (a, b) => [a - (b - a) / 3, b - (b - a) / 3],
    right: (a, b) => [a + (b - a) / 3, b + (b - a) / 3],
    all: () => whole,
  };
  for (const button of document.querySelectorAll('[data-zoom]')) {
    button.addEventListener('click', () => show(...moves[button.dataset.zoom](...view)));
  }
  new ResizeObserver(() => { if (Math.abs(place.clientWidth - width) > 1) draw(); }).observe(box);
  draw();
}

// --- start ------------------------------------------------------------------------------------------------------------

// Charts inside a closed `details` are drawn when it opens: until then they have no width.
function drawInside(parent) {
  for (const figure of parent.querySelectorAll('figure.chart:empty')) {
    if (figure.offsetParent !== null) chart(figure);
  }
}
drawInside(document);
for (const details of document.querySelectorAll('details.all')) details.addEventListener('toggle', () => drawInside(details));
if (DATA.timeline) timeline(document.getElementById('gantt'), DATA.timeline);
document.documentElement.dataset.ready = 'yes';
