import { expect, test } from "vitest";
import { age, percent, short, span } from "../src/format";

test("durations are as the commands write them", () => {
  expect([0.3214, 12.34, 290, 7380, 273600].map(span)).toEqual(["0.321 s", "12.3 s", "4m 50s", "2h 03m", "3d 04h"]);
});

test("only what lost nothing has 100 %", () => {
  expect([1, 0.99999, 0.5, 0, null].map(percent)).toEqual(["100.0%", "99.9%", "50.0%", "0.0%", "–"]);
});

test("numbers have three digits that count", () => {
  expect([4.87654, 12345.6, 0.000012345, 0, null].map(short)).toEqual(["4.88", "12,346", "0.0000123", "0", "–"]);
});

test("ages are as kubectl shows them", () => {
  const now = Date.parse("2026-11-29T12:00:00Z");
  expect(
    ["2026-11-29T11:59:01Z", "2026-11-29T11:57:00Z", "2026-11-29T09:00:00Z", "2026-11-20T12:00:00Z"].map((one) =>
      age(one, now),
    ),
  ).toEqual(["59s", "3m", "3h", "9d"]);
});
