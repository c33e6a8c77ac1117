import { act, cleanup, fireEvent, render, within } from "@testing-library/preact";
import axe from "axe-core";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import type { LogsPage } from "../src/contents";
import { byStep, type LogLine, merged, stepOf } from "../src/log_order";
import { attemptAt, attemptsOf, FOLLOW, Logs } from "../src/pages/logs";
import { HOSTILE, jobPage, recovery } from "./samples";

function line(at: number, rank: number | null, text: string): LogLine {
  return { at, rank, pod: `train-pods-${rank ?? 0}`, text, cut: 0 };
}

test.each([
  ["step 160 loss 2.3", 160],
  ["global_step=7", 7],
  ['{"step": 12}', 12],
  ["Iteration: 3/10", 3],
  ["stepped 4", null],
  ["steps per second 4.5", null],
  ["footstep 9", null],
])("the step of %j is %j", (text, step) => expect(stepOf(text)).toBe(step));

test("lines of ranks whose clocks differ are in the order of their steps", () => {
  const lines = [
    line(1, 0, "step 1"),
    line(2, 0, "loss 0.5"),
    line(3, 0, "step 2"),
    line(10, 1, "starts"),
    line(11, 1, "step 1"),
    line(12, 1, "step 2"),
  ];
  const texts = byStep(lines, () => 0).map((one) => `${one.rank} ${one.text}`);
  expect(texts).toEqual(["0 step 1", "0 loss 0.5", "1 step 1", "0 step 2", "1 starts", "1 step 2"]);
});

test("an attempt comes after the one before, though it repeats steps", () => {
  const lines = [line(1, 0, "step 8"), line(2, 0, "step 9"), line(6, 0, "step 8"), line(7, 0, "step 9")];
  const found = byStep(lines, (at) => (at < 5 ? 0 : 1));
  expect(found.map((one) => one.at)).toEqual([1, 2, 6, 7]);
});

test("a counter of something else moves no line, and lines without steps stay by time", () => {
  const lines = [line(1, 0, "step 100"), line(2, 0, "eval step 1"), line(3, null, "agent"), line(4, 1, "x")];
  expect(byStep(lines, () => 0)).toEqual(lines);
});

test("lines that come again are not doubled, and equal lines stay apart", () => {
  const twice = [line(1, 0, "a"), line(1, 0, "a")];
  expect(merged(twice, twice)).toEqual(twice);
  expect(merged(twice, [...twice, line(1, 0, "a")])).toHaveLength(3);
  expect(merged([line(5, 0, "b")], [line(1, 0, "a")]).map((one) => one.text)).toEqual(["a", "b"]);
});

test("incidents divide the lines into attempts", () => {
  const attempts = attemptsOf(jobPage({ incidents: [recovery()] }));
  expect(attempts.map((one) => one.number)).toEqual([recovery().attempt, recovery().attempt + 1]);
  const first = attempts[0]?.to ?? 0;
  expect(first).toBeGreaterThan(recovery().began);
  expect(attemptAt(attempts, first - 1)).toBe(recovery().attempt);
  expect(attemptAt(attempts, first + 1)).toBe(recovery().attempt + 1);
});

let asked: URL[];
let answers: (() => Response)[];
const page = (part: Partial<LogsPage>): (() => Response) => () =>
  Response.json({ lines: [], older: null, until: 1000, notes: [], ...part });

beforeEach(() => {
  asked = [];
  answers = [];
  vi.useFakeTimers();
  vi.stubGlobal("fetch", (url: string) => {
    asked.push(new URL(url, "http://here"));
    return Promise.resolve().then(answers.shift() ?? page({}));
  });
});
afterEach(() => {
  cleanup();
  vi.useRealTimers();
  vi.unstubAllGlobals();
  history.replaceState(null, "", "/");
});
const later = (milliseconds: number) => act(async () => void (await vi.advanceTimersByTimeAsync(milliseconds)));
const query = () => Object.fromEntries((asked[asked.length - 1] as URL).searchParams);

test("lines of all ranks are shown as text, and new ones as they come", async () => {
  answers.push(page({ lines: [line(990, 3, HOSTILE), line(991, null, "agent \\x1b[31m")], until: 1000 }));
  const { getByRole, container } = render(<Logs page={jobPage()} />);
  await later(0);
  expect(asked[0]?.pathname).toBe("/api/logs/default/train");
  const lines = getByRole("region", { name: "Lines" });
  expect(lines.textContent).toContain(HOSTILE);
  expect(container.querySelector("img, script")).toBeNull();
  expect(lines.textContent).toContain("train-pods-0agent \\x1b[31m");
  answers.push(page({ lines: [line(990, 3, HOSTILE), line(1001, 3, "new")], until: 1002 }));
  await later(FOLLOW);
  expect(query()).toEqual({ since: "985" });
  expect(lines.querySelectorAll(".line")).toHaveLength(3);
  const options = { rules: { "color-contrast": { enabled: false }, region: { enabled: false } } };
  vi.useRealTimers();
  expect((await axe.run(container, options)).violations).toEqual([]);
});

test("a search sends the text, the pattern and the rank", async () => {
  const { getByLabelText, getByRole } = render(<Logs page={jobPage()} />);
  await later(0);
  fireEvent.input(getByLabelText("Text or pattern"), { target: { value: "loss=nan|inf" } });
  fireEvent.click(getByLabelText("Pattern (RE2)"));
  fireEvent.input(getByLabelText("Rank"), { target: { value: "0" } });
  fireEvent.submit(getByRole("search"));
  await later(0);
  expect(query()).toEqual({ find: "loss=nan|inf", pattern: "1", rank: "0" });
});

test("older lines are loaded before the others until there are none", async () => {
  answers.push(page({ lines: [line(990, 0, "late")], older: 900 }));
  const { getByRole, queryByRole } = render(<Logs page={jobPage()} />);
  await later(0);
  answers.push(page({ lines: [line(800, 0, "early")] }));
  fireEvent.click(getByRole("button", { name: "Older lines" }));
  await later(0);
  expect(query()).toEqual({ before: "900" });
  const texts = [...getByRole("region", { name: "Lines" }).querySelectorAll(".text")].map((one) => one.textContent);
  expect(texts).toEqual(["early", "late"]);
  expect(queryByRole("button", { name: "Older lines" })).toBeNull();
});

test("a link of an incident shows the lines before it, and follows nothing", async () => {
  history.replaceState(null, "", "/jobs/default/train/logs?rank=3&before=1000.5");
  const { getByRole } = render(<Logs page={jobPage()} />);
  await later(FOLLOW * 3);
  expect(asked).toHaveLength(1);
  expect(query()).toEqual({ rank: "3", before: "1000.5" });
  fireEvent.click(getByRole("button", { name: "Newest lines" }));
  await later(0);
  expect(query()).toEqual({ rank: "3" });
});

test("a refusal is shown, and lines stay when the server is away", async () => {
  answers.push(() => Response.json({ problem: "your account may not" }, { status: 403 }));
  const { getByRole, queryByRole } = render(<Logs page={jobPage()} />);
  await later(0);
  within(getByRole("alert")).getByText("your account may not");
  answers.push(page({ lines: [line(1, 0, "here")] }));
  await later(FOLLOW);
  expect(queryByRole("alert")).toBeNull();
  answers.push(() => {
    throw new TypeError("no network");
  });
  await later(FOLLOW);
  within(getByRole("alert")).getByText("The server did not answer.");
  within(getByRole("region", { name: "Lines" })).getByText("here");
});

test("lines that came faster than they are shown are told", async () => {
  answers.push(page({ lines: [line(990, 0, "a")], until: 1000 }));
  const { container } = render(<Logs page={jobPage()} />);
  await later(0);
  answers.push(page({ lines: [line(1001, 0, "b")], older: 1001, until: 1002 }));
  await later(FOLLOW);
  expect(container.textContent).toContain("Lines came faster");
});
