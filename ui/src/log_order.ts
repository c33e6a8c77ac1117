// The order of log lines of several ranks: by step where lines tell steps, else by time.
import type { LogsPage } from "./contents";

export type LogLine = LogsPage["lines"][number];

/** `step 160`, `global_step=160`, `Iteration: 160`. */
const STEP = /\b(?:global[_ ]?step|step|iteration|iter)\b["']?[\s:=#]{0,3}(\d{1,12})\b/i;

/** The step that a line tells; null: none. */
export function stepOf(text: string): number | null {
  const found = STEP.exec(text);
  return found ? Number(found[1]) : null;
}

/**
 * Lines, given by time, by attempt and step.  A line without a step belongs to the newest step that its
 * rank told before in the attempt, or else any rank.  A smaller step than before is of another counter.
 */
export function byStep(lines: LogLine[], attemptOf: (at: number) => number): LogLine[] {
  const told = new Map<string, number>();
  const places = lines.map((line, index) => {
    const attempt = attemptOf(line.at);
    const own = `${attempt}/${line.rank ?? ""}`;
    const any = `${attempt}/any`;
    const before = told.get(own) ?? told.get(any) ?? -1;
    const said = line.rank === null ? null : stepOf(line.text);
    const step = said !== null && said >= (told.get(own) ?? -1) ? said : before;
    if (said !== null) {
      told.set(own, step);
      told.set(any, Math.max(step, told.get(any) ?? -1));
    }
    return { line, attempt, step, index };
  });
  places.sort((one, other) => one.attempt - other.attempt || one.step - other.step || one.index - other.index);
  return places.map((one) => one.line);
}

/** A line that stands for itself: it may come in several answers. */
export function nameOf(line: LogLine): string {
  return `${line.at} ${line.pod} ${line.rank ?? ""} ${line.text}`;
}

/** Lines of two answers by time, each of them once as often as in one of the answers. */
export function merged(before: LogLine[], come: LogLine[]): LogLine[] {
  const left = new Map<string, number>();
  for (const line of before) left.set(nameOf(line), (left.get(nameOf(line)) ?? 0) + 1);
  const added = come.filter((line) => {
    const count = left.get(nameOf(line)) ?? 0;
    left.set(nameOf(line), count - 1);
    return count <= 0;
  });
  return added.length === 0 ? before : [...before, ...added].sort((one, other) => one.at - other.at);
}
