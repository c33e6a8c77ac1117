import { expect, test } from "vitest";
import { cellText, levelsOf, type Measure } from "../src/heat_map";
import { heatMap } from "./samples";

function levels(measure: Measure, change: Parameters<typeof heatMap>[0]) {
  return levelsOf(heatMap(change), measure);
}

test("a rank that is silent for longer than usual has the worst colour", () => {
  expect(levels("silence", { silenceShares: [0.1, 0.5, 0.7, 4] })).toEqual([0, 0, 1, 4]);
  expect(levels("silence", { silenceShares: [null, 1, 1.2, 1.4], silenceSeconds: [null, 1, 1, 1] })).toEqual([
    null, 2, 3, 4,
  ]);
});

test("a rank that is learning is not late", () => {
  expect(levels("silence", { silenceShares: [null, null, null, null] })).toEqual([0, 0, 0, 0]);
});

test("steps behind, time per step and phase show the straggler", () => {
  expect(levels("step", { behind: [0, 1, 2, 40] })).toEqual([0, 0, 1, 4]);
  // Fast ranks make many steps between two looks at them.
  expect(levels("step", { behind: [0, 400, 900, 4000], stepsApart: 501 })).toEqual([0, 0, 1, 3]);
  expect(levels("time", { stepSeconds: [0.2, 0.2, 0.21, 0.6] })).toEqual([0, 0, 0, 4]);
  expect(levels("phase", { phases: ["train", "train", "eval", "train"] })).toEqual([0, 0, 2, 0]);
  expect(levels("time", { stepSeconds: [null, null, null, null] })).toEqual([null, null, null, null]);
});

test("an alarm is the worst in every respect, and a cell without a report is none", () => {
  for (const measure of ["silence", "step", "time", "phase"] as const) {
    expect(levels(measure, { alarms: [0, 1, 0, 0], reported: [1, 1, 0, 1] })).toEqual([0, 4, null, 0]);
  }
});

test("a cell is told in words", () => {
  expect(cellText(heatMap({ behind: [0, 0, 3, 0], alarms: [0, 0, 1, 0] }), 2)).toBe(
    "rank 2: phase train, step 50, 3 steps behind, 0.200 s a step, silent for 0.100 s, 2 % of the usual, 1 alarm",
  );
  const large = heatMap({ ranks: 62, ranksPerCell: 16, reported: [16, 16, 16, 0] });
  expect(cellText(large, 1)).toMatch(/^ranks 16 to 31: phase train/);
  expect(cellText(large, 3)).toBe("ranks 48 to 61: no report");
});
