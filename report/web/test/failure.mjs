// Opens pages of runs in which a request failed and looks at the section on that. Run by the Go test
// TestFailureInBrowser: node failure.mjs CHROMIUM EXPECT.json

import {accessible, at, check, drawn, expect, nothingMissing, open, pixels, run} from './browser.mjs';

/** The first line, as the command prints it, and what to allocate less of, where no setting is known to help. */
async function answer(page, t) {
  const first = await page.locator('#failure h3').first().innerText();
  check(first === t.first, `the first line is ${first}, want ${t.first}`);
  const relief = page.locator('#failure-relief tbody tr');
  const text = await relief.count() ? await relief.first().innerText() : '';
  check(text === t.relief, `what to allocate less of is ${JSON.stringify(text)}, want ${JSON.stringify(t.relief)}`);
}

async function failure() {
  const t = expect.failure;
  const page = await open(t.page);
  const section = page.locator('main');

  at('what failed');
  const parts = await page.locator('main > *').evaluateAll((all) => all.map((e) => e.id || e.className));
  check(parts[0] === 'failure' && parts[1] === 'cards' && parts[2] === 'stage', `the page begins with ${JSON.stringify(parts)}`);
  await page.locator('#failure summary', {hasText: 'Why'}).click();
  const text = await section.innerText();
  for (const want of t.texts) check(text.includes(want), `${want} is not among ${JSON.stringify(text)}`);
  check(await page.locator('#oom').count() === t.policies, `${await page.locator('#oom').count()} sections tell of the failures again`);

  await answer(page, t);

  at('remedies');
  const remedies = await section.locator('[data-remedy]').evaluateAll((all) => all.map((e) => [e.dataset.remedy, Number(e.dataset.headroom)]));
  check(JSON.stringify(remedies) === JSON.stringify(t.remedies), `remedies are ${JSON.stringify(remedies)}, want ${JSON.stringify(t.remedies)}`);

  at('allocations');
  const pick = section.getByLabel('Held by');
  for (const kind of t.kinds) {
    await pick.selectOption(kind);
    const sum = await page.locator('#failure-holders [data-bytes]').evaluateAll((all) => all.reduce((n, e) => n + Number(e.dataset.bytes), 0));
    check(sum === t.allocated, `by ${kind} it adds up to ${sum}, want ${t.allocated}`);
  }
  await pick.selectOption('stack');
  await page.locator('#failure-holders summary').first().click();
  check((await page.locator('#failure-holders').innerText()).includes(t.hostile), 'a hostile stack name is not shown as it is');
  check(await page.evaluate(() => window.hacked === undefined), 'a stack name was run as a script');

  at('the moment');
  check(await page.locator('#moment-words').getAttribute('data-event') === await page.locator('#failure').getAttribute('data-event'),
    'the page does not begin at the failure');
  for (const variable of ['--c0', '--free']) {
    check(await pixels(page, '#map canvas', variable) > 100, `${variable} is not drawn in the map`);
  }
  const graph = page.locator('#flame');
  await graph.scrollIntoViewIfNeeded();
  await graph.locator('g.frame rect').first().hover();
  await drawn(page);
  const all = Number(await graph.locator('.tip tr[data-bytes]').first().getAttribute('data-bytes'));
  check(all === t.live, `the flame graph is of ${all} bytes, want ${t.live}`);
  check(await page.locator('.card.good').count() === 1, 'a policy that holds is not shown as good');
  await nothingMissing(page, 'body');
  await page.context().close();

  at('a narrow window');
  const phone = await open(t.page, {viewport: {width: 400, height: 800}});
  const overflow = await phone.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  check(overflow <= 0, `the page is ${overflow} pixels too wide`);
  await accessible(phone);
  await phone.context().close();
}

/** A process that kept no history: its words, and what it held. */
async function silent() {
  at('no history');
  const page = await open(expect.silent.page);
  const text = await page.locator('main').innerText();
  for (const want of expect.silent.texts) check(text.includes(want), `${want} is not among ${JSON.stringify(text)}`);
  await answer(page, expect.silent);
  check(await page.locator('.card.good').count() === 0, 'a card is good though no setting helps');
  check((await page.locator('body').innerText()).includes('The file has no events'), 'an empty chart does not say why');
  await nothingMissing(page, 'body');
  await page.context().close();
}

await run(failure, silent);
