// Bundles src into ../dist: page.js, page.css and LICENSES.txt, which the Go package report embeds.
import {build} from 'esbuild';
import {readFileSync, readdirSync, writeFileSync} from 'node:fs';
import {dirname, join} from 'node:path';
import {fileURLToPath} from 'node:url';

const here = dirname(fileURLToPath(import.meta.url));
const made = await build({
  entryPoints: {page: join(here, 'src/main.js')},
  outdir: join(here, '../dist'),
  bundle: true,
  minify: true,
  format: 'iife',
  target: ['chrome103', 'firefox113', 'safari16.4'],
  charset: 'ascii', // the page may be opened under any encoding
  legalComments: 'none',
  loader: {'.css': 'css'},
  logLevel: 'warning',
  metafile: true,
});

// The licence of every package that something of ended up in the page.
const used = new Set();
for (const out of Object.values(made.metafile.outputs)) {
  for (const [input, {bytesInOutput}] of Object.entries(out.inputs)) {
    const found = /(?:^|\/)node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
    if (found && bytesInOutput > 0) used.add(found[1]);
  }
}
const licences = [...used].sort().map((name) => {
  const folder = join(here, 'node_modules', name);
  const {version} = JSON.parse(readFileSync(join(folder, 'package.json'), 'utf8'));
  const file = readdirSync(folder).find((f) => /^licen[cs]e/i.test(f));
  if (!file) throw new Error(`${name} has no licence file`);
  return {title: `${name} ${version}`, text: readFileSync(join(folder, file), 'utf8').trim()};
});
// Packages under the same words are named together.
const texts = new Map();
for (const l of licences) texts.set(l.text, [...(texts.get(l.text) || []), l.title]);
writeFileSync(join(here, '../dist/LICENSES.txt'), [...texts].map(([text, titles]) =>
  `The page contains ${titles.join(', ')}:\n\n${text}\n`).join('\n\n'));
