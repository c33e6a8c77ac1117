// A chart of several series over time, with their names and values below it.
import { useState } from "preact/hooks";
import uPlot from "uplot";
import { axesOf, HEIGHT, usePlot } from "./chart";
import { clock, counted } from "./format";
import { withUnit } from "./units";

export interface Line {
  name: string;
  newest: number;
  values: (number | null)[];
}

/** Lines whose values are shown without scrolling; more can be scrolled by keyboard. */
const FITTING = 6;
/** Colours of the style sheet, and then the same ones with dashes. */
const COLOURS = 6;
const DASHES = [[], [6, 3], [2, 3], [8, 3, 2, 3]];

function colourOf(index: number): string {
  return `--s${(index % COLOURS) + 1}`;
}

function dashOf(index: number): number[] {
  return DASHES[Math.floor(index / COLOURS) % DASHES.length] ?? [];
}

/** Draw lines over times (seconds since the epoch); use a new `key` for other series. */
export function Lines(props: { title: string; unit: string; times: number[]; lines: Line[] }) {
  const { title, unit, times, lines } = props;
  const [at, setAt] = useState<number | null>(null);
  const data: uPlot.AlignedData = [times, ...lines.map((line) => line.values)];
  const place = usePlot(
    (element, colour) =>
      new uPlot(
        {
          width: element.clientWidth || 300,
          height: HEIGHT,
          legend: { show: false },
          cursor: { y: false, drag: { x: true, y: false } },
          scales: { x: { time: true }, y: { range: (_, least, most) => rangeOf(least, most) } },
          axes: axesOf(colour, (value) => withUnit(value, unit), 34, 76),
          series: [
            {},
            ...lines.map((line, index) => ({
              label: line.name,
              stroke: colour(colourOf(index)),
              width: 2,
              dash: dashOf(index),
              points: { show: line.values.filter((one) => one !== null).length < 10 },
            })),
          ],
          hooks: { setCursor: [(plot) => setAt(plot.cursor.idx ?? null)] },
        },
        data,
        element,
      ),
    data,
  );
  const time = at === null ? undefined : times[at];
  return (
    <>
      <div
        class="plot"
        ref={place}
        role="img"
        aria-label={`${title}: ${counted(lines.length, "line")}; their values are below`}
      />
      <p class="quiet legend-time">{time === undefined ? "newest values" : clock(new Date(time * 1000))}</p>
      <ul class="lines" tabIndex={lines.length > FITTING ? 0 : undefined} aria-label={`Values of ${title}`}>
        {lines.map((line, index) => (
          <li key={line.name}>
            <svg width="22" height="8" aria-hidden="true">
              <line
                x1="0"
                x2="22"
                y1="4"
                y2="4"
                style={{ stroke: `var(${colourOf(index)})` }}
                stroke-width="3"
                stroke-dasharray={dashOf(index).join(" ")}
              />
            </svg>
            <span class="name">{line.name}</span>
            <span class="value">
              {withUnit(time === undefined ? line.newest : (line.values[at ?? 0] ?? null), unit)}
            </span>
          </li>
        ))}
      </ul>
    </>
  );
}

/** The scale begins at 0, so that small changes look small, or below it if values are. */
function rangeOf(least: number, most: number): [number, number] {
  return [Math.min(least, 0) * 1.1, Math.max(most, 0) * 1.1 || 1];
}
