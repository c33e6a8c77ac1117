import { type Action, type Question, useActions, useQuestion } from "../actions";
import { Chart, type Mark } from "../chart";
import type { JobPage } from "../contents";
import { count, counted, moment, NONE, percent, short, span } from "../format";
import { HeatMap } from "../heat_map";
import { Card, type Column, Figure, Missing, Share, State, Table } from "../parts";
import { Recoveries } from "../recoveries";
import { logsPath } from "../route";

type Rank = JobPage["different"][number];
type Pod = JobPage["pods"][number];
type Detector = JobPage["detectors"][number];
type Loss = JobPage["snapshots"][number]["losses"][number];
type Event = JobPage["events"][number];

const podColumns = (page: JobPage): Column<Pod>[] => [
  {
    title: "Pod",
    cell: (pod) => (
      <a href={logsPath(page.namespace, page.name, { pod: pod.name })} aria-label={`Logs of ${pod.name}`}>
        {pod.name}
      </a>
    ),
  },
  { title: "Node", cell: (pod) => pod.node || NONE },
  { title: "Phase", cell: (pod) => (pod.reason ? `${pod.phase} (${pod.reason})` : pod.phase) },
  { title: "Agent", cell: (pod) => pod.agentState || NONE },
  { title: "Attempt", cell: (pod) => count(pod.attempt), number: true },
  { title: "Workers", cell: (pod) => count(pod.workers), number: true },
  { title: "Restarts", cell: (pod) => count(pod.restarts), number: true },
];
const EVENTS: Column<Event>[] = [
  { title: "Time", cell: (event) => moment(event.time), whole: true },
  { title: "Reason", cell: (event) => event.reason },
  { title: "Message", cell: (event) => event.message + (event.count > 1 ? ` (x${event.count})` : "") },
];
const LOSSES: Column<Loss>[] = [
  { title: "A loss now of", cell: (one) => one.lost },
  { title: "Steps made again", cell: (one) => one.stepsText },
  { title: "State comes from", cell: (one) => one.sourceText },
];
const DETECTORS: Column<Detector>[] = [
  { title: "Detector", cell: (one) => one.detector },
  { title: "Mode", cell: (one) => one.mode },
  { title: "Alarms right", cell: (one) => count(one.right), number: true },
  { title: "Wrong", cell: (one) => count(one.wrong), number: true },
  { title: "Looks for", cell: (one) => one.means },
];

/** A job: how it trains, its ranks, its incidents, where its time went. */
export function Job({ page }: { page: JobPage }) {
  const { history } = page;
  const actions = useActions(`jobs/${encodeURIComponent(page.namespace)}`);
  const [dialog, ask] = useQuestion();
  const marks = page.incidents.map(markOf);
  const charts: [string, (number | null)[]][] = [
    ...history.metricNames.map((name, index): [string, (number | null)[]] => [
      name,
      history.metricValues[index] ?? [],
    ]),
    ["steps per second", history.rates],
    ["step", history.steps],
  ];
  return (
    <>
      <p class="path">
        <a href="/jobs">Jobs</a> <span>{page.namespace}</span>
        <a href={logsPath(page.namespace, page.name)}>Logs</a>
      </p>
      <h1>
        {page.name} <State name={page.state} />
      </h1>
      {page.message && <p class="summary">{page.message}</p>}
      <Actions page={page} actions={actions} ask={ask} />
      {dialog}
      <Missing lines={page.missing} />
      {page.waiting.length > 0 && (
        <div class="notice">
          <strong>Waits for</strong>
          <ul>
            {page.waiting.map((line, index) => (
              <li key={index}>{line}</li>
            ))}
          </ul>
        </div>
      )}
      <dl class="figures">
        <Figure name="Goodput">
          <Share share={page.goodput.share} />
        </Figure>
        <Figure name="Step">{count(page.step)}</Figure>
        <Figure name="Steps per second">{short(page.stepsPerSecond)}</Figure>
        <Figure name="Ranks">{count(page.worldSize)}</Figure>
        <Figure name="Pods ready">{`${page.ready}/${page.replicas}`}</Figure>
        <Figure name="Restarts">{count(page.restarts)}</Figure>
        <Figure name="Last fault">{page.lastFault || NONE}</Figure>
      </dl>
      <div class="cards">
        <Card title="Training" id="training" wide>
          {history.times.length === 0 ? (
            <p class="quiet">
              {page.unreached || (
                <>
                  No rank has reported a step while this page&apos;s server ran. Scripts report steps
                  with <code>unbroken.worker</code>.
                </>
              )}
            </p>
          ) : (
            <div class="charts">
              {charts
                .filter(([, values]) => values.some((one) => one !== null))
                .map(([title, values]) => (
                  <Chart
                    title={title}
                    times={history.times}
                    values={values}
                    marks={marks}
                    fromZero={values !== history.steps && !history.metricNames.includes(title)}
                    key={title}
                  />
                ))}
            </div>
          )}
        </Card>
        <Card title="Ranks" id="ranks">
          {page.heatMap ? <HeatMap map={page.heatMap} /> : <p class="quiet">{page.unreached || "No rank runs."}</p>}
          {page.different.length > 0 && <Different page={page} />}
        </Card>
        <Card title="Where time went" id="time">
          <Parts page={page} />
        </Card>
        <Card title="Recoveries" id="recoveries" wide>
          {page.incidents.length > 0 ? <Recoveries page={page} /> : <p class="quiet">No incidents so far.</p>}
        </Card>
        <Card title="What watches it" id="watch" wide>
          {page.watch.length > 0 && (
            <ul>
              {page.watch.map((line, index) => (
                <li key={index}>{line}</li>
              ))}
            </ul>
          )}
          <details>
            <summary>{counted(page.detectors.length, "detector")}: {modes(page.detectors)}</summary>
            <Table label="Detectors" columns={[...DETECTORS, ...modeColumn(page, actions, ask)]} rows={page.detectors} />
          </details>
        </Card>
        {page.snapshots.map((one, place) => (
          <Card title={`Snapshots: ${one.name}`} id={`snapshots-${place}`} key={one.name} wide>
            <ul>
              {one.lines.map((line, index) => (
                <li key={index}>{line}</li>
              ))}
            </ul>
            {one.losses.length > 0 && (
              <Table label={`What a loss would cost now: ${one.name}`} columns={LOSSES} rows={one.losses} />
            )}
          </Card>
        ))}
        <Card title="Pods" id="pods" wide>
          {page.pods.length > 0 ? (
            <>
              <Table label="Pods" columns={podColumns(page)} rows={page.pods} />
              {page.podCount > page.pods.length && (
                <p class="quiet">
                  {page.pods.length} of {counted(page.podCount, "pod")}, those that differ first. All of them:{" "}
                  <code>unbroken describe {page.name}</code>
                </p>
              )}
            </>
          ) : (
            <p class="quiet">{page.missing.length > 0 ? "No pods are shown." : "The job has no pods."}</p>
          )}
        </Card>
        {page.events.length > 0 && (
          <Card title="Latest events" id="events" wide>
            <Table
              label="Latest events"
              columns={EVENTS}
              rows={[...page.events].reverse()}
            />
          </Card>
        )}
      </div>
    </>
  );
}

const ENDED = ["Completed", "Failed"];
const LABELS: [string, string][] = [
  ["restart", "Restart"],
  ["suspend", "Suspend"],
  ["resume", "Resume"],
];

/** Buttons for what can be done with the job now. */
function Actions(props: { page: JobPage; actions: Action[]; ask: (question: Question) => void }) {
  const { page, actions, ask } = props;
  const { namespace, name, uid, state } = page;
  const isOffered = (verb: string) => !ENDED.includes(state) && (verb === "resume") === (state === "Suspended");
  const shown = LABELS.flatMap(([verb, label]) => {
    const action = isOffered(verb) && actions.find((one) => one.action === verb);
    return action ? [{ action, label, order: { namespace, name, uid }, words: wordsOf(namespace, name) }] : [];
  });
  if (shown.length === 0) return null;
  return (
    <p class="buttons">
      {shown.map((choice) => (
        <button type="button" onClick={() => ask({ subject: `job ${name}`, choices: [choice] })} key={choice.label}>
          {choice.label}
        </button>
      ))}
    </p>
  );
}

const MODES = ["off", "shadow", "warn", "act"];

/** A column with a button for each detector; none if the account may not set its mode. */
function modeColumn(page: JobPage, actions: Action[], ask: (question: Question) => void): Column<Detector>[] {
  const action = !ENDED.includes(page.state) && actions.find((one) => one.action === "detector");
  if (!action) return [];
  const { namespace, name, uid } = page;
  const question = ({ detector, mode }: Detector): Question => {
    const field = { name: "mode", label: "Mode", value: mode, options: MODES, command: (to: string) => `${detector}=${to}` };
    const choice = { action, label: "Set", order: { namespace, name, uid, detector }, words: wordsOf(namespace, name) };
    return { subject: `the mode of detector ${detector}`, choices: [{ ...choice, fields: [field] }] };
  };
  return [
    {
      title: "Change",
      cell: (one) => (
        <button type="button" aria-label={`Set the mode of ${one.detector}`} onClick={() => ask(question(one))}>
          Set mode
        </button>
      ),
    },
  ];
}

/** A job as a command names it. */
function wordsOf(namespace: string, name: string): string {
  return namespace === "default" ? name : `${name} -n ${namespace}`;
}

/** `3 act, 4 warn, 1 shadow`. */
function modes(detectors: Detector[]): string {
  return ["act", "warn", "shadow", "off"]
    .map((mode): [string, number] => [mode, detectors.filter((one) => one.mode === mode).length])
    .filter(([, number]) => number > 0)
    .map(([mode, number]) => `${number} ${mode}`)
    .join(", ");
}

/** The time that an incident took, as a mark in the charts. */
function markOf(incident: JobPage["incidents"][number]): Mark {
  const last = incident.stages[incident.stages.length - 1];
  const to = incident.outcome ? incident.began + (last?.to ?? 0) : null;
  return { from: incident.began, to, label: String(incident.number) };
}

function Different({ page }: { page: JobPage }) {
  const now = new Date(page.reported).getTime();
  const silence = (rank: Rank) =>
    rank.lastSign === null ? NONE : span(Math.max(0, (now - new Date(rank.lastSign).getTime()) / 1000));
  const columns: Column<Rank>[] = [
    {
      title: "Rank",
      cell: (rank) => (
        <a
          href={logsPath(page.namespace, page.name, { rank: rank.rank })}
          aria-label={`Logs of rank ${rank.rank}`}
        >
          {rank.rank}
        </a>
      ),
      number: true,
    },
    { title: "Pod", cell: (rank) => rank.pod },
    { title: "Phase", cell: (rank) => rank.phase || NONE },
    { title: "Step", cell: (rank) => count(rank.step), number: true },
    { title: "Silent for", cell: silence, number: true },
    {
      title: "Usual",
      cell: (rank) => (rank.allowedSeconds === null ? "learning" : span(rank.allowedSeconds)),
      number: true,
    },
    { title: "Alarms", cell: (rank) => rank.alarms.join("; ") || NONE },
  ];
  return (
    <>
      <h3>{counted(page.differentCount, "rank")} that differ</h3>
      <Table
        label="Ranks that differ"
        columns={columns}
        rows={page.different}
      />
    </>
  );
}

function Parts({ page }: { page: JobPage }) {
  const total = page.goodput.totalSeconds;
  if (!total) return <p class="quiet">The job has not started.</p>;
  return (
    <>
      <div class="parts" aria-hidden="true">
        {page.parts.map((one, index) => (
          <span
            class={`part${Math.min(index, 6)}`}
            key={one.part}
            style={{ width: `${(one.partSeconds / total) * 100}%` }}
          />
        ))}
      </div>
      <Table
        label="Parts of the job's time"
        rows={page.parts}
        columns={[
          {
            title: "Part",
            cell: (one) => (
              <>
                <span class={`cell part${Math.min(page.parts.indexOf(one), 6)}`} /> {one.part}
              </>
            ),
          },
          { title: "Time", cell: (one) => span(one.partSeconds), number: true },
          { title: "Share", cell: (one) => percent(one.partSeconds / total), number: true },
        ]}
      />
      {page.goodput.incidentsOfUnknownCost > 0 && (
        <p class="quiet">{counted(page.goodput.incidentsOfUnknownCost, "incident")} of unknown cost</p>
      )}
    </>
  );
}
