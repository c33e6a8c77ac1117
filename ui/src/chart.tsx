// A chart of one value over time, with every incident marked, and what other charts share with it.
import type { RefObject } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { clock, short } from "./format";

export interface Mark {
  /** Seconds since the epoch. */
  from: number;
  /** Null: the recovery goes on. */
  to: number | null;
  label: string;
}

/** Pixels of a chart. */
export const HEIGHT = 180;

/** Reads a colour of the theme by its name in the style sheet. */
export type Colour = (name: string) => string;

/** Keep a plot in an element while it is shown: it takes new data and widths, and the theme's colours. */
export function usePlot(
  make: (element: HTMLElement, colour: Colour) => uPlot,
  data: uPlot.AlignedData,
): RefObject<HTMLDivElement> {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const newest = useRef(make);
  newest.current = make;
  useEffect(() => {
    const element = place.current;
    if (!element) return undefined;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const made = () => {
      plot.current?.destroy();
      const style = getComputedStyle(element);
      plot.current = newest.current(element, (name) => style.getPropertyValue(name).trim());
    };
    made();
    dark.addEventListener("change", made);
    const resized = new ResizeObserver(() =>
      plot.current?.setSize({ width: element.clientWidth, height: HEIGHT }),
    );
    resized.observe(element);
    return () => {
      dark.removeEventListener("change", made);
      resized.disconnect();
      plot.current?.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => plot.current?.setData(data));
  return place;
}

/** The axes of time and of values, with a text for each value and their sizes in pixels. */
export function axesOf(colour: Colour, text: (value: number) => string, low = 50, wide = 60): uPlot.Axis[] {
  const axis = {
    stroke: colour("--quiet"),
    grid: { stroke: colour("--line"), width: 1 },
    ticks: { stroke: colour("--line"), width: 1 },
    font: "12px system-ui, sans-serif",
  };
  return [
    { ...axis, size: low, space: 90, values: (_, ticks) => ticks.map((at) => timeOf(at, ticks)) },
    { ...axis, size: wide, values: (_, ticks) => ticks.map(text) },
  ];
}

/** Draw `values` over `times` (seconds since the epoch); null is a gap. */
export function Chart(props: {
  title: string;
  times: number[];
  values: (number | null)[];
  marks: Mark[];
  /** The scale begins at 0, so that small changes look small. */
  fromZero: boolean;
}) {
  const newest = useRef(props);
  newest.current = props;
  const place = usePlot(
    (element, colour) => {
      const { title, times, values, fromZero } = newest.current;
      return drawn(element, colour, title, fromZero, () => newest.current.marks, [times, values]);
    },
    [props.times, props.values],
  );

  return (
    <figure class="chart">
      <figcaption>{props.title}</figcaption>
      <div ref={place} role="img" aria-label={inWords(props)} />
    </figure>
  );
}

/** The chart in words, for a screen reader. */
function inWords({ title, values, marks }: { title: string; values: (number | null)[]; marks: Mark[] }): string {
  const known = values.filter((one): one is number => one !== null);
  if (known.length === 0) return `${title}: no values yet`;
  const [least, most] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  const range = `from ${short(least)} to ${short(most)}, ${short(known[known.length - 1] ?? null)} now`;
  return `${title}: ${range}; ${marks.length} incidents marked`;
}

/** A time at the axis: of the day, with the date where the axis is longer than a day. */
function timeOf(at: number, ticks: number[]): string {
  const time = new Date(at * 1000);
  const isLong = (ticks[ticks.length - 1] ?? 0) - (ticks[0] ?? 0) > 86400;
  return isLong ? `${time.toLocaleDateString("sv").slice(5)} ${clock(time).slice(0, 5)}` : clock(time);
}

function drawn(
  element: HTMLElement,
  colour: Colour,
  title: string,
  fromZero: boolean,
  marks: () => Mark[],
  data: [number[], (number | null)[]],
): uPlot {
  return new uPlot(
    {
      width: element.clientWidth || 300,
      height: HEIGHT,
      legend: { show: false },
      cursor: { y: false, drag: { x: true, y: false } },
      scales: {
        x: { time: true },
        y: fromZero ? { range: (_, __, most) => [0, Math.max(most, 0) * 1.1 || 1] } : {},
      },
      axes: axesOf(colour, short),
      series: [
        {},
        {
          label: title,
          stroke: colour("--accent"),
          width: 2,
          spanGaps: false,
          points: { show: data[0].length < 30 },
        },
      ],
      hooks: {
        drawClear: [(plot) => drawMarks(plot, marks(), colour)],
      },
    },
    data,
    element,
  );
}

/** Draw each incident as a bar over the time of its recovery, with its label at the beginning. */
function drawMarks(plot: uPlot, marks: Mark[], colour: Colour): void {
  const { ctx, bbox } = plot;
  const right = bbox.left + bbox.width;
  ctx.save();
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textBaseline = "top";
  for (const mark of marks) {
    const start = plot.valToPos(mark.from, "x", true);
    const end = plot.valToPos(mark.to ?? Date.now() / 1000, "x", true);
    if (end < bbox.left || start > right) continue;
    const left = Math.max(start, bbox.left);
    ctx.fillStyle = colour("--mark");
    ctx.fillRect(left, bbox.top, Math.max(Math.min(end, right) - left, 2), bbox.height);
    if (start < bbox.left) continue;
    ctx.fillStyle = colour("--bad");
    ctx.fillRect(start, bbox.top, 1.5 * devicePixelRatio, bbox.height);
    ctx.fillText(mark.label, start + 4 * devicePixelRatio, bbox.top + 2);
  }
  ctx.restore();
}
