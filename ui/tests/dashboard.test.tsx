import { cleanup, render, within } from "@testing-library/preact";
import axe from "axe-core";
import { afterEach, expect, test } from "vitest";
import type { DashboardPage } from "../src/contents";
import { Dashboard } from "../src/pages/dashboard";
import { withUnit } from "../src/units";
import { HOSTILE } from "./samples";

afterEach(cleanup);

type Panel = DashboardPage["panels"][number];

function panel(changes: Partial<Panel>): Panel {
  const series = [{ name: "Running", newest: 3, values: [] }];
  return { title: "Jobs", kind: "stat", unit: "short", width: 12, problem: "", series, hidden: 0, ...changes };
}

function page(...panels: Panel[]): DashboardPage {
  return {
    address: "http://127.0.0.1:9090",
    name: "training",
    title: "training",
    span: "1h",
    spans: ["15m", "1h"],
    boards: [
      { name: "training", title: "training" },
      { name: "nodes", title: "nodes and operator" },
    ],
    times: [1_800_000_000, 1_800_000_030],
    panels,
  };
}

test("each kind of panel shows its series with their units", async () => {
  const lines = [
    { name: "default/a", newest: 0.5, values: [null, 0.5] },
    { name: "default/b", newest: 0.25, values: [0.75, 0.25] },
  ];
  const faults = [
    { name: "Signal", newest: 3, values: [] },
    { name: "Hang", newest: 1, values: [] },
  ];
  const { getByRole, container } = render(
    <Dashboard
      page={page(
        panel({}),
        panel({ title: "Goodput", kind: "timeseries", unit: "percentunit", series: lines, hidden: 7 }),
        panel({ title: "Restarts", kind: "piechart", series: faults }),
        panel({ title: "Time lost", kind: "bargauge", unit: "s", series: faults }),
      )}
    />,
  );
  const shown = (name: string) => within(getByRole("region", { name }));
  expect(shown("Jobs").getByText("Running").nextSibling?.textContent).toBe("3");
  expect(shown("Goodput").getByRole("img").getAttribute("aria-label")).toContain("Goodput: 2 lines");
  const values = shown("Goodput").getAllByRole("listitem");
  expect(values.map((one) => one.textContent)).toEqual(["default/a50%", "default/b25%"]);
  expect(getByRole("region", { name: "Goodput" }).textContent).toContain("2 of 9: those with the highest values");
  expect(getByRole("region", { name: "Restarts" }).textContent).toContain("Signal3 (75.0%)");
  expect(getByRole("region", { name: "Time lost" }).textContent).toContain("Hang1.000 s");
  const options = { rules: { "color-contrast": { enabled: false }, region: { enabled: false } } };
  expect((await axe.run(container, options)).violations.map((one) => one.id)).toEqual([]);
});

test("the other dashboards and times are links that keep what was chosen", () => {
  const { getByRole } = render(<Dashboard page={page(panel({}))} />);
  const link = (name: string) => getByRole("link", { name });
  expect(link("nodes and operator").getAttribute("href")).toBe("/dashboards/nodes/1h");
  expect(link("15m").getAttribute("href")).toBe("/dashboards/training/15m");
  expect(link("1h").getAttribute("aria-current")).toBe("page");
});

test("a panel says why it has no data", () => {
  const { getByRole } = render(
    <Dashboard
      page={page(
        panel({ title: "A", problem: "Prometheus refuses the query: no", series: [] }),
        panel({ title: "B", series: [] }),
      )}
    />,
  );
  expect(getByRole("region", { name: "A" }).textContent).toContain("refuses the query");
  expect(getByRole("region", { name: "B" }).textContent).toContain("No data at this time");
});

test("hostile names of series are text", () => {
  const series = [{ name: HOSTILE, newest: 1, values: [1, 1] }];
  const kinds = ["timeseries", "stat", "bargauge", "piechart"];
  const { container } = render(
    <Dashboard page={page(...kinds.map((kind) => panel({ title: `${kind} ${HOSTILE}`, kind, series })))} />,
  );
  expect(container.textContent?.split(HOSTILE).length).toBeGreaterThan(8);
  expect(container.querySelector("img, script")).toBeNull();
});

test.each([
  [0.973, "percentunit", "97.3%"],
  [97.3, "percent", "97.3%"],
  [0.25, "s", "0.250 s"],
  [-90, "s", "-1m 30s"],
  [1500, "ms", "1.500 s"],
  [2.5e6, "Bps", "2.5 MB/s"],
  [70000, "decmbytes", "70 GB"],
  [61, "celsius", "61 °C"],
  [655, "watt", "655 W"],
  [1.98e9, "hertz", "1.98 GHz"],
  [12345, "short", "12,345"],
  [3, "of a later version", "3"],
  [null, "s", "–"],
])("%s in %s", (value, unit, text) => {
  expect(withUnit(value, unit)).toBe(text);
});
