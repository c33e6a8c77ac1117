import { Chart } from "../chart";
import type { NodePage } from "../contents";
import { counted, moment, NONE, short } from "../format";
import { Card, type Column, Figure, Missing, State, Table } from "../parts";

type Gpu = NodePage["gpus"][number];
type Check = NodePage["checks"][number];
type Result = Check["results"][number];
type Blame = NodePage["blame"][number];
type Charts = NodePage["gpuCharts"];

const GPUS: Column<Gpu>[] = [
  { title: "GPU", cell: (gpu) => gpu.gpu, number: true },
  { title: "Model", cell: (gpu) => gpu.model || NONE },
  { title: "Pod", cell: (gpu) => gpu.gpuPod || NONE },
  { title: "°C", cell: (gpu) => short(gpu.celsius), number: true },
  { title: "Busy, %", cell: (gpu) => short(gpu.busyPercent), number: true },
  {
    title: "Memory, MiB",
    cell: (gpu) => `${short(gpu.usedMebibytes)} of ${short(gpu.wholeMebibytes)}`,
    number: true,
  },
  { title: "ECC corrected", cell: (gpu) => short(gpu.correctedErrors), number: true },
  { title: "uncorrected", cell: (gpu) => short(gpu.uncorrectedErrors), number: true },
  { title: "Latest XID", cell: (gpu) => (gpu.latestXid ? String(gpu.latestXid) : NONE), number: true },
];
const BLAME: Column<Blame>[] = [
  { title: "Time", cell: (one) => moment(one.blamedAt), whole: true },
  { title: "Kind", cell: (one) => one.kind, whole: true },
  { title: "Source", cell: (one) => one.source },
  { title: "Evidence", cell: (one) => one.text },
  { title: "Points now", cell: (one) => short(one.points), number: true },
];
const RESULTS: Column<Result>[] = [
  { title: "Test", cell: (one) => (one.peer ? `${one.test} with ${one.peer}` : one.test) },
  { title: "Outcome", cell: (one) => <State name={one.outcome} /> },
  { title: "Measured", cell: (one) => amount(one.measured, one.unit), number: true },
  { title: "Expected", cell: (one) => amount(one.expected, one.unit), number: true },
  { title: "In words", cell: (one) => one.text || NONE },
];

function amount(value: number | null, unit: string): string {
  return value === null ? NONE : `${short(value)} ${unit}`.trim();
}

/** A node: its GPUs and its machine over time, its faults, repairs, blame and checks. */
export function Node({ page }: { page: NodePage }) {
  return (
    <>
      <p class="path">
        <a href="/nodes">Nodes</a>
      </p>
      <h1>
        {page.name} <State name={page.status} />
      </h1>
      <Missing lines={page.missing} />
      <dl class="figures">
        <Figure name="Health">{page.health || NONE}</Figure>
        <Figure name="Type">{page.instanceType || NONE}</Figure>
        <Figure name="Pods of jobs">{page.jobPods.length}</Figure>
        <Figure name="Blame">{short(page.score)}</Figure>
      </dl>
      <div class="cards">
        <Card title="GPUs" id="gpus" wide>
          {page.gpuNote && <p class="quiet">{page.gpuNote}</p>}
          <Series found={page.gpuCharts} />
          {page.gpus.length > 0 && <Table label="GPUs" columns={GPUS} rows={page.gpus} />}
        </Card>
        {page.machineNote && (
          <Card title="Processors, memory and network" id="machine" wide>
            <p class="quiet">{page.machineNote}</p>
            <Series found={page.machineCharts} />
          </Card>
        )}
        <Card title="Faults and repairs" id="faults" wide>
          <Faults page={page} />
        </Card>
        <Card title="Blame" id="blame" wide>
          <p class="quiet">{page.scoreText}</p>
          {page.blame.length > 0 && <Table label="Blame" columns={BLAME} rows={page.blame} />}
        </Card>
        <Card title="Checks" id="checks" wide>
          {page.checks.length === 0 && <p class="quiet">No check of the last day has tested this node.</p>}
          {page.checks.map((check) => (
            <CheckPart check={check} key={check.check} />
          ))}
        </Card>
        {page.jobPods.length > 0 && (
          <Card title="Pods of jobs" id="pods" wide>
            <ul>
              {page.jobPods.map((pod) => (
                <li key={pod}>{pod}</li>
              ))}
            </ul>
          </Card>
        )}
      </div>
    </>
  );
}

function Series({ found }: { found: Charts }) {
  return (
    <div class="charts">
      {found.titles.map((title, index) => (
        <Chart
          title={title}
          times={found.times}
          values={found.columns[index] ?? []}
          marks={[]}
          fromZero
          key={title}
        />
      ))}
    </div>
  );
}

function Faults({ page }: { page: NodePage }) {
  const faults = [...page.faults, ...(page.faultReasons ? [`${page.faultTypes} ${page.faultReasons}`] : [])];
  if (page.quarantined) faults.push(`quarantined: ${page.quarantined}`);
  return (
    <>
      {faults.map((fault, index) => (
        <p class="bad" key={index}>
          {fault}
        </p>
      ))}
      {faults.length === 0 && <p class="quiet">No faults.</p>}
      {page.repairNow && (
        <p>
          <strong>Repair:</strong> {page.repairNow}
        </p>
      )}
      {page.repairs.length > 0 && (
        <ol>
          {page.repairs.map((repair, index) => (
            <li key={index}>{repair}</li>
          ))}
        </ol>
      )}
    </>
  );
}

function CheckPart({ check }: { check: Check }) {
  const when = check.checkStarted ? moment(check.checkStarted) : "";
  return (
    <>
      <h3>
        {check.check} <State name={check.phase} /> <span class="quiet">{when}</span>
      </h3>
      {check.message && <p>{check.message}</p>}
      <details>
        <summary>
          {check.results.length < check.resultCount
            ? `${check.results.length} of ${counted(check.resultCount, "result")}`
            : counted(check.resultCount, "result")}
        </summary>
        <Table label={`Results of ${check.check}`} columns={RESULTS} rows={check.results} />
      </details>
    </>
  );
}
