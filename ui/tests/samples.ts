// Contents of pages, whole and typed, for the tests.
import type { IncidentPage, JobPage, JobsPage, NodePage, NodesPage } from "../src/contents";

/** A name or a line of a log that would run if it were not escaped. */
export const HOSTILE = `<img src=x onerror="document.title='broken into'"><script>document.title='broken into'</script>`;

export const GOODPUT = {
  share: 0.9331,
  totalSeconds: 100,
  startupSeconds: 5,
  productiveSeconds: 93.31,
  lostSeconds: {},
  lostSteps: 2,
  incidentsOfUnknownCost: 0,
  suspendedSeconds: 0,
};

type JobRow = JobsPage["jobs"][number];

export function jobRow(change: Partial<JobRow> = {}): JobRow {
  return {
    name: "train",
    namespace: "default",
    state: "Running",
    reason: "",
    message: "",
    replicas: 2,
    ready: 2,
    spares: 0,
    restarts: 1,
    lastFault: "SIGKILL",
    faultyPods: [],
    created: "2026-11-29T10:00:00Z",
    started: "2026-11-29T10:00:00Z",
    completed: null,
    goodput: GOODPUT,
    worldSize: 16384,
    step: 1200,
    stepsPerSecond: 4.87654,
    ...change,
  };
}

export function jobsPage(change: Partial<JobsPage> = {}): JobsPage {
  return { jobs: [jobRow()], resumed: [], missing: [], unreached: "", ...change };
}

export function heatMap(change: Partial<NonNullable<JobPage["heatMap"]>> = {}): NonNullable<JobPage["heatMap"]> {
  return {
    ranks: 4,
    ranksPerCell: 1,
    newestStep: 50,
    stepsApart: 1,
    reported: [1, 1, 1, 1],
    steps: [50, 50, 50, 50],
    behind: [0, 0, 0, 0],
    stepSeconds: [0.2, 0.2, 0.2, 0.2],
    silenceSeconds: [0.1, 0.1, 0.1, 0.1],
    silenceShares: [0.02, 0.02, 0.02, 0.02],
    phases: ["train", "train", "train", "train"],
    alarms: [0, 0, 0, 0],
    ...change,
  };
}

export function recovery(change: Partial<JobPage["incidents"][number]> = {}): JobPage["incidents"][number] {
  return {
    number: 1,
    attempt: 0,
    fault: "SIGKILL",
    culprit: "rank 3 (train-pods-0 on node-0)",
    remedy: "process",
    summary: "incident 1: rank 3 killed",
    began: 1_800_000_000,
    outcome: "recovered",
    cost: "1.5 s",
    stages: [
      { stage: "detect", from: 0, to: 0.5 },
      { stage: "stop", from: 0.5, to: 1 },
      { stage: "progress", from: 1, to: 1.5 },
    ],
    ...change,
  };
}

export function jobPage(change: Partial<JobPage> = {}): JobPage {
  const { goodput, worldSize, step, stepsPerSecond, ...row } = jobRow();
  return {
    ...row,
    uid: "u-1",
    goodput,
    worldSize,
    step,
    stepsPerSecond,
    now: "2026-11-29T10:01:40Z",
    reported: "2026-11-29T10:01:40Z",
    parts: [
      { part: "productive", partSeconds: 93.31 },
      { part: "start-up", partSeconds: 5 },
      { part: "lost: Signal", partSeconds: 1.69 },
    ],
    history: {
      times: [1, 3, 5],
      steps: [1, 2, 3],
      rates: [null, 0.5, 0.5],
      metricNames: ["loss"],
      metricValues: [[3, 2.5, null]],
    },
    heatMap: heatMap(),
    different: [],
    differentCount: 0,
    watch: ["ranks 0-3: by steps, all ranks are looked at after 2.5 s without a step"],
    detectors: [{ detector: "stopped", mode: "act", right: 1, wrong: 0, means: "a process is stopped" }],
    waiting: [],
    incidentCount: 1,
    incidents: [recovery()],
    snapshots: [],
    podCount: 1,
    pods: [
      {
        name: "train-pods-0",
        node: "node-0",
        phase: "Running",
        restarts: 0,
        reason: "",
        agentState: "running",
        attempt: 1,
        workers: 4,
      },
    ],
    events: [{ type: "Normal", reason: "Running", message: "it runs", time: "2026-11-29T10:00:00Z", count: 2 }],
    missing: [],
    unreached: "",
    ...change,
  };
}

export function incidentPage(change: Partial<IncidentPage> = {}): IncidentPage {
  return {
    job: "train",
    namespace: "default",
    numbers: [1, 2, 3],
    incident: {
      number: 2,
      attempt: 1,
      culprit: { at: "2026-11-29T10:00:00Z", fault: "ProcessStopped", text: "stopped" },
      signals: [],
      remedy: "process",
      reason: "all pods are healthy",
      detectedAt: "2026-11-29T10:00:01Z",
      confidence: "certain",
      outcome: "recovered",
      groups: [
        { ranks: "0-2", count: 3, doing: "waits in all_reduce", stack: ["wait (c.py:1)"] },
        { ranks: "3", count: 1, doing: "stopped by a signal", stack: ["forward (t.py:9)"], isOutlier: true },
      ],
      resumed: "continues from step 100",
      replicasAgree: true,
      restored: [{ ranks: "0-3", count: 4, step: 100, source: "memory", seconds: 0.2, slowest: 1, checksum: "abc" }],
    },
    summary: "incident 2: rank 3 stopped",
    culprit: "rank 3 (train-pods-0 on node-0)",
    because: "rank 3 is stopped while 3 ranks wait",
    what: "stopped by a signal",
    evidence: ["step 119"],
    plan: "restart the processes in their pods",
    cost: "13.000 s",
    timeline: [{ stage: "detected", time: "2026-11-29T10:00:01Z", sinceDetection: 0, lastPod: "" }],
    alsoSeen: [],
    ...change,
  };
}

type NodeRow = NodesPage["nodes"][number];

export function nodeRow(change: Partial<NodeRow> = {}): NodeRow {
  return {
    name: "node-0",
    ready: true,
    schedulable: true,
    health: "Schedulable",
    deepHealthCheck: "",
    instanceType: "",
    instanceGroup: "",
    cluster: "",
    faultTypes: "",
    faultReasons: "",
    bootId: "",
    ordered: "",
    advice: "",
    verified: "",
    jobPods: ["default/train-pods-0"],
    repair: null,
    score: 0.25,
    quarantined: null,
    status: "Ready",
    repairText: "-",
    faults: [],
    repairNow: "",
    repairs: [],
    scoreText: "0.2 points in 1 entry; quarantine from 8",
    ...change,
  };
}

export const NO_LINKS: NodesPage["links"] = { linkNodes: [], linkNodeCount: 0, speeds: [], pairCount: 0, pairs: [] };

export function nodePage(change: Partial<NodePage> = {}): NodePage {
  const nothing = { times: [], titles: [], columns: [] };
  return {
    ...nodeRow(),
    blame: [],
    checks: [],
    gpuNote: "",
    machineNote: "",
    gpuCharts: nothing,
    machineCharts: nothing,
    gpus: [],
    missing: [],
    ...change,
  };
}
