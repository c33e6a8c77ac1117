import type { IncidentPage } from "../contents";
import { counted, exactClock, moment, span } from "../format";
import { Card, Figure, Table } from "../parts";
import { incidentPath, jobPath, logsPath } from "../route";

type Group = NonNullable<IncidentPage["incident"]["groups"]>[number];

/** Seconds of the logs after the detection of an incident. */
const AFTER = 5;

/** The story of an incident. */
export function Incident({ page }: { page: IncidentPage }) {
  const { incident, namespace, job } = page;
  const at = page.numbers.indexOf(incident.number);
  const [before, after] = [page.numbers[at - 1], page.numbers[at + 1]];
  const { rank } = incident.culprit;
  const until = { before: new Date(incident.detectedAt).getTime() / 1000 + AFTER };
  const lines = rank === undefined || rank === null ? until : { rank, ...until };
  const text = `/api/text${incidentPath(namespace, job, incident.number)}`;
  return (
    <>
      <p class="path">
        <a href={jobPath(namespace, job)}>{job}</a>
        {before !== undefined && <a href={incidentPath(namespace, job, before)}>← incident {before}</a>}
        {after !== undefined && <a href={incidentPath(namespace, job, after)}>incident {after} →</a>}
        <a href={logsPath(namespace, job, lines)}>Logs up to it</a>
        <a href={text} download>
          Save as a file
        </a>
      </p>
      <h1>
        Incident {incident.number} of {job}
      </h1>
      <p class="summary">{page.summary}</p>
      <dl class="figures">
        <Figure name="Fault">{incident.fault || incident.culprit.fault}</Figure>
        <Figure name="Detected">{moment(incident.detectedAt)}</Figure>
        <Figure name="Attempt">{incident.attempt}</Figure>
        <Figure name="Outcome">{incident.outcome || "open"}</Figure>
        <Figure name="Cost">{page.cost}</Figure>
      </dl>
      <div class="cards">
        <Card title="Culprit" id="culprit">
          <p>
            <strong>{page.culprit}</strong>
            {incident.confidence && <span class="quiet"> {incident.confidence}</span>}
          </p>
          {page.because && <p>{page.because}</p>}
          {page.what && <p>{page.what}</p>}
          {page.evidence.length > 0 && (
            <>
              <h3>Evidence</h3>
              <Lines label="Evidence" lines={page.evidence} />
            </>
          )}
        </Card>
        <Card title="Remedy" id="remedy">
          <p>
            <strong>{incident.remedy}</strong>: {page.plan}
          </p>
          <p>{incident.reason}</p>
          <h3>Recovery</h3>
          <Table
            label="Stages of the recovery"
            rows={page.timeline}
            columns={[
              {
                title: "Stage",
                cell: (stage) => (
                  <>
                    {stage.stage}
                    {stage.lastPod && <span class="quiet"> ({stage.lastPod} last)</span>}
                  </>
                ),
              },
              { title: "Time", cell: (stage) => exactClock(stage.time) },
              { title: "After detection", cell: (stage) => `${stage.sinceDetection.toFixed(3)} s`, number: true },
            ]}
          />
        </Card>
        {incident.groups && incident.groups.length > 0 && (
          <Card title="What the ranks did" id="stacks" wide>
            <p class="quiet">Ranks with the same stack are one group; those that differ come first.</p>
            {[...incident.groups]
              .sort((one, other) => Number(other.isOutlier ?? false) - Number(one.isOutlier ?? false))
              .map((group, index) => (
                <Stack group={group} key={index} />
              ))}
          </Card>
        )}
        <Receipt page={page} />
        {page.alsoSeen.length > 0 && (
          <Card title="Also seen" id="also" wide>
            <Lines label="Other symptoms" lines={page.alsoSeen} />
          </Card>
        )}
      </div>
    </>
  );
}

function Stack({ group }: { group: Group }) {
  const name = group.count === 1 ? `Rank ${group.ranks}` : `Ranks ${group.ranks} (${group.count})`;
  return (
    <div class={group.isOutlier ? "stack differs" : "stack"}>
      <h3>
        {group.isOutlier && <span class="state bad">differs</span>} {name}: {group.doing}
      </h3>
      {group.stack && group.stack.length > 0 && <Lines label={`Stack of ${name}`} lines={group.stack} />}
    </div>
  );
}

function Receipt({ page }: { page: IncidentPage }) {
  const { restored, resumed, replicasAgree } = page.incident;
  if (!resumed && !restored?.length) return null;
  return (
    <Card title="Receipt" id="receipt" wide>
      {resumed && <p>{resumed}</p>}
      {replicasAgree === true && <p>The replicas agree.</p>}
      {replicasAgree === false && <p class="bad">The replicas disagree.</p>}
      {restored && restored.length > 0 && (
        <Table
          label="States that ranks continued with"
          rows={restored}
          columns={[
            { title: "Ranks", cell: (one) => `${one.ranks} (${counted(one.count, "rank")})` },
            { title: "After step", cell: (one) => one.step, number: true },
            { title: "From", cell: (one) => one.source },
            { title: "Took", cell: (one) => span(one.seconds), number: true },
            { title: "Checksum", cell: (one) => <code>{one.checksum ?? ""}</code> },
          ]}
        />
      )}
    </Card>
  );
}

function Lines({ label, lines }: { label: string; lines: string[] }) {
  return (
    <pre tabIndex={0} role="region" aria-label={label}>
      {lines.join("\n")}
    </pre>
  );
}
