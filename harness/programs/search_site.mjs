// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-all project
//
// Run by tests/project/test_docs.py: queries to the search of a built site, by the worker that its pages start.
//
//     node harness/programs/search_site.mjs SITE < QUERIES.json
//
// Prints a JSON list: for each query the locations that were found, best first.

import fs from "node:fs";
import path from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const workers = path.join(site, "assets", "javascripts", "workers");
const [worker] = fs.readdirSync(workers).filter((name) => name.endsWith(".js"));

// The names of a browser's worker that the script uses.
let receive, answer;
const browser = vm.createContext({ console });
browser.self = browser;
browser.addEventListener = (_, listener) => (receive = listener);
browser.postMessage = (message) => answer(message);
browser.importScripts = (...scripts) => scripts.forEach(run);

function run(script) {
  const file = path.join(workers, script);
  vm.runInContext(fs.readFileSync(file, "utf8"), browser, { filename: file });
}

function ask(type, data) {
  return new Promise((resolve) => {
    answer = (message) => resolve(message.data);
    receive({ data: { type, data } });
  });
}

run(worker);
const index = JSON.parse(fs.readFileSync(path.join(site, "search", "search_index.json")));
await ask(0, { ...index, options: {} }); // set-up
const found = [];
for (const query of JSON.parse(fs.readFileSync(0))) {
  const { items } = await ask(2, query);
  found.push(items.map(([best]) => best.location));
}
console.log(JSON.stringify(found));
