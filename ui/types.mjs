// Writes src/contents.ts, the types of the pages' contents, from the JSON Schemas of the reference.
// With --check: compares only.
import { readFileSync, writeFileSync } from "node:fs";
import { compile } from "json-schema-to-typescript";

const PAGES = { jobs: "JobsPage", job: "JobPage", incident: "IncidentPage", nodes: "NodesPage", node: "NodePage", logs: "LogsPage", actions: "ActionsPage", dashboard: "DashboardPage" };
const folder = new URL("../docs/reference/schemas/", import.meta.url);
const target = new URL("src/contents.ts", import.meta.url);

let text = "// Written by `npm run types` from docs/reference/schemas; do not edit.\n";
for (const [page, title] of Object.entries(PAGES)) {
  const schema = JSON.parse(readFileSync(new URL(`page-${page}.json`, folder), "utf8"));
  schema.title = title;
  for (const [name, one] of Object.entries(schema.$defs ?? {})) one.title = `${title}_${name}`;
  text += "\n" + (await compile(schema, title, { additionalProperties: false, bannerComment: "" }));
}
if (process.argv.includes("--check")) {
  if (readFileSync(target, "utf8") !== text) {
    console.error("src/contents.ts is not as the schemas say: run `npm run types`");
    process.exit(1);
  }
} else {
  writeFileSync(target, text);
}
