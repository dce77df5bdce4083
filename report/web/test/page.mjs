// Opens pages in a real browser, offline, and looks at what is drawn. Run by the Go test TestPageInBrowser:
//   node page.mjs CHROMIUM EXPECT.json
// EXPECT.json names the pages and what must be seen on them. Prints what is wrong, one line each; exits with 1 then.

import {accessible, at, check, drawn, expect, nothingMissing, open, pixels, run, until} from './browser.mjs';

const range = (page) => page.evaluate(() => {
  const d = document.querySelector('#chart').dataset;
  return [Number(d.min), Number(d.max)];
});

/** Moves the pointer over an x of the chart and reads the tooltip: series name to bytes. */
async function hover(page, x) {
  await page.locator('#chart .u-over').scrollIntoViewIfNeeded();
  const box = await page.locator('#chart .u-over').boundingBox();
  const [min, max] = await range(page);
  await page.mouse.move(box.x + ((x - min) / (max - min)) * box.width + 0.5, box.y + box.height / 2);
  await drawn(page); // uPlot moves its cursor on the next frame
  return page.evaluate(() => Object.fromEntries([...document.querySelectorAll('#chart > .tip tr')]
    .map((r) => [r.dataset.series, Number(r.dataset.bytes)])));
}

async function drag(page, from, to) {
  const box = await page.locator('#chart .u-over').boundingBox();
  const y = box.y + box.height / 2;
  await page.mouse.move(box.x + from * box.width, y);
  await page.mouse.down();
  await page.mouse.move(box.x + ((from + to) / 2) * box.width, y, {steps: 4});
  await page.mouse.move(box.x + to * box.width, y, {steps: 4});
  await page.mouse.up();
  await drawn(page);
}

const words = (page) => page.evaluate(() => ({...document.querySelector('#moment-words').dataset}));

/** Compares the text on the moment that is shown with what Go has of it. */
async function same(page, want) {
  const got = await words(page);
  for (const [k, v] of Object.entries(want)) check(Number(got[k]) === v, `after event ${want.event} ${k} is ${got[k]}, want ${v}`);
}

async function small() {
  const page = await open(expect.small.page);
  const t = expect.small;

  at('the first moment');
  await same(page, t.peak);

  at('the chart');
  for (const [name, variable] of Object.entries(t.colors)) {
    check(await pixels(page, '#chart .u-wrap canvas', variable) > 60, `${name} (${variable}) is not drawn`);
  }
  await page.getByRole('button', {name: 'reserved by torch:default'}).click();
  await drawn(page);
  check(await pixels(page, '#chart .u-wrap canvas', '--p0') < 20, 'a policy that was switched off is still drawn');
  await page.getByRole('button', {name: 'reserved by torch:default'}).click();

  at('hover, by event');
  await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('event');
  await page.getByRole('button', {name: 'All', exact: true}).click();
  for (const p of t.hover) {
    const seen = await hover(page, p.event);
    for (const [name, bytes] of Object.entries(p.bytes)) {
      check(seen[name] === bytes, `at event ${p.event} ${name} is ${seen[name]}, want ${bytes}`);
    }
    await nothingMissing(page, '#chart > .tip');
  }

  at('zoom');
  const whole = await range(page);
  await drag(page, 0.25, 0.5);
  const part = await range(page);
  const width = whole[1] - whole[0];
  check(Math.abs(part[0] - (whole[0] + 0.25 * width)) < 0.01 * width && Math.abs(part[1] - (whole[0] + 0.5 * width)) < 0.01 * width,
    `dragging over the second quarter of ${whole} shows ${part}`);
  check(await pixels(page, '#chart .u-wrap canvas', '--p0') > 60, 'nothing is drawn after zooming');
  const inside = t.hover.find((p) => p.event > part[0] + 2 && p.event < part[1] - 2);
  const seen = await hover(page, inside.event);
  for (const [name, bytes] of Object.entries(inside.bytes)) {
    check(seen[name] === bytes, `at event ${inside.event}, zoomed, ${name} is ${seen[name]}, want ${bytes}`);
  }
  await controls(page, part, whole);
  await page.locator('#chart .u-over').dblclick();
  await drawn(page);
  check(String(await range(page)) === String(whole), `double-click shows ${await range(page)}, want ${whole}`);
  await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('time');
  await page.getByRole('button', {name: 'Peak', exact: true}).click();
  await drawn(page);
  const [a, b] = await range(page);
  check(a <= t.peak_us && t.peak_us <= b && b - a < t.duration_us / 2, `Peak shows ${a} to ${b}, want around ${t.peak_us}`);

  await moments(page, t);

  at('the address map');
  for (const variable of ['--c0', '--free']) {
    check(await pixels(page, '#map canvas', variable) > 100, `${variable} is not drawn`);
  }
  await page.locator('#map canvas').scrollIntoViewIfNeeded();
  const map = await page.locator('#map canvas').boundingBox();
  await page.mouse.move(map.x + t.block.at * map.width, map.y + 7);
  await drawn(page);
  const tip = await page.locator('#map .tip').innerText();
  for (const text of t.block.texts) check(tip.includes(text), `hovering over a block says ${JSON.stringify(tip)}, want ${text}`);
  await nothingMissing(page, '#map .tip');
  const requested = Number(await page.locator('#map .tip tr[data-bytes]').getAttribute('data-bytes'));
  check(requested === t.block.bytes, `the block under the pointer has ${requested} bytes, want ${t.block.bytes}`);
  await page.mouse.move(map.x + t.block.free_at * map.width, map.y + 7);
  await drawn(page);
  const idle = await page.locator('#map .tip').innerText();
  check(idle.startsWith('free'), `hovering over a free range says ${JSON.stringify(idle)}`);
  await nothingMissing(page, '#map .tip');
  await page.locator('#map select').selectOption('size');
  check((await page.locator('#map .legend').innerText()).includes('up to'), 'colours by size have no legend');

  at('text');
  const oom = await page.locator('#oom').innerText();
  for (const text of t.oom) check(oom.includes(text), `out of memory says ${JSON.stringify(oom)}, want ${text}`);
  const table = await page.locator('#comparison').innerText();
  for (const text of t.table) check(table.includes(text), `the comparison says ${JSON.stringify(table)}, want ${text}`);
  const facts = await page.locator('#facts').innerText();
  for (const text of t.facts) check(facts.includes(text), `the notes say ${JSON.stringify(facts)}, want ${text}`);
  await page.locator('#holders summary').first().click();
  const holders = await page.locator('#holders').innerText();
  check(holders.includes(t.hostile), `a hostile stack name is not shown as it is: ${JSON.stringify(holders.slice(0, 300))}`);
  check(await page.evaluate(() => window.hacked === undefined), 'a stack name was run as a script');

  await nothingMissing(page, 'body');

  at('a second trace');
  await page.locator('header select').selectOption('1');
  await page.waitForFunction((name) => document.querySelector('h1').textContent.includes(name), t.second);
  await page.waitForSelector('#chart .u-wrap canvas');
  check(await page.locator('#oom').count() === 0, 'the first trace\'s failures are still shown');
  await page.context().close();

  at('dark');
  const dark = await open(expect.small.page, {colorScheme: 'dark'});
  const background = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
  check(background === 'rgb(16, 20, 27)', `the background is ${background}`);
  check(await pixels(dark, '#chart .u-wrap canvas', '--p0') > 60, 'the dark colours are not drawn');
  await dark.context().close();

  at('a narrow window');
  const phone = await open(expect.small.page, {viewport: {width: 400, height: 800}});
  const overflow = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `the page is ${overflow} pixels too wide`);
  await phone.context().close();
}

/** The wheel scrolls the page, and zooms with a key held; the keys move and zoom. */
async function controls(page, part, whole) {
  at('wheel and keys');
  const top = () => page.evaluate(() => scrollY);
  const [was, before] = [await top(), String(await range(page))];
  await page.mouse.wheel(0, 120);
  check(await until(top, (y) => y > was) > was, 'the wheel does not scroll the page');
  check(String(await range(page)) === before, 'the wheel zooms without a key');
  const seen = await hover(page, (part[0] + part[1]) / 2); // the page has moved under the pointer
  check(Object.keys(seen).length > 0, 'nothing is under the pointer');
  await page.keyboard.down('Control');
  await page.mouse.wheel(0, -240);
  await page.keyboard.up('Control');
  const width = ([a, b]) => b - a;
  const closer = await until(() => range(page), (r) => width(r) < width(part));
  check(width(closer) < width(part), `Ctrl and the wheel do not zoom in: ${part} to ${closer}`);
  await page.locator('#chart .u-over').click({position: {x: 40, y: 40}});
  const press = async (key) => {
    await page.keyboard.press(key);
    await drawn(page);
    return range(page);
  };
  const right = await press('ArrowRight');
  check(right[0] > closer[0] && Math.abs(width(right) - width(closer)) < 1e-6 * width(whole), `the arrow key moves from ${closer} to ${right}`);
  check(width(await press('+')) < width(closer), '+ does not zoom in');
  check((await press('Home'))[0] === whole[0], 'Home does not go to the beginning');
  check((await press('End'))[1] === whole[1], 'End does not go to the end');
  check(String(await press('Escape')) === String(whole), 'Escape does not show the whole run');
}

/** Single allocations: what is drawn adds up, and the one under the pointer is told. */
async function allocations(page, t) {
  at('single allocations');
  const track = page.locator('#chart canvas.track').nth(1);
  check(await track.getAttribute('aria-label') === 'Single allocations', 'there is no track of single allocations');
  await track.scrollIntoViewIfNeeded();
  const box = await track.boundingBox();
  const [min, max] = await range(page);
  const x = box.x + Math.min(box.width - 1, ((t.peak.event - min) / (max - min)) * box.width);
  const tip = page.locator('#chart .tracks .tip').nth(1);
  const seen = new Map(); // by its text, which has the event at which a block was allocated
  for (let y = 1; y < box.height; y++) {
    await page.mouse.move(x, box.y + y);
    if (await tip.isVisible()) seen.set(await tip.innerText(), Number(await tip.locator('[data-bytes]').getAttribute('data-bytes')));
  }
  const sum = [...seen.values()].reduce((a, b) => a + b, 0);
  check(sum === t.peak.live, `the allocations at the peak add up to ${sum}, want ${t.peak.live}`);
  check([...seen.keys()].every((text) => text.includes('allocated') && text.includes('freed') && text.includes('stream')), `they say ${JSON.stringify([...seen.keys()])}`);
  const labels = await page.locator('#chart .axis').evaluateAll((all) => all.map((e) => e.textContent));
  check(labels.length === 3 && labels.slice(0, 2).every((l) => l.includes('MiB')), `axes are ${JSON.stringify(labels)}`);
}

/** A link has the part of the run, the moment and the section that are shown. */
async function links() {
  at('links');
  const t = expect.small;
  const page = await open(t.page);
  await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('event');
  await drag(page, 0.25, 0.5);
  await page.locator('#moment input').fill(String(t.moments[0].event));
  await page.locator('nav a', {hasText: 'Addresses'}).click();
  const hash = await until(() => page.evaluate(() => location.hash), (x) => x.includes('go=addresses') && x.includes('event=') && x.includes('from='));
  const shown = String(await range(page));
  await page.context().close();
  const other = await open(t.page, {}, hash);
  check(String(await range(other)) === shown, `the link ${hash} shows ${await range(other)}, want ${shown}`);
  await same(other, t.moments[0]);
  const top = await until(() => other.evaluate(() => Math.round(document.getElementById('addresses').getBoundingClientRect().top)), (y) => y < 100);
  check(top < 100, `the link's section is ${top} pixels down`);
  await other.evaluate(() => { location.hash = '#trace=1'; });
  await other.waitForFunction((name) => document.querySelector('h1').textContent.includes(name), t.second);
  await other.context().close();
  const broken = await open(t.page, {}, '#event=x&from=9e99&trace=7&go=nothing&A=-5');
  at('a wrong link');
  await same(broken, t.peak);
  await broken.context().close();
}

/** What is computed of a moment and of two, on the page, held against what Go says of them. */
async function moments(page, t) {
  at('a moment');
  // On a busy machine the two clicks that showed the whole run may have been far apart, and the first have chosen a moment.
  await page.getByRole('button', {name: 'At the peak'}).click();
  await drawn(page);
  await same(page, t.peak);
  for (const m of t.moments) {
    await page.locator('#moment input').fill(String(m.event));
    await drawn(page);
    await same(page, m);
  }
  // A click on the chart and the arrow keys choose one too.
  await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('event');
  await page.getByRole('button', {name: 'All', exact: true}).click();
  const m = t.moments[0];
  const box = await page.locator('#chart .u-over').boundingBox();
  const [min, max] = await range(page);
  await page.mouse.click(box.x + ((m.event - min) / (max - min)) * box.width + 0.5, box.y + 100);
  await until(() => words(page), (w) => Number(w.event) === m.event); // it might have become a double-click
  await same(page, m);
  await page.locator('#moment input').press('ArrowRight');
  await drawn(page);
  check(Number((await words(page)).event) === m.event + 1, 'an arrow key does not step by one event');
  await page.getByRole('button', {name: 'At the peak'}).click();
  await drawn(page);
  await same(page, t.peak);

  at('the flame graph');
  const graph = page.locator('#flame');
  await graph.scrollIntoViewIfNeeded();
  const names = await graph.locator('g.frame').evaluateAll((all) => all.map((g) => g.getAttribute('name')));
  for (const name of t.flame.names) check(names.includes(name), `there is no frame ${name} among ${JSON.stringify(names)}`);
  await graph.getByRole('searchbox').fill(t.flame.search);
  check(Number(await graph.locator('[data-bytes]').first().getAttribute('data-bytes')) === t.flame.bytes,
    `searching ${t.flame.search} finds ${await graph.locator('.range').innerText()}, want ${t.flame.bytes}`);
  await graph.getByRole('searchbox').fill('');
  await graph.locator('g.frame rect').first().hover();
  await nothingMissing(page, '#flame .tip');
  const all = Number(await graph.locator('.tip tr[data-bytes]').first().getAttribute('data-bytes'));
  check(all === t.peak.live, `the frame of all has ${all} bytes, want ${t.peak.live}`);
  await graph.locator('.flame').focus();
  for (const key of ['ArrowDown', 'ArrowDown', 'Enter']) await page.keyboard.press(key);
  const said = await graph.locator('.said').innerText();
  check(said.includes('MiB') && !said.startsWith('all:'), `the keys lead to ${JSON.stringify(said)}`);
  const faded = (n) => until(() => graph.locator('g.frame.fade').count(), (is) => is === n);
  check(await faded(1) === 1, 'Enter does not zoom in');
  await page.keyboard.press('Escape');
  check(await faded(0) === 0, 'Escape does not zoom out');

  at('bands and driver calls');
  const kinds = await page.locator('#calls [data-kind]').evaluateAll((x) => x.map((e) => ({...e.dataset})));
  check(JSON.stringify(kinds.map((k) => [k.kind, Number(k.calls), Number(k.bytes)])) === JSON.stringify(t.calls),
    `driver calls are ${JSON.stringify(kinds)}, want ${JSON.stringify(t.calls)}`);
  const tracks = page.locator('#chart canvas.track');
  for (const variable of ['--c0', '--c1']) check(await pixels(page, '#chart canvas.track', variable) > 100, `bands in ${variable} are not drawn`);
  await tracks.first().scrollIntoViewIfNeeded();
  const track = await tracks.first().boundingBox();
  await page.mouse.move(track.x + Math.min(track.width - 1, ((t.peak.event - min) / (max - min)) * track.width), track.y + 40);
  await drawn(page);
  const banded = await page.locator('#chart tr[data-band]').evaluateAll((x) => x.reduce((a, e) => a + Number(e.dataset.bytes), 0));
  check(banded === t.peak.live, `the bands at the peak add up to ${banded}, want ${t.peak.live}`);
  await allocations(page, t);
  await tracks.nth(2).scrollIntoViewIfNeeded();
  const calls = await tracks.nth(2).boundingBox();
  await page.mouse.move(calls.x + 2, calls.y + 10);
  await drawn(page);
  const call = await page.locator('#chart .tracks .tip').nth(2).innerText();
  check(call.includes('segment_alloc') && call.includes('20.00 MiB'), `hovering over a driver call says ${JSON.stringify(call)}`);

  at('growth');
  await page.locator('#growth input[aria-label="Moment B"]').fill(String(t.growth.b));
  await page.locator('#growth input[aria-label="Moment A"]').fill(String(t.growth.a));
  await drawn(page);
  for (const [by, want] of Object.entries(t.growth.by)) {
    await page.locator('#growth select[aria-label="Growth by"]').selectOption(by);
    await showAll(page, '#growth-table');
    const rows = await page.locator('#growth-table tr[data-grew]').evaluateAll((x) => x.map((e) =>
      [e.dataset.key, Number(e.dataset.grew), Number(e.dataset.kept)]));
    check(JSON.stringify(rows) === JSON.stringify(want), `by ${by} ${JSON.stringify(rows)} grew, want ${JSON.stringify(want)}`);
  }
  const sums = await page.evaluate(() => ({...document.querySelector('#growth-words').dataset}));
  check(Number(sums.after) - Number(sums.before) === t.growth.grew, `it grew by ${sums.after - sums.before}, want ${t.growth.grew}`);
  check(await page.locator('#growth-flame g.frame').count() > 1, 'growth has no flame graph');
  await nothingMissing(page, '#growth');
}

/** Shows all rows of a table. */
async function showAll(page, table) {
  const more = page.locator(`${table} .more`);
  if (await more.count()) await more.click();
}

/** How many times as long as on an idle machine something takes at the moment. */
async function busy(page) {
  const idle = 120; // ms, of a machine on which the page is as fast as is wanted below
  const took = await page.evaluate(() => {
    const begin = performance.now();
    const sums = new Float64Array(1 << 16);
    let x = 1;
    for (let k = 0; k < 1500; k++) {
      for (let i = 0; i < sums.length; i++) {
        x = (Math.imul(x, 1664525) + 1013904223) >>> 0;
        sums[i] += x * 1e-9;
      }
    }
    return performance.now() - begin + sums[0] * 0; // so that they are wanted
  });
  return Math.max(1, took / idle);
}

/** Opens the large page, zooms and hovers over it, and says how long that took, by how busy the machine was beside it. */
async function timed(t) {
  const page = await open(t.page);
  const before = await busy(page);
  const [ready, painted] = await page.evaluate(() => ['ready', 'painted'].map((x) => Number(document.documentElement.dataset[x])));
  // Every frame in which the page is zoomed and hovered over is timed.
  await page.locator('#chart .u-over').scrollIntoViewIfNeeded();
  const box = await page.locator('#chart .u-over').boundingBox();
  await page.evaluate(() => {
    window.longest = 0;
    new PerformanceObserver((list) => {
      for (const e of list.getEntries()) window.longest = Math.max(window.longest, e.duration);
    }).observe({entryTypes: ['longtask']});
  });
  for (let i = 0; i < 24; i++) {
    await page.mouse.move(box.x + box.width * (0.3 + 0.01 * i), box.y + 60);
    await page.keyboard.down('Control');
    await page.mouse.wheel(0, i < 12 ? -200 : 200);
    await page.keyboard.up('Control');
  }
  await drawn(page);
  await page.waitForTimeout(300); // the browser tells of long tasks when it has time
  const longest = await page.evaluate(() => window.longest);
  const pan = await panned(page);
  const times = Math.max(before, await busy(page));
  console.log(`a million allocations: chart after ${painted} ms, all after ${ready} ms, longest task while zooming ${longest} ms, ${Math.round(1000 / pan)} frames a second while panning, `
    + `on a machine that took ${times.toFixed(1)} times as long as an idle one`);
  return {page, painted: painted / times, ready: ready / times, longest: longest / times, pan: pan / times};
}

/** How many milliseconds a frame takes while half of the run moves through the chart and its tracks. */
async function panned(page) {
  await page.getByRole('button', {name: 'All', exact: true}).click();
  await page.getByRole('button', {name: '+', exact: true}).click();
  return page.evaluate(() => new Promise((done) => {
    const panes = document.querySelector('#chart .panes');
    let [frames, begin] = [0, 0];
    const step = (now) => {
      if (frames === 0) begin = now;
      if (frames === 60) return done((now - begin) / frames);
      const key = Math.floor(frames++ / 5) % 2 ? 'ArrowLeft' : 'ArrowRight';
      panes.dispatchEvent(new KeyboardEvent('keydown', {key}));
      requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }));
}

/** What is painted first looks like what all of the data make of it, but for the marks of moments, which come later. */
async function firstPaint(t) {
  const page = await open(t.page, {viewport: {width: 1000, height: 900}}, '', () => { // in one column, before and after
    new MutationObserver(() => {
      if (!document.documentElement.dataset.painted || window.first) return;
      const canvas = document.querySelector('#chart .u-wrap canvas');
      window.first = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    }).observe(document, {subtree: true, attributes: true, attributeFilter: ['data-painted']});
  });
  const seen = await page.evaluate(() => {
    const {first} = window;
    const canvas = document.querySelector('#chart .u-wrap canvas');
    const last = canvas.getContext('2d').getImageData(0, 0, first.width, first.height);
    const [a, b] = [first, last].map((image) => new Uint32Array(image.data.buffer));
    const painted = a.reduce((n, v) => n + (v >>> 24 > 0), 0);
    return {painted: painted / a.length, other: a.reduce((n, v, i) => n + (v !== b[i]), 0) / a.length};
  });
  check(seen.painted > 0.05, `only ${seen.painted} of the first chart has a colour`);
  check(seen.other < 0.02, `${seen.other} of the first chart is another later`);
  await page.context().close();
}

async function large() {
  at('a million allocations');
  await firstPaint(expect.large);
  const t = expect.large;
  let seen = await timed(t);
  const slow = (s) => s.painted >= t.painted_ms || s.ready >= t.ready_ms || s.longest >= t.frame_ms || s.pan >= t.pan_ms;
  for (let tries = 1; tries < 6 && slow(seen); tries++) {
    await seen.page.context().close();
    seen = await timed(t); // it may have been stopped for a while just then
  }
  const {page, painted, ready, longest, pan} = seen;
  check(painted < t.painted_ms, `it takes ${painted} ms until the chart can be used, want less than ${t.painted_ms}`);
  check(ready < t.ready_ms, `it takes ${ready} ms until all is there, want less than ${t.ready_ms}`);
  check(pan < t.pan_ms, `a frame takes ${pan} ms while panning, want less than ${t.pan_ms}`);
  check(longest < t.frame_ms, `zooming and hovering blocks the page for ${longest} ms, want less than ${t.frame_ms}`);
  // Peaks are exact, seen from afar and from near.
  await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('event');
  await page.getByRole('button', {name: 'All', exact: true}).click();
  const far = await hover(page, t.peak_event);
  check(far.live === t.peak_live, `from afar the peak is ${far.live}, want ${t.peak_live}`);
  await page.getByRole('button', {name: 'Peak', exact: true}).click();
  for (let i = 0; i < 12; i++) await page.getByRole('button', {name: '+', exact: true}).click();
  const near = await hover(page, t.peak_event);
  check(near.live === t.peak_live, `from near the peak is ${near.live}, want ${t.peak_live}`);
  await page.context().close();
}

/** The page of two runs. */
async function differences() {
  const t = expect.differences;
  at('two runs');
  const page = await open(t.page);
  for (const variable of ['--live', '--recorded']) {
    check(await pixels(page, '#chart .u-wrap canvas', variable) > 30, `the run in ${variable} is not drawn`);
  }
  check(Number(await page.locator('.card b').first().getAttribute('data-grew')) === t.grew, 'the first card is not what the peak grew by');
  for (const [by, want] of Object.entries(t.by)) {
    await page.locator('#growth select[aria-label="Growth by"]').selectOption(by);
    await showAll(page, '#growth-table');
    const rows = await page.locator('#growth-table tr[data-grew]').evaluateAll((x) => x.map((e) => [e.dataset.key, Number(e.dataset.grew)]));
    check(JSON.stringify(rows) === JSON.stringify(want), `by ${by} ${JSON.stringify(rows)} grew, want ${JSON.stringify(want)}`);
  }
  const graph = page.locator('#flame');
  await graph.scrollIntoViewIfNeeded();
  await graph.locator('g.frame rect').first().hover();
  const all = await graph.locator('.tip tr[data-bytes]').evaluateAll((x) => x.map((e) => Number(e.dataset.bytes)));
  check(all[0] === t.before && all[1] === t.after, `the frame of all went from ${all}, want ${t.before} to ${t.after}`);
  await graph.getByRole('searchbox').fill('evil');
  check(await graph.locator('[data-bytes]').first().getAttribute('data-bytes') !== null, 'searching finds nothing');
  await hover(page, t.hover_us);
  await nothingMissing(page, 'body');
  check(await page.evaluate(() => window.hacked === undefined), 'a stack name was run as a script');
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `the page is ${overflow} pixels too wide`);
  await page.context().close();
}

/** Tags, libraries and threads: bands, the flame graph, growth and the tables of holders. */
async function labels() {
  const t = expect.labels;
  at('labels');
  const page = await open(t.page);
  const bands = page.locator('#chart select[aria-label="Bands"]');
  check(await bands.inputValue() === 'tag', `the first bands are by ${await bands.inputValue()}`);
  const byName = (list) => JSON.stringify([...list].sort((a, b) => (a[0] < b[0] ? -1 : 1)));
  for (const [by, want] of Object.entries(t.by)) {
    at(`by ${by}`);
    await bands.selectOption(by);
    await page.locator('#chart select[aria-label="Horizontal axis"]').selectOption('event');
    const track = page.locator('#chart canvas.track').first();
    await track.scrollIntoViewIfNeeded();
    const box = await track.boundingBox();
    await page.mouse.move(box.x + box.width - 1, box.y + 40); // the peak is the last event
    await drawn(page);
    const rows = await page.locator('#chart tr[data-band]').evaluateAll((x) => x.map((e) => [e.dataset.band, Number(e.dataset.bytes)]).filter((r) => r[1] > 0));
    check(byName(rows) === byName(want), `bands at the peak are ${JSON.stringify(rows)}, want ${JSON.stringify(want)}`);

    const holders = await page.locator(`#holders table[data-by="${by}"] tr[data-key]`).evaluateAll((x) => x.map((e) => [e.dataset.key, Number(e.dataset.bytes)]));
    check(JSON.stringify(holders) === JSON.stringify(want), `holders are ${JSON.stringify(holders)}, want ${JSON.stringify(want)}`);

    await page.locator('#flame select[aria-label="Frames"]').selectOption(by);
    const frames = await page.locator('#flame g.frame').evaluateAll((x) => x.map((e) => e.getAttribute('name')));
    for (const [name] of want) check(frames.includes(name), `the flame graph has no frame ${name} among ${JSON.stringify(frames)}`);
    await page.locator('#flame g.frame rect').first().hover();
    const all = Number(await page.locator('#flame .tip tr[data-bytes]').first().getAttribute('data-bytes'));
    check(all === t.live, `the frame of all has ${all} bytes, want ${t.live}`);

    await page.locator('#growth input[aria-label="Moment B"]').fill(String(t.moment.event));
    await page.locator('#growth input[aria-label="Moment A"]').fill('-1');
    await drawn(page);
    await page.locator('#growth select[aria-label="Growth by"]').selectOption(by);
    const sums = await page.evaluate(() => ({...document.querySelector('#growth-words').dataset}));
    const grew = await page.locator('#growth-table tr[data-grew]').evaluateAll((x) => x.reduce((a, e) => a + Number(e.dataset.grew), 0));
    check(Number(sums.after) === t.moment.live && grew === t.moment.live - Number(sums.before), `growth is ${grew}, from ${sums.before} to ${sums.after}`);
    await page.locator('#growth select[aria-label="Frames"]').selectOption(by);
    const kinds = await page.locator('#growth-flame g.frame').evaluateAll((x) => x.map((e) => e.getAttribute('name')));
    check(kinds.some((name) => want.some(([w]) => `\u25b2 ${w}` === name || `\u25bc ${w}` === name)), `growth's flame graph has ${JSON.stringify(kinds)}`);
  }
  at('addresses by label');
  for (const [by, want] of Object.entries(t.by)) {
    await page.locator('#map select').selectOption(by);
    const legend = await page.locator('#map .legend .clip').allInnerTexts();
    for (const [name] of want) check(legend.includes(name), `by ${by} the legend has no ${name}: ${JSON.stringify(legend)}`);
  }
  await page.locator('#map canvas').scrollIntoViewIfNeeded();
  const map = await page.locator('#map canvas').boundingBox();
  await page.mouse.move(map.x + 2, map.y + 5);
  await drawn(page);
  const block = await page.locator('#map .tip').innerText();
  check(t.first.every((x) => block.includes(x)), `the first block is said to be ${JSON.stringify(block)}, want ${JSON.stringify(t.first)}`);

  at('labels');
  await page.locator('#flame select[aria-label="Frames"]').selectOption('');
  check(!(await page.locator('#flame g.frame').evaluateAll((x) => x.map((e) => e.getAttribute('name')))).includes('weights'), 'stacks alone have a frame for a tag');
  const who = await page.locator('#holders .labels').allInnerTexts();
  check(who.some((x) => x.includes('tag') && x.includes('weights') && x.includes('library')), `holders are labelled ${JSON.stringify(who)}`);
  await nothingMissing(page, 'body');
  check(await page.evaluate(() => window.hacked === undefined), 'a tag was run as a script');
  const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `the page is ${overflow} pixels too wide`);
  await page.context().close();
  const phone = await open(t.page, {viewport: {width: 400, height: 800}});
  const wide = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(wide <= 0, `in a narrow window the page is ${wide} pixels too wide`);
  await phone.context().close();
}

/** What stacks are called: by whose they are, distinguished, short where there is little room and whole where there is more. */
async function names() {
  const t = expect.names;
  for (const [what, file] of [['of one run', t.page], ['of two', t.differences]]) {
    at(`names ${what}`);
    const page = await open(file);
    const rows = page.locator('#growth-table tr[data-grew] .who');
    const texts = (await rows.allInnerTexts()).sort();
    check(JSON.stringify(texts) === JSON.stringify(t.rows), `rows are called ${JSON.stringify(texts)}, want ${JSON.stringify(t.rows)}`);
    const title = await page.locator('#growth-table .who', {hasText: 'tool::Cache'}).getAttribute('title');
    check(title.includes('std::basic_string<char'), `the whole name is ${title}`);
    const row = page.locator('#growth-table tr', {hasText: 'MLP.forward'});
    await row.locator('summary').click();
    const frames = await row.locator('.frames li').allInnerTexts();
    check(frames.length === 6 && frames[0].startsWith(t.whole), `the frames of a row are ${JSON.stringify(frames)}`);
    const labels = await page.locator('#flame .d3-flame-graph-label').allInnerTexts();
    check(labels.some((x) => x.endsWith(t.frame)), `no frame is called ${t.frame}: ${JSON.stringify(labels)}`);
    const drawnFrames = () => page.locator('#flame g.frame').evaluateAll((x) => x.map((e) => e.getAttribute('name')));
    const glue = (list) => list.some((n) => n.includes('_call_impl'));
    check(!glue(await drawnFrames()), 'frames of frameworks are shown at first');
    await page.locator('#flame').getByLabel('framework frames').check();
    check(glue(await drawnFrames()), 'frames of frameworks are not shown on demand');
    const outermost = (await drawnFrames())[1];
    await page.locator('#flame').getByLabel('inverted').check();
    const innermost = (await drawnFrames())[1];
    check(outermost.includes('train') && innermost.endsWith(t.frame), `below all is ${outermost}, inverted ${innermost}`);
    await page.context().close();
  }
  at('names of holders');
  const page = await open(t.page);
  const holders = (await page.locator('#holders details .who').allInnerTexts()).map((x) => x.trim()).sort();
  check(JSON.stringify(holders) === JSON.stringify(t.rows), `holders are called ${JSON.stringify(holders)}`);
  await page.locator('#chart select[aria-label="Bands"]').selectOption('stack');
  for (const where of ['#chart .tracks', '#map']) {
    const legend = await page.locator(`${where} .clip`).allInnerTexts();
    for (const row of t.rows) check(legend.includes(row), `${where} has no ${row}: ${JSON.stringify(legend)}`);
  }
  await page.context().close();

  at('the shorter of two runs');
  const both = await open(t.differences);
  const legend = await both.locator('#chart .legend button').allInnerTexts();
  check(JSON.stringify(legend) === JSON.stringify(t.runs), `the runs are called ${JSON.stringify(legend)}`);
  const filled = await both.evaluate(() => { // how much of the overview is painted where the second run goes on, and where it is over
    const canvas = document.querySelector('#chart .overview');
    const ctx = canvas.getContext('2d');
    return [0.45, 0.55, 0.75].map((x) => {
      const {data} = ctx.getImageData(Math.round(canvas.width * x), 2, 1, canvas.height - 4);
      let n = 0;
      for (let i = 3; i < data.length; i += 4) if (data[i] > 0) n++;
      return n / (canvas.height - 4);
    });
  });
  check(filled[0] > 0.3 && filled[1] < 0.15 && filled[2] < 0.15, `of the overview's height ${filled} are painted before and behind the end of a run`);
  await both.context().close();
  for (const file of [t.page, t.differences]) {
    const phone = await open(file, {viewport: {width: 400, height: 800}});
    const wide = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    check(wide <= 0, `in a narrow window the page is ${wide} pixels too wide`);
    const policy = phone.locator('.comparison tbody td').first();
    if (await policy.count()) {
      const {width} = await policy.boundingBox();
      check(width > 80, `the names of policies have ${width} pixels`);
    }
    await phone.context().close();
  }
}

/** A driver trace: its calls, with the time that each took. */
async function driver() {
  at('driver calls with times');
  const page = await open(expect.driver.page);
  const kinds = await page.locator('#calls [data-kind]').evaluateAll((x) => x.map((e) => [e.dataset.kind, Number(e.dataset.took)]));
  check(JSON.stringify(kinds) === JSON.stringify(expect.driver.calls), `driver calls are ${JSON.stringify(kinds)}`);
  const text = await page.locator('#calls').innerText();
  check(text.includes('753 us in all') && text.includes('700 us'), `driver calls are said to be ${JSON.stringify(text)}`);
  const track = page.locator('#chart canvas.track').nth(2);
  await track.scrollIntoViewIfNeeded();
  const box = await track.boundingBox();
  await page.mouse.move(box.x + box.width - 1, box.y + box.height - 4);
  await drawn(page);
  const tip = await page.locator('#chart .tracks .tip').nth(2).innerText();
  check(tip.includes('cuMemFree') && tip.includes('700 us') && tip.includes('4.00 MiB'), `hovering over the last call says ${JSON.stringify(tip)}`);
  await nothingMissing(page, 'body');
  await page.context().close();
}

/** Every kind of page, light and dark, wide and narrow. */
async function everyone() {
  const pages = [expect.small.page, expect.labels.page, expect.names.page, expect.names.differences, expect.driver.page];
  for (const file of pages) {
    for (const colorScheme of ['light', 'dark']) {
      for (const width of [1440, 390]) {
        at(`${file.split('/').pop()}, ${colorScheme}, ${width} pixels wide`);
        const page = await open(file, {colorScheme, viewport: {width, height: 900}});
        await accessible(page);
        const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        check(wide <= 0, `the page is ${wide} pixels too wide`);
        const name = await page.locator('#growth-table tbody td').first().evaluate((e) => e.clientWidth);
        check(name > 200, `names of what grew have ${name} pixels`);
        await page.context().close();
      }
    }
  }
}

await run(small, links, everyone, labels, names, driver, differences, large);
