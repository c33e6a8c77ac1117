import type { NodesPage } from "../contents";
import { counted, NONE, short } from "../format";
import { type Action, type Choice, type Field, type Question, useActions, useQuestion } from "../actions";
import { LinksCard } from "../links";
import { type Column, Missing, State, Table } from "../parts";
import { nodePath } from "../route";

type NodeRow = NodesPage["nodes"][number];

const COLUMNS: Column<NodeRow>[] = [
  { title: "Node", cell: (node) => <a href={nodePath(node.name)}>{node.name}</a> },
  { title: "Status", cell: (node) => <State name={node.status} /> },
  { title: "Health", cell: (node) => (node.health ? <State name={node.health} /> : NONE) },
  { title: "Type", cell: (node) => node.instanceType || NONE },
  { title: "Pods of jobs", cell: (node) => <Pods pods={node.jobPods} /> },
  { title: "Blame", cell: (node) => short(node.score), number: true },
  { title: "Faults and repairs", cell: (node) => <Story node={node} /> },
];

function Pods({ pods }: { pods: string[] }) {
  if (pods.length === 0) return <>{NONE}</>;
  return (
    <details>
      <summary>{counted(pods.length, "pod")}</summary>
      <ul>
        {pods.map((pod) => (
          <li key={pod}>{pod}</li>
        ))}
      </ul>
    </details>
  );
}

function Story({ node }: { node: NodeRow }) {
  const faults = [...node.faults, ...(node.faultReasons ? [`${node.faultTypes} ${node.faultReasons}`] : [])];
  const has = faults.length > 0 || node.repairNow || node.quarantined || node.repairs.length > 0;
  if (!has) return <>{node.repairText === "-" ? NONE : node.repairText}</>;
  return (
    <div class="story">
      {faults.map((fault, index) => (
        <p class="bad" key={index}>
          {fault}
        </p>
      ))}
      {node.quarantined && <p class="bad">quarantined: {node.quarantined}</p>}
      {node.repairNow && (
        <p>
          <strong>Repair:</strong> {node.repairNow}
        </p>
      )}
      {node.repairs.length > 0 && (
        <details>
          <summary>{counted(node.repairs.length, "earlier repair")}</summary>
          <ol>
            {node.repairs.map((repair, index) => (
              <li key={index}>{repair}</li>
            ))}
          </ol>
        </details>
      )}
      <p class="quiet">{node.scoreText}</p>
    </div>
  );
}

const quoted = (text: string) => `'${text.replaceAll("'", "'\\''")}'`;
const DEADLINE: Field = {
  name: "deadline",
  label: "Time after which jobs leave even without another place, such as 10m (optional)",
  value: "",
  command: (value) => value && `--deadline ${value}`,
};
const WHY: Field = {
  name: "why",
  label: "Reason why the node is good; it is recorded",
  value: "",
  required: true,
  command: (value) => `--why ${quoted(value)}`,
};
const ACTIONS: { action: string; label: string; isFor: (node: NodeRow) => boolean; fields?: Field[] }[] = [
  { action: "drain", label: "Drain", isFor: (node) => node.schedulable, fields: [DEADLINE] },
  { action: "uncordon", label: "Uncordon", isFor: (node) => !node.schedulable },
  { action: "reset", label: "Reset GPUs", isFor: () => true },
  { action: "reboot", label: "Reboot", isFor: () => true },
  { action: "replace", label: "Replace", isFor: () => true },
  { action: "clear", label: "Clear blame", isFor: (node) => node.score > 0 || node.quarantined !== null, fields: [WHY] },
];

/** What can be done with a node now. */
function choicesOf(node: NodeRow, actions: Action[]): Choice[] {
  return ACTIONS.flatMap(({ action, label, isFor, fields }) => {
    const found = isFor(node) && actions.find((one) => one.action === action);
    const choice = { label, order: { name: node.name }, words: node.name };
    return found ? [{ ...choice, action: found, ...(fields ? { fields } : {}) }] : [];
  });
}

function actionColumn(actions: Action[], ask: (question: Question) => void): Column<NodeRow> {
  return {
    title: "Actions",
    cell: (node) => {
      const choices = choicesOf(node, actions);
      if (choices.length === 0) return NONE;
      return (
        <button
          type="button"
          aria-label={`Actions on ${node.name}`}
          onClick={() => ask({ subject: `node ${node.name}`, choices })}
        >
          Actions
        </button>
      );
    },
  };
}

/** All nodes of the cluster. */
export function Nodes({ page }: { page: NodesPage }) {
  const actions = useActions("nodes");
  const [dialog, ask] = useQuestion();
  const columns = actions.length > 0 ? [...COLUMNS, actionColumn(actions, ask)] : COLUMNS;
  const ready = page.nodes.filter((node) => node.ready).length;
  return (
    <>
      <h1>Nodes</h1>
      {dialog}
      <Missing lines={page.missing} />
      {page.nodes.length > 0 && (
        <>
          <p class="quiet">
            {ready} of {counted(page.nodes.length, "node")} ready
          </p>
          <Table label="Nodes" columns={columns} rows={page.nodes} />
          <LinksCard links={page.links} />
        </>
      )}
      {page.nodes.length === 0 && page.missing.length === 0 && <p>No nodes.</p>}
    </>
  );
}
