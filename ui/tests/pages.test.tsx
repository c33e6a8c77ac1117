import { cleanup, fireEvent, render, within } from "@testing-library/preact";
import type { ComponentChildren } from "preact";
import axe from "axe-core";
import { afterEach, expect, test } from "vitest";
import { Incident } from "../src/pages/incident";
import { Job } from "../src/pages/job";
import { Jobs } from "../src/pages/jobs";
import { Node } from "../src/pages/node";
import { Nodes } from "../src/pages/nodes";
import { HOSTILE, heatMap, incidentPage, jobPage, jobRow, jobsPage, NO_LINKS, nodePage, nodeRow, recovery } from "./samples";

afterEach(cleanup);

async function faults(element: Element): Promise<string[]> {
  const options = { rules: { "color-contrast": { enabled: false }, region: { enabled: false } } };
  return (await axe.run(element, options)).violations.map((one) => `${one.id}: ${one.help}`);
}

test("the list has a row for each job, with what the commands show", async () => {
  const { getByRole, container } = render(<Jobs page={jobsPage()} />);
  const row = within(getByRole("table", { name: "Jobs" })).getAllByRole("row")[1];
  for (const text of ["train", "Running", "93.3%", "16,384", "2/2", "SIGKILL", "1,200", "4.88"]) {
    expect(row?.textContent).toContain(text);
  }
  expect(getByRole("link", { name: "train" }).getAttribute("href")).toBe("/jobs/default/train");
  expect(await faults(container)).toEqual([]);
});

test("jobs are filtered by name, fault and state", () => {
  const jobs = [
    jobRow({ name: "llm-a", lastFault: "SIGKILL" }),
    jobRow({ name: "llm-b", lastFault: "", state: "Failed" }),
    jobRow({ name: "vision", namespace: "team" }),
  ];
  const { getByRole, getByLabelText, queryByRole } = render(<Jobs page={jobsPage({ jobs })} />);
  const names = () =>
    within(getByRole("table", { name: "Jobs" }))
      .getAllByRole("link")
      .map((one) => one.textContent);
  fireEvent.input(getByLabelText("Name or fault"), { target: { value: "LLM sig" } });
  expect(names()).toEqual(["llm-a"]);
  fireEvent.input(getByLabelText("Name or fault"), { target: { value: "team/" } });
  expect(names()).toEqual(["team/vision"]);
  fireEvent.input(getByLabelText("Name or fault"), { target: { value: "" } });
  fireEvent.change(getByLabelText("State"), { target: { value: "Failed" } });
  expect(names()).toEqual(["llm-b"]);
  fireEvent.input(getByLabelText("Name or fault"), { target: { value: "none such" } });
  expect(queryByRole("table")).toBeNull();
});

test("without jobs the page says how to start one", () => {
  const { container } = render(<Jobs page={jobsPage({ jobs: [] })} />);
  expect(container.textContent).toContain("unbroken run train.py");
});

const REFUSED = "Your account may not list pods in namespace team-a.";
const UNREACHED = "The page asks no agent here.";

test("what an account may not see is said on each page", async () => {
  const kept = { missing: [REFUSED], unreached: UNREACHED };
  const empty = { times: [], steps: [], rates: [], metricNames: [], metricValues: [] };
  const page = jobPage({ ...kept, history: empty, heatMap: null, pods: [] });
  const pages = [
    <Jobs page={jobsPage(kept)} />,
    <Job page={page} />,
    <Nodes page={{ nodes: [], missing: [REFUSED], links: NO_LINKS }} />,
  ];
  for (const one of pages) {
    const { container, unmount } = render(one);
    expect(container.textContent).toContain(REFUSED);
    expect(await faults(container)).toEqual([]);
    unmount();
  }
  const { getByRole } = render(<Job page={page} />);
  for (const name of ["Training", "Ranks"]) {
    expect(getByRole("region", { name }).textContent).toContain(UNREACHED);
  }
  expect(getByRole("region", { name: "Pods" }).textContent).toContain("No pods are shown.");
});

test("snapshots show what they cost, and what a loss would cost now", async () => {
  const losses = [
    { lost: "a worker", stepsText: "none", sourceText: "memory of its agent, after step 109" },
    { lost: "a node or its agent", stepsText: "6", sourceText: "the copy at its buddy, after step 104" },
  ];
  const snapshots = [
    { name: "training", lines: ["training: 12.3 MB a rank, 4 ranks"], losses },
    { name: HOSTILE, lines: [HOSTILE], losses },
  ];
  const { getByRole, container } = render(<Job page={jobPage({ snapshots })} />);
  const card = getByRole("region", { name: "Snapshots: training" });
  expect(card.textContent).toContain("12.3 MB a rank");
  const rows = within(within(card).getByRole("table")).getAllByRole("row");
  expect(rows[2]?.textContent).toBe("a node or its agent6the copy at its buddy, after step 104");
  expect(container.querySelector("img")).toBeNull();
  expect(await faults(container)).toEqual([]);
});

test("a job has its charts in words, its ranks, its recoveries and its time", async () => {
  const { getByRole, getAllByRole, container } = render(<Job page={jobPage()} />);
  const pictures = getAllByRole("img").map((one) => one.getAttribute("aria-label"));
  expect(pictures).toContain("loss: from 2.5 to 3, 2.5 now; 1 incidents marked");
  expect(pictures).toContain("Ranks by silence: 4 cells of 1 rank, none differs");
  expect(pictures).toContain("1.500 s: detection 0.500 s, stop 0.500 s, first step 0.500 s");
  expect(getByRole("link", { name: "Incident 1" }).getAttribute("href")).toBe(
    "/jobs/default/train/incidents/1",
  );
  const time = within(getByRole("table", { name: "Parts of the job's time" }));
  expect(time.getAllByRole("row").map((row) => row.textContent)).toEqual([
    "PartTimeShare",
    " productive1m 33s93.3%",
    " start-up5.000 s5.0%",
    " lost: Signal1.690 s1.6%",
  ]);
  expect(await faults(container)).toEqual([]);
});

test("a job that reports nothing yet has no empty charts", () => {
  const nothing = { times: [], steps: [], rates: [], metricNames: [], metricValues: [] };
  const { container } = render(
    <Job page={jobPage({ history: nothing, heatMap: null, incidents: [], incidentCount: 0, worldSize: null })} />,
  );
  expect(container.textContent).toContain("No rank has reported a step");
  expect(container.textContent).toContain("No rank runs.");
  expect(container.textContent).toContain("No incidents so far.");
  expect(container.querySelectorAll("[role=img]")).toHaveLength(0);
});

test("ranks that differ are a table with their alarms", () => {
  const rank = {
    rank: 7,
    pod: "train-pods-1",
    phase: "train",
    step: 40,
    stepSeconds: 0.2,
    lastSign: "2026-11-29T10:01:30Z",
    allowedSeconds: 5,
    alarms: ["stopped: stopped by a signal"],
  };
  const { getByRole } = render(<Job page={jobPage({ different: [rank], differentCount: 40 })} />);
  expect(getByRole("heading", { name: "40 ranks that differ" })).toBeTruthy();
  const row = within(getByRole("table", { name: "Ranks that differ" })).getAllByRole("row")[1];
  expect(row?.textContent).toBe("7train-pods-1train4010.0 s5.000 sstopped: stopped by a signal");
});

test("an open incident is marked up to now and said to be open", () => {
  const { container } = render(<Job page={jobPage({ incidents: [recovery({ outcome: "", stages: [] })] })} />);
  expect(container.querySelector(".recoveries")?.textContent).toContain("open");
});

test("an incident is a story: culprit, evidence, stacks with the differing rank first, remedy, receipt", async () => {
  const { getByRole, getAllByRole, container } = render(<Incident page={incidentPage()} />);
  const headings = getAllByRole("heading").map((one) => one.textContent);
  expect(headings.indexOf("differs Rank 3: stopped by a signal")).toBeLessThan(
    headings.indexOf(" Ranks 0-2 (3): waits in all_reduce"),
  );
  expect(headings).toEqual(expect.arrayContaining(["Culprit", "Evidence", "Remedy", "Receipt"]));
  expect(container.textContent).toContain("The replicas agree.");
  expect(getByRole("link", { name: "← incident 1" }).getAttribute("href")).toBe("/jobs/default/train/incidents/1");
  expect(getByRole("link", { name: "Save as a file" }).getAttribute("href")).toBe(
    "/api/text/jobs/default/train/incidents/2",
  );
  expect(await faults(container)).toEqual([]);
});

test("a node has its faults and its repairs", async () => {
  const bad = nodeRow({
    name: "node-1",
    status: "NotReady",
    faults: ["Ready=Unknown NodeStatusUnknown: silent"],
    repairNow: "reboot Acting after 3 s",
    repairs: ["reset Done"],
    quarantined: "too often",
  });
  const { getAllByRole, container } = render(<Nodes page={{ nodes: [nodeRow(), bad], missing: [], links: NO_LINKS }} />);
  const row = getAllByRole("row")[2]?.textContent ?? "";
  for (const text of ["NotReady", "NodeStatusUnknown: silent", "reboot Acting", "1 earlier repair", "too often"]) {
    expect(row).toContain(text);
  }
  expect(await faults(container)).toEqual([]);
});

const LINKS = {
  linkNodes: ["a", "b", "c"],
  linkNodeCount: 70,
  speeds: [
    [null, 10, 0],
    [10, null, 5],
    [0, 5, null],
  ],
  pairCount: 3,
  pairs: [
    { one: "a", other: "c", gigabytesPerSecond: 0, microseconds: null, isRight: false, slowDevice: "" },
    { one: "b", other: "c", gigabytesPerSecond: 5, microseconds: 40, isRight: true, slowDevice: "mlx5_1" },
  ],
};
const GPU = {
  gpu: "0",
  model: "H200",
  gpuPod: "default/train-pods-0",
  celsius: 71,
  busyPercent: 98,
  usedMebibytes: 100,
  wholeMebibytes: 200,
  correctedErrors: 3,
  uncorrectedErrors: 0,
  latestXid: 79,
};
const CHECK = {
  check: "check-1",
  phase: "Failed",
  message: "node a is faulty",
  checkStarted: "2026-11-29T10:00:00Z",
  resultCount: 60,
  results: [
    { test: "all-reduce", peer: "b", outcome: "fail", measured: 5, expected: 9, unit: "GB/s", text: "slow" },
  ],
};

test("links are a matrix of colours and a table, the slowest first", async () => {
  const page = { nodes: [nodeRow()], missing: [], links: LINKS };
  const { getByRole, container } = render(<Nodes page={page} />);
  const words = "Links of 3 nodes: usually 10 GB/s, the slowest 0 GB/s";
  const cells = getByRole("img", { name: words }).querySelectorAll(".cell");
  expect([...cells].map((one) => one.className.replace("cell ", ""))).toEqual(
    ["none", "level0", "level4", "level0", "none", "level2", "level4", "level2", "none"],
  );
  expect(container.textContent).toContain("3 of 70 nodes, those with the slowest links.");
  const rows = within(getByRole("table", { name: "Links between nodes", hidden: true })).getAllByRole("row", { hidden: true });
  expect(rows.slice(1).map((one) => one.textContent)).toEqual(["acno connection, or wrong sums––", "bc540mlx5_1"]);
  expect(await faults(container)).toEqual([]);
});

test("a node has its GPUs, its checks and its blame", async () => {
  const blame = { blamedAt: "2026-11-29T10:00:00Z", kind: "fault", source: "Xid79", text: "fell off the bus", points: 3 };
  const charts = { times: [1, 2], titles: ["hottest GPU, °C"], columns: [[70, 71]] };
  const page = nodePage({ gpus: [GPU], checks: [CHECK], blame: [blame], gpuCharts: charts });
  const { getByRole, container } = render(<Node page={page} />);
  const gpu = within(getByRole("table", { name: "GPUs" })).getAllByRole("row")[1];
  expect(gpu?.textContent).toBe("0H200default/train-pods-07198100 of 2003079");
  expect(getByRole("img", { name: /hottest GPU, °C: from 70 to 71/ })).toBeTruthy();
  expect(container.textContent).toContain("1 of 60 results");
  expect(container.textContent).toContain("fell off the bus");
  expect(await faults(container)).toEqual([]);
});

test("a node without GPUs says so in a sentence, and has no empty chart", async () => {
  const note = "The daemon of this node finds no NVIDIA driver, so there are no values of GPUs.";
  const { container } = render(<Node page={nodePage({ gpuNote: note })} />);
  expect(container.textContent).toContain(note);
  expect(container.querySelectorAll("[role=img]")).toHaveLength(0);
  expect(await faults(container)).toEqual([]);
});

const INCIDENT = incidentPage();
const HOSTILE_PAGES: [string, ComponentChildren][] = [
  ["jobs", <Jobs page={jobsPage({ jobs: [jobRow({ name: HOSTILE, lastFault: HOSTILE, state: HOSTILE })], missing: [HOSTILE] })} />],
  [
    "job",
    <Job
      page={jobPage({
        name: HOSTILE,
        message: HOSTILE,
        waiting: [HOSTILE],
        watch: [HOSTILE],
        heatMap: heatMap({ phases: [HOSTILE, "", "", ""] }),
        history: { times: [1], steps: [1], rates: [1], metricNames: [HOSTILE], metricValues: [[1]] },
        incidents: [recovery({ fault: HOSTILE, culprit: HOSTILE, outcome: HOSTILE })],
        events: [{ type: HOSTILE, reason: HOSTILE, message: HOSTILE, time: HOSTILE, count: 1 }],
      })}
    />,
  ],
  [
    "incident",
    <Incident
      page={{
        ...INCIDENT,
        job: HOSTILE,
        culprit: HOSTILE,
        evidence: [HOSTILE],
        alsoSeen: [HOSTILE],
        incident: {
          ...INCIDENT.incident,
          resumed: HOSTILE,
          groups: [{ ranks: HOSTILE, count: 1, doing: HOSTILE, stack: [HOSTILE] }],
        },
      }}
    />,
  ],
  [
    "nodes",
    <Nodes
      page={{
        nodes: [nodeRow({ name: HOSTILE, faults: [HOSTILE], repairNow: HOSTILE })],
        missing: [],
        links: { ...LINKS, linkNodes: [HOSTILE, "b", "c"] },
      }}
    />,
  ],
  [
    "node",
    <Node
      page={nodePage({
        name: HOSTILE,
        gpuNote: HOSTILE,
        faults: [HOSTILE],
        blame: [{ blamedAt: HOSTILE, kind: HOSTILE, source: HOSTILE, text: HOSTILE, points: 1 }],
        checks: [{ ...CHECK, check: HOSTILE, message: HOSTILE }],
        gpus: [{ ...GPU, model: HOSTILE, gpuPod: HOSTILE }],
      })}
    />,
  ],
];

test.each(HOSTILE_PAGES)("hostile text on the page of %s is shown and never run", (_, page) => {
  document.title = "safe";
  const { container } = render(<>{page}</>);
  expect(container.textContent).toContain(HOSTILE);
  expect(container.querySelectorAll("script, img[src], [onerror]")).toHaveLength(0);
  for (const link of container.querySelectorAll("a")) expect(link.href).toMatch(/^http:/);
  expect(document.title).toBe("safe");
});
