// The recoveries of a job on one scale of seconds, so that their stages can be compared.
import type { JobPage } from "./contents";
import { span } from "./format";
import { incidentPath } from "./route";

type Recovery = JobPage["incidents"][number];

/** Stages in order, each with its name on the page. */
const STAGES: [string, string][] = [
  ["detect", "detection"],
  ["examine", "look at all ranks"],
  ["stop", "stop"],
  ["ready", "pods ready"],
  ["start", "start"],
  ["progress", "first step"],
];
const SHOWN = 10;

/** Bars of the newest recoveries. */
export function Recoveries({ page }: { page: JobPage }) {
  const shown = page.incidents.slice(-SHOWN).reverse();
  const longest = Math.max(...shown.map(endOf), 0.001);
  const older = page.incidentCount - shown.length;
  return (
    <>
      <ol class="recoveries">
        {shown.map((one) => (
          <li key={one.number}>
            <p>
              <a href={incidentPath(page.namespace, page.name, one.number)}>Incident {one.number}</a>{" "}
              (attempt {one.attempt}): {one.fault}, {one.culprit}; remedy: {one.remedy}
              {one.outcome !== "recovered" && (
                <span class="state other">{one.outcome ? "ended" : "open"}</span>
              )}
            </p>
            <div class="stages" role="img" aria-label={inWords(one)}>
              {one.stages.map((stage) => (
                <span
                  class={`stage ${stage.stage}`}
                  key={stage.stage}
                  title={`${nameOf(stage.stage)}: ${span(stage.to - stage.from)}`}
                  style={{ width: `${((stage.to - stage.from) / longest) * 100}%` }}
                />
              ))}
              <span class="total">{span(endOf(one))}</span>
            </div>
          </li>
        ))}
      </ol>
      <p class="legend" aria-hidden="true">
        {STAGES.map(([stage, name]) => (
          <span key={stage}>
            <span class={`cell ${stage}`} /> {name}
          </span>
        ))}
      </p>
      {older > 0 && (
        <p class="quiet">
          {older} older: <code>unbroken explain {page.name} --all</code>
        </p>
      )}
    </>
  );
}

function endOf(recovery: Recovery): number {
  return recovery.stages[recovery.stages.length - 1]?.to ?? 0;
}

function nameOf(stage: string): string {
  return STAGES.find(([one]) => one === stage)?.[1] ?? stage;
}

/** A recovery in words, for a screen reader. */
function inWords(recovery: Recovery): string {
  const stages = recovery.stages.map((one) => `${nameOf(one.stage)} ${span(one.to - one.from)}`);
  return `${span(endOf(recovery))}: ${stages.join(", ")}`;
}
