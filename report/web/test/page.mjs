// Opens pages in a real browser, offline, and looks at what is drawn. Run by the Go test TestPageInBrowser:
//   node page.mjs CHROMIUM EXPECT.json
// EXPECT.json names the pages and what must be seen on them. Prints what is wrong, one line each; exits with 1 then.

import {readFileSync} from 'node:fs';
import {pathToFileURL} from 'node:url';
import {chromium} from 'playwright-core';

const [, , executablePath, expectFile] = process.argv;
const expect = JSON.parse(readFileSync(expectFile, 'utf8'));
const wrong = [];
let where = '';

function check(ok, what) {
  if (!ok) wrong.push(`${where}: ${what}`);
}

const browser = await chromium.launch({executablePath, args: ['--no-sandbox', '--disable-gpu']});

/** A page, opened offline, with everything it says or asks for held against it. */
async function open(path, options = {}) {
  const context = await browser.newContext({viewport: {width: 1280, height: 900}, offline: true, ...options});
  const page = await context.newPage();
  const url = pathToFileURL(path).href;
  page.on('console', (m) => {
    if (m.text().includes('willReadFrequently')) return; // the test's own readback
    if (['error', 'warning'].includes(m.type())) check(false, `console ${m.type()}: ${m.text()}`);
  });
  page.on('pageerror', (e) => check(false, `page error: ${e.message}`));
  page.on('request', (r) => {
    if (r.url() !== url && !r.url().startsWith('data:')) check(false, `request to ${r.url().slice(0, 100)}`);
  });
  await page.goto(url);
  await page.waitForFunction(() => document.documentElement.dataset.ready, null, {timeout: 30000});
  return page;
}

/** How many pixels of a canvas have a colour of the style sheet, within a tolerance for smoothing. */
function pixels(page, selector, variable) {
  return page.evaluate(([sel, name]) => {
    const probe = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    probe.fillRect(0, 0, 1, 1);
    const want = probe.getImageData(0, 0, 1, 1).data;
    const canvas = document.querySelector(sel);
    const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
    let n = 0;
    for (let i = 0; i < data.length; i += 4) {
      if (Math.abs(data[i] - want[0]) < 6 && Math.abs(data[i + 1] - want[1]) < 6 && Math.abs(data[i + 2] - want[2]) < 6
        && Math.abs(data[i + 3] - want[3]) < 40) n++;
    }
    return n;
  }, [selector, variable]);
}

/** What a value that is missing looks like when it is shown. */
async function nothingMissing(page, selector) {
  const text = await page.locator(selector).innerText();
  const found = /\b(null|undefined|NaN|Infinity)\b|\[object/.exec(text);
  check(!found, `${selector} shows ${found} in ${JSON.stringify(text.slice(0, 400))}`);
}

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
  await page.waitForTimeout(60); // uPlot moves its cursor on the next frame
  return page.evaluate(() => Object.fromEntries([...document.querySelectorAll('#chart .tip tr')]
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
  await page.waitForTimeout(60);
}

async function small() {
  const page = await open(expect.small.page);
  const t = expect.small;

  where = 'the chart';
  for (const [name, variable] of Object.entries(t.colors)) {
    check(await pixels(page, '#chart .u-wrap canvas', variable) > 60, `${name} (${variable}) is not drawn`);
  }
  await page.getByRole('button', {name: 'reserved by torch:default'}).click();
  await page.waitForTimeout(60);
  check(await pixels(page, '#chart .u-wrap canvas', '--p0') < 20, 'a policy that was switched off is still drawn');
  await page.getByRole('button', {name: 'reserved by torch:default'}).click();

  where = 'hover, by event';
  await page.locator('#chart select').selectOption('event');
  await page.getByRole('button', {name: 'All', exact: true}).click();
  for (const p of t.hover) {
    const seen = await hover(page, p.event);
    for (const [name, bytes] of Object.entries(p.bytes)) {
      check(seen[name] === bytes, `at event ${p.event} ${name} is ${seen[name]}, want ${bytes}`);
    }
    await nothingMissing(page, '#chart .tip');
  }

  where = 'zoom';
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
  await page.mouse.wheel(0, -240);
  await page.waitForTimeout(60);
  const closer = await range(page);
  check(closer[1] - closer[0] < part[1] - part[0], `scrolling does not zoom in: ${part} to ${closer}`);
  await page.mouse.wheel(0, 240);
  await page.locator('#chart .u-over').dblclick();
  await page.waitForTimeout(60);
  check(String(await range(page)) === String(whole), `double-click shows ${await range(page)}, want ${whole}`);
  await page.locator('#chart select').selectOption('time');
  await page.getByRole('button', {name: 'Peak'}).click();
  await page.waitForTimeout(60);
  const [a, b] = await range(page);
  check(a <= t.peak_us && t.peak_us <= b && b - a < t.duration_us / 2, `Peak shows ${a} to ${b}, want around ${t.peak_us}`);

  where = 'the address map';
  for (const variable of ['--c0', '--free']) {
    check(await pixels(page, '#map canvas', variable) > 100, `${variable} is not drawn`);
  }
  await page.locator('#map canvas').scrollIntoViewIfNeeded();
  const map = await page.locator('#map canvas').boundingBox();
  await page.mouse.move(map.x + t.block.at * map.width, map.y + 7);
  const tip = await page.locator('#map .tip').innerText();
  for (const text of t.block.texts) check(tip.includes(text), `hovering over a block says ${JSON.stringify(tip)}, want ${text}`);
  await nothingMissing(page, '#map .tip');
  const requested = Number(await page.locator('#map .tip tr[data-bytes]').getAttribute('data-bytes'));
  check(requested === t.block.bytes, `the block under the pointer has ${requested} bytes, want ${t.block.bytes}`);
  await page.mouse.move(map.x + t.block.free_at * map.width, map.y + 7);
  const idle = await page.locator('#map .tip').innerText();
  check(idle.startsWith('free'), `hovering over a free range says ${JSON.stringify(idle)}`);
  await nothingMissing(page, '#map .tip');
  await page.locator('#map select').selectOption('size');
  check((await page.locator('#map .legend').innerText()).includes('up to'), 'colours by size have no legend');

  where = 'text';
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

  where = 'a second trace';
  await page.locator('header select').selectOption('1');
  await page.waitForFunction((name) => document.querySelector('h1').textContent.includes(name), t.second, {timeout: 5000});
  await page.waitForSelector('#chart .u-wrap canvas');
  check(await page.locator('#oom').count() === 0, 'the first trace\'s failures are still shown');
  await page.context().close();

  where = 'dark';
  const dark = await open(expect.small.page, {colorScheme: 'dark'});
  const background = await dark.evaluate(() => getComputedStyle(document.body).backgroundColor);
  check(background === 'rgb(16, 20, 27)', `the background is ${background}`);
  check(await pixels(dark, '#chart .u-wrap canvas', '--p0') > 60, 'the dark colours are not drawn');
  await dark.context().close();

  where = 'a narrow window';
  const phone = await open(expect.small.page, {viewport: {width: 400, height: 800}});
  const overflow = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `the page is ${overflow} pixels too wide`);
  await phone.context().close();
}

async function large() {
  where = 'a million events';
  const t = expect.large;
  const page = await open(t.page);
  const ready = await page.evaluate(() => Number(document.documentElement.dataset.ready));
  check(ready < t.ready_ms, `it takes ${ready} ms until the page can be used, want less than ${t.ready_ms}`);
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
    await page.mouse.wheel(0, i < 12 ? -200 : 200);
  }
  await page.waitForTimeout(300);
  const longest = await page.evaluate(() => window.longest);
  check(longest < t.frame_ms, `zooming and hovering blocks the page for ${longest} ms, want less than ${t.frame_ms}`);
  // Peaks are exact, seen from afar and from near.
  await page.locator('#chart select').selectOption('event');
  await page.getByRole('button', {name: 'All', exact: true}).click();
  const far = await hover(page, t.peak_event);
  check(far.live === t.peak_live, `from afar the peak is ${far.live}, want ${t.peak_live}`);
  await page.getByRole('button', {name: 'Peak'}).click();
  for (let i = 0; i < 12; i++) await page.getByRole('button', {name: '+', exact: true}).click();
  const near = await hover(page, t.peak_event);
  check(near.live === t.peak_live, `from near the peak is ${near.live}, want ${t.peak_live}`);
  console.log(`a million events: usable after ${ready} ms, longest task while zooming ${longest} ms`);
  await page.context().close();
}

try {
  await small();
  await large();
} catch (e) {
  wrong.push(`${where}: ${e.message.split('\n')[0]}`);
} finally {
  await browser.close();
}
for (const w of wrong) console.log(w);
process.exit(wrong.length ? 1 : 0);
