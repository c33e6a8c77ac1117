import type { NodesPage } from "../contents";
import { counted, NONE, short } from "../format";
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

/** All nodes of the cluster. */
export function Nodes({ page }: { page: NodesPage }) {
  const ready = page.nodes.filter((node) => node.ready).length;
  return (
    <>
      <h1>Nodes</h1>
      <Missing lines={page.missing} />
      {page.nodes.length > 0 && (
        <>
          <p class="quiet">
            {ready} of {counted(page.nodes.length, "node")} ready
          </p>
          <Table label="Nodes" columns={COLUMNS} rows={page.nodes} />
          <LinksCard links={page.links} />
        </>
      )}
      {page.nodes.length === 0 && page.missing.length === 0 && <p>No nodes.</p>}
    </>
  );
}
