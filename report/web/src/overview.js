// The overview below the chart: the whole run, small, with the part shown above marked.

import {cssColor, h} from './dom.js';

const height = 44;

/**
 * @param timeline Timeline
 * @param lines as memoryChart has them
 * @param on {range(from, to): a part was chosen, center(x): the part shown is to be moved}
 * @return {element, draw(), select([from, to])}
 */
export function overview(timeline, lines, on) {
  const canvas = h('canvas', {class: 'overview', height, title: 'The whole run; drag to choose a part', 'aria-hidden': 'true'});
  let image = null;
  let range = [0, 1];

  function draw() {
    const ratio = devicePixelRatio || 1;
    const width = canvas.clientWidth;
    canvas.width = Math.max(1, width * ratio);
    canvas.height = height * ratio;
    const ctx = canvas.getContext('2d', {willReadFrequently: true});
    const [from, to] = timeline.extent();
    const data = timeline.data(from, to, Math.max(100, Math.round(width / 2)), lines.map((l) => l.shown));
    let top = 1;
    for (let s = 1; s < data.length; s++) {
      if (lines[s - 1].shown) for (const v of data[s]) if (v > top) top = v;
    }
    const plotX = (x) => ((x - from) / (to - from)) * canvas.width;
    lines.forEach((l, i) => {
      if (!l.shown) return;
      ctx.beginPath();
      const y = data[i + 1];
      ctx.moveTo(0, canvas.height);
      let end = 0; // where this line ends, which may be before others do
      for (let k = 0; k < y.length && y[k] !== null; k++) {
        end = plotX(data[0][k]);
        const py = canvas.height - (y[k] / top) * canvas.height * 0.92;
        if (k > 0) ctx.lineTo(plotX(data[0][k]), canvas.height - (y[k - 1] / top) * canvas.height * 0.92);
        ctx.lineTo(plotX(data[0][k]), py);
      }
      if (l.fill) {
        ctx.lineTo(end, canvas.height);
        ctx.fillStyle = cssColor(l.fill);
        ctx.fill();
      } else {
        ctx.strokeStyle = cssColor(l.color);
        ctx.lineWidth = ratio;
        ctx.stroke();
      }
    });
    image = ctx.getImageData(0, 0, canvas.width, canvas.height);
    select(range);
  }

  function select(to) {
    range = to;
    if (!image) return;
    const ctx = canvas.getContext('2d', {willReadFrequently: true});
    const [low, high] = timeline.extent();
    ctx.putImageData(image, 0, 0);
    const a = ((range[0] - low) / (high - low)) * canvas.width;
    const b = ((range[1] - low) / (high - low)) * canvas.width;
    ctx.fillStyle = cssColor('--shade');
    ctx.fillRect(0, 0, a, canvas.height);
    ctx.fillRect(b, 0, canvas.width - b, canvas.height);
    ctx.strokeStyle = cssColor('--muted');
    ctx.strokeRect(a + 0.5, 0.5, Math.max(2, b - a - 1), canvas.height - 1);
  }

  canvas.addEventListener('pointerdown', (e) => {
    canvas.setPointerCapture(e.pointerId);
    const [from, to] = timeline.extent();
    const at = (ev) => from + (ev.offsetX / canvas.clientWidth) * (to - from);
    const start = at(e);
    const move = (ev) => {
      const end = at(ev);
      if (Math.abs(ev.offsetX - e.offsetX) > 3) on.range(Math.min(start, end), Math.max(start, end));
    };
    const up = (ev) => {
      if (Math.abs(ev.offsetX - e.offsetX) <= 3) on.center(at(ev));
      canvas.removeEventListener('pointermove', move);
      canvas.removeEventListener('pointerup', up);
    };
    canvas.addEventListener('pointermove', move);
    canvas.addEventListener('pointerup', up);
  });

  return {element: canvas, draw, select};
}
