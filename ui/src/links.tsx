// The links between nodes that checks have measured: a matrix of colours, and a table of pairs.
import type { NodesPage } from "./contents";
import { count, counted, NONE, short } from "./format";
import { Card, type Column, Table } from "./parts";
import { nodePath } from "./route";

export type Links = NodesPage["links"];
type Pair = Links["pairs"][number];

const LEVELS = 5;
/** Share of the usual speed below which a link has a colour. */
const USUAL = 0.9;

/** The level of a speed, 0 (as usual) to 4 (no connection); null: not measured. */
export function levelOf(speed: number | null, usual: number): number | null {
  if (speed === null) return null;
  if (speed <= 0) return LEVELS - 1;
  const share = usual > 0 ? speed / usual : 1;
  return share >= USUAL ? 0 : Math.min(1 + Math.floor((USUAL - share) * 4), LEVELS - 2);
}

/** The middle one of all measured speeds, in GB/s. */
export function usualSpeed(links: Links): number {
  const known = links.speeds.flat().filter((one): one is number => one !== null && one > 0);
  known.sort((a, b) => a - b);
  return known[Math.floor(known.length / 2)] ?? 0;
}

const PAIRS: Column<Pair>[] = [
  { title: "Node", cell: (pair) => <a href={nodePath(pair.one)}>{pair.one}</a> },
  { title: "Other node", cell: (pair) => <a href={nodePath(pair.other)}>{pair.other}</a> },
  {
    title: "GB/s",
    cell: (pair) => (pair.isRight ? short(pair.gigabytesPerSecond) : "no connection, or wrong sums"),
    number: true,
  },
  { title: "Latency, µs", cell: (pair) => short(pair.microseconds), number: true },
  { title: "Slow device", cell: (pair) => pair.slowDevice || NONE },
];

/** What checks have measured; nothing else is shown where none has. */
export function LinksCard({ links }: { links: Links }) {
  if (links.pairCount === 0) {
    return (
      <p class="quiet">
        No check of the last day has measured links between nodes. <code>unbroken check --kind InstanceConnectivity</code>{" "}
        does.
      </p>
    );
  }
  const usual = usualSpeed(links);
  const names = links.linkNodes;
  const words =
    `Links of ${counted(names.length, "node")}: usually ${short(usual)} GB/s, ` +
    `the slowest ${short(links.pairs[0]?.gigabytesPerSecond ?? null)} GB/s`;
  return (
    <Card title="Links between nodes" id="links" wide>
      <div class="heat">
        <div
          class="cells"
          role="img"
          aria-label={words}
          style={{ gridTemplateColumns: `repeat(${names.length}, minmax(0, 2.5rem))` }}
        >
          {links.speeds.map((row, one) =>
            row.map((speed, other) => {
              const level = levelOf(speed, usual);
              const text = speed === null ? "not measured" : `${short(speed)} GB/s`;
              return (
                <span
                  class={level === null ? "cell none" : `cell level${level}`}
                  title={one === other ? names[one] : `${names[one]} and ${names[other]}: ${text}`}
                  key={`${one} ${other}`}
                />
              );
            }),
          )}
        </div>
        <p class="quiet">{words}.</p>
        {links.linkNodeCount > names.length && (
          <p class="quiet">
            {names.length} of {counted(links.linkNodeCount, "node")}, those with the slowest links.
          </p>
        )}
      </div>
      <details>
        <summary>
          {links.pairs.length < links.pairCount
            ? `The slowest ${links.pairs.length} of ${count(links.pairCount)} pairs`
            : counted(links.pairCount, "pair")}
        </summary>
        <Table label="Links between nodes" columns={PAIRS} rows={links.pairs} />
      </details>
    </Card>
  );
}
