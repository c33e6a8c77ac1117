import "./dashboard.css";
import type { DashboardPage } from "../contents";
import { percent } from "../format";
import { type Line, Lines } from "../lines";
import { Figure } from "../parts";
import { dashboardPath } from "../route";
import { withUnit } from "../units";

type Panel = DashboardPage["panels"][number];

/** Bars that are shown without scrolling; more can be scrolled by keyboard. */
const FITTING = 6;

/** A dashboard with the data of a Prometheus. */
export function Dashboard({ page }: { page: DashboardPage }) {
  return (
    <>
      <h1>Dashboards: {page.title}</h1>
      <div class="choices">
        <Choice label="Dashboards" chosen={page.name} to={(name) => dashboardPath(name, page.span)}>
          {page.boards.map((one) => [one.name, one.title])}
        </Choice>
        <Choice label="Time" chosen={page.span} to={(span) => dashboardPath(page.name, span)}>
          {page.spans.map((one) => [one, one])}
        </Choice>
      </div>
      <p class="quiet">From the Prometheus at {page.address}</p>
      <div class="panels">
        {page.panels.map((panel, index) => (
          <section
            class="card"
            key={panel.title}
            aria-labelledby={`panel-${index}`}
            style={{ gridColumn: `span ${panel.width}` }}
          >
            <h2 id={`panel-${index}`}>{panel.title}</h2>
            <Shown panel={panel} times={page.times} />
          </section>
        ))}
      </div>
    </>
  );
}

function Choice(props: {
  label: string;
  chosen: string;
  to: (name: string) => string;
  children: [name: string, title: string][];
}) {
  return (
    <nav aria-label={props.label}>
      {props.children.map(([name, title]) => (
        <a key={name} href={props.to(name)} aria-current={name === props.chosen ? "page" : undefined}>
          {title}
        </a>
      ))}
    </nav>
  );
}

function Shown({ panel, times }: { panel: Panel; times: number[] }) {
  if (panel.problem) return <p class="bad">{panel.problem}</p>;
  if (panel.series.length === 0) return <p class="quiet">No data at this time.</p>;
  const { title, unit, series, hidden } = panel;
  return (
    <>
      {panel.kind === "timeseries" ? (
        <Lines key={series.map((one) => one.name).join("\n")} title={title} unit={unit} times={times} lines={series} />
      ) : panel.kind === "stat" ? (
        <Stats unit={unit} series={series} />
      ) : (
        <Bars unit={unit} series={series} isShare={panel.kind === "piechart"} />
      )}
      {hidden > 0 && (
        <p class="quiet">
          {series.length} of {series.length + hidden}: those with the highest values
        </p>
      )}
    </>
  );
}

function Stats({ unit, series }: { unit: string; series: Line[] }) {
  return (
    <dl class="figures">
      {series.map((one) => (
        <Figure key={one.name} name={one.name}>
          {withUnit(one.newest, unit)}
        </Figure>
      ))}
    </dl>
  );
}

/** The newest values as bars: beside the greatest one, or as shares of their sum. */
function Bars({ unit, series, isShare }: { unit: string; series: Line[]; isShare: boolean }) {
  const sum = series.reduce((total, one) => total + one.newest, 0);
  const whole = isShare ? sum : Math.max(...series.map((one) => one.newest));
  return (
    <ul class="bars" tabIndex={series.length > FITTING ? 0 : undefined}>
      {series.map((one) => {
        const share = whole > 0 ? Math.max(one.newest, 0) / whole : 0;
        return (
          <li key={one.name}>
            <span class="name">{one.name}</span>
            <span class="value">
              {withUnit(one.newest, unit)}
              {isShare && ` (${percent(share)})`}
            </span>
            <span class="bar" aria-hidden="true">
              <span style={{ width: `${share * 100}%` }} />
            </span>
          </li>
        );
      })}
    </ul>
  );
}
