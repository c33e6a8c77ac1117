import { useState } from "preact/hooks";
import type { JobsPage } from "../contents";
import { age, count, NONE, short } from "../format";
import { type Column, Missing, Share, State, Table } from "../parts";
import { jobPath } from "../route";

type JobRow = JobsPage["jobs"][number];
type ResumedRow = JobsPage["resumed"][number];

const COLUMNS: Column<JobRow>[] = [
  {
    title: "Job",
    cell: (job) => (
      <a href={jobPath(job.namespace, job.name)}>
        {job.namespace !== "default" && <span class="quiet">{job.namespace}/</span>}
        {job.name}
      </a>
    ),
  },
  { title: "State", cell: (job) => <State name={job.state} /> },
  { title: "Goodput", cell: (job) => <Share share={job.goodput.share} /> },
  { title: "Ranks", cell: (job) => count(job.worldSize), number: true },
  { title: "Pods ready", cell: (job) => `${job.ready}/${job.replicas}`, number: true },
  { title: "Restarts", cell: (job) => count(job.restarts), number: true },
  { title: "Last fault", cell: (job) => job.lastFault || NONE },
  { title: "Step", cell: (job) => count(job.step), number: true },
  { title: "Steps/s", cell: (job) => short(job.stepsPerSecond), number: true },
  { title: "Age", cell: (job) => age(job.created, Date.now()), number: true },
];

const RESUMED: Column<ResumedRow>[] = [
  { title: "Job", cell: (job) => `${job.namespace}/${job.name}` },
  { title: "Kind", cell: (job) => job.kind },
  { title: "State", cell: (job) => <State name={job.state} /> },
  { title: "Restarts", cell: (job) => `${job.restarts} of ${job.restartsMax}`, number: true },
  { title: "Last fault", cell: (job) => job.lastFault || NONE },
  { title: "Age", cell: (job) => age(job.created, Date.now()), number: true },
];

/** All jobs of the cluster. */
export function Jobs({ page }: { page: JobsPage }) {
  const [text, setText] = useState("");
  const [state, setState] = useState("");
  const words = text.toLowerCase().split(/\s+/);
  const found = page.jobs.filter(
    (job) =>
      (!state || job.state === state) &&
      words.every((word) => `${job.namespace}/${job.name} ${job.lastFault}`.toLowerCase().includes(word)),
  );
  const states = [...new Set([...page.jobs.map((job) => job.state), state])].filter(Boolean).sort();
  return (
    <>
      <h1>Jobs</h1>
      <Missing lines={page.missing} />
      {page.jobs.length > 0 && (
        <form class="filter" role="search" onSubmit={(event) => event.preventDefault()}>
          <label>
            Name or fault
            <input type="search" value={text} onInput={(event) => setText(event.currentTarget.value)} />
          </label>
          <label>
            State
            <select value={state} onChange={(event) => setState(event.currentTarget.value)}>
              <option value="">all</option>
              {states.map((one) => (
                <option key={one}>{one}</option>
              ))}
            </select>
          </label>
          <p class="quiet" role="status">
            {found.length} of {page.jobs.length}
          </p>
        </form>
      )}
      {page.jobs.length === 0 && page.resumed.length === 0 && (
        <p>
          No jobs.{" "}
          {!page.unreached && (
            <>
              Start one with <code>unbroken run train.py</code>.
            </>
          )}
        </p>
      )}
      {found.length > 0 && (
        <>
          <Table label="Jobs" columns={COLUMNS} rows={found} />
          {page.unreached && <p class="quiet">{page.unreached}</p>}
        </>
      )}
      {page.resumed.length > 0 && (
        <>
          <h2>Jobs of other kinds</h2>
          <Table
            label="Jobs of other kinds"
            columns={RESUMED}
            rows={page.resumed}
          />
          <p class="quiet">
            Auto-resume restarts these jobs. <code>unbroken explain KIND/NAME</code> explains their
            losses.
          </p>
        </>
      )}
    </>
  );
}
