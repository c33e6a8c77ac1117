// Small parts of several pages.
import type { ComponentChildren } from "preact";
import { percent } from "./format";

const GOOD = new Set(["Running", "Completed", "Schedulable", "Ready", "Passed", "pass"]);
const BAD = new Set(["Failed", "Faulted", "NotReady", "fail"]);

/** A state as a coloured word. */
export function State({ name }: { name: string }) {
  const kind = GOOD.has(name) ? "good" : BAD.has(name.split(",")[0] ?? "") ? "bad" : "other";
  return <span class={`state ${kind}`}>{name}</span>;
}

/** A share as a bar with its number. */
export function Share({ share }: { share: number | null }) {
  return (
    <span class="share">
      <span class="bar" aria-hidden="true">
        <span style={{ width: `${(share ?? 0) * 100}%` }} />
      </span>
      {percent(share)}
    </span>
  );
}

/** A part of a page with a heading. */
export function Card(props: {
  title: string;
  id: string;
  wide?: boolean;
  note?: ComponentChildren;
  children: ComponentChildren;
}) {
  return (
    <section class={props.wide ? "card wide" : "card"} aria-labelledby={props.id}>
      <div class="head">
        <h2 id={props.id}>{props.title}</h2>
        {props.note}
      </div>
      {props.children}
    </section>
  );
}

/** Sentences about objects that Kubernetes refuses to the account of the page. */
export function Missing({ lines }: { lines: string[] }) {
  if (lines.length === 0) return null;
  return (
    <div class="notice">
      <strong>Your account may not see everything</strong>
      <ul>
        {lines.map((line, index) => (
          <li key={index}>{line}</li>
        ))}
      </ul>
    </div>
  );
}

/** A figure with its name. */
export function Figure({ name, children }: { name: string; children: ComponentChildren }) {
  return (
    <div class="figure">
      <dt>{name}</dt>
      <dd>{children}</dd>
    </div>
  );
}

export interface Column<Row> {
  title: string;
  cell: (row: Row) => ComponentChildren;
  /** Numbers stand at the right. */
  number?: boolean;
  /** The text is not broken into lines. */
  whole?: boolean;
}

/** Columns that fit on a phone. */
const NARROW = 3;

/** A table, whose rows become blocks where the page is narrow and the table is not. */
export function Table<Row>(props: {
  label: string;
  columns: Column<Row>[];
  rows: Row[];
}) {
  const { label, columns, rows } = props;
  // The roles are said, because blocks have none.
  return (
    <table role="table" aria-label={label} class={columns.length <= NARROW ? "narrow" : ""}>
      <thead role="rowgroup">
        <tr role="row">
          {columns.map((column) => (
            <th role="columnheader" scope="col" class={column.number ? "number" : ""} key={column.title}>
              {column.title}
            </th>
          ))}
        </tr>
      </thead>
      <tbody role="rowgroup">
        {rows.map((row, index) => (
          <tr role="row" key={index}>
            {columns.map((column) => (
              <td
                role="cell"
                class={column.number ? "number" : column.whole ? "whole" : ""}
                data-title={column.title}
                key={column.title}
              >
                {column.cell(row)}
              </td>
            ))}
          </tr>
        ))}
      </tbody>
    </table>
  );
}
