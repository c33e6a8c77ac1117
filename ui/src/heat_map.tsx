// The heat map of ranks: a cell for each rank, or for neighbouring ranks of a large job.
import { useMemo, useState } from "preact/hooks";
import type { JobPage } from "./contents";
import { count, counted, NONE, short, span } from "./format";

export type Map = NonNullable<JobPage["heatMap"]>;
export type Measure = "silence" | "step" | "time" | "phase";

const MEASURES: [Measure, string][] = [
  ["silence", "silence"],
  ["step", "steps behind"],
  ["time", "time per step"],
  ["phase", "phase"],
];
const LEVELS = 5;
/** Share of the usual silence up to which a rank has level 0. */
const HALF = 0.5;

/** Cells of a map at most for each to show its rank. */
const NUMBERED = 16;

/** The level of each cell, 0 (as it should be) to 4 (worst); null: no rank of the cell has a value. */
export function levelsOf(map: Map, measure: Measure): (number | null)[] {
  const level = levelBy(map, measure);
  return map.reported.map((reported, cell) => {
    if (!reported) return null;
    return (map.alarms[cell] ?? 0) > 0 ? LEVELS - 1 : level(cell);
  });
}

/** The level of a cell without an alarm. Values of the whole map are computed once. */
function levelBy(map: Map, measure: Measure): (cell: number) => number | null {
  switch (measure) {
    case "silence":
      return (cell) => {
        const share = map.silenceShares[cell] ?? null;
        if (share === null) return (map.silenceSeconds[cell] ?? null) === null ? null : 0;
        return share <= HALF ? 0 : Math.min(Math.ceil((share - HALF) * 4), LEVELS - 1);
      };
    case "step":
      return (cell) => {
        const behind = map.behind[cell] ?? null;
        if (behind === null) return null;
        const more = behind / map.stepsApart - 1;
        return more <= 0 ? 0 : Math.min(1 + Math.floor(Math.log2(Math.max(more, 1))), LEVELS - 1);
      };
    case "time": {
      const usual = median(map.stepSeconds);
      return (cell) => {
        const seconds = map.stepSeconds[cell] ?? null;
        if (seconds === null || usual === null) return null;
        const more = usual > 0 ? seconds / usual - 1 : 0;
        return more <= 0.1 ? 0 : Math.min(1 + Math.floor(more * 4), LEVELS - 1);
      };
    }
    case "phase": {
      const usual = commonest(map.phases);
      return (cell) => (map.phases[cell] === usual ? 0 : 2);
    }
  }
}

function median(values: (number | null)[]): number | null {
  const known = values.filter((one): one is number => one !== null).sort((a, b) => a - b);
  return known[Math.floor(known.length / 2)] ?? null;
}

/** The phase of the most cells. */
function commonest(phases: string[]): string {
  const counts = new globalThis.Map<string, number>();
  for (const one of phases) if (one) counts.set(one, (counts.get(one) ?? 0) + 1);
  return [...counts].sort((one, other) => other[1] - one[1])[0]?.[0] ?? "";
}

/** A cell in words. */
export function cellText(map: Map, cell: number): string {
  const first = cell * map.ranksPerCell;
  const last = Math.min(first + map.ranksPerCell, map.ranks) - 1;
  const who = first === last ? `rank ${first}` : `ranks ${first} to ${last}`;
  if (!map.reported[cell]) return `${who}: no report`;
  const parts = [
    map.phases[cell] ? `phase ${map.phases[cell]}` : "",
    map.steps[cell] === null ? "" : `step ${count(map.steps[cell] ?? null)}`,
    map.behind[cell] ? `${counted(map.behind[cell] ?? 0, "step")} behind` : "",
    map.stepSeconds[cell] === null ? "" : `${span(map.stepSeconds[cell] ?? 0)} a step`,
    map.silenceSeconds[cell] === null ? "" : `silent for ${span(map.silenceSeconds[cell] ?? 0)}`,
    map.silenceShares[cell] === null ? "" : `${short((map.silenceShares[cell] ?? 0) * 100)} % of the usual`,
    map.alarms[cell] ? counted(map.alarms[cell] ?? 0, "alarm") : "",
  ];
  return `${who}: ${parts.filter(Boolean).join(", ") || NONE}`;
}

/** The map, with a choice of what the colours mean. */
export function HeatMap({ map }: { map: Map }) {
  const [measure, setMeasure] = useState<Measure>("silence");
  const [shown, setShown] = useState<number | null>(null);
  const cells = useMemo(() => levelsOf(map, measure), [map, measure]);
  const texts = useMemo(() => cells.map((_, cell) => cellText(map, cell)), [map, cells]);
  const odd = cells.filter((level) => level !== null && level > 0).length;
  const word = MEASURES.find(([name]) => name === measure)?.[1] ?? "";
  const words =
    `Ranks by ${word}: ${counted(cells.length, "cell")} of ${counted(map.ranksPerCell, "rank")}, ` +
    `${odd === 0 ? "none differs" : odd === 1 ? "1 differs" : `${odd} differ`}`;
  const columns = Math.min(32, Math.max(cells.length, 1));
  return (
    <div class="heat">
      <fieldset>
        <legend>Colour shows</legend>
        {MEASURES.map(([name, title]) => (
          <label key={name}>
            <input
              type="radio"
              name="measure"
              checked={measure === name}
              onChange={() => setMeasure(name)}
            />
            {title}
          </label>
        ))}
      </fieldset>
      <div
        class="cells"
        role="img"
        aria-label={words}
        style={{ gridTemplateColumns: `repeat(${columns}, minmax(0, ${NUMBERED >= cells.length ? 3 : 2.5}rem))` }}
        onMouseLeave={() => setShown(null)}
      >
        {cells.map((level, cell) => (
          <span
            class={level === null ? "cell none" : `cell level${level}`}
            key={cell}
            title={texts[cell]}
            onMouseEnter={() => setShown(cell)}
          >
            {cells.length <= NUMBERED && cell}
          </span>
        ))}
      </div>
      <p class="quiet">
        {(shown !== null && texts[shown]) || `${words}.`}
      </p>
      <p class="legend" aria-hidden="true">
        as it should be
        {Array.from({ length: LEVELS }, (_, level) => (
          <span class={`cell level${level}`} key={level} />
        ))}
        worst or alarm
        <span class="cell none" /> no value
      </p>
    </div>
  );
}
