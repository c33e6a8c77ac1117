import { useEffect, useRef, useState } from "preact/hooks";
import type { JobPage, LogsPage } from "../contents";
import { count, exactClock } from "../format";
import { byStep, type LogLine, merged, stepOf } from "../log_order";
import { jobPath } from "../route";

/** Milliseconds between questions for new lines. */
export const FOLLOW = 2000;
/** A new question waits this many times as long as the one before took: 5 % of the time at most. */
const COST = 20;
/** Seconds that are asked for again: clocks of nodes differ, and lines come late. */
const OVERLAP = 15;
/** Lines that a page holds. */
export const KEPT = 5000;

interface Wanted {
  rank: string;
  pod: string;
  attempt: string;
  find: string;
  pattern: boolean;
  before: string;
}

/** The lines of a job's ranks, searched, with the newest as they come. */
export function Logs({ page }: { page: JobPage }) {
  const given = new URLSearchParams(location.search);
  const start: Wanted = {
    rank: given.get("rank") ?? "",
    pod: given.get("pod") ?? "",
    attempt: "",
    find: "",
    pattern: false,
    before: given.get("before") ?? "",
  };
  const [typed, setTyped] = useState(start);
  const [wanted, setWanted] = useState(start);
  const [follows, setFollows] = useState(!start.before);
  const [order, setOrder] = useState("step");
  const found = useLines(page, wanted, follows);
  const attempts = attemptsOf(page);
  const shown = order === "step" ? byStep(found.lines, (at) => attemptAt(attempts, at)) : found.lines;
  const pods = [...new Set([...page.pods.map((pod) => pod.name), wanted.pod])].filter(Boolean);
  const change = (part: Partial<Wanted>) => setTyped({ ...typed, ...part });
  const choose = (part: Partial<Wanted>) => {
    change(part);
    setWanted({ ...typed, ...part });
  };
  return (
    <>
      <p class="path">
        <a href="/jobs">Jobs</a>
        <a href={jobPath(page.namespace, page.name)}>{page.name}</a>
      </p>
      <h1>Logs of {page.name}</h1>
      <form
        class="filter"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          setWanted(typed);
        }}
      >
        <label>
          Text or pattern
          <input
            type="search"
            value={typed.find}
            maxLength={200}
            onInput={(event) => change({ find: event.currentTarget.value })}
          />
        </label>
        <label class="check">
          <input
            type="checkbox"
            checked={typed.pattern}
            onChange={(event) => change({ pattern: event.currentTarget.checked })}
          />
          Pattern (RE2)
        </label>
        <label class="small">
          Rank
          <input
            type="text"
            inputMode="numeric"
            pattern="[0-9]{0,9}"
            placeholder="all"
            value={typed.rank}
            onInput={(event) => change({ rank: event.currentTarget.value })}
          />
        </label>
        <label>
          Pod
          <select value={typed.pod} onChange={(event) => choose({ pod: event.currentTarget.value })}>
            <option value="">all</option>
            {pods.map((pod) => (
              <option key={pod}>{pod}</option>
            ))}
          </select>
        </label>
        {attempts.length > 1 && (
          <label class="small">
            Attempt
            <select value={typed.attempt} onChange={(event) => choose({ attempt: event.currentTarget.value })}>
              <option value="">all</option>
              {attempts.map((one) => (
                <option key={one.number}>{one.number}</option>
              ))}
            </select>
          </label>
        )}
        <label class="small">
          Order
          <select value={order} onChange={(event) => setOrder(event.currentTarget.value)}>
            <option value="step">step</option>
            <option value="time">time</option>
          </select>
        </label>
        <button class="main">Search</button>
      </form>
      {found.problem && (
        <p class="notice bad" role="alert">
          {found.problem}
        </p>
      )}
      {found.notes.map((note, index) => (
        <p class="notice" key={index}>
          {note}
        </p>
      ))}
      <p class="buttons">
        {found.older !== null && found.lines.length < KEPT && (
          <button type="button" disabled={found.isBusy} onClick={found.more}>
            Older lines
          </button>
        )}
        {wanted.before || wanted.attempt ? (
          <button type="button" onClick={() => choose({ before: "", attempt: "" })}>
            Newest lines
          </button>
        ) : (
          <label class="check">
            <input type="checkbox" checked={follows} onChange={(event) => setFollows(event.currentTarget.checked)} />
            Follow new lines
          </label>
        )}
        <span class="quiet" role="status">
          {words(found, order)}
        </span>
      </p>
      <Lines lines={shown} follows={follows && order === "time"} />
    </>
  );
}

function words(found: Found, order: string): string {
  if (found.isBusy) return "Reading …";
  if (found.lines.length === 0) return "No lines.";
  const hasSteps = order === "step" && found.lines.some((line) => stepOf(line.text) !== null);
  const full = found.lines.length >= KEPT ? " A page holds no more: search, or choose a rank." : "";
  return `${count(found.lines.length)} lines by ${hasSteps ? "step" : "time"}.${full}`;
}

function Lines({ lines, follows }: { lines: LogLine[]; follows: boolean }) {
  const place = useRef<HTMLDivElement>(null);
  const isAtEnd = useRef(true);
  const last = lines[lines.length - 1];
  useEffect(() => {
    if (place.current && isAtEnd.current) place.current.scrollTop = place.current.scrollHeight;
  }, [last, follows]);
  const scrolled = (event: Event & { currentTarget: HTMLDivElement }) => {
    const { scrollHeight, scrollTop, clientHeight } = event.currentTarget;
    isAtEnd.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  if (lines.length === 0) return null;
  return (
    <div class="log" tabIndex={0} role="region" aria-label="Lines" ref={place} onScroll={scrolled}>
      {lines.map((line, index) => (
        <div class="line" key={index}>
          <time dateTime={new Date(line.at * 1000).toISOString()}>
            {exactClock(new Date(line.at * 1000).toISOString())}
          </time>
          <span class="who">{line.rank === null ? line.pod : `rank ${line.rank}`}</span>
          <span class="text">
            {line.text}
            {line.cut > 0 && <em> … {count(line.cut)} characters more</em>}
          </span>
        </div>
      ))}
    </div>
  );
}

interface Found {
  lines: LogLine[];
  older: number | null;
  notes: string[];
  problem: string;
  isBusy: boolean;
  /** Time of the newest answer at the server, and the milliseconds that it took. */
  until: number;
  took: number;
  more: () => void;
}

const NOTHING = { lines: [], older: null, notes: [], problem: "", isBusy: true, until: 0, took: 0 };
const GAP = "Lines came faster than they can be shown: some are missing. Search, or choose a rank.";

/** The lines that are wanted, with older ones on demand and new ones as they come. */
function useLines(page: JobPage, wanted: Wanted, follows: boolean): Found {
  const [state, setState] = useState<{ name: string; found: Omit<Found, "more"> }>({ name: "", found: NOTHING });
  const span = spanOf(attemptsOf(page), wanted);
  const query = { rank: wanted.rank, pod: wanted.pod, find: wanted.find, pattern: wanted.pattern ? "1" : "" };
  const path = `/api/logs/${encodeURIComponent(page.namespace)}/${encodeURIComponent(page.name)}`;
  const name = JSON.stringify([path, query, span]);
  // Lines of another choice are not shown.
  const found = state.name === name ? state.found : NOTHING;
  const setFound = (next: (before: Omit<Found, "more">) => Omit<Found, "more">) =>
    setState((before) => ({ name, found: next(before.name === name ? before.found : NOTHING) }));

  const read = async (part: { since?: number; before?: number }, signal: AbortSignal) => {
    const all = { ...query, ...span, ...part };
    const values = Object.entries(all).flatMap(([key, value]) => (value || value === 0 ? [[key, String(value)]] : []));
    const began = performance.now();
    const answer = await fetch(`${path}?${new URLSearchParams(values)}`, { signal });
    const value = (await answer.json()) as LogsPage | { problem: string };
    if ("problem" in value) throw new Error(value.problem);
    return { ...value, problem: "", isBusy: false, took: performance.now() - began };
  };
  const failed = (error: unknown, signal: AbortSignal) => {
    if (signal.aborted) return;
    const text = error instanceof TypeError ? "The server did not answer." : (error as Error).message;
    setFound((before) => ({ ...before, problem: text, isBusy: false }));
  };

  useEffect(() => {
    const left = new AbortController();
    setFound(() => NOTHING);
    read({}, left.signal).then(
      (value) => setFound(() => value),
      (error) => failed(error, left.signal),
    );
    return () => left.abort();
  }, [name]);

  useEffect(() => {
    if (!follows || span.before !== undefined || found.isBusy) return undefined;
    const left = new AbortController();
    const timer = setTimeout(() => {
      if (document.visibilityState === "hidden") return setFound((before) => ({ ...before }));
      // Without an answer so far, all is asked for again.
      const since = found.until ? Math.max(found.until - OVERLAP, span.since ?? 0) : span.since;
      return read(since === undefined ? {} : { since }, left.signal).then(
        (value) =>
          setFound((before) => ({
            ...value,
            older: before.until ? before.older : value.older,
            lines: merged(before.lines, value.lines).slice(-KEPT),
            notes: before.until && value.older && value.older > before.until ? [GAP, ...value.notes] : value.notes,
          })),
        (error) => failed(error, left.signal),
      );
    }, Math.max(FOLLOW, COST * found.took));
    return () => {
      clearTimeout(timer);
      left.abort();
    };
  }, [name, follows, state]);

  const more = () => {
    const left = new AbortController();
    setFound((before) => ({ ...before, isBusy: true }));
    read({ before: found.older ?? 0 }, left.signal).then(
      (value) =>
        setFound((before) => ({
          ...value,
          until: before.until,
          lines: merged(value.lines, before.lines).slice(-KEPT),
        })),
      (error) => failed(error, left.signal),
    );
  };
  return { ...found, more };
}

interface Attempt {
  number: number;
  /** Seconds since the epoch; null: not known, or up to now. */
  from: number | null;
  to: number | null;
}

/** The attempts of a job, as its incidents divide them: the next begins when all ranks have stopped. */
export function attemptsOf(page: JobPage): Attempt[] {
  const found: Attempt[] = [];
  let from: number | null = null;
  let number = 0;
  for (const incident of page.incidents) {
    const stop = incident.stages.find((stage) => stage.stage === "stop");
    const to = incident.began + (stop ?? incident.stages[0] ?? { to: 0 }).to;
    found.push({ number: incident.attempt, from, to });
    from = to;
    number = incident.attempt + 1;
  }
  return [...found, { number, from, to: null }];
}

export function attemptAt(attempts: Attempt[], at: number): number {
  const found = attempts.find((one) => one.to === null || at < one.to);
  return found?.number ?? 0;
}

function spanOf(attempts: Attempt[], wanted: Wanted): { since?: number; before?: number } {
  const attempt = attempts.find((one) => String(one.number) === wanted.attempt);
  const before = attempt?.to ?? (wanted.before ? Number(wanted.before) : null);
  return {
    ...(attempt?.from ? { since: attempt.from } : {}),
    ...(before ? { before } : {}),
  };
}
